"""Launcher: the environment variables of torchrun or another launcher of ranks, and the file in which
torchrun looks for the error of a rank.

A variable that should be a number and is not raises ConfigError. An empty variable counts as absent.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import NamedTuple

from infinity.errors import ConfigError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def world_size() -> int:
    return _number("WORLD_SIZE", 1, least=1)


def rank() -> int:
    return _number("RANK", 0)


class RankLocation(NamedTuple):
    node: int
    rank: int
    """Index of this process among the ranks of its node."""
    ranks: int
    """Number of ranks on the node."""


def local_rank() -> int:
    """This process's index among the ranks of its node; 0 if the launcher does not say."""
    return _number("LOCAL_RANK", 0)


def location() -> RankLocation | None:
    """Where this process runs; None if the launcher does not say how many ranks its node has."""
    found = RankLocation(_number("GROUP_RANK", 0), local_rank(), _number("LOCAL_WORLD_SIZE", 1, least=1))
    return found if os.environ.get("LOCAL_WORLD_SIZE") else None


def keeps_store() -> bool:
    """Whether the launcher, and not rank 0, keeps the ranks' store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def start_number() -> int:
    """Return how often the launcher has restarted the ranks with the same store; 0 if rank 0 keeps the store.

    The store still has the entries of earlier starts. Raises ConfigError if the launcher may restart ranks on
    several nodes, because each node counts its starts separately.
    """
    if not keeps_store():
        return 0
    if _number("GROUP_WORLD_SIZE", 1, least=1) > 1 and _number("TORCHELASTIC_MAX_RESTARTS", 0):
        raise ConfigError(
            "torchrun may start the ranks again (--max-restarts), with the store of the start before.",
            "Use --rdzv-backend c10d and set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or --max-restarts 0.",
        )
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def _number(variable: str, absent: int, *, least: int = 0) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return absent
    try:
        found = int(text)
    except ValueError:
        found = least - 1
    if found < least:
        raise ConfigError(
            f"The environment variable {variable} is {text!r}, which is not a whole number from {least} on.",
            "Start the program with torchrun, which sets it, or give it such a number.",
        )
    return found


def record(error: BaseException) -> None:
    """Write an error to the file in which torchrun looks for it, so that torchrun reports the cause. Does
    nothing without torchrun, or if the file has an error already. Call it where the error is handled.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with contextlib.suppress(OSError):
        if not os.path.exists(path) or os.path.getsize(path) == 0:
            get_error_handler().record_exception(error)


def record_at_exit() -> None:
    """Register an `atexit` function that records the error that ended this process, if nothing caught it.

    It runs before the `atexit` functions registered so far. One of those may wait for other ranks, and
    torchrun ends all ranks once one rank has ended. Does nothing without torchrun.
    """
    if not os.environ.get(ERROR_FILE):
        return
    # Imported now, because Python refuses to import some of it while it exits.
    import torch.distributed.elastic.multiprocessing.errors  # noqa: F401

    atexit.unregister(_record_uncaught)
    atexit.register(_record_uncaught)


def _record_uncaught() -> None:
    error = getattr(sys, "last_value", None)
    if not isinstance(error, Exception):  # Ctrl-C is no cause that torchrun would have to name
        return
    try:
        raise error  # what writes the file takes the traceback of the error that is being handled
    except Exception:
        record(error)
