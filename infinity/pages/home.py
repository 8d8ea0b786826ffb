"""Home: where a page rests, what lies there, and the reads and writes of its bytes that are in flight.

[Note: order of requests]
The I/O engine does not order requests in flight. So a home keeps a list of its requests in flight. A new
read first waits for the writes that overlap it; a new write first waits for the reads and writes that
overlap it. A failed write leaves undefined bytes. So the home is then lost: every later use of the home
raises the write's error. The exception is a write of bytes of which the caller keeps a copy (`spare`): the
home is not lost, and the caller may write the bytes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from infinity.errors import InfinityError
from infinity.layout.shards import PageShard, kept_pieces
from infinity.pages.parts import PageParts, Ranges
from infinity.pages.slot_pair import SlotPair
from infinity.planning.placement import Kind
from infinity.planning.plan import Plan
from infinity.tiers import PAGE_ALIGNMENT, NvmeLease, Tier
from infinity.tiers.driver import Event
from infinity.tiers.link import Transfer

_NAMED = 3
"""The most arrays that one error names."""

_Entry = tuple[int, int, str, str, int, int]
"""(offset in the home, bytes, array, parameter, its first element there, number of elements)."""


@dataclass(slots=True)
class Outcome:
    """What has become of a speculative update: until it is confirmed, its writes may fail without loss."""

    confirmed: bool = False
    failed: bool = False


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A read or write in flight over bytes [start, end) of a home."""

    start: int
    end: int
    writes: bool
    transfer: Transfer
    lost: Callable[[InfinityError], None] | None = None
    """Function that is called with the error if this write fails and is not `spare`. None if nothing is to
    be called.
    """
    spare: bool = False
    """Whether the caller keeps a copy of the written bytes, so that a failure does not lose the home."""
    outcome: Outcome | None = None
    """The speculative update whose results are written; None if there is none."""


def _nothing(start: int, end: int) -> None:
    """Do nothing: the default of `Home.withdraw`."""


