"""Tests of what people do to a model between steps: it works as in PyTorch, or it is refused."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from homes import each_device, places
from parity import copied, differences
from safetensors.torch import load_file, save_file
from small_runtime import TIED, WIDE, gradients, loss_of, opened, train_step, two_layers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune
from torch_releases import fsdp2_on_a_cpu

import infinity
from infinity.errors import ConfigError

both_homes = places("nvme", "unified", cuda=("nvme", "host"))


def exact_in_bf16(model: nn.Module) -> nn.Module:
    """Round the model's parameters to bf16 values in place, and return the model.

    Edits that are exact in bf16, such as doubling, then have equal results in bf16 and fp32.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def other_weights(like: Tensor) -> Tensor:
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    return values.to(like.device, like.dtype)


def assign_row(parameter: nn.Parameter) -> None:
    parameter[0] = 0.5


def assign_data(parameter: nn.Parameter) -> None:
    parameter.data = other_weights(parameter)


def assign_data_slice(parameter: nn.Parameter) -> None:
    parameter.data[2:5, 1] = -0.25


EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "mul_": lambda parameter: parameter.mul_(2),
    "copy_": lambda parameter: parameter.copy_(other_weights(parameter)),
    "a row": assign_row,
    "a view": lambda parameter: parameter.t()[1:].zero_(),
    "data.mul_": lambda parameter: parameter.data.mul_(2),
    "data =": assign_data,
    "data[...] =": assign_data_slice,
    "out=": lambda parameter: torch.add(parameter, parameter, out=parameter),
    "init": lambda parameter: nn.init.constant_(parameter, 0.125),
    "foreach": lambda parameter: torch._foreach_mul_([parameter], 4.0),
}


@pytest.mark.sweep
@both_homes
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("edit", EDITS)
def test_edits_last_and_reach_what_the_optimizer_updates(
    edit: str, compute: str, home: str, device: str, tmp_path: Path
) -> None:
    results = []
    for edited_before in (True, False):
        model = exact_in_bf16(TIED.make(device))
        parameter = model.get_parameter(WIDE)
        before = parameter.detach().clone()
        if edited_before:
            with torch.no_grad():
                EDITS[edit](parameter)
        with opened(model, tmp_path, home=home, compute=compute) as runtime:
            assert model.get_parameter(WIDE) is parameter
            if not edited_before:
                with torch.no_grad():
                    EDITS[edit](parameter)
            loss_of(model).backward()
            values = copied(model.state_dict())
            assert not torch.equal(values[WIDE].float(), before.cpu())
            results.append([values, gradients(runtime, model)])
            runtime.optimizer.step()
            loss_of(model, 1)  # any lazy updates happen here
            results[-1] += [copied(model.state_dict()), train_step(model, runtime, 2)]
    assert differences(results[1], results[0]) == []


@both_homes
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_an_edit_between_steps_comes_after_the_update_before_it(
    compute: str, home: str, device: str, tmp_path: Path
) -> None:
    model = TIED.make(device)
    with opened(model, tmp_path, home=home, compute=compute) as runtime:
        train_step(model, runtime)
        with torch.no_grad():
            model.get_parameter(WIDE).fill_(0.5)
        assert bool((model.get_parameter(WIDE) == 0.5).all())
        loss_of(model)
        assert bool((model.state_dict()[WIDE] == 0.5).all())


@pytest.mark.sweep(most=4)
@both_homes
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_load_state_dict_reaches_what_the_optimizer_updates(
    compute: str, home: str, device: str, tmp_path: Path
) -> None:
    torch.manual_seed(99)
    loaded = exact_in_bf16(TIED.build().to(device))
    weights = copied(loaded.state_dict())
    results = []
    for model in (loaded, TIED.make(device)):
        with opened(model, tmp_path, home=home, compute=compute) as runtime:
            if model is not loaded:
                assert str(model.load_state_dict(weights)) == "<All keys matched successfully>"
            losses = [train_step(model, runtime, step) for step in range(2)]
            results.append([losses, copied(model.state_dict())])
    assert differences(results[1], results[0]) == []


