"""Compares runtime.accumulate with a plain loop over the micro-batches of a step, in turns on one runtime.

A decoder whose pages rest on the disk runs the same micro-batches in three ways: one after the other, all
together (runtime.accumulate), and all together while each transformer block is recomputed in backward. A
turn runs one way: a first step, in which the runtime learns the order of accesses, and timed steps. A round
has a turn of each way, in an order that is reversed each round, and ratios of speeds are those of turns in
one round. The gradients of the three ways must have the same bits. The report also has the bytes that
forwards and backwards of one step move between device, RAM and disk.

    python benchmarks/accumulate.py --directory DISK [--model 309m --micro-batches 8 --batch 1 --seq 256]
        [--budget-device SIZE --budget-host SIZE] [--json]

Without --budget-host, the host budget is 64 MiB (for resident pages) larger than the smallest sufficient
budget. `--json`: the last line of stdout is one JSON object. `--quick`: a smoke test, whose figures mean
nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from ways import compared, in_turns, run, spread

import infinity
from infinity.lm.decoder import PRESETS, Decoder, DecoderConfig
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier

QUICK = DecoderConfig(width=64, layers=3, heads=2, hidden=192)
SLACK = 64 << 20
QUICK_SLACK = 256 << 10
"""Bytes of RAM beyond the smallest host budget, with --quick: room for the pages of a transformer block."""
PRECISION = infinity.Precision(compute="bf16")
NVME_BYTES_PER_PARAMETER = 24


class Bench:
    """A model on a runtime, and the three ways to run the micro-batches of a step."""

    def __init__(self, options: argparse.Namespace, directory: str) -> None:
        config = QUICK if options.quick else PRESETS[options.model].decoder
        with torch.device("meta"):
            self.model = Decoder(config)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        nvme = {directory: config.parameters * NVME_BYTES_PER_PARAMETER + (256 << 20)}
        budget = infinity.Budget(device=options.budget_device, host=options.budget_host, nvme=nvme)
        if options.budget_host is None:
            ample = infinity.Budget(host="1TiB", nvme=nvme)
            least = infinity.plan(
                self.model, optimizer, budget=ample, precision=PRECISION, device=options.device
            )
            host = least.smallest[Tier.HOST] + (QUICK_SLACK if options.quick else SLACK)
            budget = infinity.Budget(device=options.budget_device, host=host, nvme=nvme)
        self.runtime = infinity.offload(
            self.model, optimizer, budget=budget, precision=PRECISION, device=options.device
        )
        generator = torch.Generator().manual_seed(0)
        shape = (options.micro_batches, options.batch, options.seq + 1)
        tokens = torch.randint(config.vocabulary, shape, generator=generator)
        self.batches = list(tokens.to(self.runtime.plan.device))
        self.ways: dict[str, Callable[[], list[torch.Tensor]]] = {
            "plain loop": self._plain,
            "together": lambda: self.runtime.accumulate(self.batches, self._loss),
            "recomputed": lambda: self.runtime.accumulate(self.batches, self._loss, recompute=True),
        }

    def turn(self, way: str, steps: int) -> dict[str, Any]:
        """Train one untimed step and `steps` timed steps. way: "plain loop", "together" or "recomputed".

        Returns a dict. Of the last step it has "losses" (those of its micro-batches), "norm" (of its
        gradients) and "bytes" (moved by its forwards and backwards, for each direction between two tiers). Of
        all timed steps it has the medians of "seconds", for the forwards and backwards of a step, and
        "step_seconds", for the whole step.
        """
        gradients, whole, norms, moved = [], [], [], {}
        for _ in range(1 + steps):
            before, start = self.runtime.stats.edges, time.perf_counter()
            losses = self.ways[way]()
            after, middle = self.runtime.stats.edges, time.perf_counter()
            norms.append(float(self.runtime.clip_grad_norm_(1.0)))
            self.runtime.optimizer.step()
            self.runtime.optimizer.zero_grad()
            gradients.append(middle - start)
            whole.append(time.perf_counter() - start)
            moved = {edge.value: after[edge].bytes - before[edge].bytes for edge in Edge}
        return {
            "way": way,
            "seconds": statistics.median(gradients[1:]),
            "step_seconds": statistics.median(whole[1:]),
            "bytes": moved,
            "losses": [float(each) for each in losses],
            "norm": norms[-1],
        }

    def same_bits(self) -> bool:
        """Run a step's micro-batches in each of the three ways. Returns whether the losses are equal, and the
        gradients of every parameter have the same bits.
        """
        reference = None
        for way in self.ways.values():
            losses = [float(each) for each in way()]
            digests = [_digest(self.runtime.grad(each)) for each in self.model.parameters()]
            self.runtime.optimizer.zero_grad()
            reference = reference or (losses, digests)
            if reference != (losses, digests):
                return False
        return True

    def _plain(self) -> list[torch.Tensor]:
        losses = []
        for batch in self.batches:
            loss = self._loss(batch)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens[:, :-1], tokens[:, 1:]) / len(self.batches)
        return loss


def _digest(gradient: torch.Tensor | None) -> str:
    """Hash of the bits of `gradient`. Hashes are compared, since two sets of gradients may not fit in RAM."""
    assert gradient is not None
    return hashlib.blake2b(gradient.contiguous().view(torch.uint8).numpy(), digest_size=16).hexdigest()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--directory", required=True, help="a directory on the disk to use")
    parser.add_argument("--model", choices=PRESETS, default="309m")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="timed steps in a turn")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--budget-device", metavar="SIZE")
    parser.add_argument("--budget-host", metavar="SIZE")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.micro_batches, options.seq = 2, 3, 32
    return options


def measure(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Run all rounds, with the pages on the disk in `directory`. Returns the figures for the report.

    "same_bits": whether the three ways give gradients with the same bits. "parameters": number of the model's
    parameters. "results": a dict for each way. It has the medians over all rounds of "seconds" and
    "step_seconds", and the "bytes" of the last round (see `Bench.turn`). It also has "ratios", the way's
    speed divided by the speed of the plain loop in each round, and "ratio", their median.
    """
    bench = Bench(options, directory)
    with bench.runtime:
        same = bench.same_bits()
        rounds = in_turns(list(bench.ways), options.rounds, lambda way: bench.turn(way, options.steps))
    results = compared(rounds, "plain loop")
    for way, found in results.items():
        found["step_seconds"] = statistics.median(turns[way]["step_seconds"] for turns in rounds)
    return {"same_bits": same, "parameters": bench.model.config.parameters, "results": results}


def show(report: dict[str, Any]) -> None:
    print(f"\n{'':14}{'s':>9}{'ratio':>20}" + "".join(f"{edge.value + ' MB':>18}" for edge in Edge))
    for way, found in report["results"].items():
        moved = "".join(f"{found['bytes'][edge.value] / 1e6:18.1f}" for edge in Edge)
        print(f"{way:14}{found['seconds']:9.3f}{spread(found):>20}{moved}")
    print("gradients have the same bits" if report["same_bits"] else "GRADIENTS DIFFER")


def main(argv: list[str] | None = None) -> int:
    return run("accumulate", parse(argv), measure, show)


if __name__ == "__main__":
    sys.exit(main())
