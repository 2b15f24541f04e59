"""Training from the user's own loop."""
