"""Tests of the headroom: GPU memory that a plan leaves to torch for cuBLAS's workspaces and for allocator
segments that are not full.

The workspaces must have the sizes that torch's sources give. Training steps must fit into the memory that a
plan gives to pages plus the memory that it reserves. This is tested in a simulation of torch's allocator
and, where there is a GPU, on the GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from caching_allocator import CachingAllocator, OutOfMemory
from homes import needs_cuda

from infinity.accumulation.vertical import Accumulator
from infinity.config import Budget, Precision, format_size
from infinity.errors import BudgetError
from infinity.formats.optimizer_rules import Rule
from infinity.lm.decoder import PRESETS, Decoder
from infinity.planning import fake_step
from infinity.planning.headroom import NO_HEADROOM, Headroom, Reserve, segment, workspace
from infinity.planning.planner import Available, make_plan
from infinity.planning.residual_states import KEEP
from infinity.tiers import Tier

MIB = 1 << 20
HOPPER = (9, 0)


@pytest.mark.parametrize(
    ("capability", "variables", "expected"),
    [
        ((8, 0), {}, 8 * MIB + 128 * 1024),
        ((8, 9), {}, 8 * MIB + 128 * 1024),
        (HOPPER, {}, 32 * MIB),
        ((10, 0), {}, 32 * MIB),
        ((12, 0), {}, 32 * MIB),
        (HOPPER, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, 32 * MIB),
        (HOPPER, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, 128 * 1024),
        ((8, 0), {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, 8 * MIB + 128 * 1024),
        (HOPPER, {"CUBLAS_WORKSPACE_CONFIG": "what?"}, 32 * MIB),
        (HOPPER, {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, 32 * MIB),
        (HOPPER, {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, 33 * MIB),
        (
            HOPPER,
            {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0", "CUBLASLT_WORKSPACE_SIZE": "2048"},
            34 * MIB,
        ),
    ],
)
def test_the_workspace_of_a_thread(capability: tuple[int, int], variables: Any, expected: int) -> None:
    assert workspace(capability, variables) == expected


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
    ],
)
def test_a_segment_is_the_allocator_s(nbytes: int, expected: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(nbytes)
    assert segment(nbytes) == expected == allocator.reserved


def test_the_cpu_has_that_of_the_heap() -> None:
    heap = Headroom.of(torch.device("cpu"))
    assert (heap.beside(0), heap.beside(800), heap.one_more(800)) == (0, 200, 200)
    assert heap.beside(4 * MIB) == MIB and heap.beside(8 * MIB) == 16 * MIB
    assert heap.beside(12 * MIB) == heap.beside(240 * MIB) == 30 * MIB
    assert heap.beside(1024 * MIB) == 128 * MIB
    assert Reserve.of(8 * 4096, 4096, unknown=None, headroom=heap).nbytes == 12 * 4096
    assert Reserve.of(8 * 4096, 4096, unknown=None, headroom=heap).least == 2 * 4096
    for nbytes in (0, 4096, 5 * MIB, 20 * MIB, 44 * MIB, 300 * MIB, 1024 * MIB):
        live = heap.live_within(nbytes)
        assert live + heap.beside(live) <= nbytes < live + 8 + heap.beside(live + 8)
    assert NO_HEADROOM.beside(1 << 40) == NO_HEADROOM.one_more(1 << 40) == 0
    assert Reserve.of(4096, 0, unknown=None).nbytes == 4096


def recorded(model: Decoder, batch: int, seq: int) -> tuple[int, list[tuple[int, int | None]]]:
    """Run a training step on tensors without data and return (bytes at the peak, log of allocations).

    The log is in order of time. An allocation is a pair (number of the new storage, its bytes), and the end
    of that storage is a pair (the same number, None).
    """
    log: list[tuple[int, int | None]] = []
    real = fake_step._Watch._made

    def made(watch: Any, storage: torch.UntypedStorage) -> None:
        number = len(log)
        log.append((number, storage.nbytes()))
        weakref.finalize(storage, log.append, (number, None)).atexit = False
        real(watch, storage)

    tokens = torch.zeros(batch, seq, dtype=torch.int64, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_step._Watch, "_made", made)
        found = fake_step.run_fake_step(
            model, (tokens, tokens), precision=Precision(), device=torch.device("cpu"), train=True
        )
    assert found.activations is not None
    return found.activations, log


def runs(log: list[tuple[int, int | None]], limit: int, *, pages: int, threads: int, each: int) -> bool:
    """Return whether two equal training steps fit into `limit` bytes of a simulated caching allocator.

    log: a step's allocations, as `recorded` returns them. pages: bytes of pages, allocated before the steps.
    threads: number of threads, each of which allocates a workspace of `each` bytes in the first step.
    """
    allocator, live = CachingAllocator(limit), {}
    try:
        allocator.allocate(pages)
        for step in range(2):
            for number, nbytes in log:
                if nbytes is not None:
                    live[step, number] = allocator.allocate(nbytes)
                    if step == 0 and number in range(threads):  # each thread's first product
                        allocator.allocate(each)
                elif (step, number) in live:
                    allocator.release(*live.pop((step, number)))
    except OutOfMemory:
        return False
    return True


@pytest.mark.sweep
@pytest.mark.parametrize("step", [("10m", 1, 32), ("10m", 8, 256), ("124m", 4, 512), ("7b", 1, 512)])
@pytest.mark.parametrize("pages", [4096, 7 * MIB, 123 * MIB + 4096])
@pytest.mark.parametrize("capability", [(8, 0), HOPPER])
def test_steps_fit_a_model_of_the_allocator(
    step: tuple[str, int, int], pages: int, capability: tuple[int, int], logs: Any
) -> None:
    activations, log = logs(*step)
    headroom = Headroom.for_cuda(capability, {})
    reserve = Reserve.of(activations, 0, unknown=None, headroom=headroom)
    workspaces = {"threads": 2, "each": headroom.workspace}
    assert runs(log, pages + reserve.nbytes, pages=pages, **workspaces)
    if pages > 100 * MIB:  # and without the headroom they do not
        assert not runs(log, pages + activations, pages=pages, **workspaces)


@pytest.fixture(scope="module")
def logs() -> Any:
    known: dict[Any, Any] = {}

    def find(preset: str, batch: int, seq: int) -> Any:
        if (preset, batch, seq) not in known:
            with torch.device("meta"):
                model = Decoder(PRESETS[preset].decoder)
            known[preset, batch, seq] = recorded(model, batch, seq)
        return known[preset, batch, seq]

    return find


def test_a_micro_batch_more_needs_a_workspace_more() -> None:
    """One more micro-batch adds a workspace of cuBLAS (32 MiB on Hopper) to the headroom, and the share of
    its activations that is lost to fragmentation.

    Micro-batches that are computed together have a thread each, and each thread has a workspace.
    """
    headroom = Headroom.for_cuda(HOPPER, {})
    assert headroom.one_more(0) == 32 * MIB
    with_two = headroom.beside(80 * MIB)
    assert headroom.beside(160 * MIB) + headroom.one_more(0) == with_two + headroom.one_more(80 * MIB)


@pytest.mark.parametrize("activations", [None, 0, 30 * MIB])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_what_torch_takes_on_a_gpu_is_in_the_plan(capability: tuple[int, int], activations: Any) -> None:
    """The headroom is part of the plan's reserved bytes, printed table, smallest budgets and BudgetError."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    headroom = Headroom.for_cuda(capability, {})
    rule = Rule.of(torch.optim.AdamW(model.parameters()))

    def made(budget: Budget, headroom: Headroom = headroom) -> Any:
        return make_plan(
            model,
            rule,
            budget=budget,
            precision=Precision(),
            device=torch.device("cuda", 0),
            available=Available(device=512 * MIB, host=64 * MIB, headroom=headroom),
            activations=activations,
        )

    found, without = made(Budget()), made(Budget(), NO_HEADROOM)
    assert found.headroom == headroom.beside(activations or 0) >= 2 * headroom.workspace
    assert found.reserved - without.reserved - found.headroom in range(4096)
    row = found.rows()[0]
    leaving = found.leaving_bytes - without.leaving_bytes  # depends on the room that is left
    assert row["working"] - without.rows()[0]["working"] - leaving == found.headroom
    shown = sum(row[each] or 0 for each in row if each not in ("tier", "budget"))
    hidden = 0 if activations is not None else row["budget"] // 4  # kept for activations of unknown size
    assert row["budget"] - shown - hidden in range(4096)
    assert f"{format_size(found.headroom)} are torch's" in str(found)
    assert "torch's" not in str(without)
    least = found.smallest[Tier.DEVICE]
    assert least - found.headroom >= without.smallest[Tier.DEVICE]
    host = found.smallest[Tier.HOST]
    assert made(Budget(device=least, host=host)).device_bytes > 0
    with pytest.raises(BudgetError) as caught:
        made(Budget(device=least - 4096, host=host))
    assert (caught.value.tier, caught.value.needed) == ("device", least)


