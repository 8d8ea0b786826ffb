"""Where pages rest: the search for units, chunks and homes that fit the budgets. Pure arithmetic.

[Note: one order, two cuts]
All pages stand in one line: parameters, gradients, optimizer states (the last two the other way round where
gradients are known to be written and read once a step), each in the order of units or, for eager updates,
evenly spread over the model. The front of the line fits the nearest tier, the end the NVMe tier, and the rest
must fit between: one cut each. Pages only move up as a budget grows, so a larger budget never refuses what a
smaller one took, and the smallest that would do is exact for each way to cut units and chunks. Rooms that the
cuts leave are filled first-fit.
"""

from __future__ import annotations

import bisect
import enum
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from infinity.comfort import COMFORTS, LEAST, LEAST_IN_RAM, Comfort
from infinity.config import round_up
from infinity.cpu_adam import BLOCK
from infinity.layout import Extent, extents, page_bytes
from infinity.rules import Rule, state_format
from infinity.tiers import PAGE_ALIGNMENT, Tier
from infinity.units import Grouping, Survey

_CHUNKS = tuple(1 << 20 >> shift for shift in range(0, 9, 2))
"""Elements, most useful first; the last is the smallest there is."""

_LONG_CHUNK = 1 << 22
"""Elements, for a device of its own memory, whose step waits for every call that Python makes for a chunk.
Of 7B parameters there are some 1,700 of them: 50 calls each are a hundredth of a step."""

_LONG_SHARE = 64
"""Chunks are long where two of their chains take at the most one in so many bytes of host RAM."""

_SMALL = 8
"""A page is small that has one in so many of the bytes of the mean one."""

_LARGEST_PIECE = 4 << 20
"""Bytes of transit that are read at once: what disks and links are fastest with, and small against a page."""

_SMALLEST_PIECE = 4 * BLOCK
"""Gradients are measured in whole blocks, of float32 at the most."""

_LARGEST_UNIT = 1 << 30
_SMALLEST_UNIT = 64 << 10
_FEWEST_UNITS = 8


class Kind(enum.Enum):
    """What a page holds of its unit."""

    PARAMETER = "parameter"
    """Parameters as forward and backward take them."""
    GRADIENT = "gradient"
    """Accumulated gradients of the trainable ones."""
    OPTIMIZER = "optimizer"
    """Master parameters (or what completes them) and moments."""


def line_of(accumulation: int | None) -> tuple[Kind, ...]:
    """The kinds in line, for so many micro-batches a step (None: unknown).

    A byte of states is read and written once a step, both under the next forward; one of gradients is written
    under the backward and read once, and for every further micro-batch read and written once more.
    """
    if accumulation == 1:
        return (Kind.PARAMETER, Kind.OPTIMIZER, Kind.GRADIENT)
    return tuple(Kind)


DtypeOf = Callable[[torch.dtype], torch.dtype]

Homes = tuple[dict[Kind, Tier | None], ...]
"""Per unit; None for a page without bytes."""


@dataclass(frozen=True)
class Room:
    """Bytes that each tier has for pages and buffers."""

    device: int | None
    """None: the same RAM as the host's."""
    host: int
    nvme: int


@dataclass(frozen=True)
class Placement:
    """A way to fit: how units and chunks are cut, where pages rest, what room is left to work in."""

    grouping: Grouping
    chunk_elements: int
    homes: Homes
    chain_bytes: int
    """What one chunk's update takes at the most: its parameters, gradient and states."""
    staging_bytes: int
    piece_bytes: int
    transit_bytes: int
    resident_bytes: int
    ring_bytes: int


