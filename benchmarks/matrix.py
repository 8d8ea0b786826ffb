"""Matrix: compares plans with measurements, the seconds of a step and the bytes of RAM, for many models.

Each pair is a model and the part of its pages that rests in RAM: "all-host" (no page on NVMe), "half" or
"all-nvme". The pairs of one model take turns as in train.py, where the limit, the least time of a step that
the machine's speeds allow, is explained. Every turn is a process of its own, which makes a plan just before
it trains, because the speed of a disk that others share changes within minutes. The program prints a table
with a row for each pair.

    python benchmarks/matrix.py --directory /mnt/nvme0
    python benchmarks/matrix.py --directory /mnt/nvme0 --pair 309m:half --pair 309m:all-nvme

`--json`: the last line of stdout is one JSON object. `--quick`: a smoke test, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import specs
from peers.budgets import WORDS
from train import add_run_options, job_of, run
from training_report import prediction_cells, report_of

from infinity.lm.decoder import PRESETS

PAIRS = ("10m:all-host", "30m:half", "124m:all-host", "124m:all-nvme", "309m:half", "309m:all-nvme")
QUICK_PAIRS = ("10m:all-nvme",)

_WHOLE = 300_000_000
"""Number of parameters from which on a turn has the number of steps that was asked for.

With a model of n parameters, fewer than half as many, the number of steps is multiplied by `_WHOLE // n`, so
that turns are not too short: a step takes 0.12 s with 10M parameters and 0.4 s with 30M, and up to 1.5 times
that in the first seconds of a process.
"""


def pair(text: str) -> tuple[str, str]:
    """Split a value of `--pair` and return its parts: ("309m", "half") for "309m:half".

    Raises ArgumentTypeError if the first is not a preset's name or the second is none of WORDS.
    """
    model, _, word = text.partition(":")
    if model not in PRESETS or word not in WORDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not MODEL:BUDGET, with a budget of {', '.join(WORDS)}")
    return model, word


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pair", type=pair, action="append", metavar="MODEL:BUDGET", help="repeatable")
    parser.add_argument("--states", choices=specs.STATES, default="fp32")
    add_run_options(parser)
    parser.set_defaults(rounds=5, steps=3, processes="fresh")
    options = parser.parse_args(argv)
    if options.pair is None:
        options.pair = [pair(text) for text in (QUICK_PAIRS if options.quick else PAIRS)]
    return options


def rows_of(report: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """Return the rows of the table for one model: a dict for each of its pairs that trained.

    report: the result of training_report.report_of for this model. Values of "..._s" are seconds of a step,
    those of "..._bytes" and "rss_growth" are bytes, and "..._over_..." are ratios.
    """
    return [
        {
            "model": model,
            "budget": name.removeprefix("infinity "),
            "predicted_s": each["plan"]["predicted_s"],
            "predicted_limit": each["plan"]["predicted_limit"],
            "measured_s": each["median_s"],
            "predicted_over_measured": each["plan"]["predicted_over_measured"],
            "limit_s": each["limit"]["seconds"],
            "over_limit": each["over_limit"],
            "ram_bytes": each["plan"]["ram_bytes"],
            "rss_growth": each["plan"]["rss_growth"],
            "growth_over_plan": each["plan"]["growth_over_plan"],
            "home_bytes": each["facts"]["plan"]["homes"],
        }
        for name, each in report["contenders"].items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table in Markdown."""
    print(
        "\n| model | pages | predicted s | measured s | predicted / measured | limit s | measured / limit "
        "| RAM planned | RAM grown / planned |\n|---|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        predicted, ratio = prediction_cells(row)
        print(
            f"| {row['model']} | {row['budget']} | {predicted} | {row['measured_s']:.3f} | {ratio} "
            f"| {row['limit_s']:.3f} | {row['over_limit']:.2f} | {row['ram_bytes'] / 1e9:.3f} GB "
            f"| {row['growth_over_plan']:.3f} |"
        )


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    found = vars(options)
    pairs, states, as_json = (found.pop(name) for name in ("pair", "states", "json"))
    rows, reports, failed = [], [], False
    for model in dict.fromkeys(model for model, _ in pairs):
        words = dict.fromkeys(word for each, word in pairs if each == model)
        ours = tuple(specs.ours(f"{word},states={states}") for word in words)
        times = 1 if options.quick else max(1, _WHOLE // PRESETS[model].decoder.parameters)
        job = job_of(found, model=model, specs=ours)
        bench = run(replace(job, steps=times * job.steps, warm_up=times * job.warm_up))
        if bench is None:
            failed = True
            continue
        failed = failed or not bench.complete
        reports.append(report_of(bench))
        rows += rows_of(reports[-1], model)
    show(rows)
    if as_json:
        print(json.dumps({"benchmark": "matrix", "rows": rows, "reports": reports}, default=str))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
