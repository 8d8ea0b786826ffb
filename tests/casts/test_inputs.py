"""Tests of `Precision.inputs`: which arguments of a model's forward are cast, in which containers, and what
users are told of it.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import infinity
from infinity import ConfigError, Precision
from infinity.formats.casts import InputCast

X = torch.tensor([1.0, 0.5])
"""Values that bf16 has."""


class Echo(nn.Module):
    """A model whose `seen` are the arguments of its last forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Any, t: Any = None, *rest: Any, scale: Any = None) -> Any:
        self.seen: dict[str, Any] = {"x": x, "t": t, "rest": rest, "scale": scale}
        return self.linear.weight * 1


class AnyName(Echo):
    def forward(self, x: Any, **more: Any) -> Any:
        self.seen = {"x": x, **more}
        return self.linear.weight * 1


def seen(inputs: Any, *args: Any, model: Echo | None = None, **kwargs: Any) -> dict[str, Any]:
    """Offload a model that computes in bf16, call it once, and return the arguments that its forward got."""
    model = Echo() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters())
    precision = Precision(inputs=inputs)
    with infinity.offload(
        model, optimizer, budget=infinity.Budget(host="64MiB"), device="cpu", precision=precision
    ):
        model(*args, **kwargs)
    return model.seen


@dataclass(frozen=True)
class Inner:
    value: Tensor
    name: str = "inner"


@dataclass
class Outer:
    inner: Inner
    listed: list[Tensor]
    unset: Tensor = field(init=False)


class Batch(UserDict):  # type: ignore[type-arg]
    """As transformers' BatchEncoding."""


class Output(OrderedDict):  # type: ignore[type-arg]
    """As transformers' ModelOutput."""


class Several(list):  # type: ignore[type-arg]
    pass


Pair = namedtuple("Pair", "first second")

CONTAINERS = {
    "tensor": (X, lambda found: found),
    "dict": ({"a": [X]}, lambda found: found["a"][0]),
    "named tuple": (Pair(1, X), lambda found: found.second),
    "dataclasses": (Outer(Inner(X), [X]), lambda found: found.inner.value),
    "list in a dataclass": (Outer(Inner(X), [X]), lambda found: found.listed[0]),
    "UserDict": (Batch(a={"b": X}), lambda found: found["a"]["b"]),
    "subclass of dict": (Output(a=X), lambda found: found["a"]),
    "subclass of list": (Several([X]), lambda found: found[0]),
    "packed sequence": (pack_sequence([X, X[:1]]), lambda found: found.data),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_tensors_are_found_in_containers(name: str) -> None:
    given, tensor_of = CONTAINERS[name]
    before = tensor_of(given)
    found = seen("cast", given)["x"]
    assert type(found) is type(given)
    assert tensor_of(found).dtype == torch.bfloat16
    assert tensor_of(found).float().tolist() == before.tolist()
    assert tensor_of(given) is before, "the caller's container did not change"
    assert seen("keep", given)["x"] is given


def test_only_floating_point_numbers_are_cast() -> None:
    given = [torch.tensor([3]), torch.tensor([True]), torch.tensor([1j]), 0.1, "text", None]
    assert seen("cast", given)["x"] is given
    wide = torch.ones(2, dtype=torch.float64, requires_grad=True)
    found = seen("cast", wide)["x"]
    assert found.dtype == torch.bfloat16
    found.sum().backward()
    assert wide.grad is not None and wide.grad.dtype == torch.float64


def test_patterns_name_the_arguments_that_are_cast() -> None:
    names_of = {("x",): {"x"}, ("[xt]",): {"x", "t"}, ("re*", "scale"): {"rest", "scale"}}
    for patterns, names in names_of.items():
        found = seen(patterns, X, X, X, scale=X)
        found["rest"] = found["rest"][0]
        assert {name for name, value in found.items() if value.dtype == torch.bfloat16} == names
    found = seen(("new*",), X, new_one=X, model=AnyName())
    assert (found["x"].dtype, found["new_one"].dtype) == (torch.float32, torch.bfloat16)


def test_a_pattern_that_matches_no_argument_is_refused_before_anything_is_done() -> None:
    model = Echo()
    optimizer = torch.optim.AdamW(model.parameters())
    for call in (infinity.plan, infinity.offload):
        with pytest.raises(ConfigError, match=r"'pixel_\*'.*Echo.*x, t, rest, scale"):
            call(model, optimizer, device="cpu", precision=Precision(inputs=("x", "pixel_*")))
    assert type(model.linear.weight) is nn.Parameter


def test_a_value_that_changes_is_told_once_for_each_argument() -> None:
    cast = InputCast(Echo(), Precision(inputs="cast"))
    with pytest.warns(UserWarning, match=r"'t'.*999 becomes 1000") as told:
        cast((X, torch.tensor([0.0, 999.0])), {})
    assert len(told) == 1
    with pytest.warns(UserWarning, match=r"'scale'.*0\.1"):
        cast((X, torch.tensor([999.0])), {"scale": {"a": torch.tensor([0.1])}})
    half = InputCast(Echo(), Precision(compute="fp16", inputs=("x",)))
    with pytest.warns(UserWarning, match=r"'x'.*100000 becomes inf"):
        half((torch.tensor([1e5]),), {})


def test_nothing_is_told_of_exact_values_nor_after_the_first_calls() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cast = InputCast(Echo(), Precision(inputs="cast"))
        nothing = torch.tensor([float("nan"), float("inf"), 256.0])
        for _ in range(3):
            cast((X, nothing.double()), {})
        cast((torch.tensor([0.1]),), {})
        InputCast(Echo(), Precision(inputs=("x",)))((X, torch.tensor([0.1])), {})


def test_example_inputs_are_cast_as_real_ones_are() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(256, 64)
    bytes_of = {
        inputs: infinity.plan(
            model, None, device="cpu", example_inputs=(x,), precision=Precision(inputs=inputs)
        ).activations
        for inputs in ("keep", "cast")
    }
    # The results of ReLU in fp32, its copy in bf16 and the product; or both results in bf16.
    assert bytes_of == {"keep": x.numel() * (4 + 2 + 2), "cast": x.numel() * (2 + 2)}


def test_packed_sequences_stay_what_they_are() -> None:
    assert isinstance(seen("cast", pack_sequence([X]))["x"], PackedSequence)
