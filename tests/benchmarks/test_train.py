"""Tests that benchmarks/train.py runs, reports and leaves no file. Figures are not checked."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import warm_python
from torch_releases import fsdp2_on_a_cpu

from infinity.system import machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import limits  # noqa: E402
import specs  # noqa: E402
import train  # noqa: E402
import turns  # noqa: E402
from peers import fsdp2, plain  # noqa: E402
from peers.task import Batches, Task  # noqa: E402
from training_report import ratios  # noqa: E402


def arguments(directory: Path, *more: str) -> list[str]:
    return ["--quick", "--device", "cpu", "--directory", str(directory), *more]


def command(directory: Path, *more: str) -> list[str]:
    return [sys.executable, str(BENCHMARKS / "train.py"), *arguments(directory, *more)]


@pytest.fixture(autouse=True)
def one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set OMP_NUM_THREADS to 1, which the processes that tests start inherit."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


RUNS = {
    "in turns": [
        "train",
        *("--peer", "deepspeed:nvme", "--peer", "torch:fused"),
        *("--ours", "host=4MiB", "--ours", "all-nvme"),
    ],
    "fresh": ["train", "--ours", "host=4KiB", "--peer", "torch:plain", "--processes", "fresh"],
}


@dataclass
class Ran:
    code: int
    out: str
    err: str
    left: list[Path]
    """Paths that the run left in its directory."""

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Run every command line of RUNS, and return the outcomes by the names in RUNS.

    Contenders run in processes of their own. In these processes the import of `deepspeed` always fails,
    even where DeepSpeed is installed.
    """
    root = tmp_path_factory.mktemp("runs")
    (root / "deepspeed.py").write_text("raise ImportError('broken on purpose')\n")
    found = {}
    for name, (module, *more) in RUNS.items():
        directory = root / name
        directory.mkdir()
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setenv("PYTHONPATH", os.pathsep.join([str(root), *sys.path]))
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setattr(subprocess, "Popen", warm_python.Popen)
            code = importlib.import_module(module).main(arguments(directory, *more, "--json"))
        found[name] = Ran(code, out.getvalue(), err.getvalue(), list(directory.iterdir()))
    return found


def test_contenders_in_turns_and_one_that_does_not_start(ran: dict[str, Ran]) -> None:
    done = ran["in turns"]
    assert done.code == 1
    assert "deepspeed:nvme ended with 1" in done.err and "broken on purpose" in done.err
    report = done.report
    contenders, names = report["contenders"], ["infinity host=4MiB", "infinity all-nvme", "torch:fused"]
    assert list(contenders) == names and set(report["failures"]) == {"deepspeed:nvme"}
    assert report["kept"] is True and report["first_peer"] == "torch:fused"
    rounds = report["settings"]["rounds"]
    assert all(each["rounds"] == list(range(rounds)) for each in contenders.values())
    assert {name: len(ratio["rounds"]) for name, ratio in report["ratios"].items()} == dict.fromkeys(
        names[:2], rounds
    )
    in_ram, paged, plain_torch = (contenders[name] for name in names)
    assert in_ram["losses"] == paged["losses"]
    pairs = zip(in_ram["losses"], plain_torch["losses"], strict=True)
    assert all(abs(mine - other) < 0.5 for mine, other in pairs)
    for each in (in_ram, paged):
        limit = each["limit"]
        assert limit["seconds"] == max(limit["compute"] + limit["update"], limit["disk"])
        assert each["plan"]["predicted_s"] > 0 and each["plan"]["rss_growth"] > 0
    assert in_ram["facts"]["plan"]["homes"]["nvme"] == paged["facts"]["plan"]["homes"]["host"] == 0
    assert all(report["machine"].values())
    assert done.left == []


def test_fresh_processes_and_ours_that_fails(ran: dict[str, Ran]) -> None:
    """With `--processes fresh` a contender trains anew in each of its turns, so its losses repeat.

    A contender that fails does not stop the next one, but the benchmark then exits with 1.
    """
    done = ran["fresh"]
    assert done.code == 1
    report = done.report
    assert set(report["contenders"]) == {"torch:plain"} and report["kept"] is False
    assert "BudgetError" in report["failures"]["infinity host=4KiB"] and report["ratios"] == {}
    losses = report["contenders"]["torch:plain"]["losses"]
    assert losses[: len(losses) // 2] == losses[len(losses) // 2 :]
    assert done.left == []


@pytest.mark.parametrize(
    ("module", "mode"),
    [
        (plain, "plain"),
        (plain, "fused"),
        (plain, "compute"),
        pytest.param(fsdp2, "cpu", marks=fsdp2_on_a_cpu),
    ],
)
def test_a_peer_of_torch_trains(module: ModuleType, mode: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"ab" * 1024)
    task = Task(
        contender=module.__name__,
        mode=mode,
        decoder=asdict(turns.QUICK),
        decoder_file=str(turns.decoder_module.__file__),
        batch=1,
        seq=32,
        learning_rate=3e-3,
        device="cpu",
        directory=str(tmp_path),
        text=str(tmp_path / "text"),
        budgets={},
        states="fp32",
        update="lazy",
        clip=1.0,
    )
    contender, batches = module.open_contender(Task.from_json(task.to_json())), Batches(task)
    try:
        losses = [contender.step(*batches.next()) for _ in range(20)]
    finally:
        contender.close()
    assert (losses[-1] < losses[0] - 0.5) is (mode != "compute"), losses


def test_specs_say_what_they_are() -> None:
    small = specs.ours("host=1GiB,states=bf16,nvme=none,device=64MiB")
    assert (small.host, small.states, small.nvme, small.device) == ("1GiB", "bf16", "none", "64MiB")
    assert (
        small.ours
        and small.mode == "fit"
        and small.name == "infinity host=1GiB,states=bf16,nvme=none,device=64MiB"
    )
    assert specs.ours("half,update=eager").update == "eager"
    assert (specs.ours("half,states=int8").mode, specs.ours("half").host) == ("half", None)
    assert [specs.peer(text).name for text in ("deepspeed", "torch:plain", "fsdp2")] == [
        "deepspeed:nvme",
        "torch:plain",
        "fsdp2",
    ]
    assert not specs.peer("torch").ours


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1GiB",
        "host=",
        "host=1GiB,host=2GiB",
        "half,host=1GiB",
        "states=bf16",
        "host=1,states=fp8",
        "half,update=soon",
    ],
)
def test_specs_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        specs.ours(text)


