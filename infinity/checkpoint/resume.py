"""Resume: continues a run from a commit.

If the pages of the new run are cut as those of the commit, its slabs are adopted: pages at home on NVMe are
used where they lie, and the others are read from there. Otherwise all arrays are streamed into new slabs, and
the old ones stay whole until the first commit of the new run. On several ranks, each streams what it keeps
now, from its own part of the commit and from the parts of others (infinity/checkpoint/moved_parts.py).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from infinity.checkpoint import commit_files
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.manifest import ChunkEntry, ParameterEntry
from infinity.checkpoint.part_ranges import PartRanges
from infinity.checkpoint.record import CODECS, ranges_of
from infinity.checkpoint.restore import ranges_at_home
from infinity.checkpoint.run_state import RunState
from infinity.checkpoint.tensor_files import TORCH_DTYPES
from infinity.errors import ConfigError, IncompatibleCheckpoint
from infinity.layout.division import Division
from infinity.layout.shards import PageShard, kept_chunks, kept_pieces
from infinity.layout.strides import same_order
from infinity.pages.home import Home
from infinity.pages.optimizer_page import States
from infinity.pages.parts import UNKNOWN, Part, block_count
from infinity.pages.store import Store
from infinity.planning.placement import Kind
from infinity.planning.plan import Plan
from infinity.system.disk_files import DiskFiles
from infinity.tiers.link import Transfer
from infinity.tiers.slab import slab_paths

_READS = 8
"""Number of parts that are read to their homes in memory at a time."""


def read_newest(directory: Path, files: DiskFiles) -> SavedCommit:
    """The newest whole commit of a directory.

    Raises ConfigError if there is none, and the errors of `commit_files.newest` and `check_loadable`.
    """
    saved = commit_files.newest(directory, files)
    if saved is None:
        raise no_commit(directory)
    check_loadable(saved)
    return saved


def no_commit(directory: Path) -> ConfigError:
    """The error for a directory without commits."""
    return ConfigError(
        f"There is no commit in {directory}.",
        "Leave resume= out to begin anew, or give another directory.",
    )


def check_loadable(saved: SavedCommit) -> None:
    """Check that this infinity can load a commit. Raises IncompatibleCheckpoint."""
    for name, version in saved.manifest.codecs.items():
        if CODECS.get(name) != version:
            raise IncompatibleCheckpoint(
                f"Commit {saved.manifest.generation} has version {version} of {name}, and this infinity has "
                f"{CODECS.get(name)}.",
                "Load it with the infinity that wrote it.",
            )


def division_of(saved: SavedCommit) -> Division:
    """The units and chunks of a commit, which a plan prefers."""
    units = tuple((unit.name, unit.parameters) for unit in saved.manifest.units)
    return Division(units, saved.manifest.chunk_elements)


def is_cut_alike(saved: SavedCommit, plan: Plan) -> bool:
    """Whether the plan's pages are cut as those of the commit, so that its slabs can be adopted."""
    manifest = saved.manifest
    if (manifest.rank, manifest.world_size) != (plan.share.rank, plan.share.ranks):
        return False
    assert plan.rule is not None
    rule = plan.rule.name, plan.rule.moments, plan.rule.states
    if manifest.rule is None or rule != (manifest.rule.name, manifest.rule.moments, manifest.rule.states):
        return False
    if (plan.rule.average is None) != (manifest.rule.averaged is None):
        return False
    if manifest.chunk_elements != plan.layout.chunk_elements or len(manifest.units) != len(plan.layout.units):
        return False
    entries = {each.names[0]: each for each in manifest.parameters}
    return all(_is_unit_alike(saved, entries, plan, unit) for unit in range(len(plan.layout.units)))


def _is_unit_alike(saved: SavedCommit, entries: Mapping[str, ParameterEntry], plan: Plan, unit: int) -> bool:
    """Do what `is_cut_alike` does for one unit. entries: the commit's parameters by canonical name."""
    entry, layout, places = saved.manifest.units[unit], plan.layout.units[unit], plan.slab_layout
    assert places is not None
    kept = list(kept_chunks(layout, plan.share, whole=plan.share.whole_states))
    sizes = plan.page_bytes(unit, Kind.PARAMETER), plan.page_bytes(unit, Kind.OPTIMIZER), len(kept)
    if sizes != (entry.nbytes, entry.state_bytes, len(entry.chunks)):
        return False
    if places.parameters[unit].first != entry.parameter_places[0]:
        return False
    if entry.state_bytes and places.states[unit].first != entry.state_places[0]:
        return False
    if entry.parameters != tuple(each.names[0] for each in layout.parameters):
        return False
    here = [(tuple(each.shape), tuple(each.stride), each.dtype, each.trainable) for each in layout.parameters]
    there = [entries[name] for name in entry.parameters]
    return here == [(each.shape, each.stride, TORCH_DTYPES[each.dtype], each.trainable) for each in there]


