"""Tests of gradients on their way from a device with its own memory to host RAM: hooks wait for copies only
when gradients take more than their share of the device, and no gradient is lost, counted twice or changed in
any bit.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import parity
import pytest
import torch
from device_units import kernels
from emulated_device import EmulatedDevice
from homes import ROOMY
from process_resources import nothing_left
from torch import nn

import infinity
from infinity.cpu_adam import BLOCK
from infinity.errors import ConfigError, DeviceError
from infinity.pages.gradient_copies import GradientCopies, GradientCopy
from infinity.planning import homes, twin_flow
from infinity.planning.placement import Kind
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier
from infinity.tiers import driver as driver_module
from infinity.tiers.copy_streams import CopyStreams

__all__ = ["kernels"]

WATCHDOG = 30
"""Seconds for which `held` holds copies back at most. Then the copies go on, and the test fails."""

BIG = 4 * BLOCK
"""Elements of a float32 gradient that is twice as large as `LEAVING`, and comes through landings in four
blocks.
"""

LEAVING = 8 * BLOCK
"""Bytes of two gradients of BLOCK float32 elements."""


class Layers(nn.Module):
    """A model of linear layers, which all get the same input. Its forward returns a loss.

    sizes: number of elements of each layer's weight, multiples of 64. bias: whether the layers have biases.
    """

    def __init__(self, *sizes: int, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(64, size // 64, bias=bias) for size in sizes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(inputs).float().square().mean() for layer in self.layers]).sum()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def inputs(batch: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(100 + batch)
    return torch.randn(4, 64).to(dtype)


@contextlib.contextmanager
def opened(
    device: EmulatedDevice | None, model: nn.Module, *, leaving: int = LEAVING, **options: Any
) -> Iterator[Any]:
    """Offload a model with parameters on the device, all else in RAM, and landings of BLOCK float32 elements.

    Yields the runtime. device: None for a device whose memory the CPU can read. leaving: bytes of gradients
    that may be under way. options: those of infinity.offload; precision is fp32 by default.
    """
    precision = options.pop("precision", infinity.Precision(compute="fp32"))
    budget = infinity.Budget(device=ROOMY, host=ROOMY)
    units = infinity.plan(model, adamw(model), budget=budget, precision=precision, device="cpu").layout.units
    leaving = 0 if device is None else leaving
    near = infinity.Budget(device=sum(unit.nbytes for unit in units) + leaving, host=ROOMY)
    sizes = {"_LEAVING_SHARE": 1, "_MOST_LEAVING": leaving, "_LARGEST_LANDING": 4 * BLOCK}
    with (
        contextlib.nullcontext() if device is None else device.in_use(),
        mock.patch.multiple(homes, **sizes),
        infinity.offload(
            model, adamw(model), budget=near, precision=precision, device="cpu", **options
        ) as runtime,
    ):
        plan = runtime.plan
        assert plan.leaving_bytes == leaving
        assert plan.landing_bytes == (0 if device is None else 2 * 4 * BLOCK)
        rests = {home[kind] for home in plan.homes for kind in (Kind.GRADIENT, Kind.OPTIMIZER)}
        assert rests == {Tier.HOST} and plan.mirrored
        yield runtime


@contextlib.contextmanager
def held(device: EmulatedDevice, runtime: Any) -> Iterator[Callable[[], None]]:
    """Hold back copies from the device to the host inside the `with`. Yields a function that lets them go on.

    Asserts that nobody waits for the held copies: after WATCHDOG seconds a watchdog lets them go, so that the
    wait ends, and the assertion fails.
    """
    down = runtime._components.store.link.streams["down"]
    late: list[str] = []

    def let_go() -> None:
        device.let_go(down)

    def too_late() -> None:
        late.append("somebody waited for a copy that is held")
        let_go()

    watchdog = threading.Timer(WATCHDOG, too_late)
    device.hold(down)
    watchdog.start()
    try:
        yield let_go
    finally:
        let_go()
        watchdog.cancel()
        watchdog.join()
    assert late == []


def finished(model: nn.Module, runtime: Any) -> dict[str, Any]:
    """Finish a step after its backward: clip, update and zero the gradients.

    Returns copies of the "gradients" before clipping, their "norm", and "parameters" and "optimizer" states
    after the update.
    """
    found: dict[str, Any] = {"gradients": [runtime.grad(each) for each in model.parameters()]}
    found["norm"] = float(runtime.clip_grad_norm_(0.5))
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    found["parameters"] = parity.copied(model.state_dict())
    found["optimizer"] = parity.tensors_copied(runtime.optimizer.state_dict())
    return found


def stepped(model: nn.Module, runtime: Any) -> dict[str, Any]:
    model(inputs()).backward()
    return finished(model, runtime)


@functools.cache
def expected(*sizes: int, bias: bool = True) -> dict[str, Any]:
    """Train Layers(*sizes, bias=bias) for one step without copies, and return the results as `finished` does.

    The device's memory is RAM, which the CPU can read.
    """
    model = Layers(*sizes, bias=bias)
    with mock.patch.object(driver_module._emulation, "now", None), opened(None, model) as runtime:
        return stepped(model, runtime)


def workers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "infinity-gradients"]


# --- what hooks and others wait for ---------------------------------------------------------------------


@pytest.mark.parametrize("backwards", [1, 2])
def test_hooks_return_while_copies_are_held(backwards: int) -> None:
    """The second backward adds to the gradients of the first, which have not come either."""
    device, model = EmulatedDevice(1), Layers(BLOCK, BLOCK // 2)
    with opened(device, model, leaving=4 * LEAVING) as runtime:
        with held(device, runtime):
            for _ in range(backwards):
                model(inputs()).backward()
            assert bool(workers()) == (backwards > 1)
        found = finished(model, runtime)
        if backwards == 1:
            assert parity.differences(found, expected(BLOCK, BLOCK // 2)) == []
        else:
            once = expected(BLOCK, BLOCK // 2)["gradients"]
            assert parity.differences(found["gradients"], [each + each for each in once]) == []


@pytest.mark.parametrize("before", [0, 1])
def test_the_third_of_room_for_two_waits_without_lock_and_gil(before: int) -> None:
    """A hook that waits for copies holds neither lock nor GIL. Ctrl-C ends the backward after that gradient,
    and after zero_grad() the step can be repeated. before: the number of backwards whose gradients came
    before; with 1, the worker adds to them.
    """
    device, model = EmulatedDevice(2), Layers(*3 * [BLOCK], bias=False)
    with opened(device, model) as runtime:
        copies = runtime._components.gradients._copies
        seen: list[bool] = []

        def look() -> None:
            while len(copies._copies) + len(copies._jobs) < 3:
                time.sleep(0.001)
            with runtime._components.pager.lock:
                seen.append(True)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            device.let_go(runtime._components.store.link.streams["down"])

        for _ in range(before):
            model(inputs()).backward()
            copies.wait()
        with held(device, runtime):
            loss = model(inputs())
            other = threading.Thread(target=look)
            other.start()
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
            other.join()
            assert seen == [True]
            del loss
        runtime.optimizer.zero_grad()
        assert parity.differences(stepped(model, runtime), expected(*3 * [BLOCK], bias=False)) == []


@pytest.mark.parametrize("leaving", [0, LEAVING])
def test_gradients_under_way_take_their_share_of_the_device(
    leaving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, model = EmulatedDevice(3), Layers(BLOCK, BIG, 64, 2 * BLOCK, 64, BLOCK)
    kept: list[int] = []
    wait = GradientCopies.await_limit

    def waited(copies: GradientCopies) -> None:
        kept.append(copies._kept)
        wait(copies)
        assert copies._kept <= leaving

    monkeypatch.setattr(GradientCopies, "await_limit", waited)
    with opened(device, model, leaving=leaving) as runtime:
        for _ in range(2):
            model(inputs()).backward()
        assert len(kept) == 2 * len(list(model.parameters()))
        assert leaving < max(kept) <= leaving + 4 * BIG
        runtime.clip_grad_norm_(1.0)
        assert runtime._components.gradients._copies._kept == 0


def test_who_reads_gradients_waits_for_them() -> None:
    device, model = EmulatedDevice(3), Layers(BLOCK)
    readers: list[Callable[[Any], Any]] = [
        lambda runtime: runtime.grad(model.layers[0].weight),
        lambda runtime: runtime.clip_grad_norm_(1.0),
        lambda runtime: runtime.optimizer.step(),
        lambda runtime: runtime.optimizer.zero_grad(),
    ]
    with opened(device, model) as runtime:
        for read in readers:
            runtime.optimizer.zero_grad()
            with held(device, runtime) as let_go:
                model(inputs()).backward()
                timer = threading.Timer(0.1, let_go)
                timer.start()
                read(runtime)
                assert timer.finished.is_set(), "somebody read what had not come down"
                timer.join()


def test_a_runtime_closes_while_copies_are_held() -> None:
    device, model = EmulatedDevice(4), Layers(BLOCK, BLOCK // 2)
    with nothing_left(garbage=True):
        with opened(device, model) as runtime:
            down = runtime._components.store.link.streams["down"]
            device.hold(down)
            model(inputs()).backward()
            timer = threading.Timer(0.1, device.let_go, (down,))
            timer.start()
            runtime.close()
            timer.join()
        del runtime
        gc.collect()


# --- what comes of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(BLOCK, BLOCK // 2), (BIG, 64), (3 * BIG + 64, 2 * BIG)])
def test_bytes_down_are_those_of_the_gradients(sizes: tuple[int, ...]) -> None:
    """Each backward copies exactly the bytes of its gradients to the host, and nothing else comes down: the
    first one each gradient in one copy, later ones in blocks.
    """
    device, model = EmulatedDevice(5), Layers(*sizes)
    numbers = [each.numel() for each in model.parameters()]
    with opened(device, model) as runtime:
        for backwards in (1, 2):
            before, copied = runtime.stats.edges[Edge.DEVICE_TO_HOST].bytes, device.count("cuMemcpyAsync")
            for _ in range(backwards):
                model(inputs()).backward()
            runtime.clip_grad_norm_(1.0)
            assert runtime.stats.edges[Edge.DEVICE_TO_HOST].bytes - before == backwards * 4 * sum(numbers)
            blocks = sum(-(-each // BLOCK) for each in numbers) * (backwards - 1)
            assert device.count("cuMemcpyAsync") - copied == len(numbers) + blocks
            runtime.optimizer.zero_grad()
        assert parity.differences(stepped(model, runtime), expected(*sizes)) == []
        assert runtime.stats.edges[Edge.HOST_TO_NVME].bytes == 0


def test_one_backward_needs_a_copy_and_two_events_a_gradient_and_no_worker() -> None:
    device, model = EmulatedDevice(6), Layers(*[64] * 20)
    with opened(device, model, accumulation=1) as runtime:
        calls = ("cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent")
        for _ in range(2):
            loss = model(inputs())
            before = [device.count(each) for each in calls]
            loss.backward()
            made = [device.count(each) - then for each, then in zip(calls, before, strict=True)]
            assert made == [40, 80, 40]
            assert not workers()
            finished(model, runtime)
        assert not workers()


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_squares_that_the_device_computes_have_the_bits_of_the_cpus(compute: str, kernels: None) -> None:
    """With update kernels, 8 bytes for each block of a gradient come down beside it, and the CPU measures
    nothing.
    """
    precision = infinity.Precision(compute=compute)
    sizes = BIG + 64, 64, 3 * BLOCK

    def step(has_kernels: bool) -> tuple[dict[str, Any], int]:
        model = Layers(*sizes)
        numbers = [each.numel() for each in model.parameters()]
        with (
            mock.patch.object(twin_flow, "has_kernels", lambda device: has_kernels),
            opened(EmulatedDevice(8), model, precision=precision, accumulation=1) as runtime,
        ):
            assert not runtime.plan.updated_on_device
            before = runtime.stats.edges[Edge.DEVICE_TO_HOST].bytes
            model(inputs(dtype=precision.compute_dtype)).backward()
            norm = runtime._components.gradients.norm()
            down = runtime.stats.edges[Edge.DEVICE_TO_HOST].bytes - before
            sums = has_kernels * sum(8 * -(-each // BLOCK) for each in numbers)
            assert down == sum(numbers) * precision.compute_dtype.itemsize + sums
            assert not workers()
            return {**finished(model, runtime), "unclipped": norm}, int(sums)

    without, _ = step(False)
    with mock.patch.object(GradientCopies, "measure", None):
        found, sums = step(True)
    assert sums and parity.differences(found, without) == []


def test_a_first_gradient_comes_after_those_that_were_dropped() -> None:
    """The worker has not added the dropped gradient when the next one is copied to its place."""
    device, model = EmulatedDevice(9), Layers(BLOCK, 64, bias=False)
    weight = model.layers[0].weight
    with opened(device, model, leaving=4 * LEAVING) as runtime:
        with held(device, runtime) as let_go:
            for _ in range(2):
                model(inputs(1)).backward()
            weight.grad = None
            timer = threading.Timer(0.1, let_go)
            timer.start()
            model(inputs()).backward()
            timer.join()
        alone = expected(BLOCK, 64, bias=False)["gradients"][0]
        assert parity.differences(runtime.grad(weight), alone) == []


@pytest.mark.parametrize("taken", ["waits", "memory"])
def test_what_a_copy_waits_for_or_keeps_is_missed(taken: str) -> None:
    """Without the waits for copies, or if the gradients are not kept until they are copied, the device's
    checker finds accesses that nothing orders.
    """

    def forgetful(link: CopyStreams, *arguments: Any, **options: Any) -> Any:
        transfer = copy(link, *arguments, **options)
        link._under_way.clear()
        transfer._ends = transfer._ends[:1]
        return transfer

    copy = CopyStreams.all_to_host
    patched = {
        "waits": mock.patch.multiple(GradientCopy, wait=lambda self: None, done=lambda self: True),
        "memory": mock.patch.object(CopyStreams, "all_to_host", forgetful),
    }[taken]
    for seed in range(20):
        device, model = EmulatedDevice(seed), Layers(*4 * [BLOCK], bias=False)
        try:
            with patched, opened(device, model, leaving=4 * LEAVING) as runtime:
                for _ in range(2):
                    stepped(model, runtime)
        except AssertionError:
            assert device.violations
            return
    pytest.fail("nobody misses it")


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuStreamWaitEvent", "cuEventQuery"])
def test_a_copy_that_fails_is_told_and_the_step_can_be_repeated(call: str) -> None:
    device, model = EmulatedDevice(7), Layers(BLOCK, BLOCK // 2)
    with opened(device, model) as runtime:
        model(inputs()).backward()
        runtime.optimizer.zero_grad()
        with held(device, runtime):
            loss = model(inputs())
            device.fail(call, 700)
            with contextlib.suppress(DeviceError):
                loss.backward()
        with pytest.raises(DeviceError) as caught:
            runtime.optimizer.step()
        assert caught.value.call == call and caught.value.name == "CUDA_ERROR_ILLEGAL_ADDRESS"
        with pytest.raises(DeviceError):
            runtime.grad(model.layers[0].weight)
        runtime.optimizer.zero_grad()
        del loss
        assert parity.differences(stepped(model, runtime), expected(BLOCK, BLOCK // 2)) == []


def test_a_worker_that_cannot_start_leaves_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is lost, and zero_grad() forgets it instead of waiting for a worker that never comes."""
    device, model = EmulatedDevice(3), Layers(BLOCK)
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "infinity-gradients":
            raise RuntimeError("can't start new thread")
        real(self)

    with opened(device, model) as runtime:
        model(inputs()).backward()
        loss = model(inputs())
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
            patch.setattr(threading.Thread, "start", start)
            loss.backward()
        with pytest.raises(ConfigError, match="zero_grad"):
            runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        model(inputs()).backward()
        runtime.optimizer.step()
