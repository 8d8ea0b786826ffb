"""Manifests for tests: a small one with fixed bytes, and mutations of trees and bytes."""

from __future__ import annotations

import copy
import functools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infinity.checkpoint import commit_files
from infinity.checkpoint.codec import Tensors, encode
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.manifest import (
    FORMAT,
    LossScaleEntry,
    Manifest,
    OptimizerRule,
    ParameterEntry,
    ParamGroup,
    PrecisionEntry,
    Range,
    RunRecord,
    StoredArray,
    UnitEntry,
)
from infinity.checksum import crc32c
from infinity.tiers import SlabRecord, VolumeRecord

CHECKSUMS = 13
"""Number of checksums of the small manifest."""


def small(generation: int = 7) -> SavedCommit:
    """A manifest of a bf16 parameter in two ranges, with int8 moments, and a frozen fp32 parameter."""
    tensors: Tensors = {}
    manifest = Manifest(
        generation=generation,
        created="2026-01-02T03:04:05Z",
        versions={"infinity": "0.1", "torch": "2.13", "python": "3.11"},
        isa="scalar",
        threads=2,
        volume=VolumeRecord(
            8192, (SlabRecord("0123456789abcdef" * 2, 131072, 2), SlabRecord("f" * 32, 65536, 1))
        ),
        codecs={"moments": 1, "rounding": 1},
        chunk_elements=8192,
        rule=OptimizerRule("SGD", ("momentum_buffer",), "int8"),
        precision=PrecisionEntry("bf16", "int8", ("*.scale",), "fp32"),
        units=(UnitEntry("block", ("block.weight", "block.scale")),),
        parameters=(weight(), scale()),
        run=run_record(tensors),
    )
    checksums = np.arange(CHECKSUMS, dtype=np.uint32) * np.uint32(0x11111111)
    return SavedCommit(manifest, checksums, tensors)


def run_record(tensors: Tensors) -> RunRecord:
    """Two param groups, a buffer, and values of several types, whose tensors are added to `tensors`."""
    state = {
        "epoch": 3,
        "best": math.inf,
        "order": (2, 0, 1),
        "weights": torch.arange(3, dtype=torch.bfloat16),
        b"raw": {None, 1.5},
    }
    return RunRecord(
        param_groups=(
            ParamGroup(encode({"lr": 0.1, "betas": (0.9, 0.999), "name": "é"}, tensors), ("block.weight",)),
            ParamGroup(encode({"lr": 1e-05}, tensors), ()),
        ),
        buffers={"block.running": encode(torch.tensor([1.0, -2.0]), tensors)},
        extra_state={"block": encode({"calls": 5}, tensors)},
        loss_scale=LossScaleEntry(65536.0, 12),
        rng={"torch": encode(torch.zeros(4, dtype=torch.uint8), tensors), "cuda": []},
        state=encode(state, tensors),
        identity=encode({"text": b"\x01\x02"}, tensors),
    )


