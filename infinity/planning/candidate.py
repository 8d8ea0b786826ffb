"""Candidate: one way to divide a model into units and chunks, and the homes of pages that follow. Pure.

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

With several ranks the line consists of the homes on one rank, which hold whole pages or only the rank's part
(infinity/layout/shards.py). If the homes of parameters hold parts, the model can use none of them in place.
The pool of resident pages then has room for whole pages, wherever the cut is. That is the same number of
bytes at every cut, so that all of the above still holds.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from infinity.config import round_up
from infinity.cpu_adam import BLOCK
from infinity.formats.muon import bytes_in_ram
from infinity.formats.optimizer_rules import Rule, state_format
from infinity.layout.chunks import RegionSize, page_bytes, region_sizes
from infinity.layout.shards import ALONE, Share
from infinity.layout.units import Grouping, Survey
from infinity.planning.placement import LEAST, LEAST_IN_RAM, DtypeOf, Kind, Placement, Room, WorkingRoom
from infinity.tiers import PAGE_ALIGNMENT, Tier

_LARGEST_TRANSIT_BUFFER = 4 << 20
"""Bytes of the largest transit buffer, a buffer in host RAM through which pages pass from disk. Disks and
links reach their full rate with transfers of this size, which is small compared with a page.
"""

_LARGEST_ITEM = 4
"""Bytes of an element of float32, the largest dtype of gradients."""

_SMALLEST_TRANSIT_BUFFER = _LARGEST_ITEM * BLOCK
"""Bytes of the smallest transit buffer, a buffer in host RAM through which pages pass from disk: BLOCK
elements of float32, the largest dtype of gradients. The ring, the buffer through which gradients leave the
device, consists of parts of the same size.
"""


class Candidate:
    """One way to divide a model into units and chunks, with the bytes of its pages and working buffers."""

    def __init__(
        self,
        surveyed: Survey,
        grouping: Grouping,
        chunk_elements: int,
        gradient_dtype: DtypeOf,
        rule: Rule | None,
        *,
        line: Sequence[Kind],
        ring: bool = False,
        commits: bool = False,
        share: Share = ALONE,
    ) -> None:
        """Compute the bytes of pages and buffers for one grouping of parameters into units.

        surveyed: the model's parameters. chunk_elements: length of a stripe in elements. gradient_dtype:
        maps the dtype of a parameter page to the dtype of its gradients. rule: the optimizer's rule; None
        for inference. line: the kinds of pages in the order in which they get room, parameters first; see
        `line_of`. ring: whether gradients leave the device through a ring buffer. commits: whether the NVMe
        tier holds the durable images of pages. share: the rank whose homes and buffers are computed.
        """
        self.grouping = grouping
        self.chunk_elements = chunk_elements
        units = [
            region_sizes([surveyed.parameters[index] for index in members], chunk_elements, share.ranks)
            for _, members in grouping
        ]
        self.chunk_update_bytes = 0
        """The most bytes that the update of one chunk takes: its parameters, gradients and optimizer
        states.
        """
        self.transit_buffer_bytes = _SMALLEST_TRANSIT_BUFFER
        """Bytes of one transit buffer, a buffer in host RAM through which pages pass from disk. The size is
        that of the largest chunk's parameters, at least _SMALLEST_TRANSIT_BUFFER and at most
        _LARGEST_TRANSIT_BUFFER.
        """
        self._largest_unit = 0
        """The most bytes that all chunk updates of a single unit take together on this rank."""
        self._matrix_bytes = bytes_in_ram(rule.matrix) if rule is not None else 0
        """Bytes of RAM, beside pages, in which whole matrices are updated."""
        self._trained = rule is not None
        self._has_ring = ring and rule is not None
        self._share = share
        longest = max((count for unit in units for region in unit for count, _ in region.counts()), default=0)
        self.exchange_block_bytes = (
            0 if share.ranks == 1 else round_up(longest * _LARGEST_ITEM, PAGE_ALIGNMENT)
        )
        """Bytes of one exchange buffer, which holds any chunk in any dtype; 0 with one rank."""
        self._whole = [page_bytes(unit) for unit in units]
        """Bytes of each unit's whole parameter page, which are more than those of its home if the home holds
        only this rank's part.
        """
        self.pages: dict[Kind, list[int]] = {kind: [] for kind in line}
        for unit in units:
            self._measure(unit, gradient_dtype, rule)
        self.durable_bytes = sum(map(self._images, range(len(units)), units)) if commits else 0
        """Bytes of the NVMe tier that the images of all pages take, which commits need; 0 without commits."""
        self._line = list(itertools.product(line, range(len(units))))
        self.ends = [0, *itertools.accumulate(self.pages[kind][unit] for kind, unit in self._line)]
        """A list of sums: item n is the total bytes of the first n pages, in the order in which pages get
        room; n runs from 0 to the number of pages.
        """
        own = (Kind.GRADIENT,) if commits else tuple(Kind)
        self._sunk = [
            *itertools.accumulate(
                (self.pages[kind][unit] * (kind in own) for kind, unit in reversed(self._line)),
                initial=self.durable_bytes,
            )
        ][::-1]
        """Item n is the bytes that the NVMe tier needs if all pages but the first n of the line are at home
        there. It never grows with n.
        """
        self._together = surveyed.together(grouping)
        self._residents: dict[int, list[int]] = {}

    def _measure(self, unit: Sequence[RegionSize], gradient_dtype: DtypeOf, rule: Rule | None) -> None:
        gradient = optimizer = together = 0
        share = self._share
        for region in unit:
            trained = rule is not None and region.trainable
            for count, times in region.counts():
                update = round_up(count * region.dtype.itemsize, PAGE_ALIGNMENT)
                self.transit_buffer_bytes = max(
                    self.transit_buffer_bytes, min(update, _LARGEST_TRANSIT_BUFFER)
                )
                if rule is not None and trained:
                    itemsize = gradient_dtype(region.dtype).itemsize
                    gradients = round_up(count * itemsize, PAGE_ALIGNMENT)
                    states = state_format(rule.arrays(region.dtype), count).nbytes
                    update += gradients + states
                    updated = share.kept(times, whole=share.whole_states)
                    gradient += share.kept(times, whole=share.whole_gradients) * gradients
                    optimizer += updated * states
                    together += updated * update
                self.chunk_update_bytes = max(self.chunk_update_bytes, update)
        part = max(PAGE_ALIGNMENT, sum(region.nbytes for region in unit) // share.ranks)
        self.pages[Kind.PARAMETER].append(page_bytes(unit) if share.whole_parameters else part)
        self.pages[Kind.GRADIENT].append(gradient)
        self.pages[Kind.OPTIMIZER].append(optimizer)
        self._largest_unit = max(self._largest_unit, together)

    def _images(self, index: int, unit: Sequence[RegionSize]) -> int:
        """Bytes of the images of one unit's pages; see `slab_layout` in infinity/planning/slab_layout.py."""
        trainable = sum(region.nbytes for region in unit if region.trainable)
        trained = self._share.kept(trainable, whole=self._share.whole_states)
        return self.pages[Kind.PARAMETER][index] + trained + 2 * self.pages[Kind.OPTIMIZER][index]

    def staging(self, level: WorkingRoom, room: Room) -> int:
        """Bytes of staging, the host RAM in which chunks are updated if their pages rest elsewhere. The
        result is 0 for inference. It is also 0 if pages can rest in host RAM only.

        level: the rules for the sizes of working buffers. room: the bytes that each tier has.
        """
        moves = room.device is not None or (level.nvme and room.nvme > 0)
        if not (self._trained and moves):
            return 0
        return level.staging(room.host, self.chunk_update_bytes, self._largest_unit)

    def transit(self, level: WorkingRoom, room: Room) -> int:
        """Bytes of all transit buffers, the buffers in host RAM through which pages pass from and to disk.
        One of them is for reads and writes of single parameters. If the device tier is apart from the host
        tier, there are further buffers, through which pages go from NVMe to the device.

        level: the rules for the sizes of working buffers. room: the bytes that each tier has.
        """
        return self.transit_buffer_bytes * (1 + level.transit_buffers * (room.device is not None))

    def ring(self, level: WorkingRoom, room: Room) -> int:
        """Bytes of the ring, the buffer on the device through which gradients leave it; 0 without a ring. A
        buffer in host RAM receives the gradients. It has the same size, and is not counted here.

        level: the rules for the sizes of working buffers. room: the bytes that each tier has.
        """
        if room.device is None or not self._has_ring:
            return 0
        return level.ring(room.device, _SMALLEST_TRANSIT_BUFFER)

    def working(self, level: WorkingRoom, room: Room) -> int:
        """Bytes of host RAM for data on the move: staging, transit buffers, the buffer that receives
        gradients, exchange buffers, and the matrix that is updated.

        level: the rules for the sizes of working buffers. room: the bytes that each tier has.
        """
        local = self.staging(level, room) + self.transit(level, room) + self.ring(level, room)
        return local + level.exchange(self.exchange_block_bytes) + self._matrix_bytes

    @property
    def least_near(self) -> int:
        """The smallest device budget, in bytes, that is enough if the other tiers have unlimited room."""
        return self.near(0, LEAST.pages) + self._has_ring * LEAST.ring(0, _SMALLEST_TRANSIT_BUFFER)

    @property
    def total(self) -> int:
        """Bytes of all pages."""
        return self.ends[-1]

    @property
    def most_nvme(self) -> int:
        """Bytes of the NVMe tier with which all pages may be at home there."""
        return self._sunk[0]

    def residents(self, pages: int) -> list[int]:
        """Bytes of the pool of resident pages, for each place at which the line of all pages can be cut.

        The pool has the parameter pages that are brought to the memory where the model computes. Pages
        before the cut are at home there and need no room in the pool; see [Note: one order, two cuts]. The
        result's item n is for a cut behind the first n pages. It is the larger of two sums over parameter
        pages behind the cut: the bytes of the largest ones, `pages` in number, and the most bytes of those
        that must be resident at the same time. If homes hold parts of parameter pages, all pages need room
        in the pool, and all items are equal.
        """
        if pages not in self._residents:
            parameters = self._whole
            largest: list[int] = []
            backwards = [0]
            for nbytes in reversed(parameters):
                heapq.heappush(largest, nbytes)
                backwards.append(
                    backwards[-1] + nbytes - (heapq.heappop(largest) if len(largest) > pages else 0)
                )
            others = len(self.ends) - 1 - len(parameters)
            found = [*reversed(backwards), *[0] * others]
            for units in self._together:
                for place in range(units[-1] + 1):
                    found[place] = max(found[place], sum(parameters[unit] for unit in units if unit >= place))
            if not self._share.whole_parameters:
                found = [found[0]] * len(found)
            self._residents[pages] = found
        return self._residents[pages]

    def near(self, cut: int, pages: int) -> int:
        """Bytes that the computing tier needs if the first `cut` pages of the line of all pages are at home
        there.

        See [Note: one order, two cuts]. pages: number of further parameter pages that the pool of resident
        pages has room for. The result counts the pages before the cut and this pool. It never falls as
        `cut` grows.
        """
        return self.ends[cut] + self.residents(pages)[cut]

    def cuts(self, room: Room, level: WorkingRoom) -> tuple[int, int] | None:
        """Choose the two cuts of the line of all pages; see [Note: one order, two cuts].

        Returns (number of pages before the first cut, number of pages before the second cut). The device
        has the pages before the first cut, which is 0 if device and host are the same RAM. The host has the
        pages between the cuts. Both cuts are as far along the line as `room` allows. The result is None if
        the pages do not fit.
        """
        working = self.working(level, room)
        if working > room.host or self.staging(level, room) > level.share * room.host:
            return None
        if room.device is None:
            near = 0
            far = self._last(lambda cut: self.near(cut, level.pages), room.host - working)
        else:
            device = room.device - self.ring(level, room)
            near = self._last(lambda cut: self.near(cut, level.pages), device)
            far = self._last(lambda cut: self.ends[cut] - self.ends[max(near, 0)], room.host - working)
        if min(near, far) < 0 or self._sunk[far] > room.nvme:
            return None
        if self.ends[far] < self.total and not level.nvme:
            return None
        computing, cut = (room.host, far) if room.device is None else (room.device, near)
        if self.residents(level.pages)[cut] > level.share * computing:
            return None
        return near, far

    def needed(self, tier: Tier, room: Room) -> int | None:
        """The fewest bytes of `tier` that are enough for all pages, with the smallest working buffers.

        room: the bytes that the other tiers have. The result is None if no number of bytes is enough.
        """
        if tier is Tier.NVME:
            if self.cuts(replace(room, nvme=self.durable_bytes), LEAST_IN_RAM) is not None:
                return self.durable_bytes
            return self._needed(tier, replace(room, nvme=max(1, room.nvme)), LEAST)
        if room.nvme < self.durable_bytes:
            return None
        found = [self._needed(tier, room, LEAST_IN_RAM)]
        if room.nvme:
            found.append(self._needed(tier, room, LEAST))
        return min((each for each in found if each is not None), default=None)

    def _needed(self, tier: Tier, room: Room, level: WorkingRoom) -> int | None:
        working = self.working(level, room)
        if level.nvme:  # all pages behind this cut fit NVMe
            bottom = bisect.bisect_left(self._sunk, -room.nvme, key=lambda nbytes: -nbytes)
        else:
            bottom = bisect.bisect_left(self.ends, self.total)
        if tier is Tier.DEVICE:
            if working > room.host:
                return None
            near = bisect.bisect_left(self.ends, self.ends[bottom] - (room.host - working))
            return self.near(near, level.pages) + self.ring(level, room)
        if room.device is None:
            if tier is Tier.HOST:
                return working + self.near(bottom, level.pages)
            far = self._last(lambda cut: self.near(cut, level.pages), room.host - working)
        else:
            device = room.device - self.ring(level, room)
            near = self._last(lambda cut: self.near(cut, level.pages), device)
            if near < 0:
                return None
            if tier is Tier.HOST:
                return working + max(0, self.ends[bottom] - self.ends[near])
            far = self._last(lambda cut: self.ends[cut] - self.ends[near], room.host - working)
        return None if far < 0 else self._sunk[far]

    def _last(self, need: Callable[[int], int], room: int) -> int:
        """The largest cut for which `need(cut)` is at most `room` bytes, or -1. A cut is the number of
        pages before it. `need` must not fall as the cut grows.
        """
        return bisect.bisect_right(range(len(self.ends)), room, key=need) - 1

    def place(self, room: Room, level: WorkingRoom) -> Placement | None:
        """Give every page a home in `room`, with working buffers as `level` says. None if the pages do not
        fit.
        """
        cuts = self.cuts(room, level)
        if cuts is None:
            return None
        computes_in = Tier.HOST if room.device is None else Tier.DEVICE
        resident = self.residents(level.pages)[cuts[computes_in is Tier.HOST]]
        left = {Tier.HOST: room.host - self.working(level, room)}
        if room.device is not None:
            left[Tier.DEVICE] = room.device - self.ring(level, room)
        left[computes_in] -= resident
        homes: list[dict[Kind, Tier | None]] = [{} for _ in self.grouping]
        for kind, unit in self._line:
            homes[unit][kind] = _first_fit(self.pages[kind][unit], left)
        away = [
            0 if home[Kind.PARAMETER] is computes_in and self._share.whole_parameters else nbytes
            for nbytes, home in zip(self._whole, homes, strict=True)
        ]
        together = (sum(away[unit] for unit in units) for units in self._together)
        return Placement(
            grouping=self.grouping,
            chunk_elements=self.chunk_elements,
            homes=tuple(homes),
            chunk_update_bytes=self.chunk_update_bytes,
            staging_bytes=self.staging(level, room),
            transit_buffer_bytes=self.transit_buffer_bytes,
            transit_bytes=self.transit(level, room),
            resident_bytes=max(sum(heapq.nlargest(level.pages, away)), *together, 0),
            ring_bytes=self.ring(level, room),
            exchange_block_bytes=self.exchange_block_bytes,
            exchange_bytes=level.exchange(self.exchange_block_bytes),
        )


def _first_fit(nbytes: int, left: dict[Tier, int]) -> Tier | None:
    if nbytes == 0:
        return None
    for tier in (Tier.DEVICE, Tier.HOST):
        if nbytes <= left.get(tier, -1):
            left[tier] -= nbytes
            return tier
    return Tier.NVME
