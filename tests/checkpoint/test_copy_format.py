"""Tests that a copy of a run is what docs/file-format.md says, by a reader that knows the document alone."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from runs_on_disk import Run
from zoo import entry

from infinity.checkpoint.run_copy import FORMAT, VERSION
from infinity.checksum import crc32c

DOCUMENT = Path(__file__).parents[2] / "docs" / "file-format.md"
SECTION = DOCUMENT.read_text().partition("## Copy of a run")[2].partition("## Rules of reading")[0]
RECORD = ("param_groups", "buffers", "extra_state", "loss_scale", "rng", "state", "identity")
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I16": 2, "U8": 1, "I64": 8}


def tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """The tensors of a safetensors file by name: dtype, shape and bytes."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header, found, end = json.loads(content[8 : 8 + length]), {}, 0
    for name, said in header.items():
        if name == "__metadata__":
            continue
        start, stop = said["data_offsets"]
        assert start == end
        end = stop
        assert stop - start == math.prod(said["shape"]) * SIZES[said["dtype"]]
        found[name] = said["dtype"], said["shape"], content[8 + length + start : 8 + length + stop]
    assert 8 + length + end == len(content)
    return found


def real(bits: int) -> float:
    """The float32 number with these bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits % 2**32))[0])


def numbers(dtype: str, content: bytes) -> list[Any]:
    if dtype == "BF16":
        return [real(bits << 16) for bits in numbers("U16", content)]
    letter = {"U16": "H", "F16": "e", "F32": "f", "I16": "h", "U8": "B"}[dtype]
    return list(struct.unpack(f"<{len(content) // struct.calcsize(letter)}{letter}", content))


def decoded(codes: list[int], scales: list[int], moment: str) -> list[float]:
    signed = moment in ("exp_avg", "momentum_buffer")
    span, found = 15 if signed else 31, []
    assert len(scales) == -(-len(codes) // 64)
    for place, code in enumerate(codes):
        c = code & 0x7F if signed else code
        less = struct.unpack("<f", struct.pack("<f", real(0x3F800000 + (c << 20)) - 1))[0]
        value = less * 2.0 ** (scales[place // 64] - 127 - span)
        found.append(-value if signed and code >> 7 else value)
    return found


def row_major(values: list[Any], shape: list[int], stride: list[int]) -> list[Any]:
    """Values in memory order, in the order of rows."""
    places = [0]
    for size, step in zip(shape, stride, strict=True):
        places = [place + step * index for place in places for index in range(size)]
    return [values[place] for place in places]


class Copy:
    """What the document says of a copy in a directory."""

    def __init__(self, directory: Path) -> None:
        self.said = json.loads((directory / "run.json").read_bytes())
        assert (self.said["format"], self.said["version"]) == ("infinity run", 2)
        self.model, self.states = {}, {}
        for name in self.said["files"]:
            (self.states if name.startswith("states") else self.model).update(tensors(directory / name))
        self.data = {}
        if self.said["data"] is not None:
            content = (directory / "run.safetensors").read_bytes()
            assert self.said["data"] == {"nbytes": len(content), "crc32c": crc32c(content)}
            self.data = tensors(directory / "run.safetensors")

    def values(self, parameter: Any) -> list[Any]:
        """A parameter's values in the order of rows."""
        dtype, shape, content = self.model[parameter["names"][0]]
        assert (dtype, shape) == (parameter["dtype"], parameter["shape"])
        return numbers(dtype, content)

    def array(self, parameter: Any, name: str) -> list[Any]:
        """A state array in memory order."""
        dtype, _, content = self.states[f"{parameter['names'][0]}|{name}"]
        return numbers(dtype, content)

    def masters(self, parameter: Any) -> list[float]:
        """A parameter's fp32 masters in the order of rows."""
        if parameter["edited"] or parameter["dtype"] == "F32":
            return self.values(parameter)
        order = (parameter["shape"], parameter["stride"])
        if parameter["dtype"] == "F16":
            return row_major(self.array(parameter, "master"), *order)
        bits = numbers("U16", self.model[parameter["names"][0]][2])
        lacking = row_major(self.array(parameter, "remainder"), *order)
        return [real(p * 65536 + r) for p, r in zip(bits, lacking, strict=True)]

    def moment(self, parameter: Any, name: str) -> list[float]:
        """A moment in the order of rows."""
        values = self.array(parameter, name)
        if self.said["optimizer"]["states"] == "int8":
            values = decoded(values, self.array(parameter, f"{name}.scale"), name)
        return row_major(values, parameter["shape"], parameter["stride"])


