"""Training quality: compares losses for different homes and formats of states, and with plain PyTorch.

A preset is trained on text, with several seeds: "all-device" (every page rests in RAM) with each format of
moments, and plain PyTorch with a bf16 model, fp32 masters and torch.optim.AdamW (fused). With seed 0 there
are further runs: "all-NVMe" (every page rests on NVMe), whose losses must equal those of all-device bit by
bit in every step, and plain PyTorch with the foreach AdamW, which shows how much a loss changes when only
the rounding differs.

    python benchmarks/quality.py --directory DISK [--model 30m --steps 300 --batch 4 --seq 128]
        [--seeds 3 --states fp32,bf16,int8] [--results DIR] [--json]

`--results DIR`: writes quality-MODEL.md and .json to DIR after each run.
`--json`: the last line of stdout is one JSON object. The exit code is 1 if a loss of an all-NVMe run has
other bits. benchmarks/quality_report.py explains the comparisons, and when a difference is "within noise".
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine_facts import machine_facts
from quality_report import FOREACH, PLAIN, Run, all_device, all_nvme, same_bits, summary, table

import infinity
from infinity.build import carry_out
from infinity.formats.encodings import DTYPES
from infinity.lm.data import Batches, find_text
from infinity.lm.loop import HeldOut, Recipe, Training, make_optimizer, warm_up_and_cosine
from infinity.lm.model import LanguageModel, language_model
from infinity.ranks import SingleRank
from infinity.tiers import Tier

CLIP = 1.0
NVME = "2GiB"


def paged(options: argparse.Namespace, seed: int, states: str, directory: str | None) -> Run:
    """Train with infinity, and return the results as a Run.

    seed: determines the initial weights and the order of the text. states: format of moments. All pages rest
    in RAM if `directory` is None, and on NVMe in `directory` otherwise.
    """
    chosen, batches, recipe = job(options, seed)
    # Built in RAM, as in the plain runs: initialisation from the meta device draws other random numbers.
    chosen.model = real(chosen, seed)
    optimizer = make_optimizer(chosen.model, recipe.learning_rate)

    def planned(budget: infinity.Budget) -> infinity.Plan:
        return infinity.plan(
            chosen.model,
            optimizer,
            budget=budget,
            precision=infinity.Precision(compute="bf16", states=states, accumulate="compute"),
            device="cpu",
        )

    if directory is None:
        name, budget = all_device(states), infinity.Budget()
        plan = planned(budget)
    else:
        name = all_nvme(states)
        least = planned(infinity.Budget(nvme={directory: NVME})).smallest[Tier.HOST]
        # The least budget, and as many bytes more as half of the bf16 parameters take. This is working room,
        # but not enough for all parameters to rest in RAM: the plan would then have no room for paging.
        budget = infinity.Budget(host=least + chosen.parameters, nvme={directory: NVME})
        plan = on_nvme(planned(budget))
    print(f"{name}\n{plan}\n", flush=True)
    with carry_out(plan, chosen.model, optimizer, budget=budget, ranks=SingleRank()) as runtime:
        started = time.perf_counter()
        losses = [report.loss for report in Training(chosen, runtime, batches, recipe, SingleRank()).steps()]
        seconds = time.perf_counter() - started
        held_out = HeldOut(chosen, batches, torch.device("cpu"), ranks=SingleRank()).loss()
    return Run(name, seed, losses, held_out, seconds)


def plain(name: str, options: argparse.Namespace, seed: int, **adamw: bool) -> Run:
    """Train in plain PyTorch: bf16 model and gradients, fp32 masters and moments, as written by hand.

    name: name of the variant in the report. seed: determines the initial weights and the order of the text.
    adamw: options of torch.optim.AdamW that choose its implementation, for example fused=True.
    """
    chosen, batches, recipe = job(options, seed)
    masters = real(chosen, seed)
    model = real(chosen, seed)
    chosen.model = model.bfloat16()
    groups = make_optimizer(masters, recipe.learning_rate).param_groups
    # The groups are copied without their other keys, some of which choose an implementation.
    optimizer = torch.optim.AdamW(
        [{key: group[key] for key in ("params", "weight_decay", "betas")} for group in groups],
        lr=recipe.learning_rate,
        **adamw,
    )
    pairs = list(zip(model.parameters(), masters.parameters(), strict=True))
    losses: list[float] = []
    started = time.perf_counter()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * warm_up_and_cosine(step, recipe.steps)
        loss = chosen.loss(batches.training(step, 0))
        loss.backward()
        for parameter, master in pairs:
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters.parameters(), CLIP)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)
        losses.append(loss.item())
    seconds = time.perf_counter() - started
    return Run(
        name, seed, losses, HeldOut(chosen, batches, torch.device("cpu"), ranks=SingleRank()).loss(), seconds
    )


def job(options: argparse.Namespace, seed: int) -> tuple[LanguageModel, Batches, Recipe]:
    """Return (model, batches, hyper-parameters) for the preset, sizes and steps in `options`.

    They are the same for all runs with this seed. The model is on the meta device.
    """
    chosen = language_model(options.model)
    batches = Batches(find_text(None), chosen, batch=options.batch, seq=options.seq, seed=seed)
    return (
        chosen,
        batches,
        Recipe(steps=options.steps, accumulate=1, learning_rate=chosen.learning_rate, clip=CLIP),
    )


def real(chosen: LanguageModel, seed: int) -> torch.nn.Module:
    """Build a model like `chosen.model` in RAM and return it. Its own code initialises it, with `seed`.

    `chosen.model` may be on the meta device, without values.
    """
    torch.manual_seed(seed)
    return type(chosen.model)(chosen.model.config)  # type: ignore[arg-type, call-arg]


def on_nvme(plan: infinity.Plan) -> infinity.Plan:
    """Return a copy of `plan` with the home of every page on NVMe. The pools in RAM keep their sizes."""
    homes = tuple(
        {kind: None if tier is None else Tier.NVME for kind, tier in unit.items()} for unit in plan.homes
    )
    return replace(plan, homes=homes)


def trainings(options: argparse.Namespace) -> Iterator[Callable[[], Run]]:
    """Yield the trainings to run, as functions. All trainings of one seed come before those of the next.

    So even a report of the first few trainings has runs of one seed, which can be compared with each other.
    """
    for seed in range(options.seeds):
        for states in options.states:
            yield partial(paged, options, seed, states, None)
        yield partial(plain, PLAIN, options, seed, fused=True)
        if seed == 0:
            for states in options.states:
                yield partial(on_disk, options, seed, states)
            yield partial(plain, FOREACH, options, seed, foreach=True)


def on_disk(options: argparse.Namespace, seed: int, states: str) -> Run:
    """Train by `paged`, with all pages on NVMe in a temporary directory under `options.directory`.

    Returns the results. seed, states: as in `paged`.
    """
    with tempfile.TemporaryDirectory(prefix="infinity-quality-", dir=options.directory) as directory:
        return paged(options, seed, states, directory)


def compared(facts: dict[str, Any], states: list[str], runs: list[Run]) -> dict[str, Any]:
    """Return the report of the runs so far, for JSON. facts: entries that the report gets as they are.

    states: the formats of moments that the benchmark compares. The report has the losses with five digits,
    but all figures are computed from losses with all digits.
    """
    short = [asdict(run) | {"losses": [float(f"{loss:.5g}") for loss in run.losses]} for run in runs]
    return facts | {"same_bits": same_bits(runs, states)} | summary(runs) | {"runs": short}


def write(report: dict[str, Any], runs: list[Run], results: Path) -> None:
    """Write the report into the folder `results`: the files quality-MODEL.md and .json."""
    results.mkdir(parents=True, exist_ok=True)
    stem = results / f"quality-{report['model']}"
    stem.with_suffix(".md").write_text(table(report, runs))
    stem.with_suffix(".json").write_text(json.dumps(report) + "\n")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line, and return its options.

    argv: the arguments without the program's name; None: those of this process.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="30m")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, which are 0, 1, ...")
    parser.add_argument("--states", default="fp32", help=f"formats of moments: some of {','.join(DTYPES)}")
    parser.add_argument("--directory", required=True, help="a directory on the disk to use")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    options.states = list(dict.fromkeys(options.states.split(",")))
    unknown = [each for each in options.states if each not in DTYPES]
    if unknown:
        parser.error(f"--states has unknown formats: {', '.join(unknown)}")
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parsed(argv)
    planned = list(trainings(options))
    facts = {
        "benchmark": "quality",
        "machine": machine_facts(),
        **{name: getattr(options, name) for name in ("model", "steps", "batch", "seq", "seeds", "states")},
        "planned": len(planned),
    }
    runs: list[Run] = []
    report: dict[str, Any] = {}
    for training in planned:
        run = training()
        runs.append(run)
        print(
            f"{len(runs)}/{len(planned)}  {run.variant}, seed {run.seed}: last {run.tail:.6f}, held-out "
            f"{run.held_out:.6f}, {run.seconds:.0f} s\n",
            flush=True,
        )
        report = compared(facts, options.states, runs)
        if options.results is not None:
            write(report, runs, options.results)
    print(table(report, runs))
    if options.json:
        print(json.dumps(report))
    return 0 if all(report["same_bits"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
