"""Chain: the update of one chunk, from reading its inputs to writing its results home.

A chunk's parameter slice, gradient and optimizer states are used in place where they are in host RAM. The
others are read into staging, which is granted for all of them or for none. On a device that shares the host's
RAM the parameters are updated in the page that the model computes with, resident or still arriving, so that
they are read once for both.

[Note: the gate] A chain computes once two things have happened, in any order: its bytes have arrived, and its
gate is open. The gate opens when the update is decided: by `step()` for a lazy update, by the unit's last
gradient for an eager one. Before that only states are read, because only they are sure not to change. A chain
with a closed gate gives up its staging when another needs it; nothing has been changed by then.

[Note: back and lost] A read that fails changes nothing: the chain is due again (or idle, if its gate was
closed), and is read again when somebody waits for its unit. A write that fails loses the only copy: the chain
is LOST, and the runtime ends.
"""

from __future__ import annotations

import contextlib
import enum

import torch

from infinity import cpu_adam
from infinity.config import round_up
from infinity.errors import InfinityError
from infinity.optim.chunk_update import ChunkUpdate, Memory
from infinity.optim.decision import Decision
from infinity.pages.health import Health
from infinity.pages.store import Store
from infinity.tiers import PAGE_ALIGNMENT, Tier
from infinity.tiers.link import ARRIVED, Transfer, User

NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
"""Empty uint8 tensor: the memory of a chain that has none, or needs none."""

Present = tuple[torch.Tensor, Transfer]
"""(bytes of a parameter page where the model computes, the transfer that brings them)."""


class ChainState(enum.Enum):
    """The state of a chain, and the staging that it holds in it."""

    IDLE = "idle"
    """There is nothing to do. Holds no staging."""
    DUE = "due"
    """The gate is open, and the chain waits for staging. Holds only that of its staged gradient."""
    READING = "reading"
    """Bytes that are not in RAM are being read. From here on the chain holds all the staging it needs."""
    GATED = "gated"
    """The states have arrived, and the gate is still closed."""
    COMPUTING = "computing"
    """The kernel runs, or is queued."""
    WRITING = "writing"
    """The results are on their way home. The transfers hold the staging until they are done."""
    LOST = "lost"
    """A write failed: the only copy of these parameters is gone."""

    __hash__ = object.__hash__
    """Hash by identity, which is faster than Enum's own."""


_NEXT = {
    ChainState.IDLE: (ChainState.DUE, ChainState.READING),
    ChainState.DUE: (ChainState.READING, ChainState.COMPUTING, ChainState.IDLE),
    ChainState.READING: (ChainState.GATED, ChainState.COMPUTING, ChainState.DUE, ChainState.IDLE),
    ChainState.GATED: (ChainState.READING, ChainState.IDLE),
    ChainState.COMPUTING: (ChainState.WRITING, ChainState.LOST, ChainState.IDLE),
    ChainState.WRITING: (ChainState.IDLE, ChainState.LOST),
    ChainState.LOST: (ChainState.IDLE,),
}
"""The allowed transitions. When the runtime ends, any state may also become IDLE."""


