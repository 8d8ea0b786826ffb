"""Tests of initial values that several threads draw: they have the bits that torch draws on one thread, the
default generator goes on as it would, and at most the given number of bytes waits to be written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.model import draws
from infinity.model.draws import Draws, draws_as_noted
from infinity.model.materialize import materialize

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors of at least 64 elements drawn in pieces of 48 to 63 elements."""
    monkeypatch.setattr(draws, "_LEAST", 64)
    monkeypatch.setattr(draws, "_PIECE", 48)


class Filled(nn.Module):
    """A module with a matrix that `fill` fills, and a vector of ones."""

    def __init__(self, fill: Callable[[torch.Tensor], Any], *shape: int, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.fill = fill
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.gain = nn.Parameter(torch.empty(shape[0]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.fill(self.weight)
        nn.init.ones_(self.gain)


def then_zero(weight: torch.Tensor) -> None:
    nn.init.normal_(weight, 0.5, 2.0)
    with torch.no_grad():
        weight[0] = 0


def twice(weight: torch.Tensor) -> None:
    nn.init.uniform_(weight, -3, 5)
    weight.data.normal_(std=0.02).mul_(weight.data.abs().max())


def transposed(weight: torch.Tensor) -> None:
    weight.data.t().normal_()


def half(weight: torch.Tensor) -> None:
    weight.data[1:].normal_()
    weight.data[:1].uniform_()


FILLS = (nn.init.normal_, nn.init.trunc_normal_, nn.init.orthogonal_, then_zero, twice, transposed, half)


def layers() -> nn.Module:
    torch.rand(3)
    return nn.Sequential(
        *(nn.Embedding(50, 8, padding_idx=3), nn.Linear(20, 30), nn.LSTM(9, 11), nn.Conv2d(3, 8, 3)),
        *(Filled(fill, rows, 13) for fill in FILLS for rows in (5, 16, 61)),
        *(Filled(nn.init.normal_, 24, 8, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)),
    )


def drawn(make: Callable[[], nn.Module], seed: int, **options: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Materialize a model that was built on the meta device. Returns (its values, the generator's state)."""
    with torch.device("meta"):
        model = make()
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {}
    torch.manual_seed(seed)
    torch.rand(3)
    materialize(model, CPU, lambda each, values: found.update({names[each]: values.clone()}), **options)
    return found, torch.get_rng_state()


@pytest.mark.parametrize("seed", range(3))
def test_threads_draw_the_bits_of_one(seed: int) -> None:
    torch.manual_seed(seed)
    expected = dict(layers().named_parameters())
    state = torch.get_rng_state()
    for threads, room in ((1, 0), (3, 0), (3, 2000), (3, 1 << 20)):
        found, after = drawn(layers, seed, threads=threads, room=room)
        assert list(found) and found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        assert torch.equal(after, state)


def test_pieces_begin_anywhere_in_the_generators_words() -> None:
    with Draws(2) as found:
        for start in range(0, 1300, 7):
            for function in draws._FILLS:
                torch.manual_seed(start)
                torch.rand(start)
                before = torch.get_rng_state()
                expected = function(torch.empty(start + 77), 0.5, 2.0)
                after = torch.get_rng_state()
                torch.set_rng_state(before)
                made = torch.empty(start + 77)
                assert found.take(function, (made, 0.5, 2.0), {})
                found.wait(made)
                assert torch.equal(made, expected) and torch.equal(torch.get_rng_state(), after)


def test_other_calls_are_left_to_torch() -> None:
    normal = torch.ops.aten.normal_.default
    with Draws(2) as found, Draws(1) as one:
        assert not one.take(normal, (torch.empty(100),), {})
        for tensor in (
            torch.empty(63),
            torch.empty(100).double(),
            torch.empty(20, 10).t(),
            torch.empty(0),
        ):
            assert not found.take(normal, (tensor,), {})
        assert not found.take(normal, (torch.empty(100),), {"generator": torch.Generator()})
        assert not found.take(torch.ops.aten.zero_.default, (torch.empty(100),), {})


@pytest.fixture
def otherwise(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have torch draw otherwise than the note says: by one word of the generator more for each tensor."""
    count_on = draws._States.count_on
    monkeypatch.setattr(draws._States, "count_on", lambda self, count: count_on(self, count + 1))
    draws_as_noted.cache_clear()
    yield
    draws_as_noted.cache_clear()


def test_a_torch_that_draws_otherwise_draws_alone(otherwise: None) -> None:
    before = torch.get_rng_state()
    assert not draws_as_noted() and torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    expected = dict(layers().named_parameters())
    found, _ = drawn(layers, 1, threads=3, room=1 << 20)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_pieces_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both, draw = threading.Barrier(2, timeout=30), draws._draw

    def together(*arguments: Any) -> None:
        both.wait()
        draw(*arguments)

    draws_as_noted()
    monkeypatch.setattr(draws, "_draw", together)
    found, _ = drawn(lambda: Filled(nn.init.normal_, 12, 8), 1, threads=2)
    assert set(found) == {"weight", "gain"}


def test_what_waits_has_at_most_the_bytes_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the tensors of the module that comes next."""
    with torch.device("meta"):
        model = nn.Sequential(*(Filled(nn.init.normal_, 16, 16) for _ in range(9)))
    matrix = 16 * 16 * 4
    seen: list[StorageWeakRef] = []
    most = 0

    class Noted(Draws):
        def take(self, function: Any, args: Any, kwargs: Any) -> bool:
            taken = super().take(function, args, kwargs)
            if taken:
                seen.append(StorageWeakRef(args[0].untyped_storage()))
            return taken

    def fill(parameter: nn.Parameter, values: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(not each.expired() for each in seen))
        assert not values.isnan().any()

    monkeypatch.setattr("infinity.model.materialize.Draws", Noted)
    materialize(model, CPU, fill, threads=2, room=3 * matrix)
    assert len(seen) == 9 and most == 3
