"""A disk that fails at the nth operation by which a copy of a run reaches it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infinity.checkpoint import atomic_directory


class FailingDisk:
    """Makes the nth operation that puts bytes or names on the disk fail: a write, fsync, mkdir or rename."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.failing: tuple[int, int] | None = None
        """(which call fails, counted from 1; its errno)."""

        def counting(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                self.count()
                return real(*arguments, **options)

            return call

        patch.setattr(atomic_directory, "open", counting(open), raising=False)
        patch.setattr(atomic_directory, "_write", counting(atomic_directory._write))
        patch.setattr(os, "fsync", counting(os.fsync))
        patch.setattr(Path, "mkdir", counting(Path.mkdir))
        patch.setattr(Path, "rename", counting(Path.rename))

    def count(self) -> None:
        self.calls += 1
        if self.failing is not None and self.calls == self.failing[0]:
            raise OSError(self.failing[1], os.strerror(self.failing[1]))
