"""Running averages in pages: bits of torch's AveragedModel over fp32 parameters, from every home."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import ROOMY, budget_for, check_homes
from parity import differences
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import infinity
from infinity.errors import ConfigError, IncompatibleCheckpoint

DECAY = 0.9
WIDTH = 80


class Branches(nn.Module):
    """A model with a branch of every second step, one of no step, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = torch.tanh(self.frozen(self.first(x)))
        return self.second(x) if step % 2 else x


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9, weight_decay=0.1),
}


@contextmanager
def averaging(
    model: nn.Module,
    directory: Path,
    *,
    home: str = "unified",
    compute: str = "bf16",
    states: str = "fp32",
    optimizer: str = "adamw",
    average: float | None = DECAY,
    **options: Any,
) -> Iterator[Any]:
    """Offload a model, with pages at `home`, and yield the runtime."""
    made = OPTIMIZERS[optimizer](model)
    precision = infinity.Precision(compute=compute, states=states)
    declared = {key: options[key] for key in ("accumulation", "checkpoint") if key in options}
    budget = budget_for(home, model, made, directory, precision, average=average, **declared)
    with infinity.offload(
        model, made, budget=budget, precision=precision, device="cpu", average=average, **options
    ) as runtime:
        yield runtime


def roomy(directory: Path) -> infinity.Budget:
    return infinity.Budget(device=ROOMY, host=ROOMY, nvme={str(directory): ROOMY})


def train(model: nn.Module, runtime: Any, step: int, factor: float = 1.0) -> None:
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    (model(inputs, step).float().square().mean() * factor).backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()


def masters(model: nn.Module, runtime: Any) -> dict[str, torch.Tensor]:
    with runtime.masters():
        return {name: each.detach().clone() for name, each in model.named_parameters()}


def averages(model: nn.Module, runtime: Any) -> dict[str, torch.Tensor]:
    return {name: runtime.average(each) for name, each in model.named_parameters()}


