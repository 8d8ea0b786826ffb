"""Search: finds a placement that fits the budgets, and the smallest budgets that are enough. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from infinity.config import round_up
from infinity.cpu_adam import BLOCK
from infinity.formats.optimizer_rules import Rule
from infinity.layout.division import Division
from infinity.layout.shards import ALONE, Share
from infinity.layout.units import Grouping, Survey
from infinity.planning.candidate import Candidate
from infinity.planning.placement import WORKING_ROOMS, DtypeOf, Kind, Placement, Room
from infinity.tiers import Tier

_CHUNKS = tuple(1 << 20 >> shift for shift in range(0, 9, 2))
"""Lengths of chunks, in elements, in the order in which the search tries them."""

_LONG_CHUNK = 1 << 22
"""Elements of a long chunk. Long chunks are tried for devices with memory of their own, and over ranks. On
such a device the update of any chunk takes some 50 Python calls, for which the step waits, so fewer and
longer chunks are better. 7B parameters have some 1,700 long chunks, whose calls take a hundredth of a step.
Ranks send each other a few messages for each chunk, and these cost more than its bytes.
"""

_LONG_SHARE, _LONG_SHARE_OF_RANKS = 64, 8
"""The search tries long chunks only if the parameters, gradients and optimizer states of two long chunks
together take at most the bytes of host RAM divided by this number. The second number is that over ranks.
"""

_LARGEST_UNIT = 1 << 30
_SMALLEST_UNIT = 64 << 10
_FEWEST_UNITS = 8


class Search:
    """Searches for a placement among the ways to divide a model into units and chunks. A placement is such a
    way with the homes of all pages and the sizes of buffers. Large units are tried before small units, and
    long chunks before short chunks. The sizes of pages and buffers are computed only once for each way.
    """

    def __init__(
        self,
        surveyed: Survey,
        gradient_dtype: DtypeOf,
        rule: Rule | None,
        *,
        line: Sequence[Kind],
        own_memory: bool = False,
        commits: bool = False,
        prefer: Division | None = None,
        share: Share = ALONE,
    ) -> None:
        """Prepare to search the ways to divide a surveyed model.

        gradient_dtype: maps the dtype of parameters to the dtype of their gradients; see
        `Precision.gradient_dtype`. rule: the optimizer's rule; None for inference. line: the kinds of pages
        in the order in which they get room in the fastest tiers, parameters first; see `line_of` in
        infinity/planning/placement.py. own_memory: whether the device has memory that the CPU cannot use. If
        so, gradients leave the device through a ring buffer. commits: whether the NVMe tier holds the durable
        images of pages. prefer: a division that is tried before all others, unless it is one of another
        model; see `Division.grouping`. share: the rank that is planned for.
        """
        self._surveyed = surveyed
        self._line = line
        self._own_memory = own_memory
        self._commits = commits
        self._share = share
        self._gradient_dtype = gradient_dtype
        self._rule = rule
        self._groupings = _groupings(surveyed)
        self._chunks = _chunk_lengths(surveyed)
        self._long = _most_useful(surveyed, _LONG_CHUNK) if own_memory or share.ranks > 1 else 0
        """Elements of a long chunk; 0 if long chunks are not tried."""
        self._long_share = _LONG_SHARE if share.ranks == 1 else _LONG_SHARE_OF_RANKS
        self._measured: dict[tuple[int, int], Candidate] = {}
        preferred = None if prefer is None else prefer.grouping(surveyed)
        self._preferred = (
            [self._measure(preferred, prefer.chunk_elements)] if prefer is not None and preferred else []
        )
        """The candidate that is tried before all others, if there is one."""

    def place(self, room: Room) -> Placement | None:
        """Find the first placement that fits `room`; returns None if no placement fits.

        room: bytes of each tier. WORKING_ROOMS (infinity/planning/placement.py) gives the order in which
        placements are tried: first those without pages on NVMe, and those with large buffers for moving and
        updating pages before those with small buffers. With equal buffers, large units come before small
        units, and long chunks before short chunks. The preferred division comes before all of these, with
        buffers of any size.
        """
        tries = itertools.chain(
            itertools.product(WORKING_ROOMS, self._preferred),
            ((level, candidate) for level in WORKING_ROOMS for candidate in self._useful(room)),
        )
        placements = (candidate.place(room, level) for level, candidate in tries)
        return next((placement for placement in placements if placement is not None), None)

    def place_alike(self, placement: Placement, room: Room) -> Placement | None:
        """Find the first placement that fits `room` and divides the model as `placement` does."""
        candidate = self._measure(placement.grouping, placement.chunk_elements)
        placements = (candidate.place(room, level) for level in WORKING_ROOMS)
        return next((each for each in placements if each is not None), None)

    def prefers(self, placement: Placement) -> bool:
        """Whether a placement has the preferred division."""
        return any(
            (each.grouping, each.chunk_elements) == (placement.grouping, placement.chunk_elements)
            for each in self._preferred
        )

    def needed(self, tier: Tier, room: Room) -> int | None:
        """The fewest bytes of `tier` with which `place` finds a placement, if the other tiers have the bytes
        that `room` gives them.

        The result is None if no number of bytes is enough.
        """
        # Images may be smaller with long chunks, because there are fewer gaps between parameters.
        long = self._commits and tier is Tier.NVME
        candidates = self._useful(room) if long else self._candidates()
        found = (candidate.needed(tier, room) for candidate in itertools.chain(self._preferred, candidates))
        return min((nbytes for nbytes in found if nbytes is not None), default=None)

    def smallest(self, *, unified: bool, nvme: bool) -> dict[Tier, int]:
        """The budgets that are just enough for the model: tier -> bytes. If one of them were smaller and the
        others as they are, no placement would fit. The search for them prefers few bytes of device memory and
        host RAM in sum, and then few bytes of NVMe.

        unified: whether device and host are the same RAM; if so, there is no entry for the device. nvme:
        whether pages may rest on NVMe.
        """
        found = []
        for candidate in itertools.chain(self._preferred, self._candidates()):
            room = Room(None if unified else candidate.least_near, 0, candidate.most_nvme * nvme)
            host = candidate.needed(Tier.HOST, room)
            if host is not None:
                found.append((host + (room.device or 0), room.nvme, replace(room, host=host)))
        best = min(found, key=lambda each: each[:2])[2]
        # With the other budgets as they are, another candidate may need less of a tier.
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
        """Yield all candidates that `place` tries. A candidate is one way to divide the model into units and
        chunks (infinity/planning/candidate.py). For each way to form units, long chunks come first if the
        host tier has room for them.
        """
        for grouping in range(len(self._groupings)):
            if self._long > self._chunks[0]:
                long = self._candidate(grouping, self._long)
                if 2 * long.chunk_update_bytes * self._long_share <= room.host:
                    yield long
            for chunk in self._chunks:
                yield self._candidate(grouping, chunk)

    def _candidates(self) -> Iterator[Candidate]:
        """Yield all candidates (ways to divide the model) except those with long chunks, to find the
        smallest budgets. Where shorter chunks do not fit, long chunks do not fit either.
        """
        for grouping, chunk in itertools.product(range(len(self._groupings)), self._chunks):
            yield self._candidate(grouping, chunk)

    def _candidate(self, grouping: int, chunk: int) -> Candidate:
        if (grouping, chunk) not in self._measured:
            self._measured[grouping, chunk] = self._measure(self._groupings[grouping], chunk)
        return self._measured[grouping, chunk]

    def _measure(self, grouping: Grouping, chunk: int) -> Candidate:
        return Candidate(
            self._surveyed,
            grouping,
            chunk,
            self._gradient_dtype,
            self._rule,
            line=self._line,
            ring=self._own_memory,
            commits=self._commits,
            share=self._share,
        )


def _groupings(surveyed: Survey) -> list[Grouping]:
    """Return the distinct ways to group modules into units, from the one with the largest units to the one
    with one unit per module.
    """
    sizes = []
    size = min(surveyed.nbytes // _FEWEST_UNITS, _LARGEST_UNIT)
    while size >= _SMALLEST_UNIT:
        sizes.append(size)
        size //= 2
    return list(dict.fromkeys(surveyed.group(size) for size in (*sizes, 1)))


def _chunk_lengths(surveyed: Survey) -> list[int]:
    """Return the distinct chunk lengths to try, in elements, the longest first. None is longer than the
    number of elements of all trained parameters, after that number is rounded up to a multiple of BLOCK.
    """
    return list(dict.fromkeys(_most_useful(surveyed, length) for length in _CHUNKS))


def _most_useful(surveyed: Survey, length: int) -> int:
    """Return the smaller of `length`, a chunk length in elements, and the number of elements of all trained
    parameters, after that number is rounded up to a multiple of BLOCK. A longer chunk would never be filled.
    """
    trained = sum(parameter.numel for parameter in surveyed.parameters if parameter.trainable)
    return min(length, round_up(max(trained, 1), BLOCK))
