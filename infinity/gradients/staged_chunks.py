"""Staged chunks: the chunks of gradient pages that are in staging, and when they are written home.

Staging is a pool of buffers in host RAM. A chunk of a gradient page is staged while its parameters'
gradients arrive. It is written to the page's home when chunks that come later need its room. The last chunks
of a backward stay in staging, because they are updated first. If another micro-batch follows, a chunk that
was written home is read back into staging, so that the new gradients can be added to those it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from infinity.pages.gradient_page import GradientChunk, GradientPage
from infinity.pages.gradient_ring import GradientRing
from infinity.pages.store import Store
from infinity.telemetry.stats import Edge


class StagedChunks:
    """The staged chunks of all gradient pages. The caller of every method holds the runtime's lock."""

    def __init__(
        self,
        pages: Mapping[int, GradientPage],
        store: Store,
        lose: Callable[[Exception], None],
        *,
        ring: GradientRing | None,
    ) -> None:
        """pages: index of a unit -> the unit's gradient page. store: reads and writes the pages' homes.

        lose: records an error by which gradients are lost. ring: the gradient ring, through which
        gradients leave a device with its own memory; None if the device has no memory of its own.
        """
        self.more_to_come = False
        """Whether another micro-batch will bring gradients of the same parameters next. If so, a chunk that
        has all gradients of one micro-batch stays staged until its room is needed.
        """
        self._pages = pages
        self._store = store
        self._lose = lose
        self._ring = ring
        self._chunks: dict[tuple[int, int], None] = {}
        """(unit, chunk) of every staged chunk. The chunk that has been staged for the longest time comes
        first.

        An ordered set: the dictionary's values are None.
        """
        self._whole: dict[tuple[int, int], int] = {}
        """(unit, chunk) of every staged chunk that waits for no gradient -> the chunk's bytes. The chunk
        that has waited for no gradient for the longest time comes first.
        """
        self._whole_bytes = 0
        self._most_kept = store.plan.staging_bytes // 2
        """The most bytes of chunks that wait for no gradient but stay staged. The other half of staging is
        for chunks whose gradients are still to come.
        """

    def missing(self, page: GradientPage, chunk_index: int) -> int:
        """Bytes of staging that `add` needs for a chunk before gradients can be added to the chunk.

        0 if the chunk is staged already, or if its page's home is in host RAM, where gradients are added in
        place.
        """
        if page.chunks[chunk_index].staged is not None or page.home.in_place:
            return 0
        return page.nbytes(chunk_index)

    def add(self, page: GradientPage, chunk_index: int, memory: torch.Tensor) -> None:
        """Stage a chunk in `memory`, for the gradients that will arrive.

        If the chunk was written home in this step, it is read back first, and the call waits for the read.
        memory: the uint8 tensor in staging, of `missing` bytes. Raises StorageError if the read fails.
        """
        chunk = page.chunks[chunk_index]
        if chunk.stored:
            with self._store.meter.stalling(Edge.NVME_TO_HOST):
                self._store.read(page.home, page.offset(chunk_index), memory).wait()
        chunk.staged = memory
        chunk.waiting = {piece.parameter for piece in page.layout.chunks[chunk_index].pieces}
        self._chunks[page.index, chunk_index] = None

    def complete(self, page: GradientPage, chunk_index: int) -> None:
        """Note that a staged chunk has all its gradients of this backward.

        With `more_to_come`, the chunk now waits for those of the next micro-batch. Otherwise it waits for no
        further gradient. If such chunks take more than half of staging, those that have waited for no
        gradient the longest are written home, without waiting for the writes. Raises StorageError as
        `write_back_oldest` does.
        """
        if self.more_to_come:
            pieces = page.layout.chunks[chunk_index].pieces
            page.chunks[chunk_index].waiting.update([each.parameter for each in pieces])
            return
        if (page.index, chunk_index) in self._whole:
            return
        nbytes = page.nbytes(chunk_index)
        self._whole[page.index, chunk_index] = nbytes
        self._whole_bytes += nbytes
        for unit, oldest in [*self._whole]:
            if self._whole_bytes <= self._most_kept:
                return
            if self._pages[unit].arrived(oldest):  # else a later call writes it, so that no caller waits
                self._write_back(self._pages[unit], oldest)

    def finish(self) -> None:
        """Note the end of a backward: no staged chunk waits for a gradient any more.

        Without this call, chunks with a parameter that the backward did not use would wait for its
        gradient. With `more_to_come`, nothing changes. Chunks may be written home, and StorageError may be
        raised, as in `complete`.
        """
        if self.more_to_come:
            return
        for unit, chunk_index in [*self._chunks]:
            chunk = self._pages[unit].chunks[chunk_index]
            if chunk.staged is not None and (unit, chunk_index) not in self._whole:
                chunk.waiting.clear()
                self.complete(self._pages[unit], chunk_index)

    def write_back_oldest(self, kept: tuple[int, int] | None) -> bool:
        """Begin to write home the chunk that has been staged for the longest time, and unstage it.

        Returns False if there is no chunk to write. kept: (unit, chunk) of a chunk that must stay staged,
        or None. Raises StorageError if the write cannot be requested; the step's gradients are then lost.
        """
        for unit, chunk_index in self._chunks:
            if (unit, chunk_index) != kept:
                self._write_back(self._pages[unit], chunk_index)
                return True
        return False

    def write_back_now(self, unit: int, chunk_index: int, chunk: GradientChunk) -> None:
        """Write a chunk's gradient to the page's home, and wait until it is written.

        chunk: as an update has taken it, and staged. Afterwards it is no longer staged, and the update can
        read the gradient from the home. If the write fails, StorageError is raised and nothing has changed.
        """
        page = self._pages[unit]
        assert chunk.staged is not None
        self._store.write_now(page.home, page.offset(chunk_index), chunk.staged, spare=True)
        if page.chunks[chunk_index] is chunk:
            self.drop(page, chunk_index)
            page.chunks[chunk_index].stored = True
        chunk.staged = None

    def drop(self, page: GradientPage, chunk_index: int) -> None:
        """Remove a chunk from staging without writing it home. An update that has taken it keeps it."""
        page.chunks[chunk_index] = replace(page.chunks[chunk_index], staged=None)
        del self._chunks[page.index, chunk_index]
        self._whole_bytes -= self._whole.pop((page.index, chunk_index), 0)

    def clear(self) -> None:
        """Forget all staged chunks, without writing them home."""
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
            self._store.write(page.home, page.offset(chunk_index), staged)
        except Exception as error:
            self._lose(error)
            raise
        page.chunks[chunk_index].stored = True
