"""GPU idle time: the share of a training step with infinity in which the GPU does nothing.

    python benchmarks/gpu_idle.py --model 926m --directory /mnt/nvme0 --host 24GiB --device-budget 16GiB \\
        --timeline step.json --trace kernels.json

After a warm-up some steps are timed without any recording, one step is recorded as a timeline
(infinity/telemetry/timeline.py), and one step is recorded by torch.profiler, which learns from CUPTI when
each kernel, copy and fill began and ended on the GPU. The union of these intervals is the busy time, in which
copies and kernels that run at once count once. The rest of the timed step is idle. Busy time and step time
are of different steps, because a profiler slows the host but hardly the GPU. Without CUPTI the share is null
and `why` gives the reason; the host's own stalls are reported in any case.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

WORK = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "fills"}
"""Kinds of work on the GPU: name of the category in torch.profiler's events -> name in the report."""

GAPS = (10e-6, 100e-6, 1e-3, 10e-3)
"""Limits, in seconds, between the classes of gap lengths. The gaps of each class are counted."""


class Interval(NamedTuple):
    """Begin and end of a piece of the GPU's work, in seconds of the profiler's clock."""

    start: float
    end: float


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of `intervals` as sorted, disjoint intervals. Intervals that touch are merged."""
    merged: list[Interval] = []
    for start, end in sorted(each for each in intervals if each.end > each.start):
        if merged and start <= merged[-1].end:
            merged[-1] = Interval(merged[-1].start, max(merged[-1].end, end))
        else:
            merged.append(Interval(start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Seconds in the union of `intervals`."""
    return sum(end - start for start, end in union(intervals))


def gaps(intervals: Iterable[Interval]) -> list[float]:
    """Seconds of each gap in the union of `intervals`."""
    at_work = union(intervals)
    return [later.start - earlier.end for earlier, later in itertools.pairwise(at_work)]


def gpu_work(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Interval]]:
    """Intervals of the GPU's work, in seconds, by kind: the values of WORK.

    events: "traceEvents" of a trace that torch.profiler wrote, whose times are in microseconds.
    """
    found: dict[str, list[Interval]] = {kind: [] for kind in WORK.values()}
    for event in events:
        kind = WORK.get(event.get("cat", ""))
        if kind is not None and event.get("ph") == "X":
            start = float(event["ts"]) / 1e6
            found[kind].append(Interval(start, start + float(event["dur"]) / 1e6))
    return found


def report(work: Mapping[str, list[Interval]], seconds: float) -> dict[str, Any]:
    """Compute in what share of a step the GPU is idle, and return a dict for the program's report.

    work: intervals in which the GPU worked in the profiled step, as `gpu_work` returns them. seconds: time of
    a step without the profiler. The dict has "idle_share" (0 to 1), "busy_seconds", the seconds by kind of
    work ("of_kind"), the seconds in which only copies and fills ran ("copies_alone_seconds"), the time from
    the first to the last work ("profiled_span_seconds"), and the gaps by length ("gaps"). If the GPU did
    nothing, it has only "idle_share", which is None, and the reason ("why").
    """
    every = [interval for intervals in work.values() for interval in intervals]
    if not every:
        return {"idle_share": None, "why": "torch.profiler saw nothing on the GPU: CUPTI is not available."}
    busy = length(every)
    between = gaps(every)
    steps = [0.0, *GAPS, float("inf")]
    return {
        "idle_share": max(0.0, 1.0 - busy / seconds),
        "busy_seconds": busy,
        "profiled_span_seconds": max(each.end for each in every) - min(each.start for each in every),
        "of_kind": {
            kind: {"count": len(intervals), "seconds": length(intervals)} for kind, intervals in work.items()
        },
        "copies_alone_seconds": busy - length(work["kernels"]),
        "gaps": {
            f"below {upper:g} s": {"count": len(found), "seconds": sum(found)}
            for lower, upper in itertools.pairwise(steps)
            for found in [[gap for gap in between if lower <= gap < upper]]
        },
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    from infinity.lm.decoder import PRESETS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=PRESETS, default="926m")
    parser.add_argument("--directory", type=Path, required=True, help="a directory on the disk to use")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the first that counts")
    parser.add_argument(
        "--steps", type=int, default=3, help="timed steps; their median is the time of a step"
    )
    parser.add_argument("--host", default=None, help="host budget")
    parser.add_argument("--device-budget", default=None, help="device budget (default: all that is free)")
    parser.add_argument("--nvme", default=None, help="NVMe budget in the directory (default: no NVMe)")
    parser.add_argument(
        "--timeline", type=Path, default=None, help="file for the timeline of one step, for Perfetto"
    )
    parser.add_argument(
        "--trace", type=Path, default=None, help="file for the profiler's events of one step, for Perfetto"
    )
    return parser.parse_args(argv)


