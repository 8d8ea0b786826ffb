"""Tests of torch.distributed.checkpoint over models in pages, by torch's own functions and by planners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from living_tensors import Living
from small_runtime import TIED, opened, train_step, two_layers
from tiled_models import losses_of, offloaded
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import infinity
from infinity.errors import ConfigError
from infinity.integrations.dcp import LoadPlanner, SavePlanner, get_state_dict
from infinity.layout import tiles

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)


both_precisions = pytest.mark.parametrize("compute", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])


def paged(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def of_torch(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), theirs.get_state_dict(model, optimizer), strict=True))


def save(state: dict[str, Any], path: Path) -> Path:
    dcp.save(state, storage_writer=FileSystemWriter(path, single_file_per_rank=False), planner=SavePlanner())
    return path


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from flat(each, f"{name}.{key}")
    elif isinstance(value, (list, tuple)) and not all(isinstance(each, (str, float)) for each in value):
        for index, each in enumerate(value):
            yield from flat(each, f"{name}.{index}")
    else:
        yield name, tuple(value) if isinstance(value, list) else value


def check_same(found: Any, expected: Any) -> None:
    ours, other = dict(flat(found)), dict(flat(expected))
    assert ours.keys() == other.keys()
    for name, value in other.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name
        else:
            assert ours[name] == value, name


@both_precisions
def test_a_checkpoint_is_torchs_and_loads_into_a_fresh_run(compute: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    model = TIED.make("cpu")
    with opened(model, tmp_path / "a", compute=compute) as runtime:
        for step in range(3):
            train_step(model, runtime, step)
        runtime.optimizer.param_groups[0]["lr"] = 3e-3
        path = save(paged(model, runtime.optimizer), tmp_path / "saved")
        expected = of_torch(model, runtime.optimizer)
        dcp_to_torch_save(path, tmp_path / "saved.pt")
        check_same(torch.load(tmp_path / "saved.pt"), expected)
        after = [train_step(model, runtime, step) for step in (3, 4)]
    other = TIED.make("cpu")
    with opened(other, tmp_path / "b", compute=compute) as runtime:
        with torch.no_grad():
            for each in other.parameters():
                each.zero_()
        dcp.load(paged(other, runtime.optimizer), checkpoint_id=path, planner=LoadPlanner())
        check_same(of_torch(other, runtime.optimizer), expected)
        assert [train_step(other, runtime, step) for step in (3, 4)] == after


@both_precisions
def test_torchs_own_functions_answer_and_set_a_fresh_run(compute: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    model = TIED.make("cpu")
    with opened(model, tmp_path / "a", compute=compute) as runtime:
        for step in range(3):
            train_step(model, runtime, step)
        expected = of_torch(model, runtime.optimizer)
        check_same(theirs.get_model_state_dict(model), dict(model.state_dict()))
        found = theirs.get_optimizer_state_dict(model, runtime.optimizer)
        numbered = runtime.optimizer.state_dict()["state"]
        check_same(dict(enumerate(found["state"].values())), numbered)
        after = [train_step(model, runtime, step) for step in (3, 4)]
    other = TIED.make("cpu")
    with opened(other, tmp_path / "b", compute=compute) as runtime:
        theirs.set_state_dict(
            other,
            runtime.optimizer,
            model_state_dict=expected["model"],
            optim_state_dict=expected["optimizer"],
        )
        assert [train_step(other, runtime, step) for step in (3, 4)] == after


@pytest.mark.parametrize("way", ["to plain torch", "from plain torch"])
def test_a_checkpoint_moves_between_torch_and_pages(way: str, tmp_path: Path) -> None:
    def plain() -> tuple[nn.Module, Any]:
        model = two_layers()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def steps(model: nn.Module, optimizer: Any, count: int = 2) -> None:
        for step in range(count):
            inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    (tmp_path / "pages").mkdir()
    model, optimizer = plain()
    pages = two_layers()
    with opened(pages, tmp_path / "pages") as runtime:
        if way == "to plain torch":
            steps(pages, runtime.optimizer)
            state = paged(pages, runtime.optimizer)
            save(state, tmp_path / "saved")
            found = of_torch(model, optimizer)
            dcp.load(found, checkpoint_id=tmp_path / "saved")
            theirs.set_state_dict(
                model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
            )
        else:
            steps(model, optimizer)
            dcp.save(of_torch(model, optimizer), checkpoint_id=tmp_path / "saved")
            dcp.load(paged(pages, runtime.optimizer), checkpoint_id=tmp_path / "saved", planner=LoadPlanner())
        check_same(of_torch(pages, runtime.optimizer)["model"], of_torch(model, optimizer)["model"])
        check_same(
            of_torch(pages, runtime.optimizer)["optimizer"]["state"],
            of_torch(model, optimizer)["optimizer"]["state"],
        )


def test_a_checkpoint_of_tiles_is_that_of_whole_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "FEWEST_ELEMENTS", 1 << 16)  # four tiles of 256 KiB
    small, roomy = (infinity.Budget(device=each, host="48MiB") for each in ("768KiB", "8MiB"))
    runs = [(True, small, "bf16"), (False, roomy, "bf16"), (True, small, "bf16")]
    path, expected = None, None
    for number, (tiled, budget, compute) in enumerate(runs):
        model, runtime = offloaded(tied=True, budget=budget, compute=compute, tiled=tiled)
        with runtime:
            losses_of(model, runtime, 2, first=5 + number)
            if path is not None:
                dcp.load(paged(model, runtime.optimizer), checkpoint_id=path, planner=LoadPlanner())
                check_same(of_torch(model, runtime.optimizer), expected)
            path = save(paged(model, runtime.optimizer), tmp_path / f"saved {number}")
            expected = of_torch(model, runtime.optimizer)


def test_one_tensor_is_in_ram_at_a_time(tmp_path: Path) -> None:
    """The run has 24 matrices: 8 parameters, with two moments each."""
    (tmp_path / "pages").mkdir()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(180, 180, bias=False) for _ in range(8)))
    with opened(model, tmp_path / "pages") as runtime:
        model(torch.randn(2, 180)).sum().backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        state = paged(model, runtime.optimizer)
        one = 4 * 180 * 180
        with Living() as living:
            save(state, tmp_path / "saved")
        assert living.peak <= 4 * one
        with Living() as living:
            dcp.load(state, checkpoint_id=tmp_path / "saved", planner=LoadPlanner())
        assert living.peak <= 4 * one


def test_states_that_are_not_there_are_not_saved(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    model = two_layers()
    with opened(model, tmp_path / "pages") as runtime:
        state = paged(model, runtime.optimizer)
        save(state, tmp_path / "saved")
        dcp_to_torch_save(tmp_path / "saved", tmp_path / "saved.pt")
        assert "state" not in torch.load(tmp_path / "saved.pt")["optimizer"]
        dcp.load(state, checkpoint_id=tmp_path / "saved", planner=LoadPlanner())
        assert not runtime.optimizer.state


def test_other_planners_and_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pages").mkdir()
    model = two_layers()
    with opened(model, tmp_path / "pages") as runtime:
        state = paged(model, runtime.optimizer)
        assert "PagedTensor" in repr(state["model"]["0.weight"])
        with pytest.raises(CheckpointException, match="planner=SavePlanner"):
            dcp.save(state, checkpoint_id=tmp_path / "saved")
        save(paged(model, None), tmp_path / "weights")
        with pytest.raises(CheckpointException, match="planner=LoadPlanner"):
            dcp.load(paged(model, None), checkpoint_id=tmp_path / "weights")
        with pytest.raises(CheckpointException, match="Missing key"):
            dcp.load(state, checkpoint_id=tmp_path / "weights", planner=LoadPlanner())
        monkeypatch.setattr("infinity.integrations.dcp.several_ranks", lambda mesh: True)
        with pytest.raises(ConfigError, match="several ranks"):
            paged(model, None)
        monkeypatch.undo()
        monkeypatch.setattr(type(model[0]), "get_extra_state", lambda self: 1)
        with pytest.raises(ConfigError, match="0 has an extra state"):
            paged(model, None)
