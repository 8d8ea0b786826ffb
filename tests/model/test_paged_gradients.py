"""Tests of `p.grad` of a paged parameter: it answers as in PyTorch, or refuses."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import device_units
import numpy as np
import pytest
import small_runtime
import torch
from device_units import kernels  # noqa: F401 - a fixture
from emulated_device import EmulatedDevice, planned_apart
from homes import budget_for, places
from parity import copied, differences
from small_runtime import opened, two_layers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.nn import utils

import infinity
from infinity.errors import ConfigError, NonFiniteGradient
from infinity.gradients.gradients import Gradients

both_homes = places("nvme", "unified", cuda=("nvme", "host"))

Step = Callable[[nn.Module, Any], object]
"""What a loop does between backward and optimizer.step(), with a model and its optimizer."""


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    weight = model[0].weight
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
    return model(inputs.to(weight.device, weight.dtype)).float().square().mean()


def train(model: nn.Module, optimizer: Any, between: Step, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        between(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain() -> tuple[nn.Module, torch.optim.AdamW]:
    model = two_layers()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The indices of the parameters whose gradients are copied from their pages."""
    found: list[int] = []
    read = Gradients.read

    def counted(self: Gradients, unit: int, parameter: int, *part: Any) -> Any:
        found.append(parameter)
        return read(self, unit, parameter, *part)

    monkeypatch.setattr(Gradients, "read", counted)
    yield found


def saved(gradient: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    return torch.load(file)


NORMS: dict[str, Callable[[Tensor], Any]] = {
    "norm": Tensor.norm,
    "norm(2)": lambda each: each.norm(2),
    "torch.norm": torch.norm,
    "vector_norm": torch.linalg.vector_norm,
    "double": lambda each: each.norm(dtype=torch.float64),
    "data": lambda each: each.data.norm(2),
    "detach": lambda each: each.detach().norm(),
    "get_total_norm": lambda each: utils.get_total_norm([each]),
    "foreach": lambda each: utils.get_total_norm([each], foreach=True),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda each: each.new_zeros(3),
    "shape": lambda each: torch.tensor([*each.shape, *each.stride(), each.numel(), each.element_size()]),
    "is_view": lambda each: torch.tensor([each._is_view(), each._base is None, each.is_leaf]),
}
"""What needs no copy of a gradient."""
READS: dict[str, Callable[[Tensor], Any]] = {
    "+": lambda each: each + 1,
    "2 -": lambda each: 2 - each,
    "clone": Tensor.clone,
    "sum": Tensor.sum,
    "cpu": lambda each: each.cpu().sum(),
    "isnan": lambda each: torch.isnan(each).any(),
    "to": lambda each: each.to(torch.float64),
    "deepcopy": copy.deepcopy,
    "save": saved,
    "numpy": lambda each: torch.tensor(each.cpu().numpy()),
    "asarray": lambda each: torch.tensor(np.asarray(each)),
    "tolist": lambda each: torch.tensor(each.tolist()),
    "item": lambda each: torch.tensor(each[0, 1].item()),
    "flatten": lambda each: torch.cat([each.flatten(), each.t()[0]]),
    "list": lambda each: torch.stack(list(each)),
    "@": lambda each: each @ each.t(),
    "inf": lambda each: utils.get_total_norm([each], float("inf")),
    "p=1": lambda each: each.norm(1),
    "dim": lambda each: each.norm(dim=1),
    "equal": lambda each: torch.tensor(torch.equal(each, each.clone())),
    "out of place": lambda each: torch.zeros(64, 64).add_(each),
}


@both_homes
def test_it_reads_as_in_torch(home: str, device: str, tmp_path: Path, reads: list[int]) -> None:
    other, model = two_layers().to(device), two_layers().to(device)
    loss_of(other).backward()
    with opened(model, tmp_path, home=home) as runtime:
        loss_of(model).backward()
        for name, read in {**NORMS, **READS}.items():
            reads.clear()
            found, wanted = read(model[0].weight.grad), read(other[0].weight.grad)
            assert (type(found), found.dtype, found.device) == (Tensor, wanted.dtype, wanted.device), name
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
            assert bool(reads) == (name in READS), name
        with torch.no_grad():
            model[0].weight.sub_(model[0].weight.grad, alpha=0.5)
            wanted = runtime.grad(model[0].weight).to(device) + model[0].weight
            assert torch.equal(model[0].weight.grad + model[0].weight, wanted)


def set_element(gradient: Tensor) -> None:
    gradient[0, 0] = 1.0


def set_masked(gradient: Tensor) -> None:
    gradient[gradient > 0] = 0.0


def set_data(gradient: Tensor) -> None:
    gradient.data = torch.zeros(64, 64)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "clamp_": lambda each: each.clamp_(-1, 1),
    "add_": lambda each: each.add_(1),
    "copy_": lambda each: each.copy_(torch.zeros(64, 64)),
    "fill_": lambda each: each.fill_(1.0),
    "element": set_element,
    "mask": set_masked,
    "data =": set_data,
    "a row": lambda each: each[0].mul_(2),
    "a view": lambda each: each.view(-1).zero_(),
    "a view of data": lambda each: each.data.t().clamp_(-1, 1),
    "elements": lambda each: each.mul_(torch.rand(64, 64)),
    "itself": lambda each: each.mul_(each),
    "out=": lambda each: torch.add(torch.ones(64, 64), 1, out=each),
    "foreach": lambda each: torch._foreach_add_([each], 1.0),
    "resize_": lambda each: each.resize_(3),
    "data_ptr": Tensor.data_ptr,
    "clip_grad_value_": lambda each: utils.clip_grad_value_([SimpleNamespace(grad=each)], 1e-3),
}


