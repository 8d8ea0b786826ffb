"""Candidate: one way to divide a model into units and chunks, and the homes that its pages then find. Pure.

[Note: one order, two cuts]
All pages stand in one line: parameters, gradients, optimizer states (the last two the other way round where
gradients are known to be written and read once a step), each in the order of units. Two cuts divide the line:
its front goes to the nearest tier, its end to the NVMe tier, and what lies between must fit the host tier.
Pages only move forward as a budget grows, so a larger budget never refuses a model that a smaller one took,
and the smallest budget that would do is exact for each way to divide the model. Pages behind a cut then fill,
first-fit, what room the tiers have left.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from infinity.config import round_up
from infinity.cpu_adam import BLOCK
from infinity.formats.optimizer_rules import Rule, state_format
from infinity.layout.chunks import Extent, extents, page_bytes
from infinity.layout.units import Grouping, Survey
from infinity.planning.placement import DtypeOf, Kind, Placement, Room
from infinity.planning.working_room import LEAST, LEAST_IN_RAM, WorkingRoom
from infinity.tiers import PAGE_ALIGNMENT, Tier

_LARGEST_TRANSIT_BUFFER = 4 << 20
"""Bytes of the largest transit buffer: disks and links are at their best, and it is small beside a page."""

_SMALLEST_TRANSIT_BUFFER = 4 * BLOCK
"""Bytes of the smallest transit buffer, and of a block of float32 gradients, the largest there are."""


class Candidate:
    """One way to divide a model into units and chunks, and the bytes of its pages and buffers."""

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
    ) -> None:
        """The candidate for one grouping and one length of chunks.

        line: the order of kinds, parameters first; see `line_of`. ring: whether gradients leave the device
        through a ring.
        """
        self.grouping = grouping
        self.chunk_elements = chunk_elements
        units = [
            extents([surveyed.parameters[index] for index in members], chunk_elements)
            for _, members in grouping
        ]
        self.chain_bytes = 0
        """Bytes that one chunk's update takes at most: its chain of parameters, gradient and states."""
        self.transit_buffer_bytes = _SMALLEST_TRANSIT_BUFFER
        """Bytes of a transit buffer: those of the largest chunk's parameters, within two limits."""
        self._largest_unit = 0
        """Bytes of all chains of one unit, at most."""
        self._trained = rule is not None
        self._has_ring = ring and rule is not None
        self.pages: dict[Kind, list[int]] = {kind: [] for kind in line}
        for unit in units:
            self._measure(unit, gradient_dtype, rule)
        self._line = list(itertools.product(line, range(len(units))))
        self.ends = [0, *itertools.accumulate(self.pages[kind][unit] for kind, unit in self._line)]
        """Bytes of the first n pages in line, for n from 0 to all of them."""
        self._together = surveyed.together(grouping)
        self._residents: dict[int, list[int]] = {}

    def _measure(self, unit: Sequence[Extent], gradient_dtype: DtypeOf, rule: Rule | None) -> None:
        gradient = optimizer = chains = 0
        for extent in unit:
            trained = rule is not None and extent.trainable
            for count, times in extent.counts(self.chunk_elements):
                chain = round_up(count * extent.dtype.itemsize, PAGE_ALIGNMENT)
                self.transit_buffer_bytes = max(
                    self.transit_buffer_bytes, min(chain, _LARGEST_TRANSIT_BUFFER)
                )
                if rule is not None and trained:
                    itemsize = gradient_dtype(extent.dtype).itemsize
                    gradients = round_up(count * itemsize, PAGE_ALIGNMENT)
                    states = state_format(rule.arrays(extent.dtype), count).nbytes
                    chain += gradients + states
                    gradient += times * gradients
                    optimizer += times * states
                    chains += times * chain
                self.chain_bytes = max(self.chain_bytes, chain)
        self.pages[Kind.PARAMETER].append(page_bytes(unit))
        self.pages[Kind.GRADIENT].append(gradient)
        self.pages[Kind.OPTIMIZER].append(optimizer)
        self._largest_unit = max(self._largest_unit, chains)

    def staging(self, level: WorkingRoom, room: Room) -> int:
        """Bytes of staging; 0 where every update finds all that it takes in host RAM."""
        moves = room.device is not None or (level.nvme and room.nvme > 0)
        if not (self._trained and moves):
            return 0
        return level.staging(room.host, self.chain_bytes, self._largest_unit)

    def transit(self, level: WorkingRoom, room: Room) -> int:
        """Bytes of transit: the bounce buffer, and pieces where pages take two hops."""
        return self.transit_buffer_bytes * (1 + level.transit_buffers * (room.device is not None))

    def ring(self, level: WorkingRoom, room: Room) -> int:
        """Bytes of the ring for gradients on the device, and of its landing in host RAM."""
        if room.device is None or not self._has_ring:
            return 0
        return level.ring(room.device, _SMALLEST_TRANSIT_BUFFER)

    def working(self, level: WorkingRoom, room: Room) -> int:
        """Bytes of host RAM for pages on their way: staging, transit and the ring's landing."""
        return self.staging(level, room) + self.transit(level, room) + self.ring(level, room)

    @property
    def least_near(self) -> int:
        """The smallest device budget, in bytes, that would do with endless other tiers."""
        return self.near(0, LEAST.pages) + self._has_ring * LEAST.ring(0, _SMALLEST_TRANSIT_BUFFER)

    @property
    def total(self) -> int:
        """Bytes of all pages."""
        return self.ends[-1]

    def residents(self, pages: int) -> list[int]:
        """Bytes of the pool of residents, for each cut of the line.

        The pool holds the `pages` largest parameter pages behind the cut, or those that have to be resident
        together where they are more.
        """
        if pages not in self._residents:
            parameters = self.pages[Kind.PARAMETER]
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
            self._residents[pages] = found
        return self._residents[pages]

    def near(self, cut: int, pages: int) -> int:
        """Bytes that the tier that computes needs if the pages before `cut` are at home there: these and the
        pool of residents. They grow with `cut`."""
        return self.ends[cut] + self.residents(pages)[cut]

    def cuts(self, room: Room, level: WorkingRoom) -> tuple[int, int] | None:
        """Two places in the line of pages: where the device's share ends (unified: 0), and where the host's
        ends.

        Both are as large as `room` allows. None where the pages do not fit.
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
        nvme = room.nvme if level.nvme else 0
        if min(near, far) < 0 or self.total - self.ends[far] > nvme:
            return None
        computing, cut = (room.host, far) if room.device is None else (room.device, near)
        if self.residents(level.pages)[cut] > level.share * computing:
            return None
        return near, far

    def needed(self, tier: Tier, room: Room) -> int | None:
        """The fewest bytes of `tier` that would do with the least working room, the other tiers as in `room`.

        None where no number of bytes would.
        """
        if tier is Tier.NVME:
            if self.cuts(room, LEAST_IN_RAM) is not None:
                return 0
            return self._needed(tier, replace(room, nvme=max(1, room.nvme)), LEAST)
        found = [self._needed(tier, replace(room, nvme=0), LEAST_IN_RAM)]
        if room.nvme:
            found.append(self._needed(tier, room, LEAST))
        return min((each for each in found if each is not None), default=None)

    def _needed(self, tier: Tier, room: Room, level: WorkingRoom) -> int | None:
        working = self.working(level, room)
        bottom = bisect.bisect_left(self.ends, self.total - room.nvme)  # all pages behind this cut fit NVMe
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
        return None if far < 0 else self.total - self.ends[far]

    def _last(self, need: Callable[[int], int], room: int) -> int:
        """The last cut whose `need` is at most `room` bytes, or -1. Needs must not fall along the line."""
        return bisect.bisect_right(range(len(self.ends)), room, key=need) - 1

    def place(self, room: Room, level: WorkingRoom) -> Placement | None:
        """The placement of all pages in this room, or None where they do not fit."""
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
            0 if home[Kind.PARAMETER] is computes_in else nbytes
            for nbytes, home in zip(self.pages[Kind.PARAMETER], homes, strict=True)
        ]
        together = (sum(away[unit] for unit in units) for units in self._together)
        return Placement(
            grouping=self.grouping,
            chunk_elements=self.chunk_elements,
            homes=tuple(homes),
            chain_bytes=self.chain_bytes,
            staging_bytes=self.staging(level, room),
            transit_buffer_bytes=self.transit_buffer_bytes,
            transit_bytes=self.transit(level, room),
            resident_bytes=max(sum(heapq.nlargest(level.pages, away)), *together, 0),
            ring_bytes=self.ring(level, room),
        )


def _first_fit(nbytes: int, left: dict[Tier, int]) -> Tier | None:
    if nbytes == 0:
        return None
    for tier in (Tier.DEVICE, Tier.HOST):
        if nbytes <= left.get(tier, -1):
            left[tier] -= nbytes
            return tier
    return Tier.NVME
