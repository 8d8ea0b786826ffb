"""Tests of gradients that rest in the parameter's dtype. They do so if the user declares one backward a step,
by `accumulation=1`.

With bf16 or fp16 parameters such gradients must take half the bytes of fp32 gradients, and every bit of the
training must stay the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zoo
from cover import covered
from device_units import kernels
from emulated_device import EmulatedDevice
from homes import HOMES, ROOMY
from parity import Recipe, copied, differences, tensors_copied
from small_runtime import TIED, WIDE, files, gradients, loss_of
from torch import nn

import infinity
from infinity.build import carry_out
from infinity.errors import ConfigError
from infinity.planning.placement import Kind
from infinity.ranks import SingleRank
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier

__all__ = ["kernels"]

DECLARED = (False, True)
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


# ---- Bits ----


@pytest.mark.sweep
@covered({"home": (*HOMES, "mirrored"), "compute": ("bf16", "fp16"), "clip": (None, 0.05)})
def test_every_bit_is_that_of_gradients_in_fp32(
    home: str, compute: str, clip: float | None, tmp_path: Path
) -> None:
    """A training has the same bits whether or not it declares one backward a step.

    Compared are losses, norms, parameters, optimizer states and the fp32 gradients of `runtime.grad`.
    """
    recipe = Recipe(compute=compute, clip=clip, steps=4)
    wide, single = (
        parity.paged(TIED, recipe, home, tmp_path, watch=clip is None, declared=each) for each in DECLARED
    )
    assert differences(vars(wide), vars(single)) == []
    assert {each.dtype for each in single.gradients[0].values() if each is not None} == {torch.float32}
    if clip is None:  # fp16's loss scale does not skip every step
        assert differences(single.parameters[0], single.parameters[-1]) != []
    else:
        assert min(single.norms) > clip


@pytest.mark.sweep(most=2)
@pytest.mark.parametrize("update", ["eager", "sync"])
@pytest.mark.parametrize("home", ["nvme", "unified-nvme", "mixed"])
def test_every_bit_whenever_updates_run(home: str, update: str, tmp_path: Path) -> None:
    recipe = Recipe(compute="bf16", steps=4)
    wide = parity.paged(TIED, recipe, home, tmp_path)
    single = parity.paged(TIED, recipe, home, tmp_path, update=update, declared=True)
    single.gradients = wide.gradients  # eager updates consume the gradients
    assert differences(vars(wide), vars(single)) == []


@pytest.mark.parametrize("name", ["convnet", "checkpointed", "frozen"])
def test_every_bit_of_parameters_of_two_dtypes_recomputed_and_frozen(name: str, tmp_path: Path) -> None:
    recipe = Recipe(compute="bf16", clip=0.05)
    wide, single = (
        parity.paged(zoo.entry(name), recipe, "nvme", tmp_path, watch=True, declared=each)
        for each in DECLARED
    )
    assert differences(vars(wide), vars(single)) == []


@pytest.mark.sweep(most=3)
@covered({"home": ("host", "nvme", "mirrored"), "compute": ("bf16", "fp16"), "threads": (False, True)})
def test_every_bit_of_gradients_that_leave_a_device(
    home: str, compute: str, threads: bool, tmp_path: Path
) -> None:
    recipe = Recipe(compute=compute, clip=0.05)
    runs = []
    for declared in DECLARED:
        with EmulatedDevice(7, threads=threads).in_use():
            runs.append(parity.paged(TIED, recipe, home, tmp_path, watch=True, declared=declared))
    assert differences(vars(runs[0]), vars(runs[1])) == []


# ---- Bytes ----


class Halves(nn.Module):
    """A model of six linear layers, whose parameters fill whole 4 KiB blocks in bf16 and in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


ELEMENTS = 6 * 64 * 64


@contextlib.contextmanager
def opened(
    directory: Path, homes: dict[Kind, Tier], *, declared: bool, compute: str = "bf16", apart: bool = False
) -> Iterator[tuple[nn.Module, Any]]:
    """Offload Halves() with AdamW, and yield (model, runtime). Staging has room for all chunks at once.

    homes: for each kind of page, the tier where all pages of that kind rest. declared: whether to declare one
    backward a step. apart: whether the device has memory of its own; if not, the CPU computes in RAM.
    """
    model = Halves()
    optimizer = adamw(model)
    budget = infinity.Budget(device=ROOMY if apart else None, host=ROOMY, nvme={str(directory): ROOMY})
    plan = infinity.plan(
        model,
        optimizer,
        budget=budget,
        precision=infinity.Precision(compute=compute),
        device="cpu",
        accumulation=1 if declared else None,
    )
    updates = [plan.page_bytes(unit, kind) for unit in range(len(plan.homes)) for kind in Kind]
    room = {"staging_bytes": sum(updates), "chunk_update_bytes": sum(updates)}
    placed = replace(plan, homes=(homes,) * len(plan.homes), **room)
    with carry_out(placed, model, optimizer, budget=budget, ranks=SingleRank()) as runtime:
        yield model, runtime
    assert files(directory) == []


