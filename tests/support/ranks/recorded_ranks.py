"""Recorded ranks: runs of two ranks that commit, as the ranks of recording_ranks.py record them."""

from __future__ import annotations

import json
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import rank_processes
from committed_runs import COMMITS
from ranked_commits import RANKS, Job, Node
from recorded_run import Event, Images, with_whole_slabs
from recording_ranks import ASKED, KILLED, PATIENCE, Task, file_of


@dataclass(frozen=True)
class Recorded:
    """What was recorded on one node: the events, and the files before them in all directories."""

    events: list[Event]
    base: Images


@dataclass(frozen=True)
class Run:
    """A recorded run: how it is made, and its parts, one after the other."""

    job: Job = field(default_factory=Job)
    parts: Sequence[str] = ("whole",)
    before: Job | None = None
    """How an earlier run was made, which the first part resumes and which is not recorded."""
    nodes: Sequence[int] = range(RANKS)
    """Rank -> the node on which it is. In an earlier run rank n was on node n."""

    def tasks(self, root: Path, bug: str | None) -> list[Task]:
        """All parts. The bug is put into those that are recorded."""
        found = [Task(each, asdict(self.job), [*self.nodes], str(root), bug) for each in self.parts]
        if self.before is not None:
            found.insert(0, Task("saved", asdict(self.before), [*range(RANKS)], str(root), None))
        return found


def record(runs: Sequence[tuple[Run, Path, str | None]]) -> Iterator[list[Recorded]]:
    """Record runs, and yield for each what was recorded on each node by all of its processes.

    runs: each with a directory, and with the name of a bug or None. The same processes go through all runs,
    as far as these leave them alive.
    """
    for _, root, _ in runs:
        root.mkdir(parents=True, exist_ok=True)
    left = [deque(run.tasks(root, bug)) for run, root, bug in runs]
    while any(left):
        tasks = []
        for of_run in left:
            while of_run and of_run[0].part not in KILLED:
                tasks.append(of_run.popleft())
        tasks += [of_run.popleft() for of_run in [each for each in left if each][:1]]
        _launch("recording", tasks)
    for run, root, _ in runs:
        yield [_recorded(run, Node(root, number)) for number in range(RANKS)]


def _recorded(run: Run, node: Node) -> Recorded:
    """What was recorded on a node. Each process has counted its events from 0."""
    parts = [pickle.loads(file_of(node, part).read_bytes()) for part in run.parts]
    earlier = [] if run.before is None else [f"begun 1 {COMMITS[0]}", "durable 1"]
    events = [Event("mark", text, "", 0, b"", at, at, True, 0, False) for at, text in enumerate(earlier, 1)]
    for of_part, _ in parts:
        start = max((n for each in events for n in (each.submitted, each.completed or 0)), default=0)
        for each in of_part:
            ended = None if each.completed is None else each.completed + start
            events.append(each._replace(submitted=each.submitted + start, completed=ended))
    return Recorded(with_whole_slabs(events), parts[0][1])


def resume(runs: Sequence[tuple[Run, Path]]) -> list[list[float]]:
    """Resume runs from their files, below a directory each, train MORE steps, and commit.

    Returns the losses of each run: those of all ranks' micro-batches in the order of steps.
    """
    found = _launch("resuming", [(asdict(run.job), str(root), [*run.nodes]) for run, root in runs])
    return [
        [loss for losses in zip(*of_ranks, strict=True) for loss in losses]
        for of_ranks in zip(*found, strict=True)
    ]


def _launch(function: str, asked: Any) -> list[Any]:
    """Run a function of this file on all ranks. Returns what it returned on each."""
    outcomes = rank_processes.run(
        "recording_ranks.py",
        function,
        size=RANKS,
        timeout=PATIENCE * (1.0 + len(asked)),
        environment={ASKED: json.dumps(asked), "INFINITY_RANK_TIMEOUT": str(PATIENCE // 2)},
    )
    assert not any(each.code or each.error for each in outcomes), [each.text for each in outcomes]
    return [each.result for each in outcomes]
