"""All that a run keeps on disk: its directory, checkpoints, the sums of its logs; and how it is found and checked."""