def inputs(number: int, compute: str = "bf16") -> torch.Tensor:
    torch.manual_seed(number)
    return torch.randn(5, 64, dtype=HALF.get(compute, torch.float32))


def backward(model: nn.Module, number: int) -> None:
    model(inputs(number)).float().square().mean().backward()


def moved(runtime: Any, *edges: Edge) -> list[int]:
    """Wait until all transfers have ended, and return the bytes moved over each of `edges` so far.

    An edge is one direction of transfers between two neighbouring tiers. The bytes are counted from the
    runtime's start.
    """
    runtime._components.store.settle()
    return [runtime.stats.edges[edge].bytes for edge in edges]


ON_DISK = {Kind.PARAMETER: Tier.HOST, Kind.GRADIENT: Tier.NVME, Kind.OPTIMIZER: Tier.NVME}
NEAR = {Kind.PARAMETER: Tier.DEVICE, Kind.GRADIENT: Tier.DEVICE, Kind.OPTIMIZER: Tier.HOST}


def of_a_step(runtime: Any, model: nn.Module, number: int, *edges: Edge) -> tuple[list[int], list[int]]:
    """Train one step, and return the bytes that it moved over each of `edges` (see `moved`).

    Returns (bytes until the gradients are in their pages' homes, bytes until the updates have ended), each a
    list with an item for each edge. Both are counted from the start of the step. number: the seed of the
    step's inputs.
    """
    parts = runtime._components
    start = moved(runtime, *edges)
    backward(model, number)
    while parts.gradients.staged.write_back_oldest(None):
        pass
    middle = moved(runtime, *edges)
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    parts.scheduler.complete_all()
    end = moved(runtime, *edges)
    return [b - a for a, b in zip(start, middle, strict=True)], [
        b - a for a, b in zip(start, end, strict=True)
    ]


@pytest.mark.parametrize("declared", DECLARED)
def test_bytes_to_and_from_the_disk(declared: bool, tmp_path: Path) -> None:
    """Gradients take 2 bytes an element on the disk if one backward is declared, and 4 bytes otherwise.

    In each step the gradients are written once and read once, and so are the optimizer states. Nothing else
    moves, and the bytes are those that the plan predicts.
    """
    edges = Edge.HOST_TO_NVME, Edge.NVME_TO_HOST
    with opened(tmp_path, ON_DISK, declared=declared) as (model, runtime):
        of_a_step(runtime, model, 0, *edges)
        states = sum(runtime.plan.page_bytes(unit, Kind.OPTIMIZER) for unit in range(len(runtime.plan.homes)))
        nbytes = (2 if declared else 4) * ELEMENTS
        for number in range(1, 3):
            at_home, in_all = of_a_step(runtime, model, number, *edges)
            assert at_home[0] == nbytes
            assert in_all == [nbytes + states, nbytes + states]
            assert in_all == [runtime.plan.traffic.disk_write, runtime.plan.traffic.disk_read]


