"""Commits of a training run: made every so many steps, when the run is stopped, and at its end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from infinity.checkpoint.commit import Commit
from infinity.config import format_size
from infinity.errors import StorageFull
from infinity.runtime import Runtime

EVERY = 100
"""Number of steps between commits by default."""


@dataclass(frozen=True)
class Kept:
    """A commit that is durable, and stays."""

    generation: int
    step: int
    directory: Path
    slabs: Mapping[str, int]
    """Bytes of each slab file, by path."""

    @property
    def text(self) -> str:
        """What stays, as a phrase: "commit-42 (step 4200) stays in run (3.1 GiB in /mnt/nvme0)"."""
        places = list(dict.fromkeys(os.path.dirname(each) for each in self.slabs))
        where = "" if places == [str(self.directory)] else f" in {', '.join(places)}"
        size = format_size(sum(self.slabs.values()))
        return f"commit-{self.generation} (step {self.step}) stays in {self.directory} ({size}{where})"

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "generation": self.generation,
            "step": self.step,
            "directory": str(self.directory),
            "bytes": sum(self.slabs.values()),
            "slabs": dict(self.slabs),
        }


class Commits:
    """Makes the commits of one run, and knows which one is the last."""

    def __init__(
        self, runtime: Runtime, console: Console, *, every: int, identity: object, step: int | None
    ) -> None:
        """every: steps between commits. identity: says which job this is. step: of the commit that the run
        continues; None for a new run. console: where to warn of a full disk.
        """
        self._runtime = runtime
        self._console = console
        self._every = every
        self._identity = identity
        self._step = step
        """The step of the last commit, pending or durable; None if there is none."""
        self._pending: Commit | None = None

    def after_step(self, state: Mapping[str, Any], *, last: bool) -> None:
        """Begin a commit if one is due after the step that has just finished.

        state: what a later process goes on with; "step" is the number of the step. last: whether it is the
        run's last step, which is always committed.
        """
        if last or state["step"] % self._every == 0:
            self._save(state)

    def finish(self, state: Mapping[str, Any]) -> None:
        """Make the commit of the last finished step durable, unless it is already or there is no step.

        Raises StorageError if that fails; the commit before stays then.
        """
        if state["step"] and state["step"] != self._step:
            self._save(state)
        if self._pending is not None:
            self._pending.wait()

    def kept(self) -> Kept | None:
        """The commit that stays, after `finish`; None if there is none."""
        parts = self._runtime._components
        if self._step is None:
            return None
        assert parts.checkpoint is not None and parts.committer is not None and parts.store.nvme is not None
        tier = parts.checkpoint.streamed_from or parts.store.nvme
        slabs = {str(slab.path): slab.base + slab.nbytes for slab in tier.slabs}
        return Kept(parts.committer.generation, self._step, parts.checkpoint.directory, slabs)

    def _save(self, state: Mapping[str, Any]) -> None:
        try:
            commit = self._commit(state)
        except StorageFull as error:  # of the commit before, which has left this run as it was
            self._console.print(
                f"A commit failed, and training goes on: {escape(str(error))}",
                soft_wrap=True,
                highlight=False,
            )
            commit = self._commit(state)
        self._pending, self._step = commit, state["step"]

    def _commit(self, state: Mapping[str, Any]) -> Commit:
        return self._runtime._commit(dict(state), identity=self._identity)
