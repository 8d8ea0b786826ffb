"""Tests of the loss scale: gradients are multiplied by it where they enter the root module, at its outputs.

They are divided by it again where they leave the root module, at its inputs. Both hold for a tensor output
and for outputs in lists, dictionaries and dataclasses, whose type is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from infinity.gradients.loss_scale import LossScale


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    extra: tuple[int, list[torch.Tensor]]


def outputs(kind: str, tensor: torch.Tensor) -> tuple[Any, Any]:
    """Put `tensor` into the output of a module, and return (output, function that gets the tensor from it).

    kind: the kind of the output: "tensor", "list", "ordered", "dataclass", or "inside" for a list in a
    dataclass.
    """
    return {
        "tensor": (tensor, lambda found: found),
        "list": ([None, tensor], lambda found: found[1]),
        "ordered": (OrderedDict(a=tensor), lambda found: found["a"]),
        "dataclass": (Output(tensor, (1, [])), lambda found: found.logits),
        "inside": (Output(torch.zeros(1), (1, [tensor])), lambda found: found.extra[1][0]),
    }[kind]


@pytest.mark.parametrize("kind", ["tensor", "list", "ordered", "dataclass", "inside"])
def test_gradients_come_back_scaled_and_go_on_unscaled(kind: str) -> None:
    scale = LossScale(dynamic=True)
    outside = torch.ones(3, requires_grad=True)
    (inside,) = scale.incoming((outside,))
    weight = torch.full((3,), 2.0, requires_grad=True)
    output, get = outputs(kind, inside * weight)
    marked = scale.outgoing(output)
    assert type(marked) is type(output)
    get(marked).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), scale.value))
    assert torch.equal(outside.grad, torch.full((3,), 2.0))


def test_without_scaling_nothing_is_touched() -> None:
    scale = LossScale(dynamic=False)
    output = Output(torch.ones(2, requires_grad=True), (0, []))
    assert scale.outgoing(output) is output and scale.value == 1.0


@pytest.mark.parametrize(("ranks", "smaller"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4)])
def test_the_scale_of_several_ranks_is_that_of_one_divided_by_their_number(ranks: int, smaller: int) -> None:
    one, several = LossScale(dynamic=True), LossScale(dynamic=True, ranks=ranks)
    for finite, steps in ((True, 20 * 2000), (False, 60)):
        for _ in range(steps):
            one.step_was(finite=finite)
            several.step_was(finite=finite)
            assert several.value == one.value / smaller
            assert several.of_one_rank == one.of_one_rank == one.value
    one.of_one_rank = several.of_one_rank = 64.0
    assert (one.value, several.value) == (64.0, 64.0 / smaller)
