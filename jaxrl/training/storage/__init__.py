"""Storage of runs on disk: directories, checkpoints and log checksums; finding, checking and retraining runs."""
