"""A tree of parameters as one vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.trees import Array, PyTree
from jaxrl.xla import shaped_for
from jaxrl.xla.products import is_narrow

CUT = 1 << 14
"""Largest matrix, in entries, that is cut out beforehand on CPUs. Larger ones are better copied in parallel with other
work."""


class Shapes(NamedTuple):
    """Structure, shapes and dtypes of a tree's leaves."""

    treedef: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]
    """Shape and dtype of each."""


@partial(jax.tree_util.register_dataclass, data_fields=["vector"], meta_fields=["shapes"])
@dataclass(frozen=True)
class Flat:
    """All leaves of a tree, one after the other, in their widest dtype; a pytree of this one leaf.

    Operations on all parameters alike (clipping, moments, a target network, undoing an update) then take one kernel,
    instead of one per leaf. On a GPU each kernel is a launch; on a CPU, many small kernels make XLA hand some to other
    threads and wait.
    """

    vector: Array
    shapes: Shapes
    pieces: Mapping[int, Array] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Leaves that have already been cut out of the vector, by their place. They are not part of the pytree: mapping
    over it drops them."""

    @classmethod
    def of(cls, tree: PyTree) -> Flat:
        """Flatten `tree`."""
        leaves, treedef = jax.tree.flatten(tree)
        shapes = Shapes(treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        dtype, ends = jnp.result_type(*leaves), np.cumsum([leaf.size for leaf in leaves])
        if not shaped_for("cpu"):
            return cls(jnp.concatenate([jnp.ravel(leaf).astype(dtype) for leaf in leaves]), shapes)
        vector = jnp.zeros(ends[-1], dtype)
        # Leaves are written one after the other: XLA for CPUs would fuse the sums of a gradient into a concatenation
        # and compute them entry by entry. The largest comes first: XLA turns the first write into a padding, and fuses
        # sums into that as well.
        for leaf, end in sorted(zip(leaves, ends, strict=True), key=lambda pair: -pair[0].size):
            vector = vector.at[end - leaf.size : end].set(jnp.ravel(leaf).astype(vector.dtype))
        return cls(vector, shapes)

    @property
    def tree(self) -> PyTree:
        """The tree, each leaf with its own shape and dtype."""
        ends = np.cumsum([math.prod(shape) for shape, _ in self.shapes.leaves])
        split = zip(jnp.split(self.vector, ends[:-1]), self.shapes.leaves, strict=True)
        leaves = [x.reshape(shape).astype(dtype) for x, (shape, dtype) in split]
        return jax.tree.unflatten(self.shapes.treedef, [self.pieces.get(i, x) for i, x in enumerate(leaves)])

    @property
    def matrices(self) -> tuple[Array, ...]:
        """The small matrices, on TPUs all parameters. Unlike biases, no kernel reads them in place within the vector. A
        population has none."""
        if self.vector.ndim != 1:
            return ()
        leaves = jax.tree.leaves(self.tree)
        return tuple(leaves[place] for place in self._places(_worth_cutting))

    def cut(self, pieces: tuple[Array, ...]) -> Flat:
        """Return the same parameters, with their `matrices` already cut out."""
        return self._with(dict(zip(self._places(_worth_cutting), pieces, strict=True)) if pieces else {})

    def cut_matrices(self) -> Flat:
        """Return the same parameters, with all matrices already cut out but those that are read where they lie."""
        if self.vector.ndim != 1:
            return self
        leaves = jax.tree.leaves(self.tree)
        return self._with({i: leaves[i] for i in self._places(lambda shape: len(shape) > 1 and not is_narrow(shape))})

    def _places(self, chosen: Callable[[tuple[int, ...]], bool]) -> list[int]:
        return [place for place, (shape, _) in enumerate(self.shapes.leaves) if chosen(shape)]

    def _with(self, pieces: Mapping[int, Array]) -> Flat:
        same = Flat(self.vector, self.shapes)
        object.__setattr__(same, "pieces", pieces)
        return same

    @property
    def norm(self) -> Array:
        """The Euclidean norm, computed as one dot product."""
        return jnp.sqrt(jnp.vdot(self.vector, self.vector))


def _worth_cutting(shape: tuple[int, ...]) -> bool:
    return shaped_for("tpu") or (len(shape) > 1 and math.prod(shape) <= CUT and not is_narrow(shape))
