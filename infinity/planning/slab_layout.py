"""Slab layout: the durable places of parameters and optimizer states in the NVMe volume, for commits. Pure.

A page image is a copy of a page's bytes in the volume. With commits on, everything that training changes has
two images, so that a write never overwrites what the last commit holds: the trainable regions of each
parameter page, and each optimizer page. Frozen regions have one. The layout follows from units, chunks and
formats alone. Where pages are at home makes no difference, so that a run with other budgets finds the same
places. Gradients have no image; the volume holds them behind all images if they are at home on NVMe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.config import round_up
from infinity.layout.chunks import Region, UnitLayout
from infinity.tiers import PAGE_ALIGNMENT


@dataclass(frozen=True)
class PageImages:
    """The places of a page's two images, in bytes from the start of the volume; multiples of 4096."""

    first: int
    """Start of the first image, which holds the whole page."""
    second: int
    """Start of the second image. That of a parameter page holds only the trainable regions, in the order of
    the page and without the frozen regions between them; chunks have the places of `parameter_twins`
    (infinity/pages/twins.py). That of an optimizer page holds the whole page.
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


def slab_layout(units: Sequence[UnitLayout], state_bytes: Sequence[int]) -> SlabLayout:
    """Lay out the images of all pages: for each unit in order, the first and the second image of its
    parameter page, and then those of its optimizer page.

    state_bytes: bytes of each unit's optimizer page, multiples of 4096.
    """
    parameters, states, end = [], [], 0
    for unit, nbytes in zip(units, state_bytes, strict=True):
        parameters.append(PageImages(end, end + unit.nbytes))
        end += unit.nbytes + trainable_bytes(unit)
        states.append(PageImages(end, end + nbytes))
        end += 2 * nbytes
    return SlabLayout(tuple(parameters), tuple(states), end)


def trainable_bytes(unit: UnitLayout) -> int:
    """Bytes of the trainable regions of a unit's parameter page; a multiple of 4096."""
    return sum(region_bytes(region) for region in unit.regions if region.trainable)


def frozen_bytes(unit: UnitLayout) -> int:
    """Bytes of the frozen regions of a unit's parameter page; a multiple of 4096."""
    return sum(region_bytes(region) for region in unit.regions if not region.trainable)


def region_bytes(region: Region) -> int:
    """Bytes that a region takes in its page; a multiple of 4096."""
    return round_up(region.elements * region.dtype.itemsize, PAGE_ALIGNMENT)
