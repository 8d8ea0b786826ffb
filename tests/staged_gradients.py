"""A counter of gradients that updates find in staging, so that these gradients are never read from a disk.

Tests of bytes moved subtract them from what their formulas give. How many gradients stay in staging depends
on where leases lie in the pool, and thereby on when writes end, so that no formula gives this number.
"""

from __future__ import annotations

from typing import Any

import pytest

from infinity.optim.chain import Chain


class StagedGradients:
    """Counts the bytes of gradients that updates find in staging, for one runtime at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runtime: Any = None
        """The runtime whose updates count, or None. Updates while a runtime is made never count."""
        self._nbytes = 0
        compute = Chain.compute

        def counting(chain: Chain, *args: Any, **options: Any) -> Any:
            if self.runtime is not None and chain._store is self.runtime._components.store:
                # The lease that was kept since the gate opened. It has no bytes where the gradient went home.
                self._nbytes += 0 if chain._gradient_page.home.in_place else chain._kept.nbytes
            return compute(chain, *args, **options)

        monkeypatch.setattr(Chain, "compute", counting)

    def count(self) -> int:
        """Return the bytes of gradients found in staging since the last call, each rounded up to 4 KiB."""
        found, self._nbytes = self._nbytes, 0
        return found
