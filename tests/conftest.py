"""What all tests share: strict JAX settings, and `slow` tests left out unless asked for."""

import jax
import pytest

# The classic bug of losses is `[B]` against `[B, 1]`; NumPy's silent promotion would hide it.
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("-m"):
        return
    skip = pytest.mark.skip(reason="slow: run with -m slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
