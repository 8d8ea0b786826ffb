"""Compares the CPU AdamW of infinity with torch's fused AdamW and with DeepSpeedCPUAdam, in turns.

A contender is an update by infinity in one format of masters and moments, or an update by an optimizer of
torch or DeepSpeed. Every round runs each contender once on the same memory. Before each update by infinity,
a memory-bandwidth test (infinity.cpu_adam.work.Stream) is run. It reads and writes the arrays that the update
reads and writes, computes nothing, and runs in two orders of access, of which the faster counts.
Ratios are taken within a round and their medians reported, because the bandwidth of a shared machine drifts.

    python benchmarks/cpu_adam.py [--elements N] [--repeats R] [--huge-pages] [--json] [--quick]

`--json`: the last line of stdout is one JSON object. `--quick`: a smoke test, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from machine_facts import machine_facts

from infinity.cpu_adam import CODE_BLOCK, AdamW, Segment, Stream, ThreadPool, Update
from infinity.formats.encodings import FIRST_SPAN, SECOND_SPAN, encode

GRANULES = (64, 256)  # an even number of streams in a round, so that their xor leaves contents unchanged
HYPER = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
MADV_HUGEPAGE = 14


class Page:
    """The arrays of gradients, parameters and moments that all contenders share."""

    def __init__(self, elements: int, huge_pages: bool) -> None:
        def empty(dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.empty(elements, dtype=dtype)
            if huge_pages:
                advise_huge_pages(tensor)
            return tensor

        torch.manual_seed(0)
        self.grad = empty(torch.bfloat16).copy_(torch.randn(elements) * 1e-3)
        self.grad32 = empty(torch.float32).copy_(self.grad)
        self.master = empty(torch.float32).normal_(std=0.02)
        self.copy = empty(torch.bfloat16).copy_(self.master)
        self.high = empty(torch.bfloat16).copy_(self.master)
        self.low = empty(torch.int16).zero_()
        self.first = empty(torch.float32).zero_()
        self.second = empty(torch.float32).fill_(1e-6)
        self.halves = {"first_moment": empty(torch.bfloat16).zero_()}
        self.halves["second_moment"] = empty(torch.bfloat16).fill_(1e-6)
        self.codes = {name: empty(torch.uint8) for name in self.halves}
        self.scales: dict[str, torch.Tensor] = {}
        for name, value, span in (("first", 0.0, FIRST_SPAN), ("second", 1e-6, SECOND_SPAN)):
            code, exponent = encode(torch.tensor([value]), span)
            self.codes[f"{name}_moment"].fill_(code[0])
            scale = torch.empty(-(-elements // CODE_BLOCK), dtype=torch.uint8)
            self.scales[f"{name}_scale"] = scale.fill_(exponent[0])


def advise_huge_pages(tensor: torch.Tensor) -> None:
    page = 4096
    start = -(-tensor.data_ptr() // page) * page
    length = (tensor.data_ptr() + tensor.nbytes - start) // page * page
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_HUGEPAGE)


def ours(pool: ThreadPool, page: Page) -> dict[str, tuple[Callable[[], object], Stream]]:
    """Make the updates by infinity. Returns name of an update -> (function that runs it, Stream).

    The Stream reads and writes the arrays that this update reads and writes, and computes nothing. Its
    seconds are the least that memory bandwidth allows for the update.
    """
    steps = iter(range(1, 10**9))

    def update(**arrays: torch.Tensor) -> Callable[[], object]:
        def run() -> object:
            step = next(steps)
            return pool.run(
                Update(
                    segments=[Segment(0, page.grad.numel(), seed=step)],
                    hypers=[AdamW(step=step, **HYPER)],  # type: ignore[arg-type]
                    **arrays,  # type: ignore[arg-type]
                )
            )

        return run

    moments = {"first_moment": page.first, "second_moment": page.second}
    split = {"grad": page.grad, "parameter": page.high, "remainder": page.low}

    def split_stream(kept: dict[str, torch.Tensor]) -> Stream:
        return Stream(read=[page.grad], read_write=[page.high, page.low, *kept.values()])

    return {
        "plain: bf16 grad, fp32 master, bf16 copy": (
            update(grad=page.grad, parameter=page.master, copy=page.copy, **moments),
            Stream(read=[page.grad], read_write=[page.master, *moments.values()], write=[page.copy]),
        ),
        "split: bf16 grad, bf16 + int16 master": (update(**split, **moments), split_stream(moments)),
        "fp32: fp32 grad, fp32 master": (
            update(grad=page.grad32, parameter=page.master, **moments),
            Stream(read=[page.grad32], read_write=[page.master, *moments.values()]),
        ),
        "bf16: split, bf16 moments": (update(**split, **page.halves), split_stream(page.halves)),
        # The stream leaves out the exponents, which are 0.06 bytes a parameter.
        "int8: split, int8 moments": (
            update(**split, **page.codes, **page.scales),
            split_stream(page.codes),
        ),
    }


def adopt(optimizer: torch.optim.Optimizer, page: Page, step: Any) -> None:
    """Have a peer's optimizer use the gradient and moments of `page`, which all contenders share.

    step: the number of updates that the optimizer takes as already done, in the type that it wants.
    """
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = page.grad32
    optimizer.state[parameter] = {"step": step, "exp_avg": page.first, "exp_avg_sq": page.second}


def peers(page: Page, quick: bool) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Build the optimizers of torch and DeepSpeed that infinity is compared with.

    quick: leave out DeepSpeed. Returns (name -> function that runs one update, name of an optimizer that is
    left out -> reason).
    """
    fused = torch.optim.AdamW([torch.nn.Parameter(page.master)], fused=True, **HYPER)  # type: ignore[arg-type]
    adopt(fused, page, torch.tensor(1.0))
    steps: dict[str, Callable[[], object]] = {"torch fused AdamW, fp32": fused.step}
    if quick:
        return steps, {"DeepSpeedCPUAdam": "left out by --quick"}
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        deepspeed = DeepSpeedCPUAdam([torch.nn.Parameter(page.master)], adamw_mode=True, **HYPER)
    except Exception as error:  # a missing package, compiler or header: whatever its JIT build raises
        return steps, {"DeepSpeedCPUAdam": f"{type(error).__name__}: {error}"}
    adopt(deepspeed, page, 1)

    def with_casts() -> None:
        page.grad32.copy_(page.grad)
        deepspeed.step()
        page.copy.copy_(page.master)

    steps["DeepSpeedCPUAdam, fp32"] = deepspeed.step
    steps["DeepSpeedCPUAdam, bf16 grad cast in, bf16 copy cast out"] = with_casts
    return steps, {}


