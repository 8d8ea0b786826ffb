"""Tests of the measurements for a plan.

The rates of disks, RAM and arithmetic must be probed once and then come from the cache, until they are too
old or belong to another setting. The bytes of activations and the seconds of a step must follow from
example inputs.
"""

import functools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

from infinity.api import plan
from infinity.config import Budget, Precision
from infinity.planning import machine_rates
from infinity.planning.machine_rates import measure_rates
from infinity.planning.placement import Kind
from infinity.system.cache import cache_file

CPU = torch.device("cpu")


@pytest.fixture
def fast_probes(monkeypatch, tmp_path) -> list[str]:
    """Replace the probes of disks, RAM and arithmetic by fakes, and the user's cache by an empty one.

    Returns a list to which each fake adds one string when it is called: a disk's path, "stream" for the
    speed of RAM, or the dtype for arithmetic, such as "torch.bfloat16".
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    probed: list[str] = []

    def rates(what: str) -> dict[str, float]:
        probed.append(what)
        return {"read": 2e9, "write": 1e9, "mixed": 1e9}

    monkeypatch.setattr(machine_rates, "_disk", lambda path, limit, paths: rates(path))
    monkeypatch.setattr(machine_rates, "stream_speed", lambda repeats: rates("stream")["read"])
    monkeypatch.setattr(machine_rates, "_flops", lambda device, dtype: {"rate": rates(str(dtype))["read"]})
    monkeypatch.setattr(machine_rates, "_compute_memory", lambda device, dtype: {"rate": 2e9})
    return probed


def test_bandwidths_are_probed_once(fast_probes, tmp_path) -> None:
    disks = {"/a": 4096, "/b": 4096}
    first = measure_rates(disks, CPU, torch.bfloat16)
    assert first.disk["read"] == 4e9
    assert fast_probes == ["/a", "/b", "stream", "torch.bfloat16"]
    assert cache_file("machine_rates.json").is_relative_to(tmp_path)
    assert measure_rates(disks, CPU, torch.bfloat16) == first
    assert len(fast_probes) == 4
    mixed = measure_rates({}, CPU, torch.float32, [torch.float32, torch.bfloat16, torch.int8])
    assert fast_probes[4:] == ["torch.float32"]
    assert set(mixed.flops) == {torch.float32, torch.bfloat16}
    measure_rates({}, CPU, torch.float32, anew=True)
    assert fast_probes[5:] == ["torch.float32"]


def test_a_disk_is_probed_again_after_five_minutes(fast_probes) -> None:
    def measure(now: float) -> None:
        measure_rates({"/a": 4096}, CPU, torch.bfloat16, clock=lambda: now)

    measure(1000.0)
    measure(1299.0)
    assert fast_probes == ["/a", "stream", "torch.bfloat16"]
    measure(1300.0)
    assert fast_probes[3:] == ["/a"]
    measure(1599.0)
    assert fast_probes[4:] == []
    measure_rates({"/b": 4096}, CPU, torch.bfloat16, clock=lambda: 1600.0)
    kept = json.loads(cache_file("machine_rates.json").read_text())
    assert sum("disk /" in key for key in kept) == 1  # /a would be probed again
    fast_probes.pop()
    measure(1200.0)  # the clock was set back, so the age of the figures is unknown
    assert fast_probes[4:] == ["/a"]


def test_figures_of_another_number_of_threads_are_others(fast_probes, monkeypatch) -> None:
    measure_rates({}, CPU, torch.bfloat16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    measure_rates({}, CPU, torch.bfloat16)
    assert fast_probes == ["stream", "torch.bfloat16", "torch.bfloat16"]


@pytest.mark.parametrize("text", ["", "[]", '{"x": 3}', "\\x00"])
def test_a_broken_cache_is_measured_anew(fast_probes, text) -> None:
    cache_file("machine_rates.json").parent.mkdir(parents=True)
    cache_file("machine_rates.json").write_text(text)
    measure_rates({}, CPU, torch.float32)
    assert len(json.loads(cache_file("machine_rates.json").read_text())) == 3


def test_real_probes_give_rates(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine_rates, "_DISK_BYTES", 1 << 20)
    before = torch.random.get_rng_state()
    found = measure_rates({str(tmp_path): 1 << 20}, CPU, torch.float32)
    # Otherwise a run with a seed would depend on whether its machine was known.
    assert torch.equal(torch.random.get_rng_state(), before)
    assert min(*found.disk.values(), found.host_stream) > 0
    assert found.flops[torch.float32] > 0 and found.compute_memory > 0


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_example_inputs_give_activations_and_time(fast_probes, device) -> None:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    made = plan(
        model,
        optimizer,
        budget=Budget(host="64MiB"),
        precision=Precision(compute="fp32"),
        example_inputs=(torch.zeros(32, 64),),
        device="cpu",
    )
    # The hidden layer is saved once, or before and after the activation. Its gradient is alive at the same
    # time.
    hidden = 32 * 256 * 4
    assert 2 * hidden <= made.activations <= 4 * hidden
    gradients = sum(made.page_bytes(unit, Kind.GRADIENT) for unit in range(len(made.homes)))
    compute = made.work.seconds(made.speeds)
    assert made.work.flops == {torch.float32: 2 * 32 * (2 * 64 * 256 + 3 * 256 * 8)}
    assert compute == pytest.approx((made.work.flops[torch.float32] + made.work.nbytes) / 2e9)
    assert made.prediction.compute == pytest.approx(compute)
    assert made.predict(4).compute == pytest.approx(4 * compute)
    # A fresh gradient is read and stored, and one of a later backward is added to what is there.
    added = 3 * (2 + 1) * gradients / 2e9
    assert made.predict(4).update == pytest.approx(made.prediction.update + added)
    assert "s/step · limited by" in str(made)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "region",
    [
        torch.no_grad,
        torch.inference_mode,
        functools.partial(torch.autocast, "cpu"),
        functools.partial(torch.device, "meta"),
    ],
    ids=["no_grad", "inference_mode", "autocast", "meta"],
)
def test_a_plan_is_made_in_any_region(
    fast_probes, region: Callable[[], AbstractContextManager[object]]
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = (torch.ones(2, 4),)
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    with region():
        made = plan(model, optimizer, budget=Budget(host="64MiB"), example_inputs=inputs, device="cpu")
    assert made.prediction is not None and made.prediction.least > 0
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads and torch.is_grad_enabled()


def test_control_flow_on_data_leaves_activations_unknown(fast_probes) -> None:
    class Choosy(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) if inputs.sum().item() > 0 else inputs

    model = Choosy(4, 4)
    made = plan(model, None, budget=Budget(host="64MiB"), example_inputs=(torch.ones(2, 4),), device="cpu")
    assert made.activations is None
    assert fast_probes == []
