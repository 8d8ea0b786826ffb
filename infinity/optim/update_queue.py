"""Update queue: the chains that are due, the chains that are under way, and how they advance.

A chain is the update of one chunk (infinity/optim/chain.py). It is due when its update is decided, and then
waits for its turn and for staging (infinity/optim/staging.py). Once begun, it reads, computes and writes. A
caller that needs the chain's unit or memory waits for the chain with `UpdateQueue.end`. The states of
chains (IDLE, DUE and others) are explained in infinity/optim/chain_state.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from infinity.errors import InfinityError
from infinity.optim.chain import Chain
from infinity.optim.chain_state import ChainState
from infinity.optim.decision import Decision
from infinity.optim.unit_update import UnitUpdate
from infinity.pages.store import Store
from infinity.telemetry.stats import Edge
from infinity.tiers.link import ARRIVED, Transfer


class UpdateQueue:
    """The chains (updates of chunks) of a runtime that wait for staging or are under way. Called under the
    runtime's lock.
    """

    def __init__(self, units: Sequence[UnitUpdate], store: Store) -> None:
        self.due: dict[int, deque[Chain]] = {}
        """Unit -> its DUE chains: their update is decided and has not begun. Units and chains are in the
        order in which they are to begin.
        """
        self.active: list[Chain] = []
        """Chains that hold staging or whose update is being computed, in the order in which they began."""
        self.copies: deque[tuple[int, Transfer]] = deque()
        """(unit, transfer) of each copy of updated parameters to the device that is still under way. Such a
        copy reads host RAM and writes the unit's parameter page.

        The compute stream is already ordered after these copies.
        """
        self.shares_cpu = store.plan.device.type == "cpu"
        """Whether the CPU computes the model as well as updates. If so, a thread that waits for an update
        helps to compute the update.
        """
        self._units = units
        self._store = store

    # --- in and out -------------------------------------------------------------------------------------

    def open(self, unit: int, chains: Sequence[Chain], decision: Decision) -> None:
        """Open the gates of some chains of a unit: from now on they may compute the update that `decision`
        describes.

        Afterwards a chain is DUE if it was IDLE, or if it can no longer use the states that it has read
        ahead. The other chains keep these states and their staging.
        """
        due = deque([chain for chain in chains if chain.open(decision)])
        self.active = [each for each in self.active if each.state is not ChainState.DUE]
        if due:
            self.due[unit] = due

    def arrange(self, units: Iterable[int]) -> None:
        """Set the order in which DUE chains begin, unit by unit.

        units: the units in this order. Every unit that has DUE chains must be among them; others may be.
        """
        self.due = {unit: self.due[unit] for unit in units if unit in self.due}

    def read_ahead(self, chain: Chain, memory: torch.Tensor) -> None:
        """Begin to read the states of a chain before its update is decided.

        memory: staging that the chain keeps until it has ended or is revoked, uint8 (chain.needed_ahead,).
        """
        chain.read_ahead(memory)
        self.active.append(chain)

    def begun(self, chain: Chain) -> None:
        """Record that a DUE chain has begun: move it from `due` to `active`."""
        self.active.append(chain)
        queue = self.due[chain.unit]
        queue.remove(chain)
        if not queue:
            del self.due[chain.unit]

    def revoke(self, chain: Chain) -> None:
        """Take the staging from a chain that has read states ahead while its update is not decided yet.

        The chain is IDLE then, and its states are read again later.
        """
        chain.revoke()  # it waits for reads: Ctrl-C leaves the chain active
        self.active.remove(chain)

    def revoke_all(self) -> None:
        """Take the staging from all chains that have read states ahead while their update is not decided
        yet.
        """
        for chain in [each for each in self.active if each.is_ahead]:
            self.revoke(chain)

    def abandon(self) -> None:
        """Give up all updates that have not ended, and wait until no chain uses its memory any more."""
        self.finish_copies()
        self.due.clear()
        self.active.clear()
        for each in self._units:
            each.left, each.resting = 0, ()
            for chain in each.chains:
                chain.abandon()

    # --- what is under way ------------------------------------------------------------------------------

    def running(self, unit: int) -> Chain | None:
        """Return the unit's first chain in `active` whose update is decided; None if there is none.

        Chains that read their states ahead of the decision are passed over.
        """
        for chain in self.active:
            if chain.unit == unit and not chain.is_ahead:
                return chain
        return None

    def poll(self) -> None:
        """Advance all chains as far as possible without waiting for a read, a write or a copy.

        Where the CPU computes the model too, this call waits for the updates whose inputs have arrived, and
        helps to compute them.
        """
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
                    chain.ticket.wait()  # drops the ticket's references to memory
                    chain.write()
            if chain.state is ChainState.WRITING and chain.copy.done():
                self._ended(chain)

    def compute(self, chain: Chain) -> None:
        """Submit the update of a chain to the update threads; see `Chain.compute`."""
        ticket = chain.compute(awaited=self.shares_cpu)
        self._store.meter.submitted(ticket, chain.update.numel)

    def end(self, chain: Chain) -> None:
        """Wait for the reads and the computation of an active chain, and begin its writes.

        If a read fails, the chain is DUE again, and reads again when it is next granted staging. Raises
        StorageError, but not for a failed read of a chain that has read its states ahead.
        """
        if chain.state is ChainState.READING:
            try:
                with self._store.meter.stalling(Edge.NVME_TO_HOST):
                    chain.gather()
            except InfinityError:
                was_ahead = chain.was_ahead
                self._put_back(chain)
                if was_ahead:
                    return  # the chain is due again, and its next grant repeats the reads
                raise
            self.compute(chain)
        if chain.state is ChainState.COMPUTING:
            self._write(chain)
        self._ended(chain)

    def end_quietly(self, chain: Chain) -> None:
        """Do what `end` does, but do not raise the error of a failed read: the chain is DUE again then."""
        try:
            self.end(chain)
        except InfinityError:
            if chain in self.active:
                raise

    def _ended(self, chain: Chain) -> None:
        try:
            self.active.remove(chain)
            self.deliver(chain)
        except BaseException as error:
            chain.interrupted(error)
            raise

    def deliver(self, chain: Chain) -> None:
        """Record that a chain's update is computed, so that the model can use the new parameters.

        If the new parameters are being copied to the device, work that is queued on the compute stream from
        now on waits for this copy.
        """
        self._units[chain.unit].left -= 1
        copy = chain.finish()
        if copy is not ARRIVED:
            self._store.link.fence(copy)
            if not copy.done():
                self.copies.append((chain.unit, copy))

    def release(self, unit: int) -> None:
        """Wait until no update, and no copy of updated parameters to the device, uses the memory that a
        unit's parameter page has now.

        Errors of failed reads are not raised here.
        """
        while (running := self.running(unit)) is not None:
            self.end_quietly(running)
        if self.copies:
            for copied in [each for each in self.copies if each[0] == unit]:
                copied[1].wait()
                self.copies.remove(copied)

    def finish_copies(self) -> None:
        """Wait for all copies of updated parameters to the device. Until it ends, a copy holds a view of
        the parameter page that it writes.
        """
        while self.copies:
            self.copies.popleft()[1].wait()

    # --- inside -----------------------------------------------------------------------------------------

    def _compute_quietly(self, chain: Chain) -> None:
        """Submit the update of a chain whose reads have ended.

        If a read failed, the chain is due again, and is tried again when a caller waits for its unit.
        """
        try:
            chain.gather()
        except InfinityError:
            self._put_back(chain)
            self._units[chain.unit].unread = True
            return
        self.compute(chain)

    def _write(self, chain: Chain) -> None:
        """Wait for a chain's computation, and begin to write its results to the homes of their pages."""
        assert chain.ticket is not None
        started = time.perf_counter()
        chain.ticket.wait()
        self._store.meter.updating(time.perf_counter() - started)
        chain.write()

    def _put_back(self, chain: Chain) -> None:
        """Make a chain DUE again because one of its reads failed. It is then first among all DUE chains.

        The chain has changed no parameters and no states.
        """
        chain.put_back()
        self.active.remove(chain)
        queue = self.due.pop(chain.unit, deque())
        queue.appendleft(chain)
        self.due = {chain.unit: queue, **self.due}
