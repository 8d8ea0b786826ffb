"""Tests of `infinity train` from end to end.

Summary, log and export must agree, bad options must be refused before training, an error must end the run
with its exit code, and no page file may be left.
"""

from __future__ import annotations

import errno
import json
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_job import JSON_KEYS, PATIENCE, SENTENCE, TinyJob, ended, run_error, run_json

import infinity
from infinity import cli
from infinity.aio import Faults
from infinity.checkpoint import atomic_directory
from infinity.lm.data import Batches, find_text
from infinity.lm.loop import HeldOut
from infinity.lm.model import language_model
from infinity.ranks import SingleRank
from infinity.system.disk_files import injected

SHORT_SAMPLE = """
from infinity import cli
from infinity.cli import training_run

training_run.sample_tokens = lambda parameters: 3
raise SystemExit(cli.main())
"""
"""The command `infinity`, except that the sample at the end of `train` is short: 200 tokens take seconds."""


def test_the_first_command_from_end_to_end(job: TinyJob) -> None:
    """README's first command, as a process, trains with pages on the disk and exports.

    Its log must have the losses of its summary, the predicted seconds per step must lie in the range that
    the summary gives for them, and no page file may be left. Its peak must be within its budget: it is
    measured beyond the process's use before the model is filled, and the plan leaves hardly a byte free.
    """
    log, out = job.folder / "log", job.folder / "out"
    words = ["train", "--budget-host", "256MiB", *job.nvme("1GiB"), "--data", str(job.folder / "data")]
    words += ["--steps", "2", "--export", str(out), "--log", str(log), "--json"]
    process = job.start(*words, program=["-c", SHORT_SAMPLE])
    with ended(process):
        stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    summary = json.loads(stdout)
    assert set(summary) == JSON_KEYS
    assert summary["parameters"] > 9e6
    assert summary["nvme"]["planned"] > 40 << 20
    ram = summary["ram"]
    assert 0.95 * ram["budget"] <= ram["planned"] <= ram["budget"] == 256 << 20
    assert 0.5 * ram["budget"] <= ram["peak"] <= ram["budget"]
    least, most = summary["step_seconds"]["range"]
    assert 0 < least <= summary["step_seconds"]["predicted"] <= most
    assert [json.loads(line)["loss"] for line in log.read_text().splitlines()] == summary["losses"]
    assert load_file(out / "model.safetensors")
    assert list(job.pages.iterdir()) == []
    for words in ("infinity ", "smallest budgets", "step 1/2", "step 2/2", "swap removed", f"to {out}"):
        assert words in stderr
    assert "\x1b" not in stdout + stderr  # no terminal, no escape sequences


def test_the_summary_and_the_log_agree(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    log = job.folder / "log"
    log.write_text("of another run\n")
    halves = ["--accumulate", "2"]
    summary = job.train(capsys, *job.on_disk(capsys, *halves), *halves, "--steps", 5, "--log", log)
    assert set(summary) == JSON_KEYS
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in lines] == summary["losses"]
    assert {line["tokens"] for line in lines} == {2 * 2 * 32}
    assert all(line["norm"] > 0 and line["seconds"] > 0 for line in lines)
    assert lines[0]["lr"] == 1e-2
    moved = {edge: sum(line["bytes"][edge] for line in lines) for edge in summary["bytes_moved"]}
    assert set(moved) == {"nvme->host", "host->device", "device->host", "host->nvme"}
    assert all(moved[edge] <= summary["bytes_moved"][edge] for edge in moved)
    assert all(moved[edge] > 0 for edge in ("nvme->host", "host->nvme", "host->device"))
    assert summary["text"]["files"] == 8
    assert summary["steps"] == 5
    assert summary["exported"] is None
    assert summary["nvme"]["planned"] > 0
    assert summary["ram"]["planned"] <= summary["ram"]["budget"]
    assert summary["sample"].startswith(SENTENCE[:5])
    assert list(job.pages.iterdir()) == []


