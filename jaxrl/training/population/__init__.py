"""Training a population: its members side by side, each a run of its own."""
