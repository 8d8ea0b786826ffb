"""Tests that benchmarks/terminal_picture.py draws a command's output, without most of the progress lines."""

from __future__ import annotations

import importlib
import os
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SCRIPT = (
    "print('step 1/9  loss {3}'); print('step 5/9  loss <2>'); print('step 9/9  loss 1'); print('done & out')"
)


@pytest.fixture
def terminal_picture(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(os.fspath(BENCHMARKS))
    return importlib.import_module("terminal_picture")


def test_a_command_is_run_and_drawn(terminal_picture: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out.svg"
    arguments = ["--out", str(out), "--in", str(tmp_path), "--", "python3", "-c", SCRIPT]
    assert terminal_picture.main(arguments) == 0
    drawn = [
        "".join(element.itertext()).replace("\N{NO-BREAK SPACE}", " ").strip()
        for element in ET.parse(out).getroot().iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"step 1/9  loss {3}", "step 5/9  loss <2>", "step 9/9  loss 1", "done & out"} <= set(drawn)
    assert list(tmp_path.iterdir()) == [out], "the command's directory is gone"


def test_three_lines_of_progress_stay(terminal_picture: ModuleType) -> None:
    progress = [f"step {step}/5  loss 2.00" for step in range(1, 6)]
    printed = "\n".join(["the plan", "", *progress, "step by step", "done", ""])
    shown = "\n".join(["the plan", "", progress[0], progress[2], progress[4], "step by step", "done"])
    assert terminal_picture.fewer_lines(printed) == shown
    assert terminal_picture.fewer_lines("nothing\n") == "nothing"
