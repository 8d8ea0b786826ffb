"""The update queue: the chains that are due, those that are under way, and how each is moved on.

A chain that is due waits for its turn and for staging (infinity/optim/staging.py). Once it is begun it reads,
computes and writes; whoever needs its unit, or its memory, has it brought to its end here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from infinity.errors import InfinityError
from infinity.optim.chain import Chain, ChainState
from infinity.optim.decision import Decision
from infinity.optim.unit_update import UnitUpdate
from infinity.pages.store import Store
from infinity.telemetry.stats import Edge
from infinity.tiers.link import ARRIVED, Transfer


class UpdateQueue:
    """The chains of a runtime that are not idle. Called under the runtime's lock."""

    def __init__(self, units: Sequence[UnitUpdate], store: Store) -> None:
        self.due: dict[int, deque[Chain]] = {}
        """Unit -> its DUE chains, in the order of use."""
        self.active: list[Chain] = []
        """Those that hold staging or compute, in the order in which they were granted it."""
        self.copies: deque[tuple[int, Transfer]] = deque()
        """(unit, copy up to the device), ordered before what uses it: it reads staging and sees its page."""
        self.shares_cpu = store.plan.device.type == "cpu"
        """Whether the CPU computes the model too: whoever waits for an update then helps with it."""
        self._units = units
        self._store = store

    # --- in and out -------------------------------------------------------------------------------------

    def open(self, unit: int, chains: Sequence[Chain], decision: Decision) -> None:
        """The gates of these chains open; those that need staging are due."""
        due = deque([chain for chain in chains if chain.open(decision)])
        self.active = [each for each in self.active if each.state is not ChainState.DUE]
        if due:
            self.due[unit] = due

    def arrange(self, units: Iterable[int]) -> None:
        """Of the units that are due, in this order."""
        self.due = {unit: self.due[unit] for unit in units if unit in self.due}

    def read_ahead(self, chain: Chain, memory: torch.Tensor) -> None:
        """See `Chain.read_ahead`."""
        chain.read_ahead(memory)
        self.active.append(chain)

    def begun(self, chain: Chain) -> None:
        """A chain is DUE no longer."""
        self.active.append(chain)
        queue = self.due[chain.unit]
        queue.remove(chain)
        if not queue:
            del self.due[chain.unit]

    def revoke(self, chain: Chain) -> None:
        """See `Chain.revoke`."""
        self.active.remove(chain)
        chain.revoke()

    def revoke_all(self) -> None:
        """Every chain whose gate is closed."""
        for chain in [each for each in self.active if each.is_ahead]:
            self.revoke(chain)

    def abandon(self) -> None:
        """Forget what is due, and wait until nothing is under way."""
        self.finish_copies()
        self.due.clear()
        self.active.clear()
        for each in self._units:
            each.left, each.resting = 0, ()
            for chain in each.chains:
                chain.abandon()

    # --- what is under way ------------------------------------------------------------------------------

    def running(self, unit: int) -> Chain | None:
        """The first chain of a unit that is under way with an open gate, or whose copy up is."""
        for chain in self.active:
            if chain.unit == unit and not chain.is_ahead:
                return chain
        return None

    def poll(self) -> None:
        """Move on what needs no waiting."""
        while self.copies and self.copies[0][1].done():
            self.copies.popleft()
        for chain in [*self.active]:
            if chain.state is ChainState.READING and chain.arrived:
                if chain.decision is None:
                    chain.arrive()
                else:
                    self._compute_quietly(chain)
        for chain in [*self.active]:
            if chain.state is ChainState.COMPUTING:
                assert chain.ticket is not None
                if self.shares_cpu:
                    self._write(chain)
                elif chain.ticket.done():
                    chain.ticket.wait()  # lets go of memory
                    chain.write()
            if chain.state is ChainState.WRITING and chain.copy.done():
                self.active.remove(chain)
                self.deliver(chain)

    def compute(self, chain: Chain) -> None:
        """See `Chain.compute`."""
        ticket = chain.compute(awaited=self.shares_cpu)
        self._store.meter.submitted(ticket, chain.update.numel)

    def end(self, chain: Chain) -> None:
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
            self.compute(chain)
        if chain.state is ChainState.COMPUTING:
            self._write(chain)
        self.active.remove(chain)
        self.deliver(chain)

    def end_quietly(self, chain: Chain) -> None:
        """`end`, but reads that fail raise nothing: the chain is due again."""
        try:
            self.end(chain)
        except InfinityError:
            if chain in self.active:
                raise

    def deliver(self, chain: Chain) -> None:
        """Whoever uses the unit from now on finds the outcome, or is ordered after its copy up."""
        self._units[chain.unit].left -= 1
        copy = chain.finish()
        if copy is not ARRIVED:
            self._store.link.fence(copy)
            if not copy.done():
                self.copies.append((chain.unit, copy))

    def release(self, unit: int) -> None:
        """See `Updater.release`."""
        while (running := self.running(unit)) is not None:
            self.end_quietly(running)
        if self.copies:
            for copied in [each for each in self.copies if each[0] == unit]:
                copied[1].wait()
                self.copies.remove(copied)

    def finish_copies(self) -> None:
        """Wait for the copies up to the device, which see the bytes of their pages."""
        while self.copies:
            self.copies.popleft()[1].wait()

    # --- inside -----------------------------------------------------------------------------------------

    def _compute_quietly(self, chain: Chain) -> None:
        """Reads have ended: go on, or leave it to whoever waits for the unit to try again."""
        try:
            chain.gather()
        except InfinityError:
            self._put_back(chain)
            self._units[chain.unit].unread = True
            return
        self.compute(chain)

    def _write(self, chain: Chain) -> None:
        """Wait for the update itself, and send the outcome on its way."""
        assert chain.ticket is not None
        started = time.perf_counter()
        chain.ticket.wait()
        self._store.meter.updating(time.perf_counter() - started)
        chain.write()

    def _put_back(self, chain: Chain) -> None:
        """A read failed and nothing was changed: the chain is due again, before all others."""
        chain.put_back()
        self.active.remove(chain)
        queue = self.due.pop(chain.unit, deque())
        queue.appendleft(chain)
        self.due = {chain.unit: queue, **self.due}