@dataclass(slots=True, eq=False)
class Home:
    """The place where a page rests: a range of bytes in one tier, and the requests in flight over it."""

    tier: Tier
    nbytes: int
    memory: torch.Tensor | None
    """The page's bytes in the tier's memory, uint8 (nbytes,); None if the tier is NVMe."""
    in_place: bool
    """Whether code on the CPU can use `memory`: the tier is host RAM, or the device shares the host's RAM."""
    nvme_lease: NvmeLease | None = None
    """The page's leased bytes on NVMe; None if the tier is not NVMe."""
    parts: PageParts = PageParts()  # noqa: RUF009
    """The durable page's parts. Empty if commits are off, and for gradients."""
    second: torch.Tensor | None = None
    """Memory, uint8, with the slots B of `pairs`; None if there are none."""
    pairs: Ranges[SlotPair] = Ranges()  # noqa: RUF009
    """The ranges of `memory` with two slots. See [Note: slots in RAM]."""
    shown: bool = False
    """Whether the model computes with `memory` itself, or other ranks copy from it."""
    computed: bool = False
    """Whether kernels on the device write to `memory`, or copies on the device read it, for which kernels
    wait. If so, a copy into `memory` waits for all kernels that were queued before the copy.
    """
    written: Event | None = None
    """An event after the last kernels that have written `memory` for an update; None if there were none."""
    describe: Callable[[int], str] | None = None
    """Function from an offset in the home to words for what lies in the 4096 bytes from there, for errors. It
    must not refer to the home, which would never be freed then.
    """
    withdraw: Callable[[int, int], object] = _nothing
    """Function to be called before bytes [start, end) of `memory` change: other processes may copy them until
    then.
    """
    failure: InfinityError | None = None
    in_flight: list[InFlightRequest] = field(default_factory=list)

    @staticmethod
    def of_nothing() -> Home:
        """Make the home of a page that has no bytes."""
        return Home(Tier.HOST, 0, torch.empty(0, dtype=torch.uint8, device="cpu"), True)

    def described(self, offset: int) -> Callable[[int], str] | None:
        """Return a function like `describe` whose argument counts from byte `offset` of the home; None if
        the home has no `describe`.
        """
        describe = self.describe
        return None if describe is None else lambda position: describe(offset + position)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a view of the newest bytes [offset, offset + nbytes), which lie in one slot."""
        (found,) = self.views(offset, nbytes)
        return found

    def views(self, offset: int, nbytes: int) -> list[torch.Tensor]:
        """Return views of the newest bytes [offset, offset + nbytes) of a home in memory, in order."""
        assert self.memory is not None
        if not self.pairs:
            return [self.memory[offset : offset + nbytes]]
        end, position = offset + nbytes, offset
        spans: list[tuple[bool, int, int]] = []

        def add(there: bool, first: int, last: int) -> None:
            if spans and spans[-1][0] == there and spans[-1][2] == first:
                first = spans.pop()[1]
            if first < last:
                spans.append((there, first, last))

        for pair in self.pairs.over(offset, end):
            if pair.newest:
                low, high = max(offset, pair.start), min(end, pair.end)
                add(False, position, low)
                add(True, pair.beside + low - pair.start, pair.beside + high - pair.start)
                position = high
        add(False, position, end)
        assert self.second is not None
        return [(self.second if there else self.memory)[first:last] for there, first, last in spans]

    def pair(self, start: int) -> SlotPair | None:
        """The pair of slots whose range begins at byte `start`; None if there is none."""
        return next((each for each in self.pairs.over(start, start + 1) if each.start == start), None)

    def pair_up(self, second: torch.Tensor, ranges: Iterable[tuple[int, int]]) -> None:
        """Give ranges of the home a second slot. second: memory for these slots. ranges: (start, bytes)."""
        beside, pairs = 0, []
        for start, nbytes in ranges:
            pairs.append(SlotPair(self, start, start + nbytes, beside))
            beside += nbytes
        self.second, self.pairs = second, Ranges(pairs)

    def busy(self, start: int, end: int, writing: bool) -> bool:
        """Whether a new request over bytes [start, end) would have to wait; see [Note: order of requests].

        writing: whether the new request is a write.
        """
        return bool(self._conflicts(start, end, writing))

    def settle(self, start: int, end: int, writing: bool) -> None:
        """Wait for the requests in flight that a new request over bytes [start, end) must not overtake.

        writing: whether the new request is a write. Raises the error of a request that fails. If an earlier
        write failed and the home's contents are lost, raises the error of that write.
        """
        for request in self._conflicts(start, end, writing):
            self.finish(request)
        if self.failure is not None:
            raise self.failure.again()

    def finish(self, request: InFlightRequest) -> None:
        """Wait for a request in flight and remove it from `in_flight`. Raises the request's error.

        A failed write loses the home, unless the write is `spare`; see [Note: order of requests]. If it is of
        a speculative update that is not confirmed, the update has failed, and nothing is raised. A request
        that is no longer in `in_flight` is ignored, so a request's error is raised once.
        """
        if request not in self.in_flight:
            return
        try:
            request.transfer.wait()
        except InfinityError as error:
            if request.outcome is not None and not request.outcome.confirmed:
                request.outcome.failed = True
                return
            if request.writes and not request.spare:
                self.failure = error.again()
                if request.lost is not None:
                    request.lost(error)
            raise
        finally:
            self.in_flight.remove(request)

    def renew(self) -> None:
        """Wait for the writes in flight, and forget that writes have failed. Called when the content of the
        home is not needed any more.

        Reads in flight go on, because a pending update may still need the old bytes.
        """
        for request in [each for each in self.in_flight if each.writes]:
            with contextlib.suppress(InfinityError):
                self.finish(request)
        self.failure = None

    def _conflicts(self, start: int, end: int, writing: bool) -> list[InFlightRequest]:
        kept, found = list[InFlightRequest](), list[InFlightRequest]()
        for each in self.in_flight:
            if each.writes or not each.transfer.done():
                kept.append(each)
                if each.start < end and start < each.end and (writing or each.writes):
                    found.append(each)
        self.in_flight = kept
        return found


def content_at(plan: Plan, unit: int, kind: Kind, offset: int) -> str:
    """Describe, for errors, the 4096 bytes from byte `offset` of the home of a unit's page: arrays,
    parameters and their elements.
    """
    found = []
    for start, nbytes, array, parameter, first, count in sorted(_entries(plan, unit, kind)):
        low, high = max(start, offset), min(start + nbytes, offset + PAGE_ALIGNMENT)
        if low < high:
            begin = first + (low - start) * count // nbytes
            end = first + min(count, -(-(high - start) * count // nbytes))
            found.append(f"{array} of {parameter} for its elements {begin} to {end}")
    if not found:
        return f"a page of {plan.layout.units[unit].name or 'the model'} without values"
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f", and {more} more" if more > 0 else "")


def _entries(plan: Plan, unit: int, kind: Kind) -> Iterator[_Entry]:
    layout, share = plan.layout.units[unit], plan.share
    if kind is Kind.PARAMETER:
        shard = PageShard(layout, share)
        for index, each in enumerate(layout.parameters):
            size, start = each.dtype.itemsize, layout.start(index)
            for held in shard.pieces(start, each.numel * size):
                first = (held.page_start - start) // size
                yield held.home_start, held.nbytes, "values", each.names[0], first, held.nbytes // size
        return
    of_states = kind is Kind.OPTIMIZER
    whole = share.whole_states if of_states else share.whole_gradients
    pieces = kept_pieces(layout, share, whole=whole)
    for index, each in enumerate(layout.parameters):
        for chunk_index, piece in pieces(index) if each.trainable else ():
            if not of_states:
                size = plan.gradient_dtype(each.dtype).itemsize
                start = plan.gradient_offset(unit, chunk_index) + piece.offset * size
                yield start, piece.count * size, "gradient", each.names[0], piece.start, piece.count
                continue
            form = plan.state_format(unit, chunk_index)
            for array in form.arrays:
                start, nbytes = form.place(array.name, piece.offset, piece.count)
                start += plan.state_offset(unit, chunk_index)
                yield start, nbytes, array.name, each.names[0], piece.start, piece.count
