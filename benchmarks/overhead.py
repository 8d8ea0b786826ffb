"""Counts the calls that Python makes in a training step: for the step, a unit, a chunk and a parameter.

Calls are counted and no time is measured, so the machine may be busy. Small models train under forced
layouts: a chosen number of units, of chunks in a unit and of parameters in a unit. The homes of pages are
chosen by one of the names below. Except under "unified", the device has memory of its own, for which the CPU
stands in:

    host      all pages rest in RAM below the device
    nvme      all pages rest on the disk
    offload   parameters rest both on the device and in RAM (mirrored), other pages in RAM, as in ZeRO-Offload
    tight     parameters rest on the device alone, other pages in RAM
    unified   all pages rest in RAM, where the CPU computes

A step is forward, backward, `step()` and `zero_grad()`. Its calls are the interpreter's events for profilers
(sys.setprofile) in the training thread, which also runs the backward of a CPU, and in every Python thread
that the runtime starts. The event "call" is the call of a Python function, or a generator that continues.
The event "c_call" is the call of a built-in function or method. Operators, attributes and nanobind's
functions cause no event. Python 3.12 reports more kinds of C calls than 3.11 does, so only counts of one
version can be compared.

The calls of the model itself are subtracted: its forward and backward are counted without infinity. A filter
by file would also drop the calls that the runtime makes of torch and the standard library. The subtraction is
exact, because a model alone makes the same calls every time. torch's optimizer is not subtracted, because the
runtime replaces it. The result is the median of the counted steps. Their spread is shown too, because the
number of calls depends on whether a read from the disk has already arrived.

Over all layouts, a least-squares fit of the relative errors gives

    calls = a + b x units + c x chunks + d x parameters + e x further pieces

A unit of one chunk and one parameter adds b + c + d calls. A further piece is a part of a parameter in a
chunk after the first part in that chunk. "worst" is the largest relative error of the fit over all layouts.
The fit is not exact: for example, chunks are updated in another way if a unit has more chunks than fit in
staging.

    python benchmarks/overhead.py [--directory DISK] [--update lazy eager] [--home host nvme ...] [--json]
    python benchmarks/overhead.py --ways [--directory DISK] [--json]

`--json`: the last line of stdout is one JSON object. `--quick`: a smoke test with at most 2 chunks a unit.
`--ways`: instead, the calls of the package's own Python functions in the calling thread, and their files,
folders and classes, on three ways through the package: a forward, `step()`, and a commit.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from machine_facts import machine_facts
from torch import nn

import infinity
from infinity.cpu_adam import BLOCK
from infinity.planning import homes
from infinity.planning.placement import Kind, WorkingRoom
from infinity.tiers import Tier

PRECISION = infinity.Precision(compute="bf16")
WIDTH = 16
"""Number of elements in the activation, and in a row of every parameter."""
STAGED, PAGES = 16, 3
"""Working room of all plans: the number of chunks that can be under update at one time, and the number of
parameter pages that can be resident beside those whose home is where the model computes."""
WARM_UP = 4
"""Number of first steps, which are not counted: in them the runtime learns the order of accesses."""
HOMES = {
    "host": (Tier.HOST, Tier.HOST),
    "nvme": (Tier.NVME, Tier.NVME),
    "offload": (Tier.HOST, Tier.HOST),
    "tight": (Tier.DEVICE, Tier.HOST),
    "unified": (Tier.HOST, Tier.HOST),
}
"""For each name of homes: the tier of parameters, and the tier of gradients and optimizer states."""
UPDATES = ("lazy", "eager")
KINDS = ("python", "c", "sum")
FACTORS = "abcde"


@dataclass(frozen=True)
class Layout:
    """The layout of a model: its number of units, and the chunks and parameters of a unit."""

    units: int
    chunks: int
    """Number of chunks in each unit."""
    parameters: int
    """Number of parameters in each unit, all of the same size."""

    @property
    def terms(self) -> tuple[int, ...]:
        """The multipliers of the factors a to e in the fitted formula (see the module): 1, and the whole
        model's numbers of units, chunks, parameters and further pieces.
        """
        further = max(0, self.parameters - self.chunks)
        return 1, *(self.units * each for each in (1, self.chunks, self.parameters, further))


class Unit(nn.Module):
    """Module whose forward does, for each parameter p, activation += F.linear(activation, p).mean()."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        rows = layout.chunks * BLOCK // layout.parameters // WIDTH
        for number in range(layout.parameters):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.randn(rows, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self._parameters.values():
            x = x + F.linear(x, weight).mean()
        return x


def model_of(layout: Layout) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Unit(layout) for _ in range(layout.units)))