def test_writes_of_elements_are_refused(tmp_path: Path) -> None:
    model = two_layers()
    with opened(model, tmp_path) as runtime:
        loss_of(model).backward()
        before = runtime.grad(model[0].weight)
        for name, write in WRITES.items():
            with pytest.raises(ConfigError, match=r"p\.grad = tensor"):
                write(model[0].weight.grad)
            assert torch.equal(runtime.grad(model[0].weight), before), name
        with pytest.raises(ValueError, match="read-only"):
            model[0].weight.grad.numpy()[0] = 1.0


def halve(model: nn.Module, optimizer: Any) -> None:
    for each in model.parameters():
        each.grad *= 0.5


def ascend(model: nn.Module, optimizer: Any) -> None:
    torch._foreach_mul_([each.grad for each in model.parameters()], -1.0)
    assert min(float(each.grad.norm()) for each in model.parameters()) > 0


def divide(model: nn.Module, optimizer: Any) -> None:
    for each in model.parameters():
        each.grad.data.div_(torch.tensor(4.0)).mul_(2)


def move(model: nn.Module, optimizer: Any) -> None:
    """Convert the model to the device and dtype that it has, by all of Module's ways."""
    at = model[0].weight.device
    model.to(at).float()._apply(lambda each: each.to(at))
    halve(model, optimizer)


def clip_by_hand(model: nn.Module, optimizer: Any) -> None:
    norm = math.sqrt(sum(float(each.grad.detach().norm(2)) ** 2 for each in model.parameters()))
    torch._foreach_div_([each.grad for each in model.parameters()], norm / 1e-2)


def clip_with_norm(model: nn.Module, optimizer: Any) -> None:
    norm = utils.get_total_norm([each.grad for each in model.parameters()])
    utils.clip_grads_with_norm_(model.parameters(), 1e-2, norm)


def add_noise(model: nn.Module, optimizer: Any) -> None:
    utils.clip_grad_norm_(model.parameters(), 1e-2)
    draw = torch.Generator().manual_seed(7)
    for each in model.parameters():
        each.grad = each.grad + 1e-3 * torch.randn(each.shape, generator=draw)


def project(model: nn.Module, optimizer: Any) -> None:
    first = [each.grad.clone() for each in model.parameters()]
    optimizer.zero_grad()
    loss_of(model, 9).backward()
    for each, other in zip(model.parameters(), first, strict=True):
        product = float((each.grad * other).sum() / other.norm() ** 2)
        each.grad = each.grad - min(product, 0.0) * other


def sharpen(model: nn.Module, optimizer: Any) -> None:
    moves = [each.grad * 0.05 / each.grad.norm() for each in model.parameters()]
    with torch.no_grad():
        for each, move in zip(model.parameters(), moves, strict=True):
            each.add_(move)
    model.zero_grad()
    loss_of(model).backward()
    with torch.no_grad():
        for each, move in zip(model.parameters(), moves, strict=True):
            each.sub_(move)


def zero_one(model: nn.Module, optimizer: Any) -> None:
    model[0].bias.grad.zero_()
    clip_with_norm(model, optimizer)


def drop_one(model: nn.Module, optimizer: Any) -> None:
    clip_with_norm(model, optimizer)
    model[2].bias.grad = None


