"""Buffers, which store transitions and sample batches from them."""

from jaxrl.buffers.base import Buffer
from jaxrl.buffers.dataset import Dataset, Summary, summarise
from jaxrl.buffers.hindsight import hindsight
from jaxrl.buffers.mixed import mix
from jaxrl.buffers.prioritised import prioritised
from jaxrl.buffers.uniform import num_items, read_batch, uniform
