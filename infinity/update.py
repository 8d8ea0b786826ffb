"""The update: which chunks a step changes, and when each is changed before anybody uses it again.

`step` decides everything - which parameters, with which hyper-parameters, scale and gradients - and the
chunks then stream through host RAM in the order in which the next forward uses them: some are read while one
is computed and others are written, and all of it while the model computes. Whoever wants a unit meanwhile
(`complete`) waits for its chunks only. What rests in host RAM as a whole is updated at once where the CPU
computes the model too: there is nothing to overlap. So is what the device updates, where all of it rests: the
stream that it is queued on has it done before anything that comes later.

[Note: errors]
A read that fails changes nothing: its chunk is due again, and is read again when somebody waits for it, who
is told if that fails as well. An outcome that cannot be written is gone: `failure` says so, for good.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from infinity import cpu_adam
from infinity.chunk_update import ChunkUpdate, Due, Incoming, gather, segments_of
from infinity.device_units import DeviceUnits
from infinity.device_update import Turn
from infinity.errors import InfinityError
from infinity.gradients import Gradients
from infinity.page import ParameterPage, Presence
from infinity.read_ahead import ReadAhead, StatesAhead
from infinity.states import StatePage, States
from infinity.store import Store
from infinity.telemetry import Edge
from infinity.tiers.link import User

GroupOf = Callable[[int, int], Mapping[str, Any] | None]
"""The live param group of (unit, parameter), or None where the optimizer does not have it."""

_MOST_RUNNING = 8
"""Updates under way that need no slot; more would only lengthen queues."""


class Updater:
    """All updates of a runtime that are due or under way. Called under the runtime's lock."""

    def __init__(
        self,
        pages: Sequence[ParameterPage],
        gradients: Gradients,
        states: States,
        store: Store,
        *,
        threads: cpu_adam.ThreadPool,
        on_device: DeviceUnits | None,
        incoming: Callable[[int], Incoming | None],
        ahead: ReadAhead | None,
        lazy: bool,
    ) -> None:
        """on_device: the units that the device updates. incoming: of a unit, see chunk_update.gather.

        lazy: whether updates may end after `step`.
        """
        self.lazy = lazy
        self.failure: InfinityError | None = None
        """Why there are parameters that nobody has any more."""
        self._pages = pages
        self._incoming = incoming
        self._gradients = gradients
        self._states = states
        self._store = store
        self._threads = threads
        self._on_device = on_device
        self._ahead = ahead
        self._shares_cpu = store.plan.device.type == "cpu"
        self._due: dict[int, deque[Due]] = {}
        """Unit -> its chunks that nobody has begun, in the order of use."""
        self._running: list[ChunkUpdate] = []
        self._left: dict[int, int] = {}
        """Unit -> how many of its chunks are due or running."""
        self._unread: set[int] = set()
        """Units of which a read ahead failed: nobody tries again before somebody waits for them."""
        self._copies: deque[ChunkUpdate] = deque()
        """Of which only the copy up to the device is under way, from their slots."""

    def step(self, group_of: GroupOf, order: Sequence[int], exposed: Callable[[int], bool]) -> None:
        """Update every parameter that has a gradient and a group: now, or before its next use.

        order: units as the next forward is expected to use them. exposed: whether code outside sees a unit's
        bytes, which is then updated before this returns. Raises StorageError; some chunks are updated then
        and others not.
        """
        later = [page for page in self._pages if not self._gradients.pages[page.index].spent]
        for page in later:
            self.complete(page.index)  # which nobody used since the last step
        self._store.link.drain()
        for page in later:
            self._make_due(page, group_of)
        # Before any of them is begun: an update sees the bytes of its unit, too.
        seen = [page.index for page in later if page.index in self._left and exposed(page.index)]
        first = {unit: place for place, unit in enumerate(order)}
        ordered = sorted(self._due, key=lambda each: first.get(each, len(order) + each))
        self._due = {unit: self._due[unit] for unit in ordered}
        if self._ahead is not None:
            self._ahead.clear()  # of units that have no update now
            self._ahead.choose(ordered, order)
        if not self.lazy:
            self.complete_all()
            self._store.settle()
            return
        for unit in seen:
            self.complete(unit)
        self._begin_updates()

    def begin_early(self, unit: int, group_of: GroupOf, exposed: Callable[[int], bool]) -> None:
        """Update a unit with the gradients that it has, before the `step` that they are for.

        Nobody else sees these gradients any more. Its pages are at home, or resident: not arriving in memory
        of the device's own. exposed: as of `step`; its update is then over when this returns.
        """
        self.complete(unit)
        seen = exposed(unit)
        self._store.link.follow_compute()  # whose kernels may still read what a copy up overwrites
        self._gradients.pages[unit].spent = True
        self._make_due(self._pages[unit], group_of)
        if seen:
            self.complete(unit)
        self._begin_updates()

    def pending(self, unit: int) -> bool:
        """Whether the unit's parameters are not yet what the last step makes of them."""
        return unit in self._left

    def begun(self, unit: int) -> bool:
        """Whether the unit is pending, and something for it under way."""
        return any(each.due.unit == unit for each in self._running)

    def complete(self, unit: int) -> None:
        """Bring the updates of a unit to their end, but for writes. Raises StorageError; see the note."""
        self._unread.discard(unit)
        while unit in self._left:
            while self._begin_next(unit, self._store.try_slot):
                pass
            running = next((each for each in self._running if each.due.unit == unit), None)
            if running is None:
                self._begin_next(unit, self._store.slot)
            else:
                self._end(running)
                self.advance()  # what follows takes the slots that came free: the disk has no pause here

    def complete_all(self) -> None:
        """`complete` every unit."""
        for unit in list(self._left):
            self.complete(unit)

    def release(self, unit: int) -> None:
        """The unit's page is about to leave or come anew: afterwards nothing runs in its present bytes, nor
        is copied into them.

        Reads that fail raise nothing here.
        """
        for running in [each for each in self._running if each.due.unit == unit]:
            self._end_quietly(running)
        for copied in [each for each in self._copies if each.due.unit == unit]:
            copied.end()
            self._copies.remove(copied)

    def advance(self) -> None:
        """Move on what needs no waiting, and begin what has room."""
        while self._copies and self._copies[0].copied:
            self._copies.popleft()
        for running in list(self._running):
            if running.ticket is None and running.arrived:
                self._submit_quietly(running)
        for running in list(self._running):
            if running.ticket is not None and (self._shares_cpu or running.ticket.done()):
                self._take_home(running)
            if running.copied:
                self._forget(running)
        if self._ahead is not None and not self._due:
            self._ahead.advance(self.pending)
        while self._due:
            unit, queue = next(iter(self._due.items()))
            enough = len(self._running) >= _MOST_RUNNING and queue[0].in_place
            if enough or not self._can_begin(unit) or not self._begin_next(unit, self._store.try_slot):
                return

    def free_a_slot(self) -> bool:
        """Bring the oldest update, or copy up, to its end; False if there is none.

        Before one is under way, begin one whose gradient has kept its slot.
        """
        if self._copies:
            self._copies.popleft().end()
            return True
        if self._running:
            self._end_quietly(self._running[0])
            return True
        every = (due for queue in self._due.values() for due in queue)
        staged = next((due for due in every if due.stage is not None or due.ahead), None)
        return staged is not None and self._begin(staged, _no_slot)

    def abandon(self) -> None:
        """Forget what is due, and wait until nothing is under way."""
        if self._ahead is not None:
            self._ahead.clear()
        for due in (each for queue in self._due.values() for each in queue):
            for ahead in due.ahead:
                ahead.end()
        self._due.clear()
        self._left.clear()
        self._unread.clear()
        for running in self._running:
            running.end()
        self._running.clear()
        for running in self._copies:
            running.end()
        self._copies.clear()

    # --- what is due ------------------------------------------------------------------------------------

    def _due_of(self, page: ParameterPage, group_of: GroupOf) -> list[Due]:
        """The updates of a unit in this step."""
        found = []
        state, gradients = self._states.pages[page.index], self._gradients.pages[page.index]
        for number, chunk in enumerate(page.layout.chunks):
            pieces = [
                (piece, group)
                for piece in self._gradients.with_content(page.index, chunk)
                if (group := group_of(page.index, piece.parameter)) is not None
            ]
            if not pieces:
                continue
            segments, hypers = segments_of(self._states.rule, state, pieces)
            found.append(
                Due(
                    page=page,
                    state=state,
                    gradients=gradients,
                    number=number,
                    segments=segments,
                    hypers=hypers,
                    scale=self._gradients.unscale,
                    begun=state.begun[number],
                    edited=[each for each in chunk.pieces if each.parameter in state.edited],
                    ahead=self._take_ahead(page.index, number),
                    stage=self._gradients.lend_stage(page.index, number),
                )
            )
        return found

    def _take_ahead(self, unit: int, number: int) -> list[StatesAhead]:
        ahead = None if self._ahead is None else self._ahead.take(unit, number)
        return [] if ahead is None else [ahead]

    def _make_due(self, page: ParameterPage, group_of: GroupOf) -> None:
        """From here on every count says that the unit's step was."""
        if self._on_device is not None and page.index in self._on_device:
            self._update_on_device(self._on_device, page.index, group_of)
        elif due := self._due_of(page, group_of):
            self._due[page.index] = deque(due)
            self._left[page.index] = len(due)
        content = self._gradients.pages[page.index].content
        updated = [index for index in content if group_of(page.index, index) is not None]
        if updated:
            with torch._C.DisableTorchFunctionSubclass():
                self._count(page, self._states.pages[page.index], updated, group_of)

    def _update_on_device(self, units: DeviceUnits, unit: int, group_of: GroupOf) -> None:
        """Queue a unit's update behind what the device computes, and before all that will use its outcome."""
        started = time.perf_counter()
        state, rule = self._states.pages[unit], self._states.rule
        known: dict[tuple[int, int, bool], cpu_adam.Hyper] = {}
        turns = {}
        for parameter in self._gradients.pages[unit].content:
            group = group_of(unit, parameter)
            if group is None:
                continue
            step, first = state.steps[parameter] + 1, parameter not in state.has_moments
            key = (id(group), step, first)
            if key not in known:
                known[key] = rule.hyper(group, step, first)
            turns[parameter] = Turn(known[key], state.seed(parameter, step))
        units.update(unit, turns, self._gradients.unscale)
        self._store.meter.updating(time.perf_counter() - started)

    def _count(self, page: ParameterPage, state: StatePage, updated: list[int], group_of: GroupOf) -> None:
        touched = set(updated)
        for number, chunk in enumerate(page.layout.chunks):
            if any(piece.parameter in touched for piece in chunk.pieces):
                state.begun[number] = True
        state.edited -= touched
        for index in updated:
            state.steps[index] += 1
            group = group_of(page.index, index)
            if group is not None and self._states.rule.written(group):
                state.has_moments.add(index)
            torch.autograd.graph.increment_version(page.parameters[index])
        page.acknowledge()

    # --- what is under way ------------------------------------------------------------------------------

    def _begin_updates(self) -> None:
        """Of what was just made due."""
        self.advance()
        if self._shares_cpu:
            self._update_in_place()

    def _update_in_place(self) -> None:
        """Run what rests in host RAM as a whole, a few at a time, between reads that go on."""
        found = [each for queue in self._due.values() for each in queue if each.in_place]
        for start in range(0, len(found), _MOST_RUNNING):
            for due in found[start : start + _MOST_RUNNING]:
                if due in self._due.get(due.unit, ()):
                    self._begin(due, _no_slot)
                    self._submit(self._running[-1])
            self.advance()

    def _can_begin(self, unit: int) -> bool:
        """Whether a unit's parameters are where an update ahead of time should take them from."""
        if unit in self._unread:
            return False
        page = self._pages[unit]
        if not self._store.device.shares_host or page.home.in_place:
            return True
        return page.presence is not Presence.AWAY or page.living() is not None

    def _begin_next(self, unit: int, acquire: Callable[[], torch.Tensor | None]) -> bool:
        """Begin the next chunk of a unit; False if there is none, or no slot for it."""
        return unit in self._due and self._begin(self._due[unit][0], acquire)

    def _begin(self, due: Due, acquire: Callable[[], torch.Tensor | None]) -> bool:
        # No name for the update here: it would keep its slot from the next one.
        found = gather(due, self._store, self._incoming(due.unit), acquire)
        if found is None:
            return False
        self._running.append(found)
        queue = self._due[due.unit]
        queue.remove(due)
        if not queue:
            del self._due[due.unit]
        return True

    def _submit_quietly(self, running: ChunkUpdate) -> None:
        """Reads have ended: go on, or leave it to whoever waits for the unit to try again."""
        try:
            running.finish_reads()
        except InfinityError:
            self._put_back(running)
            self._unread.add(running.due.unit)
            return
        self._submit(running)

    def _submit(self, running: ChunkUpdate) -> None:
        link = self._store.link
        link.uses(User.HOST, running.gradient, writes=False, label="update")
        link.uses(User.HOST, running.parameter, running.states, writes=True, label="update")
        running.submit(self._states, self._threads, awaited=self._shares_cpu)
        assert running.ticket is not None
        self._store.meter.submitted(running.ticket, sum(each.count for each in running.due.segments))

    def _end(self, running: ChunkUpdate) -> None:
        """Bring one update to its end, but for its writes. Raises StorageError; see the note."""
        if running.ticket is None:
            try:
                with self._store.meter.stalling(Edge.NVME_TO_HOST):
                    running.finish_reads()
            except InfinityError:
                self._put_back(running)
                if running.was_ahead:
                    return  # its chunk is due as before, and what is asked for now is read anew
                raise
            self._submit(running)
        self._take_home(running)
        assert running.copy is not None
        self._store.link.fence(running.copy)
        if not running.copied:
            self._copies.append(running)
        self._forget(running)

    def _take_home(self, running: ChunkUpdate) -> None:
        """Wait for the update itself, and send the outcome on its way."""
        if running.copy is not None:
            return
        assert running.ticket is not None
        started = time.perf_counter()
        running.ticket.result()
        self._store.meter.updating(time.perf_counter() - started)
        try:
            running.take_home(self._store, self._lose)
        except InfinityError as error:
            self._lose(error)
            raise

    def _end_quietly(self, running: ChunkUpdate) -> None:
        try:
            self._end(running)
        except InfinityError:
            if running in self._running:
                raise

    def _put_back(self, running: ChunkUpdate) -> None:
        """A read failed and nothing was changed: the chunk is due again."""
        running.give_up()
        self._running.remove(running)
        unit = running.due.unit
        queue = self._due.pop(unit, deque())
        queue.appendleft(running.due)
        self._due = {unit: queue, **self._due}

    def _forget(self, running: ChunkUpdate) -> None:
        self._running.remove(running)
        unit = running.due.unit
        self._left[unit] -= 1
        if not self._left[unit]:
            del self._left[unit]

    def _lose(self, error: InfinityError) -> None:
        self.failure = self.failure or error.again()


def _no_slot() -> None:
    return None
