"""Programs compiled for devices that are not at hand, and what they are made of: figures without noise."""
