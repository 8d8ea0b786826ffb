"""Tests of the job that `train` and `plan` share: options, their defaults, and how bad values are refused."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

import pytest
import torch
from tiny_job import PLAN_KEYS, TinyJob, run_error

from infinity import cli
from infinity.cli.job import make_job
from infinity.cli.options import add_options
from infinity.ranks import SingleRank

OPTIONS = {
    "--model": "10m",
    "--data": None,
    "--steps": 100,
    "--batch": 8,
    "--seq": 128,
    "--accumulate": 1,
    "--lr": None,
    "--clip": 1.0,
    "--seed": 0,
    "--device": None,
    "--states": "fp32",
    "--compute": None,
    "--activations": "auto",
    "--budget-device": None,
    "--budget-host": None,
    "--budget-nvme": None,
    "--log": None,
    "--export": None,
    "--trace": None,
    "--checkpoint": None,
    "--every": None,
    "--resume": False,
    "--json": False,
}
"""Every option of `infinity train`, with its default. A new option must be added here deliberately."""

MANY = 99_999_999_999_999_999_999


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the argument parsers of `infinity train` and `infinity plan`: {"train": ..., "plan": ...}."""
    main = argparse.ArgumentParser()
    subparsers = main.add_subparsers()
    for command in (cli.train, cli.plan):
        command.add_parser(subparsers)
    return dict(subparsers.choices)


def test_the_options_and_their_defaults() -> None:
    found = {}
    for name, parser in parsers().items():
        actions = [each for each in parser._actions if each.dest != "help"]
        found[name] = {option: each.default for each in actions for option in each.option_strings}
        assert all(each.option_strings for each in actions)
    assert found == {
        "train": {**OPTIONS, "--partition": None},
        "plan": {
            **OPTIONS,
            "--ranks": 1,
            "--stage": None,
            "--nodes": 1,
            "--link": None,
            "--deepspeed": None,
            "--machine": None,
        },
    }


def test_every_option_has_a_line_of_help() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, train=True)
    assert [each.dest for each in parser._actions if not each.help] == []
    help_text = parser.format_help()
    assert all(str(default) in help_text for default in OPTIONS.values() if default)


REFUSED: list[tuple[list[Any], str]] = [
    (["--every", 10], "--every was given without --checkpoint. Add --checkpoint DIR."),
    (["--resume"], "--resume was given without --checkpoint. Add --checkpoint DIR."),
    (["--every", 0, "--checkpoint", "x"], "--every is 0."),
    (["--every", MANY, "--checkpoint", "x"], f"--every is {MANY}."),
    (["--steps", 0], "--steps is 0."),
    (["--steps", -3], "--steps is -3."),
    (["--batch", 0], "--batch is 0."),
    (["--batch", MANY], f"--batch is {MANY}."),
    (["--seq", 0], "--seq is 0."),
    (["--seq", MANY], f"--seq is {MANY}."),
    (["--seq", 1 << 20], "Give more text with --data, or a smaller --seq."),
    (["--accumulate", 0], "--accumulate is 0."),
    (["--lr", 0], "--lr is 0.0."),
    (["--lr=-1e-3"], "--lr is -0.001."),
    (["--lr", "nan"], "--lr is nan."),
    (["--lr", "inf"], "--lr is inf."),
    (["--clip=-1"], "--clip is -1.0. Give a positive number, or 0 to clip nothing."),
    (["--clip", "nan"], "--clip is nan."),
    (["--seed", -1], "--seed is -1."),
    (["--seed", 1 << 63], f"--seed is {1 << 63}."),
    (["--model", "11m"], "There is no model '11m'. Give one of 10m, 30m"),
    (["--data", "/absent"], "There is no /absent."),
    (["--data", __file__], "the least that can be trained on"),
    (["--device", "tpu"], "tpu"),
    (["--device", "meta"], "meta"),
    (["--compute", "fp8"], "The compute precision is 'fp8'. Give one of bf16, fp16, fp32."),
    (["--states", "int4"], "The states precision is 'int4'. Give one of fp32, bf16, int8."),
    (["--budget-device", "much"], "The device budget 'much' cannot be read."),
    (["--budget-host", "1GB"], "The host budget '1GB' cannot be read."),
    (["--budget-host", "0"], "The host budget is zero."),
    (["--budget-nvme", "/tmp"], "--budget-nvme /tmp names no directory and size. Give PATH:SIZE"),
    (["--budget-nvme", ":1GiB"], "--budget-nvme :1GiB names no directory and size."),
    (["--budget-nvme", "/tmp:"], "The nvme budget of /tmp '' cannot be read."),
    (["--budget-nvme", "/tmp:-1"], "The nvme budget of /tmp '-1' cannot be read."),
    (["--budget-nvme", "/tmp:1MiB", "--budget-nvme", "/tmp:1MiB"], "--budget-nvme names /tmp twice."),
    (["--budget-nvme", "/tmp:1MiB", "--budget-nvme", "/tmp/.:1MiB"], "names /tmp twice."),
]


