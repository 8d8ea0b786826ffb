"""GPU probe: what only a GPU can tell, one command each, so that a broken context ends one of them alone.

    python benchmarks/gpu_probe.py facts
    python benchmarks/gpu_probe.py driver
    python benchmarks/gpu_probe.py host 1 8 32 88                      # GiB to page-lock
    python benchmarks/gpu_probe.py kernels
    python benchmarks/gpu_probe.py step 7b --device 48GiB --host 94GiB --clip 1.0

facts: versions, sizes, and limits of memory. driver: copies in their order, and microseconds of driver calls.
host: seconds to page-lock RAM, and rates of the link. kernels: rates of updates on the device. step: the
terms of a training step. Every command prints lines of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from machine_facts import machine_facts

import infinity
from infinity.cpu_adam import BLOCK, AdamW, Segment, Update, default_cpus
from infinity.device_update.kernels import Kernels, find_nvrtc, kinds_of
from infinity.device_update.table import DeviceChunk, WorkspaceSize
from infinity.device_update.update import DeviceUpdates, ParameterUpdate
from infinity.planning.headroom import Headroom
from infinity.system import machine
from infinity.tiers.arena import HostArena
from infinity.tiers.device import available_bytes
from infinity.tiers.driver import Event, cuda_driver

CUDA = torch.device("cuda", 0)
GIB = 1 << 30
SETTINGS = ("driver_version", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current")


def facts() -> Iterator[dict[str, Any]]:
    gpu, (free, total) = torch.cuda.get_device_properties(CUDA), torch.cuda.mem_get_info(CUDA)
    nvrtc = find_nvrtc()
    yield machine_facts() | {
        "gpu": gpu.name,
        "gpu_gib": round(gpu.total_memory / GIB, 1),
        "cuda": torch.version.cuda,
        "nvrtc": None if nvrtc is None else nvrtc.version,
        "free": free,
        "total": total,
        "device_budget": available_bytes(CUDA),
        "headroom": asdict(Headroom.of(CUDA)),
        "update_cpus": len(default_cpus()),
        "memlock": machine.memlock_limit(),
        "huge_pages": machine.transparent_huge_pages(),
    }
    asked = ["nvidia-smi", f"--query-gpu={','.join(SETTINGS)}", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip().split(", ")
    yield dict(zip(SETTINGS, told, strict=False))
    torch.cuda.set_per_process_memory_fraction(0.25, CUDA)
    try:
        torch.empty(total // 3, dtype=torch.uint8, device=CUDA)
        yield {"cap": "torch's limit does not hold"}
    except torch.OutOfMemoryError:
        yield {"cap": "holds"}


def driver() -> Iterator[dict[str, Any]]:
    """A copy up, a kernel and a copy down that wait for each other by events; and times of driver calls."""
    cuda, nbytes = cuda_driver(0), 256 << 20
    here = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).pin_memory()
    back, there = torch.empty_like(here).pin_memory(), torch.empty(nbytes, dtype=torch.uint8, device=CUDA)
    up, down = cuda.stream(priority=1), cuda.stream()
    compute = cuda.foreign(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    begun = up.record(timing=True)
    arrived = up.transfer(there.data_ptr(), here.data_ptr(), nbytes, piece=64 << 20, timing=True)
    compute.wait(arrived)
    there.add_(1)
    down.transfer(back.data_ptr(), there.data_ptr(), nbytes, after=compute.record()).synchronize()
    seconds = arrived.milliseconds_since(begun) / 1e3
    yield {"ordered": bool(torch.equal(back, here + 1)), "up_gb_s": nbytes / seconds / 1e9}
    event = compute.record()
    event.synchronize()
    calls: dict[str, Callable[[], object]] = {
        "record": compute.record,
        "query": event.done,
        "wait": lambda: compute.wait(event),
        "current_stream": lambda: torch.cuda.current_stream(0).cuda_stream,
        "copy on the device": lambda: there[:64].copy_(there[64:128]),
    }
    yield {f"{name}_us": 1e6 * _seconds(call) for name, call in calls.items()}


def _seconds(call: Callable[[], object], times: int = 2000) -> float:
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def host(sizes: list[float]) -> Iterator[dict[str, Any]]:
    """Page-lock each number of GiB, and copy from and to this RAM, one way at a time and both at once."""
    cuda = cuda_driver(0)
    up, down = cuda.stream(), cuda.stream()
    for gib in sizes:
        nbytes = int(gib * GIB) // 4096 * 4096
        part = min(nbytes // 2, GIB)
        there = torch.empty(2 * part, dtype=torch.uint8, device=CUDA)
        torch.cuda.synchronize()
        started = time.perf_counter()
        with HostArena(nbytes, device=CUDA) as arena:
            opened = time.perf_counter() - started
            near = arena.region.address

            def rate(*streams: Any, block: int = part, times: int = 8) -> float:
                begun = time.perf_counter()
                for _ in range(times):
                    events: list[Event] = []
                    for stream in streams:
                        into, source = there.data_ptr(), near  # noqa: B023
                        if stream is down:
                            into, source = near + part, into + part  # noqa: B023
                        events.append(stream.transfer(into, source, block))
                    for event in events:
                        event.synchronize()
                return times * len(streams) * block / (time.perf_counter() - begun) / 1e9

            rate(up, down)
            rates = {"up": rate(up), "down": rate(down), "both": rate(up, down)}
            rates |= {f"down {mib} MiB": rate(down, block=mib << 20, times=64) for mib in (1, 4, 16, 64)}
            yield {
                "gib": gib,
                "opened_s": opened,
                "registration": asdict(arena.cuda_registration),
                "gb_s": rates,
            }


def kernels() -> Iterator[dict[str, Any]]:
    """Update and measure 200 chunks of a million elements of bf16 parameters on the device."""
    chunks, elements = 200, 1 << 20
    count = chunks * elements
    for moments in (torch.float32, torch.bfloat16):
        started = time.perf_counter()
        loaded = Kernels(CUDA, kinds_of("AdamW", torch.bfloat16, torch.bfloat16, moments))
        compiled = time.perf_counter() - started
        zeros = [torch.zeros(count, dtype=dtype, device=CUDA) for dtype in (torch.int16, moments, moments)]
        grad, parameter = (torch.randn(count, device=CUDA).bfloat16() for _ in range(2))
        work = Update(
            grad=grad,
            parameter=parameter,
            remainder=zeros[0],
            first_moment=zeros[1],
            second_moment=zeros[2],
            segments=[Segment(number * elements, elements) for number in range(chunks)],
            hypers=[],
        )
        size = WorkspaceSize(chunks, count // BLOCK).nbytes
        memory = torch.empty(size, dtype=torch.uint8, device=CUDA)
        updates = DeviceUpdates([DeviceChunk(work, range(chunks))], memory, loaded)
        changes = {number: ParameterUpdate(AdamW(step=1), number) for number in range(chunks)}
        update = _gpu_seconds(lambda: updates.update(changes, 1.0))  # noqa: B023 - used at once
        squares = _gpu_seconds(updates.measure)
        yield {
            "moments": str(moments),
            "compiled_s": compiled,
            "update_tb_s": count * (2 + 8 + 4 * moments.itemsize) / update / 1e12,
            "squares_tb_s": count * 2 / squares / 1e12,
        }


def _gpu_seconds(call: Callable[[], object], times: int = 5) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begun.record()
    for _ in range(times):
        call()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3 / times


def step(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train a decoder, and time each part of a step until the GPU and all copies are done with it."""
    from peers.pattern import fill_by_pattern

    from infinity.lm.decoder import PRESETS, Decoder

    started = time.perf_counter()
    shape = PRESETS[options.model].decoder
    with torch.device("meta"):
        model, tokens = Decoder(shape), torch.zeros(options.batch, options.seq, dtype=torch.int64)
    fill_by_pattern(model, shape.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    with infinity.offload(
        model,
        optimizer,
        budget=infinity.Budget(device=options.device, host=options.host),
        device=options.on,
        update=options.update,
        accumulation=1,
        example_inputs=(tokens, tokens),
    ) as runtime:
        plan = runtime.plan
        yield {
            "started_s": time.perf_counter() - started,
            "plan": str(plan).splitlines(),
            "units": len(plan.homes),
            "mirrored": len(plan.mirrored),
            "updated_on_device": len(plan.updated_on_device),
        }
        rows = [_timed_step(model, runtime, options) for _ in range(options.steps)]
        yield from rows
        names = [name for name in rows[0] if name.endswith("_s")]
        counted = rows[len(rows) // 3 :]
        middle = {name: statistics.median(row[name] for row in counted) for name in names}
        yield {"median": middle, "step_s": sum(middle.values()), "tokens": options.batch * options.seq}


def _timed_step(model: Any, runtime: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Take a step. Returns the seconds of its parts, by names that end in "_s", the loss and bytes moved."""
    on_gpu = options.on == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    batch = torch.randint(256, (options.batch, options.seq + 1)).to(options.on)
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    loss = model(batch[:, :-1], batch[:, 1:])
    mark()
    wait()
    mark()
    loss.backward()
    mark()
    wait()
    mark()
    if options.clip:
        runtime.clip_grad_norm_(options.clip)
    mark()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    wait()
    mark()
    names = ("forward_call_s", "forward_rest_s", "backward_call_s", "drain_s", "clip_s", "update_s")
    spans = itertools.pairwise(marks)
    seconds = {name: end - start for name, (start, end) in zip(names, spans, strict=True)}
    edges = runtime.stats.last_step.edges
    return seconds | {
        "loss": float(loss.detach()),
        "gib": {edge.value: each.bytes / GIB for edge, each in edges.items()},
        "stalls": {edge.value: each.stall_seconds for edge, each in edges.items()},
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else None,
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    from infinity.lm.decoder import PRESETS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("facts", "driver", "kernels"):
        commands.add_parser(name)
    commands.add_parser("host").add_argument("sizes", type=float, nargs="+", metavar="GIB")
    training = commands.add_parser("step")
    training.add_argument("model", choices=PRESETS)
    training.add_argument("--on", choices=("cuda", "cpu"), default="cuda", help="where the model computes")
    training.add_argument("--device", default=None, help="device budget (default: all that is free)")
    training.add_argument("--host", default=None, help="host budget")
    training.add_argument("--batch", type=int, default=4)
    training.add_argument("--seq", type=int, default=1024)
    training.add_argument("--update", choices=("lazy", "eager"), default="lazy")
    training.add_argument("--clip", type=float, default=0.0, help="0: not clipped")
    training.add_argument("--steps", type=int, default=6)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    commands: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "facts": facts,
        "driver": driver,
        "host": lambda: host(options.sizes),
        "kernels": kernels,
        "step": lambda: step(options),
    }
    for line in commands[options.command]():
        print(json.dumps(line, default=str), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
