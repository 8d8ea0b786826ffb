"""Ranks: which ranks train one model together, where they are, and the store in which they meet.

[Note: calls that nothing ends] Torch's store waits for each answer without a time-out. Even its `wait` with a
time-out ends by a request to forget the wait, and waits for the answer to that. If the network is lost, TCP
reports it only after a quarter of an hour, and torch cannot end such a wait. So these calls are made in a
thread that nobody has to wait for.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from infinity.distributed.connections import Endpoint
from infinity.distributed.failure_event import TIMEOUT_VARIABLE, rank_timeout
from infinity.distributed.mailbox import Mailbox
from infinity.distributed.secret import FILE_VARIABLE, VARIABLE, Secret
from infinity.distributed.windows import Windows, open_windows
from infinity.errors import ConfigError, RankDivergence, RankFailure, named_ranks
from infinity.system import launcher, machine

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what a call of torch returns, or raise its error; see [Note: calls that nothing ends].

    If it does not end in time, raises TimeoutError. Its thread then goes on alone.
    """
    outcome: Future[T] = Future()
    threading.Thread(target=_settle, args=(outcome, call), name="infinity meeting", daemon=True).start()
    try:
        wait([outcome], min(seconds, threading.TIMEOUT_MAX))
    finally:  # Ctrl-C ends the wait, too
        _leaving.alone = _leaving.alone or not outcome.done()  # it may have the lock of torch's store
    if not outcome.done():
        raise TimeoutError(f"no end within {seconds:g} s")
    return outcome.result()


def _settle(outcome: Future[T], call: Callable[[], T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)
        del outcome  # the error's traceback has this frame


_LAST_SECONDS = 10.0
"""Seconds for which the process that keeps the store waits at its end for the others to end."""
_ANSWER = 5.0
"""Seconds in which the store must answer `first_to_tell`."""
_SIOCGIFADDR = 0x8915
_LATE = 3.0
"""Seconds by which a call of torch may exceed the time-out that it was given."""

_met: Counter[tuple[int, ...]] = Counter()
"""Global ranks of a mesh -> number of runtimes for which these ranks have met in this process."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of one runtime, numbered from 0 in the mesh's order, and the connections between them."""

    rank: int
    """This process's number in the mesh."""
    size: int
    endpoint: Endpoint
    """The bound socket of this rank."""
    nodes: tuple[int, ...]
    """Number in the mesh -> node, of which the first one is 0."""
    addresses: tuple[str, ...]
    """Number in the mesh -> the address of its endpoint."""
    token: bytes
    """Random bytes that only ranks of this meeting know."""
    mates: tuple[int, ...]
    """The ranks of this node of which each reads the other's board and mailbox."""
    windows: Windows | None
    """The memory by which this rank and its mates read each other's; None if it reads no other's."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None, *, cuda: bool = False, timeout: float | None = None) -> Ranks:
        """Meet the other ranks of a mesh. All of them call this, equally often and in the same order.

        mesh: 1-D, with this rank, or None for all ranks of the default group. If there is no default group
        yet, it is initialised from the environment, as torchrun sets it. cuda: whether that group serves CUDA
        tensors, too. timeout: seconds to wait for the others; None: `rank_timeout()`. Raises ConfigError,
        RankDivergence if a rank does not come, and RankFailure if one was not started.
        """
        seconds = rank_timeout() if timeout is None else timeout
        if not dist.is_initialized():
            _initialise(cuda, seconds)
        everywhere = tuple(range(dist.get_world_size()) if mesh is None else mesh.mesh.tolist())
        rank = everywhere.index(dist.get_rank())
        secret = Secret.of_environment()
        endpoint = Endpoint(_own_address(), secret)
        try:
            return cls(rank, len(everywhere), endpoint, *_meet(everywhere, rank, endpoint, seconds))
        except BaseException as error:
            _leaving.alone = _leaving.alone or isinstance(error, RankFailure)
            endpoint.close()
            raise

    @property
    def mailbox(self) -> Mailbox | None:
        """This rank's mailbox; None if it has no mates."""
        return self.windows.mailbox if self.windows is not None and self.mates else None

    @property
    def peers(self) -> tuple[int, ...]:
        """All other ranks."""
        return tuple(each for each in range(self.size) if each != self.rank)

    def close(self, *, orderly: bool = True) -> None:
        """orderly: False after a failure: the process then does not wait for other ranks at its end."""
        _leaving.alone = _leaving.alone or not orderly


_leaving = SimpleNamespace(alone=False)
"""Whether this process leaves the default group without waiting for others."""


def _initialise(cuda: bool, timeout: float) -> None:
    rank, size, start = launcher.rank(), launcher.world_size(), launcher.start_number()
    if rank >= size:
        raise ConfigError(
            f"RANK is {rank}, and WORLD_SIZE is {size}.",
            "Start the program with torchrun, or number the ranks from 0 to WORLD_SIZE - 1.",
        )

    def connect() -> None:
        where: dict[str, Any] = {"init_method": "env://"}
        if start:  # else torch would find the addresses of ranks of an earlier start in the launcher's store
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
            where = {"store": PrefixStore(f"start-{start}", store), "rank": rank, "world_size": size}
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            timeout=timedelta(seconds=timeout),
            **where,
        )

    try:
        within(timeout + _LATE, connect)
    except (ValueError, RuntimeError, TimeoutError) as error:
        if not isinstance(error, ValueError) and "EADDRINUSE" not in str(error):
            raise _unconnected(error) from error
        raise ConfigError(
            f"The default process group could not be initialised from the environment: {error}",
            "Start the program with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
        ) from error
    # Not at `close`: a later runtime uses the default group again. To initialise it twice at one port does
    # not work, because ranks that are quick find the first one's store.
    atexit.register(_leave)


