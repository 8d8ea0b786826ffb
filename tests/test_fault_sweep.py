"""Tests of runs with commits in which one call to the disk fails; with -m slow every call does, in turn.

`python fault_sweep.py` prints what came of each call.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_sweep import CASES, FILES, Fault, Session, outcome, story, sweep
from faulty import start_torch_threads
from runs_on_disk import Run

TIMED = {"refused", "repeated", "lost", "unnoticed"}
"""What may come of a read or a write of the engine: threads decide which one is the n-th. `outcome` itself
asserts that no number is wrong, and that what was committed is not lost.
"""

REDUCED: dict[str, list[tuple[Fault, set[str]]]] = {
    "nvme, lazy": [
        (Fault("engine", "read", "train", 25), TIMED),
        (Fault("engine", "write", "train", 14), TIMED),
        (Fault("engine", "write", "save", 20), TIMED),
        (Fault("engine", "write", "load", 30), TIMED),
        (Fault("engine", "read", "resume", 12), TIMED),
    ],
    "mixed, eager": [
        (Fault("engine", "sync", "save", 2), {"lost", "unnoticed"}),
        (Fault("files", "sync directory", "save", 2), {"lost", "unnoticed"}),
        (Fault("engine", "write", "end", 1), TIMED | {"half"}),
        (Fault("engine", "read", "train", 18), TIMED | {"half"}),
    ],
    "unified, lazy": [
        (Fault("files", "rename", "save", 2), {"repeated"}),
        (Fault("files", "remove", "save", 6), {"unnoticed"}),
        (Fault("files", "read", "load", 40), {"lost"}),
    ],
}
"""Calls that the default run makes fail, with what may come of each."""


@pytest.mark.parametrize("case", REDUCED)
def test_a_call_fails(case: str, tmp_path: Path) -> None:
    start_torch_threads()
    (tmp_path / "expected").mkdir()
    expected = Session(Run(tmp_path / "expected", **CASES[case]))
    story(expected)
    expected.verify()
    for number, (fault, outcomes) in enumerate(REDUCED[case]):
        root = tmp_path / str(number)
        root.mkdir()
        assert outcome(Run(root, **CASES[case]), fault, expected) in outcomes, fault


def test_a_wrong_loss_would_be_seen(tmp_path: Path) -> None:
    for name in ("expected", "other"):
        (tmp_path / name).mkdir()
    expected = Session(Run(tmp_path / "expected", **CASES["unified, lazy"]))
    story(expected)
    expected.verify()
    expected.losses[3] += 1
    with pytest.raises(AssertionError, match="the loss of step 3"):
        story(Session(Run(tmp_path / "other", **CASES["unified, lazy"]), expected=expected))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_call_fails(case: str) -> None:
    table = sweep(lambda root: Run(root, **CASES[case]))
    assert {kind for where, kind, _, _ in table if where == "files"} == set(FILES)
    assert {kind for where, kind, _, _ in table if where == "engine"} == {"read", "write", "sync"}
    assert {found for *_, found in table} - {"half"} == {"refused", "repeated", "lost", "unnoticed"}
