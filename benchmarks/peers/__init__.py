"""What a user would pick instead, on equal settings: each in an environment of its own, since their pins clash."""
