"""Resume: continues a run from a commit.

If the pages of the new run are cut as those of the commit, its slabs are adopted: pages at home on NVMe are
used where they lie, and the others are read from there. Otherwise all arrays are streamed into new slabs, and
the old ones stay whole until the first commit of the new run. On several ranks, each streams what it keeps
now, from its own part of the commit and from the parts of others (continued_commit.py).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import CommitSource, ReadablePart
from infinity.checkpoint.manifest import BLOCK, VALUES
from infinity.checkpoint.restore import ranges_at_home
from infinity.layout.chunks import Division
from infinity.layout.shards import PageShard, kept_chunks, kept_pieces
from infinity.pages.home import Home
from infinity.pages.optimizer_page import States
from infinity.pages.parts import UNKNOWN, Part, block_count, parameter_parts, state_parts
from infinity.pages.store import Store
from infinity.planning.plan import Plan
from infinity.tiers.link import Transfer
from infinity.tiers.slab import slab_paths

_READS = 8
"""Number of parts that are read to their homes in memory at a time."""


def division_of(saved: SavedCommit) -> Division:
    """The units and chunks of a commit, which a plan prefers."""
    units = tuple((unit.name, unit.parameters) for unit in saved.manifest.units)
    return Division(units, saved.manifest.chunk_elements)


def is_cut_alike(saved: SavedCommit, plan: Plan) -> bool:
    """Whether the plan's pages are cut as those of the commit, so that its slabs can be adopted."""
    manifest, rule, share = saved.manifest, plan.rule, plan.share
    assert rule is not None and plan.slab_layout is not None
    if manifest.rule is None or manifest.volume.nbytes < plan.slab_layout.nbytes:
        return False
    there = manifest.rule.name, manifest.rule.moments, manifest.rule.states, manifest.rule.averaged is None
    if (rule.name, rule.moments, rule.states, rule.average is None) != there:
        return False
    layouts = {each.names[0]: each for unit in plan.layout.units for each in unit.parameters}
    forms = [
        (name, tuple(each.shape), tuple(each.stride), each.dtype, each.trainable)
        for name, each in layouts.items()
    ]
    saved_forms = [
        (each.names[0], each.shape, each.stride, each.torch_dtype, each.trainable)
        for each in manifest.parameters
    ]
    here = share.rank, share.ranks, plan.layout.chunk_elements, forms
    if here != (manifest.rank, manifest.world_size, manifest.chunk_elements, saved_forms):
        return False
    stored = _StoredParts(saved)
    held = [stored.held(part) for part in _planned_parts(plan) if part.committed]
    if None in held:
        return False
    found = sum(len(each.blocks) for each in held if each is not None)
    return found == sum(len(each.arrays) for one in manifest.parameters for each in one.ranges)


def _planned_parts(plan: Plan) -> Iterator[Part]:
    """The parts that a rank commits by a plan, before they have homes."""
    images, share, nowhere = plan.slab_layout, plan.share, Home.of_nothing()
    assert images is not None
    for unit, layout in enumerate(plan.layout.units):
        kept = tuple(kept_chunks(layout, share, whole=share.whole_states))
        formats = [plan.state_format(unit, chunk) for chunk in range(len(layout.chunks))]
        begun = [False] * len(formats)
        yield from parameter_parts(PageShard(layout, share), images.parameters[unit], nowhere)
        yield from state_parts(layout, formats, images.states[unit], nowhere, begun=begun, kept=kept)


class _HeldPart(NamedTuple):
    """A part as a commit holds it."""

    slot: int
    arrays: set[str]
    """The arrays that have values there."""
    blocks: list[tuple[int, int, int]]
    """(index in `Part.checksums`, number, index in the commit's table) of blocks that have checksums."""


