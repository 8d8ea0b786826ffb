"""Which gradients an update takes from staging, so that no disk has had them: the formulas of bytes need it.

What stays staged follows from where leases lie in the pool, and so from when writes end: it is counted.
"""

from __future__ import annotations

from typing import Any

import pytest

from infinity.optim.chain import Chain


class StagedGradients:
    """Counts, of one runtime at a time, the gradients that updates find staged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runtime: Any = None
        """Whose updates count; none without one. Rehearsals, inside of a runtime's making, never do."""
        self._nbytes = 0
        compute = Chain.compute

        def counting(chain: Chain, *args: Any, **options: Any) -> Any:
            if self.runtime is not None and chain._store is self.runtime._components.store:
                # Kept since the gate opened. Of those that were put home meanwhile it is not.
                self._nbytes += 0 if chain._gradient_page.home.in_place else chain._kept.nbytes
            return compute(chain, *args, **options)

        monkeypatch.setattr(Chain, "compute", counting)

    def count(self) -> int:
        """Bytes of the gradients, in whole 4 KiB blocks, since the last call."""
        found, self._nbytes = self._nbytes, 0
        return found
