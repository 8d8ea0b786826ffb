"""Tests of `infinity plan --deepspeed`: the file's values are defaults, and the command line wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_job import TinyJob, run_error

BUDGETS = ("--budget-device", "8MiB", "--budget-host", "8MiB")


class Seen(Exception):
    """Ends a command when its options are known."""


def write(job: TinyJob, **config: Any) -> Path:
    file = job.folder / "ds.json"
    file.write_text(json.dumps(config))
    return file


def options_of(
    job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *more: object
) -> dict[str, Any]:
    """The options with which `infinity plan` makes its job."""
    seen = {}

    def make(options: Any, *_: object, **__: object) -> None:
        seen.update(vars(options))
        raise Seen

    with monkeypatch.context() as patched:
        patched.setattr("infinity.cli.plan.make_job", make)
        with pytest.raises(Seen):
            job.plan(capsys, *more)
    return seen


def test_a_plan_from_a_file(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(
        job,
        bf16={"enabled": True},
        data_types={"grad_accum_dtype": "bf16"},
        zero_optimization={"stage": 1, "offload_param": {"device": "nvme", "nvme_path": str(job.pages)}},
        gradient_accumulation_steps=3,
    )
    found = job.plan(capsys, "--deepspeed", file, "--ranks", 2, *BUDGETS)
    said = job.plan(
        capsys, "--accumulate", 3, "--ranks", 2, "--stage", 1, *BUDGETS, *job.nvme(), "--compute", "bf16"
    )
    assert found["ranks"]["stage"] == said["ranks"]["stage"] == 1

    def rows(plan: dict[str, Any], kind: str) -> Any:
        return [each[kind] for each in plan["tiers"]]

    assert rows(found, "params") == rows(said, "params")
    assert sum(rows(said, "gradients")) == 2 * sum(rows(found, "gradients")) > 0


def test_the_command_line_wins(
    job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(
        job,
        fp16={"enabled": True},
        gradient_clipping=0.5,
        gradient_accumulation_steps=3,
        train_micro_batch_size_per_gpu=5,
        optimizer={"type": "AdamW", "params": {"lr": 0.25}},
        zero_optimization={"offload_param": {"device": "nvme", "nvme_path": str(job.pages)}},
    )
    job.options = job.options[:-4]  # without --batch and --seq
    found = options_of(job, capsys, monkeypatch, "--deepspeed", file)
    values = {name: found[name] for name in ("compute", "clip", "accumulate", "batch", "lr", "stage")}
    assert values == {"compute": "fp16", "clip": 0.5, "accumulate": 3, "batch": 5, "lr": 0.25, "stage": None}
    assert [each.rpartition(":")[0] for each in found["budget_nvme"]] == [str(job.pages)]
    given = ["--compute", "bf16", "--accumulate", 1, "--batch", 8, "--clip", 1, *job.nvme("1MiB")]
    for order in ([*given, "--deepspeed", file], ["--deepspeed", file, *given]):
        found = options_of(job, capsys, monkeypatch, *order)
        values = {name: found[name] for name in ("compute", "clip", "accumulate", "batch", "lr")}
        assert values == {"compute": "bf16", "clip": 1.0, "accumulate": 1, "batch": 8, "lr": 0.25}
        assert found["budget_nvme"] == [f"{job.pages}:1MiB"]


def test_what_is_open_keeps_the_commands_defaults(
    job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = dict.fromkeys(("gradient_clipping", "gradient_accumulation_steps"), "auto")
    file = write(job, bf16={"enabled": "auto"}, train_micro_batch_size_per_gpu="auto", **auto)
    found = options_of(job, capsys, monkeypatch, "--deepspeed", file)
    assert (found["compute"], found["clip"], found["accumulate"], found["batch"]) == (None, 1.0, 1, 2)
    write(job, gradient_clipping=0)
    assert options_of(job, capsys, monkeypatch, "--deepspeed", file)["clip"] == 0.0


def test_what_becomes_of_the_fields_is_printed(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(job, aio={"block_size": 1}, gradient_clipping=1.0)
    job.plan(capsys, "--deepspeed", file, *BUDGETS)  # reads the last line of stdout
    from infinity import cli

    assert cli.main(job.arguments("plan", "--deepspeed", file, *BUDGETS)) == 0
    text = capsys.readouterr().out
    assert "gradient_clipping   1.0     taken" in text
    assert "`infinity tune` measures the disks" in text


def test_files_that_cannot_be_planned(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(job, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    line, *_ = run_error(capsys, job.arguments("plan", "--json", "--deepspeed", file), 2)
    assert "trains with SGD, and this command plans for AdamW" in line
    write(job, zero_optimization={"zero_quantized_weights": True})
    line, *_ = run_error(capsys, job.arguments("plan", "--json", "--deepspeed", file), 2)
    assert "zero_quantized_weights" in line
    file.unlink()
    run_error(capsys, job.arguments("plan", "--json", "--deepspeed", file), 1)