class Candidate:
    """One way to cut units and chunks, measured."""

    def __init__(
        self,
        surveyed: Survey,
        grouping: Grouping,
        chunk_elements: int,
        gradient_dtype: DtypeOf,
        rule: Rule | None,
        *,
        line: Sequence[Kind],
        spread: bool,
        ring: bool = False,
    ) -> None:
        """line: the order of kinds, parameters first; see `line_of`. spread: the order of units is such that
        states and gradients beyond any cut are evenly apart in the model. ring: gradients leave the device
        through one."""
        self.grouping = grouping
        self.chunk_elements = chunk_elements
        units = [
            extents([surveyed.parameters[index] for index in members], chunk_elements)
            for _, members in grouping
        ]
        self.chain_bytes = 0
        """Of the largest chunk's update."""
        self.piece_bytes = _SMALLEST_PIECE
        """Of transit: the parameters of a chunk, where they are not too many."""
        self._largest_unit = 0
        """Bytes of all chains of a unit, of the one that has the most."""
        self._units_together = 2 if spread else 1
        """Units whose chains ample staging has room for: of eager updates one's gradients come while the
        states of another leave."""
        self._trained = rule is not None
        self._has_ring = ring and rule is not None
        self.pages: dict[Kind, list[int]] = {kind: [] for kind in line}
        for unit in units:
            self._measure(unit, gradient_dtype, rule)
        in_order = range(len(units))
        apart = evenly_apart(self.pages[Kind.OPTIMIZER]) if spread else in_order
        self._line = [(kind, unit) for kind in line for unit in (in_order if kind is line[0] else apart)]
        self.ends = [0, *itertools.accumulate(self.pages[kind][unit] for kind, unit in self._line)]
        """Bytes of the first pages in line, of any number of them."""
        self._together = surveyed.together(grouping)
        self._residents: dict[int, list[int]] = {}

    def _measure(self, unit: Sequence[Extent], gradient_dtype: DtypeOf, rule: Rule | None) -> None:
        gradient = optimizer = chains = 0
        for extent in unit:
            trained = rule is not None and extent.trainable
            for count, times in extent.counts(self.chunk_elements):
                chain = round_up(count * extent.dtype.itemsize, PAGE_ALIGNMENT)
                self.piece_bytes = max(self.piece_bytes, min(chain, _LARGEST_PIECE))
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

    def staging(self, comfort: Comfort, room: Room) -> int:
        """Bytes of staging: none where every update finds all that it takes in host RAM."""
        moves = room.device is not None or (comfort.nvme and room.nvme > 0)
        if not (self._trained and moves):
            return 0
        return comfort.staging(room.host, self.chain_bytes, self._units_together * self._largest_unit)

    def transit(self, comfort: Comfort, room: Room) -> int:
        """Bytes of transit: the bounce buffer, and pieces where pages take two hops."""
        return self.piece_bytes * (1 + comfort.pieces * (room.device is not None))

    def ring(self, comfort: Comfort, room: Room) -> int:
        """Bytes of the ring for gradients on the device, and of its landing in host RAM."""
        if room.device is None or not self._has_ring:
            return 0
        return comfort.ring(room.device, _SMALLEST_PIECE)

    def working(self, comfort: Comfort, room: Room) -> int:
        """Bytes of host RAM for what is on its way."""
        return self.staging(comfort, room) + self.transit(comfort, room) + self.ring(comfort, room)

    @property
    def least_near(self) -> int:
        """The fewest bytes of a device that do, whatever the others have."""
        return self.near(0, LEAST.lookahead) + self._has_ring * LEAST.ring(0, _SMALLEST_PIECE)

    @property
    def total(self) -> int:
        """Bytes of all pages."""
        return self.ends[-1]

    def residents(self, lookahead: int) -> list[int]:
        """Bytes of the `lookahead` largest parameter pages from each place in line to the end, or of those
        that have to be resident together, where that is more."""
        if lookahead not in self._residents:
            parameters = self.pages[Kind.PARAMETER]
            largest: list[int] = []
            backwards = [0]
            for nbytes in reversed(parameters):
                heapq.heappush(largest, nbytes)
                backwards.append(
                    backwards[-1] + nbytes - (heapq.heappop(largest) if len(largest) > lookahead else 0)
                )
            others = len(self.ends) - 1 - len(parameters)
            found = [*reversed(backwards), *[0] * others]
            for units in self._together:
                for place in range(units[-1] + 1):
                    found[place] = max(found[place], sum(parameters[unit] for unit in units if unit >= place))
            self._residents[lookahead] = found
        return self._residents[lookahead]

    def near(self, cut: int, lookahead: int) -> int:
        """Bytes of pages in the tier that computes if those before `cut` rest there. Grows with `cut`."""
        return self.ends[cut] + self.residents(lookahead)[cut]

    def cuts(self, room: Room, comfort: Comfort) -> tuple[int, int] | None:
        """Where the device's pages (unified: none) and the host's end in line; None where they do not fit.

        Both cuts are as far down the line as room allows.
        """
        working = self.working(comfort, room)
        if working > room.host or self.staging(comfort, room) > comfort.share * room.host:
            return None
        if room.device is None:
            near = 0
            far = self._last(lambda cut: self.near(cut, comfort.lookahead), room.host - working)
        else:
            device = room.device - self.ring(comfort, room)
            near = self._last(lambda cut: self.near(cut, comfort.lookahead), device)
            far = self._last(lambda cut: self.ends[cut] - self.ends[max(near, 0)], room.host - working)
        nvme = room.nvme if comfort.nvme else 0
        if min(near, far) < 0 or self.total - self.ends[far] > nvme:
            return None
        computing, cut = (room.host, far) if room.device is None else (room.device, near)
        if self.residents(comfort.lookahead)[cut] > comfort.share * computing:
            return None
        return near, far

    def needed(self, tier: Tier, room: Room) -> int | None:
        """The fewest bytes of `tier` that do with the least working room and the others as they are.

        None: no number of bytes does.
        """
        if tier is Tier.NVME:
            if self.cuts(room, LEAST_IN_RAM) is not None:
                return 0
            return self._needed(tier, replace(room, nvme=max(1, room.nvme)), LEAST)
        found = [self._needed(tier, replace(room, nvme=0), LEAST_IN_RAM)]
        if room.nvme:
            found.append(self._needed(tier, room, LEAST))
        return min((each for each in found if each is not None), default=None)

    def _needed(self, tier: Tier, room: Room, comfort: Comfort) -> int | None:
        working = self.working(comfort, room)
        bottom = bisect.bisect_left(self.ends, self.total - room.nvme)  # from here on, all fits nvme
        if tier is Tier.DEVICE:
            if working > room.host:
                return None
            near = bisect.bisect_left(self.ends, self.ends[bottom] - (room.host - working))
            return self.near(near, comfort.lookahead) + self.ring(comfort, room)
        if room.device is None:
            if tier is Tier.HOST:
                return working + self.near(bottom, comfort.lookahead)
            far = self._last(lambda cut: self.near(cut, comfort.lookahead), room.host - working)
        else:
            device = room.device - self.ring(comfort, room)
            near = self._last(lambda cut: self.near(cut, comfort.lookahead), device)
            if near < 0:
                return None
            if tier is Tier.HOST:
                return working + max(0, self.ends[bottom] - self.ends[near])
            far = self._last(lambda cut: self.ends[cut] - self.ends[near], room.host - working)
        return None if far < 0 else self.total - self.ends[far]

    def _last(self, need: Callable[[int], int], room: int) -> int:
        """The last cut whose need is at most `room` bytes, -1 for none; needs do not fall along the line."""
        return bisect.bisect_right(range(len(self.ends)), room, key=need) - 1

    def place(self, room: Room, comfort: Comfort) -> Placement | None:
        """Homes for all pages in this room, or None where they do not fit."""
        cuts = self.cuts(room, comfort)
        if cuts is None:
            return None
        computes_in = Tier.HOST if room.device is None else Tier.DEVICE
        resident = self.residents(comfort.lookahead)[cuts[computes_in is Tier.HOST]]
        left = {Tier.HOST: room.host - self.working(comfort, room)}
        if room.device is not None:
            left[Tier.DEVICE] = room.device - self.ring(comfort, room)
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
            staging_bytes=self.staging(comfort, room),
            piece_bytes=self.piece_bytes,
            transit_bytes=self.transit(comfort, room),
            resident_bytes=max(sum(heapq.nlargest(comfort.lookahead, away)), *together, 0),
            ring_bytes=self.ring(comfort, room),
        )


