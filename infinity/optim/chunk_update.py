"""Chunk update: the update of one chunk, from reading its inputs to writing its results home.

The inputs are the chunk's slice of the parameter page, its gradient and its optimizer states. Inputs that are
in host RAM are used in place. The others are read into staging, which is acquired for all of them or for
none. On a device that shares the host's RAM, parameters are updated in the page that the model computes with,
whether it is resident or still arriving. So the parameters are read once for both uses.

[Note: back and lost] A read that fails changes nothing. The update is READY again (or IDLE, if it was not
decided), and its bytes are read again when a caller waits for the unit. A write that fails loses the only
copy of its bytes. The update is LOST then, and the runtime cannot be used any more.

[Note: speculative updates] An update that is decided before all gradients are known may be wrong: clipping
may scale its gradient, and an overflow may skip the step. So it leaves what it changes as it was, too: its
results go to another slot, on NVMe (`Part.tentative`) and in host RAM (`SlotPair.tentative`). Bytes in the
memory where the model computes can be brought from home again. `step()` then confirms the update, and
nothing is moved, or undoes it, and the update is decided again with the right scale.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Iterator

import torch

from infinity import cpu_adam
from infinity.config import round_up
from infinity.errors import InfinityError
from infinity.formats.optimizer_rules import AVERAGE
from infinity.optim.decision import Decision
from infinity.pages.gradient_page import GradientChunk, GradientPage
from infinity.pages.health import Health
from infinity.pages.home import Home, Outcome
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.parts import Part
from infinity.pages.slot_pair import SlotPair, confirm
from infinity.pages.store import Store
from infinity.telemetry.stats import Edge
from infinity.tiers import PAGE_ALIGNMENT, Tier
from infinity.tiers.driver import Event
from infinity.tiers.link import ARRIVED, JobCopies, Joined, Transfer

NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
"""An empty uint8 tensor, in the place of memory that an update does not have or does not need."""

Memory = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(a chunk's slice of the parameter page, its gradient, its optimizer states), each uint8 in host RAM."""
Present = tuple[torch.Tensor, Transfer]
"""(bytes of a parameter page in the memory where the model computes, the transfer that brings the bytes)."""


class UpdateState(enum.Enum):
    """How far the update of a chunk has come, and what staging (buffers in host RAM) it holds then."""

    IDLE = "idle"
    """The update is not decided, and no optimizer states are read ahead. It holds no staging."""
    READY = "ready"
    """The update is decided, and waits for staging or for its turn. Of its inputs only the gradient may
    already be in staging.
    """
    READING = "reading"
    """Inputs that are not in RAM are being read into staging: all inputs if the update is decided, only the
    optimizer states if not. From this state on it holds all the staging that it needs.
    """
    AHEAD = "ahead"
    """The optimizer states have been read into staging, and the update is not decided yet."""
    COMPUTING = "computing"
    """The update's kernel is queued or runs."""
    WRITING = "writing"
    """The writes of the results to the homes of their pages have begun. The staging is given up, and the
    writes keep it until they end.
    """
    TENTATIVE = "tentative"
    """The writes of a speculative update have begun, and `step()` has not confirmed the update yet."""
    LOST = "lost"
    """The results could not be written: the only copy of the chunk's new parameters or states is gone."""

    __hash__ = object.__hash__
    """Hash by identity, which is faster than Enum's own hash."""


_NEXT = {
    UpdateState.IDLE: (UpdateState.READY, UpdateState.READING),
    UpdateState.READY: (UpdateState.READING, UpdateState.IDLE),
    UpdateState.READING: (UpdateState.AHEAD, UpdateState.COMPUTING, UpdateState.READY, UpdateState.IDLE),
    UpdateState.AHEAD: (UpdateState.READING, UpdateState.IDLE),
    UpdateState.COMPUTING: (UpdateState.WRITING, UpdateState.LOST, UpdateState.IDLE),
    UpdateState.WRITING: (UpdateState.IDLE, UpdateState.TENTATIVE, UpdateState.LOST),
    UpdateState.TENTATIVE: (UpdateState.IDLE, UpdateState.LOST),
    UpdateState.LOST: (UpdateState.IDLE,),
}
"""State of an update -> the states that may follow. When the runtime ends, IDLE may follow any state."""