def weight() -> ParameterEntry:
    """A parameter of 2 x 4600 elements whose master is split, in ranges of 8192 and 1008 elements."""

    def arrays(start: int, states: int, count: int, checksum: int) -> dict[str, StoredArray]:
        blocks = -(-count // 4096)
        return {
            "values": StoredArray(start, checksum),
            "remainder": StoredArray(states, checksum + blocks),
            "momentum_buffer": StoredArray(states + 16384, checksum + 2 * blocks),
            "momentum_buffer.scale": StoredArray(states + 24576, checksum + 3 * blocks),
        }

    ranges = (
        Range(0, 8192, arrays(24576, 49152, 8192, 0)),
        Range(8192, 1008, arrays(0, 90112, 1008, 8)),
    )
    return ParameterEntry(
        names=("block.weight", "head.weight"),
        shape=(2, 4600),
        stride=(1, 2),
        dtype="bfloat16",
        trainable=True,
        step=41,
        moments=True,
        edited=False,
        ranges=ranges,
    )


def scale() -> ParameterEntry:
    return ParameterEntry(
        names=("block.scale",),
        shape=(3,),
        stride=(1,),
        dtype="float32",
        trainable=False,
        step=0,
        moments=False,
        edited=True,
        ranges=(Range(0, 3, {"values": StoredArray(20480, 12)}),),
    )


def signed(body: bytes, version: int = FORMAT) -> bytes:
    """The content of a manifest's file with this JSON text, and a first line that is right."""
    start = f"infinity-commit {version} {len(body)} ".encode()
    return start + f"{crc32c(body, crc32c(start)):08x}\n".encode() + body


@functools.cache
def original() -> tuple[bytes, bytes]:
    """The content of the small commit's manifest and data file."""
    return contents(small())


def tree() -> Any:
    """The tree of the small commit's manifest."""
    return json.loads(original()[0].split(b"\n", 1)[1])


def contents(commit: SavedCommit) -> tuple[bytes, bytes]:
    """The content of a commit's manifest and data file."""
    data = commit_files.data_bytes(commit)
    return commit_files.manifest_bytes(commit.manifest, data), data


def changed(root: Any, path: str, content: Any) -> Any:
    """`root` with other content at a path such as "units[0].name"."""
    *keys, last = path.replace("[", ".").replace("]", "").split(".")
    node = root
    for key in keys:
        node = node[int(key) if isinstance(node, list) else key]
    node[int(last) if isinstance(node, list) else last] = content
    return root


def put(directory: Path, manifest: bytes, data: bytes, generation: int = 7) -> None:
    """Write the two files of a commit with this content."""
    (directory / f"commit-{generation}").write_bytes(manifest)
    (directory / f"commit-{generation}.safetensors").write_bytes(data)


def put_tree(directory: Path, tree: Any, data: bytes) -> None:
    """Write a commit whose manifest has this tree, and checksums that are right."""
    if isinstance(tree, dict) and isinstance(tree.get("data"), dict) and "crc32c" in tree["data"]:
        tree = {**tree, "data": {"nbytes": len(data), "crc32c": crc32c(data)}}
    put(directory, signed(json.dumps(tree).encode()), data)


ODD = (
    None, True, 0, 1, -1, 2, 4096, 1 << 62, (1 << 63) - 1, 1 << 64, 0.5, -0.0, math.inf, math.nan, "", "int8",
    "values", "\ud800", [], [0], [[]], {}, {"$tuple": []}, {"$bytes": "00"},
    {"$tensor": ["float32", [2], [1], "0"]},
    {"$tensor": ["float32", [1 << 40], [1], "0"]}, {"$float": "000000000000f07f"},
)  # fmt: skip


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    """All places in a tree, each as (container, key or index)."""
    found = []
    pending = [tree]
    while pending:
        container = pending.pop()
        keys = container if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                pending.append(container[key])
    return found


def mutated_tree(tree: Any, chance: random.Random) -> Any:
    """A copy of a tree with one to three places changed, removed, doubled, exchanged or wrapped."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 2, 3))):
        places = nodes(tree)
        if places:
            container, key = chance.choice(places)
            change = chance.choice(_CHANGES)
            change(container, key, chance, places)
            if change is _wrap:  # what was wrapped twice is too deep for `copy`
                break
    return tree


def _replace(container: Any, key: Any, chance: random.Random, places: Any) -> None:
    container[key] = copy.deepcopy(chance.choice(ODD))


def _remove(container: Any, key: Any, chance: random.Random, places: Any) -> None:
    del container[key]


def _double(container: Any, key: Any, chance: random.Random, places: Any) -> None:
    if isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    else:
        container[f"{key}2"] = copy.deepcopy(container[key])


def _copy(container: Any, key: Any, chance: random.Random, places: Any) -> None:
    other, place = chance.choice(places)
    container[key] = copy.deepcopy(other[place])


def _shift(container: Any, key: Any, chance: random.Random, places: Any) -> None:
    if type(container[key]) in (int, float):
        container[key] += chance.choice((-4096, -1, 1, 2, 4096, 1 << 40))
    elif type(container[key]) is bool:
        container[key] = not container[key]


def _wrap(container: Any, key: Any, chance: random.Random, places: Any) -> None:
    for _ in range(chance.choice((1, 1, 70, 300))):
        container[key] = [container[key]]


_CHANGES: tuple[Callable[[Any, Any, random.Random, Any], None], ...] = (
    _replace, _replace, _remove, _double, _copy, _shift, _shift, _wrap,
)  # fmt: skip


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """`data` with some bytes flipped, removed, doubled or inserted, or cut short."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        place = chance.randrange(len(found) + 1)
        length = chance.choice((1, 1, 2, 8, 100))
        kind = chance.randrange(5)
        if kind == 0 and place < len(found):
            found[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del found[place : place + length]
        elif kind == 2:
            found[place:place] = found[place : place + length]
        elif kind == 3:
            found[place:place] = chance.choice((b"[", b"{", b'"', b"9", b",", b"\\", b"\xff", b"NaN", b"e9"))
        else:
            del found[place:]
    return bytes(found)