class Calls:
    """Counter of calls, in this thread and in the threads that Python starts while it is installed."""

    def __init__(self) -> None:
        self._counting = False
        self._found: dict[int, list[int]] = {}
        """Numbers of Python calls and of C calls by id of the thread. Threads must not share a counter."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which calls can be counted.

        Inside, automatic garbage collection is off, because it would call finalizers at any time.
        """
        gc.collect()
        gc.disable()
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            gc.enable()

    def of(self, action: Callable[[], Any]) -> tuple[int, int]:
        """Run `action`, inside `installed`, and return (calls of Python functions, calls of C functions).

        The call of `action` itself counts too.
        """
        self._found.clear()
        self._counting = True
        action()
        self._counting = False
        python, c = (sum(found[kind] for found in list(self._found.values())) for kind in (0, 1))
        return python, c

    def _event(self, frame: object, event: str, argument: object) -> None:
        if self._counting and event in ("call", "c_call"):
            self._found.setdefault(threading.get_ident(), [0, 0])[event == "c_call"] += 1


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """Context in which plans get the layout and the working room that this benchmark wants.

    Every module with parameters is a unit of its own, every chunk has at most BLOCK elements, and the
    working room is that of STAGED and PAGES.
    """
    rooms = (WorkingRoom(PAGES, updates=STAGED, transit_buffers=STAGED),)
    with (
        mock.patch.object(homes, "_groupings", lambda surveyed: [surveyed.group(1)]),
        mock.patch.object(homes, "_CHUNKS", (BLOCK,)),
        mock.patch.object(homes, "WORKING_ROOMS", rooms),
    ):
        yield


def budget_for(
    home: str, layout: Layout, model: nn.Module, directory: str, accumulation: int | None
) -> infinity.Budget:
    """The budget with which pages have the homes named `home`, a key of HOMES.

    The sizes come from a plan with ample budgets. accumulation: the argument of infinity.plan.
    """
    plan = infinity.plan(
        model,
        torch.optim.AdamW(model.parameters()),
        budget=infinity.Budget(device="1GiB", host="1GiB"),
        precision=PRECISION,
        device="cpu",
        accumulation=accumulation,
    )
    pages = sum(plan.home_bytes.values())
    working = STAGED * plan.chunk_update_bytes + (1 + STAGED) * plan.transit_buffer_bytes
    page = plan.layout.units[0].nbytes
    if home == "unified":
        return infinity.Budget(host=pages + working + PAGES * page)
    device = (layout.units if home in ("offload", "tight") else PAGES) * page
    if home == "nvme":
        return infinity.Budget(device=device, host=working, nvme={directory: 2 * pages})
    mirrors = 0 if home == "tight" else layout.units * page
    return infinity.Budget(device=device, host=pages - layout.units * page + mirrors + working)


def check(plan: Any, home: str, layout: Layout) -> None:
    """Assert that the plan has the wanted layout and homes."""
    assert len(plan.layout.units) == layout.units
    assert {len(unit.chunks) for unit in plan.layout.units} == {layout.chunks}
    assert {len(unit.parameters) for unit in plan.layout.units} == {layout.parameters}
    near, far = HOMES[home]
    wanted = {Kind.PARAMETER: near, Kind.GRADIENT: far, Kind.OPTIMIZER: far}
    assert all(unit == wanted for unit in plan.homes), plan.homes
    assert len(plan.mirrored) == (layout.units if home == "offload" else 0)


