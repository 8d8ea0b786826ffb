"""Tests of `Runtime.save(path)` and `Runtime.load(path)`."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty import watchdog
from parity import differences
from run_copies import opened, slab_of
from runs_on_disk import HOMES, Run, everything, names
from torch import nn
from zoo import entry

import infinity
from infinity.checkpoint import copies
from infinity.checkpoint.commit_files import manifest_bytes
from infinity.errors import ConfigError, CorruptState, IncompatibleCheckpoint

__all__ = ["watchdog"]

STATE = {1: (b"x", float("inf")), "loader": {"epoch": 3}, "t": torch.arange(3)}
"""What the tests give `save` as `state`."""


@pytest.fixture
def plain(tmp_path: Path) -> Run:
    """A run without commits."""
    (tmp_path / "plain").mkdir()
    return Run(tmp_path / "plain", commits=False)


def other(tmp_path: Path, **settings: Any) -> Run:
    """A run in a directory of its own."""
    root = tmp_path / f"other{len(names(tmp_path))}"
    root.mkdir()
    return Run(root, **settings)


def draw() -> tuple[Any, ...]:
    """Draw from every generator."""
    return torch.rand(3).tolist(), np.random.rand(2).tolist(), random.random()


@pytest.mark.sweep(most=4)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("commits", [False, True], ids=["off", "on"])
def test_a_run_goes_on_from_a_copy(home: str, commits: bool, tmp_path: Path) -> None:
    """Five steps later all bits are those of the run that was copied, wherever its pages rest now."""
    first = other(tmp_path, home="nvme", commits=False)
    with first.opened() as (model, runtime):
        first.train(model, runtime, range(2))
        runtime.optimizer.param_groups[0]["lr"] = 0.003
        commit = runtime.save(tmp_path / "copy", state=STATE)
        assert (commit.done, commit.failure) == (True, None)
        commit.wait()
        drawn = draw()
        losses = first.train(model, runtime, range(2, 7))
        end = everything(model, runtime)
    again = other(tmp_path, home=home, commits=commits)
    with again.opened() as (model, runtime):
        again.train(model, runtime, range(1))  # what load takes back
        state = runtime.load(tmp_path / "copy")
        assert differences(state, STATE) == []
        assert draw() == drawn
        assert again.train(model, runtime, range(2, 7)) == losses
        assert differences(everything(model, runtime), end) == []


class WithExtra(nn.Module):
    """A model with a buffer that is not persistent, and with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_buffers_that_are_not_persistent_and_extra_state(tmp_path: Path) -> None:
    of = type(entry("custom"))("extra", WithExtra, lambda step, micro: (torch.ones(2, 8), torch.ones(2)))
    run = other(tmp_path, of=of, commits=False)
    with run.opened() as (model, runtime):
        model.calls, model.seen[1] = 5, 7.0
        runtime.save(tmp_path / "copy")
        model.calls, model.seen[1] = 6, 8.0
        held = model.seen
        runtime.load(tmp_path / "copy")
        assert (model.calls, held.tolist()) == (5, [0, 7, 0])


@pytest.mark.sweep(most=2)
@pytest.mark.parametrize("home", HOMES)
def test_a_run_with_commits_is_rolled_back_and_committed(home: str, tmp_path: Path) -> None:
    """Commits before and after a load, and one that is pending while it loads, hold what they must."""
    run = other(tmp_path, home=home)
    with run.opened() as (model, runtime):
        run.train(model, runtime, range(2))
        runtime.save(tmp_path / "copy", state="two")
        two = everything(model, runtime)
        losses = run.train(model, runtime, range(2, 4))
        runtime.save(state="four").wait()
        run.train(model, runtime, range(4, 5))
        pending = runtime.save(state="five")
        assert runtime.load(tmp_path / "copy") == "two"
        assert differences(everything(model, runtime), two) == []
        pending.wait()
        runtime.save(state="two again").wait()
        assert run.train(model, runtime, range(2, 4)) == losses
        end = everything(model, runtime)
    with run.opened(resume=True) as (model, runtime):
        assert runtime.load() == "two again"
        assert differences(everything(model, runtime), two) == []
        assert run.train(model, runtime, range(2, 4)) == losses
        assert differences(everything(model, runtime), end) == []


def test_a_pending_commit_holds_what_was_there_before_the_load(tmp_path: Path) -> None:
    run = other(tmp_path)
    with run.opened() as (model, runtime):
        run.train(model, runtime, range(1))
        runtime.save(tmp_path / "copy")
        run.train(model, runtime, range(1, 3))
        three = everything(model, runtime)
        run.train(model, runtime, range(2, 3))
        runtime.load(tmp_path / "copy")
        run.train(model, runtime, range(1, 3))
        assert differences(everything(model, runtime), three) == []
        runtime.save(state="three")
        runtime.load(tmp_path / "copy")
    with run.opened(resume=True) as (model, runtime):
        assert runtime.load() == "three"
        assert differences(everything(model, runtime), three) == []


def test_a_frozen_parameter_that_a_commit_holds(tmp_path: Path) -> None:
    run = other(tmp_path)
    with run.opened() as (model, runtime):
        run.train(model, runtime, range(1))
        with runtime.full_parameters(model.embedding), torch.no_grad():
            model.embedding.weight.add_(1)
        runtime.save(tmp_path / "edited")
    run = other(tmp_path)
    with run.opened() as (model, runtime):
        run.train(model, runtime, range(1))
        runtime.save().wait()
        before = everything(model, runtime)
        with pytest.raises(ConfigError, match=r"embedding\.weight has other values"):
            runtime.load(tmp_path / "edited")
        assert differences(everything(model, runtime), before) == []
        run.train(model, runtime, range(1, 2))


