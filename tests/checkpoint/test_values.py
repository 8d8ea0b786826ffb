"""Tests of typed values: all that is kept comes back with its type and bits, and all else is refused by name.

Decoding is tested with nodes that `encode` does not make: each raises CorruptState and says where.
"""

from __future__ import annotations

import collections
import enum
import inspect
import json
import math
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.optim import lr_scheduler
from typed_values import VALUES, same, through

from infinity.checkpoint.blobs import Blobs
from infinity.checkpoint.values import DEEPEST, decode, encode
from infinity.errors import ConfigError, CorruptState


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_every_value_comes_back(value: Any) -> None:
    assert same(through(value), value)


def nan(bits: int) -> float:
    (found,) = struct.unpack(">d", struct.pack(">Q", bits))
    return float(found)


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        math.inf,
        nan(0x7FF8000000000123),
        nan(0xFFF0000000000001),
        1 << 63,
        -(1 << 20_000),
        "\ud83d\ude00",
        "\U0001f600",
        {1: "int", "1": "str", 1.5: "float", None: "none", (1, (b"x", True)): "tuple"},
        {True: 0, 0: 1},
        {math.nan: 1, math.inf: 2},
        {1 << 20_000: {(1 << 20_000,), 1 << 20_000}},
        {frozenset({1, "a"}), (2,)},
        random.Random(0).getstate(),
        np.random.RandomState(0).get_state(),
        np.random.default_rng(0).bit_generator.state,
        torch.get_rng_state(),
        np.longdouble("1.1"),
        np.datetime64("NaT"),
        np.array(2.5),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(9)[::2],
        torch.tensor(1.5),
        torch.ones(0, 3),
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.ones(2, 1, 3).as_strided((2, 1, 3), (3, 77, 1)),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(3, dtype=torch.bfloat16),
        {"dict": [["a", 1]], "tensor": None},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_special_value_comes_back(value: Any) -> None:
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


def test_arrays_can_be_written_to() -> None:
    tensor, array = through((torch.zeros(2), np.zeros(2)))
    tensor[0] = array[0] = 1
    assert tensor[0] == array[0] == 1


def test_sets_have_one_text() -> None:
    """Text of sets whose members are strings, whose order differs between processes."""
    names = {f"name {number}" for number in range(20)}
    assert encode(names, Blobs()) == {"set": sorted(names, key=repr)}


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (len, "builtin_function_or_method"),
        (Colour.RED, "Colour"),
        (Text("a"), "Text"),
        (Pair(1, 2), "Pair"),
        (collections.defaultdict(int), "collections.defaultdict"),
        (collections.deque(), "collections.deque"),
        (range(3), "range"),
        (int, "type"),
        (object(), "object"),
        (slice(1), "slice"),
        (torch.float32.to_complex, "builtin_function_or_method"),
        (torch.nn.Parameter(torch.ones(1)), "Parameter"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.qint8, "qint8"),
        (torch.ones([1] * 65), "dimensions"),
        (torch.strided, "layout"),
        (torch.Generator(), "Generator"),
        (np.array([None]), "object"),
        (np.zeros(1, [("a", "i4")]), "array"),
        (np.zeros(1, "V3"), "V3"),
        (np.void(b"abc"), "scalar"),
        (np.ma.zeros(1), "MaskedArray"),
        (np.dtype("f4"), "Float32DType"),
        (np.random.default_rng(), "Generator"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_anything_else_is_refused_by_name(value: Any, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        encode({"scheduler": [0, {"fn": value}]}, Blobs(), "state")
    assert caught.value.cause.startswith("state['scheduler'][1]['fn'] ") and kind in caught.value.cause


@pytest.mark.parametrize("key", [Text("a"), np.int64(1), torch.float32, (1, np.int64(1)), Colour.RED, len])
def test_a_key_that_is_not_kept_is_refused(key: Any) -> None:
    with pytest.raises(ConfigError, match=r"state\[.*\] (has a key or member of|is of) the type"):
        encode({key: 1}, Blobs())
    with pytest.raises(ConfigError):
        encode({key}, Blobs())


def test_circles_are_refused_and_twins_are_not() -> None:
    twin = [1]
    assert through([twin, twin, {"a": twin}]) == [[1], [1], {"a": [1]}]
    circle: dict[str, Any] = {"a": [twin]}
    circle["a"].append((circle,))
    with pytest.raises(ConfigError, match=r"state\['a'\]\[1\]\[0\] contains itself"):
        encode(circle, Blobs())


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [[value], (value,), {"a": value}, {(1,): value}][number % 3]
    return value


def test_deep_values_are_refused() -> None:
    assert same(through(nested(DEEPEST)), nested(DEEPEST))
    for value in (nested(DEEPEST + 1), nested(5000)):
        with pytest.raises(ConfigError, match=f"lies in {DEEPEST} other containers"):
            encode(value, Blobs())
    key: Any = 1
    for _ in range(5000):
        key = (key,)
    with pytest.raises(ConfigError, match="other containers"):
        encode({"a": [key]}, Blobs())


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


def halve(step: int) -> float:
    return 0.5


SCHEDULERS: dict[str, Any] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lr_scheduler.ConstantLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LRScheduler": None,
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, halve),
    "LinearLR": lr_scheduler.LinearLR,
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 3]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, halve),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
}


