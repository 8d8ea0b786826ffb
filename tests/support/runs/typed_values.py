"""Typed values for tests: strategies that draw what a checkpoint keeps, and a comparison that sees types."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from infinity.checkpoint.codec import decode, encode
from infinity.checkpoint.tensor_files import TORCH_DTYPES, packed, unpacked

NUMPY = ["?", "i1", "<i8", ">u4", "<f2", ">f8", "<c16", "<M8[ns]", "<m8[25s]", "<U3", "|S5"]


def same(one: Any, other: Any) -> bool:  # noqa: PLR0911
    """Whether two values have the same types, order, shapes, strides and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and (one.stride() == other.stride() or not other.numel() or has_gaps(other))
            and tensor_bytes(one) == tensor_bytes(other)
        )
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and all(any(same(a, b) for b in other) for a in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def has_gaps(value: torch.Tensor) -> bool:
    """Whether there is memory between the elements of a tensor that is not empty."""
    span = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return span > value.numel()


def tensor_bytes(value: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements, in the order of rows."""
    values = value.detach().resolve_conj().resolve_neg().flatten().clone()
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def through(value: Any) -> Any:
    """The value after encoding it, JSON and safetensors, and decoding it."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, tensors), allow_nan=False)
    return decode(json.loads(text), unpacked(packed(tensors), "data"))


def nan(bits: int) -> float:
    """The NaN with these bits."""
    (found,) = struct.unpack(">d", struct.pack(">Q", bits))
    return float(found)


def special_values() -> list[Any]:
    """Values at the edges of what is kept, and states as libraries have them."""
    return [
        *(
            -0.0,
            math.inf,
            nan(0x7FF8000000000123),
            nan(0xFFF0000000000001),
            complex(-0.0, nan(0x7FF8000000000123)),
        ),
        *((1 << 63) - 1, 1 << 63, -(1 << 20_000), "\ud83d\ude00", "\U0001f600"),
        {1: "int", "1": "str", 1.5: "float", None: "none", (1, (b"x", True)): "tuple", np.int64(9): "scalar"},
        *({True: 0, 0: 1}, {math.nan: 1, math.inf: 2}, {"dict": [["a", 1]], "$tensor": None}, {"$set": [1]}),
        *({1 << 20_000: {(1 << 20_000,), 1 << 20_000}}, {frozenset({1, "a"}), (2,)}, {torch.int8: 1}),
        random.Random(0).getstate(),
        np.random.RandomState(0).get_state(),
        np.random.default_rng(0).bit_generator.state,
        torch.get_rng_state(),
        *(
            np.longdouble("1.1"),
            np.datetime64("NaT"),
            np.array(2.5),
            np.str_(""),
            np.str_("a\0"),
            np.bytes_(b""),
        ),
        *(np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(9)[::2], np.zeros((0, 3))),
        *(torch.tensor(1.5), torch.ones(0, 3), torch.ones([1] * 65), torch.ones(1 << 40, 0)),
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.ones(2, 1, 3).as_strided((2, 1, 3), (3, 77, 1)),
        *(
            torch.tensor([1 + 2j]).conj(),
            torch.tensor([1 + 2j]).conj().imag,
            torch.ones(3, dtype=torch.bfloat16),
        ),
    ]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of every dtype that is kept, with dimensions in any order; some have gaps."""
    dtype = draw(st.sampled_from(sorted(TORCH_DTYPES.values(), key=str)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    numel = int(np.prod(shape, dtype=int))
    largest = 1 if dtype is torch.bool else 255
    size = 2 * numel * dtype.itemsize
    data = draw(st.lists(st.integers(0, largest), min_size=size, max_size=size))
    flat = torch.tensor(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    order = draw(st.permutations(range(len(shape))))
    inverse = sorted(range(len(shape)), key=order.__getitem__)
    part = flat[::2] if draw(st.booleans()) else flat[:numel]
    return part.reshape([shape[each] for each in order]).permute(inverse)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Arrays of several dtypes and orders, and scalars of them."""
    dtype = np.dtype(draw(st.sampled_from(NUMPY)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    high = 1 if dtype.kind in "?bU" else 255
    data = bytearray(draw(st.lists(st.integers(0, high), min_size=size, max_size=size)))
    if dtype.kind == "U":
        data = bytearray(byte if place % 4 == 0 else 0 for place, byte in enumerate(data))
    found = np.frombuffer(bytes(data), dtype).reshape(shape, order=draw(st.sampled_from("CF")))
    return found.reshape(-1)[0] if found.size and dtype.isnative and draw(st.booleans()) else found


TEXT = st.text(st.characters(exclude_categories=()), max_size=5)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.complex_numbers(),
    TEXT,
    st.binary(max_size=9),
)
KEYS = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)
LEAVES = st.one_of(
    PLAIN,
    st.binary(max_size=9).map(bytearray),
    tensors(),
    arrays(),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    st.sampled_from([*TORCH_DTYPES.values(), torch.device("cpu"), torch.device("cuda", 1)]),
    st.text("ab\0", max_size=3).map(np.str_),
    st.binary(max_size=3).map(np.bytes_),
    st.sets(KEYS, max_size=3),
    st.frozensets(KEYS, max_size=3),
    st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=6,
)
