"""Nodes: network namespaces of this machine with a link between them, for ranks to run in.

They need root and iproute2. A rate is kept by a token bucket on each side (tc-tbf(8)). An interface counts
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
    """One node: where a program is started, and what a rank has to be told."""

    namespace: str
    """The name of the network namespace; empty where the program runs in that of this process."""
    environment: dict[str, str]

    @property
    def command(self) -> tuple[str, ...]:
        """Words that come before a program and its arguments."""
        return ("ip", "netns", "exec", self.namespace) if self.namespace else ()


@contextlib.contextmanager
def two_nodes(rate: str = "", *, on_each: int = 1) -> Iterator[list[Node]]:
    """Make two nodes. rate: of the link between them, as tc writes it, such as "1gbit"; empty for no limit.

    on_each: number of ranks on each node. Yields the node of each rank, with the rank's environment. Raises
    CalledProcessError where the kernel or the user's rights do not allow it.
    """
    key = f"{os.getpid() % 10**6}{os.urandom(1).hex()}"  # an interface's name has 15 characters at most
    names, links = [f"infinity-{key}-{each}" for each in "ab"], [f"i{key}{each}" for each in "ab"]
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
            if rate:
                bucket = ("rate", rate, "burst", "256kb", "latency", "50ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *bucket)
        yield [
            Node(
                name,
                {
                    "GROUP_RANK": str(number),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(on_each),
                    "MASTER_ADDR": "10.99.0.1",
                    INTERFACE: link,
                },
            )
            for number, (name, link) in enumerate(zip(names, links, strict=True))
            for rank in range(on_each)
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
