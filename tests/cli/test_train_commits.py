"""Tests of `infinity train` with --checkpoint, --every and --resume, and of signals that stop such a run.

A run that was stopped and continued must have the losses of a run that nothing has disturbed, bit for bit.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_job import PATIENCE, TinyJob, ended, run_error, run_json

from infinity import cli
from infinity.aio import Faults
from infinity.checkpoint import commit_files
from infinity.cli import training_run
from infinity.lm.data import Batches
from infinity.lm.loop import HeldOut
from infinity.system.disk_files import injected

ROOMY = ["--budget-host", "64MiB"]
HALVES = ["--accumulate", 2]


def commits(job: TinyJob, *more: object) -> list[Any]:
    """Return the options for commits in the folder "run". more: further options."""
    return ["--checkpoint", job.folder / "run", *more]


def steps_in(log: Path) -> list[dict[str, Any]]:
    """Return the lines of a log without the measured figures."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss", "norm", "lr", "tokens")} for line in lines]


def signal_at(
    monkeypatch: pytest.MonkeyPatch, step: int, micro: int, number: signal.Signals, *, twice: bool = False
) -> None:
    """Have the process send itself a signal when it reads the batch of a step and micro-batch, from 0 on."""
    training = Batches.training

    def read(self: Batches, at: int, of: int) -> Any:
        if (at, of) == (step, micro):
            for _ in range(1 + twice):
                signal.raise_signal(number)
        return training(self, at, of)

    monkeypatch.setattr(Batches, "training", read)