@pytest.mark.parametrize("declared", DECLARED)
def test_bytes_over_the_link_of_gradients_that_rest_beyond_it(declared: bool, tmp_path: Path) -> None:
    """If the CPU updates parameters that rest on the device, a step copies the parameters and their gradients
    to host RAM once, and nothing else.

    A parameter takes 2 bytes an element. A gradient takes 2 bytes an element if one backward a step is
    declared, and 4 bytes otherwise. The bytes copied are those that the plan predicts for the update.
    """
    with opened(tmp_path, NEAR, declared=declared, apart=True) as (model, runtime):
        of_a_step(runtime, model, 0, Edge.DEVICE_TO_HOST)
        _, (down,) = of_a_step(runtime, model, 1, Edge.DEVICE_TO_HOST)
        parameters = 2 * ELEMENTS
        assert down == parameters + (2 if declared else 4) * ELEMENTS == runtime.plan.traffic.update.to_host


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32"])
def test_pages_and_what_the_plan_says_of_them(compute: str, tmp_path: Path) -> None:
    """If one backward a step is declared, gradient pages have the size and dtype of the trained parameters.
    Otherwise gradients are fp32.

    The plan's bytes of all pages and of the largest update change with the bytes of the gradients, and the
    smallest budgets are smaller if the gradients are. `offload` makes gradient pages of the plan's sizes.
    """
    model = Halves()
    arguments: dict[str, Any] = {
        "budget": infinity.Budget(device=ROOMY, host=ROOMY, nvme={str(tmp_path): ROOMY}),
        "precision": infinity.Precision(compute=compute, keep=("layers.5.*",)),
        "device": "cpu",
    }
    plans = {
        each: infinity.plan(model, adamw(model), accumulation=each, **arguments) for each in (None, 1, 2)
    }
    small = 2 if compute in HALF else 4
    sizes = {each: sum(made.page_sizes[Kind.GRADIENT]) for each, made in plans.items()}
    assert sizes == {None: 4 * ELEMENTS, 2: 4 * ELEMENTS, 1: (5 * small + 4) * ELEMENTS // 6}
    spared = sizes[None] - sizes[1]
    pages = {each: sum(made.home_bytes.values()) for each, made in plans.items()}
    assert pages[None] - pages[1] == spared
    # In bytes: parameter, gradient, rest of a master, two moments. The layer kept in fp32 takes 16 in all.
    rest = {"bf16": 2, "fp16": 4, "fp32": 0}[compute]
    updates = {each: max(16, small + gradient + rest + 8) for each, gradient in ((None, 4), (1, small))}
    assert {each: plans[each].chunk_update_bytes for each in updates} == {
        each: 64 * 64 * nbytes for each, nbytes in updates.items()
    }
    least = {each: sum(made.smallest.values()) for each, made in plans.items()}
    assert (least[1] < least[None]) == (compute in HALF)
    with infinity.offload(model, adamw(model), accumulation=1, **arguments) as runtime:
        assert replace(runtime.plan, prediction=None) == replace(plans[1], rule=runtime.plan.rule)
        for unit, page in runtime._components.gradients.pages.items():
            assert page.home.nbytes == plans[1].page_bytes(unit, Kind.GRADIENT)
            for number, chunk in enumerate(page.layout.chunks):
                assert page.dtype(number) is page.layout.regions[chunk.region].dtype


# ---- One more ----


@contextlib.contextmanager
def one_declared(
    directory: Path, *, home: str = "nvme", compute: str = "bf16", accumulate: str = "fp32", **options: Any
) -> Iterator[tuple[nn.Module, Any]]:
    model = TIED.make()
    precision = infinity.Precision(compute=compute, accumulate=accumulate)
    budget = infinity.Budget(
        device=None if home == "unified" else ROOMY if home == "device" else "192KiB",
        host=ROOMY if home != "nvme" else "400KiB",
        nvme={str(directory): ROOMY} if home == "nvme" else None,
    )
    with infinity.offload(
        model, adamw(model), budget=budget, precision=precision, device="cpu", accumulation=1, **options
    ) as runtime:
        yield model, runtime


def step(model: nn.Module, runtime: Any, number: int) -> float:
    loss = loss_of(model, number)
    loss.backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return loss.item()


def trained(model: nn.Module, runtime: Any) -> Any:
    return [
        [step(model, runtime, number) for number in range(2)],
        copied(model.state_dict()),
        tensors_copied(runtime.optimizer.state_dict()),
    ]


PLACES = ["nvme", "unified", "device", "kernels", "apart"]


@pytest.mark.parametrize("place", PLACES)
def test_one_more_gradient_is_refused_and_costs_its_step_only(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if place == "kernels":
        request.getfixturevalue("kernels")
    home = {"kernels": "device", "apart": "nvme"}.get(place, place)
    emulated = contextlib.nullcontext() if place != "apart" else EmulatedDevice(3).in_use()
    with emulated:
        with one_declared(tmp_path, home=home) as (model, runtime):
            expected = trained(model, runtime)
        with one_declared(tmp_path, home=home) as (model, runtime):
            assert bool(runtime.plan.updated_on_device) == (place == "kernels")
            assert bool(runtime.plan.landing_bytes) == (place == "apart")
            before = copied(model.state_dict())
            loss_of(model, 0).backward()
            error = "One more gradient of .* accumulation=1 declares .* declare with accumulation="
            with pytest.raises(ConfigError, match=error):
                loss_of(model, 1).backward()
            for act in (
                runtime.optimizer.step,
                lambda: runtime.clip_grad_norm_(1.0),
                lambda: runtime.grad(model.get_parameter(WIDE)),
            ):
                with pytest.raises(ConfigError, match="One more gradient of"):
                    act()
            assert differences(before, copied(model.state_dict())) == []
            runtime.optimizer.zero_grad()
            assert differences(expected, trained(model, runtime)) == []


def test_a_backward_after_a_step_without_zero_grad_is_one_more(tmp_path: Path) -> None:
    with one_declared(tmp_path) as (model, runtime):
        loss_of(model, 0).backward()
        runtime.optimizer.step()
        with pytest.raises(ConfigError, match=r"One more gradient of .* zero_grad\(\) after step\(\)"):
            loss_of(model, 1).backward()


def test_micro_batches_together_are_more_than_one(tmp_path: Path) -> None:
    with one_declared(tmp_path) as (model, runtime):
        batches = [TIED.batch(0, micro) for micro in range(2)]
        with pytest.raises(ConfigError, match="One more gradient of"):
            runtime.accumulate(batches, lambda batch: TIED.loss(model, batch) / 2)
        with pytest.raises(ConfigError, match="zero_grad"):
            runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        runtime.accumulate(batches[:1], lambda batch: TIED.loss(model, batch))
        runtime.optimizer.step()


@pytest.mark.parametrize("home", ["nvme", "unified"])
def test_after_one_was_dropped_the_next_is_the_first(home: str, tmp_path: Path) -> None:
    with one_declared(tmp_path, home=home) as (model, runtime):
        wide = model.get_parameter(WIDE)
        loss_of(model, 1).backward()
        expected = gradients(runtime, model)
        runtime.optimizer.zero_grad()
        loss_of(model, 0).backward()
        others = gradients(runtime, model)
        wide.grad = None
        loss_of(model, 1).backward(inputs=[wide])
        assert differences(gradients(runtime, model), {**others, WIDE: expected[WIDE]}) == []
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        step(model, runtime, 2)


@pytest.mark.parametrize(("compute", "accumulate"), [("fp32", "fp32"), ("bf16", "compute")])
def test_what_rests_in_the_dtype_of_sums_takes_more(compute: str, accumulate: str, tmp_path: Path) -> None:
    found = []
    for undeclared in (True, False):
        options: dict[str, Any] = {"accumulation": None} if undeclared else {"accumulation": 1}
        model = TIED.make()
        with infinity.offload(
            model,
            adamw(model),
            budget=infinity.Budget(host=ROOMY),
            precision=infinity.Precision(compute=compute, accumulate=accumulate),
            device="cpu",
            **options,
        ) as runtime:
            for number in range(3):
                loss_of(model, number).backward()
            found.append(gradients(runtime, model))
            runtime.optimizer.step()
    assert differences(*found) == []


def test_of_reentrant_checkpoints_a_shared_module_has_one_each(tmp_path: Path) -> None:
    """A module that two reentrant checkpoints share gets two gradients in one backward, one per checkpoint.

    With parameters in fp32 the two gradients are added, and a training has the same bits whether or not it
    declares one backward a step. With parameters in bf16 and one backward declared, the second gradient
    raises ConfigError.
    """
    entry = zoo.entry("reentrant")
    wide, single = (
        parity.paged(entry, Recipe(), "nvme", tmp_path, watch=True, declared=each) for each in DECLARED
    )
    assert differences(vars(wide), vars(single)) == []
    with pytest.raises(ConfigError, match=r"One more gradient of shared\..* reentrant"):
        parity.paged(entry, Recipe(compute="bf16"), "unified", tmp_path, declared=True)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_a_gradient_of_another_dtype_is_refused_and_not_rounded(tmp_path: Path) -> None:
    with one_declared(tmp_path) as (model, runtime):
        wide: Any = model.get_parameter(WIDE)
        wide.grad_dtype = torch.float32
        with pytest.raises(ConfigError, match=rf"The gradient of {WIDE} came in torch.float32"):
            loss_of(model, 0).backward()
        with pytest.raises(ConfigError, match="came in"):
            runtime.optimizer.step()
        wide.grad_dtype = torch.bfloat16
        runtime.optimizer.zero_grad()
        step(model, runtime, 0)


def test_eager_updates_of_units_that_wait_for_others_take_no_second(tmp_path: Path) -> None:
    with one_declared(tmp_path, home="unified", update="eager") as (model, runtime):
        wide = model.get_parameter(WIDE)
        loss_of(model, 0).backward(inputs=[wide])
        assert not any(page.consumed for page in runtime._components.gradients.pages.values())
        with pytest.raises(ConfigError, match=f"One more gradient of {WIDE}"):
            loss_of(model, 1).backward(inputs=[wide])
