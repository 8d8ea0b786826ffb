"""Tests of runtime.accumulate, which runs each micro-batch on a thread of its own.

Micro-batches must not see each other's tensors, and an error in one must end all of them.
"""

from __future__ import annotations

import contextvars
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from micro_batches import (
    MICRO_BATCHES,
    PLAIN,
    assert_same,
    batches_of,
    found_by,
    no_warnings,
    plain_loop,
    threads_as_before,
)
from parity import differences
from small_runtime import TIED, files, gradients, opened
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from zoo import DIM, Entry, vectors

import infinity
from infinity.errors import ConfigError

# --- what is not to be mixed up ------------------------------------------------------------------------


class Auxiliary(zoo.Tied):
    """A model whose blocks each keep a loss of their own in an attribute, as mixtures of experts do."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
            block.auxiliary = x.square().mean()
        return self.head(self.norm(x))


def with_auxiliary(model: Any, batch: Any) -> Tensor:
    return TIED.loss(model, batch) + sum(block.auxiliary for block in model.blocks)


def test_what_modules_keep_from_a_forward_is_not_mixed_up(tmp_path: Path) -> None:
    of = Entry("auxiliary", Auxiliary, zoo.words)
    with pytest.warns(UserWarning, match=r"keeps blocks\.0\.auxiliary"), threads_as_before():
        assert_same(of, tmp_path, loss_of=with_auxiliary, steps=3)


class Detached(zoo.Tied):
    """A model whose forward keeps a scalar tensor, computed from the batch, in an attribute.

    The forward multiplies its output by the tensor in the end. The tensor has no autograd graph.
    """

    def forward(self, ids: Tensor) -> Tensor:
        self.scale = self.embedding(ids).detach().std()
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def test_nor_is_what_has_no_graph(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="keeps scale"):
        assert_same(Entry("detached", Detached, zoo.words), tmp_path)


def test_what_a_module_makes_once_is_no_reason_for_ever(tmp_path: Path) -> None:
    class Lazy(zoo.Tied):
        def forward(self, ids: Tensor) -> Tensor:
            if not hasattr(self, "table"):
                self.table = torch.linspace(0, 1, DIM)
            return super().forward(ids)

    with no_warnings():
        assert_same(Entry("lazy", Lazy, zoo.words), tmp_path)


def test_tensors_that_a_hook_hands_on_are_not_mixed_up(tmp_path: Path) -> None:
    seen: dict[str, Tensor] = {}

    def make() -> nn.Module:
        model = zoo.Tied()
        model.blocks[0].register_forward_hook(lambda *each: seen.update(found=each[2]))
        return model

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return TIED.loss(model, batch) + seen["found"].square().mean()

    with pytest.warns(UserWarning, match="from tensors of another"):
        assert_same(Entry("hooked", make, zoo.words), tmp_path, loss_of=loss_of, steps=3)


def test_a_mixture_found_too_late_is_an_error_and_the_next_step_is_right(tmp_path: Path) -> None:
    """A loss that uses another micro-batch's tensor raises ConfigError, and the next step is right.

    Only the second micro-batch uses such a tensor, so accumulate() finds it when it is too late to start
    again: a backward has begun.
    """
    seen: dict[str, Tensor] = {}
    model = zoo.entry("tied").make()
    model.blocks[0].register_forward_hook(lambda *each: seen.update(found=each[2]))
    batches = batches_of(TIED)

    def loss_fn(batch: Any) -> Tensor:
        loss = TIED.loss(model, batch)
        return loss + seen["found"].mean() if batch is batches[1] else loss

    with opened(model, tmp_path) as runtime:
        with threads_as_before(), pytest.raises(ConfigError, match="mixed up"):
            runtime.accumulate(batches, loss_fn)
        with pytest.raises(ConfigError, match=r"broken off|no parameter has a gradient"):
            runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        with pytest.warns(UserWarning, match=PLAIN):
            runtime.accumulate(batches, loss_fn)
        got = gradients(runtime, model)
        runtime.optimizer.zero_grad()
        plain_loop(loss_fn, batches)
        assert differences(got, gradients(runtime, model)) == []


# --- what is broken off --------------------------------------------------------------------------------


def failing(where: str, act: Callable[[], None]) -> Callable[[nn.Module, Any], Tensor]:
    """Return a loss function that calls `act` during one micro-batch and otherwise only computes the loss.

    The caller appends that micro-batch to the returned function's attribute `marked`, which is an empty list.
    where: when `act` is called: "before" or "after" the model's forward, in the "forward" of one of the
    model's blocks, or in the "backward".
    """

    def loss_of(model: Any, batch: Any) -> Tensor:
        if batch[0] is not marked[0][0]:
            return TIED.loss(model, batch)
        if where == "before":
            act()
        handle = None
        if where == "forward":
            handle = model.blocks[1].register_forward_hook(lambda *_: act())
        try:
            loss = TIED.loss(model, batch)
        finally:
            if handle is not None:
                handle.remove()
        if where == "after":
            act()
        if where == "backward":
            loss.register_hook(lambda _: act())
        return loss

    marked: list[Any] = []
    loss_of.marked = marked  # type: ignore[attr-defined]
    return loss_of


def raise_it() -> None:
    raise LookupError("of the third")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)  # to the process, as the terminal sends it


@pytest.mark.sweep
@pytest.mark.parametrize("where", ["before", "forward", "after", "backward"])
@pytest.mark.parametrize("act, error", [(raise_it, LookupError), (interrupt, KeyboardInterrupt)])
def test_an_exception_ends_all_and_the_next_step_is_right(
    where: str, act: Callable[[], None], error: type[BaseException], tmp_path: Path
) -> None:
    model = TIED.make()
    batches = batches_of(TIED)
    loss_of = failing(where, act)
    loss_of.marked.append(batches[2])  # type: ignore[attr-defined]
    with opened(model, tmp_path) as runtime:
        with threads_as_before(), pytest.raises(error):
            runtime.accumulate(batches, lambda batch: loss_of(model, batch))
        with pytest.raises(ConfigError, match=r"broken off|no parameter has a gradient"):
            runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        hooks = [len(each._forward_pre_hooks) for each in model.modules()]
        runtime.accumulate(batches, lambda batch: TIED.loss(model, batch))
        assert [len(each._forward_pre_hooks) for each in model.modules()] == hooks
        got = gradients(runtime, model)
        runtime.optimizer.zero_grad()
        plain_loop(lambda batch: TIED.loss(model, batch), batches)
        assert differences(got, gradients(runtime, model)) == []
        assert not runtime._components.pager.forwards
    assert files(tmp_path) == []


def test_wrong_arguments(tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path) as runtime:
        with pytest.raises(ConfigError, match="together=0"):
            runtime.accumulate(batches_of(TIED), lambda batch: TIED.loss(model, batch), together=0)
        with threads_as_before(), pytest.raises(ConfigError, match="returned float"):
            runtime.accumulate(batches_of(TIED), lambda batch: TIED.loss(model, batch).item())
        with threads_as_before(), pytest.raises(RuntimeError, match="scalar"):
            runtime.accumulate(batches_of(TIED), lambda batch: model(batch[0]))
        runtime.optimizer.zero_grad()
        assert runtime.accumulate([], lambda batch: TIED.loss(model, batch)) == []
    with pytest.raises(ConfigError, match="closed"):
        runtime.accumulate(batches_of(TIED), lambda batch: TIED.loss(model, batch))


def test_without_an_optimizer_there_is_nothing_to_accumulate() -> None:
    model = TIED.make()
    with (
        infinity.offload(model, None, budget=infinity.Budget(host="64MiB")) as runtime,
        pytest.raises(ConfigError, match="without an optimizer"),
    ):
        runtime.accumulate(batches_of(TIED), lambda batch: TIED.loss(model, batch))


# --- what torch keeps by thread ------------------------------------------------------------------------


def test_micro_batches_run_under_what_is_in_force_around_them(tmp_path: Path) -> None:
    label: contextvars.ContextVar[str] = contextvars.ContextVar("label", default="none")
    model, packed, seen = TIED.make(), [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor

    def loss_fn(batch: Any) -> Tensor:
        loss = TIED.loss(model, batch)
        with torch.no_grad():
            product = torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")
        seen.append((label.get(), product.dtype, torch.empty(0).device.type, torch.get_num_threads()))
        label.set("changed")
        return loss

    with opened(model, tmp_path) as runtime:
        label.set("ours")
        with (
            torch.device("meta"),
            torch.autocast("cpu", torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            batches = [(ids.cpu(), targets.cpu()) for ids, targets in batches_of_cpu()]
            runtime.accumulate(batches, loss_fn)
        assert seen == [("ours", torch.bfloat16, "meta", torch.get_num_threads())] * MICRO_BATCHES
        assert label.get() == "ours"
        assert packed


def batches_of_cpu() -> list[Any]:
    with torch.device("cpu"):
        return batches_of(TIED)


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class WatchingBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Watching, WatchingBelow])
def test_a_mode_that_sees_one_thread_gets_the_plain_loop(mode: Any, tmp_path: Path) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        assert threading.current_thread() is threading.main_thread()
        return TIED.loss(model, batch)

    with pytest.warns(UserWarning, match="one thread only"), mode():
        found_by(TIED, tmp_path, vertical=True, loss_of=loss_of)


def test_a_checkpoint_around_a_part_draws_the_numbers_that_it_drew(tmp_path: Path) -> None:
    """If torch's checkpoint() recomputes a part of the model, accumulate() runs micro-batches one after the
    other.

    It warns of this, and the outcome is that of a plain loop. If micro-batches took turns and one was
    halted inside of the part, another would draw random numbers meanwhile, and the recomputed dropout masks
    would differ from those of the forward.
    """

    def loss_of(model: Any, batch: Any) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return model[3](F.dropout(torch.tanh(model[2](x))))

        x = torch.tanh(model[1](model[0](batch[0])))
        x = checkpoint(part, x, use_reentrant=False)
        return F.cross_entropy(model[5](torch.tanh(model[4](x))), batch[1])

    def chain() -> nn.Module:
        return nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(6)))

    with pytest.warns(UserWarning, match="recomputes"):
        assert_same(Entry("chain", chain, vectors), tmp_path, loss_of=loss_of, device_factor=3)
