"""Tests that every benchmark runs, prints a complete report and leaves no file. Speeds are not checked."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import two_nodes
import warm_python
from torch_releases import fsdp2_on_a_cpu

import infinity
from infinity import aio
from infinity.cpu_adam import BLOCK
from infinity.lm.decoder import PRESETS, Decoder, DecoderConfig, Preset

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
RATE = "100mbit"

import turns  # noqa: E402
from peers import fsdp2, plain  # noqa: E402
from peers.group import Group  # noqa: E402
from peers.process import ContenderFailed  # noqa: E402
from peers.task import Batches, Task  # noqa: E402


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fork the benchmarks' processes, give each one thread, and break their `deepspeed`."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "deepspeed.py").write_text("raise ImportError('broken on purpose')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(broken), *sys.path]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(subprocess, "Popen", warm_python.Popen)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    found = tmp_path / "disk"
    found.mkdir()
    return found


def run(
    module: str, directory: Path, capsys: pytest.CaptureFixture[str], *more: str, code: int = 0
) -> dict[str, Any]:
    """Run a benchmark in this process, and return the JSON object in the last line that it prints."""
    quick = ["--quick", "--json", "--directory", str(directory), *more]
    assert importlib.import_module(module).main(quick) == code
    assert list(directory.iterdir()) == []
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_activations_within_ram(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run("activations", disk, capsys, "--unified", "--ways", "keep", "offload to disk")
    assert report["same_bits"] is True
    kept, left = report["results"]["keep"], report["results"]["offload to disk"]
    assert (
        0 < left["activations"] < kept["activations"]
        and 0 < left["bytes"]["written"] <= left["bytes"]["down"]
    )
    assert left["of_limit"] > 0 and kept["ratios"] == [1.0] * len(left["ratios"])


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
def test_aio(disk: Path) -> None:
    working = [report.name for report in aio.probe(disk).backends[:2] if report.ok]
    if not working:
        pytest.skip("neither io_uring nor libaio works here")
    command = [sys.executable, str(BENCHMARKS / "aio.py"), "--quick", "--json", "--directory", str(disk)]
    done = subprocess.run([*command, "--engine", *working], capture_output=True, text=True, check=False)
    if done.returncode != 0 and "engine" in done.stderr and "not loadable" in done.stderr:
        pytest.skip("this fio lacks an engine")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert {row["case"]["engine"] for row in results} == set(working)
    assert all(row["ratio"] > 0 for row in results)
    assert list(disk.iterdir()) == []


EDIT = """
_offload = offload


def offload(model, *arguments, **options):
    for name, parameter in model.named_parameters():
        if "embedding" in name:
            parameter.data.view(-1)[0] += 2.0**-6
    return _offload(model, *arguments, **options)
