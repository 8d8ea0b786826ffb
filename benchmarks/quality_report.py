"""Report of the runs of benchmarks/quality.py: means, differences compared with noise, and a table.

Runs are grouped into variants: "all-device" (infinity, with every page in RAM) and "all-NVMe" (no page in
RAM), each with a format of moments, and plain PyTorch; see benchmarks/quality.py. All-device runs and runs in
plain PyTorch are repeated with several seeds. Two runs with the same seed begin with the same fp32 masters
and see the same text, so the difference of their losses has less noise than the losses themselves. For each
variant the report gives the mean of its differences to plain PyTorch with the same seed, and the standard
error of the mean (sample standard deviation / sqrt(seeds)). A variant is "within noise" if the mean is no
further from zero than twice the standard error, or no further than the sample standard deviation of plain
PyTorch between seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PLAIN = "plain PyTorch"
FOREACH = "plain PyTorch, foreach"
DEVICE, NVME = "all-device", "all-NVMe"
LAST = 20
"""Number of last steps over which the final loss is averaged."""


@dataclass(frozen=True)
class Run:
    """The results of one training run.

    variant: name of the way to train. losses: the loss of each step. held_out: the loss on held-out text at
    the end. seconds: the time of the training steps.
    """

    variant: str
    seed: int
    losses: list[float]
    held_out: float
    seconds: float

    @property
    def tail(self) -> float:
        """Mean loss of the last 20 steps."""
        return statistics.fmean(self.losses[-LAST:])


MEASURES: dict[str, Callable[[Run], float]] = {
    "held-out loss": lambda run: run.held_out,
    f"mean of the last {LAST}": lambda run: run.tail,
}


def all_device(states: str) -> str:
    """Name of the variant in which every page rests in RAM. states: format of the moments."""
    return f"{DEVICE}, {states} moments"


def all_nvme(states: str) -> str:
    """Name of the variant in which every page rests on NVMe. states: format of the moments."""
    return f"{NVME}, {states} moments"


def same_bits(runs: Sequence[Run], states: Sequence[str]) -> dict[str, bool]:
    """For each format of moments: whether the all-NVMe runs have the same losses as the all-device runs.

    Runs with the same seed are compared bit for bit, in the loss of every step and in the held-out loss.
    states: the formats. Formats without an all-NVMe run are left out.
    """
    found = {(run.variant, run.seed): (run.losses, run.held_out) for run in runs}
    return {
        each: all(
            found[all_device(each), run.seed] == found[run.variant, run.seed]
            for run in runs
            if run.variant == all_nvme(each)
        )
        for each in states
        if any(run.variant == all_nvme(each) for run in runs)
    }


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Compute the entries "variants" and "differences" of a report, each a dictionary by name of variant.

    "variants" has the means and deviations of each variant's losses, and "differences" the differences to
    plain PyTorch with the same seeds. All-NVMe runs are left out, because they repeat all-device runs.
    """
    runs = [run for run in runs if not run.variant.startswith(NVME)]
    of = {
        name: [run for run in runs if run.variant == name] for name in dict.fromkeys(r.variant for r in runs)
    }
    variants = {
        name: {"seeds": len(each)}
        | {
            measure: _mean_and_deviation([read(run) for run in each], "deviation")
            for measure, read in MEASURES.items()
        }
        for name, each in of.items()
    }
    plain = {run.seed: run for run in of.get(PLAIN, [])}
    differences = {}
    for name, each in of.items():
        pairs = [(run, plain[run.seed]) for run in each if run.seed in plain and name != PLAIN]
        if pairs:
            differences[name] = _difference(pairs, list(plain.values()))
    return {"variants": variants, "differences": differences}


def _mean_and_deviation(values: Sequence[float], name: str) -> dict[str, float | None]:
    """Return {"mean": the mean of `values`, `name`: their sample standard deviation}.

    The deviation of a single value is None.
    """
    return {"mean": statistics.fmean(values), name: statistics.stdev(values) if len(values) > 1 else None}


