"""Striping: the share of the NVMe tier's bytes on each path, and the slabs' record in a manifest. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.config import format_size
from infinity.errors import BudgetError, ConfigError
from infinity.tiers.tier import PAGE_ALIGNMENT

_PERIODS = (*range(1, 17), 32, 64, 128, 256)
_TOLERANCE = 0.05
_SMALLEST_STRIPE = 4096
_SPARE = 32
"""Budgets are always enough if they have at least one byte to spare for each `_SPARE` bytes of a volume."""


@dataclass(frozen=True)
class Striping:
    """The pattern in which the stripes of a volume are distributed over its paths.

    A period of the pattern has as many stripes as the sum of `weights`.
    """

    weights: tuple[int, ...]
    """Number of stripes that lie on each path in one period. The numbers have no common divisor. A number
    may be zero.
    """
    stripe_bytes: int

    def path_bytes(self, nbytes: int) -> list[int]:
        """Return the bytes of each path's file for a volume of `nbytes` bytes, rounded up to whole periods.

        If only one path has a weight above zero, the volume is not striped, and the file there needs
        exactly `nbytes` bytes.
        """
        if sum(weight > 0 for weight in self.weights) == 1:
            return [nbytes if weight else 0 for weight in self.weights]
        periods = -(-nbytes // (sum(self.weights) * self.stripe_bytes))
        return [periods * weight * self.stripe_bytes for weight in self.weights]

    def volume_bytes(self, path_bytes: Sequence[int]) -> int:
        """Return the bytes of the largest volume whose files fit in `path_bytes` bytes on each path."""
        used = [(weight, size) for weight, size in zip(self.weights, path_bytes, strict=True) if weight]
        if len(used) == 1:
            return used[0][1]
        periods = min(size // (weight * self.stripe_bytes) for weight, size in used)
        return periods * sum(self.weights) * self.stripe_bytes


def proportional_shares(nbytes: int, budgets: Sequence[int], speeds: Sequence[float]) -> list[float]:
    """Divide `nbytes` bytes among the paths in proportion to their speeds; return the bytes of each path.

    No path gets more than its budget. With these shares all paths finish a transfer of all bytes at the same
    time, except for paths at their budget. budgets: the most bytes of each path; their sum must be at least
    `nbytes`. speeds: a number for each path, of which only the ratios count.
    """
    shares = [0.0] * len(budgets)
    left, open_paths = float(nbytes), list(range(len(budgets)))
    while open_paths:
        speed = sum(speeds[path] for path in open_paths)
        full = [path for path in open_paths if left * speeds[path] / speed > budgets[path]]
        if not full:
            for path in open_paths:
                shares[path] = left * speeds[path] / speed
            break
        for path in full:
            shares[path] = float(budgets[path])
            left -= budgets[path]
            open_paths.remove(path)
    return shares


def choose_striping(
    nbytes: int, budgets: Sequence[int], speeds: Sequence[float], stripe_bytes: int
) -> Striping:
    """Choose the striping of a volume of `nbytes` bytes over paths with these budgets (in bytes) and speeds.

    The striping has the shortest period that comes close to `proportional_shares`: the bytes of a path may
    differ from its share there by at most 5% of `nbytes / len(budgets)`. If no period comes so close, the
    closest one is taken. No path gets more than its budget. Stripes are `stripe_bytes` long. Where budgets
    are so tight that whole periods of such stripes do not fit, the length of stripes is halved until they
    fit. If no length fits, stripes are distributed in proportion to the budgets.

    Raises BudgetError where the budgets cannot hold `nbytes` bytes. They always can if they have 33 bytes
    for each 32 bytes of the volume, and if `nbytes` and all budgets are multiples of 4096. Raises
    ConfigError where `nbytes` or a speed is not positive, or the numbers of speeds and budgets differ.
    """
    if nbytes <= 0:
        raise ConfigError(f"An nvme tier of {nbytes} bytes was asked for.", "Ask for at least one page.")
    if len(speeds) != len(budgets) or not all(0 < speed < math.inf for speed in speeds):
        raise ConfigError(
            f"The speeds {list(speeds)} do not fit {len(budgets)} paths.",
            "Give one positive number per path.",
        )
    if nbytes <= sum(budgets):
        shares = proportional_shares(nbytes, budgets, speeds)
        stripe = stripe_bytes
        while stripe >= _SMALLEST_STRIPE:
            best = _closest(nbytes, budgets, shares, stripe)
            if best is not None:
                return best
            stripe = stripe // 2 // _SMALLEST_STRIPE * _SMALLEST_STRIPE
        fullest = _by_budget(nbytes, budgets)
        if sum(fullest.weights) and _fits(fullest, nbytes, budgets):
            return fullest
    raise BudgetError(
        f"{format_size(nbytes)} do not fit the nvme budget of {format_size(sum(budgets))} on {len(budgets)} "
        "path(s).",
        f"Give one path {nbytes} bytes, or all paths together about 3% more.",
        needed=nbytes if len(budgets) == 1 else None,
    )


def _closest(nbytes: int, budgets: Sequence[int], shares: Sequence[float], stripe: int) -> Striping | None:
    best: tuple[float, Striping] | None = None
    for period in _PERIODS:
        limits = [budget * period / nbytes for budget in budgets]
        weights = _apportion(shares, period, limits)
        divisor = math.gcd(*weights)
        striping = Striping(tuple(weight // divisor for weight in weights), stripe)
        if not _fits(striping, nbytes, budgets):
            continue
        error = max(abs(w / period - share / nbytes) for w, share in zip(weights, shares, strict=True))
        if best is None or error < best[0]:
            best = error, striping
        if error <= _TOLERANCE / len(budgets):
            break
    return best[1] if best else None


def _by_budget(nbytes: int, budgets: Sequence[int]) -> Striping:
    """Return a striping with stripes of the smallest size, whose weights are in proportion to the budgets.

    Each path's budget is rounded down to whole periods. The number of periods is chosen so that all paths
    together lose at most `nbytes / _SPARE` bytes by this. If the budgets are smaller than a stripe, all
    weights may be zero.
    """
    periods = max(1, nbytes // (_SMALLEST_STRIPE * _SPARE * len(budgets)))
    weights = [budget // (_SMALLEST_STRIPE * periods) for budget in budgets]
    divisor = math.gcd(*weights) or 1
    return Striping(tuple(weight // divisor for weight in weights), _SMALLEST_STRIPE)


def _fits(striping: Striping, nbytes: int, budgets: Sequence[int]) -> bool:
    needed = striping.path_bytes(nbytes)
    return all(need <= budget for need, budget in zip(needed, budgets, strict=True))


def _apportion(shares: Sequence[float], period: int, limits: Sequence[float]) -> list[int]:
    """Return the number of stripes of one period that go to each path, by the method of largest remainders.

    shares: bytes for each path. period: number of stripes in a period. limits: the most stripes of a period
    that each path's budget allows. A path at its limit gets one of the stripes that are left after rounding
    down only if every other path is at its limit too.
    """
    total = sum(shares)
    exact = [share / total * period for share in shares]
    weights = [math.floor(share) for share in exact]
    for _ in range(period - sum(weights)):
        path = min(
            range(len(exact)),
            key=lambda path: (weights[path] + 1 > limits[path], weights[path] - exact[path]),
        )
        weights[path] += 1
    return weights


_MOST_STRIPES = 65536
_LONGEST_STRIPE = 1 << 40
_MOST_BYTES = 1 << 62


@dataclass(frozen=True)
class SlabRecord:
    """One slab of a volume, as a manifest stores it."""

    uuid: str
    """32 hexadecimal digits, which are part of the file's name, so no directory is stored."""
    nbytes: int
    """Bytes of pages."""
    weight: int
    """Number of stripes of a period that lie in the slab."""

    def check(self) -> None:
        """Raise ValueError, with a text that begins with a field's name, for values that no slab has."""
        if not re.fullmatch("[0-9a-f]{32}", self.uuid):
            raise ValueError("uuid is not 32 hexadecimal digits")
        _check_multiple("nbytes", self.nbytes, _MOST_BYTES)
        if not 0 < self.weight <= _MOST_STRIPES:
            raise ValueError(f"weight is {self.weight}")


