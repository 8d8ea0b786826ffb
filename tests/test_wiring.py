"""Tests of how the package's objects come to know each other: what one calls, it gets when it is built."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from types import FrameType, FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import nn

import infinity

PACKAGE = Path(__file__).parents[1] / "infinity"
KNOWN = {("Pager", "gradients"), ("Pager", "read_master")}
"""Attributes that are set later all the same, (class, name). The set is to become empty."""


def room(module: str) -> str:
    """The folder of the package that has a module; of a file beside the folders its own name."""
    return module.split(".")[1] if "." in module else module


def imports() -> dict[str, set[str]]:
    """Return the folders that the files of each folder import from, the folder itself included."""
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        here = room(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
        below = found.setdefault(here, {here})
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("infinity"):
                below |= {room(f"{node.module}.{each.name}") for each in node.names}
    return found


def called(value: object) -> str | None:
    """The module of what a call of `value`, or of its methods, runs; None if that is not the package's."""
    value = getattr(value, "func", value)  # of a partial
    value = value.__self__ if isinstance(value, MethodType) else value
    module = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    return module if module.startswith("infinity") else None


def being_built(owner: object, frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("__init__", "__post_init__") and frame.f_locals.get("self") is owner:
            return True
        frame = frame.f_back
    return False


class Watch:
    """The attributes that got, after their object was built, something to call in a folder above its own."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        self._imports = imports()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        modules = [each for name, each in list(sys.modules.items()) if name.startswith("infinity.")]
        for module in modules:
            for kind in vars(module).values():
                own = inspect.isclass(kind) and kind.__module__ == module.__name__
                if own and kind.__setattr__ is object.__setattr__:
                    patch.setattr(kind, "__setattr__", self._setter())

    def _setter(self) -> Any:
        def setter(owner: object, name: str, value: object) -> None:
            object.__setattr__(owner, name, value)
            module, here = called(value), room(type(owner).__module__)
            above = module is not None and room(module) not in self._imports[here]
            if above and not being_built(owner, sys._getframe(1)):
                self.found.add((type(owner).__name__, name))

        return setter


def test_nothing_is_set_after_construction_to_call_upwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run with pages on NVMe, commits, accumulation and an edit no object gets a callee of a folder that
    its own folder does not import, unless by its constructor. It counts whoever sets it, under whatever name.
    """
    watch = Watch()
    watch.install(monkeypatch)
    model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    budget = infinity.Budget(host="8MiB", nvme={tmp_path: "64MiB"})
    batches = torch.randn(4, 3, 64)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    with infinity.offload(
        model, optimizer, budget=budget, device="cpu", checkpoint=tmp_path / "run"
    ) as runtime:
        for _ in range(2):
            runtime.accumulate(list(batches), loss_of)
            loss_of(batches[0]).backward()
            runtime.clip_grad_norm_(1.0)
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            with torch.no_grad():
                model[0].weight.mul_(0.5)
        runtime.save().wait()
    assert watch.found - KNOWN == set()
