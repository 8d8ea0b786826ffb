"""Tests of commits and resumes that are refused: the error names cause and cure, and nothing has changed."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import copied, differences, injected
from torch import nn

import infinity
from infinity.aio import Faults
from infinity.errors import ConfigError, IncompatibleCheckpoint, StorageError
from infinity.tiers import Tier

WIDTH = 24
FP32 = infinity.Precision(compute="fp32")


def make_model(out: int = WIDTH, *, norm: nn.Module | None = None, more: bool = False) -> nn.Sequential:
    """A model of two linear layers around a batch norm. more: whether a third linear layer follows.

    It also has a buffer that nothing uses.
    """
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH) if norm is None else norm,
        nn.Linear(WIDTH, out),
    )
    model.register_buffer("marks", torch.ones(3))
    return model.append(nn.Linear(WIDTH, WIDTH)) if more else model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def offload(model: nn.Module, optimizer: Any, **options: Any) -> Any:
    precision = infinity.Precision(
        compute=options.pop("compute", "fp32"), states=options.pop("states", "fp32")
    )
    budget = options.pop("budget", infinity.Budget(host="16MiB"))
    return infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu", **options)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return (model(torch.randn(8, WIDTH, generator=generator)).float() - 1).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def content(directory: Path) -> dict[str, bytes]:
    """The commits and slabs below a directory: path of the file -> its bytes."""
    found = (path for path in directory.rglob("*") if path.name.startswith((".", "commit-", "infinity-")))
    return {str(path): path.read_bytes() for path in found if path.suffix != ".lock"}


@pytest.fixture
def commits(tmp_path: Path) -> Path:
    """The directory with the commit of a run of two steps."""
    directory = tmp_path / "commits"
    model = make_model()
    with offload(model, adamw(model), checkpoint=directory) as runtime:
        train(model, runtime.optimizer, range(2))
        runtime.save(state="two").wait()
    return directory


def check_refused(
    error: type[Exception],
    text: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    watched: Path,
    **options: Any,
) -> Any:
    """Assert that `offload` raises `error` with `text`, leaves the files below `watched` as they are, and
    that the model trains in plain torch then. Returns the error.
    """
    before, files = copied(model.state_dict()), content(watched)
    directories = sorted(path for path in watched.rglob("*") if path.is_dir())
    with pytest.raises(error, match=text) as caught:
        offload(model, optimizer, **options)
    assert getattr(caught.value, "cure", "")
    assert content(watched) == files
    assert sorted(path for path in watched.rglob("*") if path.is_dir()) == directories
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    assert differences(copied(model.state_dict()), before) == []
    plain = adamw(model) if optimizer is None else optimizer
    losses = train(model, plain, range(3))
    assert losses[2] != losses[0]
    return caught.value


def check_resumes(commits: Path) -> None:
    """Assert that a commit can be resumed, whatever was tried with it before."""
    model = make_model()
    with offload(model, adamw(model), resume=commits) as runtime:
        assert runtime.load() == "two"
        train(model, runtime.optimizer, range(2, 3))


Changed = Callable[[], tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]]


def changed(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    return model, adamw(model) if optimizer is None else optimizer(model.parameters()), options


def split(parameters: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    return torch.optim.AdamW([{"params": every[:2]}, {"params": every[2:]}])


def reordered(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*parameters][::-1])


def with_marks(*marks: float, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = make_model()
    model.marks = torch.tensor(marks, dtype=dtype)
    return model


REFUSALS: dict[str, tuple[str, Changed]] = {
    "another optimizer": (
        "optimizer is SGD, and AdamW in the checkpoint",
        lambda: changed(make_model(), torch.optim.SGD),
    ),
    "a relative of the optimizer": (
        "optimizer is Adam, and AdamW in the checkpoint",
        lambda: changed(make_model(), torch.optim.Adam),
    ),
    "another format of states": (
        "format of the optimizer's states is int8, and fp32",
        lambda: changed(make_model(), states="int8"),
    ),
    "another compute dtype": (
        r"0\.weight has the dtype torch.bfloat16, and torch.float32",
        lambda: changed(make_model(), compute="bf16"),
    ),
    "another shape": (
        r"2\.weight has the shape \[16, 24\], and \[24, 24\]",
        lambda: changed(make_model(out=16)),
    ),
    "a parameter too many": (r"3\.weight", lambda: changed(make_model(more=True))),
    "a parameter too few": (
        r"1\.weight",
        lambda: changed(make_model(norm=nn.BatchNorm1d(WIDTH, affine=False))),
    ),
    "more groups": (
        r"2 param groups in another way than in the c\w+'s 1",
        lambda: changed(make_model(), split),
    ),
    "another order in a group": ("1 param groups in another way", lambda: changed(make_model(), reordered)),
    "no buffers": (
        r"buffers differ .*1\.running_mean",
        lambda: changed(make_model(norm=nn.BatchNorm1d(WIDTH, track_running_stats=False))),
    ),
    "a buffer of another shape": ("buffer marks has another shape", lambda: changed(with_marks(1, 2))),
    "a buffer of another dtype": (
        "buffer marks has another shape or dtype",
        lambda: changed(with_marks(1, 2, 3, dtype=torch.float64)),
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("streamed", [False, True], ids=["adopted", "streamed"])
@pytest.mark.parametrize("what", REFUSALS)
def test_a_run_that_is_not_the_one_committed(
    what: str, streamed: bool, commits: Path, tmp_path: Path
) -> None:
    text, make = REFUSALS[what]
    model, optimizer, options = make()
    if streamed:
        (tmp_path / "disk").mkdir()
        options["budget"] = infinity.Budget(host="16MiB", nvme={tmp_path / "disk": "16MiB"})
    check_refused(IncompatibleCheckpoint, text, model, optimizer, tmp_path, resume=commits, **options)
    check_resumes(commits)


def test_a_directory_without_commits(tmp_path: Path) -> None:
    model = make_model()
    error = check_refused(ConfigError, "no commit in", model, adamw(model), tmp_path, resume=tmp_path)
    assert "resume=" in error.cure
    model = make_model()
    absent = tmp_path / "absent"
    error = check_refused(StorageError, "absent", model, adamw(model), tmp_path, resume=absent)
    assert error.errno == errno.ENOENT


@pytest.mark.parametrize("which", ["checkpoint", "resume"])
@pytest.mark.parametrize("what", ["a\0b", "", 3], ids=repr)
def test_a_value_that_is_no_path(which: str, what: Any, tmp_path: Path) -> None:
    model = make_model()
    check_refused(ConfigError, "is no path", model, adamw(model), tmp_path, **{which: what})
    with pytest.raises(ConfigError, match="is no path"):
        infinity.plan(model, adamw(model), budget=infinity.Budget(host="16MiB"), checkpoint=what)
    new = tmp_path / "new"
    check_refused(
        ConfigError, "is no path", model, adamw(model), tmp_path, **{"checkpoint": new, which: what}
    )


def test_a_checkpoint_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = make_model()
    error = check_refused(
        StorageError, "Not a directory", model, adamw(model), tmp_path, checkpoint=tmp_path / "file"
    )
    assert error.cure == "Give a directory, not a file."


def test_a_directory_that_was_made_for_a_run_that_is_refused_is_removed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    model = make_model()
    new = tmp_path / "new" / "deep"
    for resume, error in ((tmp_path / "empty", ConfigError), (tmp_path / "absent", StorageError)):
        check_refused(error, resume.name, model, adamw(model), tmp_path, checkpoint=new, resume=resume)


def test_a_new_run_where_commits_lie(commits: Path) -> None:
    model = make_model()
    error = check_refused(
        ConfigError, "commits of another run.*commit-1", model, adamw(model), commits, checkpoint=commits
    )
    assert f'resume="{commits}"' in error.cure and "move" in error.cure and "delete" in error.cure
    check_resumes(commits)


def test_commits_without_an_optimizer_and_weights_beside_a_commit(commits: Path, tmp_path: Path) -> None:
    for where in ({"checkpoint": tmp_path / "new"}, {"resume": commits}):
        check_refused(ConfigError, "without an optimizer", make_model(), None, tmp_path, **where)
    model = make_model()
    error = check_refused(
        ConfigError, "weights= and resume=", model, adamw(model), tmp_path, resume=commits, weights=tmp_path
    )
    assert "Leave weights= out" in error.cure
    check_resumes(commits)


def test_save_is_refused_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Inside of a forward, a backward and full_parameters, and before step(). The training is as without."""
    results = []
    for tries in (False, True):
        model = make_model()
        refused: list[str] = []
        with offload(model, adamw(model), checkpoint=tmp_path / str(tries)) as runtime:

            def save(*_: Any, tries: bool = tries, runtime: Any = runtime, refused: Any = refused) -> None:
                if tries:
                    with pytest.raises(
                        ConfigError, match=r"save\(\) was called .* after optimizer.step\(\)"
                    ) as caught:
                        runtime.save()
                    refused.append(caught.value.cause)

            losses = train(model, runtime.optimizer, range(1))
            forward = model[0].register_forward_hook(save)
            loss = loss_of(model, 1)
            forward.remove()
            loss.register_hook(save)
            loss.backward()
            save()
            with runtime.full_parameters(model[0]):
                save()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            with runtime.full_parameters(model[0]):
                save()
            losses += [loss.item(), *train(model, runtime.optimizer, range(2, 3))]
            commit = runtime.save()
            losses += train(model, runtime.optimizer, range(3, 5))
            commit.wait()
            assert commit.done and commit.failure is None
        assert len(refused) == (5 if tries else 0)
        assert len({*refused}) == (3 if tries else 0)
        results.append(losses)
    assert results[0] == results[1]


