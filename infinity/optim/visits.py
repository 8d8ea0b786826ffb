"""Visits: updates of chunks on the device whose optimizer states are at home in host RAM.

An update by the CPU moves some 30 bytes of host RAM an element: it reads and writes parameters and states,
gradients come down before, and parameters go up. Where that limits a step, a share of the chunks visits the
device: their states go up, the device's kernel updates them there, with the parameters in place, and the
results come down. The CPU updates the other chunks meanwhile. With eager updates the gradients of chunks that
visit stay on the device until they are used: that moves some 22 bytes of host RAM an element. With lazy
updates all gradients come down in the backward, and those of chunks that visit go up again with the states:
26 bytes. All of them could seldom stay, and states at home on the device make better use of its memory.

[Note: which chunks visit]
Which chunks visit in a step is fixed when the step before ends, because with eager updates their gradients
are not copied to RAM. The share of them follows from what earlier steps have measured
(infinity/optim/balance.py). Chunks that visit and chunks that do not take turns. A chunk that was to visit
and cannot, because it has no moments yet, a gradient of zeros, or edited parameters, is updated by the CPU. A
gradient that has stayed is copied to RAM then.

[Note: order of a visit]
With eager updates states come up before their update is decided, as far as there is room. With lazy ones
all are decided at once, and nothing would be gained. States and gradients on their way up are reads of their
homes, and results on their way down are writes of theirs: whoever changes or reads a home waits for them
([Note: order of requests] in infinity/pages/home.py). If other code writes to the states before the update
is decided, `StatePage.version` differs, and they are brought up again. An update counts as pending until its
results are in RAM, so the next backward overwrites no gradient that a visit still has to read.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from infinity.cpu_adam import Update
from infinity.device_update.table import work_of
from infinity.device_update.update import MovingChunk, ParameterUpdate
from infinity.errors import InfinityError
from infinity.gradients.gradients import Gradients
from infinity.optim.balance import Balance, Measured, busy_seconds
from infinity.optim.chunk_update import NOTHING, ChunkUpdate, UpdateState
from infinity.optim.decision import Decision
from infinity.pages.gradient_page import StayingPiece
from infinity.pages.health import Health
from infinity.pages.home import Home, InFlightRequest
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.store import Store
from infinity.telemetry.stats import Edge
from infinity.tiers.driver import Event
from infinity.tiers.link import After, Lane, Timing, Transfer, User


class _Place(NamedTuple):
    """Bytes of a chunk at home in host RAM."""

    home: Home
    start: int
    memory: torch.Tensor
    """uint8."""


class Visit:
    """The visits of one chunk to the device, and the state of the present one.

    IDLE -- read --> READING -- decide --> READING -- launch --> WRITING -- finish --> IDLE
      |                                       ^
      +-- decide --> READY -- read -----------+
    """

    def __init__(
        self,
        page: ParameterPage,
        gradients: Gradients,
        states: States,
        update: ChunkUpdate,
        store: Store,
        *,
        stays: bool,
    ):
        """stays: whether gradients wait on the device for the visit, and do not come with the states."""
        self.unit, self.chunk_index = page.index, update.chunk_index
        self.state = UpdateState.IDLE
        self.decision: Decision | None = None
        """What the update computes; None until that is decided."""
        self.numel = update.chunk.count
        self.state_bytes = update.state_bytes
        self.nbytes = update.state_bytes + (0 if stays else update.gradient_bytes)
        """Bytes of device memory for what comes up."""
        self._stays = stays
        self._page = page
        self._gradient_page = gradients.pages[page.index]
        self._states_of_all = states
        self._state_page = states.pages[page.index]
        self._update = update
        self._store = store
        self._places: Sequence[_Place] = ()
        """The chunk's parameters, states and gradients at home, once they have been used."""
        self._there = NOTHING, NOTHING
        """The chunk's states on the device, and its gradients if these come up, each uint8."""
        self._staying: Sequence[StayingPiece | None] = ()
        """The gradient of each piece of the chunk, where gradients stay; None: the piece is not updated."""
        self._version = 0
        self._requests: list[tuple[Home, InFlightRequest]] = []
        """The copies under way, up or down, and the homes that know them."""
        self._chunk: MovingChunk | None = None
        self.stamps: tuple[Event | None, Event | None] = None, None
        """Events before and after the copy of the states home, in the last visit."""

    @property
    def has_states(self) -> bool:
        """Whether the chunk's states have values, which its first update makes."""
        return self._state_page.begun[self.chunk_index]

    @property
    def may_begin(self) -> bool:
        """Whether the states can be read now: they have values, and no update of them is under way."""
        return self.state is UpdateState.IDLE and self._update.can_read_ahead

    def can_follow(self, decision: Decision) -> bool:
        """Whether the device can compute a decided update: all gradients that it uses stay there or are
        stored at home, and all masters and moments have values.
        """
        pieces = [each for each in self._update.chunk.pieces if each.parameter in decision.parameters]
        if not pieces or decision.average is not None or self.chunk_index in decision.fresh:
            return False
        if decision.edited and any([each.parameter in decision.edited for each in pieces]):
            return False
        if self._stays:
            staying = self._gradient_page.chunks[self.chunk_index].staying
            return all([(each.parameter, each.start) in staying for each in pieces])
        return not (decision.zeros and any([each.parameter in decision.zeros for each in pieces]))

    def decide(self, decision: Decision) -> None:
        """Fix what to compute: IDLE -> READY, or no change of READING. Gradients that stay can still be read
        from their page, unless it is consumed. Waits for others that are on their way home, and raises
        `GradientCopies.failure` if one was lost.
        """
        if self.state is UpdateState.READING and self._version != self._state_page.version:
            self.cancel()
        if self._stays:
            staying = self._gradient_page.chunks[self.chunk_index].staying
            self._staying = [
                staying[each.parameter, each.start] if each.parameter in decision.parameters else None
                for each in self._update.chunk.pieces
            ]
        else:
            self._gradient_page.settle(self.chunk_index)
        self.decision = decision
        if self.state is UpdateState.IDLE:
            self.state = UpdateState.READY

    def read(self) -> bool:
        """Begin to copy up what the visit needs: IDLE or READY -> READING. Returns False if there is no room.

        Gradients that come up must be decided.
        """
        if self._store.visiting.largest_free < self.nbytes:
            return False
        with self._store.visiting.lease(self.nbytes) as lease:
            memory = lease.residency()
        self._there = memory[: self.state_bytes], memory[self.state_bytes :]
        self._version = self._state_page.version
        if not self._places:
            self._places = [*self._find_places()]
        _, states, gradients = self._places
        self._bring(states, self._there[0])
        if not self._stays:
            self._bring(gradients, self._there[1])
        self.state = UpdateState.READING
        return True

    def _find_places(self) -> Iterator[_Place]:
        update, states, gradients = self._update, self._state_page, self._gradient_page
        for home, start, nbytes in (
            (self._page.home, self._page.shard.home_start(self.chunk_index), update.parameter_bytes),
            (states.home, states.offset(self.chunk_index), update.state_bytes),
            (gradients.home, gradients.offset(self.chunk_index), update.gradient_bytes),
        ):
            yield _Place(home, start, home.view(start, nbytes))

    def _bring(self, place: _Place, into: torch.Tensor) -> None:
        home, start, source = place
        home.settle(start, start + source.nbytes, writing=False)
        # The host has waited for all work on bytes that are leased anew.
        transfer = self._store.link.to_device(into, source, 0, Lane.PREFETCH)
        self._store.meter.moved(Edge.HOST_TO_DEVICE, source.nbytes, transfer)
        self._note(place, transfer, writes=False)

    @property
    def arrived(self) -> bool:
        """Whether the copies under way are done. They run in order."""
        return not self._requests or self._requests[-1][1].transfer.done()

    def launch(self) -> None:
        """Update the chunk on the device, and begin to copy the results home: READING -> WRITING. Later work
        on the compute stream sees the new parameters.
        """
        store, link, decision = self._store, self._store.link, self.decision
        assert decision is not None and store.kernels is not None
        mirror, (states, came) = self._page.residency, self._there
        assert mirror is not None
        parameters, kept, _ = self._places
        # No view of the residency is kept, for it would count as one of user code.
        there = mirror[parameters.start : parameters.start + parameters.memory.nbytes]
        self._end()
        if link.checked:
            used = [each.gradient for each in self._staying if each is not None] if self._stays else [came]
            link.uses(User.COMPUTE, *used, writes=False, label="visit")
            link.uses(User.COMPUTE, states, there, writes=True, label="visit")
        if self._chunk is None:
            self._chunk = MovingChunk(self._work(there, states), states)
        updates = []
        for each in self._update.chunk.pieces:
            if each.parameter in decision.parameters:
                hyper, seed = decision.parameters[each.parameter]
                updates.append(ParameterUpdate(decision.hypers[hyper], seed))
        self._chunk.update(store.kernels, states, self._gradients(decision), updates, decision.scale)
        event = link.record()
        assert event is not None
        store.ledger.settle_chunk((self.unit, self.chunk_index))
        self._send(parameters, there, event)
        began = link.stamp()  # the second copy waits for nothing but the first one
        self._send(kept, states, ())
        self.stamps = began, link.stamp()
        self.state = UpdateState.WRITING

    def _send(self, place: _Place, source: torch.Tensor, after: After) -> None:
        """Begin to copy a result home. after: as for `DeviceLink.to_host`."""
        home, start, into = place
        home.settle(start, start + into.nbytes, writing=True)
        home.withdraw(start, start + into.nbytes)
        transfer = self._store.link.to_host(into, source, after)
        self._store.meter.moved(Edge.DEVICE_TO_HOST, source.nbytes, transfer)
        self._note(place, transfer, writes=True)

    def _gradients(self, decision: Decision) -> list[int | None]:
        """The address of each piece's gradient on the device; None: the piece is not updated."""
        if self._stays:
            return [None if each is None else each.gradient.data_ptr() for each in self._staying]
        start, size = self._there[1].data_ptr(), self._gradient_page.dtype(self.chunk_index).itemsize
        return [
            start + each.offset * size if each.parameter in decision.parameters else None
            for each in self._update.chunk.pieces
        ]

    def finish(self) -> None:
        """Wait until the results are home: WRITING -> IDLE."""
        self._end()
        self._store.ledger.updated((self.unit, self.chunk_index))
        self._drop()

    def cancel(self) -> None:
        """Give up states that were brought up: READING -> IDLE or, if the update is decided, READY."""
        self._end()
        self._there = NOTHING, NOTHING
        self.state = UpdateState.IDLE if self.decision is None else UpdateState.READY

    def abandon(self) -> None:
        """Wait until nothing uses the visit's memory, then drop it: any state -> IDLE."""
        with contextlib.suppress(InfinityError):
            self._end()
        self._chunk, self._places = None, ()
        self._drop()

    def _drop(self) -> None:
        self._there, self._staying, self.decision = (NOTHING, NOTHING), (), None
        self.state = UpdateState.IDLE

    def _end(self) -> None:
        requests, self._requests = self._requests, []
        for home, request in requests:
            home.finish(request)

    def _note(self, place: _Place, transfer: Transfer, *, writes: bool) -> None:
        home, start, memory = place
        request = InFlightRequest(start, start + memory.nbytes, writes, transfer)
        home.in_flight.append(request)
        self._requests.append((home, request))

    def _work(self, parameters: torch.Tensor, states: torch.Tensor) -> Update:
        """Describe the chunk's arrays on the device. parameters, states: those of the chunk there, uint8."""
        arrays = self._state_page.arrays(self.chunk_index, states)
        chunk, page = self._update.chunk, self._page
        dtype = page.layout.regions[chunk.region].dtype
        values = parameters[: chunk.count * dtype.itemsize].view(dtype)
        gradients = torch.empty(0, dtype=self._gradient_page.dtype(self.chunk_index), device=values.device)
        return work_of(chunk, gradients, values, arrays, self._states_of_all.rule.moments_of(arrays))