def batch() -> torch.Tensor:
    return torch.ones(1, WIDTH, dtype=torch.bfloat16)


def plain_calls(layout: Layout, calls: Calls) -> tuple[int, int]:
    """Run a forward and backward of the model without infinity, and count the calls in it.

    Returns (number of calls of Python functions, number of calls of C functions).
    """
    model, x = model_of(layout).to(torch.bfloat16), batch()

    def step() -> None:
        model(x).sum().backward()

    step()  # this first step imports modules
    return calls.of(step)


def step_calls(
    layout: Layout, calls: Calls, *, home: str, update: str, directory: str, steps: int
) -> list[tuple[int, int]]:
    """Train with infinity, and count the calls in each of `steps` steps after the warm-up.

    Returns for each step (number of calls of Python functions, number of calls of C functions).
    """
    model, x = model_of(layout), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    accumulation = 1 if update == "eager" else None
    with forced():
        runtime = infinity.offload(
            model,
            optimizer,
            budget=budget_for(home, layout, model, directory, accumulation),
            precision=PRECISION,
            device="cpu",
            update=update,
            accumulation=accumulation,
        )
    with runtime:
        check(runtime.plan, home, layout)

        def step() -> None:
            model(x).sum().backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()

        for _ in range(WARM_UP):
            step()
        return [calls.of(step) for _ in range(steps)]


def measure(
    layouts: list[Layout], home: str, update: str, directory: str, steps: int
) -> list[dict[str, Any]]:
    """Train every layout, and return a dictionary for each: its fields, and the calls of a step.

    "python", "c" and "sum" are medians over the steps, and "spread" is the largest less the smallest sum. The
    calls of the model itself are subtracted.
    """
    found = []
    for layout in layouts:
        calls = Calls()
        with calls.installed():
            plain = plain_calls(layout, calls)
            counted = step_calls(layout, calls, home=home, update=update, directory=directory, steps=steps)
        each = [(python - plain[0], c - plain[1]) for python, c in counted]
        sums = [sum(one) for one in each]
        row = {
            "python": statistics.median(python for python, _ in each),
            "c": statistics.median(c for _, c in each),
            "sum": statistics.median(sums),
            "spread": max(sums) - min(sums),
        }
        found.append(asdict(layout) | row)
    return found


