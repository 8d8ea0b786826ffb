"""Tests of the log of steps: what stays of it when a run is continued."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from infinity.cli.training_run import open_log

LINES = ['{"step": 1, "loss": 2.0}\n', '{"step": 2, "loss": null}\n', '{"step": 3}\n', '{"step": 4']


def continued(path: Path, after: int) -> str:
    with open_log(str(path), after=after) as log:
        assert log is not None
        log.write("next\n")
    return path.read_text()


@pytest.mark.parametrize("after", [0, 1, 2, 3, 9])
def test_lines_of_later_steps_go(after: int, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(LINES))
    path.chmod(0o640)
    assert continued(path, after) == "".join(LINES[: min(after, 3)]) + "next\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["log"]


def test_what_is_no_line_of_a_step_goes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('words\n[1]\n{"loss": 1}\n{"step": "1"}\n\n\udcff'.encode("utf-8", "replace").decode())
    assert continued(path, 5) == "next\n"


def test_a_log_that_is_missing_is_made(tmp_path: Path) -> None:
    assert continued(tmp_path / "log", 5) == "next\n"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "log", tmp_path / "link"
    path.write_text("".join(LINES))
    link.symlink_to(path)
    assert continued(link, 1) == LINES[0] + "next\n"
    assert link.is_symlink()
    assert path.read_text() == link.read_text()


def test_a_new_run_empties_its_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(LINES))
    with open_log(str(path)):
        assert path.read_text() == ""
    with open_log(None, after=3) as log:
        assert log is None
