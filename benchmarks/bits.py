"""Compares the bits with which trainings end in two checkouts, case by case.

Small models train from every home, in all ways that may change a bit (accumulation, clipping, param groups,
dtypes, formats of moments, optimizers), with lazy and with eager updates. The result of a case is a digest:
SHA-256 of the bits of every loss, and of all parameters, fp32 masters and moments at the end. The digest
must not depend on the home of pages, and a commit that claims to change no bit must not change a digest.

    python benchmarks/bits.py [--case PATTERN ...] > bits.json
    python benchmarks/bits.py --against DIR [--case PATTERN ...]

The last line of stdout is one JSON object: digests by names of cases. With `--against DIR` the same cases of
this script also train with the package in DIR, in a second process. DIR is a checkout of another commit with
its native modules built. The script prints "N of N cases have the same bits", or the names of the cases that
differ, and then exits with 1.

Models, homes and the training loop are those of this checkout's parity tests (zoo.py, homes.py
and parity.py), which choose the homes of pages by budgets alone. On a CPU no budget makes updates run
on the device, so the cases named "device updates" patch the package (`infinity.planning.twin_flow`), as the
tests do. If a checkout has no such module, the case has a reason in place of the digest. The bits of these
cases may change from one commit to another: `--without-device-updates` leaves the cases out.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
sys.path += [os.fspath(SUPPORT / kind) for kind in ("runs", "devices", "crash", "ranks")]

import parity  # noqa: E402
import zoo  # noqa: E402
from homes import HOMES  # noqa: E402

import infinity  # noqa: E402

MODEL = "transformer"
"""The model, a name in zoo.py, that trains with most combinations of options. Others have few cases."""
FORMATS = (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("bf16", "int8"))
"""Pairs of formats that are combined: (compute dtype, format of optimizer states)."""
DEVICE_UPDATES = "device updates"


@dataclass(frozen=True)
class Case:
    """One training run, whose bits give a digest.

    model: a name in zoo.py. home: where pages rest, one of homes.py's HOMES. update: "lazy" or
    "eager". recipe: all other options of the training.
    """

    model: str
    home: str
    update: str
    recipe: parity.Recipe
    on_device: bool = False
    """Whether pages that rest on the device are updated there, as on a GPU."""

    @property
    def name(self) -> str:
        recipe = self.recipe
        words = [
            *((DEVICE_UPDATES,) if self.on_device else ()),
            self.model,
            self.home,
            self.update,
            f"accumulate {recipe.accumulate}",
            "clipped" if recipe.clip else "unclipped",
            f"groups {recipe.groups}",
            f"{recipe.compute} with {recipe.states} states",
            recipe.optimizer,
        ]
        return ", ".join(words)

    def run(self, directory: Path) -> str:
        """Train and return the digest. directory: folder for the pages on NVMe.

        Raises AssertionError if pages do not have the homes of the case.
        """
        if not self.on_device:
            return digest(self._trained(directory))
        from infinity.planning import twin_flow

        with (
            mock.patch.object(twin_flow, "has_kernels", lambda device: True),
            mock.patch.object(twin_flow, "_DISK_AGAINST_LINK", 0),
        ):
            return digest(self._trained(directory))

    def _trained(self, directory: Path) -> parity.Run:
        return parity.paged(zoo.entry(self.model), self.recipe, self.home, directory, update=self.update)


def cases(steps: int) -> Iterator[Case]:
    """Yield all cases. steps: number of training steps in a case."""
    ways = itertools.product(HOMES, ("lazy", "eager"), (1, 4), (None, 0.1), (1, 2), FORMATS)
    for home, update, accumulate, clip, groups, (compute, states) in ways:
        if update == "eager" and clip is not None:
            continue  # clipping needs all gradients before the first update
        recipe = parity.Recipe(
            accumulate=accumulate, clip=clip, groups=groups, compute=compute, states=states, steps=steps
        )
        yield Case(MODEL, home, update, recipe)
    for home in HOMES:
        for optimizer in parity.OPTIMIZERS:
            recipe = parity.Recipe(groups=2, optimizer=optimizer, steps=steps, decay_rate=True)
            if optimizer != "adamw":
                yield Case(MODEL, home, "lazy", recipe)
        yield Case(MODEL, home, "lazy", parity.Recipe(compute="fp16", clip=0.1, steps=steps))
        for entry, compute in itertools.product(zoo.ENTRIES, ("fp32", "bf16")):
            if entry.name != MODEL:
                recipe = parity.Recipe(accumulate=4, clip=0.1, groups=2, compute=compute, steps=steps)
                yield Case(entry.name, home, "lazy", recipe)
    for entry, home in itertools.product(zoo.ENTRIES, ("nvme", "mixed")):
        if entry.name != MODEL and entry.one_gradient:
            yield Case(entry.name, home, "eager", parity.Recipe(compute="bf16", steps=steps))
    for update, accumulate, (compute, states) in itertools.product(("lazy", "eager"), (1, 4), FORMATS):
        recipe = parity.Recipe(accumulate=accumulate, compute=compute, states=states, steps=steps)
        yield Case(MODEL, "device", update, recipe, on_device=True)
        if update == "lazy":
            yield Case("channels_last", "device", update, recipe, on_device=True)


def digest(run: parity.Run) -> str:
    """SHA-256 (hexadecimal) of the losses of a run, and of its parameters and optimizer states at the end."""
    found = hashlib.sha256()
    _add(found, [run.losses, run.parameters[-1], run.optimizer["state"]])
    return found.hexdigest()


def _add(to: Any, value: Any) -> None:
    """Feed all values in nested dicts and lists to the hash object `to`. Keys of a dict are sorted first."""
    if isinstance(value, torch.Tensor):
        to.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        to.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            to.update(f"{{{key}: ".encode())
            _add(to, value[key])
    elif isinstance(value, (list, tuple)):
        to.update(f"[{len(value)}".encode())
        for each in value:
            _add(to, each)
    else:
        to.update(f"{value!r}, ".encode())  # repr of a float is exact


def train(chosen: list[Case], parent: Path) -> dict[str, str]:
    """Train the cases. Returns, by the name of the case, the digest or the reason why there is none.

    parent: folder in which each case gets a temporary folder for its pages on NVMe.
    """
    torch.set_num_threads(1)  # the models are tiny
    found = {}
    for number, case in enumerate(chosen, start=1):
        with tempfile.TemporaryDirectory(prefix="infinity-bits-", dir=parent) as directory:
            try:
                found[case.name] = case.run(Path(directory))
            except (ImportError, AttributeError) as error:
                if not case.on_device:
                    raise
                found[case.name] = f"none: {error}"
        print(f"{number}/{len(chosen)} {case.name}", file=sys.stderr, flush=True)
    return found


def trained_with(package: Path, arguments: list[str]) -> dict[str, str]:
    """Run this script in a second process with the package in the folder `package`; return its digests.

    arguments: command line of the script. Raises SystemExit if the folder has no package infinity, or if the
    process fails.
    """
    environment = os.environ | {"PYTHONPATH": os.fspath(package)}
    look = [sys.executable, "-c", "import infinity; print(infinity.__file__)"]
    where = subprocess.run(look, env=environment, cwd=package, capture_output=True, text=True, check=False)
    if where.returncode != 0 or not Path(where.stdout.strip()).is_relative_to(package):
        said = where.stderr.strip().rpartition("\n")[2] or f"it is {where.stdout.strip()} that is imported"
        raise SystemExit(f"{package} has no package infinity that works: {said}")
    command = [sys.executable, os.fspath(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{package} did not finish its cases: code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(ours: dict[str, str], theirs: dict[str, str]) -> int:
    """Print the names of the cases whose digests differ. Returns the exit code: 1 if there are any, else 0.

    ours, theirs: digests by name of case, from this checkout and from the other one.
    """
    assert ours.keys() == theirs.keys()
    differ = [name for name in ours if ours[name] != theirs[name]]
    for name in differ:
        print(f"differs: {name}")
    print(f"{len(ours) - len(differ)} of {len(ours)} cases have the same bits")
    return 1 if differ else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout of another commit, native modules built")
    parser.add_argument("--case", nargs="+", default=["*"], help="names of cases, or patterns of names")
    parser.add_argument("--without-device-updates", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="a directory on a disk"
    )
    parser.add_argument("--list", action="store_true", help="print the names of cases only")
    options = parser.parse_args(argv)
    options.cases = [
        case
        for case in cases(options.steps)
        if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in options.case)
        and not (case.on_device and options.without_device_updates)
    ]
    if not options.cases:
        parser.error("no name of a case matches --case")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.list:
        print("\n".join(case.name for case in options.cases))
        return 0
    ours = train(options.cases, options.directory)
    if options.against is None:
        print(json.dumps(ours))
        return 0
    arguments = ["--steps", str(options.steps), "--directory", os.fspath(options.directory)]
    arguments += ["--without-device-updates"] if options.without_device_updates else []
    theirs = trained_with(options.against.resolve(), [*arguments, "--case", *options.case])
    print(f"this: {Path(infinity.__file__).parents[1]}, against: {options.against.resolve()}")
    return compare(ours, theirs)


if __name__ == "__main__":
    raise SystemExit(main())
