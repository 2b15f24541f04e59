"""The command line: code shared by the commands, and a run's settings from presets, files and flags."""
