"""Slab layout: the places of parameters and optimizer states that have several in the NVMe volume. Pure.

A page image is a copy of a page's bytes in the volume. With commits on, the trainable regions of parameter
pages and all optimizer pages have two images, so that a write never overwrites what the last commit holds;
frozen regions have one. Speculative updates need one more image, since they overwrite neither what a commit
holds nor the newest bytes. Without commits only pages at home on NVMe have images, for such updates alone.

With commits the layout follows from units, chunks, formats and the number of images alone, so that a run with
other budgets finds the same places. Gradients have no image; if at home on NVMe, they lie behind all images.

Each of several ranks has images of its own homes alone. Where a home has the whole page, only the chunks that
the rank updates have several images; the other chunks are in the commits of their owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.layout.chunks import UnitLayout
from infinity.layout.shards import PageShard, Share
from infinity.planning.placement import Homes, Kind
from infinity.tiers import Tier


@dataclass(frozen=True)
class PageImages:
    """The starts of a page's images, in bytes from the start of the volume; multiples of 4096."""

    first: int
    """The start of the image that is as long as the page's home."""
    others: tuple[int, ...]
    """The starts of the other images. For a parameter page they hold only the chunks that the rank updates,
    in the order of the page and without gaps (`parameter_parts` in infinity/pages/parts.py).
    """


@dataclass(frozen=True)
class SlabLayout:
    """The places in the volume of the images of all parameter and optimizer pages."""

    parameters: tuple[PageImages, ...]
    """The images of each unit's parameter page, by index of the unit. `states` has those of optimizer pages.
    """
    states: tuple[PageImages, ...]
    nbytes: int
    """Bytes of all images, which lie without gaps; a multiple of 4096."""


def slab_layout(
    units: Sequence[UnitLayout],
    share: Share,
    state_bytes: Sequence[int],
    images: int = 2,
    homes: Homes | None = None,
) -> SlabLayout:
    """Lay out the images, copies in the volume, of all parameter pages and optimizer pages.

    Units follow one another; each has the images of its parameter page, then those of its optimizer page.
    share: the rank whose pages these are. state_bytes: bytes of each unit's optimizer page on that rank.
    images: the number of images of trained bytes. homes: if given, only pages at home on NVMe have images.
    """
    parameters, states, end = [], [], 0
    for index, unit in enumerate(units):
        there = {kind for kind in Kind if homes is None or homes[index][kind] is Tier.NVME}
        home, trained = PageShard(unit, share).nbytes, trained_bytes(unit, share)
        if Kind.PARAMETER not in there:
            home = trained = 0
        parameters.append(PageImages(end, tuple(end + home + n * trained for n in range(images - 1))))
        end += home + (images - 1) * trained
        nbytes = state_bytes[index] if Kind.OPTIMIZER in there else 0
        states.append(PageImages(end, tuple(end + n * nbytes for n in range(1, images))))
        end += images * nbytes
    return SlabLayout(tuple(parameters), tuple(states), end)


def trained_bytes(unit: UnitLayout, share: Share) -> int:
    """Bytes of the chunks of a unit's parameter page that a rank updates; a multiple of 4096."""
    return share.kept(trainable_bytes(unit), whole=share.whole_states)


def trainable_bytes(unit: UnitLayout) -> int:
    """Bytes of the trainable regions of a unit's parameter page; a multiple of 4096."""
    return sum(region.nbytes for region in unit.regions if region.trainable)


def frozen_bytes(unit: UnitLayout, share: Share) -> int:
    """Bytes of frozen regions that a rank's home of the unit's parameter page holds; a multiple of 4096."""
    frozen = sum(region.nbytes for region in unit.regions if not region.trainable)
    return share.kept(frozen, whole=share.whole_parameters)
