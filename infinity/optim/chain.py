"""Chain: the update of one chunk, from reading its inputs to writing its results home.

The inputs are the chunk's slice of the parameter page, its gradient and its optimizer states. Inputs that
are in host RAM are used in place. The others are read into staging, which is granted for all of them or for
none. On a device that shares the host's RAM, parameters are updated in the page that the model computes
with, whether it is resident or still arriving. So the parameters are read once for both uses.

[Note: the gate] A chain computes once two things have happened, in any order: its bytes have arrived, and
its gate is open. The gate opens when the update is decided: by `step()` for a lazy update, by the unit's
last gradient for an eager update. Before that only states are read, because only states are sure not to
change. A chain with a closed gate gives up its staging when another user needs the room. Nothing has been
changed by then, so nothing is lost.

[Note: back and lost] A read that fails changes nothing. The chain is due again (or idle, if its gate was
closed), and its bytes are read again when a caller waits for the unit. A write that fails loses the only
copy of its bytes. The chain is LOST then, and the runtime cannot be used any more.
"""

from __future__ import annotations

import contextlib

import torch

from infinity import cpu_adam
from infinity.config import round_up
from infinity.errors import InfinityError
from infinity.optim.chain_state import NEXT, ChainState
from infinity.optim.chunk_update import ChunkUpdate, Memory
from infinity.optim.decision import Decision
from infinity.pages.health import Health
from infinity.pages.store import Store
from infinity.tiers import PAGE_ALIGNMENT, Tier
from infinity.tiers.link import ARRIVED, Transfer, User

NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
"""An empty uint8 tensor, in the place of memory that a chain does not have or does not need."""

Present = tuple[torch.Tensor, Transfer]
"""(bytes of a parameter page in the memory where the model computes, the transfer that brings the bytes)."""


