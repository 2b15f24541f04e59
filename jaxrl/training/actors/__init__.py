"""Actors that step host environments: in threads, in local processes, or in Ray workers."""
