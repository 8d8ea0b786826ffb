"""Two nodes on one machine, those of benchmarks/peers/nodes.py, which ranks of tests enter."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from peers import nodes

NAMESPACE = "TWO_NODES_NAMESPACE"
"""Environment variable: the namespace that a rank enters before it does anything else."""
_CLONE_NEWNET = 0x40000000


@functools.cache
def missing(rate: str = "") -> str:
    """Why this machine cannot have two nodes; empty if it can. rate: as for `nodes.two_nodes`."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or (rate and shutil.which("tc") is None):
        return "iproute2 is not installed"
    try:
        with nodes.two_nodes(rate):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"


@contextlib.contextmanager
def two_nodes() -> Iterator[list[Mapping[str, str]]]:
    """Make two nodes with a link. Yields, for each, the environment of a rank that runs there."""
    with nodes.two_nodes() as found:
        yield [{**each.environment, NAMESPACE: each.namespace} for each in found]


def set_link(up: bool, environment: Mapping[str, str] = os.environ) -> None:
    """Take a node's end of the link up or down. environment: that of a rank of the node."""
    name, link = environment[NAMESPACE], environment[nodes.INTERFACE]
    command = ("ip", "-n", name, "link", "set", link, "up" if up else "down")
    subprocess.run(command, check=True)


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
