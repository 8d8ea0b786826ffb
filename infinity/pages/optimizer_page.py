"""Optimizer pages: the optimizer states of each unit, chunk by chunk, and which of the states have values.

The states of one chunk are several arrays, such as its moments. They lie one after another (`StateFormat`),
so an update needs one sequential read and one sequential write. Moments are not written to a page before
they have values: the first update of a chunk creates the chunk's moments in RAM.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infinity.checksum import crc32c
from infinity.cpu_adam import BLOCK, CODE_BLOCK
from infinity.errors import ConfigError
from infinity.formats import encodings
from infinity.formats.encodings import join, rounded, rounds_to, split
from infinity.formats.optimizer_rules import AVERAGE, Rule, StateArray, StateFormat, scale_of
from infinity.layout.chunks import OwnedRange, ParameterLayout, Piece, UnitLayout
from infinity.layout.shards import kept_chunks, kept_pieces
from infinity.layout.strides import in_memory_order
from infinity.pages.home import Home
from infinity.pages.remote import RemotePages
from infinity.pages.store import Store
from infinity.planning.plan import Plan

_MOST_AT_ONCE = 1 << 20
"""The most entries of optimizer states that are read, or brought from another rank, at once."""


class StatePage:
    """The optimizer states of one unit."""

    def __init__(self, index: int, layout: UnitLayout, home: Home, plan: Plan) -> None:
        self.index = index
        self.layout = layout
        self.home = home
        self.formats: list[StateFormat] = [
            plan.state_format(index, chunk_index) for chunk_index in range(len(layout.chunks))
        ]
        self.version = 0
        """A number that grows whenever code other than an update writes to the page. A chunk update
        that has read states ahead compares it, to see whether what it read is still right.
        """
        self.begun = [False] * len(layout.chunks)
        """Index of a chunk -> whether the chunk's moments have values. They get values from `States.write`,
        or as soon as it is decided that the chunk is updated, even before the update has run.
        """
        self.trainable = frozenset(index for index, each in enumerate(layout.parameters) if each.trainable)
        """Indices of the unit's trainable parameters."""
        self.steps = [0] * len(layout.parameters)
        """Index of a parameter -> number of updates that the parameter has had."""
        self.has_moments: set[int] = set()
        """Indices of the parameters whose moments have values. They get values from `States.write`, or as
        soon as it is decided that the parameter is updated, even before the update has run.
        """
        self.edited: set[int] = set()
        """Indices of parameters that user code has edited since their last update. For such a parameter,
        the value in the parameter page is the fp32 master, and the bits of the master in this page are out
        of date.
        """
        self._offsets = [plan.state_offset(index, each) for each in range(len(layout.chunks))]
        share = plan.share
        self.kept = tuple(kept_chunks(layout, share, whole=share.whole_states))
        """Indices of the chunks whose states are in this page."""
        self.pieces = kept_pieces(layout, share, whole=share.whole_states)
        """Function from a parameter's index to the parameter's pieces whose states are in this page."""

    def offset(self, chunk_index: int) -> int:
        """Distance in bytes from the start of the optimizer page to the states of a chunk."""
        return self._offsets[chunk_index]

    def master_bytes(self, chunk_index: int) -> int:
        """Number of bytes, at the start of a chunk's states, that belong to its parameters' fp32 masters.

        For bf16 parameters they are the array "remainder": the low 16 bits of each master, which the
        parameter itself lacks. For fp16 they are the array "master", for fp32 there are none. Unlike
        moments, these bytes have values before the first update.
        """
        form = self.formats[chunk_index]
        others = [
            offset
            for array, offset in zip(form.arrays, form.offsets, strict=True)
            if array.name not in ("remainder", "master")
        ]
        return others[0] if others else form.nbytes

    def arrays(self, chunk_index: int, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arrays of a chunk's states, such as its moments, by name, as views of `data`.

        data: uint8; it begins with the states of the chunk.
        """
        form = self.formats[chunk_index]
        return {
            array.name: data[offset : offset + nbytes].view(array.dtype)
            for array, offset, nbytes in zip(form.arrays, form.offsets, form.sizes, strict=True)
        }

    def place(self, chunk_index: int, name: str, piece: Piece) -> tuple[int, int]:
        """Find the entries of a piece of a parameter in the array `name` of a chunk's states.

        Returns (distance from the start of the optimizer page to the entries, size of the entries), both in
        bytes. piece: the part of the parameter that lies in the chunk.
        """
        offset, nbytes = self.formats[chunk_index].place(name, piece.offset, piece.count)
        return self._offsets[chunk_index] + offset, nbytes

    def places(self, parameter: int, name: str, first: int, count: int) -> list[tuple[int, int]]:
        """Find the entries of elements [first, first + count) of a parameter in the array `name`, as far as
        they are in this page: (bytes from the start of the page, bytes) for each chunk, in memory order.
        """
        within = ((chunk_index, piece.within(first, count)) for chunk_index, piece in self.pieces(parameter))
        return [self.place(chunk_index, name, part) for chunk_index, part in within if part is not None]

    def seed(self, parameter: int, step: int) -> int:
        """Return the 32-bit seed of stochastic rounding for a parameter's moments in one update.

        step: number of the parameter's update, from 1. The seed depends on the parameter's name and the
        step alone, so that results do not depend on pages, chunks and ranks.
        """
        return zlib.crc32(f"{self.layout.parameters[parameter].names[0]}:{step}".encode())


class States:
    """The optimizer pages of all units.

    Reads and writes the states of single parameters, for state_dict() and for loading weights.
    """

    def __init__(self, pages: dict[int, StatePage], store: Store, rule: Rule, remote: RemotePages) -> None:
        """pages: unit -> its optimizer page. remote: brings the states that other ranks keep."""
        self.pages = pages
        self.rule = rule
        self.averaged = 0
        """Number of steps that the running averages of masters include; 0: the averages have no values yet.
        Each step includes the masters of all trainable parameters.
        """
        self.exchanged = False
        """Whether running averages and masters have changed places; see `Runtime.averaged`."""
        self._store = store
        self._share = store.plan.share
        self._remote = remote
        self.given: dict[tuple[int, int], torch.Tensor] = {}
        """(unit, index of a parameter) -> a master that was loaded since the last step and does not round to
        the parameter's values, which may be loaded later: float32 (numel,) in memory order, in the caller's
        own memory where that has this form.
        """

    def keeps_master(self, unit: int, parameter: int) -> bool:
        """Whether the optimizer page has bits of a parameter's fp32 master that are not in its value."""
        page = self.pages.get(unit)
        if page is None or parameter in page.edited:
            return False
        layout = page.layout.parameters[parameter]
        return layout.trainable and layout.dtype != torch.float32

    def edited(
        self, unit: int, parameter: int, now: torch.Tensor | None = None, before: torch.Tensor | None = None
    ) -> None:
        """Update a parameter's fp32 masters after an edit of its values by user code.

        The new master of an element is the first of these three that rounds to the element's new value: its
        loaded master in `self.given`, its present master, the new value itself. If the parameter has had no
        update yet, its present masters are kept only if no value has changed: values that are loaded into a
        new model must not be mixed with those of its initialisation.

        now: the new values, (numel,) in memory order, in RAM; needed only with `before`, or if `self.given`
        has the parameter. before: the values before the edit, in the same form; None: they are not known, and
        no present master is kept.
        """
        page = self.pages.get(unit)
        if page is None or not page.layout.parameters[parameter].trainable:
            return
        given = self.given.get((unit, parameter))
        if before is not None:
            assert now is not None
            if given is None and torch.equal(_bits(now), _bits(before)):
                return
            if not page.steps[parameter]:
                before = None
        if page.layout.parameters[parameter].dtype == torch.float32 or (before is None and given is None):
            page.edited.add(parameter)
            return
        assert now is not None
        for chunk_index, piece in page.pieces(parameter):
            place = slice(piece.start, piece.start + piece.count)
            values = now[place]
            master = values.to(torch.float32)
            if before is not None:
                same = _bits(values) == _bits(before[place])
                master = torch.where(same, self._master(page, chunk_index, piece, values), master)
            if given is not None:
                fits = _bits(rounded(given[place], values.dtype)) == _bits(values)
                master = torch.where(fits, given[place], master)
            _, name, stored = _divided(master, values.dtype)
            self._store.patch(page.home, page.place(chunk_index, name, piece)[0], stored)
        page.version += 1
        page.edited.discard(parameter)

    def _master(self, page: StatePage, chunk_index: int, piece: Piece, values: torch.Tensor) -> torch.Tensor:
        """Return the fp32 masters of a piece whose states are in this page. values: its present values."""
        name = "remainder" if values.dtype == torch.bfloat16 else "master"
        stored = self._store.fetch(page.home, *page.place(chunk_index, name, piece))
        return join(values, stored.view(torch.int16)) if name == "remainder" else stored.view(torch.float32)

    def encode(self, unit: int, parameter: int, values: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Give elements of a parameter a new fp32 master, and return the values for the parameter page.

        The caller must write these values, (count,) in memory order and in the parameter's dtype, to that
        page. If the parameter is trainable, the low 16 bits of the master (bf16) or the whole master (fp16)
        are written to the optimizer page here. values: the new master of elements [first, first + count),
        (count,) in memory order, of any floating dtype.
        """
        page = self.pages.get(unit)
        dtype = page.layout.parameters[parameter].dtype if page is not None else values.dtype
        if page is None or not page.layout.parameters[parameter].trainable or dtype == torch.float32:
            return values.to(dtype)
        page.edited.discard(parameter)
        master = values.to(torch.float32)
        encoded, name, stored = _divided(master, dtype)
        self._write(page, parameter, name, stored, first)
        return encoded

    def master(self, unit: int, parameter: int, values: torch.Tensor) -> torch.Tensor:
        """Return the fp32 master of a parameter, (numel,) in memory order.

        values: the parameter's present values in the parameter page, (numel,) in memory order. They are the
        master if they are fp32, or if user code has edited them since the last update. Otherwise the low 16
        bits of the master (bf16) or the whole master (fp16) are read from the optimizer page.
        """
        page = self.pages[unit]
        if values.dtype == torch.float32 or parameter in page.edited:
            return values.to(torch.float32)
        if values.dtype == torch.bfloat16:
            return join(values, self._read(page, parameter, "remainder"))
        return self._read(page, parameter, "master")

    @property
    def edits(self) -> dict[int, tuple[int, frozenset[int]]]:
        """Unit -> a value that changes whenever the masters of the unit's parameters are edited."""
        return {unit: (page.version, frozenset(page.edited)) for unit, page in self.pages.items()}

    @property
    def keeps_averages(self) -> bool:
        """Whether running averages have values: the run has them, and has taken a step with them."""
        return self.rule.average is not None and self.averaged > 0

    def average(self, unit: int, parameter: int, values: torch.Tensor) -> torch.Tensor:
        """Return the running average of a trainable parameter's masters, float32 (numel,) in memory order.

        values: the parameter's present values in the parameter page, (numel,) in memory order. Before the
        first step they give the master, which is returned as the average.
        """
        if not self.keeps_averages:
            return self.master(unit, parameter, values)
        return self._read(self.pages[unit], parameter, AVERAGE)

    def write_average(self, unit: int, parameter: int, values: torch.Tensor) -> None:
        """Replace the running average of a trainable parameter. values: float32 (numel,) in memory order."""
        self._write(self.pages[unit], parameter, AVERAGE, values)

    def restore(self, unit: int, parameter: int, values: torch.Tensor, master: torch.Tensor) -> None:
        """Replace a parameter's fp32 master, if the new master rounds to the parameter's present values.

        If it does not, the new master is kept in `given` until the next step, in case user code edits the
        parameter to the values to which it rounds. values: the present values in the parameter page, (numel,)
        in memory order. master: the new master, in the parameter's shape and with any strides.
        """
        flat = _flat(master, self.pages[unit].layout.parameters[parameter])
        if rounds_to(flat, values):
            self.encode(unit, parameter, flat)
        else:
            self.given[unit, parameter] = flat

    def read(self, unit: int, parameter: int) -> dict[str, torch.Tensor]:
        """Return copies of a parameter's "step" and moments, named as in torch, in its shape and strides.

        Before the parameter's first update the result is {}, except for optimizers such as Adagrad, whose
        constructor creates the states.
        """
        page = self.pages[unit]
        begun = parameter in page.has_moments
        if not (page.steps[parameter] or begun or self.rule.from_the_start):
            return {}
        layout = page.layout.parameters[parameter]
        found: dict[str, torch.Tensor] = {}
        if self.rule.counts_steps:
            found["step"] = torch.tensor(float(page.steps[parameter]), dtype=torch.float32, device="cpu")
        for name in self.rule.moments:
            if begun:
                found[name] = self._moment(page, parameter, name).as_strided(layout.shape, layout.stride)
            elif self.rule.from_the_start:
                found[name] = torch.empty_strided(
                    layout.shape, layout.stride, dtype=torch.float32, device="cpu"
                ).fill_(self.rule.initial(name))
        return found

    def write(self, unit: int, parameter: int, state: Mapping[str, Any]) -> None:
        """Replace a parameter's moments and step count by the entries of `state`, named as in torch.

        Moments are rounded to nearest in the format of the page. Raises ConfigError if the parameter is
        frozen and `state` is not empty.
        """
        layout = self.pages[unit].layout.parameters[parameter]
        if state and not layout.trainable:
            raise ConfigError(
                f"There is an optimizer state for {layout.names[0]}, which was frozen when it was offloaded.",
                "Offload the model with that parameter trainable, or leave its state out.",
            )
        given = [name for name in self.rule.moments if isinstance(state.get(name), torch.Tensor)]
        self.begin(unit, parameter, given, int(state["step"]) if "step" in state else None)
        for name in given:
            self.write_moment(unit, parameter, name, _flat(state[name], layout))

    def begin(self, unit: int, parameter: int, moments: Sequence[str], step: int | None) -> None:
        """Replace a parameter's step count, and make room for moments, which `write_moment` then writes.

        moments: torch's names of the moments that will be written: all of the rule's, or none. step: number
        of updates that the parameter has had. If None, the number is unknown: it is set to 1 with moments,
        and to 0 without.
        """
        page = self.pages[unit]
        for chunk_index, _ in page.pieces(parameter):
            if moments and not page.begun[chunk_index]:
                self._begin(page, chunk_index)
        page.steps[parameter] = int(bool(moments)) if step is None else step
        if moments:
            page.has_moments.add(parameter)
        else:
            page.has_moments.discard(parameter)

    def write_moment(
        self, unit: int, parameter: int, moment: str, values: torch.Tensor, first: int = 0
    ) -> None:
        """Write elements [first, first + count) of a parameter's moment, leaving out those that other ranks
        keep.

        moment: its name in torch. values: float32 (count,) in RAM, in the order of the parameter's memory.
        first: a multiple of 4096, so that blocks of int8 codes are whole.
        """
        for array, encoded in self.encoded(moment, values).items():
            self._write(self.pages[unit], parameter, array, encoded, first)

    def fill(self, page: StatePage, chunk_index: int, data: torch.Tensor) -> None:
        """Write the initial values of a chunk's moments into `data`.

        data: uint8 in RAM; it begins with the states of the chunk.
        """
        arrays = page.arrays(chunk_index, data)
        for name, initial in self.initial().items():
            arrays[name].fill_(initial.item())

    def _begin(self, page: StatePage, chunk_index: int) -> None:
        piece = Piece(0, 0, 0, page.layout.chunks[chunk_index].count)
        page.version += 1
        for name, initial in self.initial().items():
            offset, nbytes = page.place(chunk_index, name, piece)
            self._store.patch(page.home, offset, initial.repeat(nbytes // initial.itemsize))
        page.begun[chunk_index] = True

    def initial(self) -> dict[str, torch.Tensor]:
        """Return array -> initial value, shape (1,), of its entries, for the arrays that hold moments."""
        found: dict[str, torch.Tensor] = {}
        for name in self.rule.moments:
            block = torch.full((CODE_BLOCK,), self.rule.initial(name), dtype=torch.float32, device="cpu")
            found |= {array: values[:1] for array, values in self.encoded(name, block).items()}
        return found

    def encoded(self, moment: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode values of a moment in the format of the pages.

        moment: name of the moment in torch. values: float32 (numel,). Returns the name of each array that
        stores the moment -> the entries of the array.
        """
        if self.rule.states != "int8":
            return {moment: values.to(encodings.DTYPES[self.rule.states])}
        codes, exponents = encodings.encode(values, self.span(moment))
        return {moment: codes, scale_of(moment): exponents}

    def _moment(self, page: StatePage, parameter: int, moment: str) -> torch.Tensor:
        """Read one of a parameter's moments from its page, and return it decoded: float32 (numel,)."""
        stored = self._read(page, parameter, moment)
        if self.rule.states != "int8":
            return stored.to(torch.float32)
        exponents = self._read(page, parameter, scale_of(moment))
        return encodings.decode(stored, exponents, self.span(moment))

    def span(self, moment: str) -> int:
        """Return the span of a moment in the int8 format; see infinity/formats/encodings.py."""
        return encodings.FIRST_SPAN if moment == self.rule.first_moment else encodings.SECOND_SPAN

    def _read(self, page: StatePage, parameter: int, name: str) -> torch.Tensor:
        """Read a parameter's entries of the array `name`, and return a flat copy in memory order."""
        dtype = self._array(page, parameter, name).dtype
        parts = [
            self.entries(page, parameter, name, each).view(dtype)
            for each in page.layout.owned(parameter, _MOST_AT_ONCE)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype, device="cpu")

    def entries(self, page: StatePage, parameter: int, name: str, wanted: OwnedRange) -> torch.Tensor:
        """Return a copy of the entries of a range of a parameter in the array `name`, as uint8 in RAM.

        wanted: a range that `UnitLayout.owned` yields. If another rank keeps its states, the entries are
        brought from there. Raises RankFailure then, too.
        """
        owner, first, count = wanted
        if self._share.whole_states or owner == self._share.rank:
            places = page.places(parameter, name, first, count)
            found = [self._store.fetch(page.home, *place) for place in places]
            return found[0] if len(found) == 1 else torch.cat(found)
        array = self._array(page, parameter, name)
        # The owner sends each request from one buffer of the exchange.
        most = max(BLOCK, self._store.plan.exchange_block_bytes // array.dtype.itemsize // BLOCK * BLOCK)
        found = []
        for start in range(first, first + count, most):
            part = OwnedRange(owner, start, min(most, first + count - start))
            nbytes = array.entries(start, part.numel)[1] * array.dtype.itemsize
            found.append(self._remote.state(page.index, parameter, name, part, nbytes))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _write(
        self, page: StatePage, parameter: int, name: str, values: torch.Tensor, first: int = 0
    ) -> None:
        """Write entries of the array `name`, leaving out those that other ranks keep.

        values: flat; its first entry belongs to the parameter's element `first`.
        """
        array = self._array(page, parameter, name)
        page.version += 1
        begin, _ = array.entries(first, 0)
        for chunk_index, piece in page.pieces(parameter):
            start, count = array.entries(piece.start, piece.count)
            low, high = max(start, begin), min(start + count, begin + values.numel())
            if low >= high:
                continue
            offset, _ = page.place(chunk_index, name, piece)
            at = offset + (low - start) * array.dtype.itemsize
            self._store.patch(page.home, at, values[low - begin : high - begin].contiguous())

    def _array(self, page: StatePage, parameter: int, name: str) -> StateArray:
        arrays = self.rule.arrays(page.layout.parameters[parameter].dtype)
        return next(array for array in arrays if array.name == name)


def _divided(master: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, str, torch.Tensor]:
    """Divide flat fp32 masters between the parameter page and the optimizer page.

    dtype: the parameters' dtype, bfloat16 or float16. Returns (values for the parameter page, name of an
    array of the optimizer page, entries for this array). In bfloat16 the entries are the bits of the masters
    that the values lack; in float16 they are the whole masters.
    """
    if dtype == torch.bfloat16:
        values, remainder = split(master)
        return values, "remainder", remainder
    return master.to(dtype), "master", master


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16)


def state_digest(layout: ParameterLayout, state: Mapping[str, torch.Tensor]) -> int:
    """Compute a number from a state. States with the same entries and equal values have equal numbers,
    whatever the strides, devices and dtypes of their tensors.

    layout: the parameter's layout. state: tensors by name, of floating dtypes, as `States.write` takes them.
    """
    found = 0
    for name in sorted(state):
        found = crc32c(name.encode(), found)
        values = state[name]
        flat = values.to("cpu", torch.float32) if values.dim() == 0 else _flat(values, layout)
        found = crc32c(flat.contiguous(), found)
    return found


def _flat(values: torch.Tensor, layout: ParameterLayout) -> torch.Tensor:
    """Return `values` as a flat tensor in the parameter's memory order: float32 (numel,), on the CPU.

    values: of the parameter's shape and of any strides, device and floating dtype.
    """
    return in_memory_order(values.detach().to("cpu", torch.float32), layout.stride)
