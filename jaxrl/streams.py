"""Numbers that are folded into a key for another stream of random numbers, by the key that they are folded into.

They count down from the largest of 32 bits: a run has fewer iterations, rounds and steps, whose numbers are folded into
the same keys. Numbers of the same key must differ; those of different keys need not.
"""

# --- the stream of iterations of a run, `state.key` -------------------------------------------------------------

RETRY = 2**32 - 1
"""A retry after a rollback; the number of the retry is folded in next."""
ACTORS = 2**32 - 2
"""Actors; the iteration at which they start, and the number of the actor, are folded in next."""
REFILL = 2**32 - 4
"""Exploration that refills a replay buffer; the iteration is folded in next."""
EPOCHS = 2**32 - 5
"""The order of transitions in epochs of offline training."""

# --- the key of the seed ----------------------------------------------------------------------------------------

EVALUATION = 2**32 - 1
"""All evaluations of a run."""
COPY = 2**32 - 3
"""The stream of a member that copies another; the step and the number of the member are folded in next."""

# --- the key of an evaluation -----------------------------------------------------------------------------------

CONFIRMATION = 2**32 - 1
"""The evaluation that confirms a candidate for the best.

The first evaluation consumed the key by splitting it. `fold_in` returns the key that a split would have at this index,
far beyond those that an evaluation uses, hence independent of them.
"""
SAMPLED_ACTIONS = 2**32 - 2
"""Actions that are sampled; the step is folded in next."""

# --- the key of an actor ----------------------------------------------------------------------------------------

PRIME = 2**32 - 2
"""Steps before the first complete transition."""
