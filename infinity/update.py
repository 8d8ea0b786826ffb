"""The update: streams every chunk through host RAM once, the next ones being read while one is computed.

A chunk's parameter slice, gradient and states are used where they are, if that is host RAM, and come through
one slot otherwise. The jobs of one step are independent; their order is the units'. Whatever a page's views
see afterwards is what its home has (see the note in infinity/page.py).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity import cpu_adam
from infinity.config import round_up
from infinity.errors import InfinityError
from infinity.gradients import Gradients
from infinity.layout import Chunk, Piece
from infinity.page import ParameterPage
from infinity.states import StatePage, States
from infinity.store import Store
from infinity.telemetry import Edge
from infinity.tiers import PAGE_ALIGNMENT
from infinity.tiers.link import Transfer

GroupOf = Callable[[int, int], Mapping[str, Any] | None]
"""The live param group of (unit, parameter), or None where the optimizer does not have it."""

_MOST_JOBS = 8
"""In flight; more would only lengthen queues."""


@dataclass(slots=True)
class _Job:
    """One chunk's update under way."""

    page: ParameterPage
    state: StatePage
    number: int
    pieces: list[Piece]
    parameter: torch.Tensor
    """uint8, the chunk's slice of the parameter page."""
    gradient: torch.Tensor
    """The chunk's elements."""
    states: torch.Tensor
    """uint8, the chunk of the optimizer page."""
    parameter_at_home: bool
    states_at_home: bool
    reads: list[Transfer] = field(default_factory=list)
    ticket: cpu_adam.Ticket[cpu_adam.UpdateResult] | None = None

    @property
    def chunk(self) -> Chunk:
        return self.page.layout.chunks[self.number]

    @property
    def byte_offset(self) -> int:
        """Of the chunk in the parameter page."""
        return self.page.layout.chunk_start(self.number)