class _PlanOfTheGpu:
    """A fake plan for a GPU: 1 GiB of the device budget is left beside everything that is planned there,
    and a micro-batch's activations take 100 MiB.
    """

    activations = 100 * MIB
    computes_in = Tier.DEVICE
    device = torch.device("cuda", 0)
    residuals = KEEP
    tile_sum_bytes = 0

    def free(self, tier: Tier) -> int:
        return {Tier.DEVICE: 1024 * MIB}[tier]


def test_as_many_micro_batches_go_together_as_have_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Headroom, "of", lambda device: Headroom.for_cuda(HOPPER, {}))
    plan: Any = _PlanOfTheGpu()
    nothing: Any = None
    calls = {"add": nothing, "expect": nothing, "ended": nothing}
    together = Accumulator(torch.nn.Linear(1, 1), plan, nothing, nothing, **calls)._room()
    assert together == 1 + int(1024 / (100 + 100 / 8 + 32))


class TestAttentionScratch:
    """Tests that the peak of a simulated step counts the scratch memory of CUDA's attention backward.

    The scratch memory is counted while the kernel runs, and other kernels have none.
    """

    @pytest.mark.parametrize("name", ["flash_attention_backward", "flash_attention_for_cpu_backward"])
    def test_it_is_counted_while_the_kernel_runs(self, name: str) -> None:
        """Also for the CPU's operator, which stands for that of CUDA where torch has no CUDA device."""
        watch = fake_step._Watch(scratch=True)
        watch.now = 7
        shape = (2, 4, 128, 64)
        backward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
        with fake_step.fake_tensor.FakeTensorMode():
            gradients = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
            watch._scratch(backward, (*gradients, None))
            assert (watch.now, watch.peak) == (7, 7 + 3 * 4 * 2 * 4 * 128 * 64)
            watch._scratch(torch.ops.aten.mm.default, gradients[0])
        assert watch.peak == 7 + 3 * 4 * 2 * 4 * 128 * 64

    def test_the_cpu_s_kernels_have_none(self) -> None:
        watch = fake_step._Watch()
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        watch._scratch(backward, (torch.empty(8), torch.empty(8), torch.empty(8)))
        assert watch.peak == 0


