"""The checksum of TensorBoard's files, CRC-32C, a block of bytes at a time.

A checksum is linear: that of a block is the exclusive or of what each of its bytes contributes, which depends on the
byte and on how many come behind it. A table of that turns a block into one look-up by NumPy; byte by byte in Python
takes several times as long, and was most of what TensorBoard cost a run.
"""

from functools import cache

import numpy as np

POLYNOMIAL = 0x82F63B78
BLOCK = 256
"""Bytes of a block; its table takes a kilobyte for each."""
LITTLE = 64
"""Bytes up to which the plain way is quicker."""


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data`."""
    if len(data) <= LITTLE:
        return _plain(data)
    state, table = 0xFFFFFFFF, _table()
    for start in range(0, len(data), BLOCK):
        block = np.frombuffer(data[start : start + BLOCK], np.uint8).copy()
        carried = np.frombuffer(state.to_bytes(4, "little"), np.uint8)
        block[:4] ^= carried[: len(block)]
        contributions = table[np.arange(BLOCK - len(block), BLOCK), block]
        state = int(np.bitwise_xor.reduce(contributions)) ^ state >> 8 * min(len(block), 4)
    return state ^ 0xFFFFFFFF


def _plain(data: bytes) -> int:
    state, last = 0xFFFFFFFF, _last()
    for byte in data:
        state = last[(state ^ byte) & 0xFF] ^ state >> 8
    return state ^ 0xFFFFFFFF


@cache
def _last() -> list[int]:
    """Return what each byte contributes as the last of a block."""
    row: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = row >> 1 ^ np.where(row & 1, np.uint32(POLYNOMIAL), np.uint32(0))
    return [int(entry) for entry in row]


@cache
def _table() -> np.ndarray:
    """Return what each byte contributes, `[BLOCK, 256]`, by its place in a block."""
    last = np.array(_last(), np.uint32)
    rows = [last]
    for _ in range(BLOCK - 1):
        rows.append(rows[-1] >> 8 ^ last[rows[-1] & 0xFF])
    return np.stack(rows[::-1])
