"""Slab layout: the durable places of parameters and optimizer states in the NVMe volume, for commits. Pure.

A page image is a copy of a page's bytes in the volume. With commits on, everything that training changes has
two images, so that a write never overwrites what the last commit holds: the trainable regions of each
parameter page, and each optimizer page. Frozen regions have one. The layout follows from units, chunks and
formats alone. Where pages are at home makes no difference, so that a run with other budgets finds the same
places. Gradients have no image; the volume holds them behind all images if they are at home on NVMe.

One of several ranks has images of its homes. Of a home with the whole page only the chunks that the rank
updates have two; the other chunks are in the commits of their owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.config import round_up
from infinity.layout.chunks import Region, UnitLayout
from infinity.layout.shards import PageShard, Share
from infinity.tiers import PAGE_ALIGNMENT


@dataclass(frozen=True)
class PageImages:
    """The places of a page's two images, in bytes from the start of the volume; multiples of 4096."""

    first: int
    """Start of the first image, which has as many bytes as the home of the page."""
    second: int
    """Start of the second image. That of a parameter page holds only the chunks that the rank updates, in the
    order of the page and without what lies between them; chunks have the slots of `parameter_parts`
    (infinity/pages/parts.py). That of an optimizer page holds the whole page.
    """


@dataclass(frozen=True)
class SlabLayout:
    """The images of all parameter pages and optimizer pages in the volume."""

    parameters: tuple[PageImages, ...]
    """The images of each unit's parameter page, by index of the unit."""
    states: tuple[PageImages, ...]
    """The images of each unit's optimizer page, by index of the unit. Both images of an optimizer page
    without bytes are empty.
    """
    nbytes: int
    """Bytes of the volume that all images take; a multiple of 4096. The images fill them without gaps."""


def slab_layout(units: Sequence[UnitLayout], share: Share, state_bytes: Sequence[int]) -> SlabLayout:
    """Lay out the images of all pages: for each unit in order, the first and the second image of its
    parameter page, and then those of its optimizer page.

    share: the rank whose pages these are. state_bytes: bytes of each unit's optimizer page on that rank,
    multiples of 4096.
    """
    parameters, states, end = [], [], 0
    for unit, nbytes in zip(units, state_bytes, strict=True):
        home = PageShard(unit, share).nbytes
        parameters.append(PageImages(end, end + home))
        end += home + trained_bytes(unit, share)
        states.append(PageImages(end, end + nbytes))
        end += 2 * nbytes
    return SlabLayout(tuple(parameters), tuple(states), end)


def trained_bytes(unit: UnitLayout, share: Share) -> int:
    """Bytes of the chunks of a unit's parameter page that a rank updates; a multiple of 4096."""
    return share.kept(trainable_bytes(unit), whole=share.whole_states)


def trainable_bytes(unit: UnitLayout) -> int:
    """Bytes of the trainable regions of a unit's parameter page; a multiple of 4096."""
    return sum(region_bytes(region) for region in unit.regions if region.trainable)


def frozen_bytes(unit: UnitLayout, share: Share) -> int:
    """Bytes of the frozen regions that a rank's home of a parameter page has; a multiple of 4096."""
    frozen = sum(region_bytes(region) for region in unit.regions if not region.trainable)
    return share.kept(frozen, whole=share.whole_parameters)


def region_bytes(region: Region) -> int:
    """Bytes that a region takes in its page; a multiple of 4096."""
    return round_up(region.elements * region.dtype.itemsize, PAGE_ALIGNMENT)
