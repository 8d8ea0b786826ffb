"""Blobs: byte strings beside a JSON text, which refers to each by its offset, length and CRC-32C."""

from __future__ import annotations

from infinity.checkpoint.json_nodes import Node
from infinity.checksum import crc32c

Reference = list[int]
"""A blob in JSON: [distance from the first blob, length, CRC-32C], distance and length in bytes."""


class Blobs:
    """Byte strings one behind the other: a new series that grows by `add`, or one that was read from a file.

    data: the bytes of a series that was read, which are not copied; None for a new, empty series.
    """

    def __init__(self, data: bytes | memoryview | None = None) -> None:
        new: bytearray | memoryview = bytearray()
        self._data = new if data is None else memoryview(data).toreadonly()

    @property
    def nbytes(self) -> int:
        """Length of the series in bytes."""
        return len(self._data)

    def add(self, data: bytes | bytearray | memoryview) -> Reference:
        """Append a blob to a new series, and return the reference to it. data: contiguous bytes."""
        assert isinstance(self._data, bytearray), "a series that was read does not grow"
        view = memoryview(data)
        reference = [len(self._data), view.nbytes, crc32c(view)]
        self._data += view
        return reference

    def content(self) -> memoryview:
        """All bytes of the series, not copied. A new series must not grow while the result is in use."""
        return memoryview(self._data).toreadonly()

    def get(self, reference: Node) -> memoryview:
        """The blob to which `reference` refers, not copied.

        Raises CorruptState if the place is no reference, goes past the end, or the CRC is another.
        """
        offset, nbytes, crc = self.bounds(reference)
        found = self.content()[offset : offset + nbytes]
        if crc32c(found) != crc:
            reference.fail("refers to bytes with another checksum")
        return found

    def bounds(self, reference: Node) -> tuple[int, int, int]:
        """The offset, length and CRC-32C in `reference`, of which offset and length lie in the series."""
        offset, nbytes, crc = reference.tuple_of(3)
        start = offset.integer(0, self.nbytes)
        return start, nbytes.integer(0, self.nbytes - start), crc.integer(0, 0xFFFFFFFF)
