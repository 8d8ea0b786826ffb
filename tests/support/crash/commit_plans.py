"""Plans of what a run of several ranks with commits does, and where one of them dies or fails.

committing_ranks.py carries a plan out, in each rank.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rank_processes

from infinity.checkpoint import commit_files
from infinity.distributed.failure_event import TIMEOUT_VARIABLE

PLAN = "COMMIT_PLAN"
"""The environment variable that has the plan as JSON."""
BOUND = 60.0
"""Seconds after which a rank hangs."""


@dataclass(frozen=True)
class Plan:
    """A training with a commit after every step."""

    directory: str
    """Holds the commits of all ranks, and the slabs of homes on NVMe."""
    size: int = 2
    """Number of ranks."""
    stage: int = 3
    homes: tuple[str, ...] = ("unified",)
    """The home (ranked_cases.HOMES) of each rank's pages. Beyond the last it is the first again."""
    update: str = "lazy"
    subject: str = "mlp"
    last: int = 8
    """The number of steps."""
    resume: bool = False
    """Whether to continue the commits in the directory, rather than to begin anew."""
    waits: str = "all"
    """Which ranks wait for commits: "all", "zero" (rank 0) or "none"."""
    exports: bool = False
    """Whether rank 0 exports the model after every save."""
    rank: int = -1
    """The rank that dies or fails; -1: none."""
    point: str = ""
    """Where it does; see committing_ranks.POINTS."""
    nth: int = 1
    """How many times the point comes; or milliseconds after the first step, for "any time"."""
    pause: float = 0.2
    """Seconds between the point and the death, in which the others come as far as they can."""
    fault: str = "kill"
    """What comes at the point: "kill", or a fault of link_faults.py."""
    timeout: float = 300.0
    """Seconds for which ranks wait for each other. No death needs it to be noticed."""

    @property
    def commits(self) -> Path:
        return Path(self.directory) / "commits"


def launch(
    plan: Plan,
    function: str,
    script: str = "committing_ranks.py",
    timeout: float = BOUND,
    nodes: Sequence[Mapping[str, str]] = (),
) -> list[rank_processes.Outcome]:
    """Run a function of a script on all ranks of a plan. Returns the outcomes, in the order of ranks.

    nodes: those of the ranks, as for `rank_processes.run`.
    """
    return rank_processes.run(
        script,
        function,
        size=plan.size,
        timeout=timeout,
        environment={
            PLAN: json.dumps(dataclasses.asdict(plan)),
            TIMEOUT_VARIABLE: f"{plan.timeout:g}",
        },
        nodes=nodes,
    )


def results(found: list[rank_processes.Outcome]) -> list[Any]:
    """What ranks have returned that must all have ended well."""
    assert all(each.code == 0 and each.result is not None for each in found), told(found)
    return [each.result for each in found]


def told(found: list[rank_processes.Outcome]) -> str:
    """Outcomes as text for an assertion."""
    return "\n".join(
        f"rank {rank}: {each.code} {each.error}\n{each.written}" for rank, each in enumerate(found)
    )


def generations(plan: Plan) -> list[list[int]]:
    """The numbers of the commits in the directory of each rank."""
    places = [plan.commits / f"rank-{rank}" for rank in range(plan.size)]
    return [commit_files.generations(each) if each.is_dir() else [] for each in places]
