"""Tests of the codec: all that is kept comes back with its type and bits, and all else is refused by name.

Decoding is tested with nodes that `encode` does not make: each raises CorruptState and says where.
"""

from __future__ import annotations

import collections
import enum
import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from torch.optim import lr_scheduler
from typed_values import VALUES, same, special_values, through

from infinity.checkpoint.codec import DEEPEST, Tensors, decode, encode
from infinity.checkpoint.tensor_files import packed, unpacked
from infinity.errors import ConfigError, CorruptState


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=300, deadline=None)
@given(VALUES)
@example(special_values())
def test_every_value_comes_back(value: Any) -> None:
    assert same(through(value), value)


def test_a_tensor_with_gaps_comes_back_dense() -> None:
    found = through({"a": torch.arange(12).reshape(3, 4)[:, 1:3], "b": torch.ones(1).expand(2, 3)})
    assert found["a"].tolist() == [[1, 2], [5, 6], [9, 10]] and found["a"].is_contiguous()
    assert found["b"].tolist() == [[1.0] * 3] * 2 and found["b"].stride() == (3, 1)


def test_a_tensor_comes_back_without_its_graph() -> None:
    found = through(torch.ones(2, requires_grad=True) * 2)
    assert not found.requires_grad and found.tolist() == [2, 2]


def test_bools_with_other_bits_come_back_as_bools() -> None:
    odd = torch.tensor([0, 2, 255], dtype=torch.uint8)
    assert through(odd.view(torch.bool)).view(torch.uint8).tolist() == [0, 1, 1]
    assert through(odd.numpy().view(bool)).view(np.uint8).tolist() == [0, 1, 1]


def test_what_was_encoded_and_decoded_is_not_shared() -> None:
    value, tensors = (torch.zeros(2), np.zeros(2)), {}
    node = encode(value, tensors)
    value[0][0] = value[1][0] = 1
    for _ in range(2):
        tensor, array = decode(node, tensors)
        assert tensor.tolist() == array.tolist() == [0, 0]
        tensor[0] = array[0] = 1


def test_nodes_are_plain_where_json_suffices() -> None:
    value = {"epoch": 3, "rates": [0.1, None, True], "name": "é"}
    assert encode(value, {}) == value
    names = {f"name {number}" for number in range(20)}  # whose order differs between processes
    assert encode(names, {}) == {"$set": sorted(names)}


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


Pair = collections.namedtuple("Pair", "a b")


class Factor:
    def __init__(self) -> None:
        self.fn = len

    def __call__(self, step: int) -> float:
        return 0.5


REFUSED = {
    "builtin_function_or_method": len,
    "Colour": Colour.RED,
    "Text": Text("a"),
    "Pair": Pair(1, 2),
    "collections.defaultdict": collections.defaultdict(int),
    "type": int,
    "Parameter": torch.nn.Parameter(torch.ones(1)),
    "sparse": torch.ones(2).to_sparse(),
    "meta": torch.ones(2, device="meta"),
    "dtype": torch.qint8,
    "Generator": torch.Generator(),
    "object": np.array([None]),
    "ndarray of [": np.zeros(1, [("a", "i4")]),
    "void": np.void(b"abc"),
    "MaskedArray": np.ma.zeros(1),
    "Float32DType": np.dtype("f4"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        encode({"scheduler": [0, {"fn": REFUSED[kind]}]}, {}, "state")
    assert caught.value.cause.startswith("state['scheduler'][1]['fn'] ") and kind in caught.value.cause


@pytest.mark.parametrize("key", [Text("a"), torch.ones(1), (1, torch.ones(1)), Colour.RED, len])
def test_a_key_that_is_not_kept_is_refused(key: Any) -> None:
    for value in ({key: 1}, {key}):
        with pytest.raises(ConfigError, match=r"state (has a tensor in a key|is of the type)"):
            encode(value, {})


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [[value], (value,), {"a": value}, {(1,): value}][number % 4]
    return value


def test_deep_values_and_circles_are_refused() -> None:
    assert same(through(nested(DEEPEST - 1)), nested(DEEPEST - 1))
    twin: list[Any] = [1]
    assert through([twin, twin, {"a": twin}]) == [[1], [1], {"a": [1]}]
    circle: dict[str, Any] = {"a": [twin]}
    circle["a"].append((circle,))
    key: Any = 1
    for _ in range(5000):
        key = (key,)
    for value in (nested(DEEPEST + 1), nested(5000), circle, {"a": [key]}):
        with pytest.raises(ConfigError, match=f"lies in {DEEPEST} other containers"):
            encode(value, {})


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scheduler_s_state_comes_back() -> None:
    """The state of a scheduler of schedulers comes back equal, and one with code in it is refused by name."""
    made, other = (
        lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [2, 3, 3])], [2]
        )
        for o in (optimizer(), optimizer())
    )
    for _ in range(3):
        made.step()
    other.load_state_dict(through(made.state_dict()))
    assert same(other.state_dict(), made.state_dict())
    state = lr_scheduler.LambdaLR(optimizer(), Factor()).state_dict()
    with pytest.raises(ConfigError, match=r"state\['lr_lambdas'\]\[0\]\['fn'\] is of the type builtin"):
        encode(state, {})


DATA: Tensors = {}
TENSOR = encode(torch.arange(6, dtype=torch.int16).reshape(2, 3), DATA)["$tensor"]
ARRAY = encode(np.arange(4.0), DATA)["$array"]
BYTES = encode(torch.full((12,), 2, dtype=torch.uint8), DATA)["$tensor"]


