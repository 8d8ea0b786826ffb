"""Tests of `infinity train` on two ranks: it trains to the bits of one, one rank prints, all end together."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_job
import warm_python
import warm_torchrun
from rank_processes import free_port
from timelines import crossings, load, rows_of
from tiny_job import DIES, JSON_KEYS, PATIENCE, TinyJob, ended, run_error

from infinity.checkpoint import commit_files
from infinity.system.disk_files import DiskFiles
from infinity.tiers.slab import slab_name

pytestmark = pytest.mark.usefixtures("warm")
RANKS = 2
STEPS = 20
ENDLESS = 1_000_000


def torchrun(*options: str) -> list[str]:
    """The beginning of a command line for python, before the program that all ranks run."""
    # Its own port, as several tests may run at a time.
    ranks = ["--nproc-per-node", str(RANKS), "--master-port", str(free_port())]
    return [warm_torchrun.__file__, *ranks, *options, "--"]


@contextlib.contextmanager
def ranks(
    job: TinyJob, *options: object, second: tuple[object, ...] = ()
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start `infinity train` on two ranks without torchrun. second: options of rank 1 alone."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(RANKS):
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "INFINITY_RANK_TIMEOUT": str(PATIENCE),
                "TORCHELASTIC_ERROR_FILE": str(job.folder / f"error-{rank}"),
            }
            arguments = job.arguments("train", "--json", *options, *(second if rank else ()))
            processes.append(job.start(*arguments, env=environment))
            stack.enter_context(ended(processes[-1]))
        yield processes


def outputs(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each rank."""
    said = [each.communicate(timeout=PATIENCE) for each in processes]
    return [(each.returncode, *texts) for each, texts in zip(processes, said, strict=True)]


