"""Visits: updates of chunks on the device whose optimizer states are at home in host RAM.

An update by the CPU moves some 30 bytes of host RAM an element: it reads and writes parameters and states,
gradients come down before, and parameters go up. Where that limits a step, a share of the chunks visits the
device: their states go up, the device's kernel updates them there, with the parameters in place, and the
results come down. That moves some 22 bytes of host RAM an element. The gradients of these chunks stay on the
device until they are used. The CPU updates the other chunks meanwhile.

[Note: which chunks visit]
Which chunks visit in a step is fixed when the step before ends, because their gradients are not copied to
RAM. The share of them follows from what the last step has measured (infinity/optim/balance.py). Chunks that
visit and chunks that do not take turns. A chunk that was to visit and cannot, because it has no moments yet
or the user has edited its parameters, is updated by the CPU, and its gradients are copied to RAM then.

[Note: order of a visit]
States that are on their way up before their update is decided are reads of their home, and results on their
way down are writes of theirs: whoever changes or reads a home waits for them ([Note: order of requests] in
infinity/pages/home.py). If other code writes to the states meanwhile, `StatePage.version` differs, and they
are brought up again. An update counts as pending until its results are in RAM.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

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
from infinity.tiers.driver import Event
from infinity.tiers.link import Lane, Timing, Transfer, User


class Visit:
    """The visits of one chunk to the device, and the state of the present one.

    IDLE -- read --> READING -- decide --> READING -- launch --> WRITING -- finish --> IDLE
      |                                       ^
      +-- decide --> READY -- read -----------+
    """

    def __init__(
        self, page: ParameterPage, gradients: Gradients, states: States, update: ChunkUpdate, store: Store
    ):
        self.unit, self.chunk_index = page.index, update.chunk_index
        self.state = UpdateState.IDLE
        self.decision: Decision | None = None
        """What the update computes; None until that is decided."""
        self.nbytes = update.state_bytes
        """Bytes of the chunk's states."""
        self._page = page
        self._gradient_page = gradients.pages[page.index]
        self._states_of_all = states
        self._state_page = states.pages[page.index]
        self._update = update
        self._store = store
        self._parameters = page.shard.home_start(self.chunk_index), update.parameter_bytes
        """(start in the parameter page, bytes) of the chunk's parameters."""
        self._states = NOTHING
        """The chunk's states on the device, uint8 (nbytes,)."""
        self._gradients: Sequence[StayingPiece | None] = ()
        """The gradient of each piece of the chunk; None: the piece is not updated."""
        self._version = 0
        self._requests: list[tuple[Home, InFlightRequest]] = []
        """The copies under way, up or down, and the homes that know them."""
        self._chunk: MovingChunk | None = None
        self._stamps: tuple[Event | None, Event | None] = None, None
        """Events before and after the copy of the states home."""
        self.seconds = 0.0
        """Seconds that this copy took in the last visit."""

    @property
    def has_states(self) -> bool:
        """Whether the chunk's states have values, which its first update makes."""
        return self._state_page.begun[self.chunk_index]

    @property
    def may_begin(self) -> bool:
        """Whether the states can be read now: they have values, and no update of them is under way."""
        return self.state is UpdateState.IDLE and self._update.can_read_ahead

    def can_follow(self, decision: Decision) -> bool:
        """Whether the device can compute a decided update: all gradients that it uses stay there, and all
        masters and moments have values.
        """
        staying, chosen = self._gradient_page.chunks[self.chunk_index].staying, decision.parameters
        pieces = [each for each in self._update.chunk.pieces if each.parameter in chosen]
        return (
            bool(pieces)
            and decision.average is None
            and self.chunk_index not in decision.fresh
            and all([(each.parameter, each.start) in staying for each in pieces])
            and not any([each.parameter in decision.edited for each in pieces])
        )

    def decide(self, decision: Decision) -> None:
        """Fix what to compute: IDLE -> READY, or no change of READING. The gradients can still be read from
        their page, unless it is consumed.
        """
        if self.state is UpdateState.READING and self._version != self._state_page.version:
            self.cancel()
        staying = self._gradient_page.chunks[self.chunk_index].staying
        self._gradients = [
            staying[each.parameter, each.start] if each.parameter in decision.parameters else None
            for each in self._update.chunk.pieces
        ]
        self.decision = decision
        if self.state is UpdateState.IDLE:
            self.state = UpdateState.READY

    def read(self) -> bool:
        """Begin to copy the states up: IDLE or READY -> READING. Returns False if there is no room."""
        if self._store.visiting.largest_free < self.nbytes:
            return False
        with self._store.visiting.lease(self.nbytes) as lease:
            states = lease.residency()
        home, offset = self._state_page.home, self._state_page.offset(self.chunk_index)
        home.settle(offset, offset + self.nbytes, writing=False)
        self._version = self._state_page.version
        source = home.view(offset, self.nbytes)
        # The host has waited for all work on bytes that are leased anew.
        transfer = self._store.copy_up(states, source, lane=Lane.PREFETCH)
        self._states = states
        self._note(home, offset, self.nbytes, transfer, writes=False)
        self.state = UpdateState.READING
        return True

    @property
    def arrived(self) -> bool:
        """Whether the copies under way are done."""
        return all([request.transfer.done() for _, request in self._requests])

    def launch(self) -> None:
        """Update the chunk on the device, and begin to copy the results home: READING -> WRITING. Later work
        on the compute stream sees the new parameters.
        """
        store, link, decision = self._store, self._store.link, self.decision
        assert decision is not None and store.kernels is not None
        start, nbytes = self._parameters
        mirror = self._page.residency
        assert mirror is not None
        there = mirror[start : start + nbytes]
        self._end()
        gradients = [None if each is None else each.gradient for each in self._gradients]
        used = [each for each in gradients if each is not None]
        link.uses(User.COMPUTE, *used, writes=False, label="visit")
        link.uses(User.COMPUTE, self._states, there, writes=True, label="visit")
        if self._chunk is None:
            self._chunk = MovingChunk(self._work(there), self._states)
        chosen = [
            each.parameter for each in self._update.chunk.pieces if each.parameter in decision.parameters
        ]
        hypers = [decision.parameters[each] for each in chosen]
        updates = [ParameterUpdate(decision.hypers[hyper], seed) for hyper, seed in hypers]
        self._chunk.update(store.kernels, self._states, gradients, updates, decision.scale)
        event = link.record()
        assert event is not None
        store.ledger.settle_chunk((self.unit, self.chunk_index))
        offset = self._state_page.offset(self.chunk_index)
        for home, begin, source in (
            (self._page.home, start, there),
            (self._state_page.home, offset, self._states),
        ):
            home.settle(begin, begin + source.nbytes, writing=True)
            home.withdraw(begin, begin + source.nbytes)
            began = link.stamp()  # before the second copy, which waits for nothing but the first one
            transfer = store.copy_down(home.view(begin, source.nbytes), source, event)
            self._note(home, begin, source.nbytes, transfer, writes=True)
        self._stamps = began, link.stamp()
        self.state = UpdateState.WRITING

    def finish(self) -> None:
        """Wait until the results are home: WRITING -> IDLE."""
        self._end()
        began, ended = self._stamps
        if began is not None and ended is not None and ended.done():
            self.seconds = ended.milliseconds_since(began) / 1e3
        self._store.ledger.updated((self.unit, self.chunk_index))
        self._drop()

    def cancel(self) -> None:
        """Give up states that were brought up: READING -> IDLE or, if the update is decided, READY."""
        self._end()
        self._states = NOTHING
        self.state = UpdateState.IDLE if self.decision is None else UpdateState.READY

    def abandon(self) -> None:
        """Wait until nothing uses the visit's memory, then drop it: any state -> IDLE."""
        with contextlib.suppress(InfinityError):
            self._end()
        self._chunk = None
        self._drop()

    def _drop(self) -> None:
        self._states, self._gradients, self.decision = NOTHING, (), None
        self.state = UpdateState.IDLE

    def _end(self) -> None:
        requests, self._requests = self._requests, []
        for home, request in requests:
            home.finish(request)

    def _note(self, home: Home, start: int, nbytes: int, transfer: Transfer, *, writes: bool) -> None:
        request = InFlightRequest(start, start + nbytes, writes, transfer)
        home.in_flight.append(request)
        self._requests.append((home, request))

    def _work(self, parameters: torch.Tensor) -> Update:
        """Describe the chunk's arrays on the device. parameters: those of the chunk there, uint8."""
        arrays = self._state_page.arrays(self.chunk_index, self._states)
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
        self._visits = {
            (unit, each.chunk_index): Visit(pages[unit], gradients, states, each, store)
            for unit, chunks in updates.items()
            for each in chunks
        }
        every = [each for chunks in updates.values() for each in chunks]
        self._balance = Balance(
            parameters=sum(each.parameter_bytes for each in every),
            gradients=sum(each.gradient_bytes for each in every),
            states=sum(each.state_bytes for each in every),
        )
        self._jobs: list[tuple[Timing, int]] = []
        """(its times, elements) of each update by the CPU that is not counted yet."""
        self._elements = 0, 0
        """Elements in this step of chunks that visit, and of chunks that were left to the CPU."""
        self._stamp: Event | None = None
        """An event at the end of the last step."""
        self._came = 0, 0.0
        """Bytes of states that came home in this step, and seconds of their copies."""
        self._numbers = {key: number for number, key in enumerate(self._visits)}
        self._of = {
            unit: [self._visits[unit, each.chunk_index] for each in updates[unit]] for unit in updates
        }
        self._order: dict[int, None] = {}
        """The units that have been updated in this step, in order; an ordered set."""
        self._next: deque[Visit] = deque()
        """Visits whose states are to be read ahead, in the order in which their updates are expected."""
        self._ahead: deque[Visit] = deque()
        """Those whose states are read and whose update is not decided."""
        self._decided: deque[Visit] = deque()
        """Those whose update is decided and not launched, in order."""
        self._writing: deque[Visit] = deque()
        """Those that are launched and not ended, in order."""
        gradients.stays = self.chosen

    def chosen(self, unit: int, chunk_index: int) -> bool:
        """Whether a chunk is to visit in this step; see [Note: which chunks visit]."""
        number = self._numbers.get((unit, chunk_index))
        if number is None or not self._visits[unit, chunk_index].has_states:
            return False
        return int((number + 1) * self.share) > int(number * self.share)

    @property
    def share(self) -> float:
        """The share of chunks that visit in this step, from 0 to 1."""
        return self._balance.share

    def computes(self, job: Timing, numel: int) -> None:
        """Note that the CPU updates a chunk of `numel` elements. job: gives its begin and end."""
        self._jobs.append((job, numel))

    def take(self, unit: int, decision: Decision, updates: Sequence[ChunkUpdate]) -> list[ChunkUpdate]:
        """Decide the visits of those chunks that can follow. Returns the updates that are left to the CPU."""
        left = []
        self._order[unit] = None
        for update in updates:
            visit = self._visits.get((unit, update.chunk_index))
            if visit is None:
                left.append(update)
                continue
            for queue in (self._next, self._ahead):  # states read now for the next step would be old then
                if visit in queue:
                    queue.remove(visit)
            if visit.can_follow(decision):
                visit.decide(decision)
                self._decided.append(visit)
            else:
                if visit.state is UpdateState.READING:
                    visit.cancel()
                left.append(update)
        here = sum([update.chunk.count for update in left])
        there = sum([update.chunk.count for update in updates]) - here
        self._elements = self._elements[0] + there, self._elements[1] + here
        page = self._gradients.pages[unit]
        for update in left:
            page.send_home(update.chunk_index)
        return left

    def advance(self) -> None:
        """Advance the visits without waiting for a copy."""
        while self._writing and self._writing[0].arrived:
            self._finish()
        self._read()
        for visit in [*self._decided]:  # their states arrive in the order in which they are read
            if visit.state is UpdateState.READING:
                if not visit.arrived:
                    return
                self._launch(visit)

    def step(self) -> bool:
        """Wait until one more decided visit is launched. Returns False if there is none."""
        if not self._decided:
            return False
        reading = (each for each in self._decided if each.state is UpdateState.READING)
        visit = next(reading, self._decided[0])
        while visit.state is not UpdateState.READING and not visit.read():
            if self._writing:
                self._finish()
            else:
                self._ahead.pop().cancel()
        self._launch(visit)
        self.advance()
        return True

    def complete(self, unit: int) -> bool:
        """Wait until a decided visit of the unit has advanced. Returns False if there is none."""
        if any([each.unit == unit for each in self._decided]):
            return self.step()
        if any([each.unit == unit for each in self._writing]):
            self._finish()
            return True
        return False

    def pending(self, unit: int) -> bool:
        """Whether a decided visit of the unit has not ended."""
        return any([each.unit == unit for queue in (self._writing, self._decided) for each in queue])

    def outstanding(self) -> Iterator[tuple[int, int]]:
        """Yield (unit, index of the chunk) of each decided visit that has not ended."""
        for each in (*self._writing, *self._decided):
            yield each.unit, each.chunk_index

    def stepped(self) -> None:
        """Choose the chunks that visit in the next step."""
        self._measure()
        while self._ahead:
            self._ahead.pop().cancel()
        order, self._order = [*self._order], {}
        self._next = deque(
            visit
            for unit in order
            for visit in self._of.get(unit, ())
            if self.chosen(unit, visit.chunk_index)
        )

    def abandon(self) -> None:
        """Wait until no visit uses memory, and drop all."""
        for queue in (self._next, self._ahead, self._decided, self._writing):
            queue.clear()
        for visit in self._visits.values():
            visit.abandon()

    def _read(self) -> None:
        """Begin to read the states of visits, as far as there is room: those of decided ones first."""
        for visit in self._decided:
            if visit.state is UpdateState.READY and not visit.read():
                return
        while self._next and self._next[0].may_begin:
            visit = self._next[0]
            if not visit.read():
                return
            self._ahead.append(self._next.popleft())

    def _launch(self, visit: Visit) -> None:
        self._decided.remove(visit)
        self._writing.append(visit)
        with self._losing():
            visit.launch()

    def _finish(self) -> None:
        visit = self._writing[0]
        with self._losing():
            visit.finish()
        self._writing.popleft()
        self._came = self._came[0] + visit.nbytes, self._came[1] + visit.seconds
        self._ended(visit.unit)

    def _measure(self) -> None:
        """Balance by what was measured since the last call."""
        times = [job.times() for job, _ in self._jobs]
        done = [each for each in times if each is not None]
        busy = busy_seconds(done)
        computed = sum(n for (_, n), each in zip(self._jobs, times, strict=True) if each is not None)
        self._jobs = [job for job, each in zip(self._jobs, times, strict=True) if each is None]
        stamp, before = self._store.link.stamp(), self._stamp
        (there, here), (came, copying) = self._elements, self._came
        self._stamp, self._elements, self._came = stamp, (0, 0), (0, 0.0)
        if stamp is None or before is None or not (there and here and computed and copying):
            return
        stamp.synchronize()
        step = Measured(
            there=there,
            here=here,
            computed=computed,
            busy=busy,
            link=came / copying,
            seconds=stamp.milliseconds_since(before) / 1e3,
        )
        self._balance.stepped(step)
        self._store.meter.visited(there / (there + here))

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Context in which an error leaves a chunk updated in part, and the runtime useless."""
        try:
            yield
        except InfinityError as error:
            self._health.lose(error)
            raise
