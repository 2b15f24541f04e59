"""Numbers and histograms as TensorBoard's summaries, straight in the bytes of protocol buffers.

Python's objects for them, one a number, took as long as all else that is done with a row. A summary
is its values one behind the other, whoever made them: texts and pictures are still made by these objects.
"""

import struct
import time
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
VALUE, TAG, SIMPLE_VALUE, HISTO = b"\x0a", b"\x0a", b"\x15", b"\x2a"
"""Keys of the fields in `summary.proto`: its number, times eight, and how it is stored."""
BUCKET_LIMIT, BUCKET = b"\x32", b"\x3a"
SUMS = struct.Struct("<BdBdBdBdBd")
"""Fields 1 to 5 of a histogram, each with its key: min, max, num, sum and sum of squares."""


def scalars(numbers: Mapping[str, float]) -> bytes:
    """Return numbers by their tags as a summary; in float32, where those that are too large are infinite."""
    layout, heads = _layout(tuple(numbers))
    try:
        return layout.pack(*chain.from_iterable(zip(heads, numbers.values(), strict=True)))
    except OverflowError:
        within = [x if abs(x) <= LARGEST else x * float("inf") for x in numbers.values()]
        return layout.pack(*chain.from_iterable(zip(heads, within, strict=True)))


@lru_cache(maxsize=64)
def _layout(tags: tuple[str, ...]) -> tuple[struct.Struct, list[bytes]]:
    """Return how to pack numbers of these tags, and what stands before each of them."""
    named = [field(TAG, tag.encode()) + SIMPLE_VALUE for tag in tags]
    heads = [VALUE + varint(len(name) + 4) + name for name in named]
    return struct.Struct("<" + "".join(f"{len(head)}sf" for head in heads)), heads


def bars(tag: str, values: np.ndarray, counts: np.ndarray, edges: np.ndarray) -> bytes:
    """Return `values` `[n]`, counted as `counts` `[b]` between `edges` `[b + 1]`, as a summary."""
    sums = (values.min(), values.max(), len(values), values.sum(), values @ values)
    # A bucket ends at its limit, so the first, which is empty, is there for where the second one begins.
    buckets = bytes(8) + counts.astype("<f8").tobytes()
    histo = SUMS.pack(*chain.from_iterable(zip((0x09, 0x11, 0x19, 0x21, 0x29), sums, strict=True)))
    histo += field(BUCKET_LIMIT, edges.astype("<f8").tobytes()) + field(BUCKET, buckets)
    return field(VALUE, field(TAG, tag.encode()) + field(HISTO, histo))


def event(step: int, *summaries: bytes) -> bytes:
    """Return what these summaries tell of a step, as an event of now."""
    return struct.pack("<BdB", 0x09, time.time(), 0x10) + varint(step) + field(b"\x2a", b"".join(summaries))


def field(key: bytes, data: bytes) -> bytes:
    """Return a field whose length stands before it."""
    return key + varint(len(data)) + data


def varint(number: int) -> bytes:
    """Return a natural number in groups of seven bits, the lowest first."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)
