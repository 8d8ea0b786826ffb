"""Compares the seconds of a training step in this checkout and in another checkout, in turns.

    python benchmarks/against.py --against DIR --directory DISK --budget host=1600MiB --rounds 12

With `--unverified` in place of `--against`, B is this checkout with `Budget(verify=False)`.

Three processes keep a model each. A and A' run this checkout; B runs the other checkout, whose native
modules must be built. In every round each process takes a turn of `--steps` steps, in rotating order. The
ratios of seconds A / A' and B / A are printed: their medians over the rounds, the smallest and the largest.
A ratio B / A above 1 says that this checkout is faster. The spread of A / A' shows how far the ratio of
equal checkouts is from 1 in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]


def work(options: argparse.Namespace) -> None:
    """Build a model, print a line of JSON when it is ready, then train one turn for each line on stdin.

    After each turn of `options.steps` steps, print a line of JSON with the mean seconds of a step and the
    last loss. Returns when stdin ends. options: the program's options.
    """
    import torch

    import infinity
    from infinity.lm.decoder import Decoder

    try:
        from infinity.lm.decoder import PRESETS
    except ImportError:  # an older checkout
        from infinity.lm.presets import PRESETS

    torch.manual_seed(0)
    with torch.device("meta"):
        model = Decoder(PRESETS[options.model].decoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sizes = dict(each.split("=", 1) for each in options.budget.split(","))
    nvme = {options.directory: sizes["nvme"]} if "nvme" in sizes else None
    runtime = infinity.offload(
        model,
        optimizer,
        budget=infinity.Budget(
            device=sizes.get("device"), host=sizes.get("host"), nvme=nvme, verify=not options.unverified
        ),
        precision=infinity.Precision(compute="bf16", states=options.states),
        update=options.update,
        accumulation=1 if options.update == "eager" else None,
    )
    tokens = torch.randint(0, 256, (1, options.seq + 1), generator=torch.Generator().manual_seed(1))

    def step() -> float:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        if options.clip:
            runtime.clip_grad_norm_(options.clip)
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        return float(loss)

    with runtime:
        for _ in range(2):
            step()
        print(json.dumps({"ready": True}), flush=True)
        for _ in sys.stdin:
            began = time.perf_counter()
            losses = [step() for _ in range(options.steps)]
            seconds = (time.perf_counter() - began) / options.steps
            print(json.dumps({"seconds": seconds, "loss": losses[-1]}), flush=True)


class Contender:
    """A process that trains a turn when told to. checkout: the folder from which it imports infinity."""

    def __init__(self, checkout: Path, arguments: list[str], directory: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", *arguments, "--directory", directory],
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,
        )
        self._answer()

    def turn(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"A contender ended with {self._process.wait()}.")
        found: dict[str, Any] = json.loads(line)
        return found


def spread(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout of another commit, native modules built")
    parser.add_argument("--unverified", action="store_true", help="do not verify reads from NVMe in B")
    parser.add_argument("--directory", required=True, help="a directory on the disk to use")
    parser.add_argument("--model", default="309m")
    parser.add_argument("--budget", default="host=6GiB", help="such as device=256MiB,host=768MiB,nvme=20GiB")
    parser.add_argument("--update", default="lazy")
    parser.add_argument("--states", default="fp32")
    parser.add_argument(
        "--clip", type=float, default=1.0, help="norm to which all gradients are clipped; 0: not clipped"
    )
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1, help="steps in a turn")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        return work(options)
    own = ("model", "budget", "update", "states", "clip", "seq", "steps")
    passed = [part for name in own for part in (f"--{name}", str(getattr(options, name)))]
    checkouts = {"A": HERE, "A'": HERE, "B": HERE if options.unverified else options.against.resolve()}
    with tempfile.TemporaryDirectory(dir=options.directory) as top:
        contenders = {}
        for name, checkout in checkouts.items():
            directory = Path(top) / str(len(contenders))
            directory.mkdir()
            unverified = ["--unverified"] * (options.unverified and name == "B")
            contenders[name] = Contender(checkout, passed + unverified, str(directory))
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        losses: dict[str, list[float]] = {name: [] for name in contenders}
        names = list(contenders)
        for number in range(options.rounds):
            for name in names[number % 3 :] + names[: number % 3]:
                turn = contenders[name].turn()
                seconds[name].append(turn["seconds"])
                losses[name].append(turn["loss"])
            print(number + 1, {name: round(each[-1], 3) for name, each in seconds.items()}, flush=True)
        for contender in contenders.values():
            contender.end()
    ratios = {
        "A / A'": spread([a / b for a, b in zip(seconds["A"], seconds["A'"], strict=True)]),
        "B / A": spread([b / a for a, b in zip(seconds["A"], seconds["B"], strict=True)]),
    }
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    equal = losses["A"] == losses["A'"] == losses["B"]
    print(f"seconds a step {medians}\n{ratios}\nlosses {'have the same bits' if equal else 'differ'}")
    print(json.dumps({"seconds": seconds, "medians": medians, "ratios": ratios, "equal_losses": equal}))
    return None


if __name__ == "__main__":
    main()