CASES = [
    ("frozen", "bf16", "fp32", "adamw"),
    ("tied", "fp16", "int8", "adamw"),
    ("channels_last", "fp32", "bf16", "adam"),
    ("channels_last", "bf16", "int8", "sgd"),
    ("mixture", "bf16", "int8", "adagrad"),
]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_reader_of_the_document_finds_the_run(case: tuple[str, ...], tmp_path: Path) -> None:
    name, compute, states, optimizer = case
    run = Run(tmp_path, of=entry(name), compute=compute, states=states, optimizer=optimizer, commits=False)
    with run.opened() as (model, runtime):
        run.train(model, runtime, range(2))
        runtime.save(tmp_path / "copy", shard="8KiB", state={"blob": b"bytes"})
        copy = Copy(tmp_path / "copy")
        moments = copy.said["optimizer"]["moments"]
        trained = 0
        parameters = dict(model.named_parameters())
        assert {each["names"][0] for each in copy.said["parameters"]} == set(parameters)
        for said in copy.said["parameters"]:
            parameter = parameters[said["names"][0]]
            assert copy.values(said) == parameter.detach().flatten().tolist()
            assert said["trainable"] == parameter.requires_grad
            state = runtime.optimizer.state[parameter] if said["trainable"] else {}
            if not said["trainable"]:
                assert not any(key.startswith(f"{said['names'][0]}|") for key in copy.states)
                continue
            if said["has_moments"]:
                trained += 1
                assert copy.masters(said) == state.get("master", parameter).detach().flatten().tolist()
                assert said["step"] == int(state.get("step", said["step"]))
            for moment in moments if said["has_moments"] else ():
                assert copy.moment(said, moment) == state[moment].float().flatten().tolist()
        assert trained > 3
        assert set(copy.model) == set(parameters) | set(copy.said["buffers"])
        assert set(copy.said["buffers"]) <= set(copy.said["record"]["buffers"])
        assert set(copy.said["record"]["buffers"]) == {name for name, _ in model.named_buffers()}
    assert len([file for file in copy.said["files"] if file.startswith("model")]) > 1
    assert copy.said["record"]["state"] == {"blob": {"$bytes": b"bytes".hex()}}
    dtype, shape, stride, stored = copy.said["record"]["rng"]["torch"]["$tensor"]
    assert (dtype, stride) == ("uint8", [1])
    assert copy.data[stored] == ("U8", shape, torch.get_rng_state().numpy().tobytes())


def test_the_directory_has_the_files_and_fields_of_the_document(tmp_path: Path) -> None:
    run = Run(tmp_path, commits=False)
    with run.opened() as (model, runtime):
        run.train(model, runtime, range(1))
        runtime.save(tmp_path / "copy", shard="24KiB")
    copy = Copy(tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700
    for file in (tmp_path / "copy").iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
        numbered = re.sub(r"\d{5}-of-\d{5}", "00001-of-0000N", file.name)
        assert f"`{numbered}`" in SECTION
    named = set(re.findall(r"`\"?([\w.]+)\"?`", SECTION))
    assert set(copy.said) <= named
    assert set(copy.said["optimizer"]) <= named
    assert set(copy.said["parameters"][0]) <= named
    assert set(copy.said["record"]) == set(RECORD) <= named
    assert f'"{FORMAT}" and {VERSION}' in SECTION
