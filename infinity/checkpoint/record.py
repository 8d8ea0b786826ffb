"""Record: what a commit says about a run, taken from its runtime at the moment of `save`.

What never changes during a run (names, shapes, places) is listed once. A `save` copies what does change and
is small: steps, options of param groups, buffers, generators and the user's state. The checksums and slots
of parts come last, when the parts' bytes have reached the disk.
"""

from __future__ import annotations

import platform
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from infinity import cpu_adam
from infinity.checkpoint import manifest as form
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.manifest import Manifest
from infinity.checkpoint.run_state import RunState, capture
from infinity.checkpoint.tensor_files import TORCH_NAMES
from infinity.formats.optimizer_rules import AVERAGE
from infinity.gradients.loss_scale import LossScale
from infinity.layout.chunks import ParameterLayout
from infinity.layout.shards import PageShard
from infinity.pages.ledger import Commit
from infinity.pages.optimizer_page import StatePage, States
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.parts import PageParts, Part
from infinity.planning.placement import Kind
from infinity.planning.plan import Plan
from infinity.system.version import VERSION
from infinity.tiers import VolumeRecord

CODECS = {"moments": 1, "rounding": 1}
"""Versions of what bytes of pages mean: the codes of int8 moments, and the tables of stochastic rounding."""

_MASTERS = {torch.float16: "whole", torch.bfloat16: "split", torch.float32: "itself"}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Where an array has its entries for a range of a parameter's elements."""

    name: str
    part: Part
    offset: int
    """Offset in the part, in bytes."""
    nbytes: int
    block_bytes: int
    checksum: int
    """Index of the first block in `Part.checksums`."""


@dataclass(frozen=True, slots=True)
class StoredRange:
    """A range of a parameter's elements: the index of its first element, its length, and its arrays."""

    first: int
    count: int
    arrays: tuple[StoredArray, ...]


class Recorder:
    """Makes the manifests of one runtime. `draft` is called under the runtime's lock."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        pages: Sequence[ParameterPage],
        states: States,
        scale: LossScale,
        volume: VolumeRecord,
    ) -> None:
        """volume: the slabs in which the pages' places lie. The others: parts of the runtime."""
        self._model = weakref.ref(model)  # a pending commit must not keep a runtime that nobody refers to
        self._plan = plan
        self._pages = pages
        self._states = states
        self._scale = scale
        self._volume = volume
        self._ranges = [
            [
                ranges_of(page.shard, page.home.parts, states.pages[page.index], index)
                for index in range(len(page.parameters))
            ]
            for page in pages
        ]
        assert plan.slab_layout is not None
        self._places = plan.slab_layout
        self.param_groups: Sequence[Mapping[str, Any]] = ()
        """The param groups of the user's optimizer; set when the runtime is made."""

    def draft(
        self, generation: int, created: str, state: object, rng: Mapping[str, Any], identity: object
    ) -> SavedCommit:
        """Copy everything that is not in pages, without slots and checksums of parts. Raises ConfigError for
        a value that cannot be kept.

        created: when the commit was begun, in UTC and ISO 8601.
        """
        model = self._model()
        assert model is not None
        run = capture(model, self.param_groups, self._scale, state=state, rng=rng, identity=identity)
        return SavedCommit(
            manifest_of(
                self._plan,
                run,
                generation=generation,
                created=created,
                volume=self._volume,
                rule=form.OptimizerRule.of(self._states),
                parameters=tuple(self._parameters()),
                rank=self._plan.share.rank,
                world_size=self._plan.share.ranks,
            ),
            np.zeros(0, dtype=np.uint32),
            run.tensors,
        )

    def finish(self, draft: SavedCommit, commit: Commit) -> SavedCommit:
        """Add the slots and checksums of all parts, which `commit` holds, to what `draft` has returned."""
        base: dict[Part, int] = {}
        tables: list[npt.NDArray[np.int64]] = []
        end = 0
        for part in self._parts():
            checksums = commit.held[part].checksums
            base[part] = end
            tables.append(checksums)
            end += len(checksums)
        parameters = []
        assert draft.manifest.rule is not None
        averaged = draft.manifest.rule.averaged
        entries = iter(draft.manifest.parameters)
        for ranges in self._ranges:
            for of_parameter in ranges:
                entry = next(entries)
                found = tuple(_range(each, entry.moments, averaged, commit, base) for each in of_parameter)
                parameters.append(replace(entry, ranges=found))
        units = tuple(self._unit(page, commit) for page in self._pages)
        table = np.concatenate(tables) if tables else np.zeros(0, dtype=np.int64)
        table[table < 0] = 0  # blocks that have no values yet
        manifest = replace(draft.manifest, units=units, parameters=tuple(parameters))
        return replace(draft, manifest=manifest, checksums=table.astype(np.uint32))

    # --- inside -----------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[Part]:
        for page in self._pages:
            for home in (page.home, self._states.pages[page.index].home):
                yield from (part for part in home.parts if part.committed)

    def _parameters(self) -> Iterator[form.ParameterEntry]:
        for page in self._pages:
            states = self._states.pages[page.index]
            for index, layout in enumerate(page.layout.parameters):
                yield parameter_entry(layout, page.index, index, states)

    def _unit(self, page: ParameterPage, commit: Commit) -> form.UnitEntry:
        layout, states = page.layout, self._states.pages[page.index]
        places, state_places = self._places.parameters[page.index], self._places.states[page.index]
        parameter_parts = {part.chunk_index: part for part in page.home.parts}
        state_parts = {part.chunk_index: part for part in states.home.parts}
        chunks = []
        for chunk_index in states.kept:
            slot = commit.held[parameter_parts[chunk_index]].slot
            state = state_parts.get(chunk_index)
            state_slot, _, begun = (0, None, False) if state is None else commit.held[state]
            chunks.append(form.ChunkEntry(slot, state_slot, begun))
        state_bytes = self._plan.page_bytes(page.index, Kind.OPTIMIZER)
        return form.UnitEntry(
            name=layout.name,
            parameters=tuple(each.names[0] for each in layout.parameters),
            nbytes=page.shard.nbytes,
            state_bytes=state_bytes,
            parameter_places=(places.first, places.second if states.kept else None),
            state_places=(state_places.first, state_places.second) if state_bytes else (None, None),
            chunks=tuple(chunks),
            frozen=tuple(
                form.FrozenEntry(part.start, part.nbytes, part.slots[0])
                for part in page.home.parts
                if part.committed and not part.trained
            ),
        )