class Updater:
    """Runs the update of one step over all chunks that have gradients."""

    def __init__(
        self,
        pages: list[ParameterPage],
        gradients: Gradients,
        states: States,
        store: Store,
        threads: cpu_adam.ThreadPool,
    ) -> None:
        self._pages = pages
        self._gradients = gradients
        self._states = states
        self._store = store
        self._threads = threads
        self._group_of: GroupOf = _no_group
        self._jobs: deque[_Job] = deque()
        store.reclaimers.append(self._finish_oldest)

    def step(self, group_of: GroupOf) -> None:
        """Update every parameter that has a gradient and a group.

        Raises StorageError; some chunks are updated then and others not, and nothing is under way any more.
        """
        self._group_of = group_of
        self._store.link.drain()
        try:
            for page, state, number, pieces in self._due():
                # No name for the job here: it would keep the job's slot from the next one.
                self._jobs.append(self._start(page, state, number, pieces))
                self._advance()
                if len(self._jobs) > _MOST_JOBS:
                    self._finish_oldest()
            while self._finish_oldest():
                pass
            self._store.settle()
        except BaseException:
            self._abandon()
            raise
        self._conclude()

    def _due(self) -> Iterator[tuple[ParameterPage, StatePage, int, list[Piece]]]:
        """(page, its states, chunk, pieces to update) of this step."""
        for page in self._pages:
            state = self._states.pages[page.index]
            for number, chunk in enumerate(page.layout.chunks):
                pieces = [
                    piece
                    for piece in self._gradients.with_content(page.index, chunk)
                    if self._group_of(page.index, piece.parameter) is not None
                ]
                if pieces:
                    yield page, state, number, pieces

    def _start(self, page: ParameterPage, state: StatePage, number: int, pieces: list[Piece]) -> _Job:
        """Find or fetch what the job needs. Where nothing is in place, all of it shares one slot."""
        store, chunk = self._store, page.layout.chunks[number]
        region = page.layout.regions[chunk.region]
        first = page.layout.chunk_start(number)
        nbytes = round_up(chunk.count * region.dtype.itemsize, PAGE_ALIGNMENT)
        gradients = self._gradients.pages[page.index]
        slot: torch.Tensor | None = None
        used = 0
        reads: list[Transfer] = []

        def room(size: int) -> torch.Tensor:
            nonlocal slot, used
            if slot is None:
                slot = store.slot()
            used += size
            return slot[used - size : used]

        parameter = self._parameter_in_place(page, first, nbytes)
        at_home = page.home.in_place
        if parameter is None:
            parameter = room(nbytes)
            reads.append(store.read(page.home, first, parameter))
        else:
            page.home.settle(first, first + nbytes, writing=True)
        gradient = self._gradients.chunk_in_place(gradients, number)
        if gradient is None:
            data = room(gradients.nbytes(number))
            reads.append(store.read(gradients.home, gradients.offset(number), data))
            gradient = gradients.typed(number, data)
        size = state.formats[number].nbytes
        if state.home.in_place:
            states = state.home.view(state.offset(number), size)
        else:
            states = room(size)
            wanted = size if state.begun[number] else state.master_bytes(number)
            if wanted:
                reads.append(store.read(state.home, state.offset(number), states[:wanted]))
        return _Job(
            page, state, number, pieces, parameter, gradient, states, at_home, state.home.in_place, reads
        )

    def _parameter_in_place(self, page: ParameterPage, first: int, nbytes: int) -> torch.Tensor | None:
        if page.home.in_place:
            return page.home.view(first, nbytes)
        living = page.living() if self._store.device.shares_host else None
        return None if living is None else living[first : first + nbytes]

    def _advance(self) -> None:
        for job in self._jobs:
            if job.ticket is None and all(each.done() for each in job.reads):
                self._submit(job)
        while self._jobs and self._jobs[0].ticket is not None and self._jobs[0].ticket.done():
            self._finish_oldest()

    def _submit(self, job: _Job) -> None:
        if job.reads:
            with self._store.meter.stalling(Edge.NVME_TO_HOST):
                for read in job.reads:
                    read.wait()
        arrays = self._prepared(job)
        hypers: dict[tuple[int, int, bool], int] = {}
        found: list[cpu_adam.Hyper] = []
        segments: list[cpu_adam.Segment] = []
        rule = self._states.rule
        for piece in job.pieces:
            group = self._group_of(job.page.index, piece.parameter)
            assert group is not None
            step = job.state.steps[piece.parameter] + 1
            first = piece.parameter not in job.state.has_moments
            key = (id(group), step, first)
            if key not in hypers:
                hypers[key] = len(found)
                found.append(rule.hyper(group, step, first))
            seed = job.state.seed(piece.parameter, step)
            segments.append(cpu_adam.Segment(piece.offset, piece.count, hypers[key], piece.start, seed))
        job.ticket = self._threads.submit(
            cpu_adam.Update(
                grad=job.gradient,
                segments=segments,
                hypers=found,
                scale=self._gradients.unscale,
                **rule.moments_of(arrays),
                **self._masters(job, arrays),
            )
        )

    def _prepared(self, job: _Job) -> dict[str, torch.Tensor]:
        """The state arrays, with moments that begin now and masters that follow an edit."""
        if not job.state.begun[job.number]:
            self._states.fill(job.state, job.number, job.states)
        arrays = job.state.arrays(job.number, job.states)
        for piece in job.chunk.pieces:
            if piece.parameter in job.state.edited:
                place = slice(piece.offset, piece.offset + piece.count)
                if "remainder" in arrays:
                    arrays["remainder"][place] = 0
                elif "master" in arrays:
                    arrays["master"][place] = self._typed(job)[place]
        return arrays

    def _typed(self, job: _Job) -> torch.Tensor:
        dtype = job.page.layout.regions[job.chunk.region].dtype
        return job.parameter[: job.chunk.count * dtype.itemsize].view(dtype)

    def _masters(self, job: _Job, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parameter = self._typed(job)
        if "remainder" in arrays:
            return {"parameter": parameter, "remainder": arrays["remainder"]}
        if "master" in arrays:
            return {"parameter": arrays["master"], "copy": parameter}
        return {"parameter": parameter}

    def _finish_oldest(self) -> bool:
        """Bring one job to its end; False if there is none."""
        if not self._jobs:
            return False
        job = self._jobs.popleft()
        try:
            if job.ticket is None:
                self._submit(job)
            assert job.ticket is not None
            started = time.perf_counter()
            job.ticket.result()
            self._store.meter.updating(time.perf_counter() - started)
        except BaseException:
            self._jobs.appendleft(job)
            raise
        self._take_home(job)
        return True

    def _take_home(self, job: _Job) -> None:
        store, page = self._store, job.page
        if not job.states_at_home and job.states.nbytes:
            store.write(job.state.home, job.state.offset(job.number), job.states)
        if not job.parameter_at_home:
            store.write(page.home, job.byte_offset, job.parameter)
        living = page.living()
        if living is not None and not store.device.shares_host and not page.permanent:
            into = living[job.byte_offset : job.byte_offset + job.parameter.nbytes]
            store.copy_up(into, job.parameter).wait()

    def _conclude(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for page in self._pages:
                content = self._gradients.pages[page.index].content
                updated = [index for index in content if self._group_of(page.index, index) is not None]
                if updated:
                    self._count(page, self._states.pages[page.index], updated)

    def _count(self, page: ParameterPage, state: StatePage, updated: list[int]) -> None:
        touched = set(updated)
        for number, chunk in enumerate(page.layout.chunks):
            if any(piece.parameter in touched for piece in chunk.pieces):
                state.begun[number] = True
        state.edited -= touched
        for index in updated:
            state.steps[index] += 1
            group = self._group_of(page.index, index)
            if group is not None and self._states.rule.written(group):
                state.has_moments.add(index)
            torch.autograd.graph.increment_version(page.parameters[index])
        page.acknowledge()

    def _abandon(self) -> None:
        """Wait until nothing touches the jobs' memory any more."""
        for job in self._jobs:
            for read in job.reads:
                with contextlib.suppress(InfinityError):
                    read.wait()
            if job.ticket is not None:
                job.ticket.wait()
        self._jobs.clear()
        with contextlib.suppress(InfinityError):
            self._store.settle()


def _no_group(unit: int, parameter: int) -> None:
    return None