def timed(step: Callable[[], object]) -> float:
    time.sleep(0.02)  # lets the threads of the previous contender stop spinning
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(pool: ThreadPool, page: Page, repeats: int, quick: bool) -> dict[str, Any]:
    mine = ours(pool, page)
    others, skipped = peers(page, quick)
    seconds: dict[str, list[float]] = {name: [] for name in (*mine, *others)}
    limits: dict[str, list[float]] = {name: [] for name in mine}
    for turn in range(-1, repeats):  # one to warm up
        for name, (step, shape) in mine.items():
            streams = [dataclasses.replace(shape, granule=g) for g in GRANULES]
            limit = min(timed(lambda each=each: pool.run(each)) for each in streams)
            took = timed(step)
            if turn >= 0:
                seconds[name].append(took)
                limits[name].append(limit)
        for name, step in others.items():
            took = timed(step)
            if turn >= 0:
                seconds[name].append(took)
    return summary(page.grad.numel(), mine, seconds, limits) | {"skipped": skipped}


def summary(
    elements: int,
    mine: dict[str, tuple[Callable[[], object], Stream]],
    seconds: dict[str, list[float]],
    limits: dict[str, list[float]],
) -> dict[str, Any]:
    def ratio(over: list[float], under: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(over, under, strict=True))

    results: dict[str, dict[str, float]] = {}
    for name, each in seconds.items():
        median = statistics.median(each)
        results[name] = {"median_s": median, "gparam_per_s": elements / median / 1e9}
        if name in mine:
            moved = mine[name][1].bytes_moved
            results[name] |= {
                "bytes_per_parameter": moved / elements,
                "gb_per_s": moved / median / 1e9,
                "stream_gb_per_s": moved / statistics.median(limits[name]) / 1e9,
                "of_stream": ratio(limits[name], each),
            }
    speedups = {
        f"{name} / {peer}": ratio(seconds[peer], seconds[name])
        for name in mine
        for peer in seconds
        if peer not in mine
    }
    return {"results": results, "speedups": speedups}


def show(report: dict[str, Any]) -> None:
    print(f"{report['machine']['cpu']}, {report['machine']['threads']} threads, {report['machine']['isa']}")
    print(f"{report['elements'] / 1e6:.0f} M parameters, median of {report['repeats']} rounds\n")
    for name, each in report["results"].items():
        line = f"{name:56} {each['median_s'] * 1e3:8.1f} ms {each['gparam_per_s']:6.2f} Gparam/s"
        if "of_stream" in each:
            line += f" {each['gb_per_s']:6.1f} GB/s, {each['of_stream']:.1%} of its stream"
        print(line)
    print()
    for name, speedup in report["speedups"].items():
        print(f"{speedup:5.2f} x  {name}")
    for name, reason in report["skipped"].items():
        print(f"skipped: {name}: {reason}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--huge-pages", action="store_true", help="ask for transparent huge pages")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    if options.quick:
        options.elements, options.repeats = 300_000, 2
    with ThreadPool() as pool:
        page = Page(options.elements, options.huge_pages)
        report = {
            "benchmark": "cpu_adam",
            "machine": machine_facts() | {"threads": pool.threads, "isa": pool.isa},
            "elements": options.elements,
            "repeats": options.repeats,
            "huge_pages": options.huge_pages,
        } | measure(pool, page, options.repeats, options.quick)
    show(report)
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
