"""Actors, which step environments on the host: in threads, in processes of this machine, or in workers of Ray."""
