"""Data sets: reading, validating, writing and collecting."""
