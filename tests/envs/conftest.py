"""What tests of several suites of environments share."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def ranks_promoted() -> Iterator[None]:
    """Let ranks be promoted, in all threads: the suites' own code relies on it."""
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", "raise")
