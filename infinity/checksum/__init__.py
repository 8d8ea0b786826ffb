"""Checksum: CRC-32C (Castagnoli) of bytes."""

from __future__ import annotations

import functools


def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """The CRC-32C of `data`, as an unsigned number of 32 bits.

    data: the bytes, contiguous. value: the CRC of the bytes before them, so that a long text can be given
    piece by piece.
    """
    table = _table()
    value ^= 0xFFFFFFFF
    for byte in memoryview(data).cast("B"):
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


@functools.cache
def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901
        table.append(value)
    return tuple(table)