"""


def test_bits_names_the_case_whose_bits_differ(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bits, ours = importlib.import_module("bits"), Path(infinity.__file__).parent
    two = (
        "tied, nvme, eager, accumulate 1, unclipped, groups 1, bf16 with fp32 states, adamw",
        "custom, host, lazy, accumulate 4, clipped, groups 2, fp32 with fp32 states, adamw",
    )
    package = tmp_path / "other" / "infinity"
    package.mkdir(parents=True)
    for each in ours.iterdir():
        if each.name not in ("__init__.py", "__pycache__"):
            (package / each.name).symlink_to(each)
    (package / "__init__.py").write_text((ours / "__init__.py").read_text() + EDIT)
    options = ["--steps", "2", "--directory", str(disk), "--against", str(package.parent), "--case"]
    assert bits.main([*options, *two]) == 1
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last == [f"differs: {two[0]}", "1 of 2 cases have the same bits"]
    assert list(disk.iterdir()) == []


def test_commits(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run("commits", disk, capsys, "--part", "bytes", "stall")
    found = report["bytes"]
    assert found["exact"] is True and found["on_nvme"]["on"] == found["on_nvme"]["off"]
    assert found["on_nvme"]["on"]["engine"] > found["state_bytes"] > 0
    stall = report["stall"]
    assert stall["pairs"] == report["settings"]["pairs"] == len(stall["saves"]) - 1
    assert 0 < stall["save_ms"]["p50"] <= stall["save_ms"]["p95"] <= stall["save_ms"]["max"]


def test_checkpoint_peers(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run("checkpoint_peers", disk, capsys, "--contender", "ours", "deepspeed:cpu", code=1)
    assert "broken on purpose" in report["failures"]["deepspeed:cpu"]
    (save,) = report["saves"]["ours"]
    assert save["blocked_s"] > 0 and save["disk_bytes"] >= save["written_bytes"] / 2 > 0


def test_cpu_adam() -> None:
    command = [sys.executable, str(BENCHMARKS / "cpu_adam.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert all(each["median_s"] > 0 for each in results.values()) and "torch fused AdamW, fp32" in results
    bytes_each = [each["bytes_per_parameter"] for each in list(results.values())[:5]]
    assert bytes_each == [28, 26, 28, 18, 14]


def test_gpu_idle_says_why_there_is_no_figure_without_a_gpu(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = tmp_path / "timeline.json"
    options = {"model": "10m", "device": "cpu", "batch": 1, "seq": 16, "warm-up": 1, "steps": 1}
    options |= {"host": "512MiB", "directory": disk, "timeline": timeline}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert importlib.import_module("gpu_idle").main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["idle_share"] is None and found["why"] and found["seconds"] > 0
    assert any(event.get("name", "").startswith("step") for event in json.loads(timeline.read_text()))
    assert list(disk.iterdir()) == []


def test_gpu_probe_times_the_parts_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU, whose steps have the same parts."""
    words = [
        "step",
        "10m",
        "--on",
        "cpu",
        "--host",
        "512MiB",
        "--batch",
        "1",
        "--seq",
        "16",
        "--clip",
        "1.0",
        "--steps",
        "2",
    ]
    assert importlib.import_module("gpu_probe").main(words) == 0
    first, *steps, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["units"] > 0 and len(steps) == 2 and all(each["loss"] > 0 for each in steps)
    parts = ["forward_call", "forward_rest", "backward_call", "drain", "clip", "update"]
    assert [f"{each}_s" for each in parts] == list(last["median"])
    assert last["step_s"] == sum(last["median"].values()) and last["tokens"] == 16


