"""Programs of ranks that agree, or fail to; see tests/distributed/test_agreements.py."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import rank_processes
import torch
import torch.distributed as dist

from infinity.distributed.barrier import Barrier
from infinity.distributed.communicator import Communicator
from infinity.distributed.failure_event import FailureEvent
from infinity.distributed.liveness import Liveness
from infinity.distributed.mesh import Ranks
from infinity.distributed.message import MessageKind
from infinity.distributed.wire import Wire
from infinity.errors import BudgetError, ConfigError, InfinityError
from infinity.system.lock import RuntimeLock

QUICK = {"interval": 0.05, "patience": 0.5}
"""Options of a liveness that notices silence soon."""
PATIENT = {"interval": 0.05, "patience": 60.0}


class Member:
    """A rank with a wire, a barrier, a lock, a service thread and a liveness."""

    def __init__(self, timeout: float, **liveness: float) -> None:
        self.ranks = Ranks.of(None)
        self.failure_event = FailureEvent(timeout)
        self.lock = RuntimeLock()
        self.liveness = Liveness(self.ranks.rank, self.ranks.nodes, **liveness)
        self.wire = Wire(self.ranks, self.failure_event, released=self.lock.released, liveness=self.liveness)
        self.barrier = Barrier(self.ranks, self.wire)
        self.store = dist.distributed_c10d._get_default_store()
        self.service_thread = threading.Thread(target=self._serve, daemon=True)
        self.service_thread.start()

    def _serve(self) -> None:
        left = len(self.ranks.peers)
        while left:
            _, message = self.wire.inbox.get()
            with self.lock.turn():
                pass
            left -= message.kind in (MessageKind.BYE, MessageKind.FAILED)

    def cast(self, call: str, number: int, facts: Any = None, **options: Any) -> Any:
        """What an agreement returns, as a list, or its error as [name, cause]. number: counts agreements."""
        with self.lock:
            found = self.told(lambda: self.barrier.agree(call, facts, **options))
        return list(found.values()) if isinstance(found, dict) else found

    def told(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except InfinityError as error:
            return [type(error).__name__, error.cause]

    def close(self) -> None:
        failed = self.failure_event.failure is not None
        with contextlib.suppress(ConfigError):  # the wire may be closed
            self.barrier.leave()
        self.wire.close()
        self.ranks.close(orderly=not failed)


def agreements() -> list[Any]:
    """Many agreements, then calls that differ."""
    us = Member(60.0, **PATIENT)
    found = [us.cast("step()", number, [us.ranks.rank, "x" * 300 * (number == 7)]) for number in range(20)]
    good = [
        each == [[rank, "x" * 300 * (number == 7)] for rank in range(3)] for number, each in enumerate(found)
    ]
    differ = us.cast(("step()", "clip_grad_norm_()", "step()")[us.ranks.rank], 20)
    with us.lock:  # the lock is back, and the service thread still gets it
        pass
    us.close()
    return [good, differ]


def absence() -> list[Any]:
    """Rank 1 does not come to an agreement in time, then leaves."""
    us = Member(60.0, **PATIENT)
    first = us.cast("save()", 0)
    if us.ranks.rank == 1:
        us.store.wait(["rank 0 has waited"])
        us.close()
        return [first]
    us.failure_event.timeout = 0.3
    late = us.cast("step()", 1)
    us.store.set("rank 0 has waited", "")
    us.service_thread.join()  # until rank 1 has left
    again = us.cast("step()", 2)
    left = us.cast("close()", 2, anyway=True)
    healthy = us.failure_event.failure is None
    us.close()
    return [first, late, again, left, healthy]


def stopped() -> list[Any]:
    """The last rank is stopped by SIGSTOP while the others wait for it in an agreement."""
    us = Member(60.0, **QUICK)
    us.cast("offload()", 0)
    if us.ranks.rank == us.ranks.size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    found = us.cast("step()", 1)
    us.close()
    return found


def host_stopped() -> list[Any]:
    """Rank 0, which keeps the store, is stopped by SIGSTOP."""
    us = Member(60.0, **QUICK)
    us.cast("offload()", 0)
    if us.ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    found = us.cast("step()", 1)
    us.close()
    return found


def crosswise() -> list[Any]:
    """The ranks close two runtimes in different orders, and wait for each other at the first."""
    both = [Communicator(None, 3, torch.device("cpu")) for _ in range(2)]
    for each in both[:: 1 - 2 * both[0].ranks.rank]:
        each.leave()
        each.close()
    return ["closed"]


def host_killed() -> list[Any]:
    """Rank 0, which keeps the store, is killed."""
    us = Member(60.0, **PATIENT)
    us.cast("offload()", 0)
    if us.ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    found = us.cast("step()", 1)
    us.close()
    return found


def declared() -> list[Any]:
    """Rank 1 declares an error of its own; all others learn its cause."""
    us = Member(60.0, **PATIENT)
    us.cast("offload()", 0)
    if us.ranks.rank == 1:
        us.wire.declare("failed: BudgetError: It does not fit. Give more")
        us.failure_event.fail(BudgetError("It does not fit.", "Give more.", needed=1))
        found = us.told(lambda: us.barrier.agree("step()"))
    else:
        found = us.cast("step()", 1)
    # The first cause stays, so the others' own later failures do not replace it.
    if us.ranks.rank == 0:
        us.failure_event.fail(BudgetError("Later.", "No."))
        found.append(us.failure_event.failure.cause)
    us.store.add("told", 1)
    while us.store.add("told", 0) < us.ranks.size:
        time.sleep(0.01)
    us.close()
    return found


def leaving() -> bool:
    """A rank that leaves is not taken for dead, although it beats no more for long."""
    us = Member(60.0, interval=0.05, patience=2.0 if int(os.environ["RANK"]) == 0 else 60.0)
    us.cast("offload()", 0)
    if us.ranks.rank == 1:
        us.wire.close(patience=0.0)
        us.store.wait(["rank 0 has seen enough"])
    else:
        us.service_thread.join()  # until rank 1 has left
        begun = us.liveness.rounds
        while us.liveness.rounds < begun + 45 and us.failure_event.failure is None:
            time.sleep(0.01)
        us.store.set("rank 0 has seen enough", "")
    us.close()
    return us.failure_event.failure is None


if __name__ == "__main__":
    rank_processes.serve(globals())
