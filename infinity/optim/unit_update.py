"""Unit update: the update of one unit, and how one runs whose pages are all at home in host RAM.

Such an update needs no staging, so nothing is read or written, and the chunks of a unit need no state each:
`UpdateInRam` submits them to the update threads together. Where a device computes the model, these wait for
the gradients and begin to copy the parameters up, whether or not the trainer calls in. The updates of other
units run chunk by chunk (infinity/optim/chunk_update.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity import cpu_adam
from infinity.errors import InfinityError
from infinity.optim.chunk_update import ChunkUpdate, Memory, used_by
from infinity.optim.decision import Decision
from infinity.pages.gradient_page import GradientPage
from infinity.pages.health import Health
from infinity.pages.home import Outcome
from infinity.pages.slot_pair import SlotPair, confirm
from infinity.pages.store import Store
from infinity.telemetry.stats import Edge
from infinity.tiers.driver import Event
from infinity.tiers.link import ARRIVED, JobCopies, Transfer


@dataclass(slots=True)
class _Places:
    """Where the arrays of a chunk lie."""

    form: cpu_adam.UpdateForm
    pairs: Sequence[SlotPair]
    """The slots of the parameters and of the states, in this order; empty if the unit has no second slots."""
    parameters: Sequence[torch.Tensor]
    """By slot, uint8. Without second slots there is one entry."""
    gradient: torch.Tensor
    states: Sequence[torch.Tensor]
    """By slot, uint8."""
    parameter_at: Sequence[int]
    """The addresses of `parameters`; those of the others follow."""
    gradient_at: int
    states_at: Sequence[int]


_Slots = tuple[int, int]
"""The slot of a chunk's parameters, and that of its states; 0 without second slots."""


