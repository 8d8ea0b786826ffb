"""Finding: what the doctor reports of one feature, or of one trial of the self-test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinity.errors import InfinityError


@dataclass
class Finding:
    """A feature that this machine has or lacks, or a trial that has passed or failed."""

    section: str
    name: str
    found: str
    """What the machine has, for people."""
    figures: Mapping[str, Any]
    """The same facts for --json: bytes, bytes per second, flags. A failure has "error", the name of the
    error's class.
    """
    missing: bool = False
    """Whether the feature is missing or limited, or the trial has failed."""
    cost: str = ""
    cure: str = ""

    def __post_init__(self) -> None:
        if not self.missing:
            self.cost = self.cure = ""

    @property
    def failed(self) -> bool:
        return "error" in self.figures

    @classmethod
    def of(cls, error: InfinityError, section: str, name: str, found: str, **figures: Any) -> Finding:
        """The finding of a failure. found: what does not work. figures: further ones."""
        kind = {"error": type(error).__name__, **figures}
        return cls(section, name, found, kind, True, error.cause, error.cure)