def first_to_tell(key: str, text: str) -> str:
    """Write `text` to a key of the default group's store, unless the key has a text already. Returns the text
    that the key has then.

    Raises RuntimeError if the store is gone, and TimeoutError if it does not answer within some seconds.
    """
    store = dist.distributed_c10d._get_default_store()
    first: bytes = within(_ANSWER, lambda: store.compare_set(key, "", text))
    return first.decode()


def _unconnected(error: RuntimeError | TimeoutError) -> RankFailure:
    """Make the error for ranks that could not connect, because one did not start or was lost meanwhile."""
    text = (str(error).splitlines() or [""])[0].rstrip(".")
    if isinstance(error, TimeoutError):
        text = "another rank, or the store of the ranks, has not answered in time"
    return RankFailure(
        f"The ranks could not be connected: {text}.",
        f"Start all ranks, with the same MASTER_ADDR and MASTER_PORT; {TIMEOUT_VARIABLE} sets how long a "
        "rank waits for the others, in seconds.",
        rank=None,
    )


def _store_lost(everywhere: Sequence[int], what: str) -> RankFailure:
    """Make the error for a store that does not answer. what: the error's text after "The store of the ranks",
    such as "is gone".
    """
    by_launcher = launcher.keeps_store()
    address = os.environ.get("MASTER_ADDR", "node 0")
    named = f"the launcher on {address}" if by_launcher else "rank 0 of the default group"
    return RankFailure(
        f"The store of the ranks {what}, so {named}, which keeps it, is dead, stopped or cut off.",
        "Look at its own error, then start all ranks again: with commits on, resume= goes on from the last "
        "commit.",
        rank=everywhere.index(0) if 0 in everywhere and not by_launcher else None,
    )


