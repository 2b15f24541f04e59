"""A tree of parameters as one vector."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.trees import Array, PyTree
from jaxrl.xla import shaped_for

CUT = 1 << 14
"""Entries of a matrix that is cut out beforehand, at most: larger ones are better copied while other things go on."""


class Shapes(NamedTuple):
    """What the leaves of a tree look like."""

    treedef: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]
    """Shape and dtype of each."""


@partial(jax.tree_util.register_dataclass, data_fields=["vector"], meta_fields=["shapes"])
@dataclass(frozen=True)
class Flat:
    """All leaves of a tree, one after the other, in their widest dtype; a pytree of this one leaf.

    Whatever is done to all parameters alike, such as clipping, moments, a target network, or taking an update back, is
    then one kernel instead of one a leaf. On a GPU each is a launch; on a CPU a crowd of small ones makes XLA hand some
    of them to other threads and wait.
    """

    vector: Array
    shapes: Shapes
    pieces: tuple[Array, ...] = field(default=(), init=False, repr=False, compare=False)
    """Its `matrices`, where they have been cut out of the vector already. No part of the pytree: whatever maps it lets
    go of them."""

    @classmethod
    def of(cls, tree: PyTree) -> Flat:
        """Flatten `tree`."""
        leaves, treedef = jax.tree.flatten(tree)
        shapes = Shapes(treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        dtype, ends = jnp.result_type(*leaves), np.cumsum([leaf.size for leaf in leaves])
        if not shaped_for("cpu"):
            return cls(jnp.concatenate([jnp.ravel(leaf).astype(dtype) for leaf in leaves]), shapes)
        vector = jnp.zeros(ends[-1], dtype)
        # Written in turn, for XLA for CPUs fuses the sums of a gradient into a concatenation, entry by entry; and the
        # largest first, for it turns the first write into a padding, and fuses sums into that as well.
        for leaf, end in sorted(zip(leaves, ends, strict=True), key=lambda pair: -pair[0].size):
            vector = vector.at[end - leaf.size : end].set(jnp.ravel(leaf).astype(vector.dtype))
        return cls(vector, shapes)

    @property
    def tree(self) -> PyTree:
        """The tree again, each leaf of its own shape and dtype."""
        ends = np.cumsum([math.prod(shape) for shape, _ in self.shapes.leaves])
        split = zip(jnp.split(self.vector, ends[:-1]), self.shapes.leaves, strict=True)
        leaves = [x.reshape(shape).astype(dtype) for x, (shape, dtype) in split]
        ready = iter(self.pieces)
        return jax.tree.unflatten(self.shapes.treedef, [next(ready, x) if _worth_cutting(x) else x for x in leaves])

    @property
    def matrices(self) -> tuple[Array, ...]:
        """Small leaves that no kernel reads where they lie in the vector, as it does biases; a population has none."""
        if self.vector.ndim != 1:
            return ()
        return tuple(x for x in jax.tree.leaves(self.tree) if _worth_cutting(x))

    def cut(self, pieces: tuple[Array, ...]) -> Flat:
        """Return the same, with its `matrices` at hand."""
        same = Flat(self.vector, self.shapes)
        object.__setattr__(same, "pieces", pieces)
        return same

    @property
    def norm(self) -> Array:
        """The Euclidean norm, as one dot product."""
        return jnp.sqrt(jnp.vdot(self.vector, self.vector))


def _worth_cutting(leaf: Array) -> bool:
    return leaf.ndim > 1 and leaf.size <= CUT