def fitted(layouts: list[Layout], rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Fit the formula (see the module) to each kind of call: "python", "c" and their "sum".

    rows: the result of `measure` for `layouts`. Returns, for each kind, a dictionary of the factors "a" to
    "e" and of the fit's largest relative error, "worst".
    """
    terms = np.array([layout.terms for layout in layouts], dtype=np.float64)
    found = {}
    for kind in KINDS:
        counts = np.array([row[kind] for row in rows], dtype=np.float64)
        relative = terms / counts[:, None]
        factors = np.linalg.lstsq(relative, np.ones(len(rows)), rcond=None)[0]
        worst = float(np.max(np.abs(relative @ factors - 1)))
        values = dict(zip(FACTORS, map(float, factors), strict=True))
        found[kind] = values | {"worst": worst}
    return found


def show(update: str, home: str, fits: dict[str, dict[str, float]], rows: list[dict[str, Any]]) -> None:
    print(f"\n{update}, {home}: calls of a step")
    names = ("", "a step", "b unit", "c chunk", "d parameter", "e piece", "b + c + d", "worst")
    print("".join(f"{name:>12}" for name in names))
    for kind, fit in fits.items():
        values = [*(fit[factor] for factor in FACTORS), fit["b"] + fit["c"] + fit["d"]]
        print(f"{kind:>12}" + "".join(f"{value:12.1f}" for value in values) + f"{fit['worst']:12.1%}")
    for row in rows:
        print(
            f"    {row['units']:3} units of {row['chunks']:2} chunks and {row['parameters']} parameters: "
            f"{row['python']:.0f} + {row['c']:.0f} = {row['sum']:.0f} (spread {row['spread']})"
        )


class Ways:
    """The calls of Python functions of the package in this thread."""

    def __init__(self) -> None:
        self._root = str(Path(infinity.__file__).parent) + "/"
        self._codes: list[CodeType] = []

    def of(self, action: Callable[[], Any]) -> dict[str, int]:
        """Run `action`, and count its calls, their files, folders and classes."""
        self._codes.clear()
        gc.disable()
        sys.setprofile(self._event)
        try:
            action()
        finally:
            sys.setprofile(None)
            gc.enable()
        files = {code.co_filename for code in self._codes}
        owners = {(code.co_filename, *code.co_qualname.split(".")[:-1][:1]) for code in self._codes}
        return {
            "calls": len(self._codes),
            "files": len(files),
            "folders": len({Path(file).parent for file in files}),
            "classes": sum(name.strip("_")[:1].isupper() for _, *owner in owners for name in owner),
        }

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._root):
            self._codes.append(frame.f_code)


def ways(directory: Path) -> dict[str, dict[str, int]]:
    """Count the three ways through the package, on a model of 6 blocks of two linear layers, in fp32."""
    with tempfile.TemporaryDirectory(prefix="infinity-overhead-", dir=directory) as folder:
        on_disk = infinity.Budget(host="6MiB", nvme={folder: "1GiB"})
        run = str(Path(folder) / "run")
        return ways_of("RAM", infinity.Budget(host="1GiB"), None) | ways_of("NVMe", on_disk, run)


def ways_of(home: str, budget: infinity.Budget, checkpoint: str | None) -> dict[str, dict[str, int]]:
    """Count forward, backward and step() with this budget, and a commit if there is a checkpoint."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)]
    model, x = nn.Sequential(*blocks), torch.randn(8, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options: dict[str, Any] = {"precision": infinity.Precision(compute="fp32"), "device": "cpu"}
    found, counter, commits = {}, Ways(), []
    with infinity.offload(model, optimizer, budget=budget, checkpoint=checkpoint, **options) as runtime:

        def step(count: Callable[[str, Callable[[], Any]], None]) -> None:
            count("forward", lambda: model(x))
            count("backward", model(x).sum().backward)
            count("step()", runtime.optimizer.step)
            runtime.optimizer.zero_grad()

        def commit_ends() -> None:
            step(lambda name, action: action())
            commits[0].wait()

        for _ in range(WARM_UP):
            step(lambda name, action: action())
        step(lambda name, action: found.update({f"{name}, {home}": counter.of(action)}))
        if checkpoint is not None:
            found["save()"] = counter.of(lambda: commits.append(runtime.save()))
            found["a step, the commit's end"] = counter.of(commit_ends)
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="a directory on a disk"
    )
    parser.add_argument("--update", choices=UPDATES, nargs="+", default=UPDATES)
    parser.add_argument("--home", choices=HOMES, nargs="+", default=tuple(HOMES))
    parser.add_argument("--steps", type=int, default=5, help="number of counted steps")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ways", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error("--steps is not positive")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    units, chunks, parameters = ((4,), (1, 2), (1, 2)) if options.quick else ((6, 12), (1, 4, 64), (1, 4))
    layouts = [Layout(*sizes) for sizes in itertools.product(units, chunks, parameters)]
    steps = 1 if options.quick else options.steps
    torch.set_num_threads(1)
    if options.ways:
        counted = ways(options.directory)
        for name, row in counted.items():
            print(f"{name:>28}: " + ", ".join(f"{count} {what}" for what, count in row.items()))
        if options.json:
            print(json.dumps({"benchmark": "ways", "machine": machine_facts(), "results": counted}))
        return 0
    results = []
    for update, home in itertools.product(options.update, options.home):
        with tempfile.TemporaryDirectory(prefix="infinity-overhead-", dir=options.directory) as directory:
            rows = measure(layouts, home, update, directory, steps)
        fits = fitted(layouts, rows)
        show(update, home, fits, rows)
        results.append({"update": update, "home": home, "calls": fits, "layouts": rows})
    if options.json:
        print(json.dumps({"benchmark": "overhead", "machine": machine_facts(), "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