def changed(node: list[Any], place: int, content: Any) -> list[Any]:
    return [content if index == place else each for index, each in enumerate(node)]


def wrapped(levels: int) -> Any:
    node: Any = 1
    for _ in range(levels):
        node = [node]
    return node


MALFORMED = [
    {"$tuple": [], "$set": []},
    {"$tuple": [], "more": 1},
    {"$pickle": "gASV"},
    {"$tuple": 1},
    {"$tuple": "abc"},
    {"$dict": [[1]]},
    {"$dict": [[1, 2], [1, 3]]},
    {"$dict": [[1, 2], [True, 3]]},
    {"$dict": [[[], 2]]},
    {"$dict": {"a": 1}},
    {"$set": [1, 1]},
    {"$set": [{"$set": []}]},
    {"$int": "x"},
    {"$int": 5},
    {"$float": "7ff00000"},
    {"$float": 1.0},
    {"$complex": ["7ff0000000000000"]},
    {"$str": "ff"},
    {"$bytes": "0"},
    {"$size": [1]},
    {"$Size": [1.0]},
    {"$dtype": "qint8"},
    {"$dtype": "__class__"},
    {"$device": "cpu; import os"},
    {"$tensor": changed(TENSOR, 0, "float33")},
    {"$tensor": changed(TENSOR, 0, "int32")},
    {"$tensor": changed(TENSOR, 1, [1 << 62, 1 << 62])},
    {"$tensor": changed(TENSOR, 1, [0, 1 << 62, 1 << 62])},
    {"$tensor": changed(TENSOR, 1, [2, -3])},
    {"$tensor": changed(TENSOR, 1, [-2, -3])},
    {"$tensor": changed(TENSOR, 1, [2, 4])},
    {"$tensor": changed(TENSOR, 2, [3])},
    {"$tensor": changed(TENSOR, 2, [4, 1])},
    {"$tensor": changed(TENSOR, 2, [0, 0])},
    {"$tensor": changed(TENSOR, 3, "99")},
    {"$tensor": changed(TENSOR, 3, ["0"])},
    {"$tensor": TENSOR[:3]},
    {"$array": changed(ARRAY, 0, "O")},
    {"$array": changed(ARRAY, 0, "|O8")},
    {"$array": changed(ARRAY, 0, "i4,f4")},
    {"$array": changed(ARRAY, 0, "<f7")},
    {"$array": changed(ARRAY, 0, "<U0")},
    {"$array": changed(ARRAY, 0, "<M8[zz]")},
    {"$array": changed(ARRAY, 0, "<U999999999")},
    {"$array": changed(ARRAY, 1, [5])},
    {"$array": changed(ARRAY, 1, [0, 1 << 62])},
    {"$array": changed(ARRAY, 2, "K")},
    {"$array": changed(ARRAY, 3, None)},
    {"$array": ["|b1", [12], "C", {"$tensor": BYTES}]},
    {"$scalar": ["<f8", "00"]},
    {"$scalar": ["|b1", "02"]},
    {"$scalar": ["|O8", "0000000000000000"]},
    wrapped(3 * DEEPEST + 1),
    wrapped(900),
    {"$tuple": [{"$tensor": TENSOR}, {"$tensor": TENSOR}]},
]


@pytest.mark.parametrize("node", MALFORMED, ids=lambda node: json.dumps(node)[:60])
def test_a_malformed_node_is_refused(node: Any) -> None:
    assert decode({"$tensor": TENSOR}, DATA).shape == (2, 3)
    with pytest.raises(CorruptState, match=r"^state\[1\]"):
        decode([0, node], DATA, "state")


def test_bools_of_other_bits_are_refused() -> None:
    tensors = {"0": torch.tensor([0, 2], dtype=torch.uint8).view(torch.bool)}
    with pytest.raises(CorruptState, match="a truth value is neither 0 nor 1"):
        decode({"$tensor": ["bool", [2], [1], "0"]}, tensors)


def test_a_damaged_file_of_tensors_is_refused_or_read() -> None:
    """However the bytes of a file change, its tensors are read with as many bytes, or it is refused."""
    tensors: Tensors = {}
    node = encode([torch.arange(4), torch.ones(3, dtype=torch.bfloat16), np.arange(3)], tensors)
    content = packed(tensors)
    chance, refused = random.Random(3), 0
    for _ in range(500):
        other = bytearray(content)
        for _ in range(chance.choice((1, 2))):
            other[chance.randrange(len(other))] = chance.randrange(256)
        try:
            decode(node, unpacked(bytes(other[: chance.choice((None, -1))]), "data"))
        except CorruptState:
            refused += 1
    assert 200 < refused < 500
    for end in range(len(content)):
        with pytest.raises(CorruptState):
            unpacked(content[:end], "data")


def test_a_file_of_tensors_of_odd_strides() -> None:
    odd = {"one": torch.tensor(7.0).expand(1), "rows": torch.arange(6).view(2, 3).T, "none": torch.ones(0, 3)}
    found = unpacked(packed(odd), "data")
    assert found.keys() == odd.keys() and all(torch.equal(found[name], odd[name]) for name in odd)


def test_numbers_that_json_would_change_have_digits() -> None:
    tensors: Tensors = {}
    node = encode([math.nan, 1 << 63, "\ud83d\ude00", b"ab", {1: 2}, {"$a": 1}], tensors)
    assert node == [
        {"$float": "000000000000f87f"},
        {"$int": "0x8000000000000000"},
        {"$str": "eda0bdedb880"},
        {"$bytes": "6162"},
        {"$dict": [[1, 2]]},
        {"$dict": [["$a", 1]]},
    ]
    assert tensors == {}
