"""Buffers: from transitions to batches."""

from jaxrl.buffers.base import Buffer
from jaxrl.buffers.prioritised import prioritised
from jaxrl.buffers.uniform import uniform

__all__ = ["Buffer", "prioritised", "uniform"]
