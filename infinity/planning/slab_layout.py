"""Slab layout: the durable places of parameters and optimizer states in the NVMe volume, for commits. Pure.

A page image is a copy of a page's bytes in the volume. With commits on, the trainable regions of parameter
pages and all optimizer pages have two images, so that a write never overwrites what the last commit holds;
frozen regions have one. The layout follows from units, chunks and formats alone, so that a run with other
budgets finds the same places. Gradients have no image; if at home on NVMe, they lie behind all images.

Each of several ranks has images of its own homes alone. Where a home has the whole page, only the chunks that
the rank updates have two images; the other chunks are in the commits of their owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.layout.chunks import UnitLayout
from infinity.layout.shards import PageShard, Share


@dataclass(frozen=True)
class PageImages:
    """The starts of a page's two images, in bytes from the start of the volume; multiples of 4096."""

    first: int
    """The start of the image that is as long as the page's home."""
    second: int
    """The start of the other image. For a parameter page it holds only the chunks that the rank updates, in
    the order of the page and without gaps (`parameter_parts` in infinity/pages/parts.py).
    """


@dataclass(frozen=True)
class SlabLayout:
    """The places in the volume of the images of all parameter and optimizer pages. An image is a copy of a
    page's bytes, for commits.
    """

    parameters: tuple[PageImages, ...]
    """The images of each unit's parameter page, by index of the unit. `states` has those of optimizer pages.
    """
    states: tuple[PageImages, ...]
    nbytes: int
    """Bytes of all images, which lie without gaps; a multiple of 4096."""


def slab_layout(units: Sequence[UnitLayout], share: Share, state_bytes: Sequence[int]) -> SlabLayout:
    """Lay out the images, copies in the volume, of all parameter pages and optimizer pages.

    Units follow one another; each has the images of its parameter page, then those of its optimizer page.
    share: the rank whose pages these are. state_bytes: bytes of each unit's optimizer page on that rank.
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
    return sum(region.nbytes for region in unit.regions if region.trainable)


def frozen_bytes(unit: UnitLayout, share: Share) -> int:
    """Bytes of frozen regions that a rank's home of the unit's parameter page holds; a multiple of 4096."""
    frozen = sum(region.nbytes for region in unit.regions if not region.trainable)
    return share.kept(frozen, whole=share.whole_parameters)
