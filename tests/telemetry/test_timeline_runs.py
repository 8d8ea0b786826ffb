"""Tests that the timeline of a run agrees with its statistics, from Python and from the command line."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from homes import each_device
from small_runtime import TIED, loss_of, opened, train_step
from timelines import Event, check_rows, edge_rows, full_after, lines_of, load, rows_of
from tiny_job import TinyJob, run_error

from infinity import cli
from infinity.aio import Faults
from infinity.errors import ConfigError, StorageError
from infinity.system.disk_files import injected
from infinity.telemetry.stats import Edge, Phase, Stats

# --- a run ----------------------------------------------------------------------------------------------


def moved_between(before: Stats, after: Stats) -> dict[Edge, int]:
    return {edge: after.edges[edge].bytes - before.edges[edge].bytes for edge in Edge}


@each_device
@pytest.mark.parametrize("home", ["nvme", "unified-nvme"])
def test_a_run_is_shown_as_it_is_counted(home: str, device: str, tmp_path: Path) -> None:
    if device == "cuda" and home.startswith("unified"):
        pytest.skip("a CUDA device has memory of its own")
    pages, path = tmp_path / "pages", tmp_path / "out.json"
    pages.mkdir()
    model = TIED.make(device)
    with opened(model, pages, home=home) as runtime:
        train_step(model, runtime)
        runtime._components.scheduler.complete_all()
        before = runtime.stats
        with runtime.timeline(path) as lines:
            for number in (1, 2, 3):
                lines.annotate(loss=train_step(model, runtime, number))
            runtime._components.scheduler.complete_all()
        after = runtime.stats
        with torch.no_grad():
            loss_of(model)
    events = load(path)
    check_rows(events)
    rows = rows_of(events)
    moved = moved_between(before, after)
    shown = {edge: sum(each["args"]["bytes"] for each in edge_rows(events, edge)) for edge in Edge}
    assert shown == moved
    used = {Edge.NVME_TO_HOST, Edge.HOST_TO_NVME}
    if home == "nvme":  # the CPU takes gradients where they are
        used = set(Edge) - ({Edge.DEVICE_TO_HOST} if device == "cpu" else set())
    assert {edge for edge in Edge if moved[edge]} == used
    waits = rows["waits"]
    for edge in Edge:
        stalled = [each for each in waits if each["name"] == edge.value]
        faults = [each for each in stalled if each["args"]["for"] == "page fault"]
        one, other = after.edges[edge], before.edges[edge]
        assert seconds(stalled) == pytest.approx(one.stall_seconds - other.stall_seconds, abs=1e-5)
        assert seconds(faults) == pytest.approx(one.fault_seconds - other.fault_seconds, abs=1e-5)
    updates = [each for each in waits if each["name"] == "update"]
    assert seconds(updates) == pytest.approx(after.update_seconds - before.update_seconds, abs=1e-5)
    trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert sum(each["args"]["parameters"] for each in rows["update"]) == 3 * trainable
    assert {each["name"] for each in rows["compute"]} == {each.value for each in Phase}
    trainer = sorted((each["start"], each["end"]) for each in [*rows["compute"], *waits])
    assert all(one[1] == next_one[0] for one, next_one in itertools.pairwise(trainer)), "no gap, no overlap"
    assert [each["name"] for each in rows["step"]] == ["step 2", "step 3", "step 4"]
    assert all(each["args"]["loss"] > 0 for each in rows["step"])


def seconds(found: Sequence[Event]) -> float:
    return sum(each["end"] - each["start"] for each in found) / 1e9


def test_a_request_is_as_long_as_the_disk_took(tmp_path: Path) -> None:
    """Every read is delayed by 2 ms, and each read in the timeline lasts at least as long."""
    model, faults = TIED.make(), Faults()
    pages, path = tmp_path / "pages", tmp_path / "out.json"
    pages.mkdir()
    with injected(faults), opened(model, pages) as runtime:
        train_step(model, runtime)
        faults.delay("read", 1, 0.002, times=None)
        with runtime.timeline(path), torch.no_grad():
            loss_of(model)
            runtime._components.prefetch_engine.land_all()
        faults.clear()
    reads = edge_rows(load(path), Edge.NVME_TO_HOST)
    assert reads
    assert all(each["end"] - each["start"] >= 2_000_000 for each in reads if "unfinished" not in each["args"])


def test_a_timeline_changes_no_bit_and_keeps_no_staging(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    losses = []
    for path in (None, tmp_path / "out.json"):
        model = TIED.make()
        with opened(model, pages) as runtime:
            if path is None:
                losses.append([train_step(model, runtime, step) for step in range(3)])
                continue
            with runtime.timeline(path):
                losses.append([train_step(model, runtime, step) for step in range(3)])
                runtime._components.scheduler.complete_all()
                runtime._components.store.settle()
                runtime._components.prefetch_engine.abandon()
                staging = runtime._components.store.staging
                assert staging.largest_free == staging.nbytes
    assert losses[0] == losses[1]


def test_a_second_timeline_of_a_runtime_is_refused(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    with opened(TIED.make(), pages) as runtime, runtime.timeline(tmp_path / "one.json"):
        refused = pytest.raises(ConfigError, match="being recorded already")
        with refused, runtime.timeline(tmp_path / "two.json"):
            pass
        with pytest.raises(StorageError), runtime.timeline(tmp_path / "absent" / "two.json"):
            pass
    load(tmp_path / "one.json")
    load(tmp_path / "two.json")


# --- the command line -----------------------------------------------------------------------------------


def test_train_writes_a_timeline(job: TinyJob, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, log = tmp_path / "out.json", tmp_path / "log"
    found = job.train(capsys, "--steps", 3, "--trace", path, "--log", log, *job.nvme())
    events = load(path)
    check_rows(events)
    steps = rows_of(events)["step"]
    assert [each["name"] for each in steps] == ["step 1", "step 2", "step 3"]
    assert [each["args"]["loss"] for each in steps] == found["losses"]
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    for edge in Edge:  # the loop alone; the first step in the log also fills the model
        last = sum(each["args"][f"bytes {edge.value}"] for each in steps[1:])
        assert last == sum(line["bytes"][edge.value] for line in logged[1:])
    assert cli.main(job.arguments("train", "--steps", 1, "--trace", path)) == 0
    assert f"timeline in {path}" in " ".join(capsys.readouterr().out.split("\n"))


@pytest.mark.parametrize("where", ["absent/out.json", "/dev/full"])
def test_a_timeline_that_cannot_be_is_refused_before_the_plan(
    where: str,
    job: TinyJob,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planned(*_: object) -> None:
        raise AssertionError("this comes after the refusal")

    monkeypatch.setattr(cli.train, "make_job", planned)
    path = str(tmp_path / where)
    line, everything, error = run_error(capsys, job.arguments("train", "--json", "--trace", path), 1)
    assert error["error"] in ("StorageError", "StorageFull")
    assert path in error["cause"]
    assert everything.strip() == line


def test_a_disk_that_fills_up_does_not_end_the_run(
    job: TinyJob, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    full_after(monkeypatch, 2)
    with pytest.warns(RuntimeWarning, match="The timeline ends here"):
        assert cli.main(job.arguments("train", "--steps", 3, "--trace", path)) == 0
    assert "the timeline broke off: Could not write" in capsys.readouterr().out.replace("\n", " ")
    load(path)


def test_a_run_that_is_ended_leaves_its_timeline(warm: None, job: TinyJob, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    process = job.start(*job.arguments("train", "--trace", path, "--steps", 1_000_000, *job.nvme()))
    try:
        hung = time.monotonic() + 120.0
        while not path.exists() or '"step 3"' not in path.read_text():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < hung
            time.sleep(0.01)
        if_killed = lines_of(path.read_text())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120.0)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    for events in (if_killed, load(path)):
        check_rows(events)
        assert [each["name"] for each in rows_of(events)["step"]][:3] == ["step 1", "step 2", "step 3"]