def _meet(
    everywhere: tuple[int, ...], rank: int, endpoint: Endpoint, timeout: float
) -> tuple[tuple[int, ...], tuple[str, ...], bytes, tuple[int, ...], Windows | None]:
    """Wait until all ranks have called this, and return the ranks' nodes, their addresses, the token, this
    rank's mates, and its windows.

    Raises ConfigError, RankDivergence if a rank does not come or has another secret, and RankFailure if the
    store is lost.
    """
    whole = len(everywhere) == dist.get_world_size()
    ranks = "all" if whole else ",".join(map(str, everywhere))
    name = f"infinity/{launcher.start_number()}/{ranks}/{_met[everywhere]}"
    store = PrefixStore(name, dist.distributed_c10d._get_default_store())

    def tell(what: str, mine: object) -> list[Any]:
        """Tell all ranks something by the store. Returns what each rank has told."""
        keys = [f"{what}/{each}" for each in range(len(everywhere))]

        def exchange() -> tuple[list[int], list[str]]:
            store.set(keys[rank], _signed(endpoint.secret, f"{name}/{keys[rank]}", json.dumps(mine)))
            absent = _absent(store, keys, timeout)
            return absent, [] if absent else [each.decode() for each in store.multi_get(keys)]

        try:
            absent, told = within(timeout + _LATE, exchange)
        except (RuntimeError, TimeoutError) as error:
            why = f"has not answered for {timeout:g} s" if isinstance(error, TimeoutError) else "is gone"
            raise _store_lost(everywhere, why) from error
        if absent:
            raise RankDivergence(
                f"{named_ranks(absent).capitalize()} did not come to offload() within {timeout:g} s.",
                f"Call offload() on all ranks; {TIMEOUT_VARIABLE} sets how long a rank waits, in seconds.",
            )
        texts = [
            _checked(endpoint.secret, f"{name}/{key}", each, at)
            for at, (key, each) in enumerate(zip(keys, told, strict=True))
        ]
        return [json.loads(each) for each in texts]

    place, here = launcher.location(), machine.identity()
    node = None if place is None else place.node
    told = tell("here", [endpoint.address, node, here, secrets.token_hex(32)])
    _met[everywhere] += 1  # only now: a rank that gave up and tries again means the same meeting
    addresses, by_launcher, machines, tokens = zip(*told, strict=True)
    names = machines if None in by_launcher else by_launcher
    numbers = list(dict.fromkeys(names))
    nodes = tuple(map(numbers.index, names))
    near = [each for each in range(len(nodes)) if (nodes[each], machines[each]) == (nodes[rank], here)]
    windows, mates = open_windows(rank, near), tuple[int, ...]()
    with contextlib.ExitStack() as undo:
        if windows is not None:
            undo.callback(windows.mailbox.close)
        memories = tell("memory", None if windows is None else windows.tell())
        shared = {each: memories[each] for each in near if each != rank and memories[each] is not None}
        reads = [] if windows is None else windows.open(shared)
        readers = tell("reads", reads)
        mates = tuple(each for each in reads if rank in readers[each])
        if windows is not None:
            windows.meet(mates)
        if mates:
            undo.pop_all()
    return nodes, addresses, bytes.fromhex(tokens[0]), mates, windows


def _signed(secret: Secret | None, place: str, text: str) -> str:
    """Return a text for the store, with its MAC in front if there is a secret. place: of the text."""
    return f"{'' if secret is None else secret.sign(place + text)} {text}"


def _checked(secret: Secret | None, place: str, told: str, rank: int) -> str:
    """Return the text that a rank has signed. Raises RankDivergence if its secret is another one."""
    mac, _, text = told.partition(" ")
    wanted = _signed(secret, place, text).partition(" ")[0]
    if not hmac.compare_digest(mac.encode(), wanted.encode()):
        has = "has no secret" if secret is None else "has a secret"
        other = "has none" if not mac else "has one" if secret is None else "has another one"
        raise RankDivergence(
            f"This rank {has}, and rank {rank} {other}.",
            f"Give all ranks the same {VARIABLE}, or files with the same text in {FILE_VARIABLE}.",
        )
    return text


def _own_address() -> str:
    """Return the address that this rank binds: loopback if all ranks are on one node, else that of the
    interface GLOO_SOCKET_IFNAME, or without one of the interface by which MASTER_ADDR is reached.
    """
    place = launcher.location()
    if place is not None and place.ranks == dist.get_world_size():
        return "127.0.0.1"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        if interface:
            request = struct.pack("256s", interface.encode()[:15])
            found = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
            return socket.inet_ntoa(found[20:24])
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        family, *_, where = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect(where)  # sends nothing
            return str(towards.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"The interface by which {master} is reached was not found: {error.strerror}.",
            "Set MASTER_ADDR to the address of node 0, or GLOO_SOCKET_IFNAME to the interface to use.",
        ) from error


def _absent(store: Store, keys: list[str], timeout: float) -> list[int]:
    """Wait until the store has all keys; return the indices of those that do not come in time."""
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError:  # the time is up, or the store is gone
        return [each for each, key in enumerate(keys) if not store.check([key])]
    return []


def _leave() -> None:
    """Destroy the default group at the process's end. If rank 0 keeps the store, it first waits, for a
    limited time, until the other ranks are leaving too.
    """
    if not dist.is_initialized():
        return
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(RuntimeError):  # the others are gone without a word, or the store is
        if not _leaving.alone:
            store.set(f"infinity/gone/{dist.get_rank()}", "1")
            if dist.get_rank() == 0 and not launcher.keeps_store():
                every = [f"infinity/gone/{each}" for each in range(dist.get_world_size())]
                store.wait(every, timedelta(seconds=_LAST_SECONDS))
    dist.destroy_process_group()
