"""Compares the policies of activations: steps of one model that keeps, recomputes or offloads them, in turns.

A turn offloads a decoder anew with one policy, trains a first step and then timed steps. A round has a turn
of each way, in an order that is reversed each round, and ratios of speeds are those of turns in one round.
"keep" is there twice: the ratio of the two is the noise. The device budget is the smallest that the policy
needs, so that all activations leave that may. With `--unified` there is none, and they leave within RAM.
"offload to RAM" has ample RAM. "offload to disk" has RAM for an eighth of them, and 64 MiB beside the least
that the model's states take, of which most are then on disk, too. So this way is compared with "keep, states
on disk", which has RAM for all of them. The losses of all ways must have the same bits.

The limit of a way is the longer of two times of the same round: a step with all kept, and all bytes that the
way's plan moves over the disk in a step, at the rates that are measured before the turn.

    python benchmarks/activations.py --directory DISK [--model 124m --batch 1 --seq 1024 --rounds 12]

`--json`: the last line of stdout is one JSON object. `--quick`: a smoke test, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from operator import truediv
from typing import Any

import torch
from ways import compared, in_turns, run, spread

import infinity
from infinity.errors import BudgetError
from infinity.lm.decoder import PRESETS, Decoder, DecoderConfig
from infinity.tiers import Tier
from infinity.tiers.probes import disk_speed

QUICK = DecoderConfig(width=64, layers=3, heads=2, hidden=192)
WAYS = {
    "keep": "keep",
    "keep again": "keep",
    "recompute": "recompute",
    "recompute+offload": "recompute+offload",
    "offload to RAM": "offload",
    "keep, states on disk": "keep",
    "offload to disk": "offload",
}
ON_DISK = {"offload to disk": "keep, states on disk", "keep, states on disk": "keep, states on disk"}
"""The ways with little RAM, so that states are on disk -> the way with which each is compared."""
AMPLE = "1TiB"
_SHARE_IN_RAM = 8
_SLACK, _SLACK_QUICKLY = 64 << 20, 0
"""Bytes of RAM beside the least, without which updates on disk have staging of some KiB."""
_PROBED, _PROBED_QUICKLY = 256 << 20, 4 << 20


class Bench:
    """A decoder and its batches, trained with each way from the same state."""

    def __init__(self, options: argparse.Namespace, directory: str) -> None:
        self._config = QUICK if options.quick else PRESETS[options.model].decoder
        self._device = options.device
        self._steps = options.steps
        self._unified = options.unified
        self._slack = _SLACK_QUICKLY if options.quick else _SLACK
        self._probed = _PROBED_QUICKLY if options.quick else _PROBED
        self._directory = directory
        self._precision = infinity.Precision(compute=options.compute)
        generator = torch.Generator().manual_seed(0)
        shape = (1 + options.steps, options.batch, options.seq + 1)
        self._batches = torch.randint(self._config.vocabulary, shape, generator=generator)
        self._budgets = {way: self._budget(way) for way in options.ways}

    def _facts(self, way: str) -> dict[str, Any]:
        tokens = self._batches[0]
        return {
            "precision": self._precision,
            "device": self._device,
            "activations": WAYS[way],
            "example_inputs": (tokens[:, :-1], tokens[:, 1:]),
        }

    def _made(self, device: str) -> tuple[Decoder, torch.optim.Optimizer]:
        torch.manual_seed(1)
        with torch.device(device):
            model = Decoder(self._config)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def _budget(self, way: str) -> infinity.Budget:
        ample = infinity.Budget(host=AMPLE)
        if not self._unified:
            ample = replace(ample, device=self._least(way, replace(ample, device="64KiB")))
        plan = self._plan(way, ample)
        used = AMPLE_BYTES - plan.free(Tier.HOST)
        if way not in ON_DISK:
            return replace(ample, host=used + self._slack)
        room = plan.residuals.ram
        disk = {self._directory: 4 * used}
        least = self._least(way, replace(ample, host="64KiB", nvme=disk))  # with RAM for all that leaves
        return replace(ample, host=least - room + room // _SHARE_IN_RAM + self._slack, nvme=disk)

    def _plan(self, way: str, budget: infinity.Budget) -> infinity.Plan:
        return infinity.plan(*self._made("meta"), budget=budget, **self._facts(way))

    def _least(self, way: str, budget: infinity.Budget) -> int:
        """The bytes that the tier needs of which `budget` has too little."""
        try:
            self._plan(way, budget)
        except BudgetError as error:
            return error.needed or 0
        raise AssertionError(f"{budget} is enough")

    def turn(self, way: str) -> dict[str, Any]:
        """Train with one way. Returns the median "seconds" of the timed steps, the "losses", the "bytes" that
        the plan moves over the link and the disk in a step, and "disk": seconds that the disk needs for them.
        """
        model, optimizer = self._made("cpu")
        speed = disk_speed(self._directory, nbytes=self._probed) if way in ON_DISK else None
        seconds, losses = [], []
        with infinity.offload(model, optimizer, budget=self._budgets[way], **self._facts(way)) as runtime:
            for tokens in self._batches:
                start = time.perf_counter()
                loss = model(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
                seconds.append(time.perf_counter() - start)
                losses.append(loss.item())
                del loss
            plan = runtime.plan
        room, traffic = plan.residuals.room, plan.traffic
        moved = {name: getattr(room, name, 0) for name in ("down", "up", "written", "read")}
        moved |= {"disk": traffic.disk_write + traffic.disk_read}
        disk = 0.0
        if speed is not None:
            disk = traffic.disk_write / speed.write + traffic.disk_read / speed.read
        return {
            "seconds": statistics.median(seconds[1:]),
            "losses": losses,
            "bytes": moved,
            "activations": plan.activations,
            "disk": disk,
        }


AMPLE_BYTES = infinity.Budget(host=AMPLE).host_bytes or 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--directory", required=True, help="a directory on the disk to use")
    parser.add_argument("--model", choices=PRESETS, default="124m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1, help="timed steps in a turn")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--compute", default="bf16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--unified", action="store_true", help="no device budget: the CPU computes in RAM")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.batch, options.seq = 1, 2, 256
    kept = ["keep", *(ON_DISK[way] for way in options.ways if way in ON_DISK)]
    options.ways = [*dict.fromkeys(kept + options.ways)]
    return options


def measure(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Run all rounds. Returns "same_bits" (of the losses), and for each way in "results" the medians over
    rounds of "seconds" and of "ratio" (the speed divided by that of "keep"), all "ratios", and "of_limit":
    the median of its seconds divided by those of its limit.
    """
    bench = Bench(options, directory)
    rounds = in_turns(options.ways, options.rounds, bench.turn)
    results = compared(rounds, "keep")
    for way, found in results.items():
        kept = ON_DISK.get(way, "keep")
        limits = [max(turns[kept]["seconds"], turns[way]["disk"]) for turns in rounds]
        seconds = [turns[way]["seconds"] for turns in rounds]
        found["of_limit"] = statistics.median(map(truediv, seconds, limits))
        found["activations"] = rounds[-1][way]["activations"]
    same = all(turn["losses"] == turns["keep"]["losses"] for turns in rounds for turn in turns.values())
    return {"same_bits": same, "results": results}


def show(report: dict[str, Any]) -> None:
    heads = (("live MB", 10), ("left MB", 10), ("written MB", 12), ("all disk MB", 13))
    print(
        f"\n{'':20}{'s':>9}{'ratio':>20}{'of limit':>10}" + "".join(f"{head:>{size}}" for head, size in heads)
    )
    for way, found in report["results"].items():
        moved = found["bytes"]
        sizes = (found["activations"], moved["down"], moved["written"], moved["disk"])
        print(
            f"{way:20}{found['seconds']:9.3f}{spread(found):>20}{found['of_limit']:10.3f}"
            + "".join(f"{nbytes / 1e6:{size}.1f}" for nbytes, (_, size) in zip(sizes, heads, strict=True))
        )
    print("losses have the same bits" if report["same_bits"] else "LOSSES DIFFER")


def main(argv: list[str] | None = None) -> int:
    return run("activations", parse(argv), measure, show)


if __name__ == "__main__":
    sys.exit(main())
