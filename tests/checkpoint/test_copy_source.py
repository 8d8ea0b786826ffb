"""Tests of copies of runs whose files are not what they should be: each is refused by a typed error."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import watchdog
from parity import differences
from run_copies import changed, copy, load_into, offloaded, raw, said, swap
from safetensors.torch import load_file, save_file
from zoo import entry

from infinity.checkpoint.copy_source import CopySource
from infinity.errors import (
    ConfigError,
    CorruptState,
    IncompatibleCheckpoint,
    InfinityError,
)

__all__ = ["copy", "swap", "watchdog"]


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a function that changes what run.json of a copy says."""

    def edit(path: Path) -> None:
        content = said(path)
        change(content)
        (path / "run.json").write_text(json.dumps(content))

    return edit


def first(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["parameters"][0]
    return found


def states_file(path: Path) -> Path:
    return sorted(path.glob("states-*"))[0]


def rewritten(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Return a function that changes the tensors in the first file of states."""

    def rewrite(path: Path) -> None:
        tensors = load_file(states_file(path))
        change(tensors)
        save_file(tensors, states_file(path), {"format": "pt"})

    return rewrite


def replaced_by_link(name: str) -> Callable[[Path], None]:
    """Return a function that moves a file of the copy away, and puts a link to it in its place."""

    def replace(path: Path) -> None:
        file = sorted(path.glob(name))[0]
        file.rename(path.parent / "elsewhere")
        file.symlink_to(path.parent / "elsewhere")

    return replace


WRONG: dict[str, tuple[Callable[[Path], Any], type[InfinityError], str]] = {
    "no record": (lambda path: (path / "run.json").unlink(), ConfigError, "holds no copy"),
    "not JSON": (lambda path: (path / "run.json").write_text("{"), CorruptState, "not JSON"),
    "not UTF-8": (lambda path: (path / "run.json").write_bytes(b"\xff"), CorruptState, "not JSON"),
    "deep JSON": (lambda path: (path / "run.json").write_text("[" * 10**5), CorruptState, "not JSON"),
    "a key twice": (
        lambda path: (path / "run.json").write_text('{"a": 1, "a": 2}'),
        CorruptState,
        "not JSON",
    ),
    "a list": (lambda path: (path / "run.json").write_text("[]"), CorruptState, "does not describe"),
    "a format": (edited(lambda c: c.update(format="x")), CorruptState, "does not describe"),
    "a version": (edited(lambda c: c.update(version=1)), IncompatibleCheckpoint, "version 1"),
    "no version": (edited(lambda c: c.pop("version")), IncompatibleCheckpoint, "version None"),
    "a bool for a version": (edited(lambda c: c.update(version=True)), IncompatibleCheckpoint, "True"),
    "no parameters": (edited(lambda c: c.pop("parameters")), CorruptState, "run.json"),
    "an optimizer": (edited(lambda c: c["optimizer"].update(states="fp8")), CorruptState, "run.json"),
    "a step": (edited(lambda c: first(c).update(step=-1)), CorruptState, "run.json"),
    "a size": (edited(lambda c: first(c)["shape"].insert(0, 1 << 70)), CorruptState, "run.json"),
    "strides": (edited(lambda c: first(c).update(stride=[1] * 2)), CorruptState, "run.json"),
    "a dtype": (edited(lambda c: first(c).update(dtype="F16")), CorruptState, r"bfloat16 and not .* float16"),
    "a flag": (edited(lambda c: first(c).update(trainable=1)), CorruptState, "run.json"),
    "a name twice": (
        edited(lambda c: first(c)["names"].append(c["parameters"][1]["names"][0])),
        CorruptState,
        "run.json",
    ),
    "an absolute path": (edited(lambda c: c["files"].append("/etc/passwd")), CorruptState, "run.json"),
    "a parent": (edited(lambda c: c["files"].append("../model.safetensors")), CorruptState, "run.json"),
    "a folder": (edited(lambda c: c["files"].append("a/model.safetensors")), CorruptState, "run.json"),
    "a line end": (edited(lambda c: c["files"].append("model.safetensors\n")), CorruptState, "run.json"),
    "a file twice": (edited(lambda c: c["files"].append(c["files"][0])), CorruptState, "run.json"),
    "a file that is not named": (edited(lambda c: c["files"].pop()), CorruptState, "its files lack"),
    "a file that is not there": (lambda path: states_file(path).unlink(), CorruptState, "is missing"),
    "an array too many": (
        rewritten(lambda tensors: tensors.update({"head.bias|extra": torch.ones(2)})),
        CorruptState,
        r"head\.bias\|extra does not belong",
    ),
    "an array too few": (rewritten(lambda tensors: tensors.popitem()), CorruptState, "its files lack"),
    "an array of another dtype": (
        rewritten(lambda tensors: tensors.update({n: t.to(torch.int32) for n, t in tensors.items()})),
        CorruptState,
        "int32 and not",
    ),
    "an array of another size": (
        rewritten(lambda tensors: tensors.update({n: t[1:].clone() for n, t in tensors.items()})),
        CorruptState,
        "and not",
    ),
    "a file cut short": (
        lambda path: os.truncate(states_file(path), states_file(path).stat().st_size - 1),
        CorruptState,
        "header",
    ),
    "a file too long": (
        lambda path: os.truncate(states_file(path), states_file(path).stat().st_size + 1),
        CorruptState,
        "header",
    ),
    "an empty file": (lambda path: os.truncate(states_file(path), 0), CorruptState, "ends before"),
    "a link to the record": (replaced_by_link("run.json"), CorruptState, "no regular file"),
    "a link to the model": (replaced_by_link("model-*"), CorruptState, "no regular file"),
    "a link to states": (replaced_by_link("states-*"), CorruptState, "no regular file"),
    "a link to data": (replaced_by_link("run.safetensors"), CorruptState, "no regular file"),
    "no data": (lambda path: (path / "run.safetensors").unlink(), CorruptState, "is missing"),
    "other data": (lambda path: (path / "run.safetensors").write_bytes(b"x"), CorruptState, "have 10 bytes"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_copy_that_is_wrong(wrong: str, copy: Path) -> None:
    change, error, what = WRONG[wrong]
    CopySource(copy).data()
    change(copy)
    with pytest.raises(error, match=what) as caught:
        CopySource(copy).data()
    assert type(caught.value) is error
    assert str(copy) in caught.value.cause


def test_a_file_that_changes_while_it_is_open(copy: Path) -> None:
    source = CopySource(copy)
    name = "head.weight"
    count = source.parameters()[name].numel
    assert source.read(name, "exp_avg", 0, count).shape == (count,)
    for file in copy.glob("states-*"):
        os.truncate(file, 100)
    with pytest.raises(CorruptState, match="ends before"):
        source.read(name, "exp_avg", 0, count)
    for file in copy.glob("states-*"):
        file.unlink()
    with pytest.raises(CorruptState, match="is missing"):
        source.read(name, "exp_avg", 0, count)


@pytest.mark.parametrize("name", ["run.json", "model-00001-of-*", "states-00001-of-*"])
def test_random_bytes(name: str, copy: Path) -> None:
    """However the bytes of a record or a header change, the copy opens or is refused by a typed error."""
    path = next(copy.glob(name))
    content = path.read_bytes()
    length = len(content) if name == "run.json" else 8 + int.from_bytes(content[:8], "little")
    draw = random.Random(1)
    refused = 0
    for _ in range(400):
        changed_bytes = bytearray(content)
        for _ in range(draw.choice((1, 1, 3))):
            at = draw.randrange(length)
            changed_bytes[at : at + draw.choice((0, 1, 1, 1, 4))] = draw.choice(
                (b"", b"0", b"9", b"-", b'"', b"null", b"[", bytes([draw.randrange(256)]))
            )
        path.write_bytes(changed_bytes)
        try:
            CopySource(copy)
        except (CorruptState, IncompatibleCheckpoint) as error:
            refused += 1
            assert error.cure
    assert refused > 200


def test_a_copy_of_another_model(copy: Path, swap: Path) -> None:
    of = entry("tied")
    model = changed(of.make())
    with offloaded(model, swap) as runtime:
        before = raw(runtime, model)
        with pytest.raises(IncompatibleCheckpoint, match="are one parameter here, and 2 in"):
            load_into(runtime, copy)
        assert differences(raw(runtime, model), before) == []
