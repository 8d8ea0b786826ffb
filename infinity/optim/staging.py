"""Staging: the grants of bytes from the pool `staging`, and the order in which grants are taken back.

[Note: room]
Staging is the host RAM in which chunks are updated if their pages rest elsewhere. It has two kinds of
users: chains, each of which is the update of one chunk (infinity/optim/chain.py), and gradients that wait
in RAM for their chain. Bytes are granted to both here and nowhere else. A request that finds no room first
waits for work that ends by itself: writes and copies under way, then chains that compute. Only then is
something undone. First, chains that have read their states ahead lose their staging (`Chain.revoke`): their
gate is closed, which means that their update is not decided yet. Then gradients are written home. A chain
with a closed gate never gets the last bytes that a chain with an open gate might need. So every request is
granted in the end.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence

import torch

from infinity.errors import InfinityError
from infinity.gradients.staged_chunks import StagedChunks
from infinity.optim.chain import NOTHING, Chain, Present
from infinity.optim.chain_state import ChainState
from infinity.optim.update_queue import UpdateQueue
from infinity.pages.store import Store

_SPARED = 4
"""Reading states ahead (before their update is decided) leaves at least 1 / _SPARED of staging free. This
room is for gradients whose states are not read ahead. When half of staging was left free, a step took 3.7 s
instead of 2.9 s, because the disk waited for room (309M parameters, all on NVMe).
"""


class Staging:
    """Grants bytes of the pool `Store.staging` to chains (updates of chunks) and to gradients. Called under
    the runtime's lock.
    """

    def __init__(self, store: Store, staged: StagedChunks, queue: UpdateQueue) -> None:
        self._store = store
        self._pool = store.staging
        self._staged = staged
        self._queue = queue

    def take(self, nbytes: int) -> torch.Tensor:
        """Lease `nbytes` bytes of staging for a gradient, and return them as a uint8 tensor.

        Waits until staging has room, and takes staging from others if it must; see [Note: room]. Raises
        StorageError if a read or write that this call waits for fails. Raises BudgetError if there is no
        room although nothing is left to wait for, because user code still holds tensors over staging.
        """
        while (memory := self._try_take(nbytes)) is None:
            if not self._make_room():
                return self._take_or_raise(nbytes)
        return memory

    def try_grant(self, chain: Chain) -> bool:
        """Lease staging for a DUE chain and begin its reads if there is room now. Returns whether it has
        begun.

        A DUE chain is the decided update of one chunk, which waits for staging. If all its memory is at
        home in host RAM, it needs no staging and begins to compute at once.
        """
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
        """Lease staging for a DUE chain and begin its reads, as soon as staging has room for all of them.

        Waits until then; see [Note: room]. Raises the errors of `take`.
        """
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
        """Begin to read the states of chains whose update is not decided yet, as long as staging has room
        to spare.

        candidates: the result of `ReadAhead.candidates`: groups of chains, in the order in which to read.
        Reading ahead ends at the first group for which staging has too little room. See [Note: room].
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
        try:
            chain.grant(memory, present)
            self._queue.begun(chain)
        except BaseException as error:
            if chain.state is not ChainState.DUE:
                chain.interrupted(error)
            raise

    def _try_take(self, nbytes: int) -> torch.Tensor | None:
        if not nbytes:
            return NOTHING
        if self._pool.largest_free < nbytes:
            self._store.poll(depart=False)  # what leaves for a commit is not to take the room
            if self._pool.largest_free < nbytes:
                return None
        with self._pool.lease(nbytes) as lease:
            return lease.residency()

    def _take_or_raise(self, nbytes: int) -> torch.Tensor:
        gc.collect()  # tracebacks leave views in reference cycles
        with self._pool.lease(nbytes) as lease:
            return lease.residency()

    def _make_room(self, asking: Chain | None = None) -> bool:
        """Make some room in staging: wait for one transfer or one chain to end, or, if there is none, take
        the staging of one chain or one gradient.

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
        """Write a DUE chain's gradient from staging to the gradient page's home, so that its staging is
        free again.

        The gradient is read back when the chain is granted staging for all its inputs.
        """
        self._staged.write_back_now(chain.unit, chain.chunk_index, chain.gradient)
        chain.forget_gradient()