@pytest.mark.parametrize(
    ("options", "words"), REFUSED, ids=lambda each: "" if isinstance(each, str) else " ".join(map(str, each))
)
def test_what_cannot_be_is_refused_in_a_sentence(
    options: list[Any], words: str, job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    line, everything, error = run_error(capsys, job.arguments("plan", "--json", *options), 2)
    assert words in line
    assert error["error"] == "ConfigError"
    assert everything.strip() == line  # no plan or progress is printed before the error


@pytest.mark.parametrize("options", [["--steps", "many"], ["--batch", "1.5"], ["--data"], ["--levitate"]])
def test_argparse_refuses_the_rest(options: list[str], job: TinyJob) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(job.arguments("train", *options))
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("path", "words"), [("absent", "Create the directory first"), ("file", "Give a directory, not a file.")]
)
def test_a_directory_that_cannot_hold_pages(
    path: str, words: str, job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    (job.folder / "file").touch()
    for command in ("plan", "train"):
        options = ["--budget-device", "64MiB", "--budget-host", "256KiB"]
        arguments = job.arguments(
            command, "--json", *options, "--budget-nvme", f"{job.folder / path}:1MiB", "--batch", 1
        )
        line, _, error = run_error(capsys, arguments, 1)
        assert words in line
        assert error["error"] == "StorageError"


def test_a_batch_beyond_any_memory_is_a_budget_error(
    job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    line, _, error = run_error(capsys, job.arguments("plan", "--json", "--batch", 1 << 30), 1)
    assert error["error"] == "BudgetError"
    assert "Give --budget-host " in line


NVME = "nvme"
SHORT: list[Any] = [
    ("device", {"device": "64KiB", "host": "64MiB"}),
    ("device", {"device": "64KiB", "host": "64MiB", NVME: "64MiB"}),
    ("device", {"device": "64KiB", "host": "200KiB", NVME: "64MiB"}),
    ("host", {"device": "64MiB", "host": "8KiB", NVME: "64MiB"}),
    ("host", {"device": "200KiB", "host": "150KiB"}),
    ("host", {"host": "300KiB"}),
    ("host", {"host": "100KiB", NVME: "64MiB"}),
    ("nvme", {"device": "200KiB", "host": "128KiB", NVME: "64KiB"}),
    ("nvme", {"host": "400KiB", NVME: "8KiB"}),
]
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def budget_options(job: TinyJob, sizes: dict[str, Any]) -> list[str]:
    options = []
    for tier, size in sizes.items():
        options += job.nvme(size) if tier == NVME else [f"--budget-{tier}", str(size)]
    return options


@pytest.mark.sweep(most=3)
@pytest.mark.parametrize(("tier", "sizes"), SHORT)
@pytest.mark.parametrize("activations", ["keep", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_budget_error_names_the_option_and_the_least_size_that_does(
    tier: str, sizes: dict[str, Any], activations: str, job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    same = ["--batch", 1, "--activations", activations]
    arguments = [*job.arguments("plan", "--json", *same), *budget_options(job, sizes)]
    line, _, error = run_error(capsys, arguments, 1)
    assert error["error"] == "BudgetError"
    what = "--budget-nvme PATH:" if tier == NVME else f"--budget-{tier} "
    found = re.search(rf"Give {what}(\d+)([A-Za-z]*)(\.|, or )", line)
    assert found, line
    assert ("--budget-nvme PATH:SIZE, to which pages can go" in line) == (
        tier == "host" and NVME not in sizes
    )
    number, unit = int(found[1]), found[2]
    job.plan(capsys, *same, *budget_options(job, {**sizes, tier: f"{number}{unit}"}))
    fewer = {**sizes, tier: (number - 1) * UNITS[unit]}
    run_error(capsys, [*job.arguments("plan", "--json", *same), *budget_options(job, fewer)], 1)


def test_a_plan_in_json(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    budgets = ["--budget-device", "2MiB", "--budget-host", "3MiB"]
    plan = job.plan(capsys, *budgets, *job.nvme("4MiB"))
    assert set(plan) == PLAN_KEYS
    assert {each["tier"]: each["budget"] >> 20 for each in plan["tiers"]} == {
        "device": 2,
        "host": 3,
        "nvme": 4,
    }
    assert plan["model"] == "tiny"
    assert plan["update"] in ("lazy", "speculative")
    assert plan["step_seconds"] == plan["prediction"]["seconds"] > 0
    assert plan["traffic"]["update"]["to_host"] > 0
    smallest = plan["smallest_budgets"]
    assert set(smallest) == {"device", "host", "nvme"}
    sizes = {"device": smallest["device"], "host": smallest["host"], NVME: smallest["nvme"]}
    job.plan(capsys, *budget_options(job, sizes))


@pytest.mark.parametrize("stage", [None, 0, 2])
def test_a_plan_of_one_rank_in_json(job: TinyJob, capsys: pytest.CaptureFixture[str], stage) -> None:
    plan = job.plan(capsys, "--ranks", 2, *(() if stage is None else ("--stage", stage)))
    assert set(plan) == PLAN_KEYS | {"ranks"}
    found = plan["ranks"]
    stage = 3 if stage is None else stage
    assert (found["rank"], found["ranks"], found["stage"]) == (0, 2, stage)
    planned = {(each["stage"], each["kind"]): each["planned"] for each in found["by_stage"]}
    (tier,) = plan["tiers"]
    here = (planned[stage, "parameter"], planned[stage, "gradient"], planned[stage, "optimizer"])
    assert (tier["params"], tier["gradients"], tier["optimizer"]) == here
    for kind, divided_from in (("parameter", 3), ("gradient", 2), ("optimizer", 1)):
        assert planned[0, kind] == planned[divided_from - 1, kind] > planned[divided_from, kind] > 0
        assert planned[divided_from, kind] == planned[3, kind]


def test_a_plan_for_another_machine(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    there = ["--machine", "h100-sxm-8", "--ranks", 4, "--nodes", 2, "--budget-nvme", "/not/here:1GiB"]
    plan = job.plan(capsys, *there, "--device", "cuda")
    assert plan["device"] == "cuda:0"
    assert plan["machine"] == "8 x NVIDIA H100 SXM: published figures, not measured"
    assert plan["prediction"]["seconds"] > 0
    network = plan["ranks"]["network"]
    assert (network["link"], network["measured"]) == (5e10, False)
    line, _, _ = run_error(capsys, job.arguments("plan", "--json", *there, "--device", "cpu"), 2)
    assert "has the rates of cuda" in line


def test_ranks_to_come_share_the_machine_if_no_budget_is_given(
    job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    def budget(ranks: int) -> int:
        (tier,) = job.plan(capsys, "--ranks", ranks)["tiers"]
        return int(tier["budget"])

    assert 0 < budget(8) < 0.3 * budget(1)


def test_a_plan_of_one_rank_for_people(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(job.arguments("plan", "--ranks", 4, "--stage", 1)) == 0
    text = capsys.readouterr().out
    assert "rank 0 of 4 · stage 1: optimizer states are divided" in text
    assert "bytes of one of 4 ranks by stage, beside those of ZeRO's formulas" in text
    rows = [line.split()[0] for line in text.splitlines() if "(ZeRO)" in line or line[:1].isdigit()]
    assert rows == ["stage", "0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--ranks", 0], "--ranks is 0."),
        (["--ranks", MANY], f"--ranks is {MANY}."),
        (["--stage", 2], "--stage was given for one rank."),
        (["--ranks", 3, "--nodes", 2], "--nodes is 2, and --ranks is 3."),
        (["--ranks", 2, "--nodes", 0], "--nodes is 0"),
        (["--ranks", 2, "--link", "1Gbit"], "--link was given for one node"),
        (["--ranks", 2, "--nodes", 2, "--link", "fast"], "--link is 'fast', which is no rate"),
    ],
)
def test_ranks_that_cannot_be_planned(job: TinyJob, capsys, options, cause) -> None:
    line, _, _ = run_error(capsys, job.arguments("plan", "--json", *options), 2)
    assert cause in line
    assert not (job.folder / "x").exists()


def test_a_plan_for_people_leaves_nothing_and_fills_nothing(
    job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = job.folder / "log", job.folder / "out"
    arguments = job.arguments("plan", *job.nvme(), "--log", log, "--export", out)
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("infinity ")
    assert "parameters on text of 8 files" in captured.out
    assert "smallest budgets that would do: host" in captured.out
    assert captured.err == ""
    assert list(job.pages.iterdir()) == []
    assert not log.exists()
    assert not out.exists()


def test_what_a_job_is_made_of(job: TinyJob) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, train=True)
    arguments = job.arguments("", "--steps", 7, "--accumulate", 2, "--clip", 0.5, "--compute", "fp32")[1:]
    made = make_job(parser.parse_args(arguments), ranks=SingleRank())
    assert (made.recipe.steps, made.recipe.accumulate, made.recipe.clip) == (7, 2, 0.5)
    assert made.recipe.learning_rate == 1e-2  # the learning rate of the preset
    assert made.plan.accumulation == 2
    assert made.device == torch.device("cpu")
    assert made.batches.training(0, 0).shape == (2, 33)
    assert all(each.is_meta for each in made.language_model.model.parameters())
    assert (
        make_job(parser.parse_args([*arguments, "--clip", "0"]), ranks=SingleRank()).recipe.clip == math.inf
    )
    given = make_job(parser.parse_args([*arguments, "--lr", "0.5", "--accumulate", "1"]), ranks=SingleRank())
    assert given.recipe.learning_rate == given.optimizer.param_groups[0]["lr"] == 0.5
    assert given.plan.accumulation == 1


def test_compute_is_what_the_cpu_has_instructions_for(job: TinyJob, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, train=True)

    def compute(supported: bool, *more: str) -> str:
        monkeypatch.setattr(cli.job, "multiplies", lambda *_: supported)
        options = parser.parse_args(job.arguments("", *more)[1:])
        return make_job(options, ranks=SingleRank()).plan.precision.compute

    assert (compute(True), compute(False), compute(False, "--compute", "bf16")) == ("bf16", "fp32", "bf16")
