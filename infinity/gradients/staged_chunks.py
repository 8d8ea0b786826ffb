"""Staged chunks: the chunks of gradient pages that are in staging, and when they are written home.

A chunk is staged while its parameters' gradients arrive, and is written home when later ones need the room.
The last chunks of a backward stay, because they are updated first. A second micro-batch reads a chunk's sums
back into staging.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity.gradients.failure import GradientFailure
from infinity.pages.gradient_page import GradientPage, StagedGradient
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
        """ring: the ring through which gradients leave a device with its own memory; None without one."""
        self.more_to_come = False
        """Whether another micro-batch's gradients of the same parameters come next; complete chunks then stay
        staged until their room is needed."""
        self._pages = pages
        self._store = store
        self._failure = failure
        self._ring = ring
        self._chunks: dict[tuple[int, int], None] = {}
        """(unit, chunk) of every staged chunk, oldest first."""
        self._whole: dict[tuple[int, int], int] = {}
        """(unit, chunk) of every staged chunk that waits for no gradient, oldest first -> its bytes."""
        self._whole_bytes = 0
        self._most_kept = store.plan.staging_bytes // 2
        """Most bytes of chunks that wait for no gradient but stay staged; the other half is for new ones."""

    def missing(self, page: GradientPage, chunk_index: int) -> int:
        """Bytes of staging that `add` needs before a piece can be added to a chunk; 0 if it is in RAM."""
        if page.chunks[chunk_index].staged is not None or page.home.in_place:
            return 0
        return page.nbytes(chunk_index)

    def add(self, page: GradientPage, chunk_index: int, memory: torch.Tensor) -> None:
        """Stage a chunk, and read its content, if it has any. memory: staging, uint8 (missing,).

        Raises StorageError.
        """
        waiting = {piece.parameter for piece in page.layout.chunks[chunk_index].pieces}
        chunk = page.chunks[chunk_index]
        if chunk.stored:
            with self._store.meter.stalling(Edge.NVME_TO_HOST):
                self._store.read(page.home, page.offset(chunk_index), memory).wait()
        chunk.staged = StagedGradient(memory, waiting)
        self._chunks[page.index, chunk_index] = None

    def complete(self, page: GradientPage, chunk_index: int) -> None:
        """Note that a staged chunk waits for no gradient of this backward; the oldest such are written home.

        Raises StorageError.
        """
        staged = page.chunks[chunk_index].staged
        assert staged is not None
        if self.more_to_come:
            staged.waiting.update([each.parameter for each in page.layout.chunks[chunk_index].pieces])
            return
        if (page.index, chunk_index) in self._whole:
            return
        nbytes = page.nbytes(chunk_index)
        self._whole[page.index, chunk_index] = nbytes
        self._whole_bytes += nbytes
        for unit, oldest in [*self._whole]:
            if self._whole_bytes <= self._most_kept:
                return
            if self._pages[unit].arrived(oldest):  # else a later call writes it, so that none waits
                self._write_back(self._pages[unit], oldest)

    def finish(self) -> None:
        """Complete all staged chunks at the end of a backward, also those with unused parameters.

        Raises StorageError.
        """
        if self.more_to_come:
            return
        for unit, chunk_index in [*self._chunks]:
            staged = self._pages[unit].chunks[chunk_index].staged
            if staged is not None and (unit, chunk_index) not in self._whole:
                staged.waiting.clear()
                self.complete(self._pages[unit], chunk_index)

    def write_back_oldest(self, kept: tuple[int, int] | None) -> bool:
        """Write the oldest staged chunk home, but not (unit, chunk) `kept`; False if there is none.

        Raises StorageError.
        """
        for unit, chunk_index in self._chunks:
            if (unit, chunk_index) != kept:
                self._write_back(self._pages[unit], chunk_index)
                return True
        return False

    def write_back_now(self, unit: int, chunk_index: int, data: torch.Tensor) -> None:
        """Write a chunk's gradient home for an update that keeps it staged, and wait.

        data: the gradient, uint8; the update may have the only copy. Raises StorageError; then nothing has
        changed.
        """
        page = self._pages[unit]
        self._store.write_now(page.home, page.offset(chunk_index), data, spare=True)
        if (unit, chunk_index) in self._chunks:
            self.drop(page, chunk_index)
            page.chunks[chunk_index].stored = True

    def drop(self, page: GradientPage, chunk_index: int) -> None:
        """Remove a chunk from staging, without writing it."""
        page.chunks[chunk_index].staged = None
        del self._chunks[page.index, chunk_index]
        self._whole_bytes -= self._whole.pop((page.index, chunk_index), 0)

    def clear(self) -> None:
        """Forget every staged chunk."""
        self._chunks.clear()
        self._whole.clear()
        self._whole_bytes = 0

    def _write_back(self, page: GradientPage, chunk_index: int) -> None:
        chunk = page.chunks[chunk_index]
        if self._ring is not None:
            self._ring.wait(chunk.sent)  # `Gradients.check` raises its failure
        staged = chunk.staged
        assert staged is not None
        self.drop(page, chunk_index)
        try:
            self._store.write(page.home, page.offset(chunk_index), staged.data)
        except BaseException as error:
            self._failure.lose(error)
            raise
        chunk.stored = True