def run_with_usual_workspaces(*arguments: str) -> None:
    """Run Python code in a process of its own, and assert that it exits with 0.

    arguments: the code, then the arguments that it finds in sys.argv. The process has cuBLAS's default
    workspaces, not those that the tests' environment sets.
    """
    variables = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, "-c", *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


_STEPS = """
import sys, torch, infinity
from infinity.planning.headroom import Headroom
from infinity.lm.decoder import Decoder, DecoderConfig
from infinity.tiers import Tier

device = torch.device("cuda", 0)
model = Decoder(DecoderConfig(width=512, layers=6, heads=8, hidden=1472))
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(256, (8, 512), device=device)
given = {"example_inputs": (tokens, tokens)} if sys.argv[1] == "known" else {}
whole = infinity.plan(model, optimizer, device=device, budget=infinity.Budget(host="4GiB"), **given)
least = whole.smallest[Tier.DEVICE]
if not given:
    least = max(least, 4 * infinity.plan(
        model, optimizer, device=device, budget=infinity.Budget(host="4GiB"), example_inputs=(tokens, tokens)
    ).reserved)
with infinity.offload(
    model, optimizer, device=device, budget=infinity.Budget(device=least, host="4GiB"), **given
) as runtime:
    torch.cuda.empty_cache()  # of what the plan timed
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        loss = model(tokens, tokens)
        loss.backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
    torch.cuda.synchronize()
    print(runtime.plan, torch.cuda.max_memory_reserved(), least)
    assert loss.isfinite()
    assert torch.cuda.max_memory_allocated() <= least
"""


@needs_cuda
@pytest.mark.parametrize("activations", ["known", "unknown"])
def test_steps_run_in_the_smallest_budget_with_cuda(activations: str) -> None:
    run_with_usual_workspaces(_STEPS, activations)


@needs_cuda
def test_a_product_takes_the_workspace_that_is_said_with_cuda() -> None:
    """The first matrix product of each thread allocates a workspace of the predicted size."""
    code = """
import os, threading, torch
from infinity.planning.headroom import workspace
a = torch.ones(64, 64, device="cuda")
def product():
    torch.mm(a, a)
    torch.cuda.synchronize()
found = []
for work in (product, lambda: (lambda t: (t.start(), t.join()))(threading.Thread(target=product))):
    before = torch.cuda.memory_allocated()
    work()
    found.append(torch.cuda.memory_allocated() - before)
expected = workspace(torch.cuda.get_device_capability(), os.environ)
print(found, expected)
assert found[0] in (0, expected) and max(found) == expected, (found, expected)
"""
    run_with_usual_workspaces(code)
