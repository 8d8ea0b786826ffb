"""Tests that no thread waits for ever when several threads use one paged model.

Backwards run in a thread of the test's own, and on CUDA in autograd's threads. Gradients stay those of the
plain model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import both_homes, places
from parity import differences
from small_runtime import (
    TIED,
    WIDE,
    Gradients,
    gradients,
    in_both,
    loss_of,
    opened,
    train_step,
    two_layers,
)
from torch import Tensor, nn
from zoo import entry

from infinity.tiers.link import DeviceLink

PATIENCE = 20
"""Seconds after which a thread counts as stuck. Its work takes milliseconds."""


def in_a_thread(function: Callable[[], Any]) -> None:
    """Run `function` in a thread of its own, and assert that the thread ends within PATIENCE seconds.

    Its result is dropped, and an exception in it does not reach the caller.
    """
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@places("nvme", "unified", cuda=("nvme", "host"))
def test_a_backward_in_another_thread_while_parameters_are_held(
    home: str, device: str, tmp_path: Path
) -> None:
    plain, model = TIED.make(device), TIED.make(device)
    loss_of(plain).backward()
    with opened(model, tmp_path, home=home, device_factor=8 if home != "unified" else 1) as runtime:
        with runtime.full_parameters(model.norm):
            loss = loss_of(model)
            in_a_thread(loss.backward)
            loss_of(model)
        assert differences(runtime.grad(model.norm.weight), plain.norm.weight.grad) == []


def test_holds_of_two_threads_end_each_on_its_own(tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path, device_factor=8) as runtime:
        first, second = runtime.full_parameters(model.norm), runtime.full_parameters(model.norm)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        with torch.no_grad():
            loss_of(model)
            model.norm.weight.fill_(2)
        second.__exit__(None, None, None)
        assert bool((model.state_dict()["norm.weight"] == 2).all())
        train_step(model, runtime)


BACKWARDS: dict[str, Callable[[Tensor, nn.Parameter], object]] = {
    "of some parameters": lambda loss, scale: loss.backward(inputs=[scale]),
    "of one parameter": lambda loss, scale: torch.autograd.backward(loss, inputs=scale),
    "from a parameter": lambda loss, scale: scale.backward(),
    "from a parameter and a loss": lambda loss, scale: torch.autograd.backward([scale, loss], [None, None]),
    "grad of a parameter by itself": lambda loss, scale: torch.autograd.grad(scale, scale),
}


@pytest.mark.sweep
@places("nvme", "unified", cuda=("nvme", "host"))
@pytest.mark.parametrize("how", BACKWARDS)
def test_hooks_in_a_backward_may_use_the_model_from_any_thread(
    how: str, home: str, device: str, tmp_path: Path
) -> None:
    custom = entry("custom")
    if how == "of one parameter" and torch.__version__.startswith("2.6."):
        pytest.skip("this torch takes no parameter without dimensions as `inputs`")

    def act(model: nn.Module, gradients: Gradients) -> Any:
        losses: list[float] = []

        def evaluate() -> None:
            with torch.no_grad():
                losses.append(loss_of(model, 1, of=custom).item())

        model.scale.register_hook(lambda _: in_a_thread(evaluate))
        BACKWARDS[how](loss_of(model, of=custom), model.scale)
        return losses, gradients()

    got, expected = in_both(act, tmp_path, home=home, device=device, of=custom)
    assert expected[0]
    assert differences(got, expected) == []


@places("nvme", "unified", cuda=("nvme",))
def test_recomputation_brings_pages_where_inputs_are_named(home: str, device: str, tmp_path: Path) -> None:
    checkpointed = entry("checkpointed")

    def act(model: nn.Module, gradients: Gradients) -> Any:
        torch.manual_seed(0)
        loss_of(model, of=checkpointed).backward(inputs=[model.embedding.weight])
        return gradients()

    got, expected = in_both(act, tmp_path, home=home, device=device, of=checkpointed)
    assert differences(got, expected) == []


@pytest.mark.parametrize("home", ["nvme", "mixed", "host"])
def test_gradients_that_have_to_be_copied_down_first(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for direct in (True, False):  # as on the CPU, and as on a device whose memory the CPU cannot read
        monkeypatch.setattr(DeviceLink, "direct", direct)
        model = TIED.make()
        with opened(model, tmp_path, home=home) as runtime:
            for step in range(2):
                loss_of(model, step).backward()
            found.append([gradients(runtime, model)])
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            found[-1].append([train_step(model, runtime, 2), dict(model.state_dict())])
    assert found[0][0][WIDE] is not None
    assert differences(found[1], found[0]) == []


@both_homes
def test_threads_may_use_a_model_whose_whole_parameters_are_held(home: str, tmp_path: Path) -> None:
    model = two_layers()
    expected = two_layers()[0].weight.sum().item()
    with opened(model, tmp_path, home=home) as runtime:
        found: list[float] = []

        def use() -> None:
            with torch.no_grad():
                found.append(model[0].weight.sum().item())

        with runtime.full_parameters(model[0]), runtime.full_parameters(model[0]):
            thread = threading.Thread(target=use, daemon=True)
            thread.start()
            thread.join(30)
        assert found == [expected]
        with pytest.raises(ZeroDivisionError), runtime.full_parameters(model[0]):
            raise ZeroDivisionError
        model(torch.ones(1, 64)).sum().backward()