@pytest.mark.parametrize("text", ["", "jax", "deepspeed:gpu", "fsdp2:nvme"])
def test_peers_that_there_are_not_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="one of deepspeed:nvme"):
        specs.peer(text)


def test_ratios_compare_turns_of_the_same_round() -> None:
    contenders = {
        "peer": {"rounds": [0, 2], "seconds": [4.0, 6.0]},
        "ours": {"rounds": [0, 1, 2], "seconds": [2.0, 9.0, 2.0]},
        "late": {"rounds": [1], "seconds": [1.0]},
    }
    assert ratios(contenders, "peer") == {"ours": {"median": 2.5, "rounds": [2.0, 3.0]}}


@pytest.mark.parametrize(("spare", "together"), [(1 << 20, True), (-(1 << 20), False)])
def test_processes_are_kept_if_their_peaks_fit_in_memory_with_what_compute_takes(
    spare: int, together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = train.parse(arguments(tmp_path, "--processes", "auto", "--peer", "torch"))
    bench = turns.Bench(job, tmp_path)
    turn = {"round": 0, "seconds": 1.0, "losses": [1.0], "rss_peak": 450 << 20, "device_peak": 0}
    facts = machine.memory()
    needed = (900 << 20) + limits.compute_bytes(job.decoder)
    found = replace(facts, available=needed * 10 // 9 + spare, cgroup_left=None)
    monkeypatch.setattr(turns.machine, "memory", lambda: found)
    monkeypatch.setattr(turns.Bench, "_measure_compute", lambda self: None)
    monkeypatch.setattr(turns.Speeds, "measure", lambda self: None)
    monkeypatch.setattr(turns, "Process", lambda *_: Canned(turn))
    bench.run()
    assert bench.kept is together and bench.complete
    assert all(len(each) == job.rounds for each in bench.turns.values())


class Canned:
    """A fake of `Process` (benchmarks/peers/process.py) that trains nothing.

    turn: the reply that every call of turn() returns. After finish(), turn() fails.
    """

    def __init__(self, turn: dict[str, Any]) -> None:
        self._turn, self.name, self.timeout, self._ended = turn, "canned", 1.0, False

    def ready(self) -> dict[str, Any]:
        return {}

    def turn(self, lead: int, steps: int) -> dict[str, Any]:
        assert not self._ended
        return self._turn

    def finish(self) -> None:
        self._ended = True

    def __enter__(self) -> Canned:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True


def test_an_early_end_leaves_no_process_and_no_file(warm: None, tmp_path: Path) -> None:
    """A benchmark that gets SIGINT, SIGTERM or SIGKILL leaves no child process running.

    Except after SIGKILL, it also removes its files. Three benchmarks, one for each signal, run side by side.
    """
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    directories = {end: tmp_path / end.name for end in ends}
    deadline = time.monotonic() + 60
    with ExitStack() as stack:
        parents = {}
        for end, directory in directories.items():
            directory.mkdir()
            parents[end] = subprocess.Popen(
                command(directory, "--capacity"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(parents[end].kill)  # for a test that fails before the signal
        children = []
        for end, parent in parents.items():
            while not (found := _children(parent.pid)) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert found and list(directories[end].iterdir())
            children += found
            parent.send_signal(end)
        for end, parent in parents.items():
            assert parent.wait(60) != 0
            assert end is signal.SIGKILL or list(directories[end].iterdir()) == []
        # A child that has just been forked learns of its parent's end from its closed stdin, which may take
        # a while.
        while any(_running(child) for child in children) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(_running(child) for child in children)


def _children(parent: int) -> list[str]:
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()


def _running(process: str) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("mode", ["nvme", "cpu", "cpu3"])
def test_deepspeed_trains(mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """benchmarks/train.py trains the contender "deepspeed:MODE", and its losses are plausible.

    The test is skipped where DeepSpeed is not installed. DeepSpeed compiles its operators at their first use.
    """
    pytest.importorskip("deepspeed")
    assert train.main(arguments(tmp_path, "--peer", f"deepspeed:{mode}", "--json")) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(0 < loss < 7 for loss in report["contenders"][f"deepspeed:{mode}"]["losses"])
