"""Population training: many members at once, each of them a run."""
