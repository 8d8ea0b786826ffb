"""Programs of ranks that speak over a wire; see tests/distributed/test_wire.py."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import rank_processes
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from infinity.distributed import streams
from infinity.distributed.mesh import Ranks
from infinity.distributed.message import MessageKind
from infinity.distributed.streams import Streams
from infinity.distributed.wire import Wire
from infinity.errors import InfinityError, RankDivergence

PULLS = 40
"""Pulls that each thread makes."""


def content(source: int, seed: int, size: int) -> torch.Tensor:
    """The bytes that a rank serves for a seed."""
    made = torch.Generator().manual_seed(1000 * source + seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=made)


def serve_requests(rank: int, line: Wire, ends: int) -> None:
    """Body of a service thread: serve until as many peers have ended or need no more."""
    while ends:
        source, message = line.inbox.get()
        if message.kind is MessageKind.REQUEST:
            number, seed, sizes = message.fields[:3]
            line.deliver(source, number, list(content(rank, seed, sum(sizes)).split(sizes)), "states")
        ends -= message.kind in (MessageKind.BYE, MessageKind.CLEARED)


def pull(line: Wire, peer: int, seed: int, sizes: list[int], padding: str = "") -> bool:
    """Whether a pull brings the right bytes."""
    memory = torch.zeros(sum(sizes), dtype=torch.uint8)
    delivery = line.expect(peer, memory.split(sizes), "states")
    line.post(peer, MessageKind.REQUEST, delivery.number, seed, sizes, padding)
    delivery.wait()
    return delivery.done() and torch.equal(memory, content(peer, seed, sum(sizes)))


def pulls() -> dict[str, Any]:
    """Two threads a rank pull pieces of random sizes from random peers."""
    us = Ranks.of(None)
    line = Wire(us)
    service = threading.Thread(target=serve_requests, args=(us.rank, line, len(us.peers)))
    service.start()
    right: list[bool] = []
    asked = dict.fromkeys(map(str, us.peers), 0)
    lock = threading.Lock()

    def worker(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(PULLS):
            peer = chance.choice(us.peers)
            sizes = [chance.choice([0, 1, 255, 4096, 100_001, 1 << 20]) for _ in range(chance.randint(1, 4))]
            good = pull(line, peer, chance.randrange(1000), sizes, "x" * chance.choice([0, 200, 5000]))
            with lock:
                right.append(good)
                asked[str(peer)] += sum(sizes)

    threads = [threading.Thread(target=worker, args=(10 * us.rank + each,)) for each in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for peer in us.peers:
        line.post(peer, MessageKind.CLEARED)
    service.join()
    ended = line.close()
    traffic = line.traffic()
    us.close()
    return {
        "right": right,
        "asked": asked,
        "sent": dict(traffic.sent),
        "received": dict(traffic.received),
        "messages": [traffic.messages_sent, traffic.messages_received],
        "ended": ended,
        "failure": str(line.failure),
    }


def sockets() -> int:
    """The sockets that this rank has opened when all ranks have pulled from all others."""
    dist.init_process_group("gloo")
    before = _sockets()
    us = Ranks.of(None)
    line = Wire(us)
    service = threading.Thread(target=serve_requests, args=(us.rank, line, len(us.peers)))
    service.start()
    assert all(pull(line, peer, 1, [5]) for peer in us.peers)
    line.post(us.peers, MessageKind.CLEARED)
    service.join()
    found = _sockets() - before
    line.close()
    us.close()
    return found


def _sockets() -> int:
    links = [os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.islink(each.path)]
    return sum(each.startswith("socket:") for each in links)


def refusals() -> list[Any]:
    """A refused delivery, one of other sizes, and one that a peer leaves without serving."""
    us = Ranks.of(None)
    line = Wire(us)
    peer = us.peers[0]
    if us.rank == 1:
        errors = iter([InfinityError("It is gone.", "Look."), RankDivergence("It is older.", "Mend.")])
        for error in errors:
            line.refuse(peer, line.inbox.get()[1].fields[0], error)
        line.deliver(peer, line.inbox.get()[1].fields[0], [torch.ones(3, dtype=torch.uint8)]).wait()
        line.inbox.get()
        line.close()
        us.close()
        return []
    found = []
    for _ in range(4):
        delivery = line.expect(peer, [torch.zeros(8, dtype=torch.uint8)])
        line.post(peer, MessageKind.REQUEST, delivery.number)
        try:
            delivery.wait()
        except InfinityError as error:
            found.append([type(error).__name__, error.cause])
    late = line.expect(peer, [torch.zeros(8, dtype=torch.uint8)])
    found.append([late.done(), line.failure is None])
    line.close()
    us.close()
    return found


def killed() -> list[Any]:
    """Rank 1 is killed amid a payload; the wire of rank 0 loses it, and rank 0 ends by itself."""
    us = Ranks.of(None)
    line = Wire(us)
    if us.rank == 1:
        streams.UNREAD = streams.PORTION
        Streams.has_read = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        number = line.inbox.get()[1].fields[0]
        line.deliver(0, number, [torch.ones(1 << 20, dtype=torch.uint8)] * 2, "states").wait()
    first, second = torch.zeros(2, 1 << 20, dtype=torch.uint8)
    delivery, other = line.expect(1, [first, second]), line.expect(1, [first])
    line.post(1, MessageKind.REQUEST, delivery.number)
    found = [failure_of(delivery.wait), failure_of(other.wait)]
    found.append(failure_of(line.deliver(1, 1, [first]).wait))
    found.append(failure_of(line.expect(1, [first]).wait))
    assert line.failure is not None
    source, message = line.inbox.get()
    closed = line.close()
    us.close(orderly=False)
    return [*found, line.failure.cause, source, message.kind.name, closed]


def failure_of(wait: Callable[[], object]) -> str:
    """The class of the typed error that `wait` raises."""
    try:
        wait()
    except InfinityError as error:
        return type(error).__name__
    return ""


def in_turn() -> list[Any]:
    """Runtimes one after the other; in each another rank closes first, without waiting for its peer."""
    found: list[Any] = []
    for first in (0, 1, 0):
        us = Ranks.of(None)
        line = Wire(us)
        service = threading.Thread(target=serve_requests, args=(us.rank, line, 1))
        service.start()
        found.append(pull(line, us.peers[0], 1, [5]))
        if us.rank == first:
            line.failure_event.wait_for(lambda line=line: line.traffic().sent["states"] == 5)
            found.append(line.close(patience=0.0))
        service.join()
        found.append(line.close())
        us.close()
    return found


def late_rank() -> list[Any]:
    """What is said of a rank that does not come, and who meets afterwards."""
    dist.init_process_group("gloo")
    found: list[Any] = []
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        try:
            Ranks.of(None, timeout=0.05)
        except RankDivergence as error:
            found.append(error.cause)
        store.set("rank 0 has given up", "")
    store.wait(["rank 0 has given up"])
    part = init_device_mesh("cpu", (2,))
    us = Ranks.of(part)
    found.append([us.size, us.peers])
    us.close()
    dist.destroy_process_group()
    return found


def part_of_the_ranks() -> list[Any]:
    """Ranks 0 and 2 of three have a mesh, and two runtimes one after the other; rank 1 does not take part."""
    dist.init_process_group("gloo")
    mesh = DeviceMesh("cpu", [0, 2])
    found: list[Any] = []
    for _ in range(2 * (dist.get_rank() != 1)):
        us = Ranks.of(mesh)
        line = Wire(us)
        service = threading.Thread(target=serve_requests, args=(us.rank, line, 1))
        service.start()
        found.append([us.rank, us.size, pull(line, us.peers[0], 3, [100, 7])])
        line.post(us.peers[0], MessageKind.CLEARED)
        service.join()
        found.append(line.close())
        us.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


def host_gone_before() -> list[str]:
    """Rank 0, which keeps the store, is killed before rank 1 comes to meet it."""
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["the default group is there"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("the default group is there", "")
    try:
        store.wait(["never"])
    except RuntimeError:
        return meeting()
    return []


def host_gone_meanwhile() -> list[str]:
    """Rank 0, which keeps the store, is killed while rank 1 waits for it."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        return meeting()
    dist.distributed_c10d._get_default_store().wait(["infinity/0/all/0/here/1"])
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def meeting() -> list[str]:
    """The class and the cause of the error of a rank that meets the others."""
    try:
        Ranks.of(None)
    except InfinityError as error:
        return [type(error).__name__, error.cause]
    return []


if __name__ == "__main__":
    rank_processes.serve(globals())
