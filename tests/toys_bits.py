"""Training states as numbers, and whether two are the same to the bit."""

from typing import Any

import jax
import numpy as np


def numbers(tree: Any) -> Any:
    """Return the tree with NumPy arrays as leaves, keys as their data."""
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), tree)


def same_bits(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(numbers(a)), jax.tree.leaves(numbers(b)), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


def require_same_bits(came: Any, wanted: Any) -> None:
    """Fail, naming the first leaf that differs, unless the trees are equal in their numbers and dtypes."""
    leaves = zip(jax.tree.leaves_with_path(numbers(came)), jax.tree.leaves(numbers(wanted)), strict=True)
    for (path, x), y in leaves:
        assert x.dtype == y.dtype, jax.tree_util.keystr(path)
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))
