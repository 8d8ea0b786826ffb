"""Tests of the arithmetic with which benchmarks make figures out of what they measured."""

from __future__ import annotations

import math
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import checkpoint_peers
import commits
import gpu_idle
import overhead
import quality_report as quality
import ranks
from gpu_idle import Interval
from training_report import ratios


def test_ratios_compare_turns_of_the_same_round() -> None:
    contenders = {
        "peer": {"rounds": [0, 2], "seconds": [4.0, 6.0]},
        "ours": {"rounds": [0, 1, 2], "seconds": [2.0, 9.0, 2.0]},
        "late": {"rounds": [1], "seconds": [1.0]},
    }
    assert ratios(contenders, "peer") == {"ours": {"median": 2.5, "rounds": [2.0, 3.0]}}
    of_ranks = {
        "ours:3:ram": [{"round": number, "step_s": 2.0 + number} for number in range(3)],
        "fsdp2": [{"round": 0, "step_s": 4.0}, {"round": 1, "step_s": 3.0}],
    }
    assert ranks.ratios_to_peers(of_ranks) == {"fsdp2": {"ours:3:ram": {"median": 1.5, "rounds": [2.0, 1.0]}}}


def test_a_save_s_stall_is_the_time_of_its_steps_over_that_of_the_others() -> None:
    period = [6.0, 3.0, 2.0, 2.0, 4.0]
    saves = [{"after": 5 * n, "seconds": n / 1000, "pending_steps": n % 2} for n in (1, 2, 3)]
    found = commits.stall_of([9.0] * 5 + period + period, saves, 5)
    assert found["pairs"] == 2, "after the last save there are no steps"
    medians = {name: found[name]["median"] for name in ("first", "second", "noise", "lost_steps")}
    assert medians == {"first": 3.0, "second": 1.5, "noise": 2.0, "lost_steps": 3.5}
    assert found["ratio_of_medians"] == 3.0 and found["late"] == 2 / 3
    assert found["save_ms"] == {"p50": 2.0, "p95": 3.0, "max": 3.0}
    hundred = [float(number) for number in range(1, 101)]
    assert [commits.quantile(hundred, share) for share in (0, 0.5, 0.95, 1)] == [1, 50, 95, 100]


def test_which_of_our_figures_of_a_save_are_lower() -> None:
    ours, other = ({"lost_s": a, "written_bytes": 5.0, "extra_rss": b} for a, b in ((-0.1, 3.0), (1.0, 2.0)))
    assert checkpoint_peers.lower({"ours": ours, "deepspeed:cpu": other}) == {
        "deepspeed:cpu": {"lost_s": True, "written_bytes": False, "extra_rss": False}
    }
    assert checkpoint_peers.lower({"deepspeed:cpu": other}) == {}


def test_figures_of_a_turn_are_those_of_its_ranks() -> None:
    names = ("seconds", "losses", "sent_bytes", "link_bytes", "rss_steps", "rss_built", "facts")
    one = ([1.0, 5.0, 2.0], [4.0, 2.0], 10, 0, 3, 9, {"of": 0, "crossed": 4})
    two = ([2.0, 4.0, 1.0], [6.0, 1.0], 20, 6, 4, 8, {"of": 1, "crossed": 8})
    expected = ([2.0, 5.0, 2.0], [5.0, 1.5], 15, 3, 4, 9, one[-1])
    each = [dict(zip(names, values, strict=True)) for values in (one, two)]
    wanted = dict(zip(names, expected, strict=True)) | {"step_s": 2.0, "crossed_bytes": 6}
    assert ranks.turn_of(each) == wanted


def test_busy_moments_of_a_gpu_count_once() -> None:
    chosen = random.Random(7)
    for _ in range(300):
        starts = [chosen.randrange(40) for _ in range(chosen.randrange(9))]
        intervals = [Interval(start, start + chosen.randrange(9)) for start in starts]
        moments = {moment for start, end in intervals for moment in range(int(start), int(end))}
        assert gpu_idle.length(intervals) == len(moments)
        merged = gpu_idle.union(intervals)
        assert {m for start, end in merged for m in range(int(start), int(end))} == moments
        idle = max(moments) + 1 - min(moments) - len(moments) if moments else 0
        assert sum(gpu_idle.gaps(intervals)) == idle
    work = {"kernels": [Interval(0, 4), Interval(6, 7)], "copies": [Interval(1, 5)], "fills": []}
    found = gpu_idle.report(work, 10.0)
    assert found["busy_seconds"] == 6 and found["idle_share"] == pytest.approx(0.4)
    assert found["copies_alone_seconds"] == 1 and found["profiled_span_seconds"] == 7


