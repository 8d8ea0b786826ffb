"""The update: which chunks a step changes, in which order, and in what memory.

`step` decides everything - which parameters, with which hyper-parameters, scale and gradients - and opens the
gates of the chains (infinity/chain.py), which then stream through staging in the order in which the next
forward uses their units: some are read while one is computed and others are written, and all of it while the
model computes. Whoever wants a unit meanwhile (`complete`) waits for its chains only. What rests in host RAM
as a whole is updated at once where the CPU computes the model too: there is nothing to overlap. So is what
the device updates, where all of it rests: its stream has it done before what is queued later.

[Note: room]
Staging is granted here and nowhere else: to chains, and to the gradients that are staged for them. Who needs
room waits for what ends by itself before anything is undone: writes and copies under way, then chains that
compute, then (`Chain.revoke`) chains whose gate is closed, then gradients that can go home. A chain whose
gate is closed never gets the last bytes that one with an open gate might need. So whoever asks gets them.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from infinity import cpu_adam
from infinity.chain import NOTHING, Chain, ChainState
from infinity.chunk_update import ChunkUpdate
from infinity.decision import Decision, GroupOf, count_step, decide
from infinity.device_units import DeviceUnits
from infinity.device_update import Turn
from infinity.errors import InfinityError
from infinity.gradients import Gradients
from infinity.health import Health
from infinity.memory_order import in_memory_order
from infinity.page import ParameterPage, Presence
from infinity.read_ahead import ReadAhead
from infinity.states import States
from infinity.store import Store
from infinity.telemetry import Edge
from infinity.tiers.link import ARRIVED, Transfer

_MOST_RUNNING = 8
"""Updates under way that need no staging; more would only lengthen queues."""

_SPARED = 4
"""One in so many bytes of staging is left to gradients for which nothing is read ahead. With every second
one the disk waited for room (309M parameters, all on NVMe: 3.7 s a step, now 2.9)."""


@dataclass(slots=True)
class _UnitChains:
    """The chains of one unit, and how far its update is."""

    chains: Sequence[Chain]
    parameters: frozenset[int]
    """Of the unit, those that lie in chains."""
    rests: bool
    """Whether none of its chains ever needs staging."""
    left: int = 0
    """Chains whose gate was opened and whose outcome the model cannot be given yet."""
    unread: bool = False
    """A read ahead of time failed: nobody tries again before somebody waits for the unit."""
    resting: tuple[Decision, Sequence[Chain]] | None = None
    """Of a unit that `rests`: what is decided and not begun."""

    def changed_by(self, decision: Decision) -> Sequence[Chain]:
        """The chains with a parameter that is updated."""
        parameters = decision.parameters
        if parameters.keys() >= self.parameters:
            return self.chains
        return [
            chain
            for chain in self.chains
            if any([piece.parameter in parameters for piece in chain.chunk.pieces])
        ]


class Updater:
    """All chains of a runtime. Called under the runtime's lock."""

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
        """on_device: the units that the device updates."""
        self._pages = pages
        self._gradients = gradients
        self._states = states
        self._store = store
        self._threads = threads
        self._on_device = on_device
        self._health = health
        self._lazy = store.plan.update != "sync"
        """Whether updates may end after `step`."""
        self._shares_cpu = store.plan.device.type == "cpu"
        self._units = [self._chains_of(page) for page in pages]
        self._due: dict[int, deque[Chain]] = {}
        """Unit -> its DUE chains, in the order of use."""
        self._active: list[Chain] = []
        """Those that hold staging or compute, in the order in which they were granted it."""
        self._copies: deque[tuple[int, Transfer]] = deque()
        """(unit, copy up to the device), ordered before what uses it: it reads staging and sees its page."""
        self._ahead = self._read_ahead()

    def _chains_of(self, page: ParameterPage) -> _UnitChains:
        gradients = self._gradients.pages[page.index]
        updates = [
            ChunkUpdate(page, self._states, gradients, number, self._threads)
            for number in range(len(page.layout.chunks))
        ]
        chains = [Chain(each, self._store, self._health) for each in updates]
        parameters = frozenset(piece.parameter for chain in chains for piece in chain.chunk.pieces)
        return _UnitChains(chains, parameters, rests=all([chain.rests for chain in chains]))

    def _read_ahead(self) -> ReadAhead | None:
        """None where nobody knows which backward is a step's last."""
        plan = self._store.plan
        if plan.accumulation is None or plan.update == "sync":
            return None
        return ReadAhead(
            {unit: each.chains for unit, each in enumerate(self._units)},
            [page.parameters for page in self._pages],
            self._gradients,
            eager=plan.update == "eager",
            accumulation=plan.accumulation,
            deferred=plan.deferred,
            room=plan.staging_bytes // 2,
        )

    # --- gradients --------------------------------------------------------------------------------------

    def accumulate(self, unit: int, parameter: int, gradient: torch.Tensor) -> None:
        """Add a fresh gradient (any dense strides, where the model computes) to a parameter's.

        Raises as `Gradients.adding`, and StorageError where a page cannot be read or written.
        """
        gradients = self._gradients
        with gradients.adding(unit, parameter, gradient.dtype) as page:
            flat = in_memory_order(gradient, page.layout.parameters[parameter].stride)
            if gradients.on_device(unit):
                gradients.add_on_device(unit, parameter, flat)
            elif page.home.in_place and self._store.link.direct:
                gradients.add_in_place(page, parameter, flat)
            else:
                for number, piece in gradients.pieces(page, parameter):
                    missing = gradients.missing(page, number)
                    if missing:
                        gradients.stage(page, number, self._take(missing))
                    gradients.add_piece(page, number, piece, flat[piece.start : piece.start + piece.count])
        if self._ahead is not None and self._ahead.gradient_added(unit):
            self._begin_ahead(self._ahead)

    # --- updates ----------------------------------------------------------------------------------------

    def step(self, group_of: GroupOf, order: Sequence[int], exposed: Callable[[int], bool]) -> None:
        """Update every parameter that has a gradient and a group: now, or before its next use.

        order: units as the next forward is expected to use them. exposed: whether code outside sees a unit's
        bytes, which is then updated before this returns. Raises StorageError; some chunks are updated then
        and others not.
        """
        later = [page.index for page in self._pages if not self._gradients.pages[page.index].spent]
        for unit in later:
            self.complete(unit)  # which nobody used since the last step
        self._store.link.drain()
        for unit in later:
            self._open(unit, group_of)
        # Before any of them is begun: an update sees the bytes of its unit, too.
        seen = [unit for unit in later if self._units[unit].left and exposed(unit)]
        first = {unit: place for place, unit in enumerate(order)}
        opened = [unit for unit, group in enumerate(self._units) if group.left]
        opened.sort(key=lambda each: first.get(each, len(order) + each))
        self._due = {unit: self._due[unit] for unit in opened if unit in self._due}
        if self._ahead is not None:
            self._revoke_all()  # of units that have no update now
            self._ahead.stepped(opened, order)
        if not self._lazy:
            self.complete_all()
            self._store.settle()
            return
        for unit in seen:
            self.complete(unit)
        self._begin_updates(opened)

    def begin_early(self, unit: int, group_of: GroupOf, exposed: Callable[[int], bool]) -> None:
        """Update a unit with the gradients that it has, before the `step` that they are for.

        Nobody else sees these gradients any more. Its pages are at home, or resident: not arriving in memory
        of the device's own. exposed: as of `step`; its update is then over when this returns.
        """
        self.complete(unit)
        seen = exposed(unit)
        self._store.link.follow_compute()  # whose kernels may still read what a copy up overwrites
        self._open(unit, group_of)
        self._gradients.spend(unit)
        if seen:
            self.complete(unit)
        self._begin_updates((unit,))

    def pending(self, unit: int) -> bool:
        """Whether the unit's parameters are not yet what the last step makes of them."""
        return self._units[unit].left > 0

    def begun(self, unit: int) -> bool:
        """Whether the unit is pending, and something for it under way."""
        return self._running(unit) is not None

    def ready(self, unit: int) -> bool:
        """Whether a unit whose gradients are complete finds room for its update, or has its states read."""
        return not self._gradients.crowded or (self._ahead is not None and self._ahead.whole(unit))

    def complete(self, unit: int) -> None:
        """Bring the updates of a unit to their end, but for writes.

        Raises StorageError; see [Note: back and lost] in infinity/chain.py.
        """
        group = self._units[unit]
        group.unread = False
        self._update_resting(group)
        while group.left:
            while unit in self._due and self._try_grant(self._due[unit][0]):
                pass
            running = self._running(unit)
            if running is None:
                self._grant_waiting(self._due[unit][0])
            else:
                self._end(running)
                self.advance()  # what follows takes the room that came free: the disk has no pause here

    def complete_all(self) -> None:
        """`complete` every unit."""
        for unit, group in enumerate(self._units):
            if group.left:
                self.complete(unit)

    def release(self, unit: int) -> None:
        """The unit's page is about to leave or come anew: afterwards nothing runs in its present bytes, nor
        is copied into them.

        Reads that fail raise nothing here.
        """
        while (running := self._running(unit)) is not None:
            self._end_quietly(running)
        for copied in [each for each in self._copies if each[0] == unit]:
            copied[1].wait()
            self._copies.remove(copied)

    def advance(self) -> None:
        """Move on what needs no waiting, and begin what has room."""
        while self._copies and self._copies[0][1].done():
            self._copies.popleft()
        for chain in list(self._active):
            if chain.state is ChainState.READING and chain.arrived:
                if chain.decision is None:
                    chain.arrive()
                else:
                    self._compute_quietly(chain)
        for chain in list(self._active):
            if chain.state is ChainState.COMPUTING:
                assert chain.ticket is not None
                if self._shares_cpu:
                    self._write(chain)
                elif chain.ticket.done():
                    chain.ticket.wait()  # lets go of memory
                    chain.write()
            if chain.state is ChainState.WRITING and chain.copy.done():
                self._active.remove(chain)
                self._deliver(chain)
        while self._due:
            unit, queue = next(iter(self._due.items()))
            enough = len(self._active) >= _MOST_RUNNING and queue[0].in_place
            if enough or not self._can_begin(unit) or not self._try_grant(queue[0]):
                return
        if self._ahead is not None:
            self._begin_ahead(self._ahead)

    def finish_copies(self) -> None:
        """Wait for the copies up to the device, which see the bytes of their pages."""
        while self._copies:
            self._copies.popleft()[1].wait()

    def abandon(self) -> None:
        """Forget what is due, and wait until nothing is under way."""
        self.finish_copies()
        self._due.clear()
        self._active.clear()
        for group in self._units:
            group.left, group.resting = 0, None
            for chain in group.chains:
                chain.abandon()

    # --- what is due ------------------------------------------------------------------------------------

    def _open(self, unit: int, group_of: GroupOf) -> None:
        """Decide the update of a unit. From here on every count says that the unit's step was."""
        decision = decide(unit, group_of, self._gradients, self._states)
        if decision is None:
            return
        group = self._units[unit]
        if self._on_device is not None and unit in self._on_device:
            self._update_on_device(self._on_device, unit, decision)
        else:
            chosen = group.changed_by(decision)
            if group.rests and self._shares_cpu:
                group.resting = (decision, chosen)
            else:
                due = deque(chain for chain in chosen if chain.open(decision))
                self._active = [each for each in self._active if each.state is not ChainState.DUE]
                if due:
                    self._due[unit] = due
            group.left = len(chosen)
        with torch._C.DisableTorchFunctionSubclass():
            count_step(self._pages[unit], self._states, decision, group_of)

    def _update_on_device(self, units: DeviceUnits, unit: int, decision: Decision) -> None:
        """Queue a unit's update behind what the device computes, and before all that will use its outcome."""
        started = time.perf_counter()
        turns = {
            parameter: Turn(decision.hypers[hyper], seed)
            for parameter, (hyper, seed) in decision.parameters.items()
        }
        units.update(unit, turns, decision.scale)
        self._store.meter.updating(time.perf_counter() - started)

    # --- room -------------------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> torch.Tensor:
        """Staging, uint8 (nbytes,), for a gradient; see [Note: room]. Raises StorageError of what it had to
        wait for, and BudgetError where code outside keeps what is missing."""
        while (memory := self._try_take(nbytes)) is None:
            if not self._make_room():
                return self._take_or_raise(nbytes)
        return memory

    def _take_or_raise(self, nbytes: int) -> torch.Tensor:
        gc.collect()  # views in reference cycles, as tracebacks leave them
        with self._store.staging.lease(nbytes) as lease:
            return lease.residency()

    def _grant_waiting(self, chain: Chain) -> None:
        """Begin a DUE chain, as soon as there is room. Raises as `_take`."""
        while not self._try_grant(chain):
            if self._make_room(chain):
                continue
            if chain.holds_gradient:  # alone it may lie where the rest finds no room beside it
                self._put_gradient_home(chain)
                continue
            self._grant(chain, self._take_or_raise(chain.needed))
            return

    def _try_take(self, nbytes: int) -> torch.Tensor | None:
        staging = self._store.staging
        if not nbytes:
            return NOTHING
        if staging.largest_free < nbytes:
            self._store.poll()
            if staging.largest_free < nbytes:
                return None
        with staging.lease(nbytes) as lease:
            return lease.residency()

    def _make_room(self, asking: Chain | None = None) -> bool:
        """Wait for one thing or undo one; False if nothing is left. Raises StorageError."""
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
            self._revoke(self._active[-1])
            return True
        every = (chain for queue in self._due.values() for chain in queue)
        holding = next((each for each in every if each.holds_gradient and each is not asking), None)
        if holding is not None:
            self._put_gradient_home(holding)
            return True
        kept = None if asking is None else (asking.unit, asking.chunk_index)
        return self._gradients.take_oldest_home(kept)

    def _put_gradient_home(self, chain: Chain) -> None:
        """Of a DUE chain: it is read again when the chain is granted staging for it."""
        self._gradients.put_home(chain.unit, chain.chunk_index, chain.gradient)
        chain.forget_gradient()

    def _begin_ahead(self, ahead: ReadAhead) -> None:
        """Read states of chains whose gate is closed, as far as there is room; see [Note: room]."""
        staging = self._store.staging
        spared = max(staging.nbytes // _SPARED, self._store.plan.chain_bytes)
        for chains in ahead.candidates(self.pending):
            nbytes = sum(chain.needed_ahead for chain in chains)
            if staging.nbytes - staging.leased - nbytes < spared or any(
                each.being_written for each in chains
            ):
                return
            for chain in chains:
                memory = self._try_take(chain.needed_ahead)
                if memory is None:
                    return
                with contextlib.suppress(InfinityError):  # once its gate is open, it says what is wrong
                    chain.read_ahead(memory)
                    self._active.append(chain)

    def _revoke(self, chain: Chain) -> None:
        self._active.remove(chain)
        chain.revoke()

    def _revoke_all(self) -> None:
        for chain in [each for each in self._active if each.is_ahead]:
            self._revoke(chain)

    # --- what is under way ------------------------------------------------------------------------------

    def _running(self, unit: int) -> Chain | None:
        """The first chain of a unit that is under way with an open gate, or whose copy up is."""
        return next((each for each in self._active if each.unit == unit and not each.is_ahead), None)

    def _begin_updates(self, units: Iterable[int]) -> None:
        """Of these units, whose updates were just decided."""
        self.advance()
        for unit in units:
            self._update_resting(self._units[unit])
        if self._shares_cpu:
            self._update_in_place()

    def _update_resting(self, group: _UnitChains) -> None:
        """Update a unit that rests in host RAM, a few chunks at a time, between reads that go on."""
        if group.resting is None:
            return
        (decision, chains), group.resting = group.resting, None
        for first in range(0, len(chains), _MOST_RUNNING):
            batch = chains[first : first + _MOST_RUNNING]
            for chain in batch:
                chain.open(decision)
                self._compute(chain)
            started = time.perf_counter()
            for chain in batch:
                assert chain.ticket is not None
                chain.ticket.wait()
                chain.write()
                self._deliver(chain)
            self._store.meter.updating(time.perf_counter() - started)
            if self._due or self._active:
                self.advance()

    def _update_in_place(self) -> None:
        """Run what rests in host RAM as a whole, a few at a time, between reads that go on."""
        found = [each for queue in self._due.values() for each in queue if each.in_place]
        for start in range(0, len(found), _MOST_RUNNING):
            for chain in found[start : start + _MOST_RUNNING]:
                if chain.state is ChainState.DUE:
                    self._try_grant(chain)
                    self._compute(chain)
            self.advance()

    def _can_begin(self, unit: int) -> bool:
        """Whether a unit's parameters are where an update ahead of time should take them from."""
        if self._units[unit].unread:
            return False
        page = self._pages[unit]
        if not self._store.device.shares_host or page.home.in_place:
            return True
        return page.presence is not Presence.AWAY or page.living() is not None

    def _try_grant(self, chain: Chain) -> bool:
        """Begin a DUE chain; False if there is no room."""
        if chain.rests:
            self._compute(chain)
            self._begun(chain)
            return True
        memory = self._try_take(chain.needed)
        if memory is None:
            return False
        self._grant(chain, memory)
        return True

    def _grant(self, chain: Chain, memory: torch.Tensor) -> None:
        chain.grant(memory)
        self._begun(chain)

    def _begun(self, chain: Chain) -> None:
        """A chain is DUE no longer."""
        self._active.append(chain)
        queue = self._due[chain.unit]
        queue.remove(chain)
        if not queue:
            del self._due[chain.unit]

    def _compute_quietly(self, chain: Chain) -> None:
        """Reads have ended: go on, or leave it to whoever waits for the unit to try again."""
        try:
            chain.gather()
        except InfinityError:
            self._put_back(chain)
            self._units[chain.unit].unread = True
            return
        self._compute(chain)

    def _compute(self, chain: Chain) -> None:
        ticket = chain.compute(awaited=self._shares_cpu)
        self._store.meter.submitted(ticket, chain.update.numel)

    def _end(self, chain: Chain) -> None:
        """Bring one chain to its end, but for its writes. Raises StorageError."""
        if chain.state is ChainState.READING:
            try:
                with self._store.meter.stalling(Edge.NVME_TO_HOST):
                    chain.gather()
            except InfinityError:
                was_ahead = chain.was_ahead
                self._put_back(chain)
                if was_ahead:
                    return  # it is due as before, and what is asked for now is read anew
                raise
            self._compute(chain)
        if chain.state is ChainState.COMPUTING:
            self._write(chain)
        self._active.remove(chain)
        self._deliver(chain)

    def _end_quietly(self, chain: Chain) -> None:
        try:
            self._end(chain)
        except InfinityError:
            if chain in self._active:
                raise

    def _write(self, chain: Chain) -> None:
        """Wait for the update itself, and send the outcome on its way."""
        assert chain.ticket is not None
        started = time.perf_counter()
        chain.ticket.wait()
        self._store.meter.updating(time.perf_counter() - started)
        chain.write()

    def _deliver(self, chain: Chain) -> None:
        """Whoever uses the unit from now on finds the outcome, or is ordered after its copy up."""
        self._units[chain.unit].left -= 1
        copy = chain.finish()
        if copy is not ARRIVED:
            self._store.link.fence(copy)
            if not copy.done():
                self._copies.append((chain.unit, copy))

    def _put_back(self, chain: Chain) -> None:
        """A read failed and nothing was changed: the chain is due again, before all others."""
        chain.put_back()
        self._active.remove(chain)
        queue = self._due.pop(chain.unit, deque())
        queue.appendleft(chain)
        self._due = {chain.unit: queue, **self._due}
