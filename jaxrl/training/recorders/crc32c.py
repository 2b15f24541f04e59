"""The checksum of TensorBoard's files, CRC-32C, a block of bytes at a time.

A checksum is linear: that of a block is the exclusive or of what each of its bits contributes, which depends only on
how many come behind it. A table of that turns a block into a product and a sum of NumPy; byte by byte in Python takes
ten times as long, and was most of what TensorBoard cost a run. A table by bytes has an eighth of the entries to add,
but 32 times the memory, which is cold whenever a chunk of training has gone before.
"""

from functools import cache

import numpy as np

POLYNOMIAL = 0x82F63B78
BLOCK = 2048
"""Bytes of a block: most records are one. Its table takes 32 bytes for each."""


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data`."""
    state, table = 0xFFFFFFFF, _table()
    for start in range(0, len(data), BLOCK):
        block = np.frombuffer(data[start : start + BLOCK], np.uint8).copy()
        carried = np.frombuffer(state.to_bytes(4, "little"), np.uint8)
        block[:4] ^= carried[: len(block)]
        bits = np.unpackbits(block, bitorder="little").astype(np.uint32)
        bits *= table[len(table) - len(bits) :]
        state = int(np.bitwise_xor.reduce(bits)) ^ state >> 8 * min(len(block), 4)
    return state ^ 0xFFFFFFFF


@cache
def _table() -> np.ndarray:
    """Return what each bit contributes, `[8 * BLOCK]`, those of the last byte at the end, lowest first."""
    state, table = 1, []
    for _ in range(8 * BLOCK):
        state = state >> 1 ^ POLYNOMIAL * (state & 1)
        table.append(state)
    return np.array(table[::-1], np.uint32)
