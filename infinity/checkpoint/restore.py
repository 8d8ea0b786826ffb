"""Restore: sets the pages of a runtime to the parameters and optimizer states of a commit.

If the pages of a run are cut as in the commit that it continues, the run adopts the commit's slabs: pages at
home on NVMe are used where they lie, and other pages are read from there. Otherwise, and from a copy of a
run, all arrays are streamed.

[Note: what may differ]
Pages, chunks, units and homes may differ between the run that was saved and the one here. The names, shapes,
dtypes and strides of parameters and the optimizer may not. A parameter that is trainable here, and was frozen
or had no optimizer there, gets only its values: they are its fp32 master, and its states begin anew. A
parameter that was trained there and is frozen here gets only its values, too.

[Note: a rank's ranges]
Each of several ranks reads only what its homes keep: the states of the chunks that it updates, and the ranges
of parameter pages that are at home here. A home of whole pages gets the chunks of other ranks, too, unless
these ranks restore their chunks from the same commit: then the chunks are pulled from them later.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import CommitSource, RankCommit
from infinity.checkpoint.manifest import BLOCK, VALUES, OptimizerRule, ParameterEntry
from infinity.checkpoint.retiled_source import retiled
from infinity.errors import ConfigError, IncompatibleCheckpoint
from infinity.formats.optimizer_rules import AVERAGE
from infinity.layout.chunks import Division, ModelLayout, ParameterLayout, Piece
from infinity.layout.shards import PageShard, kept_chunks, kept_pieces
from infinity.layout.strides import same_order
from infinity.model.materialize import listed
from infinity.pages.edits import EditTracker
from infinity.pages.home import Home
from infinity.pages.optimizer_page import StatePage, States
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.parts import UNKNOWN, Part, block_count, parameter_parts, state_parts
from infinity.pages.store import Store
from infinity.planning.plan import Plan
from infinity.tiers.link import Transfer

_READS = 8
"""Number of parts that are read to their homes in memory at a time."""
WINDOW = 1 << 18
"""The most elements of an array that are restored at a time; a multiple of 4096."""

_SAME = "Load it into the model, the optimizer and the precision with which it was saved."


@dataclass(frozen=True)
class Restored:
    """The parameters whose optimizer states were not restored; see [Note: what may differ]."""

    fresh: tuple[str, ...]
    """Canonical names of the parameters whose states begin anew."""
    left_out: tuple[str, ...]
    """Canonical names of the parameters whose saved states were left out, because they are frozen here."""

    def warn(self, stacklevel: int) -> None:
        """Warn of parameters whose optimizer states begin anew or were left out, if there are any.

        stacklevel: the `stacklevel` with which the caller itself would call `warnings.warn`.
        """
        if self.fresh:
            warnings.warn(
                f"The optimizer states of {listed(list(self.fresh))} begin anew: the checkpoint has none.",
                stacklevel=stacklevel + 1,
            )
        if self.left_out:
            warnings.warn(
                f"The checkpoint's optimizer states of {listed(list(self.left_out))} were left out, because "
                "the parameters are frozen here.",
                stacklevel=stacklevel + 1,
            )


Matched = dict[tuple[int, int], ParameterEntry]
"""(unit, index of a parameter in the unit) -> the saved parameter that fills it."""


def match(source: CommitSource, layout: ModelLayout, states: States | None) -> Matched:
    """Find the saved parameter for each parameter of a model, and check that it can be restored.

    A parameter and a saved one belong together if they have a name in common. layout, states: those of the
    running model; states is None for inference. Raises IncompatibleCheckpoint, with the name of the parameter
    and both values, if parameters are missing on either side or differ in shape, dtype or strides, or if the
    optimizer or the format of its moments differs.
    """
    saved = source.parameters()
    by_name = {name: key for key, each in saved.items() for name in each.names}
    found: Matched = {}
    missing: list[str] = []
    taken: set[str] = set()
    for unit, unit_layout in enumerate(layout.units):
        for index, each in enumerate(unit_layout.parameters):
            keys = {by_name[name] for name in each.names if name in by_name}
            if not keys:
                missing.append(each.names[0])
                continue
            if len(keys) > 1:
                raise IncompatibleCheckpoint(
                    f"{listed(list(each.names))} are one parameter here, and {len(keys)} in the checkpoint.",
                    _SAME,
                )
            if keys & taken:
                there = listed(list(saved[keys.pop()].names))
                raise IncompatibleCheckpoint(
                    f"{there} are one parameter in the checkpoint, and several here.", _SAME
                )
            taken |= keys
            found[unit, index] = saved[keys.pop()]
    _check_names(missing, sorted(saved.keys() - taken))
    for (unit, index), fills in found.items():
        _check(layout.units[unit].parameters[index], fills)
    if states is not None and source.rule is not None:
        _check_optimizer(source.rule, OptimizerRule.of(states))
    return found


def check_held(
    source: CommitSource, layout: ModelLayout, homes: Sequence[Home], states: States | None, store: Store
) -> set[tuple[int, int]]:
    """Find the frozen parameters that cannot be restored, because a commit uses their only place on disk.

    The arguments are those of `restore`. Returns (unit, index of a parameter in the unit) for each of these
    parameters, to be passed to `restore` as `besides`. Raises ConfigError if such a parameter has other
    values in the checkpoint, and the errors of `match`.
    """
    held = set()
    for (unit, index), saved in match(source, layout, states).items():
        each, home = layout.units[unit].parameters[index], homes[unit]
        if not home.parts or each.trainable:
            continue
        ranges = list(ranges_at_home(PageShard(layout.units[unit], store.plan.share), index))
        if all(
            part.free_slot() is not None for at in ranges for part in home.parts.over(at.place, at.place + 1)
        ):
            continue
        held.add((unit, index))
        for place, values in _values(source, saved, ranges):
            here = store.fetch(home, place, values.nbytes)
            if not torch.equal(here, values.view(torch.uint8)):
                raise ConfigError(
                    f"The frozen parameter {each.names[0]} has other values in the checkpoint, and a commit "
                    "holds its only place on disk.",
                    "Load before the first commit, or offload it with requires_grad=True.",
                )
    return held


def restore(
    source: CommitSource,
    layout: ModelLayout,
    homes: Sequence[Home],
    states: States | None,
    store: Store,
    *,
    besides: Collection[tuple[int, int]] = (),
    own_chunks: bool = False,
) -> Restored:
    """Write the parameters and states of a checkpoint to the homes of their pages.

    Only homes are written. So this is called before the model's parameters are converted, or in a running
    model while no update or write is due or under way and no page is on its way; there `show` must follow.

    source: the checkpoint. layout, states, store: the model's; states is None for inference, and then no
    states are restored. homes: unit -> home of its parameter page. besides: (unit, index of a parameter in
    the unit) of the parameters whose values are not written. own_chunks: whether only this rank's chunks of
    trainable parameters are written; see [Note: a rank's ranges]. Returns the parameters whose states were
    not restored; see [Note: what may differ].

    RAM holds some MiB. Raises the errors of `match` before anything is written. Raises StorageError,
    StorageFull, or CorruptState if an array cannot be read or written; then the contents of the pages are a
    mixture.
    """
    found = match(source, layout, states)
    store.link.drain()  # copies of pages on their way to a device still read homes in RAM
    fresh, left_out = [], []
    if states is not None:
        states.averaged = (source.rule.averaged or 0) if source.rule is not None else 0
    for unit, unit_layout in enumerate(layout.units):
        page = None if states is None else states.pages[unit]
        shard = PageShard(unit_layout, store.plan.share)
        for index, each in enumerate(unit_layout.parameters):
            saved = found[unit, index]
            read = functools.partial(source.read, saved.names[0])
            if (unit, index) not in besides:
                own = page.pieces(index) if page is not None and own_chunks and each.trainable else None
                for place, values in _values(source, saved, ranges_at_home(shard, index, own)):
                    store.patch(homes[unit], place, values)
            held = saved.state_arrays(source.rule) if states is not None else ()
            if page is not None and each.trainable:
                _note(page, index, saved)
                for array in held:
                    _write(page, index, read, array.name, store)
                if states is not None and states.keeps_averages and not saved.trainable:
                    _write(page, index, read, VALUES, store, into=AVERAGE)
                if not saved.trainable:
                    fresh.append(each.names[0])
            elif held:
                left_out.append(each.names[0])
        if states is not None and page is not None:
            _begin(states, page, store)
    return Restored(tuple(fresh), tuple(left_out))


def show(pages: Sequence[ParameterPage], edits: EditTracker, store: Store) -> None:
    """Copy the restored values from the homes to the pages that are resident or of which user code has views.

    Called after `restore` in a running model. Views that user code holds then have the new values, and
    autograd refuses to go backward through the old ones. If ranks divide the parameter pages, no home holds a
    whole page and nothing is copied here: `PrefetchEngine.homes_replaced` has evicted the pages, and they are
    fetched again when they are needed.

    pages: all parameter pages, none of them on its way. edits: the model's edit tracker; it is told that the
    new values are not edits. Raises StorageError if a home cannot be read.
    """
    for page in pages:
        memory, home = page.living(), page.home.memory
        elsewhere = memory is not None and (home is None or memory.data_ptr() != home.data_ptr())
        if memory is not None and elsewhere and page.shard.share.whole_parameters:
            store.bring(page.home, memory, page.shard.held)
        for parameter in page.parameters:
            torch.autograd.graph.increment_version(parameter)
        page.acknowledge()
    edits.updated()


@dataclass(frozen=True, slots=True)
class HomeElements:
    """A range of a parameter's elements that is in its page's home."""

    first: int
    count: int
    place: int
    """Bytes from the start of the home to the first element."""


def ranges_at_home(
    shard: PageShard, index: int, pieces: Sequence[tuple[int, Piece]] | None = None
) -> Iterator[HomeElements]:
    """Yield the elements of a parameter that are at home on this rank, in memory order.

    shard: the shard of the parameter's page. index: the parameter's index in its unit. pieces: (chunk, piece)
    of the pieces whose elements are wanted; None: all elements.
    """
    each, start = shard.layout.parameters[index], shard.layout.start(index)
    size = each.dtype.itemsize
    wanted = [(0, each.numel)] if pieces is None else [(piece.start, piece.count) for _, piece in pieces]
    for first, count in wanted:
        for held in shard.pieces(start + first * size, count * size):
            yield HomeElements((held.page_start - start) // size, held.nbytes // size, held.home_start)


def _values(
    source: CommitSource, saved: ParameterEntry, ranges: Iterable[HomeElements]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read ranges of elements, WINDOW at a time. Yields (place in the home in bytes, values)."""
    for each in ranges:
        for done in range(0, each.count, WINDOW):
            place = each.place + done * saved.torch_dtype.itemsize
            count = min(WINDOW, each.count - done)
            yield place, source.read(saved.names[0], VALUES, each.first + done, count)


def _write(
    page: StatePage,
    parameter: int,
    read: Callable[[str, int, int], torch.Tensor],
    array: str,
    store: Store,
    *,
    into: str | None = None,
) -> None:
    """Write this rank's elements of an array that `read` returns to an optimizer page.

    array: the name of the array. into: the name of the array of the page to write, if it differs; the
    elements are then converted to float32.
    """
    for chunk_index, piece in page.pieces(parameter):
        for part in piece.parts(WINDOW):
            offset, _ = page.place(chunk_index, into or array, part)
            values = read(array, part.start, part.count)
            store.patch(page.home, offset, values.to(torch.float32) if into else values)


def _note(page: StatePage, parameter: int, saved: ParameterEntry) -> None:
    """Record in an optimizer page what is not in arrays: steps, which moments have values, edits.

    A parameter whose states begin anew counts as edited: its values are its fp32 master.
    """
    anew = not saved.trainable
    page.version += 1
    page.steps[parameter] = 0 if anew else saved.step
    page.has_moments.discard(parameter)
    page.edited.discard(parameter)
    if saved.moments and not anew:
        page.has_moments.add(parameter)
    if saved.edited or anew:
        page.edited.add(parameter)


def _begin(states: States, page: StatePage, store: Store) -> None:
    """Record which chunks have moments or averages, and write initial moments where only some parameters have
    any.
    """
    for chunk_index in page.kept:
        chunk = page.layout.chunks[chunk_index]
        page.begun[chunk_index] = states.keeps_averages or any(
            piece.parameter in page.has_moments for piece in chunk.pieces
        )
        if page.begun[chunk_index]:
            without = [piece for piece in chunk.pieces if piece.parameter not in page.has_moments]
            for part in itertools.chain.from_iterable(piece.parts(WINDOW) for piece in without):
                for name, initial in states.initial().items():
                    offset, nbytes = page.place(chunk_index, name, part)
                    store.patch(page.home, offset, initial.repeat(nbytes // initial.itemsize))


def _check(here: ParameterLayout, saved: ParameterEntry) -> None:
    for what, ours, theirs in (
        ("shape", list(here.shape), list(saved.shape)),
        ("dtype", here.dtype, saved.torch_dtype),
    ):
        if ours != theirs:
            raise IncompatibleCheckpoint(
                f"The parameter {here.names[0]} has the {what} {ours}, and {theirs} in the checkpoint.", _SAME
            )
    if not same_order(saved.shape, saved.stride, here.stride):
        raise IncompatibleCheckpoint(
            f"The parameter {here.names[0]} has the strides {list(here.stride)}, and "
            f"{list(saved.stride)} in the checkpoint.",
            "Build the model with the memory format in which it was saved.",
        )


def _check_names(missing: Sequence[str], superfluous: Sequence[str]) -> None:
    said = [
        f"{text} {listed(list(names))}"
        for text, names in (("lacks", missing), ("also has", superfluous))
        if names
    ]
    if said:
        raise IncompatibleCheckpoint(f"The checkpoint {' and '.join(said)}.", _SAME)


def _check_optimizer(saved: OptimizerRule, here: OptimizerRule) -> None:
    pairs: Mapping[str, tuple[object, object]] = {
        "optimizer": (here.name, saved.name),
        "format of the optimizer's states": (here.states, saved.states),
        "list of the optimizer's moments": (list(here.moments), list(saved.moments)),
    }
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise IncompatibleCheckpoint(f"The {what} is {ours}, and {theirs} in the checkpoint.", _SAME)
    if saved.averaged is not None and here.averaged is None:
        raise IncompatibleCheckpoint(
            "The checkpoint has running averages of masters, and this run keeps none.",
            "Give infinity.offload average=, the decay of the averages.",
        )


# --- slabs that are adopted -------------------------------------------------------------------------------


def division_of(saved: SavedCommit) -> Division:
    """Return the division of the model in a commit, which the next plan prefers."""
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
    """Yield the parts that a rank has under a plan, without homes."""
    images, share, nowhere = plan.slab_layout, plan.share, Home.of_nothing()
    assert images is not None
    for unit, layout in enumerate(plan.layout.units):
        kept = tuple(kept_chunks(layout, share, whole=share.whole_states))
        formats = [plan.state_format(unit, chunk) for chunk in range(len(layout.chunks))]
        begun = [False] * len(formats)
        yield from parameter_parts(PageShard(layout, share), images.parameters[unit], nowhere)
        yield from state_parts(layout, formats, images.states[unit], nowhere, begun=begun, kept=kept)


class _HeldPart(NamedTuple):
    """Where a commit has the bytes of a part."""

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
        """Find a part in the commit. Returns None if the commit's arrays of the part do not all lie in the
        same slot of the part, or if the commit divides the parameters in another way.
        """
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
    """Whether a rank commit has all elements that a rank with this plan keeps. Parameters that the commit
    lacks or has in another shape do not count; `restore` refuses them.
    """
    source = retiled(CommitSource([RankCommit(saved, lambda memory, offset: None)]), plan.layout)
    by_name = {name: each for each in source.parameters().values() for name in each.names}
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


def adopt_slabs(saved: SavedCommit, homes: Sequence[Home], states: States, store: Store) -> None:
    """Set all pages to those of a commit whose slabs the store has adopted. `is_cut_alike` must be true.

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
    """Copy steps, slots and checksums from the commit to optimizer pages and parts."""
    entries, stored = {each.names[0]: each for each in saved.manifest.parameters}, _StoredParts(saved)
    table = saved.checksums.astype(np.int64)
    assert saved.manifest.rule is not None
    states.averaged = saved.manifest.rule.averaged or 0
    for unit, home in enumerate(homes):
        page = states.pages[unit]
        for index, each in enumerate(page.layout.parameters):
            if each.trainable:
                _note(page, index, entries[each.names[0]])
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
