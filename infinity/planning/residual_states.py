"""Residual states: what becomes of a model's activations between forward and backward. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from infinity.errors import ConfigError

POLICIES = ("auto", "keep", "recompute")
"""Values of `activations=` of `infinity.offload`. "auto" becomes one of the others in the plan."""

_NAMED = 3
"""The most names that a line has; it counts the others."""


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
    why: str = field(default="", compare=False)
    """Why the policy was chosen, if it was left to infinity and there was a choice; else empty."""

    @property
    def lines(self) -> Iterator[str]:
        """Lines of the plan's text on the policy; none where all activations are kept without a choice."""
        if self.policy == "recompute":
            rest = f", and the last{_last(len(self.kept))}" * bool(self.kept)
            yield f"activations: {_blocks(len(self.recomputed))}{rest}{self.why and f', {self.why}'}"
        elif self.why:
            yield f"activations: all are kept, {self.why}"
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
