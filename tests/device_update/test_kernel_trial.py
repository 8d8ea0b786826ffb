"""Tests of the trial of a device's kernels, and of training where the device has none that can be used: the
CPU then does all updates, with the bits that it always has, and the plan says why.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from device_units import adamw, kernels, step, updated
from homes import ROOMY
from parity import copied, differences
from planned_models import MiB, stack
from small_runtime import TIED

import infinity
from infinity.config import Budget
from infinity.device_update import kernels as device_kernels
from infinity.device_update.kernel_trial import refusal
from infinity.device_update.kernels import RULES, kinds_of
from infinity.errors import DeviceError, KernelError
from infinity.formats.optimizer_rules import Rule
from infinity.planning import twin_flow
from infinity.planning.placement import Kind
from infinity.planning.planner import Available, make_plan
from infinity.tiers import Tier

__all__ = ["kernels", "updated"]

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
REFUSED = DeviceError(
    "The device refused the kernels.",
    "Mend it.",
    call="cuModuleLoadData",
    code=200,
    name="CUDA_ERROR_INVALID",
)


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD", "Adagrad", "Lion"])
def test_right_kernels_are_not_refused(optimizer: str) -> None:
    for dtype in FLOATS:
        for moments in (torch.float32, torch.bfloat16, torch.uint8):
            kinds = kinds_of(optimizer, dtype, dtype, moments) | kinds_of(
                optimizer, torch.float32, dtype, moments
            )
            assert refusal(CPU, kinds) is None


def test_the_first_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = device_kernels._host_kernel

    def idle(name: str) -> Any:
        return (lambda *_: None) if name == "infinity_update" else launch(name)

    monkeypatch.setattr(device_kernels, "_host_kernel", idle)
    kinds = kinds_of("SGD", torch.bfloat16, torch.bfloat16, torch.float32)
    found = refusal(CPU, kinds)
    assert found is not None and "other bits than the CPU" in found
    assert any(f"parameter of INFINITY_UPDATE({rule}, kBf16, kSplit" in found for rule in RULES)


@pytest.mark.parametrize("error", [REFUSED, KernelError("NVRTC could not compile.", "Mend it.")])
def test_kernels_that_do_not_load_are_refused_with_the_error_s_cause(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_kernels, "_host_kernel", failing(error))
    kinds = kinds_of("AdamW", torch.float32, torch.float32, torch.uint8)
    assert refusal(CPU, kinds) == error.args[0]


def failing(error: Exception) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def train(directory: Path) -> tuple[Any, Any]:
    """Train for three steps with room for all pages on the device. Returns (results, plan)."""
    model = TIED.make()
    budget = Budget(device=ROOMY, host=ROOMY)
    precision = infinity.Precision(compute="bf16")
    options: dict[str, Any] = {"budget": budget, "precision": precision, "device": "cpu"}
    with infinity.offload(model, adamw(model), **options) as runtime:
        losses = [step(model, runtime, number, clip=0.5) for number in range(3)]
        return (losses, copied(model.state_dict())), runtime.plan


def test_the_cpu_updates_what_the_device_cannot(
    kernels: None, updated: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there, plan = train(tmp_path)
    assert updated and plan.updated_on_device and not plan.no_updates_there
    updated.clear()
    monkeypatch.setattr(device_kernels, "_host_kernel", failing(REFUSED))
    with pytest.warns(UserWarning, match="refused the kernels.*The CPU does all updates") as caught:
        here, plan = train(tmp_path)
    assert len(caught) == 1
    assert differences(there, here) == []
    assert not updated and not plan.updated_on_device and plan.workspace_bytes == 0
    assert "updates: all on the CPU. The device refused the kernels." in str(plan)
    kinds = (Kind.GRADIENT, Kind.OPTIMIZER)
    assert {home[kind] for home in plan.homes for kind in kinds} == {Tier.HOST}
    assert len(plan.mirrored) == len(plan.homes), "parameters stay on the device"


def test_a_plan_says_it_without_a_warning(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kernels, "_host_kernel", failing(REFUSED))
    model = TIED.make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = infinity.plan(model, adamw(model), budget=Budget(device=ROOMY, host=ROOMY), device="cpu")
    assert plan.no_updates_there == REFUSED.cause


def test_without_nvrtc_a_gpu_keeps_no_states_that_ram_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kernels, "can_compile", lambda: False)
    monkeypatch.setattr("infinity.planning.homes._LARGEST_LANDING", 0)  # buffers do not depend on the budget
    monkeypatch.setattr("infinity.planning.planner.available_bytes", lambda *_: 64 * MiB)
    monkeypatch.setattr("infinity.planning.headroom.Headroom.of", lambda device: Available(0, 0).headroom)
    device = torch.device("cuda", 0)
    free = Available.now(device)
    model = stack([64] * 12)
    rule = Rule.of(torch.optim.AdamW(model.parameters()))

    def made(host: int) -> Any:
        budget = Budget(host=host)
        return make_plan(
            model, rule, budget=budget, precision=infinity.Precision(), device=device, available=free
        )

    roomy = made(64 * MiB)
    assert "updates: all on the CPU. No NVRTC" in str(roomy)
    assert roomy.home_bytes[Tier.DEVICE] == 0 and len(roomy.mirrored) == 12
    states = sum(roomy.page_bytes(unit, Kind.OPTIMIZER) for unit in range(12))
    tight = made(roomy.host_bytes - roomy.home_bytes[Tier.HOST] + states // 2)
    assert 0 < tight.home_bytes[Tier.HOST] <= states // 2 < tight.home_bytes[Tier.DEVICE]
    assert twin_flow.gathered(tight.homes, tight.page_sizes, 1 << 40, whole_units=False) != tight.homes