def listed() -> list[str]:
    """The names of all schedulers of torch, aliases aside."""
    return sorted(
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and name == kind.__name__
    )


def test_the_table_has_every_scheduler() -> None:
    assert [name for name in listed() if name != "_LRScheduler"] == sorted(SCHEDULERS)


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if SCHEDULERS[name]])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_every_scheduler_s_state_comes_back(name: str) -> None:
    """States of torch's schedulers come back equal, and go on as the scheduler does."""
    made, other = SCHEDULERS[name](optimizer()), SCHEDULERS[name](optimizer())
    arguments = [1.0] if name == "ReduceLROnPlateau" else []
    for _ in range(3):
        made.step(*arguments)
    state = made.state_dict()
    found = through(state)
    assert same(found, state)
    other.load_state_dict(found)
    other.optimizer.load_state_dict(made.optimizer.state_dict()) if hasattr(other, "optimizer") else None
    for _ in range(3):
        made.step(*arguments)
        other.step(*arguments)
    assert same(other.state_dict(), made.state_dict())


class Factor:
    def __init__(self) -> None:
        self.fn = len

    def __call__(self, step: int) -> float:
        return 0.5


def test_a_scheduler_with_code_in_its_state_is_refused_by_name() -> None:
    state = lr_scheduler.LambdaLR(optimizer(), Factor()).state_dict()
    with pytest.raises(ConfigError, match=r"state\['lr_lambdas'\]\[0\]\['fn'\] is of the type builtin"):
        encode(state, Blobs())


def test_a_loader_s_state_comes_back() -> None:
    """A state of the form that torchdata's StatefulDataLoader gives, with two workers."""
    worker = {
        "dataset_state": {"position": 7, "shards": ("a", "b"), "seen": {3, 5}},
        "fetcher_state": {"dataset_iter_state": None, "fetcher_ended": False},
    }
    state = {
        "_snapshot": {
            "_snapshot_step": 4,
            "_last_yielded_worker_id": 1,
            "_main_snapshot": {
                "_num_workers": 2,
                "_sampler_iter_state": None,
                "_sampler_iter_yielded": 6,
                "_IterableDataset_len_called": None,
                "_shared_seed": None,
                "_base_seed": 4785621034213456789,
            },
            "_worker_snapshots": {
                f"worker_{each}": {"worker_id": each, **worker, "generator": torch.get_rng_state()}
                for each in range(2)
            },
        },
        "_steps_since_snapshot": 0,
        "_iterator_finished": False,
        "sampler": b"\x80\x04",
    }
    assert same(through(state), state)


DATA = Blobs()
TENSOR = encode(torch.arange(6, dtype=torch.int16).reshape(2, 3), DATA)["tensor"]
ARRAY = encode(np.arange(4.0), DATA)["array"]
BYTES = DATA.add(b"\x02\x00\x00\x00" * 3)
WIDE = DATA.add(b"\xff" * 8)


def changed(node: list[Any], place: int, content: Any) -> list[Any]:
    return [content if index == place else each for index, each in enumerate(node)]


