"""Storage of runs on disk: directories, checkpoints and logs; finding and checking runs."""