def stopped(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> dict[str, Any]:
    """Run a command that ends with exit code `code`, and return the JSON object that it prints."""
    capsys.readouterr()
    assert cli.main(arguments) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# --- resuming ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["RAM", "disk"])
def test_a_stopped_run_goes_on_bit_for_bit(
    home: str, job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = ROOMY if home == "RAM" else [*job.on_disk(capsys, *HALVES, *commits(job))]
    options = [*homes, *HALVES, "--steps", 6]
    whole, log = job.folder / "whole", job.folder / "log"
    undisturbed = job.train(capsys, *options, "--log", whole)
    again = [*options, "--log", log, *commits(job, "--every", 2)]
    with monkeypatch.context() as patched:
        signal_at(patched, 2, 1, signal.SIGTERM)  # in the third step, which is finished
        first = stopped(capsys, job.arguments("train", "--json", *again), 143)
    assert first["stopped"] == "SIGTERM"
    assert first["losses"] == undisturbed["losses"][:3]
    assert first["held_out_loss"] == {"before": undisturbed["held_out_loss"]["before"], "after": None}
    assert (first["sample"], first["exported"]) == (None, None)
    assert (first["commit"]["generation"], first["commit"]["step"]) == (2, 3)
    with log.open("a") as file:  # as if the run had gone on after its last commit, and been killed
        file.write(json.dumps({"step": 4, "loss": 0.0}) + "\n" + '{"step": 5, "lo')
    second = job.train(capsys, *again, "--resume")
    assert second["resumed"] == 3
    assert second["losses"] == undisturbed["losses"][3:]
    assert second["held_out_loss"] == undisturbed["held_out_loss"]
    assert second["sample"] == undisturbed["sample"]
    assert steps_in(log) == steps_in(whole)
    assert second["commit"]["step"] == 6
    pages = job.folder / "run" if home == "RAM" else job.pages
    assert list(second["commit"]["slabs"]) == [str(each) for each in pages.glob("*.slab")]
    assert second["commit"]["bytes"] == sum(each.stat().st_size for each in pages.glob("*.slab"))
    assert list(pages.glob("*.lock")) == []


def test_dropout_goes_on_as_in_a_run_that_nothing_has_stopped(
    job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=256, n_layer=1, n_embd=16, n_head=2, n_positions=64)
    assert config.resid_pdrop > 0
    config.save_pretrained(job.folder / "gpt2")
    options = [*ROOMY, *HALVES, "--steps", 4]
    model = str(job.folder / "gpt2")
    undisturbed = job.train(capsys, *options, model=model)
    options += commits(job)
    with monkeypatch.context() as patched:
        signal_at(patched, 1, 1, signal.SIGINT)
        first = stopped(capsys, job.arguments("train", "--json", *options, model=model), 130)
    assert (first["stopped"], first["commit"]["step"]) == ("SIGINT", 2)
    second = job.train(capsys, *options, "--resume", model=model)
    assert first["losses"] + second["losses"] == undisturbed["losses"]
    assert second["held_out_loss"] == undisturbed["held_out_loss"]


def test_a_run_without_a_commit_begins_anew_and_says_so(
    job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    log = job.folder / "log"
    log.write_text("of another run\n")
    options = [*ROOMY, "--steps", 2, "--log", log, *commits(job, "--resume")]
    assert cli.main(job.arguments("train", *options)) == 0
    out = capsys.readouterr().out
    assert f"there is no commit in {job.folder / 'run'}: beginning anew" in out
    assert f"commit-1 (step 2) stays in {job.folder / 'run'} (" in out.splitlines()[-1]
    assert [line["step"] for line in steps_in(log)] == [1, 2]
    # A run at its end has nothing to train, but is evaluated.
    again = job.train(capsys, *options)
    assert (again["resumed"], again["losses"], again["step_seconds"]["measured"]) == (2, [], None)
    assert again["held_out_loss"]["after"] is not None
    assert again["commit"]["generation"] == 1
    assert [line["step"] for line in steps_in(log)] == [1, 2]


def test_more_steps_follow_their_own_schedule_from_there_on(
    job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [job.folder / "whole", job.folder / "log"]
    job.train(capsys, *ROOMY, "--steps", 8, "--log", logs[0])
    job.train(capsys, *ROOMY, "--steps", 4, "--log", logs[1], *commits(job))
    options = [*ROOMY, "--log", logs[1], *commits(job, "--resume")]
    assert cli.main(job.arguments("train", *options, "--steps", 8)) == 0
    assert "from here on the learning rate follows the schedule of 8 steps" in capsys.readouterr().out
    rates, theirs = ([line["lr"] for line in steps_in(log)] for log in logs)
    assert theirs[4:] == rates[4:]
    assert theirs[:4] != rates[:4]
    line, _, _ = run_error(capsys, job.arguments("train", "--json", *options, "--steps", 7), 2)
    assert "commit-2 is of step 8, and --steps is 7. Give --steps 8 or more." in line


def test_another_job_is_refused_by_what_differs(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    run = [*ROOMY, "--steps", 1, *commits(job)]
    job.train(capsys, *run)
    refused: list[tuple[list[Any], str]] = [
        (["--batch", 4], "--batch was 2 and is 4"),
        (["--seq", 16], "--seq was 32 and is 16"),
        (HALVES, "--accumulate times the number of processes was 1 and is 2"),
        (["--seed", 1, "--clip", 2], "--clip was 1.0 and is 2.0, --seed was 0 and is 1"),
        (["--lr", 0.5], "--lr was 0.01 and is 0.5"),
        (["--states", "bf16"], "--states was fp32 and is bf16"),
        (["--compute", "fp32"], "--compute was bf16 and is fp32"),
    ]
    for options, words in refused:
        arguments = job.arguments("plan", "--json", *run, "--resume", *options)
        line, _, error = run_error(capsys, arguments, 1)
        assert error["error"] == "IncompatibleCheckpoint"
        assert f"commit-1 is of another job: {words}." in line
    text = job.folder / "data" / "3.txt"
    text.write_text(text.read_text().replace("fox", "cat"))  # of the same size
    line, _, error = run_error(capsys, job.arguments("train", "--json", *run, "--resume"), 1)
    assert error["error"] == "IncompatibleCheckpoint"
    assert "the digest of --data was " in line
    assert commit_files.generations(job.folder / "run") == [1]


def test_a_run_never_destroys_the_commits_of_another(
    job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [*ROOMY, "--steps", 1, *commits(job)]
    job.train(capsys, *run)
    before = {each.name: each.read_bytes() for each in (job.folder / "run").iterdir()}
    line, _, error = run_error(capsys, job.arguments("train", "--json", *run), 2)
    assert error["error"] == "ConfigError"
    assert "Continue it with --resume, move the directory, or delete it." in line
    assert {each.name: each.read_bytes() for each in (job.folder / "run").iterdir()} == before


def test_a_plan_knows_of_commits_and_touches_nothing(
    job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(job.arguments("plan", *ROOMY, *commits(job, "--every", 5, "--resume"))) == 0
    out = capsys.readouterr().out
    assert f"in {job.folder / 'run'} (two places for each trained byte)" in out
    assert "/day), with a commit every 5 steps" in out
    assert cli.main(job.arguments("plan", *ROOMY, *commits(job))) == 0
    assert "/day), with a commit every 100 steps" in capsys.readouterr().out
    assert not (job.folder / "run").exists()
    with_commits = job.smallest(capsys, *commits(job))
    assert with_commits["nvme"] > job.smallest(capsys)["nvme"]


# --- commits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "generation"), [(2, 3), (None, 1)])
def test_commits_come_every_so_many_steps_and_at_the_end(
    every: int | None, generation: int, job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [] if every is None else ["--every", every]
    found = job.train(capsys, *ROOMY, "--steps", 5, *commits(job, *options))
    assert (found["commit"]["generation"], found["commit"]["step"]) == (generation, 5)
    assert commit_files.generations(job.folder / "run") == [generation]


class FullOnce:
    """An observer for which the disk is full when the manifest with this name is written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fired = 0

    def begins(self, operation: str, path: str, *, target: str, offset: int, data: bytes) -> int:
        if operation == "create" and Path(path).name == self.name:
            self.fired += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return 0

    def ended(self, ticket: int) -> None:
        pass


def test_a_disk_that_is_full_for_a_while_does_not_end_the_run(
    job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    full = FullOnce(".commit-2.tmp")
    run = [*ROOMY, "--steps", 3, *commits(job, "--every", 1)]
    undisturbed = job.train(capsys, *ROOMY, "--steps", 3)
    # The second commit fails, and so does the third, which has its number.
    with injected(Faults(), full):
        line, everything, error = run_error(capsys, job.arguments("train", "--json", *run), 1)
    assert full.fired == 2
    assert error["error"] == "StorageFull"
    assert "A commit failed, and training goes on: " in everything
    assert commit_files.generations(job.folder / "run") == [1]
    assert "No space left" in line
    resumed = job.train(capsys, *run, "--resume")
    assert resumed["losses"] == undisturbed["losses"][1:]


# --- signals ----------------------------------------------------------------------------------------------


def test_a_signal_before_the_first_step_leaves_nothing(
    job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_loss(monkeypatch, 1, signal.SIGINT)
    assert cli.main(job.arguments("train", *ROOMY, *commits(job))) == 130
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("stopped by SIGINT after 0:")
    assert "step 0/100" in last
    assert "no step was finished, so there is no commit" in last
    left = {each.suffix for each in (job.folder / "run").iterdir()}
    assert left <= {""}  # no slab, lock or data of a commit
    assert commit_files.generations(job.folder / "run") == []


def test_a_signal_before_the_training_ends_it_at_once(
    job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM while the model is filled, after the plan: nobody has set the flag's handlers yet."""

    def fill(*_: object, **__: object) -> object:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the signal did not arrive")

    monkeypatch.setattr(training_run, "carry_out", fill)
    found = stopped(capsys, job.arguments("train", "--json", *ROOMY, *commits(job)), 143)
    assert found == {"stopped": "SIGTERM"}
    assert commit_files.generations(job.folder / "run") == []
    assert list((job.folder / "run").glob("*.lock")) == []


def in_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*_: object, between: Callable[[], object], **__: object) -> str:
        signal.raise_signal(signal.SIGTERM)
        between()
        pytest.fail("it was not looked for")

    monkeypatch.setattr(training_run, "generate", generate)


def in_the_loss(monkeypatch: pytest.MonkeyPatch, call: int, number: signal.Signals) -> None:
    """Have the process send itself a signal in the measurement before (1) or after (2) the training."""
    loss, calls = HeldOut.loss, []

    def signalled(self: HeldOut, **options: Any) -> float:
        calls.append(self)
        if len(calls) == call:
            signal.raise_signal(number)
        return loss(self, **options)

    monkeypatch.setattr(HeldOut, "loss", signalled)


def in_the_loss_after(monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_loss(monkeypatch, 2, signal.SIGTERM)


@pytest.mark.parametrize("when", [in_the_sample, in_the_loss_after])
def test_a_signal_in_the_evaluation_ends_it(
    when: Callable[[pytest.MonkeyPatch], None],
    job: TinyJob,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    when(monkeypatch)
    out = job.folder / "out"
    arguments = job.arguments("train", "--json", *ROOMY, "--steps", 2, "--export", out, *commits(job))
    found = stopped(capsys, arguments, 143)
    assert (found["commit"]["step"], found["sample"], found["exported"]) == (2, None, None)
    assert not out.exists()


def test_a_second_signal_leaves_at_once_and_keeps_the_last_commit(
    job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job.folder / "run"
    options = [*ROOMY, "--steps", 4, *commits(job, "--every", 1)]
    with monkeypatch.context() as patched:  # while the updates that the commit of step 2 needs are due
        signal_at(patched, 2, 0, signal.SIGTERM, twice=True)
        found = stopped(capsys, job.arguments("train", "--json", *options), 143)
    assert found == {"stopped": "SIGTERM"}
    handler = signal.getsignal(signal.SIGINT)
    # A runtime that another test has left open keeps a handler around the program's.
    assert getattr(handler, "program", handler) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert commit_files.generations(run) == [1]
    assert len(list(run.glob("*.slab"))) == 1
    assert list(run.glob("*.lock")) == []
    resumed = job.train(capsys, *options, "--resume")
    assert resumed["resumed"] == 1
    assert resumed["commit"]["step"] == 4


def test_the_signals_of_a_process(warm: None, job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM ends a process with a commit of its last step; the log is that of the committed steps."""
    log = job.folder / "log"
    options = [*job.on_disk(capsys, *commits(job)), "--log", log, *commits(job, "--every", 3)]
    process = job.start(*job.arguments("train", "--json", "--steps", 1_000_000, *options))
    with ended(process):
        end = time.monotonic() + PATIENCE
        while not log.exists() or log.read_text().count("\n") < 4:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        process.terminate()
        stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, stderr
    assert "stopped by SIGTERM" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    found = json.loads(stdout)
    step = found["commit"]["step"]
    assert [line["step"] for line in steps_in(log)] == [*range(1, step + 1)]
    after = run_json(capsys, job.arguments("train", "--json", "--steps", step + 1, *options, "--resume"))
    assert after["resumed"] == step
    assert len(after["losses"]) == 1
