"""Disk files that record every operation, and of which one fails: the observer for tests of what is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from infinity.system.disk_files import DiskFiles


class FailingFiles(DiskFiles):
    """A DiskFiles that records its operations. The one with number `fail_at`, from 0, raises `code`."""

    def __init__(self, fail_at: int | None = None, code: int = errno.EIO) -> None:
        super().__init__(self)
        self.fail_at = fail_at
        self.code = code
        self.operations: list[tuple[str, str]] = []
        """(operation, name of the file or directory) of each operation that has begun."""

    def begins(self, operation: str, path: str, *, target: str, offset: int, data: bytes) -> int:
        self.operations.append((operation, Path(path).name))
        if len(self.operations) - 1 == self.fail_at:
            raise OSError(self.code, os.strerror(self.code))
        return len(self.operations) - 1

    def ended(self, ticket: int) -> None:
        pass

    @property
    def failed(self) -> tuple[str, str] | None:
        """The operation that failed, or None if there were too few operations."""
        reached = self.fail_at is not None and self.fail_at < len(self.operations)
        return self.operations[self.fail_at] if reached else None  # type: ignore[index]