class Visits:
    """The visits of all chunks, and the share of chunks that visit.

    Called under the runtime's lock.
    """

    def __init__(
        self,
        pages: Sequence[ParameterPage],
        gradients: Gradients,
        states: States,
        updates: Mapping[int, Sequence[ChunkUpdate]],
        store: Store,
        *,
        health: Health,
        ended: Callable[[int], None],
    ) -> None:
        """updates: unit -> the CPU's updates of its chunks that have states, for the units whose chunks may
        visit. health: is told of results that are lost. ended: called with the unit of each decided visit
        that has ended.
        """
        self._health = health
        self._gradients = gradients
        self._store = store
        self._ended = ended
        self._lazy = store.plan.update == "lazy"
        self._visits = {
            (unit, each.chunk_index): Visit(pages[unit], gradients, states, each, store, stays=not self._lazy)
            for unit, chunks in updates.items()
            for each in chunks
        }
        every = [each for chunks in updates.values() for each in chunks]
        self._balance = Balance(
            parameters=sum(each.parameter_bytes for each in every),
            gradients=sum(each.gradient_bytes for each in every),
            states=sum(each.state_bytes for each in every),
            lazy=self._lazy,
        )
        self._jobs: list[tuple[Timing, int]] = []
        """(its times, elements) of each update by the CPU that is not counted yet."""
        self._elements = 0, 0
        """Elements in this step whose visits have ended, and of the CPU's updates."""
        self._came = 0, 0.0
        """Bytes of states that came home in this step, and seconds of their copies."""
        self._since: Event | None = None
        self._last: Event | None = None
        """Events that have happened: the first and the last between which results of this step came home."""
        self._numbers = {key: number for number, key in enumerate(self._visits)}
        self._of = {
            unit: [self._visits[unit, each.chunk_index] for each in updates[unit]] for unit in updates
        }
        self._order: dict[int, None] = {}
        """The units that have been updated in this step, in order; an ordered set."""
        self._next: dict[Visit, None] = {}
        """Visits whose states are to be read ahead, in the order in which their updates are expected."""
        self._decided: deque[Visit] = deque()
        """Those whose update is decided and whose states are not read yet, in order."""
        self._reading: dict[Visit, None] = {}
        """Those whose states are read, decided or not, in the order in which they arrive."""
        self._writing: deque[Visit] = deque()
        """Those that are launched and not ended, in order."""
        self._full = False
        """Whether there was no room for the next one whose states are to be read."""
        self._to_launch: Counter[int] = Counter()
        self._to_end: Counter[int] = Counter()
        """Unit -> number of its decided visits that are not launched, and that have not ended."""
        if not self._lazy:
            gradients.stays = self.chosen

    def chosen(self, unit: int, chunk_index: int) -> bool:
        """Whether a chunk is to visit in this step; see [Note: which chunks visit]."""
        number = self._numbers.get((unit, chunk_index))
        if number is None or not self._visits[unit, chunk_index].has_states:
            return False
        share = self.share
        return int((number + 1) * share) > int(number * share)

    @property
    def share(self) -> float:
        """The share of chunks that visit in this step, from 0 to 1."""
        return self._balance.share

    def computes(self, job: Timing, numel: int) -> None:
        """Note that the CPU updates a chunk of `numel` elements. job: gives its begin and end."""
        self._jobs.append((job, numel))
        self._elements = self._elements[0], self._elements[1] + numel

    def take(self, unit: int, decision: Decision, updates: Sequence[ChunkUpdate]) -> list[ChunkUpdate]:
        """Decide the visits of those chunks that can follow. Returns the updates that are left to the CPU.

        Raises the error by which a gradient was lost.
        """
        left = []
        self._order[unit] = None
        for update in updates:
            visit = self._visits.get((unit, update.chunk_index))
            if visit is None:
                left.append(update)
                continue
            self._next.pop(visit, None)  # states read now for the next step would be old then
            if (self._lazy and not self.chosen(unit, update.chunk_index)) or not visit.can_follow(decision):
                self._give_up(visit)
                left.append(update)
                continue
            visit.decide(decision)
            if visit.state is UpdateState.READY:
                if self._reading.pop(visit, self) is not self:  # what came up was old, and gave its room back
                    self._full = False
                self._decided.append(visit)
            self._to_launch[unit] += 1
            self._to_end[unit] += 1
        if not self._lazy:
            for update in left:
                self._gradients.pages[unit].send_home(update.chunk_index)
        return left

    def advance(self) -> None:
        """Advance the visits without waiting for a copy."""
        while self._writing and self._writing[0].arrived:
            self._finish()
        if not self._full:
            self._read()
        for visit in [*self._reading]:
            if visit.decision is not None:
                if not visit.arrived:
                    return
                self._launch(visit)

    def step(self) -> bool:
        """Wait until one more decided visit is launched. Returns False if there is none."""
        for visit in self._reading:
            if visit.decision is not None:
                break
        else:
            if not self._decided:
                return False
            visit = self._decided[0]
            while not visit.read():
                if self._writing:
                    self._finish()
                else:
                    self._give_up(next(reversed(self._reading)))
            self._reading[self._decided.popleft()] = None
        self._launch(visit)
        self.advance()
        return True

    def complete(self, unit: int) -> bool:
        """Wait until a decided visit of the unit has advanced. Returns False if there is none."""
        if self._to_launch[unit]:
            return self.step()
        if self._to_end[unit]:
            self._finish()
            return True
        return False

    def pending(self, unit: int) -> bool:
        """Whether a decided visit of the unit has not ended."""
        return self._to_end[unit] > 0

    def outstanding(self) -> Iterator[tuple[int, int]]:
        """Yield (unit, index of the chunk) of each decided visit that has not ended."""
        for each in (*self._writing, *self._reading, *self._decided):
            if each.decision is not None:
                yield each.unit, each.chunk_index

    def stepped(self) -> None:
        """Begin what the step has decided, and choose the chunks that visit in the next step."""
        self._measure()
        order, self._order = [*self._order], {}
        if not self._lazy:
            for visit in [each for each in self._reading if each.decision is None]:
                self._give_up(visit)
            chunks = (visit for unit in order for visit in self._of.get(unit, ()))
            self._next = {each: None for each in chunks if self.chosen(each.unit, each.chunk_index)}
        self.advance()

    def abandon(self) -> None:
        """Wait until no visit uses memory, and drop all."""
        for queue in (self._next, self._decided, self._reading, self._writing):
            queue.clear()
        self._to_launch.clear()
        self._to_end.clear()
        for visit in self._visits.values():
            visit.abandon()

    def _read(self) -> None:
        """Begin to read the states of visits, as far as there is room: those of decided ones first."""
        while self._decided:
            if not self._decided[0].read():
                self._full = True
                return
            self._reading[self._decided.popleft()] = None
        while self._next:
            visit = next(iter(self._next))
            if not visit.may_begin:
                return
            if not visit.read():
                self._full = True
                return
            del self._next[visit]
            self._reading[visit] = None

    def _give_up(self, visit: Visit) -> None:
        """Give up states that were read ahead, if they were."""
        if visit in self._reading:
            del self._reading[visit]
            visit.cancel()
            self._full = False

    def _launch(self, visit: Visit) -> None:
        del self._reading[visit]
        self._writing.append(visit)
        self._to_launch[visit.unit] -= 1
        try:
            visit.launch()
        except InfinityError as error:
            self._health.lose(error)  # the chunk may be updated in part
            raise

    def _finish(self) -> None:
        visit = self._writing[0]
        try:
            visit.finish()
        except InfinityError as error:
            self._health.lose(error)  # the only new bytes did not come home
            raise
        self._writing.popleft()
        self._full = False
        self._to_end[visit.unit] -= 1
        self._elements = self._elements[0] + visit.numel, self._elements[1]
        began, ended = visit.stamps
        if began is not None and ended is not None and ended.done():
            seconds = ended.milliseconds_since(began) / 1e3
            self._came = self._came[0] + visit.state_bytes, self._came[1] + seconds
            self._since, self._last = self._since or began, ended
        self._ended(visit.unit)

    def _measure(self) -> None:
        """Balance by what was measured since the last call. Waits for nothing: what is under way is counted
        in the next step.
        """
        times = [job.times() for job, _ in self._jobs]
        done = [each for each in times if each is not None]
        computed = sum(n for (_, n), each in zip(self._jobs, times, strict=True) if each is not None)
        self._jobs = [job for job, each in zip(self._jobs, times, strict=True) if each is None]
        (there, here), (came, copying) = self._elements, self._came
        since, last = self._since, self._last
        self._elements, self._came = (0, 0), (0, 0.0)
        self._since = None if self._lazy else last
        if since is None or last is None or not (there and here and computed and copying):
            return
        seconds = last.milliseconds_since(since) / 1e3
        if self._lazy:  # the CPU may have ended later
            seconds = max(seconds, (max(end for _, end in done) - min(began for began, _ in done)) / 1e9)
        step = Measured(
            there=there,
            here=here,
            computed=computed,
            busy=busy_seconds(done),
            link=came / copying,
            seconds=seconds,
        )
        self._balance.stepped(step)
        self._store.meter.visited(there / (there + here))
