"""Residual states: what becomes of a model's activations between forward and backward. Pure."""

from __future__ import annotations

from collections.abc import Iterator
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
    left_alone: tuple[tuple[str, str], ...] = ()
    """(path, reason) of the blocks that the policy would have recomputed, and that must not run again."""
    why: str = field(default="", compare=False)
    """Why the policy was chosen, if it was left to infinity and there was a choice; else empty."""

    @property
    def lines(self) -> Iterator[str]:
        """Lines of the plan's text on the policy; none where all activations are kept without a choice."""
        if self.policy == "recompute":
            yield f"activations: {_blocks(len(self.recomputed))}{self.why and f', {self.why}'}"
        elif self.why:
            yield f"activations: all are kept, {self.why}"
        if self.left_alone:
            named = ", ".join(f"{name} {reason}" for name, reason in self.left_alone[:_NAMED])
            more = len(self.left_alone) - _NAMED
            yield f"activations are kept where {named}{f', and in {more} more blocks' * (more > 0)}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, for --json."""
        return {
            "policy": self.policy,
            "recomputed": list(self.recomputed),
            "left_alone": dict(self.left_alone),
            "why": self.why,
        }


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