class UpdateInRam:
    """The update of a unit whose parameters, gradients and states are at home in host RAM.

        IDLE -- decide --> DUE -- submit --> BEGUN -- take_back --> IDLE
                                                          |
                                                          +--> tentative -- confirm, undo --> IDLE

    [Note: speculative updates] in infinity/optim/chunk_update.py says what is tentative. `confirm` may come
    while it is BEGUN, and `undo` at any time.
    """

    def __init__(
        self,
        chunks: Sequence[ChunkUpdate],
        parameters: frozenset[int],
        gradients: GradientPage,
        *,
        threads: cpu_adam.ThreadPool,
        store: Store,
        health: Health,
    ) -> None:
        """chunks: those of the unit, which are not updated by themselves. parameters: as in UnitUpdate. The
        other arguments are as for ChunkUpdate.
        """
        self.page = chunks[0].page
        self.outcome: Outcome | None = None
        """The outcome of a speculative update, while it is not confirmed."""
        self.due: Sequence[ChunkUpdate] = ()
        """The chunks of a decided update that are not submitted yet."""
        self._decision: Decision | None = None
        self._chosen: Sequence[ChunkUpdate] = ()
        """All chunks of the update that was decided last."""
        self._after: Event | None = None
        """As in ChunkUpdate."""
        self._jobs: list[tuple[cpu_adam.Tickets, JobCopies, int]] = []
        """What was submitted together, the copies around it, and the bytes of those to the device."""
        self._parameters = parameters
        self._gradients = gradients
        self._threads = threads
        self._store = store
        self._health = health
        self._places: dict[int, _Places] = {}
        """Index of a chunk -> its places, made by the first update."""

    @property
    def begun(self) -> bool:
        """Whether all chunks are submitted, and not taken back."""
        return bool(self._jobs) and not self.due

    @property
    def running(self) -> bool:
        """Whether a chunk that was submitted is not computed yet."""
        return not all([tickets.done() for tickets, _, _ in self._jobs])

    def decide(
        self, decision: Decision, chosen: Sequence[ChunkUpdate], *, after: Event | None, speculative: bool
    ) -> None:
        """Fix what to compute: IDLE -> DUE. chosen: the chunks to update. after, speculative: as for
        `ChunkUpdate.make_ready`.
        """
        assert self._decision is None
        self._decision, self._after, self.due, self._chosen = decision, after, chosen, chosen
        self.outcome = Outcome() if speculative else None
        for each in chosen:
            each.decision = decision

    def submit(self, count: int | None, *, awaited: bool, priority: int) -> cpu_adam.Tickets:
        """Submit `count` of the chunks that are due, or all, to the update threads: DUE -> BEGUN once all
        are. awaited, priority, and the errors: as for `ChunkUpdate.compute`. After an error nothing was
        submitted.
        """
        decision, chosen, link = self._decision, self.due[:count], self._store.link
        assert decision is not None
        downs = self._gradients.arriving([each.chunk_index for each in chosen])
        self._await_users(decision, chosen)
        places, slots, results = self._places_of(chosen)
        memory, outputs = _memory(places, slots), _memory(places, results)
        beside = self.outcome is not None
        if decision.incomplete or (beside and not decision.parameters.keys() >= self._parameters):
            for update, here, there in zip(chosen, memory, outputs, strict=True):
                update.prepare(decision, here, there if beside else here)
        copies = link.around_jobs(
            downs,
            self.page.living() if chosen[0].has_copy else None,
            [(update.start, there[0]) for update, there in zip(chosen, outputs, strict=True)],
            self._after,
            uses=[used_by(decision, *both) for both in zip(memory, outputs, strict=True)]
            if link.checked
            else (),
        )
        tickets = self._threads.submit_updates(
            [each.form for each in places],
            _addresses(places, slots),
            decision.chosen,
            decision.native,
            scale=decision.scale,
            average_step=decision.average,
            outputs=_addresses(places, results) if beside else None,
            owners=places,
            awaited=awaited,
            priority=priority,
            hooks=copies.hooks,
        )
        self._jobs.append((tickets, copies, sum([each.parameter_bytes for each in chosen])))
        self.due = self.due[len(chosen) :]
        return tickets

    def wait(self) -> None:
        """Wait until all chunks that were submitted are computed."""
        for tickets, _, _ in self._jobs:
            tickets.wait()

    def take_back(self) -> list[Transfer]:
        """Wait until the update is computed, and let the model use its results: BEGUN -> IDLE, or tentative.

        Returns the copies of new parameters to the device, which may still be under way. The caller orders
        later computation after them. Raises the error by which results are lost; if the update is
        speculative, it has failed then (`Outcome.failed`), and nothing is raised.
        """
        self.wait()
        store, found = self._store, []
        try:
            for _, copies, nbytes in self._jobs:
                copies.check()
                copy = copies.begun()
                if copy is not ARRIVED:
                    store.meter.moved(Edge.HOST_TO_DEVICE, nbytes, copy)
                    found.append(copy)
        except InfinityError as error:
            if self.outcome is None:
                self._health.lose(error)
                raise
            self.outcome.failed = True
            self._await_copies()
        if store.ledger.pending is not None:
            for each in self._chosen:
                store.ledger.updated((each.unit, each.chunk_index))
        self._end_decision()
        return found

    def confirm(self) -> bool:
        """Make the results of a speculative update, or those that it will have, the unit's own. Returns
        whether they have been taken back.
        """
        assert self.outcome is not None
        self.outcome.confirmed, self.outcome = True, None
        if self.page.home.shown:
            self.wait()  # the results are copied to where the model computes
        confirm([pair for each in self._places.values() for pair in each.pairs])
        return self._decision is None

    def undo(self) -> None:
        """Make a speculative update undone, after it has ended: any state -> IDLE. What is not undone is said
        in `ChunkUpdate.undo`.
        """
        self._end()
        for each in self._places.values():
            for pair in each.pairs:
                pair.tentative = None

    def abandon(self) -> None:
        """Wait until nothing uses the update's memory, then drop the update: any state -> IDLE."""
        self._end()
        self._places = {}  # the homes may move

    def _end(self) -> None:
        self.wait()
        try:
            for _, copies, _ in self._jobs:
                copies.check()
        except InfinityError as error:
            if self.outcome is None:
                self._health.lose(error)
        try:
            self._await_copies()
        finally:
            self._end_decision()
            self.outcome = None

    def _await_copies(self) -> None:
        for _, copies, _ in self._jobs:
            copies.begun().wait()

    def _end_decision(self) -> None:
        for each in self._chosen:
            each.decision = None
        self._decision = self._after = None
        self._jobs, self._chosen, self.due = [], (), ()

    def _await_users(self, decision: Decision, chosen: Sequence[ChunkUpdate]) -> None:
        """Wait for those who use the memory that the update changes, or have them look elsewhere."""
        home, ledger = self.page.home, self._store.ledger
        if self.outcome is None:  # else the results go to other slots
            home.withdraw(chosen[0].home_start, chosen[-1].home_start + chosen[-1].parameter_bytes)
        if decision.zeros:
            for each in chosen:
                self._gradients.settle(each.chunk_index)
        if ledger.pending is not None:
            for each in chosen:
                ledger.settle_chunk((each.unit, each.chunk_index))
                # A write of the values before may still read the memory that the update changes.
                home.settle(each.home_start, each.home_start + each.parameter_bytes, writing=False)

    def _places_of(
        self, chosen: Sequence[ChunkUpdate]
    ) -> tuple[list[_Places], Sequence[_Slots], Sequence[_Slots]]:
        """Return the places of chunks, the slots to read, and those for the results."""
        for each in chosen:
            if each.chunk_index not in self._places:
                self._places[each.chunk_index] = self._find_places(each)
        places = [self._places[each.chunk_index] for each in chosen]
        if not places[0].pairs:
            assert self.outcome is None
            slots = [(0, 0)] * len(places)
            return places, slots, slots
        slots = [(each.pairs[0].newest, each.pairs[-1].newest) for each in places]
        if self.outcome is None:
            return places, slots, slots
        for place in places:
            for pair in place.pairs:
                pair.tentative = 1 - pair.newest
        return places, slots, [(1 - one, 1 - other) for one, other in slots]

    def _find_places(self, update: ChunkUpdate) -> _Places:
        offset = self._gradients.offset(update.chunk_index)
        gradient = self._gradients.home.view(offset, update.gradient_bytes)
        ranges = [*update.changed_ranges()]
        pairs = [pair for home, start, _ in ranges if (pair := home.pair(start)) is not None]
        assert len(pairs) in (0, len(ranges))
        found = [[home.view(start, nbytes)] for home, start, nbytes in ranges]
        if pairs:
            found = [[pair.place(0), pair.place(1)] for pair in pairs]
        if len(found) == 1:  # the chunk has no states
            found.append([gradient[:0]] * len(found[0]))
        parameters, states = found
        return _Places(
            update.form((parameters[0], gradient, states[0])),
            pairs,
            parameters,
            gradient,
            states,
            [each.data_ptr() for each in parameters],
            gradient.data_ptr(),
            [each.data_ptr() for each in states],
        )


