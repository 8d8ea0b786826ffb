"""One chunk's update: gathers what it takes, runs the rule over it once, and takes the outcome home.

A chunk's parameter slice, gradient and states are used where they are, if that is host RAM; the rest comes
into one slot. On a device that shares the host's RAM the parameters are updated in the page that the model
computes with, resident or still arriving, so that they are read once for both. What rests as a whole on a
device with memory and kernels of its own is updated there (infinity/twin_flow.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity import cpu_adam
from infinity.config import round_up
from infinity.errors import InfinityError
from infinity.gradient_page import GradientPage, Stage
from infinity.layout import Chunk, Piece
from infinity.page import ParameterPage
from infinity.read_ahead import StatesAhead
from infinity.rules import Rule
from infinity.states import StatePage, States
from infinity.store import Store
from infinity.tiers import PAGE_ALIGNMENT
from infinity.tiers.link import ARRIVED, Transfer

Incoming = tuple[torch.Tensor, Transfer]
"""A page's bytes (uint8) where the model will compute with them, and what brings them."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Due:
    """The update of one chunk, as `step()` decided it: nothing that changes later has a say."""

    page: ParameterPage
    state: StatePage
    gradients: GradientPage
    number: int
    segments: Sequence[cpu_adam.Segment]
    hypers: Sequence[cpu_adam.Hyper]
    scale: float
    """From the gradient as stored to the one that the rule sees."""
    begun: bool
    """Whether the moments are written; else they begin with this update."""
    edited: Sequence[Piece]
    """Whose master is the parameter as it is now."""
    stage: Stage | None
    """The gradient, where it is in a slot."""
    ahead: list[StatesAhead]
    """The states, where they were read ahead: one at the most, until it is used."""

    @property
    def unit(self) -> int:
        return self.page.index

    @property
    def chunk(self) -> Chunk:
        return self.page.layout.chunks[self.number]

    @property
    def parameter_dtype(self) -> torch.dtype:
        return self.page.layout.regions[self.chunk.region].dtype

    @property
    def start(self) -> int:
        """Of the chunk in the parameter page, in bytes."""
        return self.page.layout.chunk_start(self.number)

    @property
    def parameter_bytes(self) -> int:
        """Of the chunk's slice of the parameter page, in whole 4 KiB blocks."""
        return round_up(self.chunk.count * self.parameter_dtype.itemsize, PAGE_ALIGNMENT)

    @property
    def state_bytes(self) -> int:
        """Of the chunk's part of the optimizer page."""
        return self.state.formats[self.number].nbytes

    @property
    def in_place(self) -> bool:
        """Whether all that it takes rests in host RAM."""
        gradient = self.stage is not None or self.gradients.home.in_place
        return self.page.home.in_place and gradient and self.state.home.in_place


def segments_of(
    rule: Rule, state: StatePage, pieces: Sequence[tuple[Piece, Mapping[str, Any]]]
) -> tuple[list[cpu_adam.Segment], list[cpu_adam.Hyper]]:
    """What an update of these pieces, each of a parameter with this live param group, is to do now."""
    known: dict[tuple[int, int, bool], int] = {}
    hypers: list[cpu_adam.Hyper] = []
    segments = []
    for piece, group in pieces:
        step, first = state.steps[piece.parameter] + 1, piece.parameter not in state.has_moments
        key = (id(group), step, first)
        if key not in known:
            known[key] = len(hypers)
            hypers.append(rule.hyper(group, step, first))
        seed = state.seed(piece.parameter, step)
        segments.append(cpu_adam.Segment(piece.offset, piece.count, known[key], piece.start, seed))
    return segments, hypers


