"""Updater: which chunks a step changes, and in which order.

`step` decides the updates of all units: which parameters, with which hyper-parameters, scale and gradients.
Each unit's update consists of chains, which are the updates of single chunks (infinity/optim/chain.py).
`step` opens the gates of these chains: now they may compute, and are due (infinity/optim/update_queue.py).
Staging, host RAM to work in, is granted to them (infinity/optim/staging.py) in the order in which the next
forward uses their units. The inputs of some chains are read while another chain computes and the results of
others are written, and the model computes meanwhile. A caller that needs a unit (`complete`) waits for the
chains of that unit only.

Two kinds of units are updated immediately. If a unit rests in host RAM as a whole and the CPU computes the
model too, there is nothing to overlap. If a unit rests on the device and the device updates it, the update is
queued on the device's stream, and work that is queued later sees its results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

import torch

from infinity import cpu_adam
from infinity.device_update.update import ParameterUpdate
from infinity.gradients.device import DeviceUnits
from infinity.gradients.host import Gradients
from infinity.layout.chunks import Piece
from infinity.layout.strides import in_memory_order
from infinity.optim.chain import Chain
from infinity.optim.chain_state import ChainState
from infinity.optim.chunk_update import ChunkUpdate
from infinity.optim.decision import Decision, count_step, decide
from infinity.optim.staging import Staging
from infinity.optim.state_prefetch import ReadAhead
from infinity.optim.step_options import StepOptions
from infinity.optim.unit_update import UnitUpdate
from infinity.optim.update_queue import UpdateQueue
from infinity.pages.health import Health
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage, Presence
from infinity.pages.store import Store

_MOST_RUNNING = 8
"""The most updates of chunks that are under way at once if their inputs are in host RAM already. More would
only lengthen queues.
"""


class Updater:
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
        """Make the chains (updates of chunks) of all units.

        pages: the parameter pages of all units, by index. threads: compute the updates on the CPU. on_device:
        the units that the device updates; None if there are no such units. health: is told of results that
        are lost, after which the runtime cannot be used.
        """
        self._pages = pages
        self._gradients = gradients
        self._states = states
        self._store = store
        self._on_device = on_device
        self._among_others = store.plan.share.ranks > 1
        self._lazy = store.plan.update != "sync"
        """Whether updates may end after `step` has returned."""
        self._units = [UnitUpdate.of(self._chains_of(page, threads, health)) for page in pages]
        self._early: dict[int, Set[int]] = {}
        """Unit whose update `begin_early` began -> indices of the parameters for which it counted a step.
        Empty with one rank.
        """
        self._queue = UpdateQueue(self._units, store)
        self._staging = Staging(store, gradients.staged, self._queue)
        self._ahead = self._read_ahead()

    def _chains_of(self, page: ParameterPage, threads: cpu_adam.ThreadPool, health: Health) -> list[Chain]:
        gradients = self._gradients.pages[page.index]
        updates = [
            ChunkUpdate(page, self._states, gradients, chunk_index, threads)
            for chunk_index in self._states.pages[page.index].kept
        ]
        return [Chain(each, self._store, health) for each in updates]

    def _read_ahead(self) -> ReadAhead | None:
        """Make the object that chooses the chains (updates of chunks) whose optimizer states are read ahead,
        which means before their update is decided.

        Returns None, so that no states are read ahead, if no states are on disk, if updates are "sync", or if
        the number of backwards in a step was not declared.
        """
        plan = self._store.plan
        on_disk = any(chain.states_on_disk for each in self._units for chain in each.chains)
        whole = plan.rule is not None and plan.rule.matrix  # no chain uses the states
        if not on_disk or whole or plan.accumulation is None or plan.update == "sync":
            return None
        return ReadAhead(
            {unit: each.chains for unit, each in enumerate(self._units)},
            [page.parameters for page in self._pages],
            self._gradients,
            eager=plan.update == "eager",
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
        with gradients.adding(unit, parameter, gradient.dtype) as page:
            flat = in_memory_order(gradient, page.layout.parameters[parameter].stride)
            if gradients.on_device(unit):
                gradients.add_on_device(unit, parameter, flat)
            elif page.home.in_place and self._store.link.direct:
                gradients.add_in_place(page, parameter, flat)
            else:
                for chunk_index, piece in gradients.pieces(page, parameter):
                    missing = gradients.staged.missing(page, chunk_index)
                    if missing:
                        gradients.staged.add(page, chunk_index, self._staging.take(missing))
                    gradients.add_piece(
                        page, chunk_index, piece, flat[piece.start : piece.start + piece.count]
                    )
        if self._ahead is not None and self._ahead.gradient_added(unit):
            self._staging.read_ahead(self._ahead.candidates(self.pending))

    def accumulate_piece(
        self, unit: int, chunk_index: int, piece: Piece, gradient: torch.Tensor, *, last: bool
    ) -> None:
        """Add one rank's new gradient of a piece of a parameter to the sum that this rank keeps.

        The first gradient since gradients were cleared begins the sum. gradient: (piece.count,) in host RAM.
        last: whether it is the last one that the piece gets from a micro-batch of all ranks. Raises the
        errors of `accumulate`.
        """
        gradients = self._gradients
        with gradients.adding_piece(unit, piece, last=last) as page:
            missing = gradients.staged.missing(page, chunk_index)
            if missing:
                gradients.staged.add(page, chunk_index, self._staging.take(missing))
            again = page.has_piece(chunk_index, piece)
            gradients.add_piece(page, chunk_index, piece, gradient, again=again, last=last)
        if last and self._ahead is not None and self._ahead.gradient_added(unit):
            self._staging.read_ahead(self._ahead.candidates(self.pending))

    # --- updates ----------------------------------------------------------------------------------------

    def step(self, options: StepOptions, order: Sequence[int], exposed: Callable[[int], bool]) -> None:
        """Update every parameter that has a gradient and a param group: now, or before its next use.

        options: the options of the param groups, such as the learning rate. order: units in the order in
        which the next forward is expected to use them. exposed: function of a unit's index; True if user
        code has views of the unit's bytes. Such a unit is updated before this call returns. If StorageError
        is raised, some chunks have been updated and others have not.
        """
        later = [page.index for page in self._pages if not self._gradients.pages[page.index].consumed]
        for unit in later:
            self.complete(unit)  # the unit may not have been used since the last step
        self.complete_awaited()
        self._store.link.drain()
        # Before any gate opens, because the chains have views of their units' bytes from then on, too.
        visible = {unit for unit in later if exposed(unit)}
        for unit in later:
            self._open(unit, options)
        if options.average is not None:
            self._states.averaged += 1
        if self._early:
            self.count_elsewhere(options)
        seen = [unit for unit in later if self._units[unit].left and unit in visible]
        first = {unit: place for place, unit in enumerate(order)}
        opened = [unit for unit, group in enumerate(self._units) if group.left]
        opened.sort(key=lambda each: first.get(each, len(order) + each))
        self._queue.arrange(opened)
        if self._ahead is not None:
            self._queue.revoke_all()  # a chain that read ahead may have no update now
            self._ahead.stepped(opened, order)
        if not self._lazy:
            self.complete_all()
            self._store.settle()
            return
        for unit in seen:
            self._complete_for_user(unit)
        self._begin_updates(opened)

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
        self._store.link.follow_compute()  # kernels may still read what the copy to the device overwrites
        counted = self._open(unit, options)
        if self._among_others:
            self._early[unit] = counted
        self._gradients.consume(unit)
        if seen:
            self._complete_for_user(unit)
        self._begin_updates((unit,))

    def count_elsewhere(self, options: StepOptions) -> None:
        """Count the step of parameters whose units were updated early, and which other ranks update.

        `step` does this, too. An early update begins when the parameters that this rank updates have their
        gradients. Of the unit's other parameters it may not know yet that they get gradients in this step.
        """
        for unit, counted in self._early.items():
            page = self._gradients.pages[unit]
            if page.consumed:
                others = {each for each in page.having if options.group(unit, each) is not None} - counted
                with torch._C.DisableTorchFunctionSubclass():
                    count_step(self._pages[unit], self._states, others, options)
        self._early.clear()

    def pending(self, unit: int) -> bool:
        """Whether an update of the unit was decided and has not ended, so that its parameters are out of
        date.
        """
        return self._units[unit].left > 0

    def begun(self, unit: int) -> bool:
        """Whether an update of the unit was decided and has not ended, and at least one of its chains
        (updates of chunks) has begun to read, compute or write.
        """
        return self._queue.running(unit) is not None

    def complete(self, unit: int) -> None:
        """Wait until the update of a unit has ended, if one is pending, so that the model can use the unit.

        Meanwhile this call grants staging (host RAM to work in) to the unit's chains, which are the updates
        of its chunks, and begins them. Writes of the results to their homes may go on afterwards. Raises
        StorageError; see [Note: back and lost] in infinity/optim/chain.py.
        """
        group, queue = self._units[unit], self._queue
        group.unread = False
        if group.resting:
            self._update_resting(group)
        while group.left:
            while unit in queue.due and self._staging.try_grant(self._free(queue.due[unit][0])):
                pass
            running = queue.running(unit)
            if running is None:
                self._staging.grant(queue.due[unit][0])
            else:
                queue.end(running)
                self.advance()  # the next chains take the free room, so that the disk has no pause

    def _complete_for_user(self, unit: int) -> None:
        """Do what `complete` does, and wait for writes from memory that user code has views of."""
        self.complete(unit)
        self._store.settle_for_user(self._pages[unit].home)

    def outstanding(self) -> Iterator[tuple[int, int]]:
        """Yield (unit, index of the chunk) of each chunk whose update was decided and is not computed yet."""
        for unit, group in enumerate(self._units):
            if group.left:
                for chain in group.chains:
                    if chain.decision is not None:
                        yield unit, chain.chunk_index

    def complete_all(self) -> None:
        """Do what `complete` does for all units whose update is pending. Raises StorageError."""
        for unit, group in enumerate(self._units):
            if group.left:
                self.complete(unit)

    def release(self, unit: int) -> None:
        """Wait until no update, and no copy of updated parameters to the device, uses the memory that the
        unit's parameter page has now.

        Called before the page leaves or is fetched anew. Errors of failed reads are not raised here.
        """
        self._queue.release(unit)

    def advance(self) -> None:
        """Advance the chains that are under way (`UpdateQueue.poll`), and then begin DUE chains, whose update
        is decided, in their order until staging has no room for the next one.
        """
        queue = self._queue
        if queue.active or queue.copies:
            queue.poll()
        while queue.due:
            unit, chains = next(iter(queue.due.items()))
            enough = len(queue.active) >= _MOST_RUNNING and chains[0].in_place
            if (
                enough
                or self._held_up(chains[0])
                or not self._can_begin(unit)
                or not self._staging.try_grant(chains[0])
            ):
                return
        if self._ahead is not None:
            self._staging.read_ahead(self._ahead.candidates(self.pending))

    def finish_copies(self) -> None:
        """Wait for all copies of updated parameters to the device. Such a copy holds a view of the parameter
        page that it writes until the copy has ended.
        """
        self._queue.finish_copies()

    def abandon(self) -> None:
        """Give up all updates that have not ended, and wait until no update uses memory any more."""
        self._queue.abandon()

    # --- commits ----------------------------------------------------------------------------------------

    def complete_awaited(self) -> None:
        """Do what `complete` does for all units with an update for which the pending commit waits.

        Does nothing if the commit was given up.
        """
        ledger = self._store.ledger
        if ledger is not None and ledger.pending is not None:
            for unit in ledger.awaited_units():
                self.complete(unit)

    def _held_up(self, chain: Chain) -> bool:
        """Whether the results of a chain (the update of a chunk) would need a third place on disk."""
        ledger = self._store.ledger
        return ledger is not None and ledger.blocks((chain.unit, chain.chunk_index))

    def _free(self, chain: Chain) -> Chain:
        """Make sure that there is a place on disk for the results of a chain, which is returned.

        If commits hold both places, the pending commit is driven to its end, before the chain gets staging.
        """
        if self._held_up(chain):
            ledger = self._store.ledger
            assert ledger is not None
            self._queue.revoke_all()  # no staging is held meanwhile
            ledger.land()
        return chain

    # --- what is due ------------------------------------------------------------------------------------

    def _open(self, unit: int, options: StepOptions) -> Set[int]:
        """Decide the update of a unit, allow it to be computed, and count it as one more step in the
        optimizer states of the parameters that it changes.

        If the device updates the unit, the update is queued there. Otherwise the gates of the unit's chains
        (updates of chunks) are opened: they may compute from now on. Does nothing if no parameter of the unit
        has both a gradient and a param group. Returns the indices of the parameters that it counts.
        """
        decision = decide(unit, options, self._gradients, self._states)
        if decision is None:
            return frozenset()
        group = self._units[unit]
        if self._on_device is not None and unit in self._on_device:
            self._update_on_device(self._on_device, unit, decision)
        else:
            chosen = group.changed_by(decision)
            for chain in chosen:
                if chain.is_ahead and self._held_up(chain):
                    self._queue.revoke(chain)  # it must not hold staging until the commit has ended
            if group.rests and self._queue.shares_cpu:
                for chain in chosen:
                    chain.open(decision)
                group.resting = chosen
            else:
                self._queue.open(unit, chosen, decision)
            group.left = len(chosen)
        counted = decision.parameters.keys()
        with torch._C.DisableTorchFunctionSubclass():
            count_step(self._pages[unit], self._states, counted, options, decision.averaged)
        return counted

    def _update_on_device(self, units: DeviceUnits, unit: int, decision: Decision) -> None:
        """Queue the update of a unit on the device, without waiting for it.

        The update sees the results of work that was queued on the device before, and work that is queued
        later sees the new parameters. decision: which parameters to update, and with which hyper-parameters.
        """
        started = time.perf_counter()
        updates = {
            parameter: ParameterUpdate(decision.hypers[hyper], seed)
            for parameter, (hyper, seed) in decision.parameters.items()
        }
        units.update(unit, updates, decision.scale)
        self._store.meter.updating(time.perf_counter() - started)

    # --- what is begun ----------------------------------------------------------------------------------

    def _begin_updates(self, units: Iterable[int]) -> None:
        """Begin the updates of these units, which have just been decided, as far as staging has room.

        Where the CPU computes the model too, updates whose inputs are all in host RAM end before this call
        returns.
        """
        self.advance()
        for unit in units:
            if self._units[unit].resting:
                self._update_resting(self._units[unit])
        if self._queue.shares_cpu and self._queue.due:
            due = self._queue.due.values()
            self._update_in_place([each for chains in due for each in chains if each.in_place])

    def _update_resting(self, group: UnitUpdate) -> None:
        chains, group.resting = group.resting, ()
        self._update_in_place(chains)

    def _update_in_place(self, chains: Sequence[Chain]) -> None:
        """Compute the updates of `chains` and wait for them, at most _MOST_RUNNING at a time.

        chains: DUE chains (decided updates of chunks) whose inputs are all in host RAM; those that have begun
        meanwhile are skipped. After every _MOST_RUNNING of them the runtime's other chains are advanced, so
        that their reads go on.
        """
        queue = self._queue
        for first in range(0, len(chains), _MOST_RUNNING):
            batch = chains[first : first + _MOST_RUNNING]
            for chain in batch:
                if chain.state is ChainState.DUE:  # else the chain was begun between two batches
                    if not chain.rests:
                        self._staging.try_grant(chain)
                    queue.compute(chain)
            started = time.perf_counter()
            for chain in batch:
                if chain.state is ChainState.COMPUTING:
                    assert chain.ticket is not None
                    chain.ticket.wait()
                    chain.write()
                    if not chain.rests:
                        queue.active.remove(chain)
                    queue.deliver(chain)
            self._store.meter.updating(time.perf_counter() - started)
            if queue.due or queue.active:
                self.advance()

    def _can_begin(self, unit: int) -> bool:
        """Whether the update of a unit can begin before a caller waits for the unit.

        False after a failed read. On a device that shares the host's RAM, an update takes the parameters
        from the memory where the model computes. So the unit's parameter page must be in that memory or on
        its way there, unless the model uses the page at its home in RAM.
        """
        if self._units[unit].unread:
            return False
        ledger = self._store.ledger
        if ledger is not None and ledger.pending is not None:
            return True  # the commit should not wait until the model uses the unit
        page = self._pages[unit]
        if not self._store.device.shares_host or page.home.in_place:
            return True
        return page.presence is not Presence.AWAY or page.living() is not None
