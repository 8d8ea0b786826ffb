"""Tests of parameters that users edit: which bits of the fp32 masters stay, and which edits are refused."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from homes import both_homes, evict_all
from parity import copied, differences, tensors_copied
from small_runtime import TIED, opened, settle, train_step, two_layers
from torch import nn

import infinity
from infinity.aio import Faults
from infinity.errors import ConfigError, StorageError
from infinity.system.disk_files import injected


@both_homes
def test_a_conversion_that_converts_nothing_keeps_the_bits_of_masters(home: str, tmp_path: Path) -> None:
    results = []
    for converts in (False, True):
        model = TIED.make()
        with opened(model, tmp_path, home=home, compute="bf16") as runtime:
            train_step(model, runtime)
            if converts:
                model.to("cpu")
            train_step(model, runtime, 1)
            results.append(tensors_copied(runtime.optimizer.state_dict()))
    assert differences(*results) == []


@both_homes
def test_data_given_another_view_of_its_own_page(home: str, tmp_path: Path) -> None:
    model = two_layers(16)
    before = copied(model.state_dict())
    with opened(model, tmp_path, home=home, device_factor=8 if home == "nvme" else 1) as runtime:
        weight = model[0].weight
        weight.data = weight.data
        assert torch.equal(weight, before["0.weight"])
        weight.data = weight.data.t()
        assert torch.equal(weight, before["0.weight"].t())
        model[0].bias.data = weight.data[3]
        weight.data.zero_()
        assert torch.equal(model[0].bias, before["0.weight"][:, 3])
        model(torch.ones(2, 16)).sum().backward()
        runtime.optimizer.step()


@both_homes
def test_an_edit_after_a_state_dict_that_failed(home: str, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    model = two_layers()
    with opened(model, tmp_path, home=home):
        handle = model[2].register_state_dict_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model.state_dict()
        handle.remove()
        model[0].weight.data.fill_(3.0)
        model[0].bias.detach().fill_(4.0)
        model(torch.ones(1, 64))
        state = model.state_dict()
        assert bool((state["0.weight"] == 3).all() and (state["0.bias"] == 4).all())


@both_homes
@pytest.mark.parametrize("how", ["set_", "resize_", "resize_as_"])
def test_other_storages_are_refused(how: str, home: str, tmp_path: Path) -> None:
    model = two_layers()
    weight, before = model[0].weight, model[0].weight.detach().clone()
    with opened(model, tmp_path, home=home), torch.no_grad():
        with pytest.raises(ConfigError):
            getattr(weight, how)(*((3, 3) if how == "resize_" else (torch.ones(3, 3),)))
        torch._cudnn_rnn_flatten_weight([weight], 1, 64, 0, 64, 0, 1, False, False)
        assert torch.equal(weight, before)


def edit_a_detached(weight: nn.Parameter) -> None:
    weight.detach().add_(0.5)


def edit_data(weight: nn.Parameter) -> None:
    weight.data[2:].mul_(2)


def edit_a_row(weight: nn.Parameter) -> None:
    weight[1] = 0.25


def edit_in_place(weight: nn.Parameter) -> None:
    weight *= 2
    weight.clamp_(-0.1, 0.1)
    torch.add(weight, 1, out=weight)


@both_homes
@pytest.mark.parametrize("edit", [edit_a_detached, edit_data, edit_a_row, edit_in_place])
def test_edits_in_inference_mode(edit: Callable[[nn.Parameter], None], home: str, tmp_path: Path) -> None:
    results = []
    for edited_first in (True, False):
        model = two_layers()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        with torch.inference_mode():
            if edited_first:
                edit(model[0].weight)
        with torch.no_grad():
            model[0].weight.copy_(model[0].weight.bfloat16())
        with opened(model, tmp_path, home=home, compute="bf16") as runtime:
            if not edited_first:
                with torch.inference_mode():
                    edit(model[0].weight)
                    model(torch.ones(1, 64))
            model(torch.ones(1, 64)).sum().backward()
            runtime.optimizer.step()
            results.append([copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())])
    assert differences(*results) == []


@both_homes
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_views_that_are_kept_over_updates_do_not_cost_masters_their_bits(
    mode: Callable[[], AbstractContextManager[None]], home: str, tmp_path: Path
) -> None:
    results = []
    for keeps in (False, True):
        model = two_layers()
        factor = 4 if home == "nvme" else 1
        with opened(model, tmp_path, home=home, compute="bf16", device_factor=factor) as runtime:
            with mode():
                kept = [model[0].weight.detach(), model[2].weight.data] if keeps else []
            for _ in range(3):
                model(torch.ones(1, 64)).sum().backward()
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            results.append(tensors_copied(runtime.optimizer.state_dict()))
            del kept
    assert differences(*results) == []


@pytest.mark.parametrize("how", ["data =", "data.fill_"])
def test_an_edit_that_could_not_be_written_is_written_later(how: str, tmp_path: Path) -> None:
    """Such an edit moves no version of the parameter: only the runtime's own notes tell of it."""
    faults = Faults()
    model = two_layers()
    with injected(faults), opened(model, tmp_path) as runtime, torch.no_grad():
        model(torch.ones(1, 64))
        runtime._components.prefetch_engine.land_all()
        runtime._components.store.settle()
        if how == "data =":
            model[0].bias.data = torch.full((64,), 7.0)
        else:
            model[0].bias.data.fill_(7.0)
        faults.fail("read", 1, errno.EIO)
        with pytest.raises(StorageError):
            evict_all(runtime._components.prefetch_engine)
        assert faults.fired == 1
        evict_all(runtime._components.prefetch_engine)
        assert torch.equal(model.state_dict()["0.bias"], torch.full((64,), 7.0))


def test_masters_follow_an_edit_later_where_a_read_failed(tmp_path: Path) -> None:
    """The failed read is that of the present masters, of which an edit keeps those that it leaves alone."""
    results = []
    for fails in (False, True):
        faults = Faults()
        model = two_layers()
        with injected(faults), opened(model, tmp_path, compute="bf16") as runtime, torch.no_grad():
            with torch.enable_grad():
                model(torch.ones(1, 64)).sum().backward()
            runtime.optimizer.step()
            model(torch.ones(1, 64))
            settle(runtime)
            factors = torch.ones(64).index_fill_(0, torch.arange(8), 2.0)
            if fails:
                faults.fail("read", 1, errno.EIO)
                with pytest.raises(StorageError):
                    model[2].bias.mul_(factors)
                assert faults.fired == 1
            else:
                model[2].bias.mul_(factors)
            results.append(tensors_copied(runtime.optimizer.state_dict()))
    assert differences(*results) == []


def test_loans_of_a_page_that_never_leaves_are_bounded(tmp_path: Path) -> None:
    model = two_layers()
    with (
        infinity.offload(model, None, budget=infinity.Budget(host="64MiB"), device="cpu") as runtime,
        torch.no_grad(),
    ):
        for _ in range(500):
            model[0].weight.data.norm()
            model[0].weight.detach().norm()
        assert sum(map(len, runtime._components.edits._loans.values())) < 50
        held = model[0].weight.data
        for _ in range(100):
            model[0].weight.data.norm()
        held.fill_(3.0)
        del held
        for _ in range(500):
            model[0].weight.data.norm()
        assert sum(map(len, runtime._components.edits._loans.values())) < 400
        assert torch.equal(model.state_dict()["0.weight"], torch.full((64, 64), 3.0))