class Expected:
    """torch's average over a plain fp32 model that is given the masters of another after each step."""

    def __init__(self) -> None:
        self._plain = Branches()
        self._average = AveragedModel(self._plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def update(self, model: nn.Module, runtime: Any) -> None:
        self._plain.load_state_dict(masters(model, runtime))
        self._average.update_parameters(self._plain)

    @property
    def values(self) -> dict[str, torch.Tensor]:
        return dict(self._average.module.named_parameters())


@pytest.mark.parametrize(
    ("home", "options"),
    [
        ("unified", {"optimizer": "sgd", "compute": "fp32"}),
        ("unified", {"optimizer": "momentum"}),
        ("unified", {"compute": "fp16", "states": "bf16"}),
        ("nvme", {}),
        ("unified-nvme", {"states": "int8", "accumulation": 1}),
        ("host", {"update": "sync"}),
        ("device", {"compute": "fp32"}),
        *(
            pytest.param(home, {"optimizer": "sgd", "compute": "fp16"}, marks=pytest.mark.slow)
            for home in ("nvme", "mixed", "host", "unified-nvme", "device")
        ),
        *(pytest.param(home, {"states": "int8"}, marks=pytest.mark.slow) for home in ("mixed", "nvme")),
    ],
)
def test_averages_are_torchs_over_masters(home: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, expected = Branches(), Expected()
    with averaging(model, tmp_path, home=home, **options) as runtime:
        check_homes(home, runtime.plan)
        assert differences(averages(model, runtime), masters(model, runtime)) == []
        for step in range(5):
            train(model, runtime, step)
            expected.update(model, runtime)
        assert differences(averages(model, runtime), expected.values) == []
    # Nobody has read anything between these steps.
    again = Branches()
    with averaging(again, tmp_path, home=home, **options) as runtime:
        for step in range(5):
            train(again, runtime, step)
        assert differences(averages(again, runtime), expected.values) == []


def test_averages_follow_edits_and_skipped_steps_leave_them(tmp_path: Path) -> None:
    model, expected = Branches(), Expected()
    with averaging(model, tmp_path, home="nvme", compute="fp16") as runtime:
        for step in range(4):
            with torch.no_grad():
                model.never.weight.add_(1)
                model.first.bias.add_(1)
            train(model, runtime, step)
            expected.update(model, runtime)
            before = averages(model, runtime)
            train(model, runtime, step, factor=float("inf"))
            assert differences(averages(model, runtime), before) == []
        assert runtime.stats.skipped_steps == 4
        assert differences(averages(model, runtime), expected.values) == []


@pytest.mark.parametrize(
    ("how", "first"),
    [
        ("resume", 3),
        ("resume elsewhere", 3),
        ("copy", 3),
        *(pytest.param(how, 0, marks=pytest.mark.slow) for how in ("resume", "resume elsewhere", "copy")),
    ],
)
def test_a_continued_run_has_the_same_averages(how: str, first: int, tmp_path: Path) -> None:
    swap, kept = tmp_path / "swap", tmp_path / "kept"
    swap.mkdir()
    whole = Branches()
    with averaging(whole, swap, home="unified") as runtime:
        for step in range(6):
            train(whole, runtime, step)
        expected = averages(whole, runtime)
    model = Branches()
    options = {} if how == "copy" else {"checkpoint": kept}
    with averaging(model, swap, home="nvme", **options) as runtime:
        for step in range(first):
            train(model, runtime, step)
        if how == "copy":
            runtime.save(kept)
        else:
            runtime.save().wait()
        train(model, runtime, first)  # is lost
    model = Branches()
    options = {} if how == "copy" else {"resume": kept}
    home = {"resume": "nvme", "resume elsewhere": "mixed", "copy": "unified"}[how]
    with averaging(model, swap, home=home, **options) as runtime:
        if how == "copy":
            runtime.load(kept)
        for step in range(first, 6):
            train(model, runtime, step)
        assert differences(averages(model, runtime), expected) == []


def test_runs_with_and_without_averages_continue_each_other_or_are_refused(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    for average in (None, DECAY):
        model = Branches()
        with averaging(model, swap, average=average) as runtime:
            train(model, runtime, 0)
            runtime.save(tmp_path / str(average))
    with averaging(Branches(), swap, average=None) as runtime:
        with pytest.raises(IncompatibleCheckpoint, match="this run keeps none"):
            runtime.load(tmp_path / str(DECAY))
        with pytest.raises(ConfigError, match="keeps none"):
            runtime.average(next(iter(runtime._model.parameters())))
    model = Branches()
    with averaging(model, swap) as runtime:
        runtime.load(tmp_path / "None")  # averages begin with the next step
        train(model, runtime, 1)
        assert differences(averages(model, runtime), masters(model, runtime)) == []


def test_commits_with_and_without_averages_continue_each_other_or_are_refused(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    with averaging(Branches(), swap, home="nvme", average=None, checkpoint=tmp_path / "kept") as runtime:
        train(runtime._model, runtime, 0)
        runtime.save().wait()
    model, expected = Branches(), Expected()
    with averaging(model, swap, home="nvme", resume=tmp_path / "kept") as runtime:
        for step in range(1, 4):  # averages begin with the first of them
            train(model, runtime, step)
            expected.update(model, runtime)
        assert differences(averages(model, runtime), expected.values) == []
        runtime.save().wait()
    with (
        pytest.raises(IncompatibleCheckpoint, match="this run keeps none"),
        averaging(Branches(), swap, home="nvme", average=None, resume=tmp_path / "kept"),
    ):
        pass
    model = Branches()  # cut into other chunks, so that all arrays are copied
    precision, budget = infinity.Precision(), infinity.Budget(host=ROOMY, nvme={str(swap): ROOMY})
    with infinity.offload(
        model,
        OPTIMIZERS["adamw"](model),
        budget=budget,
        precision=precision,
        device="cpu",
        average=DECAY,
        resume=tmp_path / "kept",
    ) as runtime:
        assert differences(averages(model, runtime), expected.values) == []
        train(model, runtime, 4)
        expected.update(model, runtime)
        assert differences(averages(model, runtime), expected.values) == []


def test_a_parameter_that_was_frozen_begins_with_its_values(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    model = Branches()
    with averaging(model, swap) as runtime:
        for step in range(3):
            train(model, runtime, step)
        runtime.save(tmp_path / "copy")
        before = averages(model, runtime)
    other = Branches()
    other.frozen.requires_grad_(True)
    with averaging(other, swap, home="nvme") as runtime:
        with pytest.warns(UserWarning, match="begin anew"):
            runtime.load(tmp_path / "copy")
        assert differences(averages(other, runtime), before) == []
        train(other, runtime, 3)
        trained = masters(other, runtime)["frozen.weight"]
        assert torch.equal(
            runtime.average(other.frozen.weight), before["frozen.weight"].lerp(trained, 1 - DECAY)
        )


def test_exported_averages(tmp_path: Path) -> None:
    model = Branches()
    with averaging(model, tmp_path) as runtime:
        for step in range(2):
            train(model, runtime, step)
        runtime.export(tmp_path / "out", dtype="average")
        expected = averages(model, runtime)
    assert differences(load_file(tmp_path / "out" / "model.safetensors"), expected) == []
    with averaging(Branches(), tmp_path, average=None) as runtime, pytest.raises(ConfigError, match="none"):
        runtime.export(tmp_path / "none", dtype="average")


@pytest.mark.parametrize(
    ("home", "compute"),
    [
        ("nvme", "bf16"),
        ("unified", "fp16"),
        ("host", "fp32"),
        pytest.param("mixed", "fp16", marks=pytest.mark.slow),
        pytest.param("nvme", "fp32", marks=pytest.mark.slow),
        pytest.param("unified", "bf16", marks=pytest.mark.slow),
    ],
)
def test_a_model_with_its_averages_in_use(home: str, compute: str, tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    model = Branches()
    batch = torch.randn(2, WIDTH)
    options = {"checkpoint": tmp_path / "commits"} if home == "nvme" else {}
    with averaging(model, swap, home=home, compute=compute, **options) as runtime:
        for step in range(3):
            train(model, runtime, step)
        if home == "nvme":
            runtime.save()
        before, after = masters(model, runtime), averages(model, runtime)
        states = copy.deepcopy(runtime.optimizer.state_dict())
        with torch.no_grad():
            trained = model(batch, 1)
        with runtime.averaged():
            found = model(batch, 1)
            assert not torch.equal(found, trained)
            shown = {name: each.detach().clone() for name, each in model.named_parameters()}
            for call in (
                runtime.optimizer.step,
                lambda: runtime.average(model.first.weight),
                runtime.optimizer.state_dict,
                lambda: runtime.save(tmp_path / "no"),
                lambda: runtime.export(tmp_path / "no", dtype="average"),
            ):
                with pytest.raises(ConfigError, match="averaged"):
                    call()
            with pytest.raises(ConfigError, match="averaged"), runtime.averaged():
                pass
            runtime.export(tmp_path / "out", dtype="fp32")
        assert differences(load_file(tmp_path / "out" / "model.safetensors"), after) == []
        dtype = next(model.parameters()).dtype
        for name, each in shown.items():
            half_up = compute == "bf16"  # which differs from torch's rounding at ties alone
            assert torch.equal(each, after[name].to(dtype)) or (
                half_up and (each != after[name].to(dtype)).sum() < 4
            )
        assert differences(masters(model, runtime), before) == []
        assert differences(averages(model, runtime), after) == []
        assert differences(runtime.optimizer.state_dict(), states) == []
        with torch.no_grad():
            assert torch.equal(model(batch, 1), trained)
        train(model, runtime, 3)
        expected = {name: after[name].lerp(each, 1 - DECAY) for name, each in masters(model, runtime).items()}
        found = averages(model, runtime)
        assert all(torch.equal(found[name], expected[name]) for name in found if "frozen" not in name)
        with pytest.raises(ConfigError, match="was edited within averaged"), runtime.averaged():
            model.second.bias.zero_()
        assert not runtime.average(model.second.bias).any()
        assert model.second.bias.detach().any()


def test_averages_are_planned_and_refused_where_they_are_not_implemented(tmp_path: Path) -> None:
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters())
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    without = infinity.plan(model, optimizer, budget=roomy(tmp_path))
    plan = infinity.plan(model, optimizer, budget=roomy(tmp_path), average=DECAY)
    more = sum(plan.home_bytes.values()) - sum(without.home_bytes.values())
    assert 4 * trained <= more < 4 * trained + 4096 * sum(len(unit.chunks) for unit in plan.layout.units)
    assert f"averages of fp32 masters, decay {DECAY:g}" in str(plan)
    assert "averages" not in str(without)
    for wrong in (-0.1, 1.5, "0.9", float("nan"), True):
        with pytest.raises(ConfigError, match="decay of averages"):
            infinity.plan(model, optimizer, average=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="eager updates"):
        infinity.plan(model, optimizer, average=DECAY, update="eager", accumulation=1)
    with pytest.raises(ConfigError, match="without an optimizer"):
        infinity.plan(model, None, average=DECAY)