@both_homes
def test_state_dict_gives_independent_copies_under_the_same_keys(
    home: str, device: str, tmp_path: Path
) -> None:
    plain, model = TIED.make(device), TIED.make(device)
    with opened(model, tmp_path, home=home):
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        assert differences(dict(state), dict(plain.state_dict())) == []
        for tensor in state.values():
            assert type(tensor) is Tensor
            tensor.zero_()
        assert differences(dict(model.state_dict()), dict(plain.state_dict())) == []
        assert torch.equal(loss_of(model), loss_of(plain))


@both_homes
def test_metadata_and_values_are_those_of_the_plain_model(home: str, device: str, tmp_path: Path) -> None:
    plain, model = TIED.make(device), TIED.make(device)
    before = dict(model.named_parameters(remove_duplicate=False))
    with opened(model, tmp_path, home=home):
        after = dict(model.named_parameters(remove_duplicate=False))
        assert after.keys() == before.keys()
        assert all(after[name] is before[name] for name in before)
        for name, parameter in plain.named_parameters(remove_duplicate=False):
            mine = after[name]
            assert isinstance(mine, nn.Parameter)
            assert (mine.shape, mine.stride(), mine.dtype) == (
                parameter.shape,
                parameter.stride(),
                parameter.dtype,
            )
            assert (mine.device, mine.requires_grad, mine.is_leaf) == (parameter.device, True, True)
            assert torch.equal(mine.data, parameter.data)
            assert torch.equal(mine.detach(), parameter)
            assert mine.flatten()[3].item() == parameter.flatten()[3].item()
            assert mine.tolist() == parameter.tolist()
            assert differences(torch.from_numpy(mine.detach().cpu().numpy().copy()), parameter.detach()) == []


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}


@both_homes
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_plain_and_independent(how: str, home: str, device: str, tmp_path: Path) -> None:
    plain, model = TIED.make(device), TIED.make(device)
    with opened(model, tmp_path, home=home) as runtime:
        twin = COPIES[how](model)
        assert all(type(each) is nn.Parameter for each in twin.parameters())
        assert twin.head.weight is twin.embedding.weight
        assert differences(dict(twin.state_dict()), dict(plain.state_dict())) == []
        train_step(model, runtime)
        assert differences(dict(twin.state_dict()), dict(plain.state_dict())) == []
        trained = copied(model.state_dict())
        with torch.no_grad():
            twin.norm.weight.add_(1)
            assert differences(copied(model.state_dict()), trained) == []
            twin.norm.weight.sub_(1)
    # The copy outlives the runtime and trains as any model does.
    loss_of(twin).backward()
    loss_of(plain).backward()
    assert all(
        torch.equal(mine.grad, other.grad)
        for mine, other in zip(twin.parameters(), plain.parameters(), strict=True)
    )


SAME: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cpu() or cuda()": lambda model: model.cuda() if model.norm.weight.is_cuda else model.cpu(),
    "to(device)": lambda model: model.to(model.norm.weight.device),
    "to(dtype)": lambda model: model.to(torch.float32),
    "float()": lambda model: model.float(),
    "eval, train": lambda model: model.eval().train(),
    "zero_grad": lambda model: model.zero_grad() or model,
    "apply": lambda model: model.apply(lambda module: None),
    "requires_grad_": lambda model: model.requires_grad_(True),
}
CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "double()": lambda model: model.double(),
    "half()": lambda model: model.half(),
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "to(meta)": lambda model: model.to("meta"),
    "to(another device)": lambda model: model.to("cpu" if model.norm.weight.is_cuda else "meta"),
    "to_empty": lambda model: model.to_empty(device="meta"),
    "one parameter": lambda model: setattr(
        model.get_parameter(WIDE), "data", model.get_parameter(WIDE).data.double()
    ),
}


