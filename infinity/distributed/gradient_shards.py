"""GradientShards: gradients on their way from the rank that computed them to the rank that keeps their sum
(the reduce-scatter of ZeRO stages 2 and 3).

The sums of a range of a parameter's gradient are kept by one rank, which owns the range
(`UnitLayout.owned`). Every rank's gradient of the range is a gradient shard. Its bytes wait in the host arena
of their rank until the owner adds them, straight from there if it has a window to that rank's RAM. Otherwise
they come in a stream (infinity/distributed/streams.py), which the owner reads a block at a time. It does so
when it is the shard's turn: micro-batch m of rank r counts as micro-batch m*N+r, so that the owner adds in
the order in which one rank with N times as many micro-batches would (infinity/distributed/turns.py).

[Note: gradients of a device] Gradients in device memory are copied to where they wait in RAM, and a worker
thread waits for the copies (infinity/pages/gradient_copies.py). They are offered, under the
lock, when they are there. What this rank says of later moments, such as the end of its backward, is kept back
meanwhile (`_in_order`), so that other ranks hear all in the order in which it happened. Where a sum rests on
the device, shards go up again. The order of additions is that in which they are queued there, so the next
shard has its turn at once. The bytes in RAM are given back when a thread that waits for the copies says so.

A shard waits in device memory instead if its owner adds it on a device which reads that memory by CUDA IPC
(infinity/distributed/peer_copies.py), and if there is room (`Plan.waiting_there_bytes`). The worker
says when the host knows that the bytes are there (`Order.OFFER`); then they are offered. The owner copies
them to an upload buffer, as it does with bytes in RAM. So no kernel reads another device's memory, and the
copies go on while the model computes. The bytes are given back when the owner's host knows that the copies
are done. No stream waits for another process.

[Note: no deadlock]
A rank whose shards take too many bytes waits before it offers another one. Of all shards that wait, the one
with the earliest turn waits only for ranks that compute: each rank with an earlier turn will either offer its
shard or end its backward. Transfers need no rank's training thread. This holds for a rank's
first shard to a range in a micro-batch. Further shards, as of shared parameters, wait for the ends of all
ranks' backwards, and so of this rank's own. So their bytes are not counted.
A shard in a stream also waits until those before it in its lane are read. A lane has the first shards of one
micro-batch, or its further ones. So all that a shard waits for still comes from an earlier micro-batch or, in
the same one, a lower rank; or it is a further one, before which all first ones of its micro-batch are added.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from infinity.distributed.failure_event import TIMEOUT_VARIABLE
from infinity.distributed.message import IN_DEVICE, Message, MessageKind, What
from infinity.distributed.transfers import Delivery, Dispatch
from infinity.distributed.turns import ALL, Turns
from infinity.distributed.windows import Windows
from infinity.distributed.wire import Wire
from infinity.errors import InfinityError, RankDivergence
from infinity.gradients.gradients import Gradients
from infinity.layout.chunks import OwnedRange, Piece
from infinity.layout.shards import Share
from infinity.layout.strides import in_memory_order
from infinity.optim.scheduler import UpdateScheduler
from infinity.pages.gradient_page import GradientPage
from infinity.pages.store import ExchangePools
from infinity.tiers.link import Joined, Transfer

Key = tuple[int, int]
"""(index of a unit, index of a parameter in it)."""
_Block = list[tuple[int, Piece]]
"""(index of a chunk, piece) of consecutive pieces of a parameter, which are pulled together."""
_IDLE = 1.0
"""Seconds after which the thread that waits for copies ends, if there are none."""
_DTYPES = {
    str(each).removeprefix("torch."): each
    for each in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
"""The dtypes of gradients, by the names that ranks tell each other."""


class _Shard(NamedTuple):
    """This rank's gradient of a range of a parameter, which is to be offered to the range's owner."""

    key: Key
    micro_batch: int
    range: OwnedRange
    counts: bool
    """Whether its bytes count in `_waiting_bytes`."""
    there: bool = False
    """Whether its bytes wait in device memory."""


@dataclass(slots=True, eq=False)
class _Offer:
    """A shard that waits for its turn: one rank's gradient of what this rank owns of a parameter."""

    key: Key
    epoch: int
    source: int
    """The rank that computed the gradient."""
    token: int
    """The number by which that rank knows the gradient."""
    dtype: torch.dtype
    here: torch.Tensor | None = None
    """The gradient of the range that this rank owns, flat, in memory that this rank can read; None if it
    comes in a stream, or has been added.
    """
    there: bool = False
    """Whether `here` is device memory of the rank that computed the gradient."""
    room: int = 0
    """Bytes by which the gradient counts in this rank's `_waiting_bytes`; 0 if another rank computed it."""
    lane: int = -1
    """The lane of its rank's stream in which its bytes come; -1 if they do not."""
    blocks: deque[_Block] = field(default_factory=deque)
    """What comes in the stream and is not being read yet."""
    reading: int = 0
    """Number of blocks that are being read, and have not been added yet."""