def profiled(step: Any, trace: Path) -> tuple[dict[str, list[Interval]], str]:
    """Run the function `step` under torch.profiler, and write the profiler's events to the file `trace`.

    Returns (intervals of the GPU's work by kind, ""). If the profiler does not work: (empty dict, reason).
    """
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():
        step()
        return {}, "This build of torch has no profiler of CUDA's activities (CUPTI)."
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
        profiler.export_chrome_trace(str(trace))
    except RuntimeError as error:
        return {}, f"torch.profiler failed: {error}"
    return gpu_work(json.loads(trace.read_text())["traceEvents"]), ""


def task_of(options: argparse.Namespace, directory: Path) -> Any:
    """Make the task (see peers/task.py) of training with infinity as the command-line options say.

    directory: folder for swap files, and for the text to train on, which this function writes.
    """
    from peers.task import Task
    from turns import the_text

    from infinity.lm import decoder as decoder_module
    from infinity.lm.decoder import PRESETS

    preset = PRESETS[options.model]
    text = directory / "text"
    text.write_bytes(the_text())
    return Task(
        contender="ours",
        mode="fit",
        decoder=asdict(preset.decoder),
        decoder_file=str(decoder_module.__file__),
        batch=options.batch,
        seq=options.seq,
        learning_rate=preset.learning_rate,
        clip=1.0,
        device=options.device,
        directory=str(directory),
        text=str(text),
        budgets={"device": options.device_budget, "host": options.host, "nvme": options.nvme},
        states="fp32",
        update="lazy",
    )


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train as the docstring of this module describes, and return the JSON object that is printed.

    It has the result of `report`, the time of a step, the plan, and what limited the last timed step.
    directory: as in `task_of`.
    """
    from contender import finish
    from peers.ours import Ours
    from peers.task import Batches

    task = task_of(options, directory)
    ours, batches = Ours(task), Batches(task)

    def step() -> float:
        started = time.perf_counter()
        ours.step(*batches.next())
        finish(task)
        return time.perf_counter() - started

    for _ in range(options.warm_up):
        step()
    seconds = statistics.median(step() for _ in range(options.steps))
    stats = ours.facts()
    with ours.runtime.timeline(options.timeline or directory / "timeline.json"):
        step()
    work, why = profiled(step, options.trace or directory / "trace.json")
    found = report(work, seconds)
    ours.close()
    return {
        "model": options.model,
        "batch": options.batch,
        "seq": options.seq,
        "seconds": seconds,
        "tokens_per_second": options.batch * options.seq / seconds,
        **found,
        **({"why": why} if why else {}),
        "last_step": stats.get("last_step"),
        "plan": stats["plan"],
    }


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory(prefix="infinity-idle-", dir=options.directory) as directory:
        found = measure(options, Path(directory))
    share = found["idle_share"]
    said = found["why"] if share is None else f"the GPU does nothing for {share:.0%} of it"
    print(f"{found['plan']['table']}\n{found['seconds']:.3f} s/step; {said}")
    print(json.dumps(found, default=str))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
