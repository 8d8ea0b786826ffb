"""Tests that crash states show mistakes in the code of commits (see commit_bugs.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from commit_bugs import BUGS
from commit_states import Loader
from crash_states import Disk

from infinity.aio import Faults

STATES = 400
"""Crash states within which each bug must show."""


@pytest.mark.sweep(most=9)
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(name: str, tmp_path: Path) -> None:
    bug, record = BUGS[name]
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults()
        bug(patch, faults)
        made = record(tmp_path / "run", faults)
    loader = Loader(made.directories, made.job)
    wrong = Disk(made.events, made.base).first_violation(loader, tmp_path / "state", count=STATES)
    assert wrong is not None
