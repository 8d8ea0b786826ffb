"""Scheduler: which chunks a step updates, in which order, and who gets bytes of staging.

`step` decides the updates of all units: which parameters, with which hyper-parameters, scale and gradients.
Each unit's update consists of chunk updates (infinity/optim/chunk_update.py), which are READY then. They
acquire staging, host RAM to work in, in the order in which the next forward uses their units. The inputs of
some are read while another computes and the results of others are written, and the model computes meanwhile.
A caller that needs a unit (`complete`) waits for the updates of that unit only.

Units that need no staging do not wait for their turn. If a unit is in host RAM and the CPU computes the model
too, there is nothing to overlap, and its update is computed at once. If a device computes the model, the unit
is submitted to the update threads as a whole (infinity/optim/unit_update.py). If a unit is at home on the
device and the device updates it, the update is queued on the stream of the device, and later work there sees
its results.

[Note: room]
Staging is the host RAM in which chunks are updated if their pages are at home elsewhere. It has two kinds of
users: chunk updates, and gradients that wait in RAM for their update. Both get bytes here and nowhere else. A
request that finds no room first waits for work that ends by itself: writes and copies under way, then updates
that are decided and have begun. Only then is something undone. First, updates that have read their states
ahead of the decision are cancelled. Then gradients are written home. An update that is not decided never gets
the last bytes that a decided one might need. So every request is fulfilled in the end.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

import torch

from infinity import cpu_adam
from infinity.device_update.update import ParameterUpdate
from infinity.errors import InfinityError
from infinity.gradients.device import DeviceUnits
from infinity.gradients.gradients import Gradients
from infinity.layout.chunks import Piece
from infinity.layout.strides import in_memory_order
from infinity.optim.chunk_update import NOTHING, ChunkUpdate, Present, UpdateState
from infinity.optim.decision import Decision, StepOptions, count_step, decide
from infinity.optim.unit_update import UnitUpdate, UpdateInRam
from infinity.optim.visits import Visits
from infinity.pages.gradient_page import GradientPage
from infinity.pages.health import Health
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage, Presence
from infinity.pages.store import Store
from infinity.prefetch.engine import Updates
from infinity.telemetry.stats import Edge
from infinity.tiers.link import ARRIVED, Transfer

_MOST_RUNNING = 8
"""The most updates of chunks that are under way at once if their inputs are in host RAM already. More would
only lengthen queues.
"""
_STAGED = 1 << 62
"""Priority of the computation of updates that hold staging, for which the disk may wait. Units that were
handed over have smaller ones.
"""
_SPARED = 4
"""Reading states ahead (before their update is decided) leaves at least 1 / _SPARED of staging free. This
room is for gradients whose states are not read ahead. When half of staging was left free, a step took 3.7 s
instead of 2.9 s, because the disk waited for room (309M parameters, all on NVMe).
"""


class UpdateScheduler(Updates):
    """Decides and runs the updates of all units of a runtime, chunk by chunk.

    Called under the runtime's lock.
    """

    def __init__(
        self,
        pages: Sequence[ParameterPage],
        gradients: Gradients,
        states: States,
        store: Store,
        *,
        threads: cpu_adam.ThreadPool,
        on_device: DeviceUnits | None,
        health: Health,
    ) -> None:
        """pages: the parameter pages of all units, by index. threads: compute the updates on the CPU.
        on_device: the units that the device updates; None if there are no such units. health: is told of
        results that are lost, after which the runtime cannot be used.
        """
        self._pages = pages
        self._gradients = gradients
        self._states = states
        self._store = store
        self._pool = store.staging
        self._health = health
        self._on_device = on_device
        self._lazy = store.plan.update != "sync"
        """Whether updates may end after `step` has returned."""
        self._shares_cpu = store.plan.device.type == "cpu"
        """Whether the CPU computes the model as well as updates. If so, a thread that waits for an update
        helps to compute the update.
        """
        self._threads = threads
        self._units = [self._make_unit(page) for page in pages]
        self._ready: dict[int, deque[ChunkUpdate]] = {}
        """Unit -> its READY updates, which have not begun. Units and updates are in the order in which they
        are to begin.
        """
        self._active: list[ChunkUpdate] = []
        """Updates that hold staging or are being computed, in the order in which they began."""
        self._copies: deque[tuple[int, Transfer]] = deque()
        """(unit, transfer) of each copy of updated parameters to the device that is still under way. Such a
        copy reads host RAM and writes the unit's parameter page.

        The compute stream is already ordered after these copies.
        """
        self._decided = 0
        """Number of times that updates were decided. The latest ones come first in the update threads,
        because the next forward uses these units first.
        """
        self._early: dict[int, Set[int]] = {}
        """Unit whose update `begin_early` began -> indices of the parameters for which it counted a step."""
        self._first: dict[int, Set[int]] = {}
        """Unit -> those of the parameters in `_early` that had no moments before."""
        self._ahead = self._make_read_ahead()
        self._visits = self._make_visits()

    def _make_unit(self, page: ParameterPage) -> UnitUpdate:
        gradients, states = self._gradients.pages[page.index], self._states.pages[page.index]
        chunks = [
            ChunkUpdate(
                page,
                self._states,
                gradients,
                chunk_index,
                threads=self._threads,
                store=self._store,
                health=self._health,
            )
            for chunk_index in states.kept
        ]
        parameters = frozenset(piece.parameter for each in chunks for piece in each.chunk.pieces)
        in_ram = None
        if chunks and all([home.in_place for home in (page.home, gradients.home, states.home)]):
            in_ram = UpdateInRam(
                chunks, parameters, gradients, threads=self._threads, store=self._store, health=self._health
            )
        return UnitUpdate(chunks, in_ram, parameters)

    def _make_visits(self) -> Visits | None:
        """Make the Visits; None if the plan lets no chunk visit the device."""
        units = self._store.plan.visiting_units
        if not units:
            return None
        updates = {
            unit: [each for each in self._units[unit].chunks if each.state_bytes] for unit in sorted(units)
        }
        return Visits(
            self._pages,
            self._gradients,
            self._states,
            updates,
            self._store,
            health=self._health,
            ended=self._visit_ended,
        )

    def _visit_ended(self, unit: int) -> None:
        self._units[unit].left -= 1

    def _make_read_ahead(self) -> ReadAhead | None:
        """Make the ReadAhead; None if no states are on disk, updates are "sync", or no accumulation was
        declared.
        """
        plan = self._store.plan
        on_disk = any(update.states_on_disk for each in self._units for update in each.chunks)
        whole = plan.rule is not None and plan.rule.matrix  # no chunk update uses the states
        if not on_disk or whole or plan.accumulation is None or plan.update == "sync":
            return None
        return ReadAhead(
            {unit: each.chunks for unit, each in enumerate(self._units)},
            [page.parameters for page in self._pages],
            self._gradients,
            eager=plan.update in ("eager", "speculative"),
            accumulation=plan.accumulation,
            room=plan.staging_bytes // 2,
        )

    # --- gradients --------------------------------------------------------------------------------------

    def accumulate(self, unit: int, parameter: int, gradient: torch.Tensor) -> None:
        """Add a new gradient of a parameter to the parameter's stored gradient.

        unit, parameter: index of the unit, and of the parameter in this unit. gradient: in the memory where
        the model computes, with any dense strides. Raises the errors of `Gradients.adding`, and StorageError
        if a page cannot be read or written.
        """
        gradients = self._gradients
        if self.tentative(unit):
            self._undo(unit)
        with gradients.adding(unit, parameter, gradient.dtype) as page:
            flat = in_memory_order(gradient, page.layout.parameters[parameter].stride)
            if gradients.on_device(unit):
                gradients.add_on_device(unit, parameter, flat)
            elif page.home.in_place:
                gradients.add_in_place(page, parameter, flat)
            else:
                gradients.watch(page, parameter, flat)
                for chunk_index, piece in gradients.pieces(page, parameter):
                    self._stage(page, chunk_index)
                    gradients.add_piece(
                        page, chunk_index, piece, flat[piece.start : piece.start + piece.count]
                    )
        if self._ahead is not None and self._ahead.gradient_added(unit):
            self._read_ahead(self._ahead)

    @property
    def crowded(self) -> bool:
        """Whether the gradients that stay on the device take more bytes than the plan has for them."""
        return self._visits is not None and self._gradients.staying_bytes > self._store.plan.staying_bytes

    def make_room(self) -> None:
        """Wait until the device is not `crowded` any more: let decided updates use the gradients, or else
        send them to host RAM.
        """
        while self.crowded and self._visits is not None:
            if not self._visits.step() and not self._gradients.send_oldest_home():
                return
            self.advance()

    def await_gradients(self, unit: int) -> None:
        """Let visits go on while a unit's gradients come from the device, so that the link does not pause.
        Returns at once if no chunk visits the device.
        """
        page = self._gradients.pages[unit]
        while self._visits is not None and not page.all_arrived and self._visits.step():
            self.advance()

    def accumulate_piece(
        self,
        unit: int,
        chunk_index: int,
        piece: Piece,
        gradient: torch.Tensor,
        *,
        last: bool,
        there: bool = False,
    ) -> Sequence[Transfer]:
        """Add one rank's new gradient of a piece of a parameter to the sum that this rank keeps.

        The first gradient since gradients were cleared begins the sum. gradient: (piece.count,) in host RAM,
        or `there`: in device memory, for a sum on this rank's device; see `DeviceUnits.add_piece`. last:
        whether it is the last gradient that the piece gets from one micro-batch of all ranks. Returns the
        copies that still read `gradient`, where the sum is on a device. Raises the errors of `accumulate`.
        """
        gradients = self._gradients
        if self.tentative(unit):
            self._undo(unit)
        copies: Sequence[Transfer] = ()
        with gradients.adding_piece(unit, piece, last=last) as page:
            again = page.has_piece(chunk_index, piece)
            if gradients.on_device(unit):
                copies = gradients.add_piece_on_device(
                    page, chunk_index, piece, gradient, again=again, there=there
                )
            else:
                self._stage(page, chunk_index)
                gradients.add_piece(page, chunk_index, piece, gradient, again=again, last=last)
        if last and self._ahead is not None and self._ahead.gradient_added(unit):
            self._read_ahead(self._ahead)
        return copies

    def _stage(self, page: GradientPage, chunk_index: int) -> None:
        """Give a chunk's gradients a place in staging, unless they have one or are at home in host RAM."""
        staged = self._gradients.staged
        missing = staged.missing(page, chunk_index)
        if missing:
            staged.add(page, chunk_index, self.take(missing))

    # --- updates ----------------------------------------------------------------------------------------

    def step(self, options: StepOptions, order: Sequence[int], exposed: Callable[[int], bool]) -> None:
        """Update every parameter that has a gradient and a param group: now, or before its next use.

        options: the options of the param groups, such as the learning rate. order: units in the order in
        which the next forward is expected to use them. exposed: function of a unit's index; True if user code
        has views of the unit's bytes. Such a unit is updated before this call returns. If StorageError is
        raised, some chunks have been updated and others have not.
        """
        confirmed = self._confirm(options)
        first = {unit: place for place, unit in enumerate(order)}
        units = sorted(range(len(self._pages)), key=lambda each: first.get(each, len(order) + each))
        later = [unit for unit in units if unit not in confirmed and not self._gradients.pages[unit].consumed]
        for unit in later:
            self.complete(unit)  # the unit may not have been used since the last step
        self.complete_awaited()
        self._store.link.drain()
        # Before any update is decided, because updates have views of their units' bytes from then on, too.
        visible = {unit for unit in later if exposed(unit)}
        for unit in later:
            self._decide(unit, options)
        if options.average is not None:
            self._states.averaged += 1
        if self._early:
            self._count_elsewhere(options)
        seen = [unit for unit in later if self._units[unit].left and unit in visible]
        pending = [unit for unit in units if self._units[unit].left]
        self._ready = {unit: self._ready[unit] for unit in pending if unit in self._ready}
        if self._ahead is not None:
            self._cancel_all()  # what has read ahead may have no update now
            self._ahead.stepped(pending, order)
        if self._visits is not None:
            self._visits.stepped()
        if not self._lazy:
            self.complete_all()
            self._store.settle()
            return
        for unit in seen:
            self._complete_for_user(unit)
        self._begin_updates(pending)

    def begin_early(self, unit: int, options: StepOptions, exposed: Callable[[int], bool]) -> None:
        """Begin the update of a unit with its present gradients, during backward and before the `step` call
        that would otherwise begin it.

        The update uses the gradients up: no other code may read them afterwards. When this is called, the
        unit's parameter page must not be on its way to a device with memory of its own. options, exposed: as
        in `step`; an exposed unit is updated before this call returns.
        """
        self.complete(unit)
        self.complete_awaited()
        seen = exposed(unit)
        had_moments = self._states.pages[unit].has_moments.copy()
        counted = self._decide(unit, options)
        self._early[unit], self._first[unit] = counted, counted - had_moments
        self._gradients.consume(unit)
        if seen:
            self._complete_for_user(unit)
        self._begin_updates((unit,))

    def begin_tentatively(self, unit: int, options: StepOptions, exposed: Callable[[int], bool]) -> None:
        """Begin the speculative update of a unit with its present gradients, during backward, if it can be
        undone; see [Note: speculative updates] in infinity/optim/chunk_update.py.

        `step` confirms the update if it would decide the same one, and else undoes it. A call that needs the
        unit before undoes it, too. The unit's parameter page must not be on its way. options, exposed: as in
        `step`; the update of an exposed unit is left to `step`. So is that of a unit not in
        `Plan.speculating`.
        """
        self.complete(unit)
        self.complete_awaited()
        group = self._units[unit]
        if unit not in self._store.plan.speculating or exposed(unit):
            return
        if group.in_ram is None and not all([update.can_be_undone for update in group.chunks]):
            return
        decision = decide(unit, options, self._gradients, self._states, group.parameters)
        if decision is None:
            return
        try:
            group.tentative = decision
            self._queue(unit, decision, speculative=True)
            self._begin_updates((unit,))
        except Exception:
            self._undo(unit)
            raise

    def undo_all(self) -> None:
        """Undo all speculative updates that `step` has not confirmed."""
        for unit, group in enumerate(self._units):
            if group.tentative is not None:
                self._undo(unit)

    def tentative(self, unit: int) -> bool:
        return self._units[unit].tentative is not None

    def _confirm(self, options: StepOptions) -> Set[int]:
        """Confirm the speculative updates that the step would decide, and undo the others. Returns the units
        of those that are confirmed.
        """
        confirmed = set()
        for unit, group in enumerate(self._units):
            if group.tentative is None:
                continue
            decision = decide(unit, options, self._gradients, self._states, group.parameters)
            failed = any([update.outcome is not None and update.outcome.failed for update in group.updates])
            if failed or decision != group.tentative:
                self._undo(unit)
                continue
            group.tentative = None
            for update in group.updates:
                if update.outcome is not None and update.confirm():
                    group.left -= 1
            with torch._C.DisableTorchFunctionSubclass():
                count_step(self._pages[unit], self._states, self._updated_anywhere(unit, options), options)
            confirmed.add(unit)
            self._store.meter.confirmed()
        return confirmed

    def _undo(self, unit: int) -> None:
        """Undo the speculative update of a unit, so that its pages have the values before."""
        group, page = self._units[unit], self._pages[unit]
        self._ready.pop(unit, None)
        group.tentative, group.left = None, 0
        undone = [update for update in group.updates if update.outcome is not None]
        self._active = [each for each in self._active if each not in undone]
        self._await_copies(unit)  # they may read the homes that are undone
        for update in undone:
            update.undo()
        living = page.living()
        if living is None and page.incoming is not None:  # updates may have used what arrives
            living, arrival = page.incoming
            with contextlib.suppress(InfinityError):
                arrival.wait()
        if living is not None and not (page.permanent and self._store.device.shares_host):
            try:
                self._store.bring(page.home, living, page.shard.own)
            except InfinityError as error:
                self._health.lose(error)  # the model has values of an update that never was
                raise
        self._store.meter.undone()

    def uncount_stopped(self) -> Set[int]:
        """Take back the steps that `begin_early` has counted for units that the device then did not update,
        because a gradient was not finite. Returns these units.
        """
        if self._on_device is None or not self._early:
            return frozenset()
        stopped = self._on_device.stopped() & self._early.keys()
        for unit in stopped:
            state = self._states.pages[unit]
            for index in self._early.pop(unit):
                state.steps[index] -= 1
            state.has_moments -= self._first[unit]
        return stopped

    def _count_elsewhere(self, options: StepOptions) -> None:
        """Count the step for parameters that other ranks update, in units that were updated early. The early
        update could not count it: their gradients may not have been known on this rank when it began.
        """
        for unit, counted in self._early.items():
            page = self._gradients.pages[unit]
            if page.consumed:
                others = self._updated_anywhere(unit, options) - counted
                if others:
                    with torch._C.DisableTorchFunctionSubclass():
                        count_step(self._pages[unit], self._states, others, options)
        self._early.clear()
        self._first.clear()

    def _updated_anywhere(self, unit: int, options: StepOptions) -> Set[int]:
        """The parameters of a unit that the step updates on this rank or on others."""
        having = self._gradients.pages[unit].having
        return {each for each in having if options.group(unit, each) is not None}

    def pending(self, unit: int) -> bool:
        """Whether an update of the unit was decided and has not ended, so that its parameters are out of
        date.
        """
        return self._units[unit].left > 0

    def begun(self, unit: int) -> bool:
        """Whether an update of the unit was decided and has not ended, and the update of at least one chunk
        has begun to read, compute or write.
        """
        if self._visits is not None and self._visits.pending(unit):
            return True
        group = self._units[unit]
        if group.in_ram is not None:
            return group.in_ram.begun
        return group.left > 0 and self._running(unit) is not None

    def complete(self, unit: int) -> None:
        """Wait until the update of a unit has ended, if one is pending, so that the model can use the unit.

        Meanwhile the unit's chunk updates acquire staging and begin. Writes of the results to their homes may
        go on afterwards. Raises StorageError; see [Note: back and lost] in infinity/optim/chunk_update.py.
        """
        group = self._units[unit]
        group.unread = False
        if group.tentative is not None:
            self._undo(unit)
        if not group.left:
            return
        self._begin_in_ram(group)
        self._complete_visits(unit)
        self._take_back(group)
        while group.left:
            while unit in self._ready and self._try_acquire(self._free_place(self._ready[unit][0])):
                pass
            running = self._running(unit)
            if running is None:
                self._acquire(self._ready[unit][0])
            else:
                self._end(running)
                self.advance()  # the next updates take the free room, so that the disk has no pause

    def _complete_for_user(self, unit: int) -> None:
        """Complete a unit, and wait for writes from memory of which user code has views."""
        self.complete(unit)
        self._store.settle_for_user(self._pages[unit].home)

    def outstanding(self) -> Iterator[tuple[int, int]]:
        """Yield (unit, index of the chunk) of each chunk whose update was decided and is not computed yet."""
        for unit, group in enumerate(self._units):
            if group.left:
                for update in group.chunks:
                    if update.decision is not None:
                        yield unit, update.chunk_index
        if self._visits is not None:
            yield from self._visits.outstanding()

    def complete_all(self) -> None:
        """Complete all units whose update is pending. Raises StorageError."""
        for unit, group in enumerate(self._units):
            if group.left:
                self.complete(unit)

    def complete_awaited(self) -> None:
        """Complete all units with an update for which the pending commit waits.

        Does nothing if the commit was given up.
        """
        for unit in self._store.ledger.awaited_units():
            self.complete(unit)

    def release(self, unit: int) -> None:
        """Wait until no update, and no copy of updated parameters to the device, uses the memory that the
        unit's parameter page has now.

        Called before the page leaves or is fetched anew. Errors of failed reads are not raised here.
        """
        self._take_back(self._units[unit])
        while (running := self._running(unit)) is not None:
            self._end_quietly(running)
        self._complete_visits(unit)
        self._await_copies(unit)

    def _await_copies(self, unit: int) -> None:
        """Wait for the copies of the unit's updated parameters to the device that `_deliver` has met."""
        for copied in [each for each in self._copies if each[0] == unit]:
            copied[1].wait()
            self._copies.remove(copied)

    def advance(self) -> None:
        """Advance the updates that are under way, without waiting for a read, a write or a copy, and then
        begin READY updates in their order until staging has no room for the next one.
        """
        self._poll()
        if self._visits is not None:
            self._visits.advance()
        while self._ready:
            unit, updates = next(iter(self._ready.items()))
            enough = len(self._active) >= _MOST_RUNNING and updates[0].has_inputs
            if (
                enough
                or self._held_up(updates[0])
                or not self._can_begin(unit)
                or not self._try_acquire(updates[0])
            ):
                return
        if self._ahead is not None:
            self._read_ahead(self._ahead)

    def finish_copies(self) -> None:
        """Wait for all copies of updated parameters to the device. An unfinished copy holds a view of the
        parameter page that is its destination.
        """
        while self._copies:
            self._copies.popleft()[1].wait()

    def abandon(self) -> None:
        """Give up all updates that have not ended, and wait until no update uses memory any more."""
        self.finish_copies()
        if self._visits is not None:
            self._visits.abandon()
        self._ready.clear()
        self._active.clear()
        for each in self._units:
            each.left, each.tentative = 0, None
            for update in each.updates:
                update.abandon()

    # --- what is decided --------------------------------------------------------------------------------

    def _decide(self, unit: int, options: StepOptions) -> Set[int]:
        """Decide the update of a unit, if one of its parameters has both a gradient and a param group.

        The update is queued on the device, or its chunk updates are made READY (READING, if they have read
        states ahead). Returns the indices of the parameters whose step counts were raised.
        """
        decision = decide(unit, options, self._gradients, self._states)
        if decision is None:
            return frozenset()
        if self._on_device is not None and unit in self._on_device:
            self._update_on_device(self._on_device, unit, decision)
        else:
            self._queue(unit, decision)
        counted = decision.parameters.keys()
        with torch._C.DisableTorchFunctionSubclass():
            count_step(self._pages[unit], self._states, counted, options, decision.averaged)
        return counted

    def _queue(self, unit: int, decision: Decision, *, speculative: bool = False) -> None:
        """Make the updates of a unit's chunks READY (READING, if they have read states ahead)."""
        group = self._units[unit]
        every = chosen = group.changed_by(decision)
        if self._visits is not None:
            chosen = self._visits.take(unit, decision, chosen)
        for update in chosen if self._ahead is not None else ():
            if update.is_ahead and self._held_up(update):
                self._cancel(update)  # it must not hold staging until the commit has ended
        after = self._store.link.record()  # kernels may still read what the copies to the device overwrite
        if group.in_ram is not None:
            group.left = len(every) - len(chosen) + bool(chosen)
            if chosen:
                group.in_ram.decide(decision, chosen, after=after, speculative=speculative)
            return
        group.left = len(every)
        ready = deque(
            [each for each in chosen if each.make_ready(decision, after=after, speculative=speculative)]
        )
        self._active = [each for each in self._active if each.state is not UpdateState.READY]
        if ready:
            self._ready[unit] = ready

    def _update_on_device(self, units: DeviceUnits, unit: int, decision: Decision) -> None:
        """Queue the update of a unit on the device's stream, without waiting for it."""
        started = time.perf_counter()
        updates = {
            parameter: ParameterUpdate(decision.hypers[hyper], seed)
            for parameter, (hyper, seed) in decision.parameters.items()
        }
        home = self._pages[unit].home
        home.withdraw(0, home.nbytes)
        units.update(unit, updates, decision.scale)
        self._store.meter.updating(time.perf_counter() - started)

    def _held_up(self, update: ChunkUpdate) -> bool:
        """Whether the results of an update would need a third slot on disk."""
        return self._store.ledger.blocks((update.unit, update.chunk_index))

    def _free_place(self, update: ChunkUpdate) -> ChunkUpdate:
        """Wait for the pending commit if the update has no slot on disk for its results. Returns `update`."""
        if self._held_up(update):
            self._cancel_all()  # no staging is held meanwhile
            self._store.ledger.wait()
        return update

    # --- what is begun ----------------------------------------------------------------------------------

    def _begin_updates(self, units: Iterable[int]) -> None:
        """Begin updates that have just been decided, as far as staging has room. Where the CPU computes the
        model too, those whose inputs are all in host RAM end before this call returns.
        """
        self._decided += 1
        if not self._shares_cpu:
            for unit in units:
                self._begin_in_ram(self._units[unit])
        self.advance()
        if self._shares_cpu:
            for unit in units:
                self._begin_in_ram(self._units[unit])
            ready = self._ready.values()
            self._compute_staged([each for updates in ready for each in updates if each.has_inputs])

    def _begin_in_ram(self, group: UnitUpdate) -> None:
        """Begin the update of a unit at home in host RAM, if it is due. Where the CPU computes the model too,
        the update ends before this call returns.

        It is computed there in batches of at most _MOST_RUNNING chunks. Between batches other updates are
        advanced, so that their reads go on.
        """
        update = group.in_ram
        if update is None:
            return
        while update.due:
            if not self._shares_cpu:
                self._submitted(update.submit(None, awaited=False, priority=self._decided))
                return
            self._submitted(update.submit(_MOST_RUNNING, awaited=True, priority=_STAGED))
            started = time.perf_counter()
            update.wait()
            self._store.meter.updating(time.perf_counter() - started)
            if self._ready or self._active:
                self.advance()
        if self._shares_cpu:
            self._take_back(group)

    def _complete_visits(self, unit: int) -> None:
        """Wait for the visits of the unit's chunks, and let those of others go on until its updates that were
        handed over are computed, so that the link does not pause.
        """
        group = self._units[unit]
        while self._visits is not None and self._visits.complete(unit):
            pass
        while self._visits is not None and group.in_ram is not None and group.in_ram.running:
            if not self._visits.step():
                return

    def _take_back(self, group: UnitUpdate) -> None:
        """Wait for the computation of a unit at home in host RAM, if it has begun, and let the model use the
        results.
        """
        update = group.in_ram
        if update is None or not update.begun:
            return
        started = time.perf_counter()
        copies = update.take_back()
        if update.outcome is None:
            group.left -= 1
        for copy in copies:
            self._copied(update.page.index, copy)
        self._store.meter.updating(time.perf_counter() - started)

    def _compute_staged(self, updates: Sequence[ChunkUpdate]) -> None:
        """Compute READY updates whose inputs are all in host RAM, and wait for them, in batches as in
        `_begin_in_ram`.
        """
        for first in range(0, len(updates), _MOST_RUNNING):
            batch = updates[first : first + _MOST_RUNNING]
            for update in batch:
                if update.state is UpdateState.READY:  # else the update was begun between two batches
                    self._try_acquire(update)
                    self._compute(update)
            started = time.perf_counter()
            for update in batch:
                if update.state is UpdateState.COMPUTING:
                    assert update.ticket is not None
                    update.ticket.wait()
                    update.write()
                    self._ended(update)
            self._store.meter.updating(time.perf_counter() - started)
            if self._ready or self._active:
                self.advance()

    def _can_begin(self, unit: int) -> bool:
        """Whether the update of a unit may begin before a caller waits for the unit.

        It may not if a read has failed. It may not if it would change the parameters where the model computes
        and the page is away, unless a commit is pending.
        """
        if self._units[unit].unread:
            return False
        if self._store.ledger.pending is not None:
            return True  # the commit should not wait until the model uses the unit
        page = self._pages[unit]
        if not self._store.device.shares_host or page.home.in_place:
            return True
        return page.presence is not Presence.AWAY or page.living() is not None

    # --- what is under way ------------------------------------------------------------------------------

    def _running(self, unit: int) -> ChunkUpdate | None:
        """Return the unit's first active update that is decided; None if there is none."""
        for update in self._active:
            if update.unit == unit and not update.is_ahead:
                return update
        return None

    def _poll(self) -> None:
        """Advance all active updates without waiting for a read, a write or a copy.

        If the CPU also computes the model, this thread helps to compute the updates whose inputs have
        arrived, and waits until they are computed.
        """
        while self._copies and self._copies[0][1].done():
            self._copies.popleft()
        if self._store.ledger.pending is not None:
            for group in self._units:
                if group.in_ram is not None and not group.in_ram.running:
                    self._take_back(group)  # the commit waits for them, and not for the model
        for update in [*self._active]:
            if update.state is UpdateState.READING and update.arrived:
                if update.decision is None:
                    update.arrive()
                else:
                    self._compute_quietly(update)
        for update in [*self._active]:
            if update.state is UpdateState.COMPUTING:
                assert update.ticket is not None
                if self._shares_cpu:
                    self._write(update)
                elif update.ticket.done():
                    update.ticket.wait()  # drops the ticket's references to memory
                    update.write()
            if update.state is UpdateState.WRITING and update.copy.done():
                self._ended(update)

    def _began(self, update: ChunkUpdate) -> None:
        """Record that a READY update has begun: move it from `_ready` to `_active`."""
        self._active.append(update)
        queue = self._ready[update.unit]
        queue.remove(update)
        if not queue:
            del self._ready[update.unit]

    def _compute(self, update: ChunkUpdate) -> None:
        self._submitted(update.compute(awaited=self._shares_cpu, priority=_STAGED))

    def _submitted(self, tickets: cpu_adam.Tickets) -> None:
        """Tell of updates that were submitted to the update threads."""
        if self._visits is None and not self._store.meter.records:
            return
        for each in tickets.each:
            self._store.meter.submitted(each, each.elements)
            if self._visits is not None:
                self._visits.computes(each, each.elements)

    def _compute_quietly(self, update: ChunkUpdate) -> None:
        """Submit an update whose reads have ended. After a failed read, `complete` tries the update again."""
        try:
            update.gather()
        except InfinityError:
            self._put_back(update)
            self._units[update.unit].unread = True
            return
        self._compute(update)

    def _write(self, update: ChunkUpdate) -> None:
        """Wait for the computation of an update, and begin to write its results home."""
        assert update.ticket is not None
        started = time.perf_counter()
        update.ticket.wait()
        self._store.meter.updating(time.perf_counter() - started)
        update.write()

    def _end(self, update: ChunkUpdate) -> None:
        """Wait for the reads and the computation of an active update, and begin its writes.

        After a failed read the update is READY again. The error is raised unless states had been read ahead.
        """
        if update.state is UpdateState.READING:
            try:
                with self._store.meter.stalling(Edge.NVME_TO_HOST):
                    update.gather()
            except InfinityError:
                was_ahead = update.was_ahead
                self._put_back(update)
                if was_ahead:
                    return  # the update is READY again, and its next attempt repeats the reads
                raise
            self._compute(update)
        if update.state is UpdateState.COMPUTING:
            self._write(update)
        self._ended(update)

    def _end_quietly(self, update: ChunkUpdate) -> None:
        """End an update as `_end` does, but raise nothing after a failed read."""
        try:
            self._end(update)
        except InfinityError:
            if update in self._active:
                raise

    def _ended(self, update: ChunkUpdate) -> None:
        self._active.remove(update)
        self._deliver(update)

    def _deliver(self, update: ChunkUpdate) -> None:
        """Let the model use the results of an update, behind their copy to the device if there is one. Those
        of a speculative update wait to be confirmed.
        """
        if update.outcome is None:
            self._units[update.unit].left -= 1
        copy = update.finish()
        if copy is not ARRIVED:
            self._copied(update.unit, copy)

    def _copied(self, unit: int, copy: Transfer) -> None:
        """Order later work on the device after a copy of a unit's updated parameters."""
        self._store.link.fence(copy)
        self._copies.append((unit, copy))

    def _put_back(self, update: ChunkUpdate) -> None:
        """Return an update to READY after its read failed, and place it before all other READY updates."""
        update.put_back()
        self._active.remove(update)
        queue = self._ready.pop(update.unit, deque())
        queue.appendleft(update)
        self._ready = {update.unit: queue, **self._ready}

    # --- staging ----------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> torch.Tensor:
        """Lease `nbytes` bytes of staging for a gradient, and return them as a uint8 tensor.

        Waits until staging has room, and takes staging from others if it must; see [Note: room]. Raises
        StorageError if a read or write that this call waits for fails. Raises BudgetError if there is no room
        although nothing is left to wait for, because user code still holds tensors over staging.
        """
        while (memory := self._try_take(nbytes)) is None:
            if not self._make_room():
                return self._take_or_raise(nbytes)
        return memory

    def _try_acquire(self, update: ChunkUpdate) -> bool:
        """Lease staging for a READY update and begin its reads, or compute it if it needs none. Returns False
        if there is no room now.
        """
        present = update.present()
        memory = self._try_take(update.needed(present))
        if memory is None:
            return False
        self._begin(update, memory, present)
        return True

    def _acquire(self, update: ChunkUpdate) -> None:
        """Call `_try_acquire`, and make room until it succeeds. Raises the errors of `take`."""
        while not self._try_acquire(update):
            if self._make_room(update):
                continue
            if update.holds_gradient:  # which may lie so that no free range is large enough
                self._put_gradient_home(update)
                continue
            present = update.present()
            self._begin(update, self._take_or_raise(update.needed(present)), present)
            return

    def _read_ahead(self, ahead: ReadAhead) -> None:
        """Begin to read states of updates that are not decided yet, until staging has no room to spare."""
        spared = max(self._pool.nbytes // _SPARED, self._store.plan.chunk_update_bytes)
        for updates in ahead.candidates(self.pending):
            sizes = [update.needed_ahead for update in updates]
            if self._pool.nbytes - self._pool.leased - sum(sizes) < spared:
                return
            if any(each.being_written for each in updates):
                return
            for update, nbytes in zip(updates, sizes, strict=True):
                memory = self._try_take(nbytes)
                if memory is None:
                    return
                with contextlib.suppress(InfinityError):  # the decided update repeats the read, and raises
                    update.read_ahead(memory)
                    self._active.append(update)

    def _cancel(self, update: ChunkUpdate) -> None:
        """Take the staging from an update that is not decided; its states are read again later."""
        update.cancel()
        self._active.remove(update)

    def _cancel_all(self) -> None:
        """Take the staging from all updates that have read states ahead and are not decided yet."""
        for update in [each for each in self._active if each.is_ahead]:
            self._cancel(update)

    def _begin(self, update: ChunkUpdate, memory: torch.Tensor, present: Present | None) -> None:
        update.acquire(memory, present)
        self._began(update)

    def _try_take(self, nbytes: int) -> torch.Tensor | None:
        if not nbytes:
            return NOTHING
        if self._pool.largest_free < nbytes:
            self._store.poll()
            if self._pool.largest_free < nbytes:
                return None
        with self._pool.lease(nbytes) as lease:
            return lease.residency()

    def _take_or_raise(self, nbytes: int) -> torch.Tensor:
        gc.collect()  # tracebacks leave views in reference cycles
        with self._pool.lease(nbytes) as lease:
            return lease.residency()

    def _make_room(self, asking: ChunkUpdate | None = None) -> bool:
        """Make some room in staging, in the order of [Note: room]. asking: the READY update that needs it,
        and whose own gradient stays staged. Returns False if nothing is left to wait for or to take.
        """
        if self._store.finish_oldest_write():
            return True
        if self._copies:
            self._copies.popleft()[1].wait()
            return True
        running = next((each for each in self._active if not each.is_ahead), None)
        if running is not None:
            self._end_quietly(running)
            return True
        if self._active:
            self._cancel(self._active[-1])
            return True
        every = (update for updates in self._ready.values() for update in updates)
        holding = next((each for each in every if each.holds_gradient and each is not asking), None)
        if holding is not None:
            self._put_gradient_home(holding)
            return True
        kept = None if asking is None else (asking.unit, asking.chunk_index)
        return self._gradients.staged.write_back_oldest(kept)

    def _put_gradient_home(self, update: ChunkUpdate) -> None:
        """Write a READY update's gradient from staging home, to be read back with the other inputs."""
        assert update.taken is not None
        self._gradients.staged.write_back_now(update.unit, update.chunk_index, update.taken)


class ReadAhead:
    """Chooses the updates whose states are read ahead, that is, before the update is decided.

    Lazy updates of a unit run between the backward and the unit's next forward, when the disk is busiest;
    during the backward the disk has little to do. So the states of the updates that will run first are read
    during the backward, each unit's when its gradients are complete, as long as staging has room for them. An
    eager update begins with its unit's last gradient. So the states of the units that come next in the
    backward are read before their gradients come.
    """

    def __init__(
        self,
        updates: Mapping[int, Sequence[ChunkUpdate]],
        parameters: Sequence[Sequence[torch.Tensor]],
        gradients: Gradients,
        *,
        eager: bool,
        accumulation: int,
        room: int,
    ) -> None:
        """updates: unit -> the updates of its chunks. parameters: for every unit, its parameters in order.

        gradients: the gradient pages of all units. eager: whether updates are eager, not lazy. accumulation:
        number of gradients that each parameter gets in a step. room: bytes of staging that lazy updates may
        use to read ahead.
        """
        self._updates = updates
        self._parameters = parameters
        self._gradients = gradients
        self._eager = eager
        self._accumulation = accumulation
        self._room = room
        self._chosen: dict[int, Sequence[ChunkUpdate]] = {}
        """Unit -> those of its updates whose states are to be read once the unit has all its gradients. Used
        only if updates are lazy.
        """
        self._unlocked: deque[ChunkUpdate] = deque()
        """Updates whose states can be read now, because their unit has all its gradients. Used only if
        updates are lazy.
        """
        self._next: deque[int] = deque()
        """Units whose states are still to be read ahead, in the order in which the backward brings gradients.
        Used only if updates are eager.
        """
        self._cleared = False
        """Whether the gradients of the last step have been dropped, as by zero_grad(). The method `stepped`
        sets it to False. While it is False, gradients that are present belong to the step that has ended;
        once it is True, they belong to the next step. Used only if updates are eager.
        """

    def stepped(self, pending: Sequence[int], order: Sequence[int]) -> None:
        """Choose the updates to read ahead for the next step.

        pending: the units whose update is pending, in the order of their updates. order: units in the
        expected order of the next forward. The next backward brings gradients in the reverse order.
        """
        self._cleared = False
        if self._eager:
            self._next = deque(unit for unit in reversed(order) if self._on_disk(unit))
            return
        self._chosen, left = {}, self._room
        self._unlocked.clear()
        for unit in filter(self._on_disk, pending):
            chosen = []
            for update in self._updates[unit]:
                left -= update.needed_ahead
                if left < 0:
                    break
                chosen.append(update)
            self._chosen[unit] = chosen
            if left < 0:
                return

    def gradient_added(self, unit: int) -> bool:
        """Record that a parameter of `unit` has got a new gradient.

        Returns True if `candidates` thereby has more updates to yield; always False if updates are eager.
        """
        if not self._chosen.get(unit) or not self._complete(unit, self._accumulation):
            return False
        self._unlocked.extend(self._chosen.pop(unit))
        return True

    def candidates(self, pending: Callable[[int], bool]) -> Iterator[Sequence[ChunkUpdate]]:
        """Yield groups of updates whose states are to be read ahead next, in the order in which to read.

        The caller begins to read all of a group before it asks for the next group, or stops for lack of room.
        pending: function of a unit's index; True while an update of the unit has not ended.
        """
        return self._before_gradients(pending) if self._eager else self._after_gradients()

    def _after_gradients(self) -> Iterator[Sequence[ChunkUpdate]]:
        while self._unlocked:
            update = self._unlocked[0]
            page = self._gradients.pages[update.unit]
            # A gradient that is not in RAM was written home for lack of room: its states have no room either.
            if update.can_read_ahead and page.is_in_ram(update.chunk_index):
                yield (update,)
            self._unlocked.popleft()

    def _before_gradients(self, pending: Callable[[int], bool]) -> Iterator[Sequence[ChunkUpdate]]:
        self._cleared = self._cleared or not self._gradients.any_stored
        while self._next and self._cleared:
            unit = self._next[0]
            if not self._gradients.pages[unit].consumed and not self._complete(unit, self._accumulation):
                if not self._complete(unit, self._accumulation - 1) or pending(unit):
                    return
                page = self._gradients.pages[unit]
                yield [
                    update
                    for update in self._updates[unit]
                    if update.can_read_ahead and page.chunks[update.chunk_index].staged is None
                ]
            self._next.popleft()

    def _on_disk(self, unit: int) -> bool:
        updates = self._updates.get(unit, ())
        return bool(updates) and updates[0].states_on_disk

    def _complete(self, unit: int, accumulation: int) -> bool:
        return self._gradients.pages[unit].complete(self._parameters[unit], accumulation)