@dataclass(frozen=True)
class VolumeRecord:
    """The slabs of a volume and their striping, which say where each byte lies."""

    stripe_bytes: int
    slabs: tuple[SlabRecord, ...]
    """The slabs in the volume's order, on which the places of bytes depend."""

    def check(self) -> None:
        """Raise ValueError, with a text that begins with a field's name, for values that no volume has."""
        _check_multiple("stripe_bytes", self.stripe_bytes, _LONGEST_STRIPE)
        if len({slab.uuid for slab in self.slabs}) < len(self.slabs):
            raise ValueError("slabs has a slab twice")
        weight = sum(slab.weight for slab in self.slabs)
        if not 0 < weight <= _MOST_STRIPES:
            raise ValueError(f"slabs has {weight} stripes in a period")
        if not self.nbytes:
            raise ValueError("slabs has no bytes")

    @property
    def striping(self) -> Striping:
        """The pattern of the stripes over the slabs."""
        return Striping(tuple(slab.weight for slab in self.slabs), self.stripe_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the volume, in whole periods."""
        return self.striping.volume_bytes([slab.nbytes for slab in self.slabs])


def _check_multiple(name: str, nbytes: int, most: int) -> None:
    if not 0 < nbytes <= most or nbytes % PAGE_ALIGNMENT:
        raise ValueError(f"{name} is {nbytes}, not a multiple of {PAGE_ALIGNMENT} up to {most}")