def test_two_ranks_under_torchrun_train_to_the_bits_of_one(job: TinyJob) -> None:
    """Two ranks with two micro-batches each do what one rank with four does. They have pages on disk."""
    found = {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, program, accumulate in (
        ("one", [], 4),
        ("two", torchrun(), 2),
    ):
        files = {option: job.folder / f"{name}-{option}" for option in ("log", "export", "trace")}
        arguments = job.arguments("train", "--json", "--steps", 3, "--accumulate", accumulate)
        arguments += ["--budget-host", "1MiB", *job.nvme()]
        arguments += [text for option, file in files.items() for text in (f"--{option}", str(file))]
        command = [sys.executable, *program, tiny_job.__file__, *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        with ended(process):
            stdout, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, stderr
        assert stdout.count("\n") == 1
        summary = json.loads(stdout)
        log = [json.loads(line) for line in files["log"].read_text().splitlines()]
        assert [line["loss"] for line in log] == summary["losses"]
        same = ("losses", "held_out_loss", "sample")
        traces = [files["trace"], job.folder / f"{name}-trace.rank-1"]
        written = [load(each) for each in traces if each.exists()]
        assert len(written) == (2 if name == "two" else 1)
        for rank, events in enumerate(written):
            assert {each["pid"] for each in events} == {1 + rank}
            assert [each["args"]["loss"] for each in rows_of(events)["step"]] == summary["losses"]
            assert len(crossings(events, "from", 1 - rank)) > 0 or name == "one"
        weights = (files["export"] / "model.safetensors").read_bytes()
        found[name] = (
            {key: summary[key] for key in same},
            [(line["step"], line["norm"], line["tokens"]) for line in log],
            weights,
        )
        assert stderr.count("infinity 0") == stderr.count("step 1/3") == stderr.count("done in") == 1
        assert (" 2 ranks " in stderr) == (name == "two")
        assert set(summary) - JSON_KEYS == ({"ranks"} if name == "two" else set())
        assert (summary["nvme"]["planned"] > 0) == (name == "two")  # whose pages do not all fit in RAM
        assert list(job.pages.iterdir()) == []
    assert found["two"] == found["one"]


def test_an_error_that_all_ranks_have_is_printed_once(job: TinyJob) -> None:
    with ranks(job, "--every", 2) as processes:
        said = outputs(processes)
    assert [code for code, _, _ in said] == [2, 2]
    errors = sorted((stderr for _, _, stderr in said), key=len)
    assert errors[0] in ("rank 0 ends with rank 1 (ConfigError)\n", "rank 1 ends with rank 0 (ConfigError)\n")
    assert errors[1].startswith("ConfigError: --every was given without --checkpoint")
    assert errors[1].count("\n") == 1
    (printed,) = [json.loads(stdout) for _, stdout, _ in said if stdout]
    assert printed["error"] == "ConfigError"
    for rank in range(RANKS):
        text = (job.folder / f"error-{rank}").read_text()
        assert json.loads(text)["message"]["message"].startswith("ConfigError: --every")


def test_the_rank_that_has_an_error_prints_it(job: TinyJob) -> None:
    with ranks(job, second=("--budget-host", "1KiB")) as processes:
        said = outputs(processes)
    assert [code for code, _, _ in said] == [1, 1]
    assert said[0][1:] == ("", "rank 0 ends with rank 1 (BudgetError)\n")
    assert said[1][2].startswith("BudgetError: ")
    assert json.loads(said[1][1])["error"] == "BudgetError"


def test_ranks_with_different_jobs_are_refused(job: TinyJob) -> None:
    with ranks(job, second=("--seed", 1)) as processes:
        said = outputs(processes)
    assert [code for code, _, _ in said] == [1, 1]
    text = "".join(stderr for _, _, stderr in said)
    assert text.count("RankDivergence: At infinity train the --seed of rank 1 and of rank 0 differ") == 1


def test_a_signal_to_one_rank_ends_all(job: TinyJob) -> None:
    log = job.folder / "log"
    with ranks(job, "--steps", ENDLESS, "--log", log, "--budget-host", "1MiB", *job.nvme()) as processes:
        until = time.monotonic() + PATIENCE
        while not log.exists() or log.read_text().count("\n") < 3:
            assert time.monotonic() < until and all(each.poll() is None for each in processes)
            time.sleep(0.01)
        processes[1].send_signal(signal.SIGTERM)
        said = outputs(processes)
    assert [code for code, _, _ in said] == [1, 143]
    assert said[0][2].splitlines()[-1] == "rank 0 ends with rank 1 (SIGTERM)"
    assert said[1][1:] == ("", "")
    assert list(job.pages.iterdir()) == []


def logged(log: Path) -> list[tuple[int, float]]:
    """(step, loss) of each line of a log."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """(step, loss) of each step of a run that nothing stops."""
    job = TinyJob(tmp_path_factory.mktemp("unbroken"))
    log = job.folder / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", warm_python.Popen)
        with ranks(job, "--steps", STEPS, "--budget-host", "1MiB", *job.nvme(), "--log", log) as processes:
            assert [code for code, _, _ in outputs(processes)] == [0, 0]
    return logged(log)


@pytest.mark.parametrize(
    ("number", "alone"),
    [
        (signal.SIGTERM, False),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_job_goes_on_where_all_ranks_have_committed(
    number: signal.Signals, alone: bool, job: TinyJob, unbroken: list[tuple[int, float]]
) -> None:
    """SIGTERM to one rank has all commit the step that is under way; SIGKILL loses what was not committed.

    alone: whether a single process goes on, with the micro-batches of both ranks.
    """
    options = ["--steps", STEPS, "--budget-host", "1MiB", *job.nvme()]
    log, commits = job.folder / "log", ["--checkpoint", job.folder / "run", "--every", 1, "--resume"]
    with ranks(job, *options, *commits, "--log", log) as processes:
        until = time.monotonic() + PATIENCE
        while not log.exists() or log.read_text().count("\n") < 4:
            assert time.monotonic() < until and all(each.poll() is None for each in processes)
            time.sleep(0.01)
        processes[1].send_signal(number)
        said = outputs(processes)
    if number == signal.SIGTERM:
        assert [code for code, _, _ in said] == [143, 143], said
        assert json.loads(said[0][1])["commit"]["step"] == logged(log)[-1][0]
    else:
        assert [code for code, _, _ in said] == [1, -signal.SIGKILL]
    if alone:
        one = job.arguments("train", "--json", *options, *commits, "--log", log, "--accumulate", RANKS)
        process = job.start(*one)
        with ended(process):
            said = outputs([process])
    else:
        with ranks(job, *options, *commits, "--log", log) as processes:
            said = outputs(processes)
    assert {code for code, _, _ in said} == {0}, said
    assert json.loads(said[0][1])["resumed"] >= 1
    assert logged(log) == unbroken


@pytest.mark.slow
def test_torchrun_starts_ranks_again_after_one_was_killed(job: TinyJob) -> None:
    """The new ranks meet in the store of the old ones, and go on from the last commit."""
    log = job.folder / "log"
    arguments = job.arguments("train", "--steps", STEPS, "--budget-host", "1MiB", *job.nvme())
    arguments += ["--checkpoint", str(job.folder / "run"), "--every", "1", "--resume", "--log", str(log)]
    process = subprocess.Popen(
        [sys.executable, *torchrun("--max-restarts", "1"), tiny_job.__file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with ended(process):
        until = time.monotonic() + PATIENCE
        while not log.exists() or log.read_text().count("\n") < 4:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.01)
        os.kill(last_child(process.pid), signal.SIGKILL)  # rank 1, which is started after rank 0
        _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    assert [step for step, _ in logged(log)] == [*range(1, STEPS + 1)]


@pytest.mark.slow
def test_torchrun_begins_anew_after_a_death_in_the_first_commit(job: TinyJob) -> None:
    log, run = job.folder / "log", job.folder / "run"
    arguments = job.arguments("train", "--steps", 3, "--budget-host", "1MiB", *job.nvme())
    arguments += ["--checkpoint", str(run), "--every", "1", "--resume", "--log", str(log)]
    found = subprocess.run(
        [sys.executable, *torchrun("--max-restarts", "1"), tiny_job.__file__, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", DIES: "1"},
        timeout=PATIENCE,
    )
    assert found.returncode == 0, found.stderr
    assert "SIGKILL" in found.stderr or "exitcode: -9" in found.stderr
    assert [step for step, _ in logged(log)] == [1, 2, 3]
    for rank in range(RANKS):
        (newest,) = commit_files.generations(run / f"rank-{rank}")
        saved = commit_files.read(run / f"rank-{rank}", newest, DiskFiles())
        slabs = {slab_name(rank, each.uuid) for each in saved.manifest.volume.slabs}
        assert {path.name for path in job.folder.rglob(f"infinity-rank{rank}-*.slab")} == slabs


def last_child(parent: int) -> int:
    """The id of the child of a process that it has got last."""
    return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[-1])


def test_commits_of_some_ranks_alone_are_refused(job: TinyJob) -> None:
    options = ["--steps", 1, "--checkpoint", job.folder / "run"]
    with ranks(job, *options) as processes:
        assert [code for code, _, _ in outputs(processes)] == [0, 0]
    shutil.rmtree(job.folder / "run" / "rank-1")
    with ranks(job, *options, "--resume") as processes:
        said = outputs(processes)
    assert [code for code, _, _ in said] == [1, 1]
    text = "".join(stderr for _, _, stderr in said)
    assert text.count("IncompatibleCheckpoint: There are commits of some ranks") == 1


@pytest.mark.parametrize(("variable", "text"), [("WORLD_SIZE", "two"), ("RANK", "x")])
def test_an_environment_of_no_ranks_is_refused(
    variable: str,
    text: str,
    job: TinyJob,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(variable, text)
    assert f"variable {variable} is {text!r}" in run_error(capsys, job.arguments("train", "--json"), 2)[0]


def test_one_process_divides_nothing(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = job.arguments("train", "--json", "--partition", "optimizer")
    assert "--partition was given for one process" in run_error(capsys, arguments, 2)[0]