def test_gpu_virtual(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module("gpu_virtual").main(["--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["case"] for row in rows] == ["lazy, clipped at 1", "eager, unclipped"]
    with torch.device("meta"):
        model = Decoder(PRESETS["10m"].decoder)
    elements = PRESETS["10m"].decoder.parameters
    down = 2 * elements + sum(8 * -(-each.numel() // BLOCK) for each in model.parameters())
    for row in rows:
        assert row["seconds"] == pytest.approx(sum(row["terms"].values()))
        # The last copies up of a step take host memory's time during the next backward.
        assert 1.01 * row["seconds"] >= row["limit"] > row["page_bytes"] / 50e9
        assert row["predicted"] == pytest.approx(row["seconds"], rel=0.05)
        assert row["edges"]["device->host"] == down
        assert row["busy"]["link_down"] == pytest.approx(down / 50e9)
        assert row["python_calls"]["other threads"] == 0
        assert row["python_calls"]["backward"] > 0
    lazy = rows[0]
    assert lazy["edges"]["host->device"] == lazy["page_bytes"]
    assert lazy["busy"]["link_up"] == pytest.approx(lazy["page_bytes"] / 50e9)
    assert lazy["done"]["update bytes"] == 26 * elements


def test_overhead(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run("overhead", disk, capsys)
    assert {(each["update"], each["home"]) for each in report["results"]} == {
        (update, home) for update in ("lazy", "eager") for home in importlib.import_module("overhead").HOMES
    }
    rows = [row for each in report["results"] for row in each["layouts"]]
    assert all(row["sum"] == row["python"] + row["c"] > 0 for row in rows)


def test_overhead_counts_three_ways(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("overhead", disk, capsys, "--ways")["results"]
    assert {"forward, RAM", "step(), NVMe", "save()"} <= set(found)
    assert all(each["calls"] > each["files"] > each["folders"] > 0 for each in found.values())


def test_quality_trains_each_variant_to_the_same_bits(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = DecoderConfig(width=64, layers=2, heads=2, hidden=128)
    monkeypatch.setitem(PRESETS, "small", Preset(small, 2e-3))
    results = tmp_path / "results"
    sizes = ["--model", "small", "--steps", "2", "--batch", "1", "--seq", "32", "--seeds", "2"]
    files = ["--directory", str(disk), "--results", str(results), "--json"]
    assert importlib.import_module("quality").main([*sizes, "--states", "fp32,int8", *files]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["same_bits"] == {"fp32": True, "int8": True}
    assert len(report["runs"]) == report["planned"]
    assert 0 <= report["differences"]["all-device, fp32 moments"]["largest_step"] < 0.02
    assert list(disk.iterdir()) == []
    assert (results / "quality-small.md").read_text().count("the same bits in every loss") == 2


def test_ranks(disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_WINDOWS", "0")  # or little would be sent over TCP
    cases = ["ours:3:nvme", "ours:2:ram", "deepspeed:nvme"]
    report = run("ranks", disk, capsys, "--timeout", "60", "--case", *cases, code=1)
    assert "broken on purpose" in report["failures"]["deepspeed:nvme"]
    found = {name: each[0] for name, each in report["turns"].items()}
    assert list(found) == cases[:2]
    assert len({tuple(each["losses"]) for each in found.values()}) == 1, "homes and stages change no bit"
    assert all(each["sent_bytes"] >= sum(each["facts"]["sent"].values()) for each in found.values())


@pytest.mark.slow
@pytest.mark.skipif(bool(two_nodes.missing(RATE)), reason=two_nodes.missing(RATE))
def test_ranks_of_two_nodes_with_a_link(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = ["ours:3:nvme", "ours:3:nvme:flat"]
    report = run("ranks", disk, capsys, "--timeout", "60", "--link", RATE, "--ranks", "4", "--case", *cases)
    kept, flat = (report["turns"][name][0] for name in cases)
    assert kept["losses"] == flat["losses"] and kept["crossed_bytes"] < flat["crossed_bytes"]
    assert all(0 < each["crossed_bytes"] < each["link_bytes"] for each in (kept, flat))


@pytest.mark.slow
def test_rank_counts(capsys: pytest.CaptureFixture[str]) -> None:
    counts = importlib.import_module("rank_counts")
    counts.main(["--ranks", "2", "--rounds", "1", "--steps", "1", "--idle", "0.1", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["medians"]["2, this"]
    assert min(found[name] for name in ("messages", "CPU s", "threads", "sockets", "RSS MB")) > 0
    assert found["MB"] + found["copied MB"] > 0


def test_communication_is_a_step_without_a_rank_s_part_of_a_step_alone() -> None:
    counts = importlib.import_module("rank_counts")
    here = {"CPU s": 5.0, "pss": 30, "plan": 40, "sent": {"gradients": 8}}
    there = {"CPU s": 6.0, "pss": 20, "plan": 60, "sent": {}}
    found = counts.turn_of([here, there], [{"F": 1.0, "S": 2.0}, {"F": 2.0, "S": 3.0}])
    assert found["comm. s"] == 5.5 - (1.5 + 0.5) and found["PSS / plan"] == 0.5
    assert found["sent"] == {"gradients": 4}
    assert counts.ratios([found, found], [found | {"CPU s": 2.75}, found | {"CPU s": 11.0}])["CPU s"] == 1.25


def test_terminal_picture(disk: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.svg"
    arguments = ["--out", str(out), "--in", str(disk), "--", "python3", "-c", "print('done & out')"]
    assert importlib.import_module("terminal_picture").main(arguments) == 0
    assert "done" in out.read_text() and list(disk.iterdir()) == []


def test_train_in_turns_with_a_peer_and_one_that_does_not_start(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = ["--device", "cpu", "--peer", "deepspeed:nvme", "--peer", "torch:fused"]
    report = run("train", disk, capsys, *peers, "--ours", "host=4MiB", "--ours", "all-nvme", code=1)
    contenders, names = report["contenders"], ["infinity host=4MiB", "infinity all-nvme", "torch:fused"]
    assert list(contenders) == names and "deepspeed:nvme" in report["failures"]
    rounds = report["settings"]["rounds"]
    assert {name: len(each["rounds"]) for name, each in report["ratios"].items()} == dict.fromkeys(
        names[:2], rounds
    )
    in_ram, paged, peer = (contenders[name] for name in names)
    assert in_ram["losses"] == paged["losses"]
    assert all(abs(a - b) < 0.5 for a, b in zip(in_ram["losses"], peer["losses"], strict=True))
    assert in_ram["facts"]["plan"]["homes"]["nvme"] == paged["facts"]["plan"]["homes"]["host"] == 0


def test_train_reports_a_budget_that_is_too_small(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--ours", "host=4KiB", "--peer", "torch:plain", "--processes", "fresh"]
    report = run("train", disk, capsys, *options, code=1)
    assert set(report["contenders"]) == {"torch:plain"} and report["ratios"] == {}
    assert "BudgetError" in report["failures"]["infinity host=4KiB"]


@pytest.mark.skipif(
    not list((BENCHMARKS.parent / "infinity").glob("_aio.*.so")),
    reason="this checkout's modules are not built",
)
@pytest.mark.slow
def test_against_compares_equal_checkouts(disk: Path) -> None:
    options = ["--model", "10m", "--budget", "host=32MiB,nvme=1GiB", "--seq", "8", "--rounds", "1"]
    command = [sys.executable, str(BENCHMARKS / "against.py"), "--unverified", *options]
    done = subprocess.run([*command, "--directory", str(disk)], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["equal_losses"] and set(report["ratios"]) == {"A / A'", "B / A"}
    assert list(disk.iterdir()) == []


def task_in(directory: Path, **changes: Any) -> Task:
    text = directory / "text"
    text.write_bytes(bytes(range(256)) * 8)
    settings: dict[str, Any] = {
        "contender": "fsdp2",
        "mode": "cpu",
        "decoder": asdict(turns.QUICK),
        "decoder_file": str(turns.decoder_module.__file__),
        "batch": 1,
        "seq": 32,
        "learning_rate": 3e-3,
        "clip": 1.0,
        "device": "cpu",
        "directory": str(directory),
        "text": str(text),
        "budgets": {},
        "states": "fp32",
        "update": "lazy",
    }
    return Task(**settings | changes)


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
    task = task_in(tmp_path, contender=module.__name__, mode=mode)
    Path(task.text).write_bytes(b"ab" * 1024)
    contender, batches = module.open_contender(Task.from_json(task.to_json())), Batches(task)
    try:
        losses = [contender.step(*batches.next()) for _ in range(20)]
    finally:
        contender.close()
    assert (losses[-1] < losses[0] - 0.5) is (mode != "compute"), losses


@fsdp2_on_a_cpu
def test_ranks_of_a_peer_have_their_own_batches(tmp_path: Path) -> None:
    tasks = [task_in(tmp_path, rank=rank, ranks=2) for rank in range(2)]
    with Group("fsdp2", tasks, sys.executable, 60, 1) as group:
        group.ready()
        first, second = group.ask("ranked", lead=1, steps=1)
        group.finish()
    assert first["losses"] != second["losses"] and min(first["sent_bytes"], second["sent_bytes"]) > 0


def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1, which is no contender, for half an hour if nobody ends it."""
    tasks = [task_in(tmp_path, ranks=2), task_in(tmp_path, rank=1, ranks=2, contender="absent")]
    with (
        Group("fsdp2", tasks, sys.executable, 300, 1) as group,
        pytest.raises(ContenderFailed, match=r"fsdp2 rank 1 ended with 1(.|\n)*peers\.absent"),
    ):
        group.ready()