def test_save_without_a_checkpoint_directory(tmp_path: Path) -> None:
    model = make_model()
    with offload(model, adamw(model)) as runtime:
        train(model, runtime.optimizer, range(1))
        with pytest.raises(ConfigError, match=r"commits are off.*checkpoint="):
            runtime.save()
        train(model, runtime.optimizer, range(1, 2))
    with pytest.raises(ConfigError):
        runtime.save()


def test_a_state_that_cannot_be_kept_begins_no_commit(commits: Path) -> None:
    model = make_model()
    with offload(model, adamw(model), resume=commits) as runtime:
        runtime.load()
        train(model, runtime.optimizer, range(2, 3))
        with pytest.raises(ConfigError, match=r"state\['model'\]"):
            runtime.save(state={"model": object()})
        train(model, runtime.optimizer, range(3, 4))
        runtime.save(state="four").wait()
    model = make_model()
    with offload(model, adamw(model), resume=commits) as runtime:
        assert runtime.load() == "four"


def test_closing_a_run_whose_updates_cannot_be_read(tmp_path: Path) -> None:
    """The commit that waits for them fails with the read's error, and the commit before it stays."""
    swap, directory = tmp_path / "swap", tmp_path / "commits"
    swap.mkdir()
    faults, model = Faults(), make_model()
    budget = infinity.Budget(host="16MiB", nvme={swap: "16MiB"})
    smallest = infinity.plan(
        model, adamw(model), budget=budget, precision=FP32, device="cpu", checkpoint=directory
    ).smallest[Tier.HOST]
    budget = infinity.Budget(host=smallest, nvme={swap: "16MiB"})
    with injected(faults):
        runtime = offload(model, adamw(model), budget=budget, checkpoint=directory)
    train(model, runtime.optimizer, range(2))
    runtime.save(state="two").wait()
    train(model, runtime.optimizer, range(2, 3))
    faults.fail("read", 1, errno.EIO, times=None)
    commit = runtime.save(state="three")
    with pytest.raises(StorageError) as caught:
        runtime.close()
    assert caught.value.errno == errno.EIO
    assert commit.done and isinstance(commit.failure, StorageError)
    model = make_model()
    with offload(model, adamw(model), budget=budget, resume=directory) as resumed:
        assert resumed.load() == "two"
        train(model, resumed.optimizer, range(2, 4))


def test_load_of_a_run_that_was_not_resumed(tmp_path: Path) -> None:
    model = make_model()
    with offload(model, adamw(model), checkpoint=tmp_path) as runtime:
        with pytest.raises(ConfigError, match=r"not resumed.*resume="):
            runtime.load()
        train(model, runtime.optimizer, range(2))
        runtime.save().wait()


def test_load_after_a_step_changes_nothing(commits: Path) -> None:
    results = []
    for loads in (False, True):
        model = make_model()
        with offload(model, adamw(model), resume=commits) as runtime:
            assert runtime.load() == runtime.load() == "two"
            losses = train(model, runtime.optimizer, range(2, 3))
            runtime.optimizer.param_groups[0]["lr"] = 5e-3
            if loads:
                with pytest.raises(ConfigError, match=r"after steps.*resume=") as caught:
                    runtime.load()
                assert "cannot undo" in caught.value.cause
            results.append(losses + train(model, runtime.optimizer, range(3, 5)))
    assert results[0] == results[1]
