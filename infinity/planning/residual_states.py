"""Residual states: what becomes of a model's activations between forward and backward. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from infinity.config import format_size, round_up
from infinity.errors import ConfigError
from infinity.planning.predict import PhaseBytes
from infinity.tiers import PAGE_ALIGNMENT

POLICIES = ("auto", "keep", "recompute", "recompute+offload", "offload")
"""Values of `activations=` of `infinity.offload`. "auto" becomes one of the others in the plan."""

BY_ITSELF = "is recomputed by the model itself"
"""The reason in `Residuals.left_alone` of a block that runs again without infinity."""

_NAMED = 3
"""The most names that a line has; it counts the others."""

_WINDOW = 32 << 20
"""Bytes of a window: a link of 50 GB/s moves them in 0.7 ms, and a disk of 3 GB/s in 11 ms."""
_WINDOWS = 8
"""A window has at most the bytes of all saved tensors divided by this number."""
_MOST_WINDOWS = 256
"""A window has at least the bytes of all saved tensors divided by this number. Large steps have long kernels,
and the link must not wait for the end of one (docs/lab-notes.md, "Activations").
"""


def window_of(saved: int) -> int:
    """Bytes of the window for saved tensors of this many bytes."""
    window = min(max(_WINDOW, saved // _MOST_WINDOWS), saved // _WINDOWS)
    return round_up(window, PAGE_ALIGNMENT)


@dataclass(frozen=True, kw_only=True)
class ResidualBytes:
    """The room of residual pages (infinity/activations/residual_pages.py), and their bytes in a step of one
    micro-batch with inputs like the plan's example inputs.
    """

    kept: int = 0
    """Bytes that stay in the memory that computes, counted in `Plan.activations`."""
    window: int = 0
    """The most bytes on their way in one direction, beside one page."""
    ram: int = 0
    """Bytes of the pool of host RAM to which they leave."""
    disk: int = 0
    """Bytes of the scratch slabs to which they go on."""
    together: int = 1
    """Number of micro-batches that run together for which `ram` and `disk` are enough."""
    saved: int = 0
    """Bytes of all of them, for one micro-batch, as are the following numbers."""
    down: int = 0
    """Bytes that leave the memory that computes. `up` are those that come back to it."""
    up: int = 0
    written: int = 0
    """Bytes that are written to disk. `read` are those that are read."""
    read: int = 0

    @property
    def text(self) -> str:
        """What becomes of the saved tensors, for a plan's text."""
        found = f"{format_size(self.down)} of {format_size(self.saved)} saved for backward leave for RAM"
        if self.written:
            found += f", {format_size(self.written)} of them for disk"
        return found

    def passes(self, *, unified: bool) -> tuple[PhaseBytes, PhaseBytes]:
        """What moves in a forward, and in its backward. unified: whether device and host are the same RAM, so
        that what leaves is copied within it.
        """
        down = PhaseBytes(host=2 * self.down) if unified else PhaseBytes(to_host=self.down)
        up = PhaseBytes() if unified else PhaseBytes(to_device=self.up)
        return down + PhaseBytes(disk_write=self.written), up + PhaseBytes(disk_read=self.read)


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """What becomes of the tensors that autograd saves in a forward."""

    policy: str = "keep"
    """One of POLICIES, but not "auto"."""
    recomputed: tuple[str, ...] = ()
    """The paths of the blocks that keep only their inputs, and run again in backward."""
    leaving: tuple[str, ...] = ()
    """The paths of the blocks after those, which could run again, and of which saved tensors leave the memory
    that computes. Empty unless the policy was "auto".
    """
    kept: tuple[str, ...] = ()
    """The paths of the last blocks, which could run again and keep their activations, because these fit."""
    left_alone: tuple[tuple[str, str], ...] = ()
    """(path, reason) of the blocks that the policy would have recomputed, and that must not run again."""
    room: ResidualBytes | None = None
    """The room for saved tensors that leave the memory that computes; None if all stay."""
    why: str = field(default="", compare=False)
    """Why the policy was chosen, if it was left to infinity and there was a choice; else empty."""

    @property
    def ram(self) -> int:
        """Bytes of host RAM for saved tensors. `disk` are those of scratch slabs."""
        return 0 if self.room is None else self.room.ram

    @property
    def disk(self) -> int:
        return 0 if self.room is None else self.room.disk

    @property
    def lines(self) -> Iterator[str]:
        """Lines of the plan's text on the policy; none where all activations are kept without a choice."""
        why, found = self.why and f", {self.why}", []
        if self.policy.startswith("recompute"):
            found.append(_blocks(len(self.recomputed)))
        if self.leaving:
            found.append(f"saved tensors of {_count(len(self.leaving))} leave")
        if found and self.kept:
            found.append(f"the last{_last(len(self.kept))}")
        if found:
            *others, last = found
            yield f"activations: {', '.join(others)}{', and ' * bool(others)}{last}{why}"
        elif why and self.room is None:
            yield f"activations: all are kept{why}"
        if self.room is not None:
            yield f"activations: {self.room.text}{why * (not found)}"
        yield from (f"activations: {each}" for each in self._left(*(reason for _, reason in self.left_alone)))

    @property
    def unmet(self) -> str:
        """Which blocks do not run again although the policy says so, and why; empty if there are none. Blocks
        that the model itself recomputes do run again.
        """
        if not self.policy.startswith("recompute"):
            return ""
        if not self.recomputed and not self.left_alone:
            return _blocks(0)
        return "; ".join(self._left(*(reason for _, reason in self.left_alone if reason != BY_ITSELF)))

    def _left(self, *reasons: str) -> Iterator[str]:
        """Which blocks are left alone for each of some reasons."""
        for reason in dict.fromkeys(reasons):
            names = [name for name, each in self.left_alone if each == reason]
            more = f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
            yield f"{', '.join(names[:_NAMED])}{more} {_each(len(names))} {reason}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, for --json."""
        return {
            "policy": self.policy,
            "recomputed": list(self.recomputed),
            "leaving": list(self.leaving),
            "kept": list(self.kept),
            "left_alone": dict(self.left_alone),
            "why": self.why,
            "room": None if self.room is None else asdict(self.room),
        }


