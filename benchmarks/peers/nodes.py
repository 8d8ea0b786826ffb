"""Nodes: network namespaces of this machine with a link of a given rate between them, for ranks to run in.

It needs root and iproute2. The rate is kept by a token bucket on each side (tc-tbf(8)). An interface counts
all bytes that pass it, with headers and acknowledgements.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable that gloo, and this module, take an interface from."""


@dataclass(frozen=True)
class Node:
    """One node: how a program is started there, and what a rank has to be told."""

    command: tuple[str, ...]
    """Words that come before a program and its arguments."""
    environment: dict[str, str]


@contextlib.contextmanager
def two_nodes(rate: str) -> Iterator[list[Node]]:
    """Make two nodes. rate: of the link between them, as tc writes it, such as "1gbit".

    Raises CalledProcessError where the kernel or the user's rights do not allow it.
    """
    names = [f"infinity-{os.getpid()}-{each}" for each in "ab"]
    links = [f"i{os.getpid()}{each}" for each in "ab"]
    with contextlib.ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        ends = ("netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        _run("ip", "link", "add", links[0], *ends)
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            _run("ip", "-n", name, "address", "add", f"10.99.0.{number}/24", "dev", link)
            for each in (link, "lo"):
                _run("ip", "-n", name, "link", "set", each, "up")
            bucket = ("rate", rate, "burst", "256kb", "latency", "50ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *bucket)
        yield [
            Node(
                ("ip", "netns", "exec", name),
                {
                    "GROUP_RANK": str(number),
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": "10.99.0.1",
                    INTERFACE: link,
                },
            )
            for number, (name, link) in enumerate(zip(names, links, strict=True))
        ]


def sent() -> int:
    """Bytes that the interface of this process's node has sent so far; 0 for a process without a node."""
    link = os.environ.get(INTERFACE, "")
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.strip().partition(":")
        if link and name == link:
            return int(counters.split()[8])
    return 0


def bytes_per_second(rate: str) -> float:
    """The rate of a link in bytes per second. Raises ValueError for what is no rate."""
    for unit, bits in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * bits / 8
    raise ValueError(f"{rate!r} is no rate such as 1gbit or 100mbit")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
