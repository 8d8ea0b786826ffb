"""Staging: how chains and staged gradients get room in the pool of staging, and in which order they lose
it.

[Note: room]
Staging is granted here and nowhere else: to chains, and to gradients that are staged for chains. A request
that finds no room first waits for work that ends by itself: writes and copies under way, then chains that
compute. Only then is something undone: chains whose gate is closed lose their staging (`Chain.revoke`),
then gradients are written home. A chain with a closed gate never gets the last bytes that a chain with an
open gate might need. So every request is granted in the end.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence

import torch

from infinity.errors import InfinityError
from infinity.gradients.staged_chunks import StagedChunks
from infinity.optim.chain import NOTHING, Chain, Present
from infinity.optim.update_queue import UpdateQueue
from infinity.pages.store import Store

_SPARED = 4
"""Reading ahead leaves one part in _SPARED of staging free, for gradients whose states are not read ahead.
When it left half of staging free, a step took 3.7 s instead of 2.9 s, because the disk waited for room
(309M parameters, all on NVMe).
"""


class Staging:
    """Grants bytes of the store's pool of staging. Called under the runtime's lock."""

    def __init__(self, store: Store, staged: StagedChunks, queue: UpdateQueue) -> None:
        self._store = store
        self._pool = store.staging
        self._staged = staged
        self._queue = queue

    def take(self, nbytes: int) -> torch.Tensor:
        """Staging, uint8 (nbytes,), for a gradient; see [Note: room].

        Raises StorageError if a read or write that this call waits for fails, and BudgetError if user code
        holds the missing bytes.
        """
        while (memory := self._try_take(nbytes)) is None:
            if not self._make_room():
                return self._take_or_raise(nbytes)
        return memory

    def try_grant(self, chain: Chain) -> bool:
        """Begin a DUE chain if staging has room for it. Returns whether the chain has begun."""
        if chain.rests:
            self._queue.compute(chain)
            self._queue.begun(chain)
            return True
        present = chain.present()
        memory = self._try_take(chain.needed(present))
        if memory is None:
            return False
        self._grant(chain, memory, present)
        return True

    def grant(self, chain: Chain) -> None:
        """Begin a DUE chain as soon as staging has room for it. Raises the errors of `take`."""
        while not self.try_grant(chain):
            if self._make_room(chain):
                continue
            if chain.holds_gradient:  # which may lie so that no free range is large enough
                self._put_gradient_home(chain)
                continue
            present = chain.present()
            self._grant(chain, self._take_or_raise(chain.needed(present)), present)
            return

    def read_ahead(self, candidates: Iterator[Sequence[Chain]]) -> None:
        """Read states of chains whose gate is closed, as far as there is room; see [Note: room].

        candidates: the result of `ReadAhead.candidates`: groups of chains, in the order in which to read.
        """
        spared = max(self._pool.nbytes // _SPARED, self._store.plan.chain_bytes)
        for chains in candidates:
            sizes = [chain.needed_ahead for chain in chains]
            if self._pool.nbytes - self._pool.leased - sum(sizes) < spared:
                return
            if any(each.being_written for each in chains):
                return
            for chain, nbytes in zip(chains, sizes, strict=True):
                memory = self._try_take(nbytes)
                if memory is None:
                    return
                with contextlib.suppress(InfinityError):  # with an open gate the read is repeated, and raises
                    self._queue.read_ahead(chain, memory)

    def _grant(self, chain: Chain, memory: torch.Tensor, present: Present | None) -> None:
        chain.grant(memory, present)
        self._queue.begun(chain)

    def _try_take(self, nbytes: int) -> torch.Tensor | None:
        if not nbytes:
            return NOTHING
        if self._pool.largest_free < nbytes:
            self._store.poll()
            if self._pool.largest_free < nbytes:
                return None
        with self._pool.lease(nbytes) as lease:
            return lease.residency()

    def _take_or_raise(self, nbytes: int) -> torch.Tensor:
        gc.collect()  # tracebacks leave views in reference cycles
        with self._pool.lease(nbytes) as lease:
            return lease.residency()

    def _make_room(self, asking: Chain | None = None) -> bool:
        """Wait for one transfer or chain to end, or else take the staging of one chain or one gradient.

        asking: the DUE chain that needs the room, and whose own gradient stays staged; None: a gradient
        needs the room. Returns False if nothing is left to wait for or to take. Raises StorageError.
        """
        queue = self._queue
        if self._store.finish_oldest_write():
            return True
        if queue.copies:
            queue.copies.popleft()[1].wait()
            return True
        running = next((each for each in queue.active if not each.is_ahead), None)
        if running is not None:
            queue.end_quietly(running)
            return True
        if queue.active:
            queue.revoke(queue.active[-1])
            return True
        every = (chain for chains in queue.due.values() for chain in chains)
        holding = next((each for each in every if each.holds_gradient and each is not asking), None)
        if holding is not None:
            self._put_gradient_home(holding)
            return True
        kept = None if asking is None else (asking.unit, asking.chunk_index)
        return self._staged.write_back_oldest(kept)

    def _put_gradient_home(self, chain: Chain) -> None:
        """Write the staged gradient of a DUE chain home.

        The gradient is read again when the chain is granted staging for it.
        """
        self._staged.write_back_now(chain.unit, chain.chunk_index, chain.gradient)
        chain.forget_gradient()
