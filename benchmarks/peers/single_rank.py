"""Single rank: a torch.distributed world of one process, for programs in a benchmark that need one."""

from __future__ import annotations

import os
import socket


def set_environment() -> None:
    """Set the variables that torchrun sets for a single process. deepspeed reads some when it is imported."""
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port())
    )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
