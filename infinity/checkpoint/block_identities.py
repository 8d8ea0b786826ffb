"""Block identities: checksums of what the blocks of a commit are, by which its table of checksums is bound.

The table of a data file has for each block the CRC-32C of its bytes, exclusive-or that of its identity: the
commit, the array, the parameter, and the block's first element. So bytes that are exchanged between two
places, or are those of another commit, do not pass, even if their entries in the table come with them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from infinity.checkpoint.manifest import BLOCK, Manifest, blocks
from infinity.checkpoint.typed_json import corrupt
from infinity.checksum import crc32c, crc32c_blocks

_ZEROS = bytes(8)


def block_identities(manifest: Manifest, count: int) -> npt.NDArray[np.uint32]:
    """The CRC-32C of the identity of each block: uint32 (count,), by its index in the table of checksums.

    count: the number of checksums. An entry to which no array refers is 0. Raises CorruptState if the arrays
    refer to checksums past the end of the table, or to more than there are.
    """
    found = np.zeros(count, dtype=np.uint32)
    referred = 0
    for parameter in manifest.parameters:
        of_array: dict[str, int] = {}
        for each in parameter.ranges:
            length = blocks(each.count)
            referred += length * len(each.arrays)
            if referred > count or any(stored.checksum + length > count for stored in each.arrays.values()):
                raise corrupt(
                    f"commit-{manifest.generation}",
                    "goes past the end of the table of checksums, or refers to one twice",
                )
            positions = np.arange(each.first, each.first + each.count, BLOCK, dtype="<i8")
            rows = np.array([(0, positions.nbytes, 8)], dtype=np.int64)
            of_position = crc32c_blocks(torch.from_numpy(positions.view(np.uint8)), rows)
            for array, stored in each.arrays.items():
                if array not in of_array:
                    of_array[array] = _followed(_label(manifest, array, parameter.names[0]))
                found[stored.checksum : stored.checksum + length] ^= of_position ^ np.uint32(of_array[array])
    return found


def _label(manifest: Manifest, array: str, parameter: str) -> bytes:
    """The identity of a block without the 8 bytes of its first element, with which it ends."""
    text = f"{manifest.generation}\n{manifest.created}\n{array}\n{parameter}\n"
    return text.encode("utf-8", "surrogatepass")


def _followed(label: bytes) -> int:
    """By what the CRC-32C of 8 bytes differs from that of `label` followed by the same bytes: a CRC is
    linear, so it is the same for any 8 bytes.
    """
    return crc32c(_ZEROS, crc32c(label)) ^ crc32c(_ZEROS)
