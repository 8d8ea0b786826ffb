"""Tests of the command line: exit codes, JSON on the last line, and no traceback for a user's error."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infinity import __version__, cli


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "infinity", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_commands_find_no_gpu_in_tests_for_the_cpu() -> None:
    """Neither in this process nor in another one, so that no default device is a GPU."""
    assert not torch.cuda.is_available()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_doctor_examines_this_machine(warm: None, tmp_path: Path) -> None:
    done = run("doctor", "--json", "--path", os.fspath(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["infinity"] == __version__
    findings = {finding["name"]: finding for finding in report["findings"]}
    for finding in findings.values():
        assert bool(finding["missing"]) == bool(finding["cost"]) == bool(finding["cure"]), finding
    assert findings["memory speed"]["figures"]["bytes_per_second"] > 1e8
    speed = findings[f"{tmp_path} speed"]["figures"]
    assert min(speed["read"], speed["write"], speed["mixed"]) > 1e6
    assert speed["backend"] in ("io_uring", "libaio", "threads")
    assert findings[f"{tmp_path} threads"]["figures"]["ok"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_which_path_cannot_hold_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--path", os.fspath(tmp_path / "absent")]) == 1
    done = capsys.readouterr()
    assert "cannot hold pages" in done.out
    assert "Create the directory" in done.out.replace("\n", " ")
    assert "Traceback" not in done.err + done.out


def test_users_errors_are_one_paragraph_and_a_json_line(warm: None, tmp_path: Path) -> None:
    done = run("doctor", "--json", "--path", os.fspath(tmp_path), INFINITY_ISA="mmx")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("ConfigError: ")
    assert "Traceback" not in done.stderr
    error = json.loads(done.stdout.splitlines()[-1])
    assert error["error"] == "ConfigError"
    assert "mmx" in error["cause"]
    assert error["cure"]


def test_help_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", "--help"])
    assert stop.value.code == 0
    with pytest.raises(SystemExit) as stop:
        cli.main(["levitate"])
    assert stop.value.code == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_quietly_with_its_own_exit_code(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: object) -> int:
        signal.raise_signal(number)
        pytest.fail("the signal did not arrive")

    monkeypatch.setattr(cli.doctor, "run", interrupted)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr() == ("", "")
    assert cli.main(["doctor", "--json"]) == code
    assert capsys.readouterr() == (f'{{"stopped": "{number.name}"}}\n', "")
