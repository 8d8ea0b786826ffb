"""A counter of the gradient bytes that updates find in staging, and therefore do not read from a disk.

Tests have formulas for the bytes that a step moves, and subtract the counted bytes from them. No formula
gives the counted bytes: which gradients stay in staging (the host RAM for updates) depends on which ranges of
staging are free at that moment, and so on the times at which earlier writes to the disk end.
"""

from __future__ import annotations

from typing import Any

import pytest

from infinity.optim.chunk_update import ChunkUpdate


class StagedGradients:
    """Counts the bytes of gradients that the updates of one runtime find in staging.

    Counting begins when the attribute `runtime` is set to the runtime. monkeypatch: pytest's fixture, through
    which updates are changed to count; it undoes the change at the end of the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runtime: Any = None
        """The runtime whose updates are counted; None if none are. To be set after `offload` has returned."""
        self._nbytes = 0
        compute = ChunkUpdate.compute

        def counting(update: ChunkUpdate, *args: Any, **options: Any) -> Any:
            if self.runtime is not None and update._store is self.runtime._components.store:
                # What was staged when the update was decided. It has no bytes where the gradient went home.
                self._nbytes += update.gradient_bytes if update.holds_gradient else 0
            return compute(update, *args, **options)

        monkeypatch.setattr(ChunkUpdate, "compute", counting)

    def count(self) -> int:
        """Return the bytes that were counted since the last call of `count`, and start again at 0.

        The gradients of each chunk are rounded up to a multiple of 4 KiB.
        """
        found, self._nbytes = self._nbytes, 0
        return found
