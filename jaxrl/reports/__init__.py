"""What runs have left on disk, read while they go on and never changed, as tables, curves, files and a page."""
