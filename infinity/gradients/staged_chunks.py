"""Staged chunks: which chunks of gradient pages are in staging, and when they go home.

A chunk is staged while its parameters' gradients arrive, and goes home when later ones need the room: the
last of a backward stay, for their updates come first. A second micro-batch stages a chunk again with what it
holds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity.gradients.failure import GradientFailure
from infinity.pages.gradient_page import GradientPage, Stage
from infinity.pages.gradient_ring import GradientRing
from infinity.pages.store import Store
from infinity.telemetry.stats import Edge


class StagedChunks:
    """The chunks of all gradient pages that are staged. Called under the runtime's lock."""

    def __init__(
        self,
        pages: Mapping[int, GradientPage],
        store: Store,
        failure: GradientFailure,
        *,
        ring: GradientRing | None,
    ) -> None:
        """ring: through which gradients come down, where they do."""
        self.more_to_come = False
        """Whether another micro-batch's gradients of the same parameters come next: a chunk that is complete
        then stays staged as long as nobody needs the room."""
        self._pages = pages
        self._store = store
        self._failure = failure
        self._ring = ring
        self._chunks: dict[tuple[int, int], None] = {}
        """(unit, chunk) of every stage, oldest first."""
        self._whole: dict[tuple[int, int], int] = {}
        """(unit, chunk) of every stage that waits for nothing, oldest first -> its bytes."""
        self._whole_bytes = 0
        self._most_kept = store.plan.staging_bytes // 2
        """Bytes of stages that wait for nothing and stay all the same; the rest keeps things moving."""

    def missing(self, page: GradientPage, number: int) -> int:
        """Bytes that `add` has to be given before a piece can be added to a chunk; 0: it is in RAM."""
        if page.states[number].stage is not None or page.home.in_place:
            return 0
        return page.nbytes(number)

    def add(self, page: GradientPage, number: int, memory: torch.Tensor) -> None:
        """Stage a chunk, with what it holds, in staging, uint8 (missing,). Raises StorageError."""
        waiting = {piece.parameter for piece in page.layout.chunks[number].pieces}
        state = page.states[number]
        if state.stored:
            with self._store.meter.stalling(Edge.NVME_TO_HOST):
                self._store.read(page.home, page.offset(number), memory).wait()
        state.stage = Stage(memory, waiting)
        self._chunks[page.index, number] = None

    def complete(self, page: GradientPage, number: int) -> None:
        """A stage waits for no gradient of this backward. Such stages go home, but for the latest.

        Raises StorageError.
        """
        stage = page.states[number].stage
        assert stage is not None
        if self.more_to_come:
            stage.waiting.update([each.parameter for each in page.layout.chunks[number].pieces])
            return
        if (page.index, number) in self._whole:
            return
        nbytes = page.nbytes(number)
        self._whole[page.index, number] = nbytes
        self._whole_bytes += nbytes
        for unit, oldest in [*self._whole]:
            if self._whole_bytes <= self._most_kept:
                return
            if self._pages[unit].arrived(oldest):  # else it goes when a later one comes: nobody waits here
                self._write_back(self._pages[unit], oldest)

    def finish(self) -> None:
        """The end of a backward: stages of which a parameter was not used wait for it no longer.

        Raises StorageError.
        """
        if self.more_to_come:
            return
        for unit, number in [*self._chunks]:
            stage = self._pages[unit].states[number].stage
            if stage is not None and (unit, number) not in self._whole:
                stage.waiting.clear()
                self.complete(self._pages[unit], number)

    def write_back_oldest(self, kept: tuple[int, int] | None) -> bool:
        """Take the oldest stage home, but not (unit, chunk) `kept`; False if there is none.

        Raises StorageError.
        """
        for unit, number in self._chunks:
            if (unit, number) != kept:
                self._write_back(self._pages[unit], number)
                return True
        return False

    def write_back_now(self, unit: int, number: int, data: torch.Tensor) -> None:
        """Write a chunk's gradient home for an update that keeps it staged, and wait.

        data: uint8, as the update has it; perhaps nobody else has it any more. Raises StorageError; then
        nothing has happened.
        """
        page = self._pages[unit]
        self._store.write(page.home, page.offset(number), data).wait()
        if (unit, number) in self._chunks:
            self.drop(page, number)
            page.states[number].stored = True

    def drop(self, page: GradientPage, number: int) -> None:
        """A chunk is staged no longer."""
        page.states[number].stage = None
        del self._chunks[page.index, number]
        self._whole_bytes -= self._whole.pop((page.index, number), 0)

    def clear(self) -> None:
        """No chunk of any page is staged any more."""
        self._chunks.clear()
        self._whole.clear()
        self._whole_bytes = 0

    def _write_back(self, page: GradientPage, number: int) -> None:
        state = page.states[number]
        if self._ring is not None:
            self._ring.wait(state.sent)  # what failed is said by `Gradients.check`
        stage = state.stage
        assert stage is not None
        self.drop(page, number)
        try:
            self._store.write(page.home, page.offset(number), stage.data)
        except BaseException as error:
            self._failure.lose(error)
            raise
        state.stored = True
