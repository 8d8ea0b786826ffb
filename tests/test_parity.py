"""Tests that training with pages gives the results of plain PyTorch, wherever the pages rest.

In the first step, losses have the same bits as with PyTorch. So have gradients, except in bf16 for models in
which autograd hands over a parameter's gradient several times in a backward. Later losses differ only by the
rounding of updates. Runs that differ only in the tiers where pages rest agree in every bit.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zoo
from cover import pairwise, product
from homes import CUDA_HOMES, HOMES, each_device, needs_cuda
from parity import OPTIMIZERS, Recipe, Run, differences
from zoo import Entry

from infinity.aio import Faults

pytestmark = pytest.mark.usefixtures("cpu_updates")
each_entry = pytest.mark.parametrize("entry", zoo.ENTRIES, ids=str)
TRANSFORMER = zoo.entry("transformer")


def one_home_each(*homes: str) -> pytest.MarkDecorator:
    """Parametrise a test with all pairs of `entry`, a model of zoo.py, and `home`, one of `homes`.

    One pair for each model runs by default: the first model with the first home, the next model with the
    next home, and after the last home the first again. The other pairs are marked slow, because test_matrix
    already trains every model at every home.
    """
    found = [
        pytest.param(entry, home, marks=() if at % len(homes) == number else pytest.mark.slow)
        for at, entry in enumerate(zoo.ENTRIES)
        for number, home in enumerate(homes)
    ]
    return pytest.mark.parametrize("entry, home", found, ids=str)


FACTORS: dict[str, tuple[Any, ...]] = {
    "entry": zoo.ENTRIES,
    "home": HOMES,
    "accumulate": (1, 4),
    "clip": (None, 0.1),
    "groups": (1, 2),
    "compute": ("fp32", "bf16"),
    "update": ("lazy", "eager"),
}

CUDA_FACTORS: dict[str, tuple[Any, ...]] = {
    "home": CUDA_HOMES,
    "accumulate": (1, 4),
    "clip": (None, 0.1),
    "compute": ("fp32", "bf16"),
    "update": ("lazy", "eager"),
}


def allowed(case: dict[str, Any]) -> bool:
    """Whether a combination is trained: the clipping factor is not known in the backward of eager updates."""
    return case["update"] == "lazy" or (case["clip"] is None and case["entry"].one_gradient)


def cases() -> list[Any]:
    """Return pytest parameters (entry, case) for test_matrix.

    case: the values of all factors but "entry", by name. A few combinations run by default. They are chosen
    so that any two values of different factors occur together in one of them. All others with lazy updates
    are there, too, and marked slow.
    """
    quick, found = pairwise(FACTORS, allowed), []
    for case in product(FACTORS):
        if case["update"] == "eager" and case not in quick:
            continue
        words = [
            str(case["entry"]),
            case["home"],
            f"accumulate {case['accumulate']}",
            "clipped" if case["clip"] else "unclipped",
            f"groups {case['groups']}",
            case["compute"],
            case["update"],
        ]
        slow = () if case in quick else (pytest.mark.slow,)
        rest = {name: value for name, value in case.items() if name != "entry"}
        found.append(pytest.param(case["entry"], rest, id=", ".join(words), marks=slow))
    return found


def cuda_cases() -> list[Any]:
    """Return pytest parameters (entry, case) for test_matrix_on_cuda.

    case: the value of each factor in CUDA_FACTORS, by name. The transformer gets every combination of
    values. The other models get a few, chosen so that any two values of different factors occur together in
    one of them.
    """
    found = []
    for entry in zoo.ENTRIES:
        factors = {"entry": (entry,), **CUDA_FACTORS}
        chosen = product(factors) if entry is TRANSFORMER else pairwise(factors, allowed)
        for case in filter(allowed, chosen):
            del case["entry"]
            words = ", ".join(f"{name} {value}" for name, value in case.items())
            found.append(pytest.param(entry, case, id=f"{entry}, {words}"))
    return found


@functools.cache
def plain(entry: Entry, recipe: Recipe) -> Run:
    run = parity.reference if recipe.compute == "fp32" else parity.reference_bf16
    return run(entry, recipe)


class Placed:
    """A cache of training runs in which all pages rest in the device tier.

    Tests compare these runs with runs whose pages rest in other tiers.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: dict[tuple[Entry, Recipe, bool], Run] = {}

    def on_device(self, entry: Entry, recipe: Recipe, *, watch: bool = False) -> Run:
        key = (entry, recipe, watch)
        if key not in self.runs:
            self.runs[key] = parity.paged(entry, recipe, "device", self.root, watch=watch)
        return self.runs[key]


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Placed:
    return Placed(tmp_path_factory.mktemp("device"))


