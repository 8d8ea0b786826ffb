"""Homes: decides which tier is the home of each page, and finds the smallest budgets that are enough. Pure.

For devices that run updates, infinity/planning/twin_flow.py then exchanges some homes.

[Note: one order, two cuts]
All pages stand in one line: first all parameter pages, then all gradient pages, then all optimizer pages,
each kind in the order of units. If a step is known to have only one backward, optimizer pages come before
gradient pages. Two cuts divide the line into three parts. The first part goes to the tier that computes,
the last part to the NVMe tier, and the part between the cuts must fit the host tier. As a budget grows,
pages only move to tiers nearer to compute. So a larger budget never refuses a model that a smaller budget
accepted, and the smallest sufficient budget is exact for each way to divide the model. In the end pages are
placed first-fit, so that some pages behind a cut may fill room that is left in nearer tiers.

With commits, the NVMe tier holds images of all parameter and optimizer pages, wherever these pages are at
home (infinity/planning/slab_layout.py). Behind the second cut only gradient pages then take further bytes of
the tier. These bytes, too, never grow as the cut moves along the line, so that all of the above still holds.

Speculative updates need a second place for the trained bytes of parameter and optimizer pages. On NVMe a page
takes it with its home, and so do parameter pages in RAM, which are small beside the states. On the device no
update is speculative. The second places of optimizer pages in RAM get what all pages leave
(`speculating` in infinity/planning/planner.py), because a page in RAM gains more than its second place.

With several ranks the line consists of the homes on one rank, which hold whole pages or only the rank's part
(infinity/layout/shards.py). If the homes of parameters hold parts, the model can use none of them in place.
The pool of resident pages then has room for whole pages, wherever the cut is. That is the same number of
bytes at every cut, so that all of the above still holds.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from infinity.config import round_up
from infinity.cpu_adam import BLOCK
from infinity.device_update.table import largest_workspace
from infinity.formats.muon import bytes_in_ram
from infinity.formats.optimizer_rules import Rule, StateFormat
from infinity.layout.chunks import Division, RegionSize, build, page_bytes, region_sizes
from infinity.layout.shards import Share
from infinity.layout.units import Grouping, Survey, bytes_away
from infinity.planning.placement import LEAST, LEAST_IN_RAM, WORKING_ROOMS, Kind, Placement, Room, WorkingRoom
from infinity.tiers import PAGE_ALIGNMENT, Tier

_CHUNKS = tuple(1 << 20 >> shift for shift in range(0, 9, 2))
"""Lengths of chunks, in elements, in the order in which the search tries them."""

_LONG_CHUNK = 1 << 22
"""Elements of a long chunk. Long chunks are tried for devices with memory of their own and for several ranks.
On such a device the update of any chunk takes some 50 Python calls, for which the step waits, so fewer and
longer chunks are better. 7B parameters have some 1,700 long chunks, whose calls take a hundredth of a step.
Ranks send each other a few messages for each chunk, and these cost more than its bytes.
"""

_SHORT_CHUNK = 1 << 16
"""Elements below which the calls and waits for a chunk take longer than a disk takes for its bytes. A step of
10M with 162 MiB took 2.0 to 2.6 times as long with chunks of 4,096 and staging for two of them as with chunks
of 65,536 and staging for one.
"""

_LONG_SHARE, _LONG_SHARE_OF_RANKS = 64, 8
"""Long chunks are tried only if two of their updates take at most the bytes of host RAM divided by this
number. The second number is for several ranks.
"""

_LARGEST_UNIT = 1 << 30
_SMALLEST_UNIT = 64 << 10
_FEWEST_UNITS = 8

_LARGEST_TRANSIT_BUFFER = 4 << 20
"""Bytes of the largest transit buffer. Disks and links reach their full rate with transfers of this size,
which is small compared with a page.
"""

_LARGEST_ITEM = 4
"""Bytes of an element of float32, the largest dtype of gradients."""

_SMALLEST_TRANSIT_BUFFER = _LARGEST_ITEM * BLOCK
"""Bytes of the smallest transit buffer, and of the smallest landing."""


_STAGING_SHARE = 4
"""Staging takes at most the host budget divided by this number, or two chunk updates."""

_LEAVING_SHARE = 64
"""Gradients that leave the device take at most the device budget divided by this number."""

VISITORS = 5
"""Number of chunks whose optimizer states the device has room for while they visit it: while some are on
their way up, one is updated and others are on their way home.
"""

_VISITING_SHARE = 8
"""Chunks visit the device only if their states, and the gradients that wait for them there, take at most the
device budget divided by this number.
"""

_MOST_LEAVING = 512 << 20
"""The most bytes of gradients that leave the device. A link of 50 GB/s moves them in 11 ms: the backward of a
large unit may be so much faster than the link before one of its hooks waits.
"""

_LANDING_SHARE = 256
"""The landings take at most the host budget divided by this number, or two of the smallest."""

_LARGEST_LANDING = 16 << 20
"""Bytes of the largest landing: long enough that what each block costs is small beside its copy."""

_EXCHANGE_BUFFERS = 8
"""Number of exchange buffers where memory is not at its least: enough for several transfers to be on their
way while others are read or added.
"""

_LARGEST_EXCHANGE_BLOCK = 32 << 20
"""Bytes of the longest payload between ranks where memory is not at its least. Networks reach their full rate
with it, and a message's fixed cost is small beside it.
"""

_EXCHANGE_SHARE = 128
"""An exchange buffer takes at most the host budget divided by this number, or a chunk's gradients."""


