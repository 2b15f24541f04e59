"""Trees of arrays as one vector, and back. Plain: a concatenation of the raveled leaves.

An optimizer that treats all parameters alike then takes one kernel, not one per leaf. On a GPU each kernel is a launch;
on a CPU, many small kernels make XLA hand some to other threads and wait.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.trees import Array, PyTree
from jaxrl.xla import shaped_for


def ravel(tree: PyTree) -> Array:
    """Return the leaves of `tree` one after the other, `[P]`, in their widest dtype."""
    leaves = jax.tree.leaves(tree)
    dtype, ends = jnp.result_type(*leaves), np.cumsum([leaf.size for leaf in leaves])
    if not shaped_for("cpu"):
        return jnp.concatenate([jnp.ravel(leaf).astype(dtype) for leaf in leaves])
    vector = jnp.zeros(ends[-1], dtype)
    # Leaves are written one after the other: XLA for CPUs would fuse the sums of a gradient into a concatenation and
    # compute them entry by entry. The largest comes first: XLA turns the first write into a padding, and fuses sums
    # into that as well.
    for leaf, end in sorted(zip(leaves, ends, strict=True), key=lambda pair: -pair[0].size):
        vector = vector.at[end - leaf.size : end].set(jnp.ravel(leaf).astype(dtype))
    return vector


def unravel(vector: Array, like: PyTree) -> PyTree:
    """Return the tree that `ravel` made `vector` `[P]` of, with the shapes and dtypes of `like`."""
    leaves, treedef = jax.tree.flatten(like)
    split = jnp.split(vector, np.cumsum([leaf.size for leaf in leaves])[:-1])
    return jax.tree.unflatten(
        treedef, [x.reshape(leaf.shape).astype(leaf.dtype) for x, leaf in zip(split, leaves, strict=True)]
    )