class Chain:
    """The update of one chunk. `Updater` owns the chains and decides in which order they run.

    The states, such as IDLE and DUE, are explained in `ChainState`. "IDLE -> DUE" in a docstring says which
    state a method expects, and which state it leaves.
    """

    def __init__(self, update: ChunkUpdate, store: Store, health: Health) -> None:
        self.update = update
        """Computes the chunk's new parameters and optimizer states."""
        self.page = update.page
        self.unit = update.page.index
        self.chunk_index = update.chunk_index
        self.chunk = update.chunk
        self.rests = update.rests
        """Whether all memory of the chain is at home in host RAM, so that the chain never needs staging."""
        self.state = ChainState.IDLE
        self.decision: Decision | None = None
        """What the update is to compute; None until that is decided. The gate is open while not None."""
        self.ticket: cpu_adam.Ticket[cpu_adam.UpdateResult] | None = None
        """While COMPUTING, the ticket by which to wait for the running update; else None."""
        self.copy: Transfer = ARRIVED
        """While WRITING, the copy of new parameters to the device; ARRIVED, an ended transfer, if none."""
        self._store = store
        self._health = health
        self._state_page = update.state_page
        self._gradient_page = update.gradient_page
        self._has_copy = not store.device.shares_host and self.page.home.tier is not Tier.DEVICE
        """Whether the model uses a copy of the page in device memory, which `write` also has to update."""
        self._start = self.page.layout.chunk_start(self.chunk_index)
        self._home_start = self.page.shard.home_start(self.chunk_index)
        self._state_offset = self._state_page.offset(self.chunk_index)
        self.parameter_bytes = round_up(self.chunk.count * update.dtype.itemsize, PAGE_ALIGNMENT)
        """Bytes of the chunk's slice of the parameter page, in whole 4 KiB blocks."""
        self.gradient_bytes = self._gradient_page.nbytes(self.chunk_index)
        """Bytes of the chunk's part of the gradient page."""
        self.state_bytes = self._state_page.formats[self.chunk_index].nbytes
        """Bytes of the chunk's part of the optimizer page."""
        self._reads: list[Transfer] = []
        self._parameter = self._gradient = self._states = NOTHING
        """The update's inputs in RAM, each uint8. NOTHING stands for one that has no place in RAM yet."""
        self._kept = NOTHING
        """The gradient if it was in RAM when the gate opened, kept even after zero_grad(); else NOTHING."""
        self._takes_gradient = True
        """Whether the update that was decided last takes the gradient. Otherwise it only averages masters."""
        self._room = NOTHING
        """Staging, uint8, into which the parameter slice will be read when the gate opens."""
        self._version = 0
        """`StatePage.version` of the states that were read before the gate opened."""
        self.was_ahead = False
        """Whether the states were read before the gate opened."""
        self._at_home: Memory | None = None
        """Views of the inputs in their homes, made by the first update of a chain with `rests`; else None."""

    def present(self) -> Present | None:
        """Return the copy of the parameter page with which the model computes, if this copy is in host RAM.

        A copy that is still being read into host RAM counts too. Returns None if there is no such copy, or
        if the model computes in device memory or with the bytes of the page's home. Another thread may drop
        the last view of the copy at any moment, which frees its bytes. So a caller that asks for staging
        according to this result must keep the result until the chain has the staging.
        """
        if self.page.home.in_place or not self._store.device.shares_host:
            return None
        living = self.page.living()
        return self.page.incoming if living is None else (living, ARRIVED)

    def needed(self, present: Present | None) -> int:
        """Bytes of staging that a DUE chain needs to begin. present: the result of the method `present`."""
        nbytes = 0 if self._state_page.home.in_place else self.state_bytes
        if self._takes_gradient and not self._gradient.nbytes:
            nbytes += self.gradient_bytes
        if not self.page.home.in_place and present is None:
            nbytes += self.parameter_bytes
        return nbytes

    @property
    def needed_ahead(self) -> int:
        """Bytes of staging for `read_ahead`: states, plus the parameter slice if it must be read later."""
        apart = not (self._store.device.shares_host or self.page.home.in_place)
        return self.state_bytes + (self.parameter_bytes if apart else 0)

    @property
    def in_place(self) -> bool:
        """Whether a DUE chain has its gradient in host RAM, and its parameters and states at home there."""
        if self.rests:
            return True
        there = bool(self._gradient.nbytes) or not self._takes_gradient
        return self.page.home.in_place and self._state_page.home.in_place and there

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of a DUE chain, uint8, kept since the gate opened; empty if it is taken from home."""
        return self._gradient

    @property
    def is_ahead(self) -> bool:
        """Whether the chain holds staging while its gate is closed."""
        return self.decision is None and self.state in (ChainState.READING, ChainState.GATED)

    @property
    def states_on_disk(self) -> bool:
        return self._state_page.home.nvme_lease is not None

    @property
    def has_moments(self) -> bool:
        """Whether the chunk has moments, which can be read before the gate opens."""
        return self._state_page.begun[self.chunk_index]

    @property
    def being_written(self) -> bool:
        """Whether an earlier write of the optimizer states is in flight, for which a read has to wait."""
        start = self._state_offset
        return self._state_page.home.busy(start, start + self.state_bytes, writing=False)

    @property
    def arrived(self) -> bool:
        """Whether all reads of the chain have ended, successfully or not."""
        return not self._reads or all([each.done() for each in self._reads])

    @property
    def holds_gradient(self) -> bool:
        """Whether the gradient of a DUE chain is in staging."""
        return bool(self._gradient.nbytes) and not self._gradient_page.home.in_place

    # --- transitions ------------------------------------------------------------------------------------

    def open(self, decision: Decision) -> bool:
        """Open the gate: IDLE -> DUE, or READING or GATED -> READING.

        decision: the update to compute. If the states that were read ahead cannot be used any more, the
        chain gives up its staging and is DUE. Returns True if the chain is DUE, so that it still needs
        staging, and False if it is READING.
        """
        assert self.decision is None
        if decision.averaged:
            self._takes_gradient = any(each.parameter in decision.parameters for each in self.chunk.pieces)
        else:
            self._takes_gradient = True
        if self.rests:
            self.decision = decision
            self._to(ChainState.DUE)
            return True
        present = self.present()
        if self.state is not ChainState.IDLE and not self._still_right(present):
            self.revoke()
        self.decision = decision
        kept = self._gradient_page.in_ram(self.chunk_index) if self._takes_gradient else None
        self._gradient = self._kept = NOTHING if kept is None else kept
        if self.state is ChainState.IDLE:
            self._to(ChainState.DUE)
            return True
        self._read_parameter(self._room, present)
        if self.state is ChainState.GATED:
            self._to(ChainState.READING)
        return False

    def grant(self, memory: torch.Tensor, present: Present | None) -> None:
        """Give the chain staging, and begin its reads: DUE -> READING.

        memory: staging, uint8 (needed(present),). present: the result of the method `present`. If
        StorageError is raised, the chain stays DUE.
        """
        try:
            rest = self._read_parameter(memory, present)
            if self._takes_gradient and not self._gradient.nbytes:
                self._gradient, rest = rest[: self.gradient_bytes], rest[self.gradient_bytes :]
                assert self.decision is not None
                if self.update.reads_gradient(self.decision):
                    offset = self._gradient_page.offset(self.chunk_index)
                    self._reads.append(self._store.read(self._gradient_page.home, offset, self._gradient))
            if self._state_page.home.in_place:
                self._states = self._state_page.home.view(self._state_offset, self.state_bytes)
            else:
                self._read_states(rest[: self.state_bytes])
        except BaseException:
            self._drop_reads()
            raise
        self._to(ChainState.READING)

    def read_ahead(self, memory: torch.Tensor) -> None:
        """Begin to read the states while the gate is closed: IDLE -> READING.

        memory: staging, uint8 (needed_ahead,). If StorageError is raised, the chain stays IDLE.
        """
        self._version = self._state_page.version
        try:
            self._read_states(memory[: self.state_bytes])
        except BaseException:
            self._drop_reads()
            raise
        self._room = memory[self.state_bytes :]
        self.was_ahead = True
        self._to(ChainState.READING)

    def arrive(self) -> None:
        """Note that all reads have ended or failed while the gate is closed: READING -> GATED."""
        assert self.decision is None
        self._to(ChainState.GATED)

    def gather(self) -> None:
        """Wait for all reads of a READING chain whose gate is open.

        Raises StorageError if a read failed; the caller then calls `put_back`.
        """
        failure: InfinityError | None = None
        for read in self._reads:
            try:
                read.wait()
            except InfinityError as error:
                failure = failure or error.again()
        if failure is not None:
            raise failure.again()  # a variable that holds what is raised keeps the frames alive
        self._reads.clear()

    def put_back(self) -> None:
        """Make the chain due again after a read failed: READING -> DUE. Nothing was changed."""
        self.end()
        self._let_go()
        self._to(ChainState.DUE)

    def revoke(self) -> None:
        """Wait for the reads and give up the staging, with the gate closed: READING or GATED -> IDLE."""
        assert self.decision is None
        self.end()
        self._let_go()
        self._to(ChainState.IDLE)

    def forget_gradient(self) -> None:
        """Drop the gradient of a DUE chain after it was written home, from where it will be read again."""
        assert self.state is ChainState.DUE
        self._gradient = self._kept = NOTHING

    def compute(self, *, awaited: bool) -> cpu_adam.Ticket[cpu_adam.UpdateResult]:
        """Submit the update to the update threads: READING -> COMPUTING.

        A chain that never needs staging goes DUE -> COMPUTING; for any other, `gather` has returned before.
        awaited: whether the caller is about to wait for the update. Raises the error by which the gradient
        was lost on its way down from a device.
        """
        if self.rests:
            self._take_at_home()
        ledger = self._store.ledger
        if ledger is not None and ledger.pending is not None:
            ledger.settle_chunk((self.unit, self.chunk_index))
            # A write of the values before may still read the memory that the update changes.
            self.page.home.settle(self._home_start, self._home_start + self.parameter_bytes, writing=False)
        assert self.decision is not None
        link = self._store.link
        if link.checked:
            link.uses(User.HOST, self._gradient, writes=bool(self.decision.zeros), label="update")
            link.uses(User.HOST, self._parameter, self._states, writes=True, label="update")
        memory = (self._parameter, self._gradient, self._states)
        try:
            self.ticket = self.update.submit(self.decision, memory, awaited=awaited)
            self._to(ChainState.COMPUTING)
        except BaseException as error:
            self.interrupted(error)
            raise
        return self.ticket

    def write(self) -> None:
        """Begin to write the results home: COMPUTING -> WRITING. After a StorageError the chain is LOST."""
        store, page = self._store, self.page
        try:
            if not self._state_page.home.in_place and self._states.nbytes:
                store.write(self._state_page.home, self._state_offset, self._states, self._lose)
            if not page.home.in_place:
                store.write(page.home, self._home_start, self._parameter, self._lose)
            living = page.living() if self._has_copy else None
            if living is not None:
                into = living[self._start : self._start + self._parameter.nbytes]
                self.copy = store.copy_up(into, self._parameter)
        except InfinityError as error:
            self._lose(error)
            raise
        except BaseException as error:
            if store.ledger is not None and store.ledger.pending is not None:
                self.interrupted(error)  # the commit may hold the places to which a repetition would write
            raise
        try:
            if store.ledger is not None:
                store.ledger.updated((self.unit, self.chunk_index))
            self.ticket = self.decision = None
            self._kept = NOTHING
            self._let_go()
            self._to(ChainState.WRITING)
        except BaseException as error:
            self.interrupted(error)
            raise

    def finish(self) -> Transfer:
        """Make the chain ready for its next update: WRITING -> IDLE.

        Returns the copy of the new parameters to the device, which may still be under way. The caller orders
        later computation after it.
        """
        copy, self.copy = self.copy, ARRIVED
        self._to(ChainState.IDLE)
        return copy

    def abandon(self) -> None:
        """Wait until nothing uses the chain's memory, then drop the update: any state -> IDLE.

        Waits for reads, computation and the copy to the device. Failures of reads are ignored.
        """
        self.end()
        self._at_home = None
        self.update.forget_addresses()
        self._kept = NOTHING
        self._let_go()
        self.ticket = self.decision = None
        self.copy = ARRIVED
        self.state = ChainState.IDLE

    def end(self) -> None:
        """Wait until nothing uses the chain's memory. Failures of reads are ignored."""
        for read in self._reads:
            with contextlib.suppress(InfinityError):
                read.wait()
        if self.ticket is not None:
            self.ticket.wait()
        self.copy.wait()

    # --- inside -----------------------------------------------------------------------------------------

    def _to(self, state: ChainState) -> None:
        assert state in NEXT[self.state], f"{self.state} -> {state}"
        self.state = state

    def interrupted(self, error: BaseException) -> None:
        """Make the runtime refuse further use if an exception came between two steps of a transition.

        error: the exception, such as KeyboardInterrupt. After a StorageError nothing is done, because the
        chain's state then says how to go on.
        """
        if not isinstance(error, InfinityError):
            self._health.interrupted(error)

    def _lose(self, error: InfinityError) -> None:
        self._health.lose(error)
        self.state = ChainState.LOST

    def _still_right(self, present: Present | None) -> bool:
        """Whether the states that were read ahead are still current, and the chain needs no more staging."""
        if self._version != self._state_page.version or not self._gradient_page.is_in_ram(self.chunk_index):
            return False
        return bool(self._room.nbytes) or self.page.home.in_place or present is not None

    def _read_parameter(self, memory: torch.Tensor, present: Present | None) -> torch.Tensor:
        """Find the parameter slice in RAM, or begin to read it into the beginning of `memory`.

        Returns the rest of `memory`, which is unused.
        """
        home, start, nbytes = self.page.home, self._home_start, self.parameter_bytes
        if home.in_place:
            home.settle(start, start + nbytes, writing=True)
            self._parameter = home.view(start, nbytes)
        elif present is not None:
            self._parameter = present[0][self._start : self._start + nbytes]
            if present[1] is not ARRIVED:
                self._reads.append(present[1])
        else:
            self._parameter, memory = memory[:nbytes], memory[nbytes:]
            self._reads.append(self._store.read(home, start, self._parameter))
        return memory

    def _take_at_home(self) -> None:
        """Wait for the gradient, and use the inputs in their homes. Raises what `compute` raises."""
        self._gradient_page.settle(self.chunk_index)
        if self._at_home is None:
            offset = self._gradient_page.offset(self.chunk_index)
            self._at_home = (
                self.page.home.view(self._home_start, self.parameter_bytes),
                self._gradient_page.home.view(offset, self.gradient_bytes),
                self._state_page.home.view(self._state_offset, self.state_bytes),
            )
        self._parameter, self._gradient, self._states = self._at_home

    def _read_states(self, memory: torch.Tensor) -> None:
        fresh = self.decision is not None and self.chunk_index in self.decision.fresh
        nbytes = self._state_page.master_bytes(self.chunk_index) if fresh else self.state_bytes
        assert memory.nbytes == self.state_bytes  # or the kernel would write behind it
        self._states = memory
        if nbytes:
            self._reads.append(self._store.read(self._state_page.home, self._state_offset, memory[:nbytes]))

    def _drop_reads(self) -> None:
        """End the reads that have begun, and give up the staging.

        Their homes list them until the next request there, and reads that nobody has waited for keep their
        memory.
        """
        try:
            self.end()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Drop all references to the inputs' memory except that to the gradient, if `open` kept it."""
        self._reads = []
        self._parameter = self._states = self._room = NOTHING
        self._gradient = self._kept
        self.was_ahead = False