@each_device
@pytest.mark.parametrize("how", SAME)
def test_what_changes_nothing_is_allowed(how: str, device: str, tmp_path: Path) -> None:
    plain, model = TIED.make(device), TIED.make(device)
    with opened(model, tmp_path):
        assert SAME[how](model) is model
        assert torch.equal(loss_of(model), loss_of(plain))
        assert differences(dict(model.state_dict()), dict(plain.state_dict())) == []


@each_device
@pytest.mark.parametrize("how", CONVERSIONS)
def test_conversions_are_refused_and_change_nothing(how: str, device: str, tmp_path: Path) -> None:
    plain, model = TIED.make(device), TIED.make(device)
    with opened(model, tmp_path) as runtime:
        with pytest.raises(ConfigError):
            CONVERSIONS[how](model)
        assert differences(dict(model.state_dict()), dict(plain.state_dict())) == []
        assert train_step(model, runtime) == loss_of(plain).item()


@both_homes
def test_a_parameter_frozen_later_is_left_alone(home: str, device: str, tmp_path: Path) -> None:
    plain, model = TIED.make(device), TIED.make(device)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with opened(model, tmp_path, home=home) as runtime:
        for each, optimizer in ((plain, plain_optimizer), (model, runtime.optimizer)):
            loss_of(each).backward()
            optimizer.step()
            optimizer.zero_grad()
            each.get_parameter(WIDE).requires_grad_(False)
        frozen = model.state_dict()[WIDE]
        losses = []
        for each, optimizer in ((plain, plain_optimizer), (model, runtime.optimizer)):
            loss = loss_of(each, 1)
            loss.backward()
            losses.append(loss.item())
            if each is model:
                assert runtime.grad(model.get_parameter(WIDE)) is None
            optimizer.step()
        loss_of(model, 2)
        assert torch.equal(model.state_dict()[WIDE], frozen)
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        name = "blocks.0.mlp.0.weight"
        expected = plain.state_dict()[name].cpu()
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-4, atol=1e-5)


def test_a_gradient_for_what_was_frozen_at_offload_is_refused(tmp_path: Path) -> None:
    model = TIED.make()
    wide = model.get_parameter(WIDE)
    wide.requires_grad_(False)
    with opened(model, tmp_path) as runtime:
        with torch.no_grad():  # as PEFT does to an adapter
            for _ in range(2):
                wide.requires_grad_(True)
                assert wide.requires_grad
                wide.requires_grad = False
        train_step(model, runtime)
        wide.requires_grad = True
        loss_of(model, 1)
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"A gradient came for {WIDE}, which was frozen"):
                loss_of(model, 1).backward()
            assert wide.grad is None
            runtime.optimizer.zero_grad()
        wide.requires_grad_(False)
        train_step(model, runtime, 1)


def test_param_groups_cannot_be_added(tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path) as runtime:
        with pytest.raises(ConfigError):
            runtime.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert len(runtime.optimizer.param_groups) == 1
        train_step(model, runtime)


def new_module(model: nn.Module) -> None:
    model.blocks.append(nn.Linear(40, 40))


def new_parameter(model: nn.Module) -> None:
    model.blocks[0].extra = nn.Parameter(torch.ones(3))


def replaced_module(model: nn.Module) -> None:
    model.blocks[1].mlp[0] = nn.Linear(40, 120)


def replaced_parameter(model: nn.Module) -> None:
    model.norm.weight = nn.Parameter(torch.ones(40))


def removed_module(model: nn.Module) -> None:
    del model.blocks[1]


