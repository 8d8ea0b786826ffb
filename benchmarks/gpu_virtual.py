"""Training steps on a GPU that is not there: where the time of a step goes at given rates, and what it calls.

A decoder of the real size trains on the emulated device of the tests (csrc/test_driver), whose virtual clock
says how long copies, kernels and updates take; see [Note: virtual time] there. The package runs as on a GPU:
its plan, its hooks, its copies and chunks, its streams and events. But nothing is computed and no byte is
moved. Memory of any size is a few MiB that are mapped many times, operations on large tensors only make
results of the right shape, and the threads that update do nothing. So 7B parameters take seconds on a small
machine, and the times are exact however busy it is.

The clock knows bytes and FLOPs. It knows nothing of the time that Python, launches and waking of threads
take. For these the report counts calls, and gives the seconds of CPU that this machine took, less those that
the model alone takes.

    python benchmarks/gpu_virtual.py [--model 7b] [--batch 4] [--seq 1024] [--update lazy eager] [--json]

The rates are those of an H200 and its host, if no others are given.

All parameters are on the device with mirrors in RAM, gradients and states in RAM, as in ZeRO-Offload. Each
case is a way of updating; eager updates are not clipped. All figures are of one step, the mean of some. The
terms are seconds of the trainer's thread: calls of forward and backward, the wait until all gradients are in
RAM, the norm, and `step()` with zero_grad(). With lazy updates, the forward waits for them. `limit`: the time
if each phase were as long as its busiest resource's work. `predicted`: the least time that the plan predicts
at these rates, before a step is made. `busy`: seconds in which each resource worked. A
wait counts as 64 calls of cuEventQuery, however long it is.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import itertools
import json
import mmap
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "devices"))

from emulated_device import EmulatedDevice
from machine_facts import machine_facts
from virtual_clock import RESOURCES, SECOND, Rates, VirtualClock

import infinity
from infinity import _cpu_adam, api
from infinity.checkpoint.initial_pages import InitialPages
from infinity.device_update.kernels import UpdateKind
from infinity.lm.decoder import PRESETS, Decoder
from infinity.pages import store
from infinity.planning import twin_flow
from infinity.planning.fake_step import _flop_formulas, run_fake_step
from infinity.planning.machine_rates import MachineRates
from infinity.planning.plan import Plan
from infinity.planning.predict import Prediction, Work
from infinity.planning.residual_states import POLICIES, ResidualBytes
from infinity.tiers import Tier, arena, device
from infinity.tiers.pool import adopt

PRECISION = infinity.Precision(compute="bf16")
CALLS = (
    "cuMemcpyAsync",
    "cuEventRecord",
    "cuEventQuery",
    "cuStreamWaitEvent",
    "cuStreamQuery",
    "cuLaunchKernel",
    "cuEventCreate",
)
"""The calls of the driver that are counted: all that a step makes."""

_ALIASES = (torch.ops.aten._unsafe_view.default, torch.ops.aten.lift_fresh.default)
"""Operations that move no bytes, beside views."""
_LARGE = 1 << 16
"""Elements of the largest tensor on which operations are computed."""
_BEHIND = 16 << 20
"""Bytes of memory that stand for all memory."""


class Absent:
    """Memory of any size of which only _BEHIND bytes exist: these are mapped side by side."""

    def __init__(self, nbytes: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._unmap = libc.munmap
        self.nbytes = -(-nbytes // _BEHIND) * _BEHIND
        file = os.memfd_create("absent")
        try:
            os.ftruncate(file, _BEHIND)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            self._mapped = self.nbytes + _BEHIND, libc.mmap(None, self.nbytes + _BEHIND, 0, flags, -1, 0)
            self.address = -(-self._mapped[1] // _BEHIND) * _BEHIND
            for start in range(self.address, self.address + self.nbytes, _BEHIND):
                there = libc.mmap(start, _BEHIND, mmap.PROT_READ | mmap.PROT_WRITE, _FIXED_SHARED, file, 0)
                assert there == start, os.strerror(ctypes.get_errno())
        finally:
            os.close(file)

    def __del__(self) -> None:
        nbytes, start = self._mapped
        self._unmap(start, nbytes)


_NORESERVE = 0x4000
_FIXED_SHARED = 0x10 | mmap.MAP_SHARED


class NoArithmetic(TorchDispatchMode):
    """A mode in which operations on large tensors take virtual time on the compute stream and do nothing.

    Their results have the right shapes, and bytes that nobody has written. Matrix products and attention take
    the time of their FLOPs, and other operations that of the bytes which they read and write. The trainer's
    thread waits for operations in host RAM.
    """

    clock: VirtualClock
    host_ram = range(0)
    """The addresses of the host tier."""

    def __init__(self, emulated: EmulatedDevice, *, flops: int, memory: int) -> None:
        """flops, memory: FLOPs and bytes of the device in a second."""
        super().__init__()
        self._compute, self._rates = emulated.compute, (flops, memory)
        self._formulas = _flop_formulas()
        self.flops = self.nbytes = self.length = 0
        self.cpu_seconds = 0.0
        """CPU seconds of this mode itself, by which a real step is shorter."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func in _ALIASES:
            return func(*args, **kwargs)
        started = time.thread_time()
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return self._done(func, args, kwargs)
        finally:
            self.cpu_seconds += time.thread_time() - started

    def _done(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if all(each.numel() <= _LARGE for each in operands):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            result = args[0] if func._schema.returns else None
        else:
            there = {name: torch.device("meta") for name in ("device",) if name in kwargs}
            like = tree_map_only(torch.Tensor, _meta, (args, kwargs | there))
            result = tree_map_only(torch.Tensor, _real, func(*like[0], **like[1]))
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            work = formula(*args, **kwargs, out_val=result)
            self.works(work)
        else:
            results = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            nbytes = sum(
                min(each.numel() * each.itemsize, each.untyped_storage().nbytes())
                for each in (*operands, *results)
            )
            if operands[0].data_ptr() in self.host_ram:
                self.clock.wait_until(self.clock.host_works(nbytes))
            else:
                self.works(0, nbytes)
        return result

    def works(self, flops: int, nbytes: int = 0) -> None:
        """Queue work on the compute stream."""
        self.flops, self.nbytes = self.flops + flops, self.nbytes + nbytes
        length = flops * SECOND // self._rates[0] + nbytes * SECOND // self._rates[1]
        self.length += length
        self.clock.computes(self._compute, length)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _real(tensor: torch.Tensor) -> torch.Tensor:
    make = torch.empty_strided if tensor.numel() > _LARGE else _zeros
    return make(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")


def _zeros(size: Any, stride: Any, **options: Any) -> torch.Tensor:
    return torch.empty_strided(size, stride, **options).zero_()


class TimedTicket:
    """The ticket of a job that is not computed and ends at a time of the clock."""

    def __init__(
        self, pool: TimedPool, nbytes: int, sums: list[Any], priority: int = 1 << 62, elements: int = 0
    ) -> None:
        self.nbytes, self.priority, self.elements = nbytes, priority, elements
        self.hooks: Any = None
        self.number = 0
        """The copies around the job, and its number among them."""
        self.span: tuple[int, int] | None = None
        """When it begins and ends, in picoseconds, once that is known."""
        self._pool, self._sums = pool, sums

    def done(self) -> bool:
        self._pool.run(until=self._pool.clock.now)
        return self.span is not None and self.span[1] <= self._pool.clock.now

    def wait(self, timeout: float | None) -> bool:
        self._pool.run(until=self._pool.clock.now)
        self._pool.run(through=self)
        assert self.span is not None
        self._pool.clock.wait_until(self.span[1])
        return True

    def times(self) -> tuple[int, int] | None:
        return (self.span[0] // 1000, self.span[1] // 1000) if self.span and self.done() else None

    def block_sums(self) -> list[Any]:
        return self._sums


class TimedTickets:
    """The tickets of jobs that were submitted together."""

    def __init__(self, each: list[TimedTicket]) -> None:
        self.each = each

    def done(self) -> bool:
        return all([one.done() for one in self.each])

    def wait(self) -> None:
        for one in self.each:
            one.wait(None)


_ITEMS = {_cpu_adam.Dtype.F32: 4, _cpu_adam.Dtype.BF16: 2, _cpu_adam.Dtype.F16: 2}
_MOMENTS = {_cpu_adam.MomentFormat.F32: 4, _cpu_adam.MomentFormat.BF16: 2, _cpu_adam.MomentFormat.INT8: 1}
_MASTERS = {
    _cpu_adam.ParameterFormat.SPLIT: 4,
    _cpu_adam.ParameterFormat.PLAIN: 4,
    _cpu_adam.ParameterFormat.PLAIN_F32: 8,
    _cpu_adam.ParameterFormat.PLAIN_BF16: 6,
    _cpu_adam.ParameterFormat.PLAIN_F16: 6,
}
"""Bytes of an element, by its format. A master's copy counts."""


class TimedPool:
    """A pool that computes nothing: each job takes the time of the bytes that it moves in host memory.

    An array that is only written is read, too, because the CPU reads a line before it writes a part of it.
    `bytes` counts the bytes by kind of job.

    Jobs are done in the pool's order (csrc/cpu_adam/thread_pool.hpp), one at a time, by a thread that has a
    time of its own. What it does up to a time is decided once the trainer's thread has come so far, or waits
    for a job: until then, the trainer may submit jobs that go first.
    """

    def __init__(self, clock: VirtualClock, cpus: Any, isa: str, chunk: int, openmp: bool) -> None:
        self.clock = clock
        self.cpus, self.isa = cpus, "none"
        self.bytes: collections.Counter[str] = collections.Counter()
        self.jobs: collections.Counter[str] = collections.Counter()
        self._coming: collections.deque[TimedTicket] = collections.deque()
        self._startable: list[TimedTicket] = []
        """In the order of submission."""
        self._thread = ThreadPoolExecutor(1)

    def submit_updates(self, *, forms: Any, chosen: Any, priority: int, hooks: Any, **_: Any) -> TimedTickets:
        tickets, updated = [], {parameter for parameter, _, _ in chosen}
        for number, form in enumerate(forms):
            changed = _MASTERS[form.format] + _MOMENTS[form.moments] * sum(map(bool, form.places[5:7]))
            elements = sum(count for _, count, _, parameter in form.parts if parameter in updated)
            nbytes = elements * (_ITEMS[form.grad_dtype] + 2 * changed)
            ticket = TimedTicket(self, nbytes, [], priority, elements)
            ticket.hooks, ticket.number = hooks, number
            tickets.append(self._job("update", ticket))
        return TimedTickets(tickets)

    def submit_gradient(self, *, segments: Any, elements: int, **work: Any) -> TimedTicket:
        item = _ITEMS[work["grad_dtype"]]
        moved = item + 2 * item * bool(work["copy"])
        moved += 8 if work["write_accumulated"] else 4 * work["read_accumulated"]
        counts = [segment[1] for segment in segments]
        sums = [np.zeros(-(-count // _cpu_adam.BLOCK)) for count in counts]
        return self._job("gradient", TimedTicket(self, sum(counts) * moved, sums))

    def _job(self, kind: str, ticket: TimedTicket) -> TimedTicket:
        self.bytes[kind] += ticket.nbytes
        self.jobs[kind] += 1
        now = self.clock.now
        self.run(until=now)
        (self._startable if ticket.hooks is None else self._coming).append(ticket)
        self._idle(now)
        return ticket

    def run(self, until: int = 1 << 62, through: TimedTicket | None = None) -> None:
        """Do the jobs that begin before the time `until`, or all until `through` is done."""
        if through is None or through.span is None:
            self._thread.submit(self._run, until, through).result()

    def _idle(self, now: int) -> None:
        """Have a pool that has had nothing to do up to now begin no job before."""
        if len(self._coming) + len(self._startable) == 1:
            self._thread.submit(self.clock.wait_until, now).result()

    def _run(self, until: int, through: TimedTicket | None) -> None:
        while (self._coming or self._startable) and (through is None or through.span is None):
            while self._coming and self._come(until):
                self._startable.append(self._coming.popleft())
            if not self._startable or self.clock.now >= until:
                return
            if through in self._startable:
                job = through
            else:
                job = max(self._startable, key=lambda each: each.priority)
            self._startable.remove(job)
            begin, end = self.clock.now, self.clock.host_works(job.nbytes)
            self.clock.wait_until(end)
            if job.hooks is not None:
                job.hooks.after(job.number)
            job.span = begin, end

    def _come(self, until: int) -> bool:
        """Whether the first of the jobs that wait may begin. With nothing else to do, wait for it."""
        job = self._coming[0]
        if job.hooks.before(job.number):
            return True
        if self._startable or self.clock.now >= until:
            return False
        return any(job.hooks.before(job.number) for _ in range(80))

    def reap(self) -> None:
        pass

    def close(self) -> None:
        pass


class TimedKernels:
    """Kernels that compute nothing and take the time of the bytes of device memory that they move."""

    def __init__(self, mode: NoArithmetic) -> None:
        self._mode = mode

    def launch(
        self, name: str, warps: int, arguments: bytes, kinds: frozenset[UpdateKind] = frozenset()
    ) -> None:
        if name == "infinity_fresh_squares":
            self._mode.works(0, warps * _cpu_adam.BLOCK * PRECISION.compute_dtype.itemsize)
            return
        assert name == "infinity_update_pieces", name
        (kind,) = kinds
        changed = _MASTERS[_cpu_adam.ParameterFormat(kind.parameter)]
        changed += 2 * _MOMENTS[_cpu_adam.MomentFormat(kind.moments)]
        read = _ITEMS[_cpu_adam.Dtype(kind.gradient)]
        self._mode.works(0, warps * _cpu_adam.TILE * (read + 2 * changed))


class PackageCalls:
    """Counter of the calls of the package's own Python functions: in this thread, and elsewhere."""

    def __init__(self) -> None:
        self._root = str(Path(infinity.__file__).parent) + "/"
        self._here = threading.get_ident()
        self.here = self.elsewhere = 0

    @contextlib.contextmanager
    def elsewhere_too(self) -> Iterator[None]:
        """Count in all threads that Python starts, too."""
        threading.setprofile(self._event)
        try:
            yield
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count in this thread."""
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._root):
            if threading.get_ident() == self._here:
                self.here += 1
            else:
                self.elsewhere += 1


@dataclass(frozen=True)
class Case:
    """A way of updating."""

    update: str
    clip: float | None
    visits: bool = False
    """Whether chunks may visit the device to be updated there."""
    activations: str = "keep"
    """The policy of activations. Other than with "keep", the budget of the device has to be given."""

    def __str__(self) -> str:
        name = f"{self.update}, {'unclipped' if self.clip is None else f'clipped at {self.clip:g}'}"
        name += ", states visit the device" if self.visits else ""
        return name if self.activations == "keep" else f"{name}, activations: {self.activations}"


class Bench:
    """A decoder that trains on the emulated device, in virtual time."""

    def __init__(self, options: argparse.Namespace, case: Case) -> None:
        self.options, self.case = options, case
        self.rates = Rates(options.link, options.link, options.memory, options.ram)
        self.emulated = EmulatedDevice(0)
        self.pool: TimedPool | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[infinity.Runtime]:
        """Offload the decoder. Virtual time begins meanwhile."""
        decoder = PRESETS[self.options.model].decoder
        with torch.device("meta"):
            self.model = Decoder(decoder)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
        self.mode = NoArithmetic(self.emulated, flops=self.options.flops, memory=self.options.memory)
        with contextlib.ExitStack() as cleanup:
            cleanup.enter_context(warnings.catch_warnings())
            cleanup.callback(self.emulated.reset, 0)
            cleanup.enter_context(self.emulated.in_use())
            for module in (arena, device):
                cleanup.enter_context(mock.patch.object(module, "map_ram", self._absent))
            cleanup.enter_context(mock.patch.object(_cpu_adam, "Pool", self._make_pool))
            cleanup.enter_context(mock.patch.object(_cpu_adam, "UpdateForm", SimpleNamespace))
            timed = TimedKernels(self.mode)
            cleanup.enter_context(mock.patch.object(store, "kernels_that_measure", lambda device: timed))
            cleanup.enter_context(mock.patch.object(store, "Kernels", lambda device, kinds: timed))
            cleanup.enter_context(mock.patch.object(InitialPages, "fill", self._start))
            there = SimpleNamespace(has_kernels=lambda device: True)  # to measure, not to update
            cleanup.enter_context(mock.patch.object(store, "twin_flow", there))
            if self.case.visits:
                cleanup.enter_context(mock.patch.object(twin_flow, "has_kernels", there.has_kernels))
                cleanup.enter_context(mock.patch.object(api, "refusal", lambda device, kinds: None))
            budget = self._budget(optimizer)
            runtime = infinity.offload(self.model, optimizer, budget=budget, **self._facts)
            warnings.filterwarnings("ignore", "Saved activations take", UserWarning)
            with runtime:
                if self.options.device is None:
                    check(runtime.plan)
                # As on a GPU, the trainer's thread does not take part in updates.
                runtime._components.scheduler._shares_cpu = False
                # Nor does a GPU's driver check the order of accesses, about which it is told otherwise.
                runtime._components.store.link.checked = False
                yield runtime

    @property
    def _facts(self) -> dict[str, Any]:
        tokens = torch.zeros(self.options.batch, self.options.seq, dtype=torch.int64)
        known = {} if self.case.activations == "keep" else {"example_inputs": (tokens, tokens)}
        return {
            "precision": PRECISION,
            "device": "cpu",
            "update": self.case.update,
            "accumulation": 1,
            "activations": self.case.activations,
        } | known

    def _budget(self, optimizer: torch.optim.Optimizer) -> infinity.Budget:
        """The given budgets, or those with which the device has room for all parameters and nothing else."""
        if self.options.device is not None:
            return infinity.Budget(device=self.options.device, host=self.options.host)
        near, before = 1 << 40, 0
        while near != before:  # other bytes on the device follow from the budget
            budget = infinity.Budget(device=near, host=self.options.host)
            plan = infinity.plan(self.model, optimizer, budget=budget, **self._facts)
            before = near
            homes = plan.home_bytes[Tier.DEVICE] + plan.mirror_bytes
            near = sum(unit.nbytes for unit in plan.layout.units) + plan.device_bytes - homes
        return budget

    def _start(self, *_: Any) -> None:
        """Start the clock, once the tiers are open and have tried their copies, in place of filling pages."""
        self.clock = self.mode.clock = VirtualClock(self.rates, copies=False)

    def _absent(self, tier: Tier, nbytes: int, **_: Any) -> Any:
        """Make a region of memory that is not there; stands in for infinity.tiers.tier.map_ram."""
        memory = Absent(nbytes)
        if tier is Tier.HOST:
            self.mode.host_ram = range(memory.address, memory.address + memory.nbytes)
        return adopt(memory.address, nbytes, torch.device("cpu"), memory)

    def _make_pool(self, *arguments: Any) -> TimedPool:
        self.pool = TimedPool(self.clock, *arguments)
        return self.pool


def check(plan: Plan) -> None:
    """Assert that parameters are mirrored, and that all other pages are in RAM."""
    assert len(plan.mirrored) == len(plan.homes), plan
    assert plan.home_bytes[Tier.DEVICE] == 0 == plan.nvme_bytes, plan


def plain_seconds(options: argparse.Namespace) -> dict[str, float]:
    """CPU seconds that forward and backward of the model alone take in this thread, without infinity."""
    emulated = EmulatedDevice(0)
    mode = NoArithmetic(emulated, flops=options.flops, memory=options.memory)
    mode.clock = VirtualClock(Rates(options.link, options.link, options.memory, options.ram))
    with torch.device("meta"):
        model = Decoder(PRESETS[options.model].decoder).to(PRECISION.compute_dtype)
    model.to_empty(device="cpu")  # nobody writes to this memory
    tokens = torch.zeros(options.batch, options.seq, dtype=torch.int64)
    found: dict[str, float] = {}
    with mode:
        for _ in range(_WARM_UP):
            model.zero_grad()
            started = time.thread_time() - mode.cpu_seconds
            loss = model(tokens, tokens)
            between = time.thread_time() - mode.cpu_seconds
            loss.backward()
            ended = time.thread_time() - mode.cpu_seconds
            found = {"forward": between - started, "backward": ended - between}
    emulated.reset(0)
    return found


CASES = {
    "lazy": ("lazy", False),
    "eager": ("eager", False),
    "lazy-visits": ("lazy", True),
    "visits": ("eager", True),
    "speculative": ("speculative", False),
}
"""Name of a case -> (when updates run, whether the device computes a share of them). Speculative updates need
about twice the RAM; see --host.
"""
TERMS = ("forward", "backward", "drain", "norm", "step")
_WARM_UP, _BALANCED = 2, 10
"""Number of first steps, which are not measured; and where states visit the device, until their share has
settled.
"""


class Meter:
    """What has been done so far, for differences."""

    def __init__(self, bench: Bench, runtime: infinity.Runtime) -> None:
        assert bench.pool is not None
        self.now = bench.clock.now
        self.others = {"other threads": time.process_time() - time.thread_time()}
        self.edges = {edge.value: each.bytes for edge, each in runtime.stats.edges.items() if each.bytes}
        self.done = {call: bench.emulated.count(call) for call in CALLS}
        self.done |= {f"{kind} jobs": count for kind, count in bench.pool.jobs.items()}
        self.done |= {f"{kind} bytes": nbytes for kind, nbytes in bench.pool.bytes.items()}
        self.done |= {"flops": bench.mode.flops, "device bytes": bench.mode.nbytes}


def trained(bench: Bench, runtime: infinity.Runtime, plain: dict[str, float], work: Work) -> dict[str, Any]:
    """Train some steps, and return the figures of a step. One more step counts the calls of Python.

    plain: the result of `plain_seconds`, which is subtracted. work: of the model's operations, to predict.
    """
    clock, calls = bench.clock, PackageCalls()
    tokens = torch.zeros(bench.options.batch, bench.options.seq, dtype=torch.int64)
    gradients = runtime._components.gradients
    assert gradients is not None
    marks: list[tuple[float, ...]] = []

    def mark() -> None:
        marks.append((clock.now, bench.mode.length, calls.here, time.thread_time() - bench.mode.cpu_seconds))

    def step() -> None:
        mark()
        loss = bench.model(tokens, tokens)
        mark()
        loss.backward()
        mark()
        gradients.await_arrivals()
        mark()
        if bench.case.clip is not None:
            runtime.clip_grad_norm_(bench.case.clip)
        mark()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()

    def terms(kind: int, steps: int) -> dict[str, float]:
        """The mean differences between marks, by the name of the term that ends with the later mark."""
        found = [later[kind] - earlier[kind] for earlier, later in itertools.pairwise(marks)]
        return {name: sum(found[index :: len(TERMS)]) / steps for index, name in enumerate(TERMS)}

    with bench.mode, calls.elsewhere_too():
        for _ in range(_BALANCED if bench.case.visits else _WARM_UP):
            step()
        marks.clear()
        steps, earlier = bench.options.steps, Meter(bench, runtime)
        for _ in range(steps):
            step()
        mark()
        later = Meter(bench, runtime)
        times, computed, cpu_seconds = terms(0, steps), terms(1, steps), terms(3, steps)
        marks.clear()
        elsewhere = calls.elsewhere
        with calls.counted():
            step()
        mark()
        called = terms(2, 1)

    def each(name: str) -> dict[str, Any]:
        """The differences of the meters, of a step."""
        before, after = getattr(earlier, name), getattr(later, name)
        return {key: (after[key] - before.get(key, 0)) / steps for key in after}

    done, edges = each("done"), each("edges")
    return {
        "case": str(bench.case),
        "visiting_share": runtime.stats.visiting_share,
        "seconds": (later.now - earlier.now) / steps / SECOND,
        "limit": limit(bench, runtime.plan, done["update bytes"], edges, computed),
        "predicted": predicted(bench.options, runtime.plan, work).least,
        "terms": {name: time / SECOND for name, time in times.items()},
        "busy": {name: clock.busy(name, earlier.now, later.now) / steps / SECOND for name in RESOURCES},
        "gpu": {name: computed[name] / SECOND for name in ("forward", "backward")},
        "edges": edges,
        "page_bytes": sum(unit.nbytes for unit in runtime.plan.layout.units),
        "done": done,
        "python_calls": called | {"other threads": calls.elsewhere - elsewhere},
        "cpu_seconds": {name: spent - plain.get(name, 0) for name, spent in cpu_seconds.items()}
        | each("others"),
    }


def limit(
    bench: Bench, plan: Plan, updates: float, edges: dict[str, float], computed: dict[str, float]
) -> float:
    """The seconds of a step whose phases are each as long as their busiest resource's work.

    updates: bytes of host memory that updates move. edges: bytes over the link. computed: the device's time
    in forward and backward. Lazy updates begin when all gradients have come down, and overlap with the next
    forward. What then comes down are the results of visits, and what leaves of the saved tensors, which come
    back in backward.
    """
    options = bench.options
    saved = plan.residuals.room or ResidualBytes()
    down, up = edges["device->host"] - saved.down, edges["host->device"] - saved.up
    forward, backward = computed["forward"] / SECOND, computed["backward"] / SECOND
    updating = (updates + up) / options.ram
    if bench.case.update != "lazy":
        return max(
            (up + saved.up) / options.link,
            (down + saved.down) / options.link,
            forward + backward,
            updating + down / options.ram,
        )
    gradients = sum(plan.gradient_bytes)
    results = max(0, down - gradients) / options.link
    updating += results * options.link / options.ram
    return max(gradients / options.link, saved.up / options.link, backward) + max(
        up / options.link, results + saved.down / options.link, forward, updating
    )


def work_of(options: argparse.Namespace) -> Work:
    """The work of the model's operations in a step."""
    with torch.device("meta"):
        model = Decoder(PRESETS[options.model].decoder)
        tokens = torch.zeros(options.batch, options.seq, dtype=torch.int64)
    step = run_fake_step(model, (tokens, tokens), precision=PRECISION, device=torch.device("cpu"), train=True)
    return step.work


def predicted(options: argparse.Namespace, plan: Plan, work: Work) -> Prediction:
    """What the plan predicts at the options' rates, for a GPU in place of the emulated device."""
    rates = MachineRates(
        host_stream=options.ram,
        link=options.link,
        flops={PRECISION.compute_dtype: options.flops},
        compute_memory=options.memory,
    )
    found = replace(plan, device=torch.device("cuda"), speeds=rates, work=work).predict()
    assert found is not None
    return found


def show(row: dict[str, Any]) -> None:
    """Print a case's figures as a table."""
    seconds, least = row["seconds"], row["limit"]
    share = row["visiting_share"]
    visits = "" if share is None else f", {share:.0%} of the elements updated there"
    guess = f"{row['predicted']:.3f} s predicted"
    times = f"{seconds / least:.2f} times the limit of {least:.3f} s"
    print(f"\n{row['case']}{visits}: {seconds:.3f} s, {times}, {guess}")
    for title, figures, form in (
        ("trainer's thread, s", row["terms"], ".3f"),
        ("busy, s", row["busy"], ".3f"),
        ("GPU alone, s", row["gpu"], ".3f"),
        ("bytes over edges", row["edges"], ",.0f"),
        ("done", row["done"], ",.0f"),
        ("Python calls of the package", row["python_calls"], ",.0f"),
        ("CPU seconds of this machine beyond the model's own", row["cpu_seconds"], ".3f"),
    ):
        print(f"  {title}: {', '.join(f'{name} {each:{form}}' for name, each in figures.items())}")


def _billions(text: str) -> int:
    return round(float(text) * 10**9)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=PRESETS, default="7b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument(
        "--device", help="budget of the device, by default what all parameters take if activations are kept"
    )
    parser.add_argument("--host", default="94GiB", help="budget of host memory")
    parser.add_argument("--update", choices=CASES, nargs="+", default=[*CASES][:2])
    parser.add_argument(
        "--activations", choices=POLICIES[1:], nargs="+", default=["keep"], help="see --device"
    )
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of gradients")
    parser.add_argument("--steps", type=int, default=3, help="number of measured steps")
    parser.add_argument("--link", type=_billions, default=50 * 10**9, help="GB/s of the link, each way")
    parser.add_argument("--ram", type=_billions, default=120 * 10**9, help="GB/s of host memory")
    parser.add_argument("--memory", type=_billions, default=4000 * 10**9, help="GB/s of the device's memory")
    parser.add_argument("--flops", type=_billions, default=700_000 * 10**9, help="GFLOP/s of the device")
    parser.add_argument("--quick", action="store_true", help="a smoke test: the smallest model, few tokens")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args(argv)
    if options.quick:
        options.model, options.batch, options.seq, options.host = "10m", 1, 64, "1GiB"
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    rows, plain, work = [], plain_seconds(options), work_of(options)
    for update in options.update:
        when, visits = CASES[update]
        for activations in options.activations:
            case = Case(when, None if when == "eager" else options.clip, visits, activations)
            bench = Bench(options, case)
            with bench.opened() as runtime:
                rows.append(trained(bench, runtime, plain, work))
            show(rows[-1])
    if options.json:
        print(json.dumps({"machine": machine_facts(), "settings": vars(options), "results": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
