"""Liveness: heartbeats in the ranks' store, and the first failure that a rank declares there.

[Note: silence is counted] A rank counts the silence of others in rounds of its own heartbeat, not in seconds.
So a process that was stopped and continues does not take the others for dead.
"""

from __future__ import annotations

import atexit
import json
import threading

from infinity.distributed.failure_event import FailureEvent
from infinity.distributed.mesh import Ranks, store_lost
from infinity.errors import InfinityError, RankFailure, rank_failure

_FAILURE = "failure"


class Liveness:
    """Two threads: one sends heartbeats and looks at the other ranks', one watches whether the store answers.

    A failure that they find ends all waits (`FailureEvent.fail`). A rank whose process lives but runs no
    Python, as when native code keeps the GIL for longer than `patience`, is taken for dead.
    """

    def __init__(
        self, ranks: Ranks, failure_event: FailureEvent, *, interval: float = 2.0, patience: float = 15.0
    ) -> None:
        """interval: seconds between heartbeats. patience: seconds of silence that count as a rank's death."""
        self._ranks = ranks
        self._failure_event = failure_event
        self._interval = interval
        self._patience = patience
        self._watched = dict.fromkeys(ranks.peers, 0)
        """Rank -> its number of heartbeats when this rank last looked. Ranks that have left are removed."""
        self._silent = dict.fromkeys(ranks.peers, 0)
        """Rank -> this rank's rounds since that number last changed."""
        self._rounds = 0
        self._published = False
        self._closing = self._leaving = False
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"infinity {name}", daemon=True)
            for target, name in ((self._beat, "heartbeat"), (self._watch, "watch"))
        ]
        for each in self._threads:
            each.start()
        # A thread that comes out of torch's C++ while Python ends aborts the process.
        atexit.register(self._stop)

    @property
    def failure(self) -> InfinityError | None:
        """The failure that ended the run, or None."""
        return self._failure_event.failure

    def declare(self, error: InfinityError) -> None:
        """Tell the other ranks that this one has failed: they soon raise RankFailure with this error."""
        self._failure_event.fail(error)
        self._wake.set()

    def departed(self, rank: int) -> None:
        """Stop watching a rank that has left on purpose. Called for BYE."""
        self._watched.pop(rank, None)

    def close(self) -> bool:
        """Tell the others that this rank leaves, and end the threads. Waits at most 2 s for the store.

        Returns whether all threads have ended. If not, close the store's connection and call this again.
        """
        self._leaving = True
        self._stop()
        atexit.unregister(self._stop)
        return not self._threads[0].is_alive()

    def _stop(self) -> None:
        self._closing = True
        self._wake.set()
        self._threads[0].join(2.0)
        self._ended.set()
        self._threads[1].join()

    # --- the heartbeat ------------------------------------------------------------------------------------

    def _beat(self) -> None:
        try:
            while not self._closing:
                self._round()
                self._rounds += 1
                self._wake.wait(self._interval)
                self._wake.clear()
            self._publish()
            if self._leaving:
                self._ranks.store.set(f"left/{self._ranks.rank}", "1")
        except RuntimeError:
            self._store_lost("is gone")
        finally:
            self._ended.set()

    def _round(self) -> None:
        store = self._ranks.store
        store.add(f"beat/{self._ranks.rank}", 1)
        self._publish()
        if not self._published and store.check([_FAILURE]):
            self._published = True
            rank, what = json.loads(store.get(_FAILURE))
            self._failure_event.fail(rank_failure(rank, what))
        for rank, last in tuple(self._watched.items()):
            beat = store.add(f"beat/{rank}", 0)
            self._silent[rank] = 0 if beat != last else self._silent[rank] + 1
            if rank in self._watched:
                self._watched[rank] = beat
            if self._silent[rank] * self._interval >= self._patience:
                self._miss(rank)

    def _miss(self, rank: int) -> None:
        if self._watched.pop(rank, None) is None or self._ranks.store.check([f"left/{rank}"]):
            return
        why = "it is dead, stopped, cut off, or its GIL is held"
        what = f"has given no sign of life for {self._patience:g} s: {why}"
        self._failure_event.fail(rank_failure(rank, what))
        self._publish()

    def _publish(self) -> None:
        """Write the failure that this rank knows of to the store, unless another failure is there."""
        error = self._failure_event.failure
        if error is None or self._published:
            return
        self._published = True
        rank, what = self._ranks.rank, f"failed: {type(error).__name__}: {error}"
        if isinstance(error, RankFailure) and error.rank is not None:
            rank, what = error.rank, error.cause.removeprefix(f"Rank {error.rank} ")
        self._ranks.store.compare_set(_FAILURE, "", json.dumps([rank, what.rstrip(".")]))

    # --- the store ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Fail all waits if no round of heartbeats has ended for `patience` seconds. This needs its own
        thread: calls to a store whose host is stopped do not return, so the thread of the heartbeats cannot
        notice.
        """
        seen, silent = -1, 0
        while not self._ended.wait(self._interval):
            silent = 0 if self._rounds != seen else silent + 1
            seen = self._rounds
            if silent * self._interval >= self._patience:
                self._store_lost(f"has not answered for {self._patience:g} s")
                return

    def _store_lost(self, what: str) -> None:
        error = store_lost(self._ranks.everywhere, what)
        host = error.rank
        if self._closing or (host is not None and host != self._ranks.rank and host not in self._watched):
            return
        self._failure_event.fail(error)
