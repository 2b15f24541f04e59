"""What README and docs quote of results, made of the result files alone; see `__main__`."""