@pytest.mark.parametrize(
    "change", [new_module, new_parameter, replaced_module, replaced_parameter, removed_module]
)
def test_a_changed_module_tree_is_refused_at_the_next_forward(
    change: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    model = TIED.make()
    with opened(model, tmp_path) as runtime:
        train_step(model, runtime)
        with pytest.raises(ConfigError):
            change(model)
            loss_of(model)


@pytest.fixture
def process_group() -> Iterator[None]:
    if not torch.distributed.is_available():
        pytest.skip("needs torch.distributed")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(torch.distributed.destroy_process_group)
        yield


def test_the_class_of_a_parameter_makes_plain_parameters(tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path):
        made = type(model.get_parameter(WIDE))(torch.ones(3), requires_grad=False)
        assert type(made) is nn.Parameter and not made.requires_grad and torch.equal(made, torch.ones(3))


NORMS: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_norms_of_weights_from_before_offload(norm: str, tmp_path: Path) -> None:
    inputs = torch.linspace(-1, 1, 24).view(3, 8)

    def made() -> nn.Module:
        torch.manual_seed(0)  # for the vectors of spectral_norm, too
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        NORMS[norm](model[0])
        return model

    def trained(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        for _ in range(3):
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict())

    plain, model = made(), made()
    expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    with opened(model, tmp_path) as runtime:
        torch.testing.assert_close(trained(model, runtime.optimizer), expected)


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "a Parameter of a parameter": (lambda layer: nn.Parameter(layer.weight), "offloaded parameter .*clone"),
    "weight_norm": (parametrizations.weight_norm, "offloaded parameter .*first, then offload"),
    "spectral_norm": (parametrizations.spectral_norm, "parametrizations before infinity.offload"),
    "old weight_norm": (nn.utils.weight_norm, "added or replaced .*first, then offload"),
    "old spectral_norm": (nn.utils.spectral_norm, "added, removed or moved .*first, then offload"),
    "prune": (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "added, removed or moved"),
    "another Parameter": (
        lambda layer: setattr(layer, "bias", nn.Parameter(layer.bias.detach().clone())),
        r"mlp\.0\.bias of the model, a Tensor, was added or replaced",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_changes_of_parameters_are_refused_by_name(change: str, tmp_path: Path) -> None:
    model = TIED.make()
    act, cause = CHANGES[change]
    with opened(model, tmp_path), pytest.raises(ConfigError, match=cause):
        act(model.get_submodule(WIDE.rpartition(".")[0]))
        loss_of(model)


@pytest.mark.usefixtures("process_group")
def test_ddp_around_the_model_is_refused(tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path) as runtime:
        with pytest.raises(ConfigError):
            DistributedDataParallel(model)
        train_step(model, runtime)


@pytest.mark.usefixtures("process_group")
def test_ddp_inside_is_refused(tmp_path: Path) -> None:
    model = DistributedDataParallel(TIED.make())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError):
        infinity.offload(
            model,
            optimizer,
            budget=infinity.Budget(host="64MiB", nvme={str(tmp_path): "64MiB"}),
            device="cpu",
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("sharder", "root", "cause"),
    [
        ("FullyShardedDataParallel", True, "The model is sharded by FullyShardedDataParallel"),
        ("FullyShardedDataParallel", False, "The module 1 of the model is sharded by Fully"),
        ("fully_shard", True, "The model is sharded by fully_shard"),
        ("fully_shard", False, "The module 1 of the model is sharded by fully_shard"),
    ],
)
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_fsdp_around_the_model_or_in_it_is_refused(sharder: str, root: bool, cause: str) -> None:
    part = sharded(nn.Linear(2, 2), sharder)
    model = part if root else nn.Sequential(nn.Linear(2, 2), part)
    with pytest.raises(ConfigError, match=rf"{cause}.*partition="):
        infinity.offload(model, torch.optim.AdamW(model.parameters()), device="cpu")


@fsdp2_on_a_cpu
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("path", ["", "1"])
def test_fully_shard_of_an_offloaded_model_is_refused_at_the_next_forward(path: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with opened(model, tmp_path):
        sharded(model.get_submodule(path), "fully_shard")
        with pytest.raises(ConfigError, match=r"sharded by fully_shard.*partition="):
            model(torch.ones(1, 2))


@pytest.mark.usefixtures("process_group")
def test_a_dtensor_among_the_parameters_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    model[1].weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh))
    with pytest.raises(ConfigError, match=r"The parameter 1\.weight is a DTensor.*full_tensor"):
        infinity.offload(model, torch.optim.AdamW(model.parameters()), device="cpu")