def _each(count: int) -> str:
    return "does not run again: the block" if count == 1 else "do not run again: each block"


def _last(count: int) -> str:
    return " keeps its activations" if count == 1 else f" {count} keep their activations"


KEEP = Residuals()


def _count(blocks: int) -> str:
    return "1 block" if blocks == 1 else f"{blocks} blocks"


def _blocks(count: int) -> str:
    if not count:
        return "no block runs again, because the model has none that may"
    return f"{_count(count)} {'runs' if count == 1 else 'run'} again in backward"


def check_policy(activations: str) -> None:
    """Raise ConfigError unless `activations` is one of POLICIES."""
    if activations not in POLICIES:
        names = ", ".join(f'"{each}"' for each in POLICIES)
        raise ConfigError(f"The policy of activations {activations!r} is not known.", f"Give one of {names}.")


Point = TypeVar("Point", bound=tuple[int, ...])


def quickest_first(
    points: Sequence[Point], seconds: Callable[[Sequence[Point]], float | None]
) -> Iterator[Point]:
    """Yield the points that fit, the one with the fewest seconds first, and the least of equally quick ones.

    seconds: function that returns a lower bound of the seconds of each of some points, which is exact if it
    is one point; None if none of them fits. It is called for boxes of points, of which only those are halved
    that may have the next point: what is yielded is as if each point had been looked at (branch and bound,
    Land and Doig 1960, with the best bound first).
    """
    boxes: list[tuple[float, Point, Sequence[Point]]] = []

    def add(some: Sequence[Point]) -> None:
        bound = seconds(some) if some else None
        if bound is not None:
            heapq.heappush(boxes, (bound, min(some), some))

    add(points)
    while boxes:
        _, first, some = heapq.heappop(boxes)
        if len(some) == 1:
            yield first
            continue
        sides = [sorted({each[axis] for each in some}) for axis in range(len(first))]
        axis = max(range(len(sides)), key=lambda side: len(sides[side]))
        middle = sides[axis][len(sides[axis]) // 2]
        add([each for each in some if each[axis] < middle])
        add([each for each in some if each[axis] >= middle])