def wrapped(levels: int) -> Any:
    node: Any = 1
    for _ in range(levels):
        node = [node]
    return node


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"tuple": [], "set": []},
        {"pickle": "gASV"},
        {"tuple": 1},
        {"dict": [[1]]},
        {"dict": [[1, 2], [1, 3]]},
        {"dict": [[1, 2], [True, 3]]},
        {"dict": [[[], 2]]},
        {"dict": [[{"tuple": [[]]}, 2]]},
        {"set": [1, 1]},
        {"set": [{"set": []}]},
        {"int": "0x5"},
        {"int": "1" * 30},
        {"int": 5},
        {"float": "3ff0000000000000"},
        {"float": "7ff00000"},
        {"float": "7FF0000000000000"},
        {"complex": ["7ff0000000000000"]},
        {"str": "61"},
        {"str": "ff"},
        "\ud800",
        {"size": [-1]},
        {"size": [1.0]},
        {"dtype": "qint8"},
        {"dtype": "__class__"},
        {"device": "cpu; import os"},
        {"device": "abc"},
        {"bytes": [0, 1 << 40, 0]},
        {"bytes": [-1, 1, 0]},
        {"bytes": [0, 4, 1]},
        {"bytes": [0, 4]},
        {"bytes": [0, True, 1]},
        {"str_": {"dict": []}},
        {"tensor": changed(TENSOR, 0, "float33")},
        {"tensor": changed(TENSOR, 0, "int32")},
        {"tensor": changed(TENSOR, 1, [1 << 62, 1 << 62])},
        {"tensor": changed(TENSOR, 1, [0, 1 << 62, 1 << 62])},
        {"tensor": changed(TENSOR, 1, [2, -3])},
        {"tensor": changed(TENSOR, 1, [2, 4])},
        {"tensor": changed(TENSOR, 1, [1] * 100)},
        {"tensor": changed(TENSOR, 2, [3])},
        {"tensor": changed(TENSOR, 2, [4, 1])},
        {"tensor": changed(TENSOR, 2, [0, 0])},
        {"tensor": changed(TENSOR, 2, [1, 1])},
        {"tensor": ["bool", [12], [1], BYTES]},
        {"array": changed(ARRAY, 0, "O")},
        {"array": changed(ARRAY, 0, "|O8")},
        {"array": changed(ARRAY, 0, "i4,f4")},
        {"array": changed(ARRAY, 0, "<f7")},
        {"array": changed(ARRAY, 0, "<U0")},
        {"array": changed(ARRAY, 0, "<M8[zz]")},
        {"array": changed(ARRAY, 0, "<U999999999")},
        {"array": changed(ARRAY, 1, [5])},
        {"array": changed(ARRAY, 1, [0, 1 << 62])},
        {"array": changed(ARRAY, 2, "K")},
        {"array": ["|b1", [12], "C", BYTES]},
        {"array": ["<U2", [1], "C", WIDE]},
        {"scalar": ["<f8", "00"]},
        {"scalar": ["|b1", "02"]},
        {"scalar": ["|O8", "0000000000000000"]},
        wrapped(DEEPEST + 1),
        wrapped(900),
        {"tuple": [{"bytes": DATA.add(b"x" * 200)}, {"bytes": [*DATA.add(b"")]}, {"bytes": WIDE}] * 2},
        1 << 63,
        math.nan,
        (1,),
    ],
    ids=lambda node: json.dumps(node)[:60],
)
def test_a_malformed_node_is_refused(node: Any) -> None:
    whole = Blobs(bytes(DATA.content()))
    assert decode({"tensor": TENSOR}, whole).shape == (2, 3)
    with pytest.raises(CorruptState) as caught:
        decode([0, node], whole, "state")
    assert caught.value.cause.startswith(("state[1]", "a key of state"))


def test_an_element_of_no_bytes_needs_no_memory() -> None:
    blobs = Blobs()
    empty = ["float64", [1 << 40, 0], [0, 1], blobs.add(b"")]
    assert decode({"tensor": empty}, Blobs(b"")).shape == (1 << 40, 0)


def test_values_take_no_more_bytes_than_the_blobs_have() -> None:
    blobs = Blobs()
    reference = {"bytes": blobs.add(b"0123456789")}
    assert decode([reference], blobs) == [b"0123456789"]
    with pytest.raises(CorruptState, match="other places"):
        decode([reference, reference], blobs)


def test_every_bit_of_a_blob_is_checked() -> None:
    blobs = Blobs()
    node = encode(torch.arange(4), blobs)
    data = bytes(blobs.content())
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptState, match=r"state.tensor\[3\] refers to bytes with another checksum"):
            decode(node, Blobs(bytes(flipped)))
