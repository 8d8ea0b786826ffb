"""World: the ranks of torch.distributed, of which a contender is one, and its memory when it has met them."""

from __future__ import annotations

import os
import socket

import torch

from peers import rss
from peers.task import Task


def set_environment(task: Task) -> None:
    """Set the variables that torchrun sets for a single process. deepspeed reads some when it is imported.

    With several ranks nothing changes, for `peers.group.Group` has set the variables.
    """
    if task.ranks == 1:
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
        )


def joined() -> int:
    """Restart the peak of this process's RSS; returns the RSS now, in bytes.

    Called when all libraries are imported and the process group is there, but no model. What the RSS grows
    from here on is the contender's doing: what torch imports when it makes its first optimizer is there, too.
    """
    torch.optim.SGD([torch.zeros(1)])
    rss.restart_peak()
    return rss.read("VmRSS")


def free_port() -> int:
    """A TCP port of this machine that nothing uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
