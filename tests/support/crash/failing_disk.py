"""A disk that fails at the nth operation by which a copy of a run reaches it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiofiles
import pytest


class FailingDisk:
    """Makes the nth operation that puts bytes or names on the disk fail: a write, fsync, mkdir or rename."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.failing: tuple[int, int] | None = None
        """(which call fails, counted from 1; its errno)."""
        open_file, sync, mkdir, rename = aiofiles.open, os.fsync, Path.mkdir, Path.rename

        async def opened(path: Path, mode: str) -> Any:
            self.count()
            file = await open_file(path, mode)
            write = file.write

            async def counted(data: Any) -> int:
                self.count()
                return int(await write(data))

            file.write = counted
            return file

        def counting(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                self.count()
                return real(*arguments, **options)

            return call

        patch.setattr(aiofiles, "open", opened)
        patch.setattr(os, "fsync", counting(sync))
        patch.setattr(Path, "mkdir", counting(mkdir))
        patch.setattr(Path, "rename", counting(rename))

    def count(self) -> None:
        self.calls += 1
        if self.failing is not None and self.calls == self.failing[0]:
            raise OSError(self.failing[1], os.strerror(self.failing[1]))