def evenly_apart(sizes: Sequence[int]) -> list[int]:
    """Indices in an order of which any first ones, and the others as well, lie evenly apart.

    Small ones, which hardly count, come first; then the van der Corput sequence (1935) over the places of the
    large ones among themselves. It halves: blocks that repeat, with large and small units, leave no long run.
    """
    least = sum(sizes) / (_SMALL * max(1, len(sizes)))
    small = [index for index, nbytes in enumerate(sizes) if nbytes < least]
    large = [index for index, nbytes in enumerate(sizes) if nbytes >= least]
    bits = len(large).bit_length()
    places = sorted(range(len(large)), key=lambda place: f"{place:0{bits}b}"[::-1])
    return small + [large[place] for place in places]


def _first_fit(nbytes: int, left: dict[Tier, int]) -> Tier | None:
    if nbytes == 0:
        return None
    for tier in (Tier.DEVICE, Tier.HOST):
        if nbytes <= left.get(tier, -1):
            left[tier] -= nbytes
            return tier
    return Tier.NVME


class Search:
    """All ways to cut a model, from the most useful to the smallest, each measured once."""

    def __init__(
        self,
        surveyed: Survey,
        gradient_dtype: DtypeOf,
        rule: Rule | None,
        *,
        line: Sequence[Kind],
        flowing: bool,
        own_memory: bool = False,
    ) -> None:
        """gradient_dtype: of the gradients of parameters of a dtype; see `Precision.gradient_dtype`. line:
        the order of kinds, parameters first; see `line_of`. flowing: for updates that go on all through a
        backward: pages are spread, and there is staging for two units, if it fits. own_memory: the CPU does
        not see the device's: gradients leave it through a ring, and chunks may be long."""
        self._surveyed = surveyed
        self._line = line
        self._flowing = flowing
        self._own_memory = own_memory
        self._gradient_dtype = gradient_dtype
        self._rule = rule
        self._groupings = _groupings(surveyed)
        self._chunks = _chunk_lengths(surveyed)
        self._long = _most_useful(surveyed, _LONG_CHUNK) if own_memory else 0
        """Elements of long chunks, where there are any."""
        self._measured: dict[tuple[int, int], Candidate] = {}

    def place(self, room: Room) -> Placement | None:
        """The first placement that fits: comfort first, then large units, then large chunks."""
        for comfort in COMFORTS:
            for candidate in self._useful(room):
                placement = candidate.place(room, comfort)
                if placement is not None:
                    return placement
        return None

    def needed(self, tier: Tier, room: Room) -> int | None:
        """The fewest bytes of `tier` for which `place` finds something, the others being as they are."""
        found = (candidate.needed(tier, room) for candidate in self._candidates())
        return min((nbytes for nbytes in found if nbytes is not None), default=None)

    def smallest(self, *, unified: bool, nvme: bool) -> dict[Tier, int]:
        """Budgets that do together, of those the ones with the least memory; less of any one does not."""
        found = []
        for candidate in self._candidates():
            room = Room(None if unified else candidate.least_near, 0, candidate.total * nvme)
            host = candidate.needed(Tier.HOST, room)
            if host is not None:
                found.append((host + (room.device or 0), room.nvme, replace(room, host=host)))
        best = min(found, key=lambda each: each[:2])[2]
        # The others being as they are, each may do with less.
        best = replace(best, host=self._less(Tier.HOST, best, best.host))
        if best.device is not None:
            best = replace(best, device=self._less(Tier.DEVICE, best, best.device))
        best = replace(best, nvme=self._less(Tier.NVME, best, best.nvme))
        sizes = {Tier.DEVICE: best.device, Tier.HOST: best.host, Tier.NVME: best.nvme or None}
        return {tier: nbytes for tier, nbytes in sizes.items() if nbytes is not None}

    def _less(self, tier: Tier, room: Room, enough: int) -> int:
        needed = self.needed(tier, room) if enough else None
        return enough if needed is None else needed

    def _useful(self, room: Room) -> Iterator[Candidate]:
        """All candidates for `place`, long chunks first where RAM has room for them."""
        for grouping in range(len(self._groupings)):
            if self._long > self._chunks[0]:
                long = self._candidate(grouping, self._long)
                if 2 * long.chain_bytes * _LONG_SHARE <= room.host:
                    yield long
            for chunk in self._chunks:
                yield self._candidate(grouping, chunk)

    def _candidates(self) -> Iterator[Candidate]:
        """Without long chunks, which never do where others do not."""
        for grouping, chunk in itertools.product(range(len(self._groupings)), self._chunks):
            yield self._candidate(grouping, chunk)

    def _candidate(self, grouping: int, chunk: int) -> Candidate:
        if (grouping, chunk) not in self._measured:
            self._measured[grouping, chunk] = Candidate(
                self._surveyed,
                self._groupings[grouping],
                chunk,
                self._gradient_dtype,
                self._rule,
                line=self._line,
                spread=self._flowing,
                ring=self._own_memory,
            )
        return self._measured[grouping, chunk]


def _groupings(surveyed: Survey) -> list[Grouping]:
    """Distinct ways to cut units, the coarsest first, down to one unit a module."""
    sizes = []
    size = min(surveyed.nbytes // _FEWEST_UNITS, _LARGEST_UNIT)
    while size >= _SMALLEST_UNIT:
        sizes.append(size)
        size //= 2
    return list(dict.fromkeys(surveyed.group(size) for size in (*sizes, 1)))


def _chunk_lengths(surveyed: Survey) -> list[int]:
    """Distinct chunk lengths in elements, the longest first: none much longer than all that is trained."""
    return list(dict.fromkeys(_most_useful(surveyed, length) for length in _CHUNKS))


def _most_useful(surveyed: Survey, length: int) -> int:
    """`length`, or what is enough for all that is trained."""
    trained = sum(parameter.numel for parameter in surveyed.parameters if parameter.trainable)
    return min(length, round_up(max(trained, 1), BLOCK))
