"""How much of the NVMe tier lies on each path. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

from infinity.config import format_size
from infinity.errors import BudgetError

_PERIODS = (4, 8, 16, 32, 64, 128, 256)
_TOLERANCE = 0.05


def proportional_shares(nbytes: int, budgets: Sequence[int], speeds: Sequence[float]) -> list[float]:
    """Bytes per path: in proportion to `speeds`, none above its budget, adding up to `nbytes`.

    All paths then finish a transfer of everything at one time, except those whose budget holds them back.
    The sum of budgets must be at least `nbytes`.
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


def stripe_weights(
    nbytes: int, budgets: Sequence[int], speeds: Sequence[float], stripe_bytes: int
) -> list[int]:
    """Stripes of each path in one period, for a volume of `nbytes` bytes.

    Close to `proportional_shares` with the shortest period that comes within 5% of it; a path may get none.
    A path's file needs `path_bytes` of room, never more than its budget. Raises BudgetError where the
    budgets cannot hold `nbytes` in whole periods.
    """
    if nbytes <= sum(budgets):
        shares = proportional_shares(nbytes, budgets, speeds)
        best: tuple[float, list[int]] | None = None
        for period in _PERIODS:
            limits = [budget * period / nbytes for budget in budgets]
            weights = _apportion(shares, period, limits)
            needed = path_bytes(nbytes, weights, stripe_bytes)
            if any(need > budget for need, budget in zip(needed, budgets, strict=True)):
                continue
            error = max(abs(w / period - share / nbytes) for w, share in zip(weights, shares, strict=True))
            if best is None or error < best[0]:
                divisor = math.gcd(*weights)
                best = error, [weight // divisor for weight in weights]
            if error <= _TOLERANCE / len(budgets):
                break
        if best is not None:
            return best[1]
    raise BudgetError(
        f"{format_size(nbytes)} do not fit the nvme budget of {format_size(sum(budgets))} in stripes of "
        f"{format_size(stripe_bytes)}.",
        f"Give the nvme tier at least {format_size(nbytes)} and a few stripes per path more.",
        needed=nbytes,
    )


def path_bytes(nbytes: int, weights: Sequence[int], stripe_bytes: int) -> list[int]:
    """Room that each path's file needs for a volume of `nbytes`: whole periods, in bytes.

    A single path is not striped and needs just `nbytes`.
    """
    if sum(weight > 0 for weight in weights) == 1:
        return [nbytes if weight else 0 for weight in weights]
    periods = -(-nbytes // (sum(weights) * stripe_bytes))
    return [periods * weight * stripe_bytes for weight in weights]


def _apportion(shares: Sequence[float], period: int, limits: Sequence[float]) -> list[int]:
    """Whole stripes that add up to `period` by largest remainders, paths at their limit last."""
    total = sum(shares)
    exact = [share / total * period for share in shares]
    weights = [math.floor(share) for share in exact]
    order = sorted(
        range(len(exact)), key=lambda path: (weights[path] + 1 > limits[path], weights[path] - exact[path])
    )
    for path in order[: period - sum(weights)]:
        weights[path] += 1
    return weights