def _memory(places: Sequence[_Places], slots: Sequence[_Slots]) -> list[Memory]:
    return [
        (each.parameters[one], each.gradient, each.states[other])
        for each, (one, other) in zip(places, slots, strict=True)
    ]


def _addresses(places: Sequence[_Places], slots: Sequence[_Slots]) -> list[tuple[int, int, int]]:
    return [
        (each.parameter_at[one], each.gradient_at, each.states_at[other])
        for each, (one, other) in zip(places, slots, strict=True)
    ]


@dataclass(slots=True)
class UnitUpdate:
    """The update of one unit, and how far it has come."""

    chunks: Sequence[ChunkUpdate]
    in_ram: UpdateInRam | None
    """What runs the update if the parameters, gradients and states of all chunks are at home in host RAM;
    None: the chunks run by themselves.
    """
    parameters: frozenset[int]
    """Indices, within the unit, of the parameters that have elements in at least one of the chunks."""
    left: int = 0
    """Number of updates (of `updates`, and of chunks that visit the device) that are decided and whose
    results the model cannot use yet.
    """
    tentative: Decision | None = None
    """What the unit's speculative update computes, while `step()` has not confirmed it; else None."""
    unread: bool = False
    """Whether a read for one of the updates failed. It is repeated when a caller waits for the unit."""

    @property
    def updates(self) -> Sequence[ChunkUpdate | UpdateInRam]:
        """What runs by itself."""
        return self.chunks if self.in_ram is None else (self.in_ram,)

    def changed_by(self, decision: Decision) -> Sequence[ChunkUpdate]:
        """Return the chunks to update: those with elements of an updated or averaged parameter.

        decision: says which of the unit's parameters are updated, and how.
        """
        parameters = decision.parameters.keys() | decision.averaged
        if parameters >= self.parameters:
            return self.chunks
        return [
            each
            for each in self.chunks
            if any([piece.parameter in parameters for piece in each.chunk.pieces])
        ]