class _Buffers(NamedTuple):
    """Bytes of working buffers."""

    staging: int
    transit_buffer: int
    transit: int
    leaving: int
    visiting: int
    staying: int
    landing: int
    squares: int
    exchange_block: int
    exchange: int
    in_ram: int
    """Bytes of host RAM that those of these take which are there, of the matrix that Muon updates, and of the
    gradients of tied tiles that wait there.
    """

    @property
    def there(self) -> int:
        """Bytes of device memory that those of these take which are there."""
        return self.leaving + self.visiting + self.staying


class Candidate:
    """One way to divide a model into units and chunks, with the bytes of its pages and working buffers."""

    def __init__(self, search: Search, grouping: Grouping, chunk_elements: int) -> None:
        """chunk_elements: greatest length of a chunk in elements, as for `layout.chunks.build`."""
        self.grouping, self.chunk_elements = grouping, chunk_elements
        self._search, self._share = search, search.share
        rule, ranks = search.rule, search.share.ranks
        units = [search.regions(members) for _, members in grouping]
        self.update_bytes = self._largest_unit = self._largest_visit = 0
        """Bytes of the largest chunk update; of the updates of all chunks of one unit on this rank, for the
        unit where they are most; and of what a chunk brings to the device to be updated there, at most.
        """
        self._transit_buffer = _SMALLEST_TRANSIT_BUFFER
        """Bytes of one transit buffer with one rank: the largest chunk's parameters, within limits."""
        self._matrix_bytes = bytes_in_ram(rule.matrix) if rule is not None else 0
        self._tile_sums = bytes_away(search.surveyed.parameters)[0] if rule is not None else 0
        self._brings_down = search.apart and rule is not None
        """Whether gradients have to be copied from the device before the CPU can use them."""
        self._squares = search.squares_bytes(chunk_elements) if self._brings_down else 0
        shards = [region.shard_elements for unit in units for region in unit] if ranks > 1 else []
        self._longest_shard = round_up(max(shards, default=0) * _LARGEST_ITEM, PAGE_ALIGNMENT)
        """Bytes of the longest shard of a region in float32; 0 with one rank."""
        self._whole = [page_bytes(unit) for unit in units]
        """Bytes of each unit's whole parameter page, of which this rank's home may hold only some chunks."""
        self._pages: dict[Kind, list[int]] = {kind: [] for kind in Kind}
        self._second: dict[Kind, list[int]] = {kind: [] for kind in Kind}
        """For each kind and unit, the bytes of the page's second place; 0 unless updates are speculative."""
        for unit in units:
            self._measure(unit)
        self._durable = sum(map(self._images, range(len(units)), units)) if search.commits else 0
        """Bytes of the NVMe tier that the images of all pages take; 0 without commits."""
        self._line = list(itertools.product(search.kinds, range(len(units))))
        self._ends = [0, *itertools.accumulate(self._pages[kind][unit] for kind, unit in self._line)]
        """Item n is the bytes of the first n pages of the line."""
        placed = [self._pages[kind][unit] + self._second[kind][unit] for kind, unit in self._line]
        self._in_ram = [
            0,
            *itertools.accumulate(
                self._pages[kind][unit] + self._second_in_ram(kind, unit) for kind, unit in self._line
            ),
        ]
        """Item n is the bytes of the first n pages of the line in host RAM, with their second places."""
        own = (Kind.GRADIENT,) if search.commits else tuple(Kind)
        backwards = (
            nbytes * (kind in own)
            for nbytes, (kind, _) in zip(reversed(placed), reversed(self._line), strict=True)
        )
        self._sunk = [*itertools.accumulate(backwards, initial=self._durable)][::-1]
        """Item n is the bytes that the NVMe tier needs if all pages but the first n of the line are at home
        there. It never grows with n.
        """
        self._together = search.surveyed.together(grouping)
        self._residents: dict[int, list[int]] = {}

    def _measure(self, unit: Sequence[RegionSize]) -> None:
        gradient = optimizer = together = 0
        rule, share = self._search.rule, self._share
        for region in unit:
            for count, times in region.counts(self.chunk_elements):
                update = round_up(count * region.dtype.itemsize, PAGE_ALIGNMENT)
                self._transit_buffer = max(self._transit_buffer, min(update, _LARGEST_TRANSIT_BUFFER))
                if rule is not None and region.trainable:
                    itemsize = self._search.gradient_dtype(region.dtype).itemsize
                    gradients = round_up(count * itemsize, PAGE_ALIGNMENT)
                    states = StateFormat(rule.arrays(region.dtype), count).nbytes
                    update += gradients + states
                    visit = states + (0 if self._search.gradients_wait else gradients)
                    self._largest_visit = max(self._largest_visit, visit)
                    updated = times * (share.ranks if share.whole_states else 1)
                    gradient += times * len(share.cut_shards) * gradients
                    optimizer += updated * states
                    together += updated * update
                self.update_bytes = max(self.update_bytes, update)
        part = max(PAGE_ALIGNMENT, sum(region.nbytes for region in unit) // share.ranks)
        self._pages[Kind.PARAMETER].append(page_bytes(unit) if share.whole_parameters else part)
        self._pages[Kind.GRADIENT].append(gradient)
        self._pages[Kind.OPTIMIZER].append(optimizer)
        trained = self._trained(unit) if self._search.speculative else 0
        self._second[Kind.PARAMETER].append(trained)
        self._second[Kind.GRADIENT].append(0)
        self._second[Kind.OPTIMIZER].append(optimizer * self._search.speculative)
        self._largest_unit = max(self._largest_unit, together)

    def _second_in_ram(self, kind: Kind, unit: int) -> int:
        return self._second[kind][unit] if kind is Kind.PARAMETER else 0

    def _images(self, index: int, unit: Sequence[RegionSize]) -> int:
        """Bytes of the images of one unit's pages; see `slab_layout` in infinity/planning/slab_layout.py."""
        others = 1 + self._search.speculative
        trained, states = self._trained(unit), self._pages[Kind.OPTIMIZER][index]
        return self._pages[Kind.PARAMETER][index] + states + others * (trained + states)

    def _trained(self, unit: Sequence[RegionSize]) -> int:
        """Bytes of a unit's parameter page that this rank updates."""
        trainable = sum(region.nbytes for region in unit if region.trainable)
        return self._share.kept(trainable, whole=self._share.whole_states)

    def _buffers(self, level: WorkingRoom, room: Room) -> _Buffers:
        host, device, least = room.host, room.device, level.transit_buffers == 1
        staging = leaving = visiting = staying = landing = squares = 0
        moves = device is not None or (level.nvme and room.nvme > 0)
        if self._search.rule is not None and moves:  # else each page is updated at home
            quarter = host // _STAGING_SHARE // PAGE_ALIGNMENT * PAGE_ALIGNMENT
            staging = max(2 * self.update_bytes, min(quarter, self._largest_unit))
            if level.updates is not None:
                staging = level.updates * self.update_bytes
        if device is not None and self._brings_down:
            squares, blocks = self._squares, 1
            if not least:
                leaving = min(device // _LEAVING_SHARE, _MOST_LEAVING) // PAGE_ALIGNMENT * PAGE_ALIGNMENT
                if self._search.visits:
                    visiting, staying = self._visiting(device)
                most = min(host // _LANDING_SHARE // 2, _LARGEST_LANDING)
                blocks = max(1, most // _SMALLEST_TRANSIT_BUFFER)
            landing = 2 * blocks * _SMALLEST_TRANSIT_BUFFER
        block = self._exchange_block(host, least=least)
        # What other ranks send to a device of its own memory comes through transit buffers.
        transit_buffer = max(self._transit_buffer, 0 if device is None or least else block)
        transit = transit_buffer * (1 + level.transit_buffers * (device is not None))
        exchange = (2 if least else _EXCHANGE_BUFFERS) * block
        in_ram = staging + transit + landing + squares + exchange + self._matrix_bytes
        in_ram += self._tile_sums * (device is not None)
        there = leaving, visiting, staying
        return _Buffers(staging, transit_buffer, transit, *there, landing, squares, block, exchange, in_ram)

    def _visiting(self, device: int) -> tuple[int, int]:
        """Bytes of `Placement.visiting_bytes` and `staying_bytes`. device: bytes of device memory.

        If gradients stay, those of two units do: those of one are used while those of the next one come.
        """
        visiting = VISITORS * self._largest_visit
        staying = 2 * max(self._pages[Kind.GRADIENT]) if self._search.gradients_wait else 0
        return (visiting, staying) if visiting + staying <= device // _VISITING_SHARE else (0, 0)

    def _exchange_block(self, host: int, *, least: bool) -> int:
        """Bytes of the longest payload between ranks: a chunk's gradients at least, for these are added as a
        whole. host: bytes of host RAM. least: whether memory is at its least.
        """
        chunk = min(self.chunk_elements * _LARGEST_ITEM, self._longest_shard)
        if least:
            return chunk
        room = min(_LARGEST_EXCHANGE_BLOCK, host // _EXCHANGE_SHARE) // PAGE_ALIGNMENT * PAGE_ALIGNMENT
        return max(chunk, min(room, self._longest_shard))

    def far_room(self, *, unified: bool, nvme: bool) -> Room:
        """Return a room with the least device memory, no host RAM, and NVMe for all pages.

        unified: whether device and host are the same RAM; if so, the room's device memory is None. nvme:
        whether pages may rest on NVMe; if not, the room has no bytes of NVMe.
        """
        near = self._near(0, LEAST.pages)
        return Room(None if unified else near, 0, self._sunk[0] * nvme)

    def _resident(self, pages: int) -> list[int]:
        """Return the bytes of the pool of resident pages for each way to cut the line of all pages in two.

        Item n is for the cut behind the first n pages. Pages before the cut are at home where the model
        computes, and need no room in the pool. The item is the larger of two sums over the parameter pages
        behind the cut: the bytes of the `pages` largest ones, and the most bytes of those that must be
        resident at the same time. If homes hold parts of parameter pages, all pages need room in the pool,
        and all items are equal.
        """
        if pages not in self._residents:
            parameters = self._whole
            largest: list[int] = []
            backwards = [0]
            for nbytes in reversed(parameters):
                heapq.heappush(largest, nbytes)
                out = heapq.heappop(largest) if len(largest) > pages else 0
                backwards.append(backwards[-1] + nbytes - out)
            others = len(self._ends) - 1 - len(parameters)
            found = [*reversed(backwards), *[0] * others]
            for units in self._together:
                for place in range(units[-1] + 1):
                    found[place] = max(found[place], sum(parameters[unit] for unit in units if unit >= place))
            if not self._share.whole_parameters:
                found = [found[0]] * len(found)
            self._residents[pages] = found
        return self._residents[pages]

    def _near(self, cut: int, pages: int, *, unified: bool = False) -> int:
        """Return the bytes of the computing tier that are taken when the first `cut` pages of the line have
        their homes there: those of these homes and of the pool of resident pages. Never falls as `cut` grows.

        pages: as in `_resident`, the number of parameter pages for which the pool has room. unified: whether
        that tier is host RAM.
        """
        return (self._in_ram if unified else self._ends)[cut] + self._resident(pages)[cut]

    def _cuts(self, room: Room, level: WorkingRoom) -> tuple[int, int] | None:
        """Cut the line of all pages at two places, each as far along the line as `room` allows.

        Returns (number of pages before the first cut, number before the second), or None if the pages do not
        fit. Pages before the first cut are at home in device memory, those between the cuts in host RAM, and
        the others on NVMe. If device and host are the same RAM, the first number is 0.
        """
        buffers = self._buffers(level, room)
        working = buffers.in_ram
        if working > room.host or buffers.staging > level.share * room.host:
            return None
        if room.device is None:
            near = 0
            far = self._last(lambda cut: self._near(cut, level.pages, unified=True), room.host - working)
        else:
            near = self._last(lambda cut: self._near(cut, level.pages), room.device - buffers.there)
            far = self._last(lambda cut: self._in_ram[cut] - self._in_ram[max(near, 0)], room.host - working)
        if min(near, far) < 0 or self._sunk[far] > room.nvme:
            return None
        if self._ends[far] < self._ends[-1] and not level.nvme:
            return None
        computing, cut = (room.host, far) if room.device is None else (room.device, near)
        if self._resident(level.pages)[cut] > level.share * computing:
            return None
        return near, far

    def needed(self, tier: Tier, room: Room) -> int | None:
        """The fewest bytes of `tier` that are enough for all pages, with the smallest working buffers.

        room: the bytes that the other tiers have. None if no number of bytes is enough.
        """
        if tier is Tier.NVME:
            if self._cuts(replace(room, nvme=self._durable), LEAST_IN_RAM) is not None:
                return self._durable
            return self._needed(tier, replace(room, nvme=max(1, room.nvme)), LEAST)
        if room.nvme < self._durable:
            return None
        levels = (LEAST_IN_RAM, LEAST) if room.nvme else (LEAST_IN_RAM,)
        return _least(self._needed(tier, room, level) for level in levels)

    def _needed(self, tier: Tier, room: Room, level: WorkingRoom) -> int | None:
        buffers = self._buffers(level, room)
        working = buffers.in_ram
        if level.nvme:  # all pages behind this cut fit NVMe
            bottom = bisect.bisect_left(self._sunk, -room.nvme, key=lambda nbytes: -nbytes)
        else:
            bottom = bisect.bisect_left(self._ends, self._ends[-1])
        if tier is Tier.DEVICE:
            if working > room.host:
                return None
            near = bisect.bisect_left(self._in_ram, self._in_ram[bottom] - (room.host - working))
            return self._near(near, level.pages) + buffers.there
        if room.device is None:
            if tier is Tier.HOST:
                return working + self._near(bottom, level.pages, unified=True)
            far = self._last(lambda cut: self._near(cut, level.pages, unified=True), room.host - working)
        else:
            near = self._last(lambda cut: self._near(cut, level.pages), room.device - buffers.there)
            if near < 0:
                return None
            if tier is Tier.HOST:
                return working + max(0, self._in_ram[bottom] - self._in_ram[near])
            far = self._last(lambda cut: self._in_ram[cut] - self._in_ram[near], room.host - working)
        return None if far < 0 else self._sunk[far]

    def _last(self, need: Callable[[int], int], room: int) -> int:
        """The largest cut for which `need(cut)` is at most `room` bytes; -1 if there is none. `need` must not
        decrease as the cut grows.
        """
        return bisect.bisect_right(range(len(self._ends)), room, key=need) - 1

    def place(self, room: Room, level: WorkingRoom) -> Placement | None:
        """Give every page a home in `room`, with working buffers as `level` says; None if they do not fit."""
        cuts = self._cuts(room, level)
        if cuts is None:
            return None
        computes_in = Tier.HOST if room.device is None else Tier.DEVICE
        resident = self._resident(level.pages)[cuts[computes_in is Tier.HOST]]
        buffers = self._buffers(level, room)
        left = {Tier.HOST: room.host - buffers.in_ram}
        if room.device is not None:
            left[Tier.DEVICE] = room.device - buffers.there
        left[computes_in] -= resident
        homes: list[dict[Kind, Tier | None]] = [{} for _ in self.grouping]
        for kind, unit in self._line:
            homes[unit][kind] = _first_fit(self._pages[kind][unit], left, self._second_in_ram(kind, unit))
        away = [
            0 if home[Kind.PARAMETER] is computes_in and self._share.whole_parameters else nbytes
            for nbytes, home in zip(self._whole, homes, strict=True)
        ]
        together = (sum(away[unit] for unit in units) for units in self._together)
        return Placement(
            layout=build(
                self._search.surveyed,
                self.grouping,
                self.chunk_elements,
                self._share.ranks,
                self._share.cut_shards,
            ),
            homes=tuple(homes),
            chunk_update_bytes=self.update_bytes,
            staging_bytes=buffers.staging,
            transit_buffer_bytes=buffers.transit_buffer,
            transit_bytes=buffers.transit,
            resident_bytes=max(sum(heapq.nlargest(level.pages, away)), *together, 0),
            leaving_bytes=buffers.leaving,
            visiting_bytes=buffers.visiting,
            staying_bytes=buffers.staying,
            landing_bytes=buffers.landing,
            squares_bytes=buffers.squares,
            exchange_block_bytes=buffers.exchange_block,
            exchange_bytes=buffers.exchange,
        )


@dataclass(kw_only=True, eq=False)
class Search:
    """Searches for a placement among the ways to divide a model into units and chunks. Large units are tried
    before small units, and long chunks before short chunks.
    """

    surveyed: Survey
    gradient_dtype: Callable[[torch.dtype], torch.dtype]
    """Maps the dtype of a parameter page to that of its gradients; see `Precision.gradient_dtype`."""
    rule: Rule | None
    """The optimizer's rule; None for inference."""
    accumulation: int | None
    """Number of micro-batches in a step; None if unknown."""
    apart: bool
    """Whether the device has memory that the CPU cannot use, so that gradients are copied from it."""
    commits: bool
    """Whether the NVMe tier holds the durable images of pages."""
    speculative: bool
    """Whether updates are speculative, so that trained bytes need a second place."""
    visits: bool
    """Whether the device can update chunks whose optimizer states are at home in host RAM."""
    gradients_wait: bool
    """Whether the gradients of these chunks wait there, and do not come up with the states."""
    share: Share
    prefer: Division | None = None
    """A division to try before all others; ignored if it is of another model."""

    def __post_init__(self) -> None:
        self._groupings = _groupings(self.surveyed)
        self._chunks = list(dict.fromkeys(_most_useful(self.surveyed, length) for length in _CHUNKS))
        """The distinct chunk lengths to try, in elements, the longest first."""
        several = self.share.ranks > 1
        self._long = _most_useful(self.surveyed, _LONG_CHUNK) if self.apart or several else 0
        """Elements of a long chunk; 0 if long chunks are not tried."""
        self._long_share = _LONG_SHARE_OF_RANKS if several else _LONG_SHARE
        self._candidate = functools.cache(
            lambda grouping, chunk: Candidate(self, self._groupings[grouping], chunk)
        )
        self.regions = functools.cache(self._regions)
        """Function from the indices of a unit's parameters to the sizes of the unit's regions."""
        self.smallest = functools.cache(self._smallest)
        """Function (unified, nvme) as `_smallest`; the dict that it returns is shared."""
        alike = None if self.prefer is None else self._of(self.prefer)
        self._preferred = [] if alike is None else [alike]
        """The candidate that is tried before all others, if there is one."""

    def _regions(self, members: tuple[int, ...]) -> tuple[RegionSize, ...]:
        return region_sizes([self.surveyed.parameters[index] for index in members], self.share.ranks)

    def squares_bytes(self, chunk_elements: int) -> int:
        """Bytes of the sums of squares of all gradients that this rank keeps, wherever chunks cut them, and
        of a copy of `DeviceTable.stop`.
        """
        trained = [each.numel for each in self.surveyed.parameters if each.trainable]
        ranks = 1 if self.share.whole_gradients else self.share.ranks
        return round_up(largest_workspace(trained, chunk_elements, ranks).lengths[0] + 8, PAGE_ALIGNMENT)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of pages in the order in which they get room, the fastest tiers first.

        With one micro-batch, optimizer states come before gradients: both the read and the write of a byte of
        states fall into the next forward, whereas a byte of gradients is written during the backward and read
        in the next forward. Every further micro-batch reads and writes each byte of gradients once more.
        """
        if self.accumulation == 1:
            return (Kind.PARAMETER, Kind.OPTIMIZER, Kind.GRADIENT)
        return tuple(Kind)

    def place(self, room: Room) -> Placement | None:
        """Find the first placement that fits `room`; None if there is none.

        WORKING_ROOMS (infinity/planning/placement.py) gives the order: first placements without pages on
        NVMe, and those with large working buffers before those with small ones. With equal buffers, large
        units come before small units, and long chunks before short chunks. With pages on NVMe, chunks of less
        than _SHORT_CHUNK elements come after all others, with buffers of any size. The preferred division
        comes before all of these.
        """
        tries = itertools.chain(
            itertools.product(WORKING_ROOMS, self._preferred),
            self._tries(room, short=False),
            self._tries(room, short=True),
        )
        return _first(candidate.place(room, level) for level, candidate in tries)

    def _tries(self, room: Room, *, short: bool) -> Iterator[tuple[WorkingRoom, Candidate]]:
        """The tries of `place`, but for the preferred division. short: those with pages on NVMe and short
        chunks; else all others.
        """
        for level in WORKING_ROOMS:
            for candidate in self._useful(room):
                if short is (level.nvme and candidate.chunk_elements < _SHORT_CHUNK):
                    yield level, candidate

    def place_alike(self, placement: Placement, room: Room) -> Placement | None:
        """Find the first placement that fits `room` and divides the model as `placement` does."""
        candidate = self._of(Division.of(placement.layout))
        assert candidate is not None  # it is a division of this model
        return _first(candidate.place(room, level) for level in WORKING_ROOMS)

    def prefers(self, placement: Placement) -> bool:
        """Whether a placement has the preferred division."""
        return bool(self._preferred) and Division.of(placement.layout) == self.prefer

    def needed(self, tier: Tier, room: Room) -> int | None:
        """The fewest bytes of `tier` with which `place` finds a placement, if the other tiers have the bytes
        that `room` gives them; None if no number of bytes is enough.
        """
        # Images may be smaller with long chunks, because there are fewer gaps between parameters.
        long = self.commits and tier is Tier.NVME
        candidates = self._useful(room) if long else self._without_long()
        return _least(each.needed(tier, room) for each in itertools.chain(self._preferred, candidates))

    def _smallest(self, unified: bool, nvme: bool) -> Mapping[Tier, int]:
        """The budgets, in bytes, that are just enough for the model: with less of one of them and the others
        as they are, no placement would fit. Of several such combinations, this is the one with the fewest
        bytes of device memory and host RAM in sum, and among equals the one with the fewest bytes of NVMe.

        unified: whether device and host are the same RAM; if so, there is no entry for the device. nvme:
        whether pages may rest on NVMe.
        """
        found = []
        for candidate in itertools.chain(self._preferred, self._without_long()):
            room = candidate.far_room(unified=unified, nvme=nvme)
            host = candidate.needed(Tier.HOST, room)
            if host is not None:
                found.append((host + (room.device or 0), room.nvme, replace(room, host=host)))
        best = min(found, key=lambda each: each[:2])[2]
        for tier in (Tier.HOST, Tier.DEVICE, Tier.NVME):  # another candidate may need less of a tier
            if getattr(best, tier.value):
                needed = self.needed(tier, best)
                best = best if needed is None else replace(best, **{tier.value: needed})
        sizes = {Tier.DEVICE: best.device, Tier.HOST: best.host, Tier.NVME: best.nvme or None}
        return {tier: nbytes for tier, nbytes in sizes.items() if nbytes is not None}

    def _useful(self, room: Room) -> Iterator[Candidate]:
        """All candidates that `place` tries. For each way to form units, long chunks come first if the host
        tier has room for them.
        """
        for grouping in range(len(self._groupings)):
            if self._long > self._chunks[0]:
                long = self._candidate(grouping, self._long)
                if 2 * long.update_bytes * self._long_share <= room.host:
                    yield long
            for chunk in self._chunks:
                yield self._candidate(grouping, chunk)

    def _without_long(self) -> Iterator[Candidate]:
        """All candidates without long chunks. Wherever long chunks fit, shorter ones fit, too."""
        for grouping, chunk in itertools.product(range(len(self._groupings)), self._chunks):
            yield self._candidate(grouping, chunk)

    def _of(self, division: Division) -> Candidate | None:
        """The candidate with this division; None if the division is of another model."""
        grouping = division.grouping(self.surveyed)
        return None if grouping is None else Candidate(self, grouping, division.chunk_elements)


def _first_fit(nbytes: int, left: dict[Tier, int], second: int) -> Tier | None:
    """Take a page's bytes from the nearest tier that has them, and in RAM those of its second place."""
    if nbytes == 0:
        return None
    for tier, needed in ((Tier.DEVICE, nbytes), (Tier.HOST, nbytes + second)):
        if needed <= left.get(tier, -1):
            left[tier] -= needed
            return tier
    return Tier.NVME


def _first(found: Iterable[Placement | None]) -> Placement | None:
    return next((each for each in found if each is not None), None)


def _least(found: Iterable[int | None]) -> int | None:
    return min((each for each in found if each is not None), default=None)


def _groupings(surveyed: Survey) -> list[Grouping]:
    """The distinct ways to group modules into units, from the largest units to one unit for each module."""
    sizes = []
    size = min(surveyed.nbytes // _FEWEST_UNITS, _LARGEST_UNIT)
    while size >= _SMALLEST_UNIT:
        sizes.append(size)
        size //= 2
    return list(dict.fromkeys(surveyed.group(size) for size in (*sizes, 1)))


def _most_useful(surveyed: Survey, length: int) -> int:
    """Return `length`, or the length of a chunk that holds all trained parameters if that is less. Lengths
    are in elements.
    """
    trained = sum(parameter.numel for parameter in surveyed.parameters if parameter.trainable)
    return min(length, round_up(max(trained, 1), BLOCK))