class _AskedSum(NamedTuple):
    """Another rank's request for a sum of gradients."""

    source: int
    number: int
    """Number of the delivery at that rank."""
    epoch: int
    ended: int
    """Number of backwards that the rank has ended: the sum must include every rank's first `ended` ones."""
    key: Key
    first: int
    """Index in the parameter of the first wanted element."""
    numel: int


class _Watcher:
    """Waits for copies in a thread of its own, which ends when there have been none for a while."""

    def __init__(self, lose: Callable[[Exception], None], then: Callable[[], object]) -> None:
        """lose: is called with the error of copies that fail. then: is called after copies, in the thread."""
        self._lose = lose
        self._then = then
        self._copies: queue.SimpleQueue[Sequence[Transfer]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._runs = False
        """Whether there is a thread, which takes all that was put into `_copies` before it ends."""

    def watch(self, copies: Sequence[Transfer]) -> None:
        """Wait for copies, after those of earlier calls."""
        with self._lock:
            self._copies.put(copies)
            if not self._runs:
                threading.Thread(target=self._run, name="infinity uploads", daemon=True).start()
                self._runs = True

    def _run(self) -> None:
        while (copies := self._next()) is not None:
            try:
                Joined(copies).wait()
            except InfinityError as error:
                self._lose(error)
            del copies
            self._then()

    def _next(self) -> Sequence[Transfer] | None:
        with contextlib.suppress(queue.Empty):
            return self._copies.get(timeout=_IDLE)
        with self._lock:
            self._runs = not self._copies.empty()
            return self._copies.get() if self._runs else None


class GradientShards:
    """Offers this rank's shards to their owners, and adds all ranks' shards to the sums that this rank keeps.

    All methods but `await_room` and `_wake` are called under the runtime's lock.
    """

    def __init__(
        self,
        wire: Wire,
        share: Share,
        *,
        gradients: Gradients,
        scheduler: UpdateScheduler,
        pools: ExchangePools,
        windows: Windows | None,
        block_bytes: int,
        released: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """gradients: the sums that this rank keeps. scheduler: adds to them. pools: `incoming`
        receives other ranks' shards. In `waiting` and `waiting_there` this rank's gradients wait for their
        turn or for other ranks; a single one may be larger, and then waits where autograd made it, or in
        other RAM if that is on a device. windows: to the memory of ranks of this node; None: there are none.
        block_bytes: the most bytes that are pulled at once; the piece of a parameter in one chunk may be
        larger. released: makes a context that gives up the runtime's lock.
        """
        self.ended = 0
        """Number of backwards that this rank has ended since gradients were last cleared."""
        self.offered: Counter[int] = Counter()
        """Rank -> number of shards that this rank has offered to it since gradients were cleared."""
        self._heard: Counter[int] = Counter()
        """Rank -> number of shards that it has offered to this rank since gradients were cleared."""
        self.fresh: dict[int, set[int]] = {}
        """Unit -> its parameters with pieces to which the last rank's gradient of a micro-batch was added
        since this was last emptied.
        """
        self._wire = wire
        self._share = share
        self._gradients = gradients
        self._pages = gradients.pages
        self._scheduler = scheduler
        self._room, self._waiting = pools.incoming, pools.waiting
        self._waiting_there = pools.waiting_there
        self._windows = windows
        self._block_bytes = block_bytes
        self._released = released
        self._coming: deque[tuple[int, Callable[[], object]]] = deque()
        """(number of a gradient by `Gradients.bring`, what to do when it is in RAM), in the order in which
        to do it; see [Note: gradients of a device].
        """
        self._going_up: deque[tuple[Sequence[Transfer], Callable[[], object]]] = deque()
        """(copies to the device, what to do when they are done), in the order in which the copies began."""
        self._watcher = _Watcher(gradients.lose, self._wake)
        self._woken = False
        """Whether the service thread is to look at `_coming` and `_going_up`."""
        self._epoch = 0
        """Number of times that gradients were cleared. Shards of different epochs are not mixed."""
        self._turns: Turns[Key, _Offer] = Turns(share.ranks)
        self._early: list[tuple[int, Message]] = []
        """(source, message) of each message about an epoch that this rank has not begun."""
        self._ready: list[_Offer] = []
        """Shards in streams whose turn has come, of which some blocks are not being read yet: they wait for
        room, or for others before them in their lane.
        """
        self._paused = self._closed = 0
        """Numbers of agreements that this rank has begun by `pause`, and ended by `close_step`."""
        self._reading: dict[int, tuple[_Offer, _Block, torch.Tensor]] = {}
        """Number of a delivery -> the block that it brings, and memory in the pool of the exchange."""
        self._outgoing: dict[int, tuple[torch.Tensor, int]] = {}
        """Token -> this rank's gradient of a range that a rank of its node owns and has not read, and the
        bytes by which it counts in `_waiting_bytes`.
        """
        self._sending: dict[Dispatch, int] = {}
        """Gradients in streams, that are not read -> the bytes by which they count in `_waiting_bytes`."""
        self._lanes: defaultdict[tuple[int, int], deque[_Offer]] = defaultdict(deque)
        """(rank, lane of its stream) -> shards in it that are not read, in their order."""
        self._begun: set[tuple[Key, int]] = set()
        """(parameter, micro-batch) of this rank's shards since gradients were cleared."""
        self._asked_sums: list[_AskedSum] = []
        """Requests for sums that have not been answered yet."""
        self._token = 0
        self._waiting_bytes = 0
        """Bytes of this rank's gradients that wait to be sent, or for their turn."""

    # --- the thread that trains -------------------------------------------------------------------------

    def await_room(self, nbytes: int) -> None:
        """Wait, without the runtime's lock, until a gradient of `nbytes` bytes may be offered.

        Raises RankFailure, and RankDivergence after the time-out.
        """
        if not self._wire.wait_for_step(
            lambda: self._waiting_bytes + nbytes <= self._waiting.nbytes or not self._waiting_bytes,
            "room for gradients",
        ):
            raise self._late("takes the gradients of this rank")

    def offer(self, unit: int, parameter: int, gradient: torch.Tensor, micro_batch: int) -> None:
        """Offer this rank's new gradient of a parameter to the ranks that own ranges of it.

        gradient: with any dense strides. micro_batch: the number of its backward on this rank since gradients
        were last cleared. Raises the errors of `UpdateScheduler.accumulate_piece`.
        """
        page = self._pages[unit]
        page.content.add(parameter)
        flat = in_memory_order(gradient, page.layout.parameters[parameter].stride)
        key = (unit, parameter)
        counts = (key, micro_batch) not in self._begun
        self._begun.add((key, micro_batch))
        for wanted in page.layout.owned(parameter):
            shard = _Shard(key, micro_batch, wanted, counts)
            part = flat[wanted.start : wanted.start + wanted.numel]
            if self._gradients.apart:
                self._bring(shard, part)
            else:
                self._count(part.nbytes * counts)
                self._offer(shard, part)
        self._go_on()

    def _bring(self, shard: _Shard, part: torch.Tensor) -> None:
        """Bring the bytes of a shard, `part`, to where they wait, and offer the shard when they are there."""
        there = self._added_from_there(shard) and self._waiting_there.largest_free >= part.nbytes
        pool = self._waiting_there if there else self._waiting
        if pool.largest_free < part.nbytes:
            here, place = torch.empty(part.shape, dtype=part.dtype, device="cpu"), -1
        else:
            with pool.lease(part.nbytes) as lease:
                here, place = lease.residency().view(part.dtype), lease.offset
        try:
            bring = self._gradients.keep_there if there else self._gradients.bring
            number = bring(part, here, self._wake)
        except InfinityError as error:  # step() raises it on all ranks, which may wait for others meanwhile
            self._gradients.lose(error)
            return
        shard = shard._replace(counts=shard.counts and not there, there=there)
        self._count(part.nbytes * shard.counts)
        self._in_order(functools.partial(self._offer, shard, here, place), number)

    def _added_from_there(self, shard: _Shard) -> bool:
        """Whether a shard's owner adds it on a device that reads the memory of this rank's device."""
        (unit, _), owner = shard.key, shard.range.owner
        if owner == self._share.rank:
            return self._gradients.on_device(unit)
        return self._windows is not None and self._windows.adds_from_there(owner, unit)

    def _offer(self, shard: _Shard, part: torch.Tensor, place: int | None = None) -> None:
        """Offer a shard to its owner. part: its bytes, flat. place: bytes from the start of the host arena or
        of the device's memory to them, or -1 if they are in other RAM; None: they are where autograd made
        them, and are copied if they have to wait.
        """
        key, micro_batch, (owner, *_), counts, there = shard
        if place is not None and self._gradients.lost_on_the_way:  # step() raises the error
            self._count(-part.nbytes * counts)
            return
        self._token += 1
        if owner == self._share.rank:
            offer = _Offer(key, self._epoch, owner, self._token, part.dtype, part, there)
            offer.room = part.nbytes * counts
            self._take(self._turns.offered(key, micro_batch, owner, offer))
            if offer.here is not None and place is None:
                offer.here, _ = self._kept(part)
            return
        self.offered[owner] += 1
        if place is None:
            part, place = self._kept(part)
        dtype, lane = str(part.dtype).removeprefix("torch."), 2 * micro_batch + (not counts)
        fields = [self._epoch, micro_batch, self._token, dtype, *key]
        near = self._windows is not None and self._windows.reads(owner)
        if near and place >= 0:
            self._outgoing[self._token] = part, part.nbytes * counts
            self._wire.post(owner, MessageKind.GRADIENT_SHARD, *fields, place, IN_DEVICE if there else lane)
        else:
            message = Message(MessageKind.GRADIENT_SHARD, [*fields, -1, lane])
            dispatch = self._wire.push(owner, message, part, label="gradients", unit=key[0])
            self._sending[dispatch] = part.nbytes * counts

    def _kept(self, part: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Copy a gradient that has to wait into the arena, and return the copy and its offset there. If there
        is no room, return the gradient itself, and -1.
        """
        if self._waiting.largest_free < part.nbytes:
            return part, -1
        with self._waiting.lease(part.nbytes) as lease:
            return lease.residency().view(part.dtype).copy_(part), lease.offset

    def _in_order(self, act: Callable[[], object], number: int = 0) -> None:
        """Do what other ranks learn of, after all gradients that came before have been offered. number: of
        the gradient that has to be in RAM, by `Gradients.bring`; 0: none.
        """
        self._coming.append((number, act))
        self.landed()

    def landed(self) -> None:
        """Do what `_in_order` and `_then` were told, as far as copies of gradients are done."""
        self._woken = False
        while self._coming and self._gradients.arrived(self._coming[0][0]):
            self._coming.popleft()[1]()
        while self._going_up and all([each.done() for each in self._going_up[0][0]]):
            self._going_up.popleft()[1]()
        self._go_on()

    def _then(self, copies: Sequence[Transfer], act: Callable[[], object]) -> None:
        """Do something when copies of a shard to the device are done; at once if there are none."""
        if not copies:
            act()
            return
        self._going_up.append((copies, act))
        self._watcher.watch(copies)

    def _wake(self) -> None:
        """Have the service thread call `landed`. Other threads than those with the lock call this."""
        if not self._woken:
            self._woken = True
            self._wire.inbox.put((self._share.rank, Message(MessageKind.LANDED, [])))

    def expect(self, micro_batch: int, parameters: Set[tuple[int, int]]) -> None:
        """Tell all ranks which parameters get a gradient of this rank in a micro-batch, exactly one each.

        parameters: (unit, index of the parameter).
        """
        self._in_order(functools.partial(self._tell_expected, micro_batch, parameters))

    def _tell_expected(self, micro_batch: int, parameters: Set[tuple[int, int]]) -> None:
        listed = [list(each) for each in sorted(parameters)]
        self._wire.post(self._wire.peers, MessageKind.EXPECTED, self._epoch, micro_batch, listed)
        self._take(self._turns.expects(self._share.rank, micro_batch, parameters))

    def backward_ended(self, count: int = 1) -> None:
        """Tell all ranks that this rank has ended `count` more backwards and makes no more shards of them."""
        self.ended += count
        self._in_order(functools.partial(self._tell_ended, self.ended))

    def _tell_ended(self, ended: int) -> None:
        self._wire.post(self._wire.peers, MessageKind.BACKWARD_DONE, self._epoch, ended)
        self._take(self._turns.done(self._share.rank, ended))

    def pause(self, cleared: int) -> None:
        """Tell all ranks that this rank offers no more shards before the step ends, so that none waits for
        one. Waits as `offer_all` does.

        cleared: number of times that this rank has cleared its gradients. A rank that has cleared its own
        fewer times keeps the message until it has caught up.
        """
        self.offer_all()
        self._paused += 1
        self._wire.post(self._wire.peers, MessageKind.PAUSED, cleared, self._paused)
        self._take(self._turns.done(self._share.rank, ALL))
        self._go_on()

    def offer_all(self) -> None:
        """Wait, without the runtime's lock, until all gradients of this rank have been offered."""
        if self._coming:
            with self._released():
                self._gradients.await_arrivals()
            self.landed()

    def close_step(self, ended: Mapping[int, int], offered: Mapping[int, int]) -> None:
        """Wait, without the runtime's lock, until this rank has heard of all shards of the step that belong
        to its sums, has added them, and has sent all of its own. No rank offers another one before the step
        ends.

        ended: rank -> number of backwards that it has ended; the largest number is then used for all ranks.
        offered: rank -> number of shards that it has offered to this rank. Raises RankFailure, and
        RankDivergence after the time-out.
        """
        if not self._wire.wait_for_step(
            lambda: all(self._heard[each] == count for each, count in offered.items()), "gradients"
        ):
            raise self._late("offers gradients to this rank")
        self.ended = max(ended.values())
        for rank in range(self._share.ranks):
            self._take(self._turns.done(rank, ALL))
        self._go_on()
        if not self._wire.wait_for_step(self._idle, "gradients"):
            raise self._late("brings gradients to this rank or takes them")
        self._turns.go_on(self.ended)
        self._closed += 1

    def renew(self) -> None:
        """Begin a new epoch, after all ranks have cleared their gradients. Messages of this epoch that came
        early are handled now.
        """
        self._epoch += 1
        self.ended = 0
        self.fresh.clear()
        self.offered.clear()
        self._heard.clear()
        for offer in self._turns.clear():
            if offer.here is not None and offer.source != self._share.rank:
                self._wire.post(offer.source, MessageKind.TAKEN, offer.token)
        self._ready.clear()
        for (source, lane), offers in self._lanes.items():
            if left := sum(_bytes(block, each.dtype) for each in offers for block in each.blocks):
                self._wire.drop(source, lane, left)
        self._lanes.clear()
        self._begun.clear()
        # An owner that copies a gradient now, which comes to nothing, gives its memory back by TAKEN.
        self._waiting_bytes = sum(self._sending.values()) + sum(size for _, size in self._outgoing.values())
        self._wire.failure_event.notify()
        if self._paused > self._closed:
            self._take(self._turns.done(self._share.rank, ALL))
        early, self._early = self._early, []
        for source, message in early:
            self.heard(source, message)

    def sum_of(self, page: GradientPage, parameter: int, wanted: OwnedRange) -> torch.Tensor | None:
        """Return the sum of all ranks' gradients of a range of a parameter, (wanted.numel,) in RAM; None if
        there is none.

        The sum includes every rank's first `ended` micro-batches, and may include later ones of ranks that
        are ahead. Raises RankFailure, and RankDivergence after the time-out.
        """
        if not self.ended:
            return None
        key, (owner, first, count) = (page.index, parameter), wanted
        if owner == self._share.rank:
            if not self._wire.wait(lambda: self._turns.complete(key, self.ended), "gradients"):
                raise self._late("brings gradients to this rank")
            return self._gradients.elements(page, parameter, first, count)
        found = page.blank(parameter, count)
        there = torch.zeros(1, dtype=torch.uint8, device="cpu")
        delivery = self._wire.expect(owner, [there, found.view(torch.uint8)], "gradients", unit=page.index)
        fields = [self._epoch, self.ended, *key, first, count]
        self._wire.post(owner, MessageKind.REQUEST, delivery.number, What.SUM, *fields)
        delivery.wait()
        return found if there.item() else None

    # --- the service thread -----------------------------------------------------------------------------

    def heard(self, source: int, message: Message) -> None:
        """Handle a message of another rank: GRADIENT_SHARD, EXPECTED, BACKWARD_DONE or PAUSED."""
        epoch, *fields = message.fields
        if epoch > self._epoch:
            self._early.append((source, message))
        elif epoch == self._epoch and message.kind is MessageKind.PAUSED:
            if fields[0] > self._closed:  # else the step has ended meanwhile
                self._take(self._turns.done(source, ALL))
        elif epoch == self._epoch and message.kind is MessageKind.BACKWARD_DONE:
            self._take(self._turns.done(source, fields[0]))
        elif epoch == self._epoch and message.kind is MessageKind.EXPECTED:
            micro_batch, listed = fields
            found = {(unit, index) for unit, index in listed}
            self._take(self._turns.expects(source, micro_batch, found))
        elif epoch == self._epoch:
            self._heard[source] += 1
            micro_batch, token, dtype, unit, parameter, place, lane = fields
            self._gradients.begin()
            self._pages[unit].content.add(parameter)
            offer = _Offer((unit, parameter), epoch, source, token, _DTYPES[dtype])
            if place >= 0:
                assert self._windows is not None
                count = sum(piece.count for _, piece in self._pages[unit].pieces(parameter))
                offer.there = lane == IN_DEVICE
                if self._unmapped(offer):
                    return
                offer.here = self._windows.view(source, place, count, offer.dtype, there=offer.there)
            else:
                offer.lane, offer.blocks = lane, self._blocks(offer)
                self._lanes[source, lane].append(offer)
            self._take(self._turns.offered(offer.key, micro_batch, source, offer))
        self._go_on()

    def taken(self, token: int) -> None:
        """Note that the owner reads a gradient no more. token: of the gradient."""
        _, nbytes = self._outgoing.pop(token)
        self._count(-nbytes)

    def sum_requested(self, source: int, number: int, epoch: int, ended: int, *wanted: int) -> None:
        """Note another rank's request for sums of gradients, and answer it as soon as they include every
        rank's first `ended` backwards.

        source: the rank that asks. number: of the delivery at that rank. epoch: how often that rank has
        cleared its gradients. wanted: unit, parameter, index of its first element, number of elements.
        """
        unit, parameter, first, count = wanted
        self._asked_sums.append(_AskedSum(source, number, epoch, ended, (unit, parameter), first, count))
        self._answer_sums()

    def sent(self, dispatch: Dispatch) -> None:
        """Note that a gradient has been read, so that its memory is free."""
        self._count(-self._sending.pop(dispatch))

    def arrived(self, delivery: Delivery) -> None:
        """Add a block that has arrived."""
        offer, block, memory = self._reading.pop(delivery.number)
        if offer.epoch == self._epoch and not delivery.failed:
            copies = self._add(offer, block, memory.view(offer.dtype))
            self._then(copies, functools.partial(_nothing, memory))
            offer.reading -= 1
            if not offer.reading and not offer.blocks:
                self._take(self._turns.taken(offer.key))
        del memory  # so that others find room
        self._go_on()

    # --- inside -----------------------------------------------------------------------------------------

    def _take(self, given: list[tuple[Key, _Offer]]) -> None:
        """Add those of the `given` shards that are in RAM that this rank can read; append others to `_ready`.

        Each addition may give further shards their turn, which are treated alike.
        """
        turns = deque(given)
        while turns:
            key, offer = turns.popleft()
            if offer.here is None:
                self._ready.append(offer)
                continue
            if self._unmapped(offer):
                continue
            began = time.perf_counter_ns()
            copies = self._add(offer, self._pages[key[0]].pieces(key[1]), offer.here)
            self._then(copies, functools.partial(self._was_read, offer, began))
            turns.extend(self._turns.taken(key))

    def _unmapped(self, offer: _Offer) -> bool:
        """Whether a shard is in a mate's device memory that this rank, which closes its runtime, has left."""
        if not offer.there or offer.source == self._share.rank:
            return False
        return self._windows is None or offer.source not in self._windows.devices

    def _was_read(self, offer: _Offer, began: int) -> None:
        """Give back the bytes of a shard that has been read. began: when it was added."""
        assert offer.here is not None
        if offer.source != self._share.rank:
            assert self._windows is not None
            if not offer.there:
                self._windows.forget(offer.source, offer.here)
            self._wire.copied(offer.source, "gradients", offer.key[0], offer.here.nbytes, began)
            self._wire.post(offer.source, MessageKind.TAKEN, offer.token)
        offer.here = None
        if offer.epoch == self._epoch:
            self._count(-offer.room)

    def _go_on(self) -> None:
        """Read the blocks of `_ready` for which there is room, and answer requests for sums."""
        while offer := next((each for each in self._ready if self._read(each)), None):
            if not offer.blocks:
                self._ready.remove(offer)
        if self._asked_sums:
            self._answer_sums()
        self._wire.failure_event.notify()

    def _answer_sums(self) -> None:
        """Answer those requests whose sums are complete; keep the others."""
        waiting, self._asked_sums = self._asked_sums, []
        for each in waiting:
            if each.epoch < self._epoch:
                self._wire.refuse(each.source, each.number, _cleared())
            elif each.epoch > self._epoch or not self._turns.complete(each.key, each.ended):
                self._asked_sums.append(each)
            else:
                self._answer(each)

    def _answer(self, asked: _AskedSum) -> None:
        unit, parameter = asked.key
        page = self._pages[unit]
        found = self._gradients.elements(page, parameter, asked.first, asked.numel)
        there = torch.tensor([found is not None], dtype=torch.uint8, device="cpu")
        if found is None:
            found = page.blank(parameter, asked.numel)
        pieces = [there, found.view(torch.uint8)]
        self._wire.deliver(asked.source, asked.number, pieces, "gradients", unit=unit)

    def _blocks(self, offer: _Offer) -> deque[_Block]:
        """Group the pieces of a parameter that this rank owns into blocks of at most `_block_bytes` bytes."""
        found: deque[_Block] = deque()
        nbytes, (unit, parameter) = 0, offer.key
        for chunk_index, piece in self._pages[unit].pieces(parameter):
            size = piece.count * offer.dtype.itemsize
            if not found or nbytes + size > self._block_bytes:
                found.append([])
                nbytes = 0
            found[-1].append((chunk_index, piece))
            nbytes += size
        return found

    def _read(self, offer: _Offer) -> bool:
        """Read the next block of a shard from its stream. Returns False if there is no room for it now, or if
        other shards are before it in its lane.
        """
        lane = self._lanes[offer.source, offer.lane]
        if lane[0] is not offer:
            return False
        nbytes = _bytes(offer.blocks[0], offer.dtype)
        if self._room.largest_free >= nbytes:
            with self._room.lease(nbytes) as lease:
                memory = lease.residency()
        elif self._reading or self._going_up:
            return False  # an arrival, or the end of a copy, will make room
        else:  # what keeps the room is no shard, so that nothing would come of a wait
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        delivery = self._wire.pull(offer.source, offer.lane, memory, label="gradients", unit=offer.key[0])
        self._reading[delivery.number] = offer, offer.blocks.popleft(), memory
        offer.reading += 1
        if not offer.blocks:
            lane.popleft()
        return True

    def _add(
        self, offer: _Offer, block: Sequence[tuple[int, Piece]], gradient: torch.Tensor
    ) -> Sequence[Transfer]:
        """Add consecutive pieces of a shard. gradient: flat, the gradient of these pieces. Returns the copies
        to the device that still read it.
        """
        unit, _ = offer.key
        last, done = offer.source == self._share.ranks - 1, 0
        copies: list[Transfer] = []
        for chunk_index, piece in block:
            part = gradient[done : done + piece.count]
            done += piece.count
            try:
                copies += self._scheduler.accumulate_piece(
                    unit, chunk_index, piece, part, last=last, there=offer.there
                )
            except InfinityError:
                return copies  # the gradients of the step are lost; step() raises the error on all ranks
        if last:
            self.fresh.setdefault(unit, set()).update(piece.parameter for _, piece in block)
        return copies

    def _idle(self) -> bool:
        under_way = self._reading or self._ready or self._outgoing or self._sending or self._going_up
        return not under_way and self._turns.drained(self.ended)

    def _count(self, nbytes: int) -> None:
        self._waiting_bytes += nbytes
        if nbytes <= 0:  # also bytes that do not count may be awaited
            self._wire.failure_event.notify()

    def _late(self, what: str) -> RankDivergence:
        return RankDivergence(
            f"No rank {what} any more, for {self._wire.failure_event.timeout:g} s.",
            "Have all ranks run the same number of backwards before step(), clip_grad_norm_ or zero_grad(); "
            f"{TIMEOUT_VARIABLE} sets how long a rank waits, in seconds.",
        )


def _bytes(block: _Block, dtype: torch.dtype) -> int:
    return sum(piece.count for _, piece in block) * dtype.itemsize


def _nothing(gradient: torch.Tensor) -> None:
    """Do nothing, but keep a gradient's memory until then."""


def _cleared() -> RankDivergence:
    return RankDivergence(
        "A gradient was asked for after it was cleared.",
        "Call runtime.optimizer.zero_grad() on all ranks, or on none.",
    )