def has_all_kept(saved: SavedCommit, plan: Plan) -> bool:
    """Whether a rank's part of a commit has all elements that the rank keeps by a plan, or reads to put them
    in another order. Parameters that do not fit the commit are left to `restore`.
    """
    by_name = {name: each for each in saved.manifest.parameters for name in each.names}
    ranges = PartRanges.of(saved.manifest)
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
            if wanted and not same_order(entry.shape, entry.stride, each.stride):
                wanted = [(0, each.numel)]
            if not all(ranges.has(entry.names[0], first, count) for first, count in wanted):
                return False
    return True


def lie_in(saved: SavedCommit, directories: Sequence[str | os.PathLike[str]], rank: int = 0) -> bool:
    """Whether all slabs of a commit lie in the directories."""
    paths = [Path(each) for each in directories]
    return all(slab_paths(paths, rank, slab.uuid) for slab in saved.manifest.volume.slabs)


def adopt(
    saved: SavedCommit, shards: Sequence[PageShard], homes: Sequence[Home], states: States, store: Store
) -> None:
    """Take over the pages of a commit whose slabs the store has adopted; `is_cut_alike` holds.

    Pages at home on NVMe are neither read nor moved: they are checked when they are first read. Pages at home
    in memory are read and checked now. Parts that other ranks commit have no values afterwards. shards,
    homes: unit -> shard and home of its parameter page. Raises CorruptState and StorageError.
    """
    assert store.durable is not None
    _note_parts(saved, shards, homes, states)
    reads: deque[tuple[Part, Transfer]] = deque()
    for unit in range(len(shards)):
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


def _note_parts(
    saved: SavedCommit, shards: Sequence[PageShard], homes: Sequence[Home], states: States
) -> None:
    """Note what the commit's manifest says: steps, slots, and checksums."""
    entries = {each.names[0]: each for each in saved.manifest.parameters}
    table = saved.checksums.astype(np.int64)
    assert saved.manifest.rule is not None
    states.averaged = saved.manifest.rule.averaged or 0
    for unit, (shard, entry) in enumerate(zip(shards, saved.manifest.units, strict=True)):
        page = states.pages[unit]
        chunks = dict(zip(page.kept, entry.chunks, strict=True))
        for chunk_index, chunk in chunks.items():
            page.begun[chunk_index] = chunk.begun
        for parts, of_states in ((homes[unit].parts, False), (page.home.parts, True)):
            for part in parts:
                if part.committed:
                    of_part = None if part.chunk_index is None else chunks[part.chunk_index]
                    _note_part(part, of_part, of_states=of_states)
        for index, each in enumerate(shard.layout.parameters):
            parameter = entries[each.names[0]]
            page.steps[index] = parameter.step
            if parameter.moments:
                page.has_moments.add(index)
            if parameter.edited:
                page.edited.add(index)
            here = ranges_of(shard, homes[unit].parts, page, index)
            for ours, theirs in zip(here, parameter.ranges, strict=True):
                for array in ours.arrays:
                    place = theirs.places.get(array.name)
                    if place is not None:
                        count = -(-array.nbytes // array.block_bytes)
                        found = table[place.checksum : place.checksum + count]
                        array.part.checksums[array.checksum : array.checksum + count] = found


def _note_part(part: Part, chunk: ChunkEntry | None, *, of_states: bool) -> None:
    """Note the place of a part that a commit holds. chunk: None for a frozen part."""
    slot = 0 if chunk is None else chunk.state_slot if of_states else chunk.parameter_slot
    part.newest = part.durable = slot
    part.checksums = np.full(block_count(part.segments), UNKNOWN)
    part.verified = not block_count(part.filled)


def run_state(saved: SavedCommit) -> RunState:
    """What a commit says of the run that is in no page."""
    return RunState(saved.manifest.run, saved.tensors)