def test_when_it_is_refused(tmp_path: Path, plain: Run) -> None:
    of = plain.of
    with plain.opened() as (model, runtime):
        plain.train(model, runtime, range(1))
        runtime.save(tmp_path / "copy")
        of.loss(model, of.batch(1, 0)).backward()
        for call in (lambda: runtime.save(tmp_path / "b"), lambda: runtime.load(tmp_path / "copy")):
            with pytest.raises(ConfigError, match="between the first backward"):
                call()
        runtime.optimizer.step()
        with (
            runtime.full_parameters(model.embedding),
            pytest.raises(ConfigError, match="inside of full_parameters"),
        ):
            runtime.load(tmp_path / "copy")
        with pytest.raises(ConfigError, match="no copy of a run"):
            runtime.load(tmp_path)
        with pytest.raises(ConfigError, match="is not empty"):
            runtime.save(tmp_path / "copy")
        with pytest.raises(ConfigError, match=r"state\['a'\] is of the type"):
            runtime.save(tmp_path / "b", state={"a": object()})
        assert not (tmp_path / "b").exists()
        runtime.optimizer.zero_grad()


def test_what_differs_changes_nothing(tmp_path: Path, plain: Run) -> None:
    with plain.opened() as (model, runtime):
        plain.train(model, runtime, range(1))
        runtime.save(tmp_path / "copy")
        before = everything(model, runtime)
        for change, error, what in (
            ({"param_groups": ()}, IncompatibleCheckpoint, "in its param groups"),
            ({"buffers": {"b": 3}}, IncompatibleCheckpoint, "buffers differ"),
            ({"rng": {"torch": {"$tensor": 1}}}, CorruptState, "rng"),
        ):
            directory = shutil.copytree(tmp_path / "copy", tmp_path / "changed")
            saved, _ = opened(directory)
            changed = replace(saved.manifest, run=replace(saved.manifest.run, **change))
            data = (directory / "commit-1.safetensors").read_bytes()
            (directory / "commit-1").write_bytes(manifest_bytes(changed, data))
            with pytest.raises(error, match=what):
                runtime.load(directory)
            assert differences(everything(model, runtime), before) == []
            shutil.rmtree(directory)
        runtime.save(tmp_path / "whole")
    convnet = other(tmp_path, of=entry("convnet"), compute="fp32", commits=False)
    with convnet.opened() as (model, runtime), pytest.raises(IncompatibleCheckpoint, match="also has"):
        runtime.load(tmp_path / "whole")


def test_a_load_that_fails_half_way_ends_the_runtime(
    tmp_path: Path, plain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plain.opened() as (model, runtime):
        plain.train(model, runtime, range(1))
        runtime.save(tmp_path / "copy")

        def interrupted(*arguments: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(copies, "show", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.load(tmp_path / "copy")
        for use in (runtime.optimizer.zero_grad, lambda: runtime.load(tmp_path / "copy")):
            with pytest.raises(ConfigError, match="interrupted half way"):
                use()


def test_changed_bytes_are_found_and_end_the_runtime(tmp_path: Path, plain: Run) -> None:
    with plain.opened() as (model, runtime):
        plain.train(model, runtime, range(1))
        runtime.save(tmp_path / "copy")
        slab = slab_of(tmp_path / "copy")
        content = bytearray(slab.read_bytes())
        content[-opened(tmp_path / "copy")[0].manifest.volume.nbytes] ^= 1
        slab.write_bytes(content)
        for use in (lambda: runtime.load(tmp_path / "copy"), runtime.optimizer.zero_grad):
            with pytest.raises(CorruptState, match="are not those that were committed"):
                use()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_run_is_continued_from_a_copy_by_resume(in_place: bool, tmp_path: Path, plain: Run) -> None:
    run = other(tmp_path)
    with plain.opened() as (model, runtime):
        plain.train(model, runtime, range(2))
        runtime.save(run.directory, state=STATE)
        losses = plain.train(model, runtime, range(2, 4))
        end = everything(model, runtime)
    there = run.directory if in_place else tmp_path / "new"
    with run.opened(resume=True, checkpoint=there) as (model, runtime):
        assert differences(runtime.load(), STATE) == []
        assert run.train(model, runtime, range(2, 4)) == losses
        assert differences(everything(model, runtime), end) == []
        runtime.save(state="four").wait()
    assert (run.directory / "commit-1").exists() != in_place
    if in_place:
        with run.opened(resume=True) as (model, runtime):
            assert runtime.load() == "four"


def test_inference_loads_a_trained_copy(tmp_path: Path, plain: Run) -> None:
    with plain.opened() as (model, runtime):
        plain.train(model, runtime, range(2))
        runtime.save(tmp_path / "copy", state=5)
        expected = {name: each.detach().clone() for name, each in model.state_dict().items()}
    model = plain.of.make()
    with infinity.offload(model, None, precision=plain.precision, device="cpu") as runtime:
        assert runtime.load(tmp_path / "copy") == 5
        assert differences(dict(model.state_dict()), expected) == []
        runtime.save(tmp_path / "inference").wait()
        assert runtime.load(tmp_path / "inference") is None