def check_same_as_pytorch(entry: Entry, recipe: Recipe, run: Run) -> None:
    truth = plain(entry, recipe)
    assert run.losses[: recipe.accumulate] == truth.losses[: recipe.accumulate]
    parity.check_losses(entry, recipe, run, truth)
    assert run.norms == pytest.approx(truth.norms, rel=1e-5 if recipe.compute == "fp32" else 1e-3)
    if recipe.compute == "fp32" or entry.one_gradient:
        in_fp32 = {name: None if grad is None else grad.float() for name, grad in run.gradients[0].items()}
        assert differences(in_fp32, truth.gradients[0]) == []


def check_placement(entry: Entry, case: dict[str, Any], device: str, placed: Placed, directory: Path) -> None:
    """Train `entry` with all pages in the device tier, and then with pages at the home that `case` names.

    Assert that the first run agrees with plain PyTorch, as far as this module's docstring promises, and that
    the second run has the same bits as the first. case: "home", "update" and fields of Recipe, by name. The
    first run has lazy updates; with eager ones nobody can look at gradients. device: the device that computes
    the model. placed: keeps first runs for later calls. directory: for pages on NVMe.
    """
    fields = dict(case)
    home, update = fields.pop("home"), fields.pop("update")
    recipe = Recipe(device=device, decay_rate=update == "eager", **fields)
    base = placed.on_device(entry, recipe)
    check_same_as_pytorch(entry, recipe, base)
    if home != "device" or update == "eager":
        run = parity.paged(entry, recipe, home, directory, update=update)
        unseen = {"gradients": run.gradients} if update == "eager" else {}
        assert differences(vars(run), vars(base) | unseen) == []


@pytest.mark.sweep(most=30)
@pytest.mark.parametrize("entry, case", cases())
def test_matrix(entry: Entry, case: dict[str, Any], placed: Placed, tmp_path: Path) -> None:
    check_placement(entry, case, "cpu", placed, tmp_path)


@needs_cuda
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("entry, case", cuda_cases())
def test_matrix_on_cuda(
    entry: Entry, case: dict[str, Any], device: str, placed: Placed, tmp_path: Path
) -> None:
    check_placement(entry, case, device, placed, tmp_path)


@needs_cuda
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("home", ["nvme", "host"])
def test_optimizers_on_cuda(optimizer: str, home: str, device: str, placed: Placed, tmp_path: Path) -> None:
    recipe = Recipe(optimizer=optimizer, groups=2, decay_rate=True, steps=5, device=device)
    base = placed.on_device(TRANSFORMER, recipe)
    check_same_as_pytorch(TRANSFORMER, recipe, base)
    run = parity.paged(TRANSFORMER, recipe, home, tmp_path)
    assert differences(vars(run), vars(base)) == []


@needs_cuda
@pytest.mark.parametrize("device", ["cuda"])
@each_entry
def test_late_reads_and_writes_change_nothing_on_cuda(
    entry: Entry, device: str, placed: Placed, tmp_path: Path
) -> None:
    faults = Faults()
    for nth in range(1, 400, 5):
        faults.delay("read", nth, 0.001 * (nth % 4))
        faults.delay("write", nth, 0.001 * (nth % 7))
    recipe = Recipe(accumulate=2, clip=0.1, device=device)
    run = parity.paged(entry, recipe, "nvme", tmp_path, faults=faults, watch=True)
    assert faults.fired > 10
    assert differences(vars(run), vars(placed.on_device(entry, recipe, watch=True))) == []


@pytest.mark.sweep(most=6)
@one_home_each("nvme", "mixed")
def test_every_step_is_the_same_wherever_pages_are(
    entry: Entry, home: str, placed: Placed, tmp_path: Path
) -> None:
    recipe = Recipe(clip=0.1)
    base = placed.on_device(entry, recipe, watch=True)
    run = parity.paged(entry, recipe, home, tmp_path, watch=True)
    assert len(run.gradients) == len(run.parameters) == recipe.steps
    assert differences(vars(run), vars(base)) == []
    unwatched = placed.on_device(entry, recipe)
    assert differences(run.parameters[-1], unwatched.parameters[-1]) == []


