"""Tests that pages go from NVMe to the device and back by the functions that docs/architecture.md names.

Every function that the section "A page's way" names is called. The first calls come in the order of the
section, except those of ANY_TIME.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
from emulated_device import EmulatedDevice
from random_programs import Blocks, Place, adamw, budget_of, stepped
from small_runtime import TIED, opened, train_step

import infinity

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
NAMED = re.compile(r"`([A-Z]\w+)\.(\w+)`")
ANY_TIME = {"NvmeTier.lease", "Store.write", "ParameterPage.leave", "NvmeTier.read", "Store.read"}
"""Functions of which only the call is checked and not its order. Their first call may be for another purpose,
such as filling the pages, another page or an earlier update.
"""


def named() -> list[str]:
    """The functions that the section "A page's way" of docs/architecture.md names, in order of appearance."""
    text = PAGE.read_text()
    section = text[text.index("## A page's way") : text.index("## A step")]
    return list(dict.fromkeys(".".join(found) for found in NAMED.findall(section)))


def classes() -> dict[str, type]:
    """Every class of the package by its name."""
    found: dict[str, type] = {}
    for info in pkgutil.walk_packages(infinity.__path__, "infinity."):
        if not info.name.rpartition(".")[2].startswith(("_", "lib", "plot")):
            module = importlib.import_module(info.name)
            found |= {
                name: value
                for name, value in vars(module).items()
                if isinstance(value, type) and value.__module__ == info.name
            }
    return found


def watch(monkeypatch: pytest.MonkeyPatch) -> dict[str, None]:
    """Watch the functions of `named`. Returns a dict that gets their names in the order of first calls."""
    called: dict[str, None] = {}
    known = classes()
    for each in named():
        owner, function = each.split(".")
        real = getattr(known[owner], function)

        def wrapped(*args: Any, _each: str = each, _real: Any = real, **kwargs: Any) -> Any:
            called.setdefault(_each)
            return _real(*args, **kwargs)

        monkeypatch.setattr(known[owner], function, wrapped)
    return called


def test_a_page_takes_the_way_that_the_map_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = budget_of(Place("nvme"))
    called = watch(monkeypatch)
    with EmulatedDevice().in_use():
        model = Blocks()
        with infinity.offload(
            model, adamw(model), budget=budget, precision=infinity.Precision(compute="fp32"), device="cpu"
        ) as runtime:
            for _ in range(2):
                stepped(model, runtime)
        apart = list(called)
        model = Blocks()
        options = {"precision": infinity.Precision(compute="fp32"), "device": "cpu"}
        with infinity.offload(model, adamw(model), budget=budget_of(Place("host")), **options) as runtime:
            stepped(model, runtime)
    with opened(TIED.make(), tmp_path, home="unified") as runtime:
        train_step(runtime._model, runtime)
    assert set(named()) - set(called) == set(), "named, and on no page's way"
    in_order = [each for each in named() if each not in ANY_TIME and each in apart]
    assert [each for each in apart if each in in_order] == in_order
    assert len(in_order) >= 7
