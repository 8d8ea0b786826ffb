"""Tests of the ring, a buffer on the device through which gradients leave it: hooks wait for room in the ring
but not for copies, and no gradient is lost, counted twice or changed in any bit.
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
from emulated_device import EmulatedDevice
from homes import ROOMY
from hypothesis import given, settings
from hypothesis import strategies as st
from process_resources import nothing_left
from torch import nn

import infinity
from infinity.cpu_adam import BLOCK
from infinity.errors import ConfigError, DeviceError
from infinity.pages.gradient_ring import RingJob, fit, placed
from infinity.planning.placement import Kind
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier
from infinity.tiers import driver as driver_module

WATCHDOG = 30
"""Seconds for which `held` holds copies back at most. Then the copies go on, and the test fails."""

BIG = 4 * BLOCK
"""Elements of a float32 gradient of four ring blocks, which is twice the size of the smallest ring."""


RING = 8 * BLOCK
"""Bytes of the smallest ring, which has two blocks of BLOCK float32 elements."""


class Layers(nn.Module):
    """A model of linear layers, which all get the same input. Its forward returns a loss.

    sizes: number of elements of each layer's weight, multiples of 64. BLOCK float32 elements fill one block
    of the ring. bias: whether the layers have biases.
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
def opened(device: EmulatedDevice | None, model: nn.Module, **options: Any) -> Iterator[Any]:
    """Offload a model with parameters on the device, all else in RAM, and a ring of two blocks.

    Yields the runtime. device: None for a device whose memory the CPU can read, which has no ring. options:
    those of infinity.offload; precision is fp32 by default.
    """
    precision = options.pop("precision", infinity.Precision(compute="fp32"))
    budget = infinity.Budget(device=ROOMY, host=ROOMY)
    units = infinity.plan(model, adamw(model), budget=budget, precision=precision, device="cpu").layout.units
    ring = 0 if device is None else RING
    near = infinity.Budget(device=sum(unit.nbytes for unit in units) + ring, host=ROOMY)
    with (
        contextlib.nullcontext() if device is None else device.in_use(),
        infinity.offload(
            model, adamw(model), budget=near, precision=precision, device="cpu", **options
        ) as runtime,
    ):
        plan = runtime.plan
        assert plan.ring_bytes == ring
        homes = {home[kind] for home in plan.homes for kind in (Kind.GRADIENT, Kind.OPTIMIZER)}
        assert homes == {Tier.HOST} and plan.mirrored
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
    """Train Layers(*sizes, bias=bias) for one step without a ring, and return the results as `finished` does.

    The device's memory is RAM, which the CPU can read.
    """
    model = Layers(*sizes, bias=bias)
    with mock.patch.object(driver_module._emulation, "now", None), opened(None, model) as runtime:
        return stepped(model, runtime)


# --- room -----------------------------------------------------------------------------------------------


def job(start: int, end: int) -> RingJob:
    made = RingJob(torch.uint8, lambda landed: None)
    made.start, made.end = start, end
    return made


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 40),
    sizes=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([1, 2, 4])), max_size=30),
    returns=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_room_is_given_once_and_in_order(
    size: int, sizes: list[tuple[int, int]], returns: list[bool]
) -> None:
    taken: list[RingJob] = []
    back = iter(returns)
    for nbytes, alignment in sizes:
        start = placed(nbytes, alignment, size, taken)
        if start is not None:
            assert start % alignment == 0 and start + nbytes <= size
            assert all(each.end <= start or start + nbytes <= each.start for each in taken)
            taken.append(job(start, start + nbytes))
        else:
            assert taken or nbytes > size, "an empty ring has room for all that is no larger"
        while taken and next(back, False):
            taken.pop(0)


def test_room_for_several_is_looked_for_one_after_the_other() -> None:
    assert fit([4, 4], 1, 8, [])
    assert not fit([4, 4], 1, 8, [job(0, 1)])
    assert fit([4, 4, 4], 1, 8, []), "of more than the ring has, as much as it has"
    assert not fit([4, 4, 4], 1, 8, [job(0, 4)])
    assert fit([3], 1, 8, [job(3, 5)]) and not fit([4], 1, 8, [job(3, 5)])
    assert fit([], 1, 8, [job(0, 8)])


# --- what hooks and others wait for ---------------------------------------------------------------------


def test_hooks_return_while_copies_are_held() -> None:
    device, model = EmulatedDevice(1), Layers(BLOCK, BLOCK // 2)
    with opened(device, model) as runtime:
        with held(device, runtime):
            model(inputs()).backward()
        assert parity.differences(finished(model, runtime), expected(BLOCK, BLOCK // 2)) == []


def test_the_third_of_a_ring_of_two_waits_without_lock_and_gil() -> None:
    """A hook that waits for room in the ring holds neither lock nor GIL. Ctrl-C ends the backward after that
    gradient, and after zero_grad() the step can be repeated.
    """
    device, model = EmulatedDevice(2), Layers(*3 * [BLOCK], bias=False)
    with opened(device, model) as runtime:
        ring = runtime._components.gradients._ring
        seen: list[bool] = []

        def look() -> None:
            while len(ring._jobs) < 2 or not ring._changed._waiters:  # the worker waits for its copy
                time.sleep(0.001)
            with runtime._components.pager.lock:
                seen.append(True)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            device.let_go(runtime._components.store.link.streams["down"])

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
            assert runtime._components.gradients._ring._jobs
        del runtime
        gc.collect()


# --- what comes of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(BLOCK, BLOCK // 2), (BIG, 64), (3 * BIG + 64, 2 * BIG)])
def test_bytes_down_are_those_of_the_gradients(sizes: tuple[int, ...]) -> None:
    """Each backward copies exactly the bytes of its gradients to the host, and nothing else comes down."""
    device, model = EmulatedDevice(5), Layers(*sizes)
    nbytes = sum(each.numel() * each.element_size() for each in model.parameters())
    with opened(device, model) as runtime:
        for backwards in (1, 2):
            before = runtime.stats.edges[Edge.DEVICE_TO_HOST].bytes
            for _ in range(backwards):
                model(inputs()).backward()
            runtime.clip_grad_norm_(1.0)
            assert runtime.stats.edges[Edge.DEVICE_TO_HOST].bytes - before == backwards * nbytes
            runtime.optimizer.zero_grad()
        before = runtime.stats.edges[Edge.DEVICE_TO_HOST].bytes
        assert parity.differences(stepped(model, runtime), expected(*sizes)) == []
        assert runtime.stats.edges[Edge.HOST_TO_NVME].bytes == 0


def test_neighbours_come_down_in_one_copy() -> None:
    device, model = EmulatedDevice(6), Layers(*[64] * 20)
    with opened(device, model) as runtime:
        with held(device, runtime):
            model(inputs()).backward()
            before = runtime.stats.edges[Edge.DEVICE_TO_HOST].transfers
        runtime.clip_grad_norm_(1.0)
        assert runtime.stats.edges[Edge.DEVICE_TO_HOST].transfers - before <= 2, "of 40 gradients"


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
        if self.name == "infinity-ring":
            raise RuntimeError("can't start new thread")
        real(self)

    with opened(device, model) as runtime:
        loss = model(inputs())
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
            patch.setattr(threading.Thread, "start", start)
            loss.backward()
        with pytest.raises(ConfigError, match="zero_grad"):
            runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        model(inputs()).backward()
        runtime.optimizer.step()
