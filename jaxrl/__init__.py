"""jaxrl: a reinforcement learning training loop in JAX."""