def _difference(pairs: Sequence[tuple[Run, Run]], plain: Sequence[Run]) -> dict[str, Any]:
    """Compute the differences of a variant to plain PyTorch with the same seeds, and compare them with noise.

    "mean_step" and "largest_step" are relative differences of the losses of single steps. Under the name of
    each measure in MEASURES are the difference for each seed ("values"), the mean of these ("mean") and,
    with several seeds, whether the mean is within noise ("within_noise"). pairs: each run of the variant,
    and the run of plain PyTorch with the same seed. plain: all runs of plain PyTorch.
    """
    relative = [
        [abs(a - b) / b for a, b in zip(run.losses, other.losses, strict=True)] for run, other in pairs
    ]
    found: dict[str, Any] = {
        "seeds": len(pairs),
        "mean_step": statistics.fmean(map(statistics.fmean, relative)),
        "largest_step": max(map(max, relative)),
    }
    for measure, read in MEASURES.items():
        values = [read(run) - read(other) for run, other in pairs]
        mean = statistics.fmean(values)
        each: dict[str, Any] = {"mean": mean, "values": values}
        if len(values) > 1:
            error = statistics.stdev(values) / math.sqrt(len(values))
            between = statistics.stdev(read(run) for run in plain)
            each |= {
                "standard_error": error,
                "between_seeds": between,
                "within_two_standard_errors": abs(mean) <= 2 * error,
                "within_seeds": abs(mean) <= between,
                "within_noise": abs(mean) <= max(2 * error, between),
            }
        found[measure] = each
    return found


def table(report: dict[str, Any], runs: Sequence[Run]) -> str:
    """Return a page of Markdown with the figures of the report, and with the losses of each run.

    report: as the function `compared` of benchmarks/quality.py returns it. runs: all runs, one for each row
    of the first table.
    """
    machine = report["machine"]
    lines = [
        f"# Training quality: {report['model']}, {report['steps']} steps",
        "",
        f"{machine['date']}, {machine['commit']}, {machine['cpu']}, {machine['cpus']} CPUs, torch "
        f"{machine['torch']}. {report['batch']} x {report['seq']} tokens a step, of the standard library; "
        "the seed gives the initial weights and the order of the text. Held-out text is the same for all.",
        "",
        "| run | seed | first loss | mean of the last 20 | held-out loss |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {run.variant} | {run.seed} | {run.losses[0]:.6f} | {run.tail:.6f} | {run.held_out:.6f} |"
        for run in runs
    ]
    lines.append("")
    if len(runs) < report["planned"]:
        lines += [f"Cut short: {len(runs)} of {report['planned']} runs.", ""]
    for states, same in report["same_bits"].items():
        verdict = "the same bits in every loss, and on held-out text" if same else "DIFFERENT"
        lines += [f"All-NVMe and all-device, {states} moments: {verdict}.", ""]
    return "\n".join(lines + _variants(report) + _differences(report)) + "\n"


def _variants(report: dict[str, Any]) -> list[str]:
    lines = [
        "| mean ± standard deviation between seeds | seeds | mean of the last 20 | held-out loss |",
        "|---|---|---|---|",
    ]
    for name, each in report["variants"].items():
        cells = [_plus_minus(each[measure], "deviation") for measure in reversed(MEASURES)]
        lines.append(f"| {name} | {each['seeds']} | {cells[0]} | {cells[1]} |")
    return [*lines, ""]


def _differences(report: dict[str, Any]) -> list[str]:
    lines = [
        "| less plain PyTorch of the same seed | seeds | of | mean ± standard error "
        "| within 2 standard errors | within the deviation between seeds | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in report["differences"].items():
        for measure in MEASURES:
            told = each[measure]
            if "within_noise" in told:
                near = "yes" if told["within_two_standard_errors"] else "no"
                seeds = "yes" if told["within_seeds"] else "no"
                verdict = f"**{'within noise' if told['within_noise'] else 'NOT within noise'}**"
                cells = f"{near} | {seeds} ({told['between_seeds']:.4f}) | {verdict}"
            else:
                cells = "- | - | one seed tells nothing"
            mean = _plus_minus(told, "standard_error", sign="+")
            lines.append(f"| {name} | {each['seeds']} | {measure} | {mean} | {cells} |")
    lines += [
        "",
        "| step by step, relative to plain PyTorch of the same seed | mean of steps | largest |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {each['mean_step']:.1e} | {each['largest_step']:.1e} |"
        for name, each in report["differences"].items()
    ]
    return lines


def _plus_minus(told: dict[str, Any], name: str, sign: str = "") -> str:
    mean = f"{told['mean']:{sign}.4f}"
    return mean if told.get(name) is None else f"{mean} ± {told[name]:.4f}"