STEPS: dict[str, Step] = {
    "clip": lambda model, _: utils.clip_grad_norm_(model.parameters(), 1e-2),
    "foreach": lambda model, _: utils.clip_grad_norm_(model.parameters(), 1e-2, foreach=True),
    "infinity norm": lambda model, _: utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=math.inf),
    "clip_with_norm": clip_with_norm,
    "clip twice": lambda model, _: [utils.clip_grad_norm_(model.parameters(), most) for most in (0.1, 1e-2)],
    "by hand": clip_by_hand,
    "halve": halve,
    "ascend": ascend,
    "divide": divide,
    "move": move,
    "noise": add_noise,
    "PCGrad": project,
    "SAM": sharpen,
    "one is zeroed": zero_one,
    "one is dropped": drop_one,
}


@pytest.mark.parametrize("way", STEPS)
def test_a_loop_does_what_it_does_in_torch(way: str, tmp_path: Path) -> None:
    other, optimizer = plain()
    wanted = train(other, optimizer, STEPS[way])
    model = two_layers()
    with opened(model, tmp_path) as runtime:
        assert train(model, runtime.optimizer, STEPS[way]) == pytest.approx(wanted, rel=1e-6)
        for name, each in model.state_dict().items():
            torch.testing.assert_close(each, other.state_dict()[name], rtol=1e-5, atol=1e-6)


@both_homes
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_one_factor_is_that_of_clip_grad_norm_(
    compute: str, home: str, device: str, tmp_path: Path, reads: list[int]
) -> None:
    results = []
    for by_runtime in (True, False):
        model = two_layers().to(device)
        with opened(model, tmp_path, home=home, compute=compute) as runtime:
            for step in range(2):
                loss_of(model, step).backward()
                norm = float(runtime._components.gradients.norm())
                if by_runtime:
                    runtime.clip_grad_norm_(1e-2)
                else:
                    for each in model.parameters():
                        each.grad.mul_(1e-2 / (norm + 1e-6))
                assert float(utils.get_total_norm([each.grad for each in model.parameters()])) < 1.0001e-2
                assert runtime._components.gradients.factor == 1.0, "no update needs it yet"
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            loss_of(model, 2)
            results.append(copied(model.state_dict()))
    assert differences(results[1], results[0]) == []
    assert reads == []