class _StoredParts:
    """Finds parts in a commit."""

    def __init__(self, saved: SavedCommit) -> None:
        self._ranges = {
            (entry.names[0], each.first): each for entry in saved.manifest.parameters for each in entry.ranges
        }

    def held(self, part: Part) -> _HeldPart | None:
        """What the commit has of a part; None if its arrays do not lie in one of the part's slots."""
        starts, arrays, blocks, at = set(), set(), [], 0
        for (start, nbytes, block), label in zip(part.segments.tolist(), part.labels, strict=True):
            count, within = -(-nbytes // block), self._ranges.get((label.parameter, label.first))
            if within is None or (label.array == VALUES and within.count * block != nbytes * BLOCK):
                return None
            if label.array in within.arrays:
                stored = within.arrays[label.array]
                starts.add(stored.offset - start)
                arrays.add(label.array)
                blocks.append((at, count, stored.checksum))
            at += count
        if len(starts) > 1 or not starts <= {*part.slots}:
            return None
        return _HeldPart(part.slots.index(starts.pop()) if starts else 0, arrays, blocks)


def has_all_kept(saved: SavedCommit, plan: Plan) -> bool:
    """Whether a rank's part of a commit has all elements that the rank keeps by a plan. Parameters that
    do not fit the commit are left to `restore`.
    """
    by_name = {name: each for each in saved.manifest.parameters for name in each.names}
    source = CommitSource([ReadablePart(saved, lambda memory, offset: None)])
    for unit in plan.layout.units:
        shard = PageShard(unit, plan.share)
        pieces = kept_pieces(unit, plan.share, whole=plan.share.whole_states)
        for index, each in enumerate(unit.parameters):
            entry = by_name.get(each.names[0])
            if entry is None or entry.shape != tuple(each.shape):
                continue
            if each.trainable:
                wanted = [(piece.start, piece.count) for _, piece in pieces(index)]
            else:
                wanted = [(held.first, held.count) for held in ranges_at_home(shard, index)]
            if not all(source.has(entry.names[0], first, count) for first, count in wanted):
                return False
    return True


def lie_in(saved: SavedCommit, directories: Sequence[str | os.PathLike[str]], rank: int = 0) -> bool:
    """Whether all slabs of a commit lie in the directories."""
    paths = [Path(each) for each in directories]
    return all(slab_paths(paths, rank, slab.uuid) for slab in saved.manifest.volume.slabs)


def adopt(saved: SavedCommit, homes: Sequence[Home], states: States, store: Store) -> None:
    """Take over the pages of a commit whose slabs the store has adopted; `is_cut_alike` holds.

    Pages at home on NVMe are neither read nor moved: they are checked when they are first read. Pages at home
    in memory are read and checked now. Parts that other ranks commit have no values afterwards. homes: unit
    -> home of its parameter page. Raises CorruptState and StorageError.
    """
    assert store.durable is not None
    _note_parts(saved, homes, states)
    reads: deque[tuple[Part, Transfer]] = deque()
    for unit in range(len(homes)):
        for home in (homes[unit], states.pages[unit].home):
            for part in home.parts if home.nvme_lease is None else ():
                if not part.nbytes or not part.committed:
                    continue
                if home.in_place:
                    reads.append((part, store.durable.bring(part, home.view(part.start, part.nbytes))))
                else:
                    memory = torch.empty(part.nbytes, dtype=torch.uint8, device="cpu")
                    store.durable.bring(part, memory).wait()
                    store.patch(home, part.start, memory)
                if len(reads) > _READS:
                    reads.popleft()[1].wait()
    for _, read in reads:
        read.wait()


def _note_parts(saved: SavedCommit, homes: Sequence[Home], states: States) -> None:
    """Note what the commit's manifest says: steps, slots, and checksums."""
    entries, stored = {each.names[0]: each for each in saved.manifest.parameters}, _StoredParts(saved)
    table = saved.checksums.astype(np.int64)
    assert saved.manifest.rule is not None
    states.averaged = saved.manifest.rule.averaged or 0
    for unit, home in enumerate(homes):
        page = states.pages[unit]
        for index, each in enumerate(page.layout.parameters):
            parameter = entries[each.names[0]]
            page.steps[index] = parameter.step
            if parameter.moments:
                page.has_moments.add(index)
            if parameter.edited:
                page.edited.add(index)
        for part in (*home.parts, *page.home.parts):
            held = stored.held(part) if part.committed else None
            if held is None:
                continue
            if part.chunk_index is not None and held.arrays - {VALUES, "master", "remainder"}:
                page.begun[part.chunk_index] = True
            part.newest = part.durable = held.slot
            part.checksums = np.full(block_count(part.segments), UNKNOWN)
            for at, count, checksum in held.blocks:
                part.checksums[at : at + count] = table[checksum : checksum + count]
            part.verified = not block_count(part.filled)
