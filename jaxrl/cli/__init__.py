"""The command line: what the front doors share, and how presets, files and flags become the settings of a run."""