def manifest_of(
    plan: Plan,
    run: RunState,
    *,
    generation: int,
    created: str,
    volume: VolumeRecord,
    rule: form.OptimizerRule | None,
    parameters: tuple[form.ParameterEntry, ...],
    units: tuple[form.UnitEntry, ...] = (),
    rank: int = 0,
    world_size: int = 1,
) -> Manifest:
    """The manifest of a run by `plan`, as this program writes it now. run: the state that is in no page. The
    others: fields of the manifest.
    """
    precision = plan.precision
    return Manifest(
        generation=generation,
        created=created,
        versions={"infinity": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        isa=cpu_adam.runnable_isas()[0],
        threads=torch.get_num_threads(),
        volume=volume,
        codecs=CODECS,
        chunk_elements=plan.layout.chunk_elements,
        rule=rule,
        rank=rank,
        world_size=world_size,
        precision=form.PrecisionEntry(
            precision.compute, precision.states, precision.keep, precision.accumulate
        ),
        units=units,
        parameters=parameters,
        run=run.record,
    )


def parameter_entry(
    layout: ParameterLayout, unit: int, index: int, states: StatePage | None
) -> form.ParameterEntry:
    """What a manifest says of a parameter, without its ranges. index: of the parameter in the unit. states:
    the unit's optimizer page; None for inference, where no parameter is trained.
    """
    trainable = layout.trainable and states is not None
    return form.ParameterEntry(
        names=layout.names,
        shape=tuple(layout.shape),
        stride=tuple(layout.stride),
        dtype=TORCH_NAMES[layout.dtype],
        trainable=trainable,
        numel=layout.numel,
        master=_MASTERS[layout.dtype] if trainable else "none",
        step=0 if states is None else states.steps[index],
        moments=states is not None and index in states.has_moments,
        edited=states is not None and index in states.edited,
        unit=unit,
        ranges=(),
    )


def now() -> str:
    """The present time, in UTC and ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def _range(
    each: StoredRange, moments: bool, averaged: int | None, commit: Commit, base: Mapping[Part, int]
) -> form.Range:
    """Say where a range lies. moments: whether the parameter has moments, which are left out otherwise.
    averaged: as in `OptimizerRule`; without averaged steps there are no averages.
    """
    places = {}
    for array in each.arrays:
        slot, _, begun = commit.held[array.part]
        held = bool(averaged) if array.name == AVERAGE else moments and begun
        if array.name not in ("values", "remainder", "master") and not held:
            continue
        offset = array.part.slots[slot] + array.offset
        places[array.name] = form.Place(
            offset, array.nbytes, array.block_bytes, base[array.part] + array.checksum
        )
    return form.Range(each.first, each.count, places)


def ranges_of(shard: PageShard, parts: PageParts, states: StatePage, index: int) -> list[StoredRange]:
    """Where the arrays of one parameter of a unit lie that this rank commits, in memory order.

    shard: of the unit's parameter page. parts: the parts of its parameter page. states: its optimizer page.
    index: of the parameter in the unit. A parameter without elements has no range.
    """
    layout = shard.layout
    parameter = layout.parameters[index]
    if not parameter.numel:
        return []
    size = parameter.dtype.itemsize
    found = []
    if not parameter.trainable:
        start = layout.start(index)
        for held in shard.pieces(start, parameter.numel * size):
            for part in parts.over(held.home_start, held.home_start + held.nbytes):
                low, high = max(held.home_start, part.start), min(held.home_start + held.nbytes, part.end)
                first = (held.page_start + low - held.home_start - start) // size
                array = _array("values", part, low - part.start, high - low)
                found.append(StoredRange(first, (high - low) // size, (array,)))
        return found
    of_chunk = {part.chunk_index: part for part in parts}
    state_of_chunk = {part.chunk_index: part for part in states.home.parts}
    for chunk_index, piece in states.pieces(index):
        part = of_chunk[chunk_index]
        arrays = [_array("values", part, piece.offset * size, piece.count * size)]
        state = state_of_chunk.get(chunk_index)
        state_form = states.formats[chunk_index]
        for each in state_form.arrays if state is not None else ():
            assert state is not None
            arrays.append(_array(each.name, state, *state_form.place(each.name, piece.offset, piece.count)))
        found.append(StoredRange(piece.start, piece.count, tuple(arrays)))
    return found


def _array(name: str, part: Part, offset: int, nbytes: int) -> StoredArray:
    """Find the row of a part's segments that begins at `offset`."""
    checksum = 0
    for start, length, block in part.segments.tolist():
        if start == offset and length == nbytes:
            return StoredArray(name, part, offset, nbytes, block, checksum)
        checksum += -(-length // block)
    raise AssertionError(f"{name} at byte {offset} has no row")