def test_through_a_device_with_memory_of_its_own(tmp_path: Path) -> None:
    results = []
    for device in (None, EmulatedDevice(3)):
        model, losses = two_layers(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        precision = infinity.Precision(compute="fp16")
        with planned_apart():
            budget = budget_for("nvme", model, optimizer, tmp_path, precision)
        with (
            contextlib.nullcontext() if device is None else device.in_use(),
            infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu") as runtime,
        ):
            assert bool(runtime.plan.landing_bytes) == (device is not None)
            losses = train(model, runtime.optimizer, add_noise)
            results.append([losses, copied(model.state_dict())])
    assert differences(results[1], results[0]) == []
    assert device is not None and device.violations == []


@pytest.mark.usefixtures("kernels")
def test_of_units_that_the_device_updates(tmp_path: Path) -> None:
    results = []
    for part in (False, True):
        with device_units.opened(tmp_path / str(part), part=part) as (model, runtime):
            for step in range(2):
                loss = small_runtime.loss_of(model, step)
                loss.backward()
                results.append(utils.clip_grad_norm_(model.parameters(), 1e-2))
                embedding = model.embedding.weight
                results.append(embedding.grad.norm())
                for each in model.parameters():
                    each.grad = each.grad.float() * 0.5
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            results.append(copied(model.state_dict()))
    assert differences(results[5:], results[:5]) == []


def test_norms_of_low_precision_are_those_of_the_page(tmp_path: Path) -> None:
    model = two_layers()
    with opened(model, tmp_path, compute="bf16") as runtime:
        loss_of(model).backward()
        weight = model[0].weight
        assert weight.grad.dtype == torch.bfloat16 and weight.grad.norm().dtype == torch.float32
        assert float(weight.grad.norm()) == pytest.approx(float(runtime.grad(weight).norm()), rel=1e-6)
        wanted = runtime.clip_grad_norm_(1.0)
        assert float(utils.get_total_norm([p.grad for p in model.parameters()])) == pytest.approx(
            min(1.0, float(wanted)), rel=1e-6
        )


def test_a_norm_that_is_not_finite(tmp_path: Path) -> None:
    model = two_layers()
    with opened(model, tmp_path) as runtime:
        before = copied(model.state_dict())
        for error_if_nonfinite in (True, False):
            (loss_of(model) * math.inf).backward()
            if error_if_nonfinite:
                with pytest.raises(RuntimeError, match="non-finite"):
                    utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            else:
                assert not utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()
            with pytest.raises(NonFiniteGradient):
                runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            assert differences(copied(model.state_dict()), before) == []
        loss_of(model).backward()
        model[0].weight.grad.mul_(math.nan)
        with pytest.raises(NonFiniteGradient):
            runtime.optimizer.step()


def test_different_factors_are_refused(tmp_path: Path) -> None:
    model = two_layers()
    with opened(model, tmp_path) as runtime:
        before = copied(model.state_dict())
        loss_of(model).backward()
        utils.clip_grad_norm_(model[0].parameters(), 1e-3)
        utils.clip_grad_norm_(model[2].parameters(), 1e-2)
        for call in (runtime.optimizer.step, lambda: runtime.clip_grad_norm_(1.0)):
            with pytest.raises(ConfigError, match=r"different factors: that of 0\.\w+ was multiplied"):
                call()
        assert differences(copied(model.state_dict()), before) == []
        runtime.optimizer.param_groups[0]["params"] = list(model[2].parameters())
        runtime.optimizer.step()  # what is in no group may have any factor
        assert model[0].weight.grad.norm() < 1.001e-3
        runtime.optimizer.zero_grad()
        loss_of(model).backward()
        runtime.optimizer.step()


def test_a_backward_after_a_factor_is_refused(tmp_path: Path) -> None:
    model = two_layers()
    with opened(model, tmp_path) as runtime:
        loss_of(model).backward()
        halve(model, None)
        with pytest.raises(ConfigError, match="between clip_grad_norm_ and zero_grad"):
            loss_of(model).backward()
        runtime.optimizer.step()
        for each in model.parameters():
            each.grad = None
        loss_of(model).backward()
        runtime.optimizer.step()


def test_a_gradient_that_is_forgotten_is_not_the_next_one(tmp_path: Path) -> None:
    model = two_layers()
    weight = model[0].weight
    with opened(model, tmp_path) as runtime:
        for forget in (
            runtime.optimizer.zero_grad,
            lambda: setattr(weight, "grad", None),
            lambda: setattr(weight, "grad", weight.grad * 2),
        ):
            loss_of(model).backward()
            former, rest = weight.grad, model[2].weight.grad
            assert torch.equal(former, weight.grad) and torch.equal(rest, model[2].weight.grad)
            forget()
            loss_of(model).backward()
            for use in (Tensor.norm, Tensor.clone, Tensor.zero_, lambda each: each.mul_(2)):
                with pytest.raises(ConfigError, match=r"A former gradient of 0\.weight"):
                    use(former)


def test_what_is_set(tmp_path: Path) -> None:
    other, optimizer = plain()
    model = two_layers()
    weight = model[0].weight
    with opened(model, tmp_path) as runtime:
        for each, its in ((other, optimizer), (model, runtime.optimizer)):
            for number, parameter in enumerate(each.parameters()):
                draw = torch.Generator().manual_seed(number)
                parameter.grad = torch.randn(parameter.shape, generator=draw).t()
            its.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(weight.grad, other[0].weight.grad)
        for refused in (torch.zeros(3), torch.zeros(64, 64, dtype=torch.int64), 1.0):
            with pytest.raises(ConfigError, match=r"0\.weight, \[64, 64\], was set to"):
                weight.grad = refused
        assert torch.equal(weight.grad, other[0].weight.grad)
        weight.grad = torch.full((64, 64), 0.5, dtype=torch.float64)
        assert torch.equal(runtime.grad(weight), torch.full((64, 64), 0.5))
        model[2].weight.grad = weight.grad
        assert torch.equal(runtime.grad(model[2].weight), torch.full((64, 64), 0.5))
        handle = weight.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", each.grad * 2))
        with pytest.raises(ConfigError, match="inside of a backward"):
            loss_of(model).backward()
        handle.remove()


def test_zeros_that_are_set_take_no_memory(tmp_path: Path) -> None:
    model = two_layers()
    with opened(model, tmp_path) as runtime:
        before = copied(model.state_dict())
        _init_optim_state(runtime.optimizer)  # torch's, which makes states by a step with gradients of zeros
        assert differences(copied(model.state_dict()), before) == []
        assert [float(each["step"]) for each in runtime.optimizer.state_dict()["state"].values()] == [1.0] * 4
        model[0].weight.grad = torch.zeros(64, 64)
        assert not runtime._components.gradients.any_stored
        assert model[0].weight.grad.norm() == 0 and not model[0].weight.grad.any()


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_grad_scaler_is_that_of_torch(compute: str, tmp_path: Path) -> None:
    """In bf16, what is scaled is what is scaled in fp32, so the runtime is its own reference there."""
    results = []
    for scaled in (False, True):
        model = two_layers()
        if compute == "fp32" and not scaled:
            results.append(scaled_steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 4))
        else:
            with opened(model, tmp_path, compute=compute) as runtime:
                results.append(scaled_steps(model, runtime.optimizer, 4 if scaled else 0))
    (_, wanted), (scales, found) = results
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
    for name, each in found.items():
        torch.testing.assert_close(each, wanted[name], rtol=1e-5, atol=1e-6)