def test_people_get_the_same_in_lines(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(job.arguments("train", "--steps", 3)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].startswith("infinity ")
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == [
        "step 1/3",
        "step 3/3",
    ]
    assert lines[-1].startswith("done in ")
    assert "swap removed" not in lines[-1]  # no swap file was made


def test_it_learns(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    loss = job.train(capsys, "--steps", 30)["held_out_loss"]
    assert loss["before"] > 5  # a guess among 256 bytes has a loss of log(256), about 5.5
    assert loss["after"] < loss["before"] - 1.5


def test_where_pages_are_changes_no_bit(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    choice = ["--activations", "auto"]
    disk = job.on_disk(capsys, *choice)
    homes = {
        "disk": disk,
        "RAM": ["--budget-device", "64MiB", "--budget-host", "64MiB"],
        "RAM as the device": ["--budget-host", "64MiB"],
        "disk, RAM as the device": ["--budget-host", "480KiB", *job.nvme()],
    }
    runs = {name: job.train(capsys, *options, *choice, "--steps", 2) for name, options in homes.items()}
    assert {name: run["nvme"]["planned"] > 0 for name, run in runs.items()} == {
        name: "disk" in name for name in homes
    }
    results = [(run["losses"], run["held_out_loss"], run["sample"]) for run in runs.values()]
    assert results == [results[0]] * len(runs)


def test_the_seed_decides(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [job.train(capsys, "--steps", 2, "--seed", seed) for seed in (1, 1, 2)]
    losses = [run["losses"] for run in runs]
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[2][0]


def test_accumulating_halves_learns_as_the_whole_batch_does(
    job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = job.train(capsys, "--steps", 20, "--batch", 4)
    halves = job.train(capsys, "--steps", 20, "--batch", 2, "--accumulate", 2)
    assert whole["losses"] != halves["losses"]  # these windows of the text differ
    for a, b in zip(whole["losses"], halves["losses"], strict=True):
        assert a == pytest.approx(b, abs=0.35)
    assert whole["held_out_loss"]["after"] == pytest.approx(halves["held_out_loss"]["after"], abs=0.1)
    assert whole["losses"][0] - whole["losses"][-1] > 1


def test_an_export_is_the_trained_model(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    out, again = job.folder / "new" / "out", job.folder / "again"
    summary = job.train(capsys, *job.on_disk(capsys), "--steps", 3, "--export", out)
    assert summary["exported"] == str(out)
    tiny = language_model("tiny")
    text = find_text([str(job.folder / "data")])
    precision = infinity.Precision(compute="bf16")
    optimizer = torch.optim.AdamW(tiny.model.parameters())
    with infinity.offload(
        tiny.model, optimizer, precision=precision, device="cpu", weights=out, budget=roomy()
    ) as runtime:
        held_out = HeldOut(
            tiny, Batches(text, tiny, batch=2, seq=32, seed=0), torch.device("cpu"), ranks=SingleRank()
        )
        assert held_out.loss() == summary["held_out_loss"]["after"]
        runtime.export(again)
    first, second = load_file(out / "model.safetensors"), load_file(again / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)


def roomy() -> infinity.Budget:
    return infinity.Budget(host="64MiB")


@pytest.mark.parametrize("what", ["filled", "a file", "no name"])
def test_an_export_that_cannot_be_is_refused_before_anything(
    what: str, job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.train, "make_job", lambda *_, **__: pytest.fail("it was planned"))
    out = job.folder / "out"
    if what == "filled":
        out.mkdir()
        (out / "mine").write_text("kept")
    elif what == "a file":
        out.write_text("kept")
    target = "" if what == "no name" else str(out)
    run_error(capsys, job.arguments("train", "--json", "--export", target), 2)
    assert what == "no name" or (out / "mine" if what == "filled" else out).read_text() == "kept"


@pytest.mark.parametrize("what", ["log", "pages"])
def test_an_export_to_where_the_run_itself_writes_is_refused_before_training(
    what: str, job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.training_run, "Training", lambda *_, **__: pytest.fail("it trained"))
    log = ["--log", str(job.pages / "log")] if what == "log" else []
    options = [*(job.on_disk(capsys) if what == "pages" else []), *log, "--export", str(job.pages)]
    line, _, _ = run_error(capsys, job.arguments("train", "--json", *options), 2)
    assert "is not empty" in line


def test_an_export_that_cannot_be_written_is_refused_before_anything(
    job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.train, "make_job", lambda *_, **__: pytest.fail("it was planned"))
    line, _, error = run_error(capsys, job.arguments("train", "--json", "--export", "/proc/new/out"), 1)
    assert error["error"] == "StorageError"
    assert "Could not write to /proc/new/out" in line


def test_an_export_without_room_is_refused_before_training(
    job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.training_run, "Training", lambda *_, **__: pytest.fail("it trained"))
    little = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(atomic_directory, "os", SimpleNamespace(**{**vars(os), "statvfs": lambda _: little}))
    line, _, error = run_error(
        capsys, job.arguments("train", "--json", "--export", str(job.folder / "out")), 1
    )
    assert error["error"] == "StorageFull"
    assert "its file system has 4 KiB free" in line


@pytest.mark.parametrize(("path", "words"), [("absent/log", "Create the directory first"), ("", "ENOENT")])
def test_a_log_that_cannot_be_opened(
    path: str, words: str, job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.training_run, "carry_out", lambda *_, **__: pytest.fail("the model was filled"))
    target = path and str(job.folder / path)
    line, _, error = run_error(capsys, job.arguments("train", "--json", "--log", target), 1)
    assert error["error"] == "StorageError"
    assert words in line


def test_a_log_on_a_full_disk_ends_the_run(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = job.arguments("train", "--json", "--log", "/dev/full", *job.on_disk(capsys))
    line, _, error = run_error(capsys, arguments, 1)
    assert error["error"] == "StorageFull"
    assert "Could not write /dev/full" in line
    assert list(job.pages.iterdir()) == []


@pytest.mark.parametrize(("kind", "nth"), [("read", 1), ("read", 200), ("write", 1), ("write", 200)])
def test_an_io_error_ends_the_run_and_leaves_nothing(
    kind: str, nth: int, job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    options = job.on_disk(capsys)
    faults = Faults()
    faults.fail(kind, nth, errno.EIO, times=None)
    with injected(faults):
        line, everything, error = run_error(
            capsys, job.arguments("train", "--json", "--steps", 50, *options), 1
        )
    assert faults.fired
    assert error["error"] == "StorageError"
    assert str(job.pages) in line
    assert "EIO" in line
    assert "Traceback" not in everything
    assert list(job.pages.iterdir()) == []


def test_a_loss_that_is_no_number_is_null(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    log = job.folder / "log"
    wild = ["--compute", "fp16", "--lr", "1e30", "--clip", "1e20"]
    summary = job.train(capsys, "--steps", 3, *wild, "--log", log)
    assert summary["losses"][0] > 5
    assert summary["losses"][1:] == [None, None]
    assert summary["held_out_loss"]["after"] is None
    assert all("NaN" not in line and "Infinity" not in line for line in log.read_text().splitlines())


def test_bf16_that_diverges_is_an_error(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*job.on_disk(capsys), "--lr", "1e30", "--clip", "1e20"]
    _, _, error = run_error(capsys, job.arguments("train", "--json", *options), 1)
    assert error["error"] == "NonFiniteGradient"
    assert list(job.pages.iterdir()) == []


def test_escape_sequences_in_a_sample_are_not_printed(
    job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = "\x1b]0;mine\x07\x9b2J\r one\n\ttwo 世\u3000界"
    monkeypatch.setattr(cli.training_run, "generate", lambda *_, **__: sample)
    assert cli.main(job.arguments("train", "--steps", 1)) == 0
    out = capsys.readouterr().out
    assert not set("\x1b\x07\x9b\r") & set(out)
    assert " one\n" in out
    assert "世\u3000界" in out
    assert job.train(capsys, "--steps", 1)["sample"] == sample


def test_a_model_of_transformers(
    job: TinyJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = transformers.LlamaConfig(
        vocab_size=256,
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=64,
    )
    home, out = job.folder / "llama", job.folder / "out"
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(home)
    words = models.WordLevel({chr(each): each for each in range(128)}, unk_token="?")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), chat_template="{{ messages }}"
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save_pretrained(home)
    first = job.train(capsys, "--steps", 2, "--lr", 1e-2, "--export", out, model=str(home))
    assert first["model"] == "llama"
    assert first["held_out_loss"]["after"] < first["held_out_loss"]["before"]
    exported = transformers.AutoTokenizer.from_pretrained(out)
    assert exported(SENTENCE)["input_ids"] == tokenizer(SENTENCE)["input_ids"]
    assert exported.chat_template == tokenizer.chat_template
    config.save_pretrained(out)
    second = job.train(capsys, "--steps", 1, model=str(out))
    assert second["held_out_loss"]["before"] == first["held_out_loss"]["after"]
    line, _, _ = run_error(capsys, job.arguments("plan", "--json", "--seq", 64, model=str(home)), 2)
    assert "Give --seq 63 or less." in line


def test_a_folder_that_is_no_model(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    line, _, _ = run_error(capsys, job.arguments("train", "--json", model=str(job.pages)), 2)
    assert "has no config.json" in line


def test_the_json_of_a_plan_is_what_the_run_then_does(
    job: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    options = job.on_disk(capsys)
    plan, run = job.plan(capsys, *options), job.train(capsys, *options, "--steps", 1)
    tiers = {each["tier"]: each for each in plan["tiers"]}
    kinds = ("params", "gradients", "optimizer")
    assert run["nvme"]["planned"] == sum(tiers["nvme"][kind] for kind in kinds)
    assert run["ram"]["budget"] == tiers["device"]["budget"] + tiers["host"]["budget"]
    assert run["step_seconds"]["predicted"] == plan["step_seconds"]
    assert run_json(capsys, job.arguments("plan", "--json", *options)) == plan
