"""Records of volumes: what a commit's manifest says of the slabs of an NVMe tier."""

from __future__ import annotations

import re
from dataclasses import dataclass

from infinity.tiers.striping import Striping
from infinity.tiers.tier import PAGE_ALIGNMENT

_MOST_STRIPES = 65536
_LONGEST_STRIPE = 1 << 40
_MOST_BYTES = 1 << 62


@dataclass(frozen=True)
class SlabRecord:
    """A slab of a volume."""

    uuid: str
    """32 hexadecimal digits, which are part of the file's name, so no directory is stored."""
    nbytes: int
    """Bytes of pages."""
    weight: int
    """Number of stripes of a period that lie in the slab."""

    def check(self) -> None:
        """Raise ValueError, with a text that begins with a field's name, for values that no slab has."""
        if not re.fullmatch("[0-9a-f]{32}", self.uuid):
            raise ValueError("uuid is not 32 hexadecimal digits")
        _check_multiple("nbytes", self.nbytes, _MOST_BYTES)
        if not 0 < self.weight <= _MOST_STRIPES:
            raise ValueError(f"weight is {self.weight}")


@dataclass(frozen=True)
class VolumeRecord:
    """A volume over slabs: all that says where each byte lies."""

    stripe_bytes: int
    slabs: tuple[SlabRecord, ...]
    """The slabs in the volume's order, on which the places of bytes depend."""

    def check(self) -> None:
        """Raise ValueError, with a text that begins with a field's name, for values that no volume has."""
        _check_multiple("stripe_bytes", self.stripe_bytes, _LONGEST_STRIPE)
        if len({slab.uuid for slab in self.slabs}) < len(self.slabs):
            raise ValueError("slabs has a slab twice")
        weight = sum(slab.weight for slab in self.slabs)
        if not 0 < weight <= _MOST_STRIPES:
            raise ValueError(f"slabs has {weight} stripes in a period")
        if not self.nbytes:
            raise ValueError("slabs has no bytes")

    @property
    def striping(self) -> Striping:
        """The pattern of the stripes over the slabs."""
        return Striping(tuple(slab.weight for slab in self.slabs), self.stripe_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the volume, in whole periods."""
        return self.striping.volume_bytes([slab.nbytes for slab in self.slabs])


def _check_multiple(name: str, nbytes: int, most: int) -> None:
    if not 0 < nbytes <= most or nbytes % PAGE_ALIGNMENT:
        raise ValueError(f"{name} is {nbytes}, not a multiple of {PAGE_ALIGNMENT} up to {most}")
