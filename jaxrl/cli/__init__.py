"""The command line: code shared by the front doors, and a run's settings from presets, files and flags."""