def test_of_a_trace_only_the_gpu_s_work_counts() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "ts": 1000.0, "dur": 500.0, "name": "gemm"},
        {"ph": "X", "cat": "gpu_memcpy", "ts": 1200, "dur": 1000, "name": "Memcpy HtoD"},
        {"ph": "X", "cat": "gpu_memset", "ts": 9000, "dur": 0, "name": "Memset"},
        {"ph": "X", "cat": "cuda_runtime", "ts": 0, "dur": 90000, "name": "cudaLaunchKernel"},
        {"ph": "X", "cat": "gpu_user_annotation", "ts": 0, "dur": 90000, "name": "step"},
        {"ph": "i", "cat": "kernel", "ts": 5},
    ]
    found = gpu_idle.gpu_work(events)
    assert {kind: len(each) for kind, each in found.items()} == {"kernels": 1, "copies": 1, "fills": 1}
    assert gpu_idle.length(found["kernels"] + found["copies"]) == pytest.approx(1.2e-3)


def test_factors_of_calls_are_those_of_the_counts() -> None:
    sizes = [(n, c, p) for n in (4, 8) for c in (1, 4) for p in (1, 4)]
    counts = [7 + 50 * n + 20 * n * c + 3 * n * p + 2 * n * max(0, p - c) for n, c, p in sizes]
    fit = overhead.fitted(
        [overhead.Layout(*each) for each in sizes],
        [{"python": each, "c": 2 * each, "sum": 3 * each} for each in counts],
    )
    for times, kind in enumerate(("python", "c", "sum"), start=1):
        expected = {factor: times * value for factor, value in zip("abcde", (7, 50, 20, 3, 2), strict=True)}
        assert fit[kind] == pytest.approx(expected | {"worst": 0}, abs=1e-6)


def test_calls_are_counted_in_every_thread() -> None:
    def calls(times: int) -> None:
        for _ in range(times):
            inner()

    def inner() -> None:
        len("")
        len("")

    def in_a_thread(times: int) -> None:
        thread = threading.Thread(target=calls, args=(times,))
        thread.start()
        thread.join()

    counter = overhead.Calls()
    with counter.installed():
        here = [counter.of(lambda n=n: calls(n)) for n in (10, 30)]
        there = [counter.of(lambda n=n: in_a_thread(n)) for n in (10, 30)]
    assert here == [(12, 20), (32, 60)]
    # Starting and joining a thread may take one more or one less look at a lock.
    assert [b - a for a, b in zip(*there, strict=True)] == pytest.approx([20, 40], abs=5)


def test_a_difference_is_within_noise_where_its_error_or_the_seeds_cover_it() -> None:
    def runs(variant: str, *held_out: float) -> list[Any]:
        return [quality.Run(variant, seed, [3.0, loss], loss, 1.0) for seed, loss in enumerate(held_out)]

    found = quality.summary(
        [
            *runs(quality.PLAIN, 2.0, 2.1, 2.2),  # standard deviation 0.1
            *runs("above, always as far", 2.25, 2.35, 2.45),
            *runs("above, by less than seeds differ", 2.05, 2.15, 2.25),
            *runs("above, but any distance", 2.8, 2.1, 2.2),
            *runs("one seed", 2.0),
        ]
    )["differences"]
    keys = ("within_two_standard_errors", "within_seeds", "within_noise")
    assert {name: [each["held-out loss"].get(key) for key in keys] for name, each in found.items()} == {
        "above, always as far": [False, False, False],
        "above, by less than seeds differ": [False, True, True],
        "above, but any distance": [True, False, True],
        "one seed": [None, None, None],
    }
    loss = found["above, but any distance"]["held-out loss"]
    assert loss["mean"] == pytest.approx(0.8 / 3)
    assert loss["standard_error"] == pytest.approx(math.sqrt(0.64 / 3) / math.sqrt(3))  # of 0.8, 0, 0


def test_one_bit_elsewhere_is_seen() -> None:
    here = quality.Run(quality.all_device("bf16"), 0, [5.0, 4.0], 3.0, 1.0)
    there = quality.Run(quality.all_nvme("bf16"), 0, [5.0, math.nextafter(4.0, 5.0)], 3.0, 1.0)
    assert quality.same_bits([here, there], ["fp32", "bf16"]) == {"bf16": False}
    assert quality.same_bits([here], ["bf16"]) == {}