@dataclass(slots=True, eq=False)
class ChunkUpdate:
    """An update under way: its reads, then its ticket, until `take_home` was called."""

    due: Due
    parameter: torch.Tensor
    """uint8, the chunk's slice of the parameter page."""
    gradient: torch.Tensor
    """The chunk's elements."""
    states: torch.Tensor
    """uint8, the chunk's part of the optimizer page."""
    reads: list[Transfer]
    was_ahead: bool = False
    """Whether its states were read before anybody asked for it."""
    ticket: cpu_adam.Ticket[cpu_adam.UpdateResult] | None = None
    copy: Transfer | None = None
    """Up to a device with memory of its own, once the outcome was sent home."""

    @property
    def arrived(self) -> bool:
        """Whether every read has ended."""
        return all(each.done() for each in self.reads)

    @property
    def copied(self) -> bool:
        """Whether the outcome was sent home, and is where the model computes."""
        return self.copy is not None and self.copy.done()

    def finish_reads(self) -> None:
        """Wait until all is there. Raises StorageError, once nothing of it is under way any more."""
        failure: InfinityError | None = None
        for read in self.reads:
            try:
                read.wait()
            except InfinityError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def submit(self, states: States, threads: cpu_adam.ThreadPool, *, awaited: bool) -> None:
        """Start the update. All reads have ended well. awaited: the caller is about to wait for it."""
        self.ticket = threads.submit(self.work(states), awaited=awaited)

    def work(self, states: States) -> cpu_adam.Update:
        """What is to be done, once all reads have ended."""
        due = self.due
        arrays = self._prepared(states)
        return cpu_adam.Update(
            grad=self.gradient,
            segments=due.segments,
            hypers=due.hypers,
            scale=due.scale,
            **states.rule.moments_of(arrays),
            **self._masters(arrays),
        )

    def take_home(self, store: Store, lost: Callable[[InfinityError], None]) -> None:
        """Send the outcome on its way. lost: told of a write that failed, after which nobody has it."""
        due, page = self.due, self.due.page
        if not due.state.home.in_place and self.states.nbytes:
            store.write(due.state.home, due.state.offset(due.number), self.states, lost)
        if not page.home.in_place:
            store.write(page.home, due.start, self.parameter, lost)
        living = page.living()
        if living is None or store.device.shares_host or page.permanent:
            self.copy = ARRIVED
        else:
            into = living[due.start : due.start + self.parameter.nbytes]
            self.copy = store.copy_up(into, self.parameter)

    def end(self) -> None:
        """Wait until nothing touches the memory any more, whatever becomes of it."""
        for read in self.reads:
            with contextlib.suppress(InfinityError):
                read.wait()
        if self.ticket is not None:
            self.ticket.wait()
        if self.copy is not None:
            self.copy.wait()

    def give_up(self) -> None:
        """`end`, and let go of the memory, whoever keeps this object: a traceback may."""
        self.end()
        self.reads = []
        self.parameter = self.gradient = self.states = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _prepared(self, states: States) -> dict[str, torch.Tensor]:
        """The state arrays, with moments that begin now and masters that follow an edit."""
        due = self.due
        if not due.begun:
            states.fill(due.state, due.number, self.states)
        arrays = due.state.arrays(due.number, self.states)
        for piece in due.edited:
            place = slice(piece.offset, piece.offset + piece.count)
            if "remainder" in arrays:
                arrays["remainder"][place] = 0
            elif "master" in arrays:
                arrays["master"][place] = self._typed()[place]
        return arrays

    def _typed(self) -> torch.Tensor:
        dtype = self.due.parameter_dtype
        return self.parameter[: self.due.chunk.count * dtype.itemsize].view(dtype)

    def _masters(self, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parameter = self._typed()
        if "remainder" in arrays:
            return {"parameter": parameter, "remainder": arrays["remainder"]}
        if "master" in arrays:
            return {"parameter": arrays["master"], "copy": parameter}
        return {"parameter": parameter}


def gather(
    due: Due, store: Store, incoming: Incoming | None, acquire: Callable[[], torch.Tensor | None]
) -> ChunkUpdate | None:
    """Find or start to fetch what the update takes. What is not in place shares one slot.

    incoming: of a page that is arriving where the host sees it. acquire: gives the slot, if one is needed;
    where it gives none, nothing has happened and nothing is returned.
    """
    reads: list[Transfer] = []
    parameter = _parameter_in_place(due, store, incoming, reads)
    gradient = _gradient_in_place(due)
    states = _states_in_place(due)
    rest: torch.Tensor | None = None
    was_ahead = bool(due.ahead)
    if due.ahead:
        ahead = due.ahead.pop()
        states, rest = ahead.states, ahead.rest
        reads.append(ahead.read)
    elif parameter is None or gradient is None or states is None:
        rest = acquire() if due.stage is None else due.stage.rest
        if rest is None:
            return None
    if parameter is None:
        assert rest is not None
        parameter, rest = rest[: due.parameter_bytes], rest[due.parameter_bytes :]
        reads.append(store.read(due.page.home, due.start, parameter))
    elif due.page.home.in_place:
        due.page.home.settle(due.start, due.start + due.parameter_bytes, writing=True)
    if gradient is None:
        assert rest is not None
        nbytes = due.gradients.nbytes(due.number)
        gradient, rest = rest[:nbytes], rest[nbytes:]
        reads.append(store.read(due.gradients.home, due.gradients.offset(due.number), gradient))
    if states is None:
        assert rest is not None
        states = rest[: due.state_bytes]
        wanted = due.state_bytes if due.begun else due.state.master_bytes(due.number)
        if wanted:
            reads.append(store.read(due.state.home, due.state.offset(due.number), states[:wanted]))
    return ChunkUpdate(due, parameter, due.gradients.typed(due.number, gradient), states, reads, was_ahead)


def _parameter_in_place(
    due: Due, store: Store, incoming: Incoming | None, reads: list[Transfer]
) -> torch.Tensor | None:
    if due.page.home.in_place:
        return due.page.home.view(due.start, due.parameter_bytes)
    living = due.page.living() if store.device.shares_host else None
    if living is None and incoming is not None:
        living, arrival = incoming
        reads.append(arrival)
    return None if living is None else living[due.start : due.start + due.parameter_bytes]


def _gradient_in_place(due: Due) -> torch.Tensor | None:
    if due.stage is not None:
        return due.stage.data
    home = due.gradients.home
    offset, nbytes = due.gradients.offset(due.number), due.gradients.nbytes(due.number)
    return home.view(offset, nbytes) if home.in_place else None


def _states_in_place(due: Due) -> torch.Tensor | None:
    home = due.state.home
    return home.view(due.state.offset(due.number), due.state_bytes) if home.in_place else None