class Chain:
    """The update of one chunk. `Updater` owns it and decides its order; every transition is a method here."""

    def __init__(self, update: ChunkUpdate, store: Store, health: Health) -> None:
        self.update = update
        """The computation of the chunk's new parameters and states."""
        self.page = update.page
        self.unit = update.page.index
        self.chunk_index = update.chunk_index
        self.chunk = update.chunk
        self.rests = update.rests
        """Whether all its memory is at home in host RAM, so that it never needs staging."""
        self.state = ChainState.IDLE
        self.decision: Decision | None = None
        """The decided update; the gate is open while there is one."""
        self.ticket: cpu_adam.Ticket[cpu_adam.UpdateResult] | None = None
        """The running update, while COMPUTING."""
        self.copy: Transfer = ARRIVED
        """The copy of the new parameters to a device with memory of its own, while WRITING."""
        self._store = store
        self._health = health
        self._state_page = update.state_page
        self._gradient_page = update.gradient_page
        self._has_copy = not store.device.shares_host and self.page.home.tier is not Tier.DEVICE
        """Whether a resident page is a copy in device memory, which must be updated too."""
        self._start = self.page.layout.chunk_start(self.chunk_index)
        self._state_offset = self._state_page.offset(self.chunk_index)
        self.parameter_bytes = round_up(self.chunk.count * update.dtype.itemsize, PAGE_ALIGNMENT)
        """Bytes of the chunk's slice of the parameter page, in whole 4 KiB blocks."""
        self.gradient_bytes = self._gradient_page.nbytes(self.chunk_index)
        """Bytes of the chunk's part of the gradient page."""
        self.state_bytes = self._state_page.formats[self.chunk_index].nbytes
        """Bytes of the chunk's part of the optimizer page."""
        self._reads: list[Transfer] = []
        self._parameter = self._gradient = self._states = NOTHING
        """uint8: the slice of the parameter page, the chunk's gradient and states. NOTHING while unknown."""
        self._kept = NOTHING
        """The gradient when the gate opened, if it was in RAM; it stays here when zero_grad() forgets it."""
        self._room = NOTHING
        """Staging, uint8, for the parameter slice, which is read only when the gate opens."""
        self._version = 0
        """Version of the states that were read before the gate opened."""
        self.was_ahead = False
        """Whether the states were read before the gate opened."""
        self._at_home: Memory | None = None
        """Memory of a chain that `rests`, from its first update on."""

    def present(self) -> Present | None:
        """The page's bytes where the model computes with them, if that is host RAM and not their home.

        Another thread may drop their last view at any moment, and they are freed then. So a caller that asks
        for staging according to this result keeps it until the chain has it.
        """
        if self.page.home.in_place or not self._store.device.shares_host:
            return None
        living = self.page.living()
        return self.page.incoming if living is None else (living, ARRIVED)

    def needed(self, present: Present | None) -> int:
        """Bytes of staging that the chain needs, while DUE."""
        nbytes = 0 if self._state_page.home.in_place else self.state_bytes
        if not self._gradient.nbytes:
            nbytes += self.gradient_bytes
        if not self.page.home.in_place and present is None:
            nbytes += self.parameter_bytes
        return nbytes

    @property
    def needed_ahead(self) -> int:
        """Bytes of staging that the chain needs to read its states before the gate opens."""
        apart = not (self._store.device.shares_host or self.page.home.in_place)
        return self.state_bytes + (self.parameter_bytes if apart else 0)

    @property
    def in_place(self) -> bool:
        """Whether all that the chain needs is in host RAM, while DUE."""
        if self.rests:
            return True
        return self.page.home.in_place and self._state_page.home.in_place and bool(self._gradient.nbytes)

    @property
    def gradient(self) -> torch.Tensor:
        """The chunk's gradient, uint8, as when the gate opened, while DUE; empty if it must be read."""
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
        """Whether a read of the states would wait for a write."""
        start = self._state_offset
        return self._state_page.home.busy(start, start + self.state_bytes, writing=False)

    @property
    def arrived(self) -> bool:
        """Whether every read has ended, successfully or not."""
        return not self._reads or all([each.done() for each in self._reads])

    @property
    def holds_gradient(self) -> bool:
        """Whether the chain's gradient is in staging, while DUE."""
        return bool(self._gradient.nbytes) and not self._gradient_page.home.in_place

    # --- transitions ------------------------------------------------------------------------------------

    def open(self, decision: Decision) -> bool:
        """Open the gate: IDLE -> DUE, or READING or GATED -> READING. Returns whether the chain is DUE."""
        assert self.decision is None
        if self.rests:
            self.decision = decision
            self._to(ChainState.DUE)
            return True
        present = self.present()
        if self.state is not ChainState.IDLE and not self._still_right(present):
            self.revoke()
        self.decision = decision
        kept = self._gradient_page.in_ram(self.chunk_index)
        self._gradient = self._kept = NOTHING if kept is None else kept
        if self.state is ChainState.IDLE:
            self._to(ChainState.DUE)
            return True
        self._read_parameter(self._room, present)
        if self.state is ChainState.GATED:
            self._to(ChainState.READING)
        return False

    def grant(self, memory: torch.Tensor, present: Present | None) -> None:
        """DUE -> READING. memory: staging, uint8 (needed(present),). Raises StorageError, and stays DUE."""
        try:
            rest = self._read_parameter(memory, present)
            if not self._gradient.nbytes:
                self._gradient, rest = rest[: self.gradient_bytes], rest[self.gradient_bytes :]
                offset = self._gradient_page.offset(self.chunk_index)
                self._reads.append(self._store.read(self._gradient_page.home, offset, self._gradient))
            if self._state_page.home.in_place:
                self._states = self._state_page.home.view(self._state_offset, self.state_bytes)
            else:
                self._read_states(rest[: self.state_bytes])
        except BaseException:
            self._let_go()
            raise
        self._to(ChainState.READING)

    def read_ahead(self, memory: torch.Tensor) -> None:
        """IDLE -> READING, the gate is closed. memory: staging, uint8 (needed_ahead,). Raises as `grant`."""
        self._version = self._state_page.version
        try:
            self._read_states(memory[: self.state_bytes])
        except BaseException:
            self._let_go()
            raise
        self._room = memory[self.state_bytes :]
        self.was_ahead = True
        self._to(ChainState.READING)

    def arrive(self) -> None:
        """READING -> GATED: the reads of the states have ended, in whatever way; the gate is closed."""
        assert self.decision is None
        self._to(ChainState.GATED)

    def gather(self) -> None:
        """Wait for all reads, while READING with an open gate. Raises StorageError; see `put_back`."""
        failure: InfinityError | None = None
        for read in self._reads:
            try:
                read.wait()
            except InfinityError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        self._reads.clear()

    def put_back(self) -> None:
        """READING -> DUE: a read failed, and nothing was changed."""
        self.end()
        self._let_go()
        self._to(ChainState.DUE)

    def revoke(self) -> None:
        """READING or GATED, with the gate closed -> IDLE: the staging is needed elsewhere."""
        assert self.decision is None
        self.end()
        self._let_go()
        self._to(ChainState.IDLE)

    def forget_gradient(self) -> None:
        """Drop the gradient, while DUE: it was written home, and will be read from there."""
        assert self.state is ChainState.DUE
        self._gradient = self._kept = NOTHING

    def compute(self, *, awaited: bool) -> cpu_adam.Ticket[cpu_adam.UpdateResult]:
        """READING, or DUE where all is in place, -> COMPUTING. All reads have succeeded.

        awaited: the caller is about to wait for the update. Raises the gradient ring's failure.
        """
        if self.rests:
            self._take_at_home()
        link = self._store.link
        if link.checked:
            link.uses(User.HOST, self._gradient, writes=False, label="update")
            link.uses(User.HOST, self._parameter, self._states, writes=True, label="update")
        assert self.decision is not None
        memory = (self._parameter, self._gradient, self._states)
        self.ticket = self.update.submit(self.decision, memory, awaited=awaited)
        self._to(ChainState.COMPUTING)
        return self.ticket

    def write(self) -> None:
        """COMPUTING -> WRITING: begin to write the results. Raises StorageError; the chain is LOST then."""
        store, page = self._store, self.page
        try:
            if not self._state_page.home.in_place and self._states.nbytes:
                store.write(self._state_page.home, self._state_offset, self._states, self._lose)
            if not page.home.in_place:
                store.write(page.home, self._start, self._parameter, self._lose)
            living = page.living() if self._has_copy else None
            if living is not None:
                into = living[self._start : self._start + self._parameter.nbytes]
                self.copy = store.copy_up(into, self._parameter)
        except InfinityError as error:
            self._lose(error)
            raise
        self.ticket = self.decision = None
        self._kept = NOTHING
        self._let_go()
        self._to(ChainState.WRITING)

    def finish(self) -> Transfer:
        """WRITING -> IDLE: later computation uses the new parameters. Returns the copy to the device."""
        copy, self.copy = self.copy, ARRIVED
        self._to(ChainState.IDLE)
        return copy

    def abandon(self) -> None:
        """Any state -> IDLE: wait until nothing touches the memory, and drop the update and its failures."""
        self.end()
        self._at_home = None
        self.update.forget_addresses()
        self._kept = NOTHING
        self._let_go()
        self.ticket = self.decision = None
        self.copy = ARRIVED
        self.state = ChainState.IDLE

    def end(self) -> None:
        """Wait until nothing is under way in the chain's memory. Failures of reads are ignored."""
        for read in self._reads:
            with contextlib.suppress(InfinityError):
                read.wait()
        if self.ticket is not None:
            self.ticket.wait()
        self.copy.wait()

    # --- inside -----------------------------------------------------------------------------------------

    def _to(self, state: ChainState) -> None:
        assert state in _NEXT[self.state], f"{self.state} -> {state}"
        self.state = state

    def _lose(self, error: InfinityError) -> None:
        self._health.lose(error)
        self.state = ChainState.LOST

    def _still_right(self, present: Present | None) -> bool:
        """Whether the states that were read ahead are current, and the chain needs no further staging."""
        if self._version != self._state_page.version or not self._gradient_page.is_in_ram(self.chunk_index):
            return False
        return bool(self._room.nbytes) or self.page.home.in_place or present is not None

    def _read_parameter(self, memory: torch.Tensor, present: Present | None) -> torch.Tensor:
        """Find the parameter slice or begin to read it; returns the unused rest of `memory`."""
        home, start, nbytes = self.page.home, self._start, self.parameter_bytes
        if home.in_place:
            home.settle(start, start + nbytes, writing=True)
            self._parameter = home.view(start, nbytes)
        elif present is not None:
            self._parameter = present[0][start : start + nbytes]
            if present[1] is not ARRIVED:
                self._reads.append(present[1])
        else:
            self._parameter, memory = memory[:nbytes], memory[nbytes:]
            self._reads.append(self._store.read(home, start, self._parameter))
        return memory

    def _take_at_home(self) -> None:
        """Find the memory of a chain that `rests`. Raises the gradient ring's failure."""
        self._gradient_page.settle(self.chunk_index)
        if self._at_home is None:
            offset = self._gradient_page.offset(self.chunk_index)
            self._at_home = (
                self.page.home.view(self._start, self.parameter_bytes),
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

    def _let_go(self) -> None:
        """Drop all references to memory but the one to a kept gradient."""
        self._reads = []
        self._parameter = self._states = self._room = NOTHING
        self._gradient = self._kept
        self.was_ahead = False
