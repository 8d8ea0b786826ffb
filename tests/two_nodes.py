"""Two nodes on one machine: network namespaces with a link between them, which ranks enter."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

NAMESPACE = "TWO_NODES_NAMESPACE"
"""Environment variable: the namespace that a rank enters before it does anything else."""
_CLONE_NEWNET = 0x40000000


def missing() -> str:
    """Why this machine cannot have two nodes; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    try:
        with two_nodes():
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"


@contextlib.contextmanager
def two_nodes() -> Iterator[list[Mapping[str, str]]]:
    """Make two nodes with a link. Yields, for each, the environment of a rank that runs there."""
    key = f"{os.getpid() % 10**6}{os.urandom(1).hex()}"
    names, links = [f"infinity-{key}-{each}" for each in "ab"], [f"i{key}{each}" for each in "ab"]
    with contextlib.ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        one, two = ("link", "add", links[0], "netns", names[0]), ("peer", "name", links[1], "netns", names[1])
        _run("ip", *one, "type", "veth", *two)
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            _run("ip", "-n", name, "address", "add", f"10.99.0.{number}/24", "dev", link)
            for each in (link, "lo"):
                _run("ip", "-n", name, "link", "set", each, "up")
        yield [
            {
                NAMESPACE: name,
                "GROUP_RANK": str(number),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.99.0.1",
                "GLOO_SOCKET_IFNAME": link,
            }
            for number, (name, link) in enumerate(zip(names, links, strict=True))
        ]


def enter() -> None:
    """Enter the namespace that the environment names, if it names one. See setns(2)."""
    name = os.environ.get(NAMESPACE)
    if not name:
        return
    descriptor = os.open(Path("/run/netns") / name, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    finally:
        os.close(descriptor)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
