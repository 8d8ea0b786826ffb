"""Array values: tensors and NumPy arrays as JSON nodes, with their bytes in blobs.

[Note: arrays from a file]
A decoded array is made only after its shape, dtype and number of bytes have been compared, so that a file
cannot ask for more memory than it has bytes. Bit patterns that are no value of the dtype, such as a bool with
the bits of 2, are refused, because compiled code relies on their absence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from infinity.checkpoint.blobs import Blobs
from infinity.checkpoint.json_nodes import LARGEST, Node

Json = Any
"""What `json.dumps` takes: None, bool, int, float, str, list, or dict with str keys."""
Refuse = Callable[[str, str], NoReturn]
"""Raises the ConfigError for a value. Arguments: a clause about the value, and the cure."""
Take = Callable[[Node], memoryview]
"""Returns the bytes of the blob to which a node refers."""

_FLOATS = "float64 float32 float16 bfloat16"
_INTEGERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool"
_SMALL = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
_NAMES = f"{_FLOATS} {_INTEGERS} complex32 complex64 complex128 {_SMALL}".split()
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
"""The dtypes of tensors that files may hold, by the name that torch and the format give them."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MOST_DIMENSIONS = 64
_NUMPY = re.compile(r"[<>|][biufcMmSU]\d{1,9}(?:\[\d{0,9}[A-Za-z]{1,2}\])?")


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor of this shape and stride is dense: has its elements one behind the other in memory.

    The dimensions may be in any order. The stride of a dimension of one element does not matter.
    """
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def element_count(shape: Node, itemsize: int) -> tuple[tuple[int, ...], int]:
    """The shape that the node `shape` holds, and its number of elements.

    Raises CorruptState for more than MOST_DIMENSIONS dimensions, and where the bytes of such an array of
    `itemsize` bytes an element cannot be counted with 63 bits, even if one of the dimensions is 0.
    """
    if len(shape.has(list)) > MOST_DIMENSIONS:
        shape.fail(f"has more than {MOST_DIMENSIONS} dimensions")
    found = tuple(each.integer() for each in shape.items())
    if math.prod(max(1, size) for size in found) * itemsize > LARGEST:
        shape.fail("is too large")
    return found, math.prod(found)


def encode_tensor(value: torch.Tensor, blobs: Blobs, refuse: Refuse) -> Json:
    """The node for a tensor: [name of the dtype, shape, stride, reference of its bytes in memory order]."""
    if type(value) is not torch.Tensor:
        refuse(f"is a {type(value).__name__}, a subclass of torch.Tensor", "Give value.detach().clone().")
    if value.layout is not torch.strided or value.dtype not in DTYPE_NAMES or value.is_meta:
        what = "on the device meta" if value.is_meta else f"of {value.layout} and {value.dtype}"
        refuse(f"is a tensor {what}", "Give a dense tensor of one of torch's plain dtypes.")
    if value.dim() > MOST_DIMENSIONS:
        refuse(f"has more than {MOST_DIMENSIONS} dimensions", "Give value.flatten().")
    values = value.detach().resolve_conj().resolve_neg()
    if values.numel() == 0 or not memory_order(values.shape, values.stride()):
        values = torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)
    flat = values.as_strided((values.numel(),), (1,)).cpu().view(torch.uint8)
    if value.dtype is torch.bool:
        flat = flat.ne(0).view(torch.uint8)
    reference = blobs.add(flat.numpy().data)
    return [DTYPE_NAMES[value.dtype], list(values.shape), list(values.stride()), reference]


def decode_tensor(node: Node, take: Take) -> torch.Tensor:
    """The tensor, on the CPU, that `encode_tensor` described."""
    name, shape, stride, reference = node.tuple_of(4)
    dtype = DTYPES[name.choice(*DTYPES)]
    sizes, numel = element_count(shape, dtype.itemsize)
    steps = tuple(each.integer() for each in stride.items())
    if len(steps) != len(sizes) or (numel and not memory_order(sizes, steps)):
        stride.fail("is not the stride of a dense tensor of this shape")
    data = np.frombuffer(take(reference), np.uint8)
    if len(data) != numel * dtype.itemsize:
        reference.fail(f"has {len(data)} bytes, not {numel * dtype.itemsize}")
    if not numel:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    if dtype is torch.bool:
        _check_bools(data, node)
    flat = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    flat.numpy()[:] = data
    return flat.view(dtype).as_strided(sizes, steps)


def encode_array(value: np.ndarray[Any, Any], blobs: Blobs, refuse: Refuse) -> Json:
    """The node for an array: [dtype as NumPy's `dtype.str`, shape, "C" or "F", reference of its bytes].

    "C" says that the bytes are in the order of rows, "F" that they are in the order of columns.
    """
    if not _kept(value.dtype):
        refuse(f"is an array of {value.dtype}", "Give an array of numbers, times, strings or bytes.")
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    values = value.view(np.uint8) != 0 if value.dtype.kind == "b" else value
    reference = blobs.add(values.tobytes(order))  # type: ignore[arg-type]
    return [value.dtype.str, list(value.shape), order, reference]


def decode_array(node: Node, take: Take) -> np.ndarray[Any, Any]:
    """The array that `encode_array` described. It may be written to."""
    name, shape, order, reference = node.tuple_of(4)
    dtype = _dtype(name)
    sizes, numel = element_count(shape, dtype.itemsize)
    data = take(reference)
    if len(data) != numel * dtype.itemsize:
        reference.fail(f"has {len(data)} bytes, not {numel * dtype.itemsize}")
    flat = _values(data, dtype, node).copy()
    return flat.reshape(sizes, order=order.choice("C", "F"))  # type: ignore[no-any-return]


def encode_scalar(value: np.generic[Any], refuse: Refuse) -> Json:
    """The node for a NumPy scalar other than a string: [dtype as NumPy's `dtype.str`, its bytes in hex]."""
    if not _kept(value.dtype) or type(value) is not value.dtype.type:
        refuse(f"is a NumPy scalar of {value.dtype}", "Give a number of Python, NumPy or torch.")
    return [value.dtype.str, value.tobytes().hex()]


def decode_scalar(node: Node) -> Any:
    """The NumPy scalar that `encode_scalar` described."""
    name, digits = node.tuple_of(2)
    dtype, data = _dtype(name), from_hex(digits)
    if len(data) != dtype.itemsize or dtype.kind in "SU":
        node.fail(f"is not a NumPy scalar of {dtype}")
    return _values(memoryview(data), dtype, node)[0]


def from_hex(node: Node) -> bytes:
    """The bytes that a string of lower-case hexadecimal digits stands for."""
    digits: str = node.has(str)
    if len(digits) % 2 or not re.fullmatch("[0-9a-f]*", digits):
        node.fail("is not a number of bytes in lower-case hexadecimal digits")
    return bytes.fromhex(digits)


def _values(data: memoryview, dtype: np.dtype[Any], node: Node) -> np.ndarray[Any, Any]:
    """The elements of `dtype` in `data`, a read-only view, checked as in [Note: arrays from a file]."""
    if dtype.kind == "b":
        _check_bools(np.frombuffer(data, np.uint8), node)
    if dtype.kind == "U" and (np.frombuffer(data, f"{dtype.str[0]}u4") > 0x10FFFF).any():
        node.fail("has a character that is not in Unicode")
    return np.frombuffer(data, dtype)


def _check_bools(data: np.ndarray[Any, Any], node: Node) -> None:
    if data.max(initial=0) > 1:
        node.fail("has a truth value that is neither 0 nor 1")


def _kept(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of `dtype` can be described by `dtype.str` alone."""
    return dtype.itemsize > 0 and bool(_NUMPY.fullmatch(dtype.str)) and np.dtype(dtype.str) == dtype


def _dtype(node: Node) -> np.dtype[Any]:
    text = node.text()
    if _NUMPY.fullmatch(text):
        try:
            dtype = np.dtype(text)
        except (TypeError, ValueError, OverflowError):
            pass
        else:
            if dtype.itemsize:
                return dtype
    node.fail("is not a dtype of NumPy that files hold")