def sharded(module: nn.Module, sharder: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if sharder == "fully_shard":
        made: nn.Module = fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        return made
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_another_optimizer_updates_fp32_parameters_only(compute: str, tmp_path: Path) -> None:
    plain, model = nn.Linear(4, 4), nn.Linear(4, 4)
    model.load_state_dict(plain.state_dict())
    first = torch.optim.SGD([model.weight], lr=0.1)
    other, theirs = torch.optim.Adam([model.bias], lr=0.1), torch.optim.Adam([plain.bias], lr=0.1)
    precision = infinity.Precision(compute=compute)
    budget = infinity.Budget(host="8MiB")
    with infinity.offload(model, first, budget=budget, precision=precision, device="cpu"):
        for each in (model, plain):
            each(torch.ones(1, 4, dtype=next(each.parameters()).dtype)).float().sum().backward()
        if compute == "fp32":
            other.step()
            theirs.step()
            assert torch.equal(model.bias, plain.bias)
        else:
            with pytest.raises(ConfigError, match=r"Adam, which .* would update bias in torch\.\w*float16"):
                other.step()


def test_a_wrapper_of_the_optimizer_may_step(tmp_path: Path) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            return self.inner.step()

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget, precision = infinity.Budget(host="8MiB"), infinity.Precision(compute="bf16")
    with infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu") as runtime:
        wrapper = Wrapper(runtime.optimizer)
        before = model.state_dict()["bias"].clone()
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        wrapper.step()
        assert not torch.equal(model.state_dict()["bias"], before)


@pytest.mark.parametrize("home", ["nvme", "unified"])
def test_safetensors_is_given_copies_alone(home: str, tmp_path: Path) -> None:
    """It collects the addresses of all tensors, and reads the bytes there when pages may have been moved."""
    model, path = two_layers(), tmp_path / "saved.safetensors"
    plain = copied(model.state_dict())
    pages = tmp_path / "pages"
    pages.mkdir()
    with opened(model, pages, home=home):
        for save in (save_file, lambda tensors, _: safetensors.torch.save(tensors)):
            with pytest.raises(ConfigError, match=r"the offloaded parameter 0\.weight, whose memory changes"):
                save(dict(model.named_parameters()), path)
        assert not path.exists()
        save_file(model.state_dict(), path)
        assert differences(load_file(path), plain) == []


def test_a_capture_of_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also the capture of a part of the model that is called alone. Training goes on afterwards."""
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    model = two_layers()
    with opened(model, tmp_path, home="unified") as runtime:
        for part in (model, model[0]):
            capturing = True
            with pytest.raises(ConfigError, match=r"CUDA graph is captured.*copy\.deepcopy"):
                part(torch.ones(2, 64))
            capturing = False
        model(torch.ones(2, 64)).sum().backward()
        runtime.optimizer.step()


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_gradients_are_accumulated_on_the_stream_of_their_forward(compute: str, tmp_path: Path) -> None:
    """No AccumulateGrad node outlives its step, and none was made by offload.

    A node belongs to the CUDA stream that is current when it is made. So a model that was offloaded on one
    stream and trains on another one, within torch.cuda.stream(s), has nodes of that stream, and torch does
    not warn.
    """

    def leaves(node: Any) -> Iterator[Any]:
        if type(node).__name__ == "AccumulateGrad":
            yield node
        for following, _ in node.next_functions:
            if following is not None:
                yield from leaves(following)

    model = two_layers()
    made = {name for name, _ in model.named_parameters()}
    with opened(model, tmp_path, home="unified", compute=compute) as runtime:
        for _ in range(3):
            loss = model(torch.ones(2, 64)).float().square().mean()
            found = list(leaves(loss.grad_fn))
            assert len(found) == len(made) and not any("an earlier step" in each.metadata for each in found)
            for each in found:
                each.metadata["an earlier step"] = True
            loss.backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            del found, each, loss