class ChunkUpdate:
    """The update of one chunk: its state, its staging, its reads and writes, and where its gradient is.

        IDLE -- make_ready --> READY -- acquire --> READING -- compute --> COMPUTING -- write --> WRITING
          |                                           ^                                   |          |
          |                                           |                                   +-> LOST   |
          |                                           |                                              |
          +-- read_ahead --> READING --> AHEAD -- make_ready                IDLE <---- finish -------+

    An update is decided by `step()` if it is lazy, and by the unit's last gradient if it is eager. Before
    that only states are read, because only they are sure not to change. When another user needs the room,
    `cancel` gives the staging of such an update up: READING or AHEAD -> IDLE. Nothing has been changed by
    then, so nothing is lost. A failed read of a decided update leads back by `put_back`: READING -> READY.

    A speculative update that is written waits as TENTATIVE for `confirm`, or for `undo`, which leads from any
    state to IDLE.

    The chunks of a unit whose pages are all at home in host RAM do not run by themselves
    (infinity/optim/unit_update.py). Of such a chunk only `decision` changes.
    """

    outcome: Outcome | None = None
    """The outcome of a speculative update, while it is not confirmed."""
    _after: Event | None = None
    """Once decided: after it, no queued kernel uses the parameters that the model had when it was decided."""
    _copies: JobCopies | None = None
    """While COMPUTING, the copies around it; else None."""

    def __init__(
        self,
        page: ParameterPage,
        states: States,
        gradients: GradientPage,
        chunk_index: int,
        *,
        threads: cpu_adam.ThreadPool,
        store: Store,
        health: Health,
    ) -> None:
        """gradients: the unit's gradients. threads: compute the update. health: is told of lost results."""
        self.page = page
        self.unit = page.index
        self.chunk_index = chunk_index
        self.chunk = page.layout.chunks[chunk_index]
        self.state = UpdateState.IDLE
        self.decision: Decision | None = None
        """What the update is to compute; None until that is decided."""
        self.ticket: cpu_adam.Tickets | None = None
        """While COMPUTING, the ticket by which to wait for the running update; else None."""
        self.copy: Transfer = ARRIVED
        """While WRITING, the copy of new parameters to the device; ARRIVED, an ended transfer, if none."""
        self._states_of_all = states
        self._state_page = states.pages[page.index]
        self._gradient_page = gradients
        self._threads = threads
        self._store = store
        self._health = health
        self.has_copy = not store.device.shares_host and page.home.tier is not Tier.DEVICE
        """Whether the model uses a copy of the page in device memory, which `write` also has to update."""
        self.start = page.layout.chunk_start(chunk_index)
        """Bytes from the start of the unit's page, where the model computes, to the chunk."""
        self.home_start = page.shard.home_start(chunk_index)
        """Bytes from the start of the page's home to the chunk."""
        self._state_offset = self._state_page.offset(chunk_index)
        self._dtype = page.layout.regions[self.chunk.region].dtype
        self.parameter_bytes = round_up(self.chunk.count * self._dtype.itemsize, PAGE_ALIGNMENT)
        """Bytes of the chunk's slice of the parameter page, in whole 4 KiB blocks."""
        self.gradient_bytes = gradients.nbytes(chunk_index)
        """Bytes of the chunk's part of the gradient page."""
        self._state_form = self._state_page.formats[chunk_index]
        self.state_bytes = self._state_form.nbytes
        """Bytes of the chunk's part of the optimizer page."""
        self._reads: list[Transfer] = []
        self._parameter = self._gradient = self._states = NOTHING
        """The inputs in RAM, each uint8. NOTHING stands for one that has no place in RAM yet."""
        self.taken: GradientChunk | None = None
        """Where the gradient of a decided update is, also after zero_grad(). None if the update never needs
        staging, or if it only averages masters.
        """
        self._room = NOTHING
        """Staging, uint8, into which the parameter slice will be read when the update is decided. It is
        NOTHING itself if the states were not read ahead.
        """
        self._version = 0
        """`StatePage.version` of the states that were read ahead."""
        self._form: cpu_adam.UpdateForm | None = None
        """Describes the chunk's arrays to the update threads; None before the first update."""

    # --- what it needs and has --------------------------------------------------------------------------

    def present(self) -> Present | None:
        """Return the copy of the parameter page with which the model computes, if this copy is in host RAM.

        A copy that is still being read into host RAM counts too. Returns None if there is no such copy, or if
        the model computes in device memory or with the bytes of the page's home. Another thread may drop the
        last view of the copy at any moment, which frees its bytes. So a caller that asks for staging
        according to this result must keep the result until the update has the staging.
        """
        if self.page.home.in_place or not self._store.device.shares_host:
            return None
        living = self.page.living()
        return self.page.incoming if living is None else (living, ARRIVED)

    def needed(self, present: Present | None) -> int:
        """Bytes of staging that a READY update needs. present: the result of the method `present`."""
        nbytes = 0 if self._state_page.home.in_place else self.state_bytes
        if self._lacks_gradient:
            nbytes += self.gradient_bytes
        if not self.page.home.in_place and present is None:
            nbytes += self.parameter_bytes
        return nbytes

    @property
    def needed_ahead(self) -> int:
        """Bytes of staging for `read_ahead`: the chunk's states, and room for its parameters if these are to
        be read into staging once the update is decided.
        """
        apart = not (self._store.device.shares_host or self.page.home.in_place)
        return self.state_bytes + (self.parameter_bytes if apart else 0)

    @property
    def has_inputs(self) -> bool:
        """Whether a READY update has its gradient in host RAM, and parameters and states at home there."""
        at_home = self.page.home.in_place and self._state_page.home.in_place
        return at_home and not self._lacks_gradient

    @property
    def _lacks_gradient(self) -> bool:
        """Whether a READY update takes a gradient that is neither in staging nor at home in host RAM."""
        return self.taken is not None and self.taken.staged is None and not self._gradient_page.home.in_place

    @property
    def holds_gradient(self) -> bool:
        """Whether the gradient of a READY update is in staging."""
        return self.taken is not None and self.taken.staged is not None

    @property
    def is_ahead(self) -> bool:
        """Whether the update holds staging and is not decided."""
        return self.decision is None and self.state in (UpdateState.READING, UpdateState.AHEAD)

    @property
    def was_ahead(self) -> bool:
        """Whether the states were read before the update was decided."""
        return self._room is not NOTHING

    @property
    def states_on_disk(self) -> bool:
        return self._state_page.home.nvme_lease is not None

    @property
    def can_be_undone(self) -> bool:
        """Whether a speculative update can leave what it changes as it is, too: commits hold all but one of
        no part's slots on NVMe. Its unit is in `Plan.speculating`.
        """
        return all([part.slot_beside() is not None for part in self._parts()])

    def _parts(self) -> Iterator[Part]:
        """The parts of the chunk on NVMe that have slots there."""
        for home, start, nbytes in self.changed_ranges():
            if home.nvme_lease is not None:
                yield from home.parts.over(start, start + nbytes)

    def _pairs(self) -> tuple[SlotPair | None, SlotPair | None]:
        """The pairs of slots in host RAM of the parameters, and of the states."""
        states = self._state_page.home.pair(self._state_offset) if self.state_bytes else None
        return self.page.home.pair(self.home_start), states

    def changed_ranges(self) -> Iterator[tuple[Home, int, int]]:
        """(home, start, bytes) of each range that an update changes."""
        yield self.page.home, self.home_start, self.parameter_bytes
        if self.state_bytes:
            yield self._state_page.home, self._state_offset, self.state_bytes

    @property
    def can_read_ahead(self) -> bool:
        """Whether the chunk has moments, which can be read, and no update of it is under way."""
        idle = self.state is UpdateState.IDLE and self.decision is None
        return idle and self._state_page.begun[self.chunk_index]

    @property
    def being_written(self) -> bool:
        """Whether an earlier write of the optimizer states is in flight, for which a read has to wait."""
        start = self._state_offset
        return self._state_page.home.busy(start, start + self.state_bytes, writing=False)

    @property
    def arrived(self) -> bool:
        """Whether all reads have ended, successfully or not."""
        return not self._reads or all([each.done() for each in self._reads])

    # --- transitions ------------------------------------------------------------------------------------

    def make_ready(self, decision: Decision, *, after: Event | None, speculative: bool = False) -> bool:
        """Fix what to compute: IDLE -> READY, or READING or AHEAD -> READING.

        decision: the update to compute. after: happens when no queued kernel uses the parameters any more
        that the model has now; None where the model does not use a copy. speculative: whether the update may
        be undone; see [Note: speculative updates]. If the states that were read ahead cannot be used any
        more, they are given up with their staging, and the update is READY. Returns True if it is READY, so
        that it still needs staging, and False if it is READING.
        """
        assert self.decision is None
        self.outcome, self._after = Outcome() if speculative else None, after
        present = self.present()
        if self.state is not UpdateState.IDLE and not self._still_right(present):
            self.cancel()
        self.decision = decision
        if not decision.averaged or any(each.parameter in decision.parameters for each in self.chunk.pieces):
            self._gradient_page.settle(self.chunk_index)
            self.taken = self._gradient_page.chunks[self.chunk_index]
        if self.state is UpdateState.IDLE:
            self._to(UpdateState.READY)
            return True
        self._gradient = self._taken_memory()
        self._read_parameter(self._room, present)
        if self.state is UpdateState.AHEAD:
            self._to(UpdateState.READING)
        return False

    def acquire(self, memory: torch.Tensor, present: Present | None) -> None:
        """Take staging, and begin the reads: READY -> READING.

        memory: staging, uint8 (needed(present),). present: the result of the method `present`. If
        StorageError is raised, the update stays READY.
        """
        try:
            rest = self._read_parameter(memory, present)
            self._gradient = self._taken_memory()
            if self._lacks_gradient:
                self._gradient, rest = rest[: self.gradient_bytes], rest[self.gradient_bytes :]
                assert self.decision is not None
                if self._reads_gradient(self.decision):
                    offset = self._gradient_page.offset(self.chunk_index)
                    self._reads.append(self._store.read(self._gradient_page.home, offset, self._gradient))
            if self._state_page.home.in_place:
                self._states = self._state_page.home.view(self._state_offset, self.state_bytes)
            else:
                self._read_states(rest[: self.state_bytes])
        except InfinityError:
            self._drop_reads()
            raise
        self._to(UpdateState.READING)

    def read_ahead(self, memory: torch.Tensor) -> None:
        """Begin to read the states before the update is decided: IDLE -> READING.

        memory: staging, uint8 (needed_ahead,). If StorageError is raised, the update stays IDLE.
        """
        self._version = self._state_page.version
        try:
            self._read_states(memory[: self.state_bytes])
        except InfinityError:
            self._drop_reads()
            raise
        self._room = memory[self.state_bytes :]
        self._to(UpdateState.READING)

    def arrive(self) -> None:
        """Note that all reads have ended or failed and the update is not decided: READING -> AHEAD."""
        assert self.decision is None
        self._to(UpdateState.AHEAD)

    def gather(self) -> None:
        """Wait for all reads of a READING update that is decided.

        Raises StorageError if a read failed; the caller then calls `put_back`.
        """
        Joined(self._reads).wait()
        self._reads.clear()

    def put_back(self) -> None:
        """Make the update READY again after a read failed: READING -> READY. Nothing was changed."""
        self.end()
        self._let_go()
        self._to(UpdateState.READY)

    def cancel(self) -> None:
        """Wait for the reads of an update that is not decided, and give its staging up: READING or AHEAD ->
        IDLE.
        """
        assert self.decision is None
        self.end()
        self._let_go()
        self._to(UpdateState.IDLE)

    def compute(self, *, awaited: bool, priority: int) -> cpu_adam.Tickets:
        """Submit the update to the update threads: READING -> COMPUTING.

        Call `gather` before. awaited: whether the caller is about to wait for the ticket and take part in the
        computation then. priority: updates with a larger number begin first. The update threads begin to copy
        the parameters to the device.
        """
        assert self.decision is not None
        ledger = self._store.ledger
        if ledger.pending is not None:
            ledger.settle_chunk((self.unit, self.chunk_index))
            # A write of the values before may still read the memory that the update changes.
            self.page.home.settle(self.home_start, self.home_start + self.parameter_bytes, writing=False)
        memory = (self._parameter, self._gradient, self._states)
        outputs = self._beside(memory) if self.outcome is not None else memory
        if self.page.home.in_place and outputs[0] is memory[0]:
            self.page.home.withdraw(self.home_start, self.home_start + self.parameter_bytes)
        self._parameter, _, self._states = outputs
        living = self.page.living() if self.has_copy else None
        checked = self._store.link.checked
        self._copies = self._store.link.around_jobs(
            [None],
            living,
            [(self.start, self._parameter)],
            self._after,
            uses=[used_by(self.decision, memory, outputs)] if checked else (),
        )
        self.ticket = self._submit(self.decision, memory, outputs, awaited, priority)
        self._to(UpdateState.COMPUTING)
        return self.ticket

    def _beside(self, memory: Memory) -> Memory:
        """Begin a speculative update of what is at home in host RAM, and return the memory for the results:
        other slots there, and the same memory for what goes to NVMe. Returns `memory` itself without such
        slots.
        """
        parameters, states = self._pairs()
        if parameters is None and states is None:
            return memory
        return (
            memory[0] if parameters is None else parameters.begin(),
            memory[1],
            memory[2] if states is None else states.begin(),
        )

    def write(self) -> None:
        """Begin to write the results home: COMPUTING -> WRITING. After a StorageError the update is LOST, or
        has failed if it is speculative (`Outcome.failed`), and nothing is raised.
        """
        store, page = self._store, self.page
        write = functools.partial(store.write, lost=self._lose, outcome=self.outcome)
        try:
            assert self._copies is not None
            self._copies.check()
            self.copy = self._copies.begun()
            if self.copy is not ARRIVED:
                store.meter.moved(Edge.HOST_TO_DEVICE, self._parameter.nbytes, self.copy)
            if not self._state_page.home.in_place and self._states.nbytes:
                write(self._state_page.home, self._state_offset, self._states)
            if not page.home.in_place:
                write(page.home, self.home_start, self._parameter)
        except InfinityError as error:
            if self.outcome is None:
                self._lose(error)
                raise
            self.outcome.failed = True
        store.ledger.updated((self.unit, self.chunk_index))
        self.ticket = self.decision = self.taken = self._copies = self._after = None
        self._let_go()
        self._to(UpdateState.WRITING)

    def confirm(self) -> bool:
        """Make the results of a speculative update, or those that it will have, the chunk's own: TENTATIVE ->
        IDLE, or no change of an update under way. Returns whether the update is IDLE.
        """
        if self.state is UpdateState.TENTATIVE:
            self._to(UpdateState.IDLE)
        if self.outcome is not None:
            self.outcome.confirmed, self.outcome = True, None
        for part in self._parts():
            part.confirm()
        if self.page.home.shown and self.ticket is not None:
            self.ticket.wait()  # the results are copied to where the model computes
        confirm([pair for pair in self._pairs() if pair is not None])
        return self.state is UpdateState.IDLE

    def undo(self) -> None:
        """Make a speculative update undone, after it has ended: any state -> IDLE.

        All bytes at home are those before the update. Bytes in the memory where the model computes, beside
        those at home there, are not.
        """
        self.end()
        for part in (*self._parts(), *self._pairs()):
            if part is not None:
                part.tentative = None
        self._drop()

    def finish(self) -> Transfer:
        """Be available for the next step, or for `confirm` or `undo`: WRITING -> IDLE or TENTATIVE.

        Returns the copy of the new parameters to the device, which may still be under way. The caller orders
        later computation after it.
        """
        copy, self.copy = self.copy, ARRIVED
        self._to(UpdateState.IDLE if self.outcome is None else UpdateState.TENTATIVE)
        return copy

    def abandon(self) -> None:
        """Wait until nothing uses the update's memory, then drop the update: any state -> IDLE.

        Waits for reads, computation and the copy to the device. Failures of reads are ignored.
        """
        self.end()
        self._drop()

    def _drop(self) -> None:
        self._let_go()
        self.ticket = self.decision = self.taken = self._copies = self._after = None
        self.copy, self.outcome = ARRIVED, None
        self.state = UpdateState.IDLE

    def end(self) -> None:
        """Wait until nothing uses the update's memory. Failures of reads are ignored."""
        with contextlib.suppress(InfinityError):
            Joined(self._reads).wait()
        if self.ticket is not None:
            self.ticket.wait()
            assert self._copies is not None
            try:
                self._copies.check()
                self.copy = self._copies.begun()
            except InfinityError as error:
                if self.outcome is None:
                    self._lose(error)
        self.copy.wait()

    # --- memory -----------------------------------------------------------------------------------------

    def _to(self, state: UpdateState) -> None:
        assert state in _NEXT[self.state], f"{self.state} -> {state}"
        self.state = state

    def _lose(self, error: InfinityError) -> None:
        self._health.lose(error)
        self.state = UpdateState.LOST

    def _still_right(self, present: Present | None) -> bool:
        """Return whether the update can use what it has read ahead: its states are still current, its
        gradient is in host RAM, and it needs no more staging.
        """
        if self._version != self._state_page.version or not self._gradient_page.is_in_ram(self.chunk_index):
            return False
        return bool(self._room.nbytes) or self.page.home.in_place or present is not None

    def _read_parameter(self, memory: torch.Tensor, present: Present | None) -> torch.Tensor:
        """Find the parameter slice in RAM, or begin to read it into the start of `memory`.

        Returns the part of `memory` that is still free.
        """
        home, start, nbytes = self.page.home, self.home_start, self.parameter_bytes
        if home.in_place:
            home.settle(start, start + nbytes, writing=True)
            self._parameter = home.view(start, nbytes)
        elif present is not None:
            self._parameter = present[0][self.start : self.start + nbytes]
            if present[1] is not ARRIVED:
                self._reads.append(present[1])
        else:
            self._parameter, memory = memory[:nbytes], memory[nbytes:]
            self._reads.append(self._store.read(home, start, self._parameter))
        return memory

    def _taken_memory(self) -> torch.Tensor:
        """The gradient that was taken, uint8, if it is in host RAM; else NOTHING."""
        if self.taken is None:
            return NOTHING
        found = self._gradient_page.memory(self.chunk_index, self.taken)
        return NOTHING if found is None else found

    def _read_states(self, memory: torch.Tensor) -> None:
        fresh = self.decision is not None and self.chunk_index in self.decision.fresh
        nbytes = self._state_page.master_bytes(self.chunk_index) if fresh else self.state_bytes
        assert memory.nbytes == self.state_bytes  # or the kernel would write behind it
        self._states = memory
        if nbytes:
            self._reads.append(self._store.read(self._state_page.home, self._state_offset, memory[:nbytes]))

    def _drop_reads(self) -> None:
        """End the reads that have begun, and give up the staging."""
        self.end()
        self._let_go()

    def _let_go(self) -> None:
        """Drop the references to the inputs' memory. `taken` stays, which refers to the gradient."""
        self._reads = []
        self._parameter = self._gradient = self._states = self._room = NOTHING

    # --- what the update threads compute ----------------------------------------------------------------

    def _submit(
        self, decision: Decision, memory: Memory, outputs: Memory, awaited: bool, priority: int
    ) -> cpu_adam.Tickets:
        """Submit the computation to the update threads, and return its ticket at once.

        memory: the bytes that it reads. outputs: the memory of the results, or `memory` itself. Both stay in
        use until the ticket is done.
        """
        self.prepare(decision, memory, outputs)
        if self._form is None:
            self._form = self.form(memory)
        assert self._copies is not None
        return self._threads.submit_updates(
            [self._form],
            [[each.data_ptr() for each in memory]],
            decision.chosen,
            decision.native,
            scale=decision.scale,
            average_step=decision.average,
            outputs=None if outputs is memory else [[each.data_ptr() for each in outputs]],
            owners=(memory, outputs),
            awaited=awaited,
            priority=priority,
            hooks=self._copies.hooks,
        )

    def prepare(self, decision: Decision, memory: Memory, outputs: Memory) -> None:
        """Give values to what the computation reads and nobody has written, and to those results that it does
        not write. memory, outputs: as for `used_by`.
        """
        if self.chunk_index in decision.fresh:
            self._states_of_all.fill(self._state_page, self.chunk_index, memory[2])
        if decision.edited:
            self._follow_edits(decision, memory)
        if decision.zeros:
            self._write_zeros(decision, memory)
        if outputs is not memory:
            self._copy_rest(decision, memory, outputs)

    def form(self, memory: Memory) -> cpu_adam.UpdateForm:
        """Describe the chunk's arrays, which lie in `memory`, to the update threads."""
        parameter, gradient, state = memory
        arrays = self._state_page.arrays(self.chunk_index, state)
        work = cpu_adam.Update(
            grad=self._gradient_page.typed(self.chunk_index, gradient),
            segments=(),
            hypers=(),
            scale=1.0,
            average_step=None,
            average=arrays.get(AVERAGE),
            **self._states_of_all.rule.moments_of(arrays),
            **self._masters(self._typed(parameter), arrays),
        )
        parts = [(each.offset, each.count, each.start, each.parameter) for each in self.chunk.pieces]
        return cpu_adam.form_of(work, memory, parts)

    def _copy_rest(self, decision: Decision, memory: Memory, outputs: Memory) -> None:
        """Copy the entries of parameters that the update does not change from `memory` to `outputs`."""
        for piece in self.chunk.pieces:
            if piece.parameter in decision.parameters:
                continue
            here, form = slice(piece.offset, piece.offset + piece.count), self._state_form
            self._typed(outputs[0])[here] = self._typed(memory[0])[here]
            for array in form.arrays:
                start, nbytes = form.place(array.name, piece.offset, piece.count)
                outputs[2][start : start + nbytes] = memory[2][start : start + nbytes]

    def _reads_gradient(self, decision: Decision) -> bool:
        """Whether the update reads the chunk's stored gradient, because not all gradients that it uses are
        zeros.
        """
        chosen, zeros = decision.parameters, decision.zeros
        return not zeros or any(
            each.parameter in chosen and each.parameter not in zeros for each in self.chunk.pieces
        )

    def _write_zeros(self, decision: Decision, memory: Memory) -> None:
        """Write the gradients of zeros, which are not stored, into `memory`, where the update reads them."""
        gradient = self._gradient_page.typed(self.chunk_index, memory[1])
        for piece in self.chunk.pieces:
            if piece.parameter in decision.zeros:
                gradient[piece.offset : piece.offset + piece.count] = 0

    def _follow_edits(self, decision: Decision, memory: Memory) -> None:
        """Set the fp32 masters in `memory` of parameters that user code has edited to the edited values."""
        parameter, arrays = memory[0], self._state_page.arrays(self.chunk_index, memory[2])
        for piece in self.chunk.pieces:
            if piece.parameter in decision.edited:
                place = slice(piece.offset, piece.offset + piece.count)
                if "remainder" in arrays:
                    arrays["remainder"][place] = 0
                elif "master" in arrays:
                    arrays["master"][place] = self._typed(parameter)[place]

    def _typed(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter[: self.chunk.count * self._dtype.itemsize].view(self._dtype)

    def _masters(self, parameter: torch.Tensor, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if "remainder" in arrays:
            return {"parameter": parameter, "remainder": arrays["remainder"]}
        if "master" in arrays:
            return {"parameter": arrays["master"], "copy": parameter}
        return {"parameter": parameter}


def used_by(decision: Decision, memory: Memory, outputs: Memory) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the memory that a computation uses, and whether it is written. memory: the bytes that it reads.
    outputs: the memory of the results, or `memory` itself.
    """
    yield memory[1], bool(decision.zeros)
    for here, there in zip(memory[::2], outputs[::2], strict=True):
        yield here, here is there
        yield there, True
