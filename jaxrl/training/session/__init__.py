"""Training driven from a loop that the user owns."""
