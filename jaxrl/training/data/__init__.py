"""Data sets: read, checked, written, and collected."""