@each_entry
@each_device
def test_the_first_update_is_pytorchs_to_a_rounding(entry: Entry, device: str, placed: Placed) -> None:
    recipe = Recipe(clip=0.1, device=device)
    run, truth = placed.on_device(entry, recipe, watch=True), plain(entry, recipe)
    for name, before in entry.make().state_dict().items():
        ours, torchs = run.parameters[0][name].cpu(), truth.parameters[0][name].cpu()
        assert ours.stride() == torchs.stride(), name
        # 8 ULP of the larger operand of the last subtraction, which is the update or the parameter.
        bound = 8 * 2.0**-23 * before.double().abs().clamp(min=parity.RATE)
        assert bool(((ours.double() - torchs.double()).abs() <= bound).all()), name


@pytest.mark.sweep(most=6)
@each_entry
def test_reads_and_writes_that_come_late_change_nothing(entry: Entry, placed: Placed, tmp_path: Path) -> None:
    faults = Faults()
    for nth in range(1, 400, 5):
        faults.delay("read", nth, 0.001 * (nth % 4))
        faults.delay("write", nth, 0.001 * (nth % 7))
    recipe = Recipe(accumulate=2, clip=0.1)
    run = parity.paged(entry, recipe, "nvme", tmp_path, faults=faults)
    assert faults.fired > 10
    assert differences(vars(run), vars(placed.on_device(entry, recipe))) == []


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_slow_disk_changes_nothing(kind: str, placed: Placed, tmp_path: Path) -> None:
    faults = Faults()
    faults.delay(kind, 1, 0.003, times=None)
    run = parity.paged(TRANSFORMER, Recipe(), "mixed", tmp_path, faults=faults)
    assert faults.fired > 0
    assert differences(vars(run), vars(placed.on_device(TRANSFORMER, Recipe()))) == []


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("home", ["nvme", "unified"])
def test_optimizers(optimizer: str, home: str, placed: Placed, tmp_path: Path) -> None:
    recipe = Recipe(optimizer=optimizer, groups=2, decay_rate=True, steps=5)
    base = placed.on_device(TRANSFORMER, recipe)
    check_same_as_pytorch(TRANSFORMER, recipe, base)
    run = parity.paged(TRANSFORMER, recipe, home, tmp_path)
    assert differences(vars(run), vars(base)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["transformer", "mixture", "frozen"])
def test_the_optimizers_state_dict_is_torchs(name: str, optimizer: str, placed: Placed) -> None:
    recipe = Recipe(optimizer=optimizer, groups=2, decay_rate=True)
    ours = placed.on_device(zoo.entry(name), recipe).optimizer
    torchs = plain(zoo.entry(name), recipe).optimizer
    assert ours["param_groups"] == torchs["param_groups"]
    assert ours["state"].keys() == torchs["state"].keys()
    for number, state in torchs["state"].items():
        for key, value in state.items():
            mine = ours["state"][number][key]
            if not isinstance(value, torch.Tensor):
                assert mine == value, (number, key)
                continue
            torch.testing.assert_close(
                torch.as_tensor(mine), value, rtol=1e-3, atol=1e-5 * value.abs().max().item()
            )


@pytest.mark.sweep(most=2)
@one_home_each(*HOMES)
def test_fifty_steps_follow_pytorch(entry: Entry, home: str, tmp_path: Path) -> None:
    recipe = Recipe(steps=50)
    run = parity.paged(entry, recipe, home, tmp_path)
    parity.check_losses(entry, recipe, run, plain(entry, recipe))


@pytest.mark.sweep
@each_entry
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_plain_pytorch_trains_every_model(entry: Entry, compute: str) -> None:
    recipe = Recipe(accumulate=2, clip=0.1, compute=compute)
    run = plain(entry, recipe)
    assert all(torch.tensor(run.losses).isfinite())
    assert min(run.norms) > 0.1  # so that clipping changes something
    assert differences(run.gradients[0], plain(entry, replace(recipe, steps=1)).gradients[0]) == []
    missing = {name for name, gradient in run.gradients[0].items() if gradient is None}
    if entry.name == "mixture":
        assert 0 < len({name.split(".")[1] for name in missing}) < 6
        assert {"experts.5.0.weight"} < missing
    else:
        assert bool(missing) is (entry.name == "frozen")
