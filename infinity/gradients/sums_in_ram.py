"""Sums in RAM: the host memory in which gradients of tied tiles wait for further contributions."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from infinity.pages.store import Store
from infinity.tiers.link import ARRIVED, Transfer, User


class SumsInRam:
    """Implements the protocol infinity.gradients.tile_sums.Away for one runtime.

    A copy from the device reads memory of torch's allocator. That memory is let go, once compute was told to
    wait for the copy, when the next sum is put or got. Only copies down, which run in order, and copies up
    use the RAM. Compute waits for each of the latter, and the next copy down for compute.
    """

    def __init__(self, store: Store, nbytes: int, lock: AbstractContextManager[Any]) -> None:
        """nbytes: of RAM, for one micro-batch. With others beside it, sums may stay. lock: the runtime's."""
        self._store = store
        self._pool = store.host.pool("sums of tiles", nbytes)
        self._lock = lock
        self._newest: Transfer = ARRIVED
        """The newest copy down. Compute waits for all others."""

    def put(self, gradient: torch.Tensor) -> torch.Tensor | None:
        source = gradient.contiguous().view(-1).view(torch.uint8)
        with self._lock:
            self._store.link.let_go(self._newest)
            if self._pool.largest_free < source.nbytes:
                return None
            with self._pool.lease(source.nbytes) as lease:
                memory = lease.residency()
            self._store.link.uses(User.COMPUTE, source, writes=False, label="a tile's gradient")
            self._newest = self._store.copy_down(memory, source)
            return memory

    def get(self, there: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._store.link.let_go(self._newest)  # compute waits for all copies down, and the copy up for it
            found = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            after = self._store.link.record()
            transfer = self._store.copy_up(found.view(-1).view(torch.uint8), there, after=after)
            self._store.link.fence(transfer)
            return found
