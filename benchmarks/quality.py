"""Training quality: does it matter where the states are, and does mixed precision by pages learn as by hand?

The same preset is trained on the same text from the same seed: all-device (every page in RAM), all-NVMe (no
page rests in RAM), and in plain PyTorch with a bf16 model, fp32 masters and torch.optim.AdamW.
The first two must agree bit for bit in every step; the third within the noise of rounding, which a fourth
run shows: plain PyTorch with the foreach instead of the fused AdamW.

    python benchmarks/quality.py --directory DISK [--model 30m --steps 300 --batch 4 --seq 128]
        [--results DIR] [--json]

`--results DIR`: writes quality-MODEL.md, .json and .svg there (the plot needs matplotlib). `--json`: the last
line of stdout is one JSON object. Exits with 1 where the two paged runs differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from machine_facts import machine_facts

import infinity
from infinity.lm.batches import Batches
from infinity.lm.subject import Subject, subject
from infinity.lm.text import find_text
from infinity.lm.training import HeldOut, Recipe, make_optimizer, train, warm_up_and_cosine
from infinity.offload import carry_out
from infinity.tiers import Tier

CLIP = 1.0
SEED = 0
NVME = "2GiB"
WORKING_ROOM = 28 << 20
"""Bytes of RAM beyond the least that would do: four slots and three resident pages of the 30m preset."""
PRECISION = infinity.Precision(compute="bf16", accumulate="compute")


@dataclass(frozen=True)
class Run:
    """One training."""

    name: str
    losses: list[float]
    held_out: float
    seconds: float


def paged(name: str, options: argparse.Namespace, directory: str | None) -> Run:
    """With pages in RAM, or with all of them on NVMe under `directory`."""
    torch.manual_seed(SEED)
    chosen, batches, recipe = job(options)
    # In RAM from the start, as the plain runs have it: the meta device would draw other random numbers.
    chosen.model = real(chosen)
    optimizer = make_optimizer(chosen.model, recipe.learning_rate)

    def planned(budget: infinity.Budget) -> infinity.Plan:
        return infinity.plan(
            chosen.model,
            optimizer,
            budget=budget,
            precision=PRECISION,
            example_inputs=chosen.example_inputs(options.batch, options.seq, "cpu"),
            device="cpu",
        )

    if directory is None:
        budget = infinity.Budget()
        plan = planned(budget)
    else:
        least = planned(infinity.Budget(nvme={directory: NVME})).smallest[Tier.HOST]
        budget = infinity.Budget(host=least + WORKING_ROOM, nvme={directory: NVME})
        plan = on_nvme(planned(budget))
    print(f"{name}\n{plan}\n", flush=True)
    with carry_out(plan, chosen.model, optimizer, budget=budget) as runtime:
        started = time.perf_counter()
        losses = [report.loss for report in train(chosen, runtime, batches, recipe)]
        seconds = time.perf_counter() - started
        held_out = HeldOut(chosen, batches, torch.device("cpu")).loss()
    return Run(name, losses, held_out, seconds)


def plain(name: str, options: argparse.Namespace, **adamw: bool) -> Run:
    """bf16 model and gradients, fp32 masters and moments, as it is written by hand."""
    torch.manual_seed(SEED)
    chosen, batches, recipe = job(options)
    model = real(chosen)
    masters = real(chosen)
    masters.load_state_dict(model.state_dict())
    chosen.model = model.bfloat16()
    groups = make_optimizer(masters, recipe.learning_rate).param_groups
    # Not the groups themselves: they name an implementation already.
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
    return Run(name, losses, HeldOut(chosen, batches, torch.device("cpu")).loss(), seconds)


def job(options: argparse.Namespace) -> tuple[Subject, Batches, Recipe]:
    """The same for every run."""
    chosen = subject(options.model)
    batches = Batches(find_text(None), chosen, batch=options.batch, seq=options.seq, seed=SEED)
    return (
        chosen,
        batches,
        Recipe(steps=options.steps, accumulate=1, learning_rate=chosen.learning_rate, clip=CLIP),
    )


def real(chosen: Subject) -> torch.nn.Module:
    """The model in RAM, initialised by its own code from the global random state."""
    return type(chosen.model)(chosen.model.config)  # type: ignore[arg-type, call-arg]


def on_nvme(plan: infinity.Plan) -> infinity.Plan:
    """The same plan with every page at home on NVMe; what rested in RAM leaves its room empty."""
    homes = tuple(
        {kind: None if tier is None else Tier.NVME for kind, tier in unit.items()} for unit in plan.homes
    )
    return replace(plan, homes=homes)


def spread(a: Run, b: Run, last: int) -> dict[str, float]:
    """How far apart two curves are: step by step, in the mean of the last steps, on held-out text."""
    steps = [abs(x - y) / y for x, y in zip(a.losses, b.losses, strict=True)]
    tails = [statistics.fmean(run.losses[-last:]) for run in (a, b)]
    return {
        "largest_step": max(steps),
        "mean_step": statistics.fmean(steps),
        "tail_mean": abs(tails[0] - tails[1]) / tails[1],
        "held_out": abs(a.held_out - b.held_out) / b.held_out,
    }


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    machine = report["machine"]
    lines = [
        f"# Training quality: {report['model']}, {report['steps']} steps",
        "",
        f"{machine['date']}, {machine['commit']}, {machine['cpu']}, {machine['cpus']} CPUs, torch "
        f"{machine['torch']}. {report['batch']} x {report['seq']} tokens a step, of the standard library.",
        "",
        "| run | first loss | mean of the last 20 | held-out loss |",
        "|---|---|---|---|",
    ]
    for run in report["runs"]:
        tail = statistics.fmean(run["losses"][-20:])
        lines.append(f"| {run['name']} | {run['losses'][0]:.6f} | {tail:.6f} | {run['held_out']:.6f} |")
    lines += [
        "",
        f"All-NVMe and all-device: {'the same bits in every loss' if report['same_bits'] else 'DIFFERENT'}, "
        f"and on held-out text.",
        "",
        "| relative difference | largest of a step | mean of steps | mean of the last 20 | held-out |",
        "|---|---|---|---|---|",
    ]
    for name, each in report["spreads"].items():
        lines.append(
            f"| {name} | {each['largest_step']:.1e} | {each['mean_step']:.1e} | {each['tail_mean']:.1e} "
            f"| {each['held_out']:.1e} |"
        )
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    styles = {"all-device": ("-", 3.5), "all-NVMe": ("--", 1.5)}
    for run in report["runs"]:
        style, width = styles.get(run["name"], ("-", 0.8))
        axes.plot(range(1, len(run["losses"]) + 1), run["losses"], style, linewidth=width, label=run["name"])
    axes.set(
        xlabel="step", ylabel="loss (nats per byte)", title=f"{report['model']}: the same curve anywhere"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="30m")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--directory", required=True, help="on the disk to use")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    runs: list[Run] = []

    def add(make: Callable[[], Run]) -> None:
        runs.append(make())
        print(f"{runs[-1].name}: held-out {runs[-1].held_out:.6f}, {runs[-1].seconds:.0f} s\n", flush=True)

    add(lambda: paged("all-device", options, None))
    with tempfile.TemporaryDirectory(prefix="infinity-quality-", dir=options.directory) as directory:
        add(lambda: paged("all-NVMe", options, directory))
    add(lambda: plain("plain PyTorch", options, fused=True))
    add(lambda: plain("plain PyTorch, foreach", options, foreach=True))
    device, nvme, fused, foreach = runs
    report = {
        "benchmark": "quality",
        "machine": machine_facts(),
        "model": options.model,
        "steps": options.steps,
        "batch": options.batch,
        "seq": options.seq,
        "same_bits": device.losses == nvme.losses and device.held_out == nvme.held_out,
        "spreads": {
            "all-NVMe and plain PyTorch": spread(nvme, fused, 20),
            "plain PyTorch, foreach and fused": spread(foreach, fused, 20),
        },
        "runs": [asdict(run) for run in runs],
    }
    print(table(report))
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        stem = options.results / f"quality-{options.model}"
        stem.with_suffix(".md").write_text(table(report))
        stem.with_suffix(".json").write_text(json.dumps(report) + "\n")
        plot(report, stem.with_suffix(".svg"))
    if options.json:
        print(json.dumps(report))
    return 0 if report["same_bits"] else 1


if __name__ == "__main__":
    sys.exit(main())
