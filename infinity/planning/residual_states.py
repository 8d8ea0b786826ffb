"""Residual states: what becomes of a model's activations between forward and backward. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from infinity.config import format_size
from infinity.errors import ConfigError
from infinity.planning.predict import PhaseBytes

POLICIES = ("auto", "keep", "recompute", "recompute+offload", "offload")
"""Values of `activations=` of `infinity.offload`. "auto" becomes one of the others in the plan."""

_NAMED = 3
"""The most names that a line has; it counts the others."""


LARGEST_WINDOW = 32 << 20
"""Bytes of the largest window: a link of 50 GB/s moves them in 0.7 ms, and a disk of 3 GB/s in 11 ms."""


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
        if self.policy.startswith("recompute"):
            rest = f", and the last{_last(len(self.kept))}" * bool(self.kept)
            yield f"activations: {_blocks(len(self.recomputed))}{rest}{self.why and f', {self.why}'}"
        elif self.why and self.room is None:
            yield f"activations: all are kept, {self.why}"
        if self.room is not None:
            why = f", {self.why}" * bool(self.why and self.policy == "offload")
            yield f"activations: {self.room.text}{why}"
        for reason in dict.fromkeys(reason for _, reason in self.left_alone):
            names = [name for name, each in self.left_alone if each == reason]
            more = f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
            yield f"activations of {', '.join(names[:_NAMED])}{more} are kept: {_each(len(names))} {reason}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, for --json."""
        return {
            "policy": self.policy,
            "recomputed": list(self.recomputed),
            "kept": list(self.kept),
            "left_alone": dict(self.left_alone),
            "why": self.why,
            "room": None if self.room is None else asdict(self.room),
        }


def _each(count: int) -> str:
    return "the block" if count == 1 else "each block"


def _last(count: int) -> str:
    return " keeps its activations" if count == 1 else f" {count} keep their activations"


KEEP = Residuals()


def _blocks(count: int) -> str:
    if not count:
        return "all are kept, because the model has no blocks that may run again"
    return "1 block runs again in backward" if count == 1 else f"{count} blocks run again in backward"


def check_policy(activations: str) -> None:
    """Raise ConfigError unless `activations` is one of POLICIES."""
    if activations not in POLICIES:
        names = ", ".join(f'"{each}"' for each in POLICIES)
        raise ConfigError(f"The policy of activations {activations!r} is not known.", f"Give one of {names}.")


def quickest_count(
    blocks: int, seconds: Callable[[int], float | None], floor: Callable[[int], float]
) -> int | None:
    """Return how many of the first blocks are best recomputed, while the others keep their activations: the
    number from 0 to `blocks` for which a step is quickest, the least of several; None if nothing fits.

    seconds: function that returns the seconds of a step with that many recomputed blocks, or None if the step
    does not fit. If n blocks fit, so do n + 1. floor: function that returns a lower bound of these seconds,
    which does not fall from n to n + 1: more is computed. So the numbers above the first one that fits are
    tried in their order until the bound says that none of the rest is quicker.
    """
    if seconds(blocks) is None:
        return None
    low, high = 0, blocks
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if seconds(middle) is not None else (middle + 1, high)
    best, least = low, seconds(low)
    for count in range(low + 1, blocks + 1):
        if least is None or floor(count) >= least:
            break
        found = seconds(count)
        if found is not None and found < least:
            best, least = count, found
    return best
