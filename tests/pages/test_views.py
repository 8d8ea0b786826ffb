"""Tests of tensors that users keep over steps.

A view of a parameter shows values that this parameter has or had, never another page's bytes. Outputs,
gradients and state dicts keep their values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from homes import places
from parity import copied, differences
from small_runtime import TIED, WIDE, gradients, loss_of, opened, train_step
from torch import Tensor, nn

from infinity.errors import BudgetError

VIEWS = pytest.mark.parametrize(
    "view_of",
    [
        lambda weight: weight.detach()[1:],
        lambda weight: weight.data.view(-1),
        lambda weight: weight.t(),
    ],
    ids=["detached", "data", "view with a graph"],
)


@pytest.mark.sweep
@VIEWS
@places("nvme", "host", "device", "unified", cuda=("nvme", "host", "device"))
def test_a_view_held_over_steps_never_shows_another_pages_bytes(
    view_of: Callable[[nn.Parameter], Tensor], home: str, device: str, tmp_path: Path
) -> None:
    model = TIED.make(device)
    device_factor = 4 if home in ("nvme", "host") else 1
    with opened(model, tmp_path, home=home, device_factor=device_factor) as runtime:
        parameter = model.get_parameter(WIDE)
        view = view_of(parameter)
        history = [view.detach().clone()]
        for step in range(3):
            train_step(model, runtime, step)
            with torch.no_grad():
                loss_of(model, step)
            history.append(view_of(parameter).detach().clone())
            known = torch.stack([view.detach() == each for each in history])
            assert bool(known.any(0).all())
        assert not torch.equal(history[0], history[-1])


@pytest.mark.sweep
@VIEWS
@places("nvme", "host", "mixed", cuda=("nvme", "host", "mixed"))
def test_a_view_held_where_room_is_short_stays_as_it_is(
    view_of: Callable[[nn.Parameter], Tensor], home: str, device: str, tmp_path: Path
) -> None:
    plain, model = TIED.make(device), TIED.make(device)
    with opened(model, tmp_path, home=home) as runtime:
        view = view_of(model.get_parameter(WIDE))
        with contextlib.suppress(BudgetError), torch.no_grad():
            assert loss_of(model).item() == loss_of(plain).item()
        assert torch.equal(view, view_of(plain.get_parameter(WIDE)))
        del view
        assert train_step(model, runtime) == loss_of(plain).item()


@places("nvme", "unified", cuda=("nvme", "device"))
def test_outputs_and_gradients_outlive_the_step(home: str, device: str, tmp_path: Path) -> None:
    model = TIED.make(device)
    with opened(model, tmp_path, home=home) as runtime:
        inputs, _ = TIED.batch(0, 0)
        outputs = model(inputs.to(device))
        outputs.square().mean().backward()
        kept = [outputs.detach(), *(each for each in gradients(runtime, model).values() if each is not None)]
        before = [each.clone() for each in kept]
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        for step in range(2):
            train_step(model, runtime, step)
        assert differences(kept, before) == []
        state = model.state_dict()
        values = copied(state)
        train_step(model, runtime, 3)
        assert differences(dict(state), values) == []


@pytest.mark.parametrize("whose", ["ours", "another's"])
def test_views_are_views_again_after_a_state_dict_that_failed(whose: str, tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path) as runtime:
        if whose == "ours":
            held = model.get_parameter(WIDE).detach()
            with pytest.raises(BudgetError):
                model.state_dict()
            del held
        else:

            def fail(*_: object) -> None:
                raise KeyError

            handle = model.blocks[1].register_state_dict_post_hook(fail)
            with pytest.raises(KeyError):
                model.state_dict()
            handle.remove()
            with torch.no_grad():
                loss_of(model)
        parameter = model.get_parameter(WIDE)
        with torch.no_grad():
            parameter.detach().view(-1)[:3] = 7.0
        train_step(model, runtime)
        assert (parameter.detach().view(-1)[:3] - 7.0).abs().max() < 0.1
