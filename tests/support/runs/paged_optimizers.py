"""Small torch optimizers of every kind, and a fixture that replaces such an optimizer by a PagedOptimizer
whose states are plain tensors in RAM instead of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from other_optimizers import Lion
from update_backend import MemoryBackend

from infinity.cpu_adam import ThreadPool
from infinity.formats.optimizer_rules import Rule
from infinity.optim.paged_optimizer import PagedOptimizer, adopt, retire

SHAPES = ((7, 3), (3,), ())
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    "lion": (Lion, {"lr": 1e-2, "weight_decay": 0.1}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in SHAPES]


def build(kind: str, values: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make a torch optimizer over `values` in two groups. kind: a key of KINDS.

    The second group has another learning rate and, for "momentum", no momentum.
    """
    make, options = KINDS[kind]
    second = {"params": values[2:], "lr": 0.02}
    return make(
        [{"params": values[:2]}, second | ({"momentum": 0.0} if kind == "momentum" else {})], **options
    )


def give_gradients(values: list[torch.nn.Parameter], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for each in values:
        each.grad = torch.randn(each.shape, generator=random).to(each.dtype)


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    values = [each for group in optimizer.param_groups for each in group["params"]]
    for step in steps:
        give_gradients(values, step)
        optimizer.step()


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    with ThreadPool(threads=1) as made:
        yield made


@pytest.fixture
def page(pool: ThreadPool) -> Callable[[torch.optim.Optimizer], tuple[PagedOptimizer, MemoryBackend]]:
    """Return a function that replaces a torch optimizer by a PagedOptimizer, as `offload` does.

    The function returns the PagedOptimizer and the MemoryBackend that updates its parameters and keeps its
    states. Methods of the replaced optimizer then raise ConfigError.
    """

    def take_over(optimizer: torch.optim.Optimizer) -> tuple[PagedOptimizer, MemoryBackend]:
        backend = MemoryBackend(optimizer, pool)
        adopt(optimizer, backend.write_state, lambda parameter: parameter.dtype)
        paged = PagedOptimizer(optimizer, Rule.of(optimizer), backend)
        retire(optimizer)
        return paged, backend

    return take_over
