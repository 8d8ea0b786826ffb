"""Page service: sends bytes of this rank's pages to other ranks.

A request names bytes of this rank's part of a page, and the number of the step after which they are wanted.
The service waits until this rank has decided that step, completes the unit's update, and sends the bytes from
the page's home: straight from there if the home is in RAM, else through a buffer of the exchange. A rank of
the same node is told instead that it can copy them by itself (infinity/distributed/windows.py), from RAM or
from device memory.

Only bytes at home are sent: user code may change the model's memory at any time.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity.distributed.message import MessageKind, What
from infinity.distributed.remote_parts import Answer, RemoteParts
from infinity.distributed.transfers import Dispatch
from infinity.distributed.wire import Wire
from infinity.errors import ConfigError, InfinityError
from infinity.gradients.gradients import Gradients
from infinity.optim.scheduler import UpdateScheduler
from infinity.pages.health import Health
from infinity.pages.home import Home
from infinity.pages.optimizer_page import StatePage
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.store import Store
from infinity.system.lock import RuntimeLock
from infinity.tiers import Pool
from infinity.tiers.link import Transfer

_POLL = 0.005
"""Seconds after which the service looks again at requests that it could not serve yet."""


@dataclass(frozen=True, slots=True)
class _Request:
    source: int
    number: int
    what: What
    step: int
    unit: int
    fields: tuple[Any, ...]
    """For a parameter page: the asking rank's version of it, an `Answer`, and ranges, (bytes from the start
    of the page, bytes). For states: the index of a parameter, the name of an array, first element, number of
    elements. For a gradient: the index of a parameter, first element, number of elements.
    """


class PageService:
    """Serves requests of other ranks in a thread of its own, from `start` until `stop`."""

    def __init__(
        self,
        wire: Wire,
        remote: RemoteParts,
        *,
        pages: Sequence[ParameterPage],
        states: Mapping[int, StatePage],
        gradients: Gradients | None,
        scheduler: UpdateScheduler | None,
        store: Store,
        room: Pool,
        lock: RuntimeLock,
        health: Health,
    ) -> None:
        """remote: tells the last step that this rank has decided, and keeps bytes for other ranks. pages,
        states: parameter and optimizer pages of all units. scheduler: completes updates; None for inference.
        room: the pool for buffers of bytes to send.
        """
        self._wire = wire
        self._remote = remote
        self._pages = pages
        self._states = states
        self._gradients = gradients
        self._scheduler = scheduler
        self._store = store
        self._room = room
        self._lock = lock
        self._health = health
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._early: deque[_Request] = deque()
        """Requests for a step that this rank has not decided yet, or for edits that it has not made yet."""
        self._sent: deque[tuple[Dispatch, torch.Tensor]] = deque()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="infinity page service", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, units: Sequence[int] | None = None) -> None:
        """Let ranks of this node copy those pages of `units`, or of all, that are up to date at home."""
        for unit in range(len(self._pages)) if units is None else units:
            if self._scheduler is None or not self._scheduler.pending(unit):
                self._remote.offer(self._pages[unit])

    def stop(self) -> None:
        """End the thread, and wait for it. Requests that are still queued are not answered."""
        self._stopped = True
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def requested(self, source: int, number: int, what: int, step: int, unit: int, *fields: Any) -> None:
        """Queue a request of another rank, or begin to relay what it wants. Never blocks."""
        if what == What.RELAYED:
            loads, version = fields
            self._remote.relay(source, number, self._pages[unit], (step, loads, version))
        else:
            self._requests.put(_Request(source, number, What(what), step, unit, fields))

    def stepped(self) -> None:
        """Try again to serve the requests of `_early`, after a step or an edit."""
        with contextlib.suppress(IndexError):  # two threads call this
            while True:
                self._requests.put(self._early.popleft())

    def _run(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=_POLL if self._early else None)
            except queue.Empty:
                self.stepped()
                continue
            if request is None or self._stopped:
                return
            try:
                self._serve(request)
            except InfinityError as error:
                self._refuse(request, error)
            except Exception as error:  # the asking rank must not wait for ever
                self._refuse(request, ConfigError(f"{type(error).__name__}: {error}", "Report this bug."))

    def _refuse(self, request: _Request, error: InfinityError) -> None:
        with contextlib.suppress(ConfigError):  # the wire is closed, which the asking rank has heard
            self._wire.refuse(request.source, request.number, error)

    def _serve(self, request: _Request) -> None:
        if request.what is What.PARAMETERS and request.fields[1] == Answer.READY:
            self._serve_from_device(request)
            return
        with self._lock.turn():
            if not self._prepare(request):
                return
            if request.what is What.LOCAL:
                self._send_gradient(request)
                return
            home, places = self._places(request)
            pieces = self._kept(request)
            at_home = not pieces and home.in_place and (request.what is What.PARAMETERS or len(places) == 1)
            for offset, nbytes in places if at_home else ():
                home.settle(offset, offset + nbytes, writing=False)
            in_ram = at_home or bool(pieces)
            if self._copies(request, at_home=at_home) or not (in_ram or self._fits(request, places)):
                self._wire.post(request.source, MessageKind.REDIRECT, request.number)
                return
            if request.what is What.PARAMETERS:
                self._remote.served(request.source, self._pages[request.unit], request.fields[2])
            if at_home:
                pieces = [home.view(*each) for each in places]
            if pieces:
                dispatch = self._deliver(request, *pieces)
                if request.what is What.PARAMETERS and self._pages[request.unit].permanent:
                    self._remote.sends(self._pages[request.unit], dispatch)
                return
        sizes = [nbytes for _, nbytes in places]
        block = self._block(sum(sizes))
        pieces = block.split(sizes)
        for (offset, _), piece in zip(places, pieces, strict=True):
            with self._lock.turn():
                reading: Transfer = self._store.read(home, offset, piece)
            reading.wait()
        sent = pieces if request.what is What.PARAMETERS else [block]
        self._sent.append((self._deliver(request, *sent), block))

    def _serve_from_device(self, request: _Request) -> None:
        """Let the asking rank copy a page from this rank's device, and tell it so. If it still cannot, as the
        board says, it asks for the bytes.
        """
        page = self._pages[request.unit]
        for waited in (False, True):
            with self._lock.turn():
                if not self._prepare(request):
                    return
                permitted = not self._kept(request) or self._remote.written(page)
                if (permitted and self._remote.offer(page)) or waited:
                    break
                written = self._remote.written(page)
            for each in written:
                self._store.link.await_event(each)
        self._wire.post(request.source, MessageKind.REDIRECT, request.number)

    def _prepare(self, request: _Request) -> bool:
        """Complete this rank's update of the requested page. Returns False if the request has to wait, in
        `_early`.
        """
        self._health.check()
        early = request.step > self._remote.step
        if not early and request.what is not What.LOCAL:
            if self._scheduler is not None and not self._scheduler.tentative(request.unit):
                self._scheduler.complete(request.unit)  # else the home still has what the last step left
            early = request.what is What.PARAMETERS and not self._has_edits(request)
        if early:
            self._early.append(request)
        return not early

    def _deliver(self, request: _Request, *pieces: torch.Tensor) -> Dispatch:
        label, unit = request.what.label, request.unit
        return self._wire.deliver(request.source, request.number, pieces, label, unit=unit)

    def _send_gradient(self, request: _Request) -> None:
        """Send a byte that says whether this rank has a gradient of a parameter, then the wanted elements of
        the gradient, or zeros.
        """
        assert self._gradients is not None
        parameter, first, count = request.fields
        page = self._gradients.pages[request.unit]
        found = self._gradients.elements(page, parameter, first, count)
        memory = page.blank(parameter, count) if found is None else found
        flag = torch.tensor([found is not None], dtype=torch.uint8, device="cpu")
        self._deliver(request, flag, memory.view(torch.uint8))

    def _kept(self, request: _Request) -> Sequence[torch.Tensor]:
        """Return the copies of the wanted bytes that were made before an edit could change the home."""
        if request.what is not What.PARAMETERS:
            return ()
        return self._remote.kept(self._pages[request.unit], request.fields[2])

    def _copies(self, request: _Request, *, at_home: bool) -> bool:
        """Whether the asking rank can copy the wanted bytes by itself. at_home: as for RemoteParts.offer."""
        if request.what is not What.PARAMETERS or request.fields[1] == Answer.BYTES:
            return False
        return self._remote.offer(self._pages[request.unit], at_home=at_home)

    def _fits(self, request: _Request, places: Sequence[tuple[int, int]]) -> bool:
        """Whether one buffer has room for the wanted bytes. A request for bytes never exceeds it, but one of
        a rank that expects to copy them from RAM has no limit: redirected, that rank asks for parts of them.
        """
        if request.what is not What.PARAMETERS or request.fields[1] == Answer.BYTES:
            return True
        return sum(nbytes for _, nbytes in places) <= self._store.plan.exchange_block_bytes

    def _has_edits(self, request: _Request) -> bool:
        """Whether the home has all edits that the asking rank has made."""
        version: int = request.fields[0]
        return self._pages[request.unit].home_version >= version

    def _places(self, request: _Request) -> tuple[Home, list[tuple[int, int]]]:
        """Return the home that has the wanted bytes, and their (offset in it, number) in order."""
        if request.what is What.PARAMETERS:
            page = self._pages[request.unit]
            held = [each for wanted in request.fields[2] for each in page.shard.pieces(*wanted)]
            return page.home, [(each.home_start, each.nbytes) for each in held]
        states = self._states[request.unit]
        return states.home, states.places(*request.fields)

    def _block(self, nbytes: int) -> torch.Tensor:
        """Lease a buffer. If there is no room, wait until earlier ones have been sent."""
        while self._sent and (self._sent[0][0].done() or self._room.largest_free < nbytes):
            self._sent[0][0].wait()
            self._sent.popleft()
        with self._room.lease(nbytes) as lease:
            return lease.residency()