def scaled_steps(model: nn.Module, optimizer: Any, growth: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train with a GradScaler, of which the second step overflows. growth: 0: without one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=bool(growth))
    scales = []
    for step in range(4):
        if step == 1 and not growth:
            continue
        scaler.scale(loss_of(model, step) * (math.inf if step == 1 else 1.0)).backward()
        if step % 2 == 0:
            scaler.unscale_(optimizer)
            utils.clip_grad_norm_(model.parameters(), 1e-2)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, copied(model.state_dict())


def test_grad_scaler_over_fp16_is_refused_as_by_torch(tmp_path: Path) -> None:
    model = two_layers()
    with opened(model, tmp_path, compute="fp16") as runtime:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model)).backward()
        with pytest.raises(ValueError, match="unscale FP16 gradients"):
            scaler.step(runtime.optimizer)


def test_with_eager_updates(tmp_path: Path) -> None:
    other, model = two_layers(), two_layers()
    loss_of(other).backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with infinity.offload(
        model,
        optimizer,
        budget=infinity.Budget(host="64MiB"),
        precision=infinity.Precision(compute="fp32"),
        device="cpu",
        update="eager",
        accumulation=1,
    ) as runtime:
        loss_of(model).backward()
        wanted = utils.get_total_norm([each.grad for each in other.parameters()])
        found = utils.get_total_norm([each.grad for each in model.parameters()])
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)
        for refused in (
            lambda: utils.clip_grad_norm_(model.parameters(), 1e-2),
            lambda: setattr(model[0].weight, "grad", torch.zeros(64, 64)),
            model[0].weight.grad.clone,
        ):
            with pytest.raises(ConfigError, match='update="lazy"'):
                refused()
        runtime.optimizer.step()


def test_accelerate_takes_the_optimizer_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient_state: dict[str, Any] = {"sync_gradients": False}
    state: dict[str, Any] = {"_mixed_precision": "fp16"}
    accelerate = SimpleNamespace(
        GradientState=SimpleNamespace(_shared_state=gradient_state),
        AcceleratorState=SimpleNamespace(_shared_state=state),
    )
    model = two_layers()
    with opened(model, tmp_path) as runtime:
        optimizer = runtime.optimizer
        assert not hasattr(optimizer, "optimizer")
        monkeypatch.setitem(sys.modules, "accelerate.state", accelerate)
        loss_of(model).backward()
        optimizer.step()
        assert len(optimizer.state) == 4, "accelerate has not prepared it"
        with pytest.raises(ConfigError, match="mixed_precision"):
            optimizer._is_accelerate_prepared  # noqa: B018
        state["_mixed_precision"] = "bf16"
        assert optimizer._is_accelerate_prepared and optimizer.optimizer is optimizer
        optimizer._is_accelerate_prepared = True  # as prepare() does afterwards
        before = copied(model.state_dict())
        optimizer.step()
        optimizer.zero_grad()
        assert model[0].weight.grad is not None
        assert differences(copied(model.state_dict()), before) == []
        gradient_state["sync_gradients"] = True
        optimizer.step()
        optimizer.zero_grad()
        assert model[0].weight.grad is None
        assert differences(copied(model.state_dict()), before) != []


def test_a_step_that_overflows_says_that_it_was_skipped(tmp_path: Path) -> None:
    model = two_layers()
    with opened(model, tmp_path, compute="fp16") as runtime:
        for factor in (1.0, math.inf, 1.0):
            (loss_of(model) * factor).backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            assert runtime.optimizer.step_was_skipped is (factor == math.inf)
