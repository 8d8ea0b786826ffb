"""Tiled parameters: what code does to a whole parameter works, or is refused; states, commits and files."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiled_models import (
    BUDGETS,
    Language,
    inputs,
    language,
    losses_of,
    offloaded,
    small_tiles,  # noqa: F401 - a fixture
)
from torch import nn
from torch.optim.swa_utils import AveragedModel

import infinity
from infinity.errors import BudgetError, ConfigError
from infinity.layout import tiles

APART = BUDGETS["device apart"]


@pytest.fixture(name="both")
def both_fixture() -> Iterator[tuple[Language, Language, infinity.Runtime]]:
    """A tied model on a device apart, the same model without offload, and the runtime of the first."""
    model, runtime = offloaded(tied=True, budget=APART)
    with runtime:
        yield model, language(tied=True), runtime


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "detach": lambda p: p.detach() * 2,
    "data": lambda p: p.data.abs().mean(),
    "row": lambda p: p[700, 3:5],
    "view": lambda p: p.view(-1)[::5].t(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "tolist": lambda p: torch.tensor(p.detach()[3].tolist()),
    "bf16": lambda p: p.to(torch.bfloat16),
    "linear": lambda p: nn.functional.linear(torch.ones(3, 512), p),
    "stack": lambda p: torch.stack([p, p]),
    "clone": lambda p: p.detach().clone().mul_(2),
    "out": lambda p: torch.add(p.detach(), 1, out=torch.empty(p.shape)),
    "save": lambda p: pickle.loads(pickle.dumps(p)).detach(),
    "deepcopy": lambda p: copy.deepcopy(p).detach(),
    "copied to": lambda p: torch.zeros(p.shape).copy_(p),
    "leaf": lambda p: torch.autograd.grad((leaf := p.detach().requires_grad_()).square().sum(), [leaf])[0],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reads_of_the_whole_parameter_have_its_values(
    both: tuple[Language, Language, infinity.Runtime], read: Callable[[nn.Parameter], Any]
) -> None:
    model, plain, _ = both
    assert torch.equal(read(model.head.weight), read(plain.head.weight))


def _assign(parameter: nn.Parameter) -> None:
    parameter[700] = 0.25


def _assign_data(parameter: nn.Parameter) -> None:
    parameter.data = torch.full(parameter.shape, 0.5, dtype=parameter.dtype)


EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda p: p.mul_(2),
    "copy_": lambda p: p.copy_(torch.arange(512.0)),
    "init": lambda p: nn.init.constant_(p, 0.125),
    "item": _assign,
    "data": _assign_data,
    "foreach": lambda p: torch._foreach_mul_([p, p], 3.0),
    "out": lambda p: torch.mul(p.detach(), 3, out=p),
    "sub": lambda p: p.sub_(p, alpha=0.5),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edits_of_the_whole_parameter_reach_its_tiles_and_masters(
    edit: Callable[[nn.Parameter], Any],
) -> None:
    for compute in ("fp32", "bf16"):
        model, runtime = offloaded(tied=True, budget=APART, compute=compute)
        plain = language(tied=True).to(model.head.weight.dtype)
        with runtime, torch.no_grad():
            version = model.head.weight._version
            edit(model.head.weight)
            edit(plain.head.weight)
            assert model.head.weight._version > version
            assert torch.equal(model.head.weight, plain.head.weight)
            with runtime.masters():
                assert torch.equal(model.head.weight, plain.head.weight.float())


@pytest.mark.parametrize("draw", [nn.init.xavier_uniform_, functools.partial(nn.init.normal_, std=0.02)])
def test_initialisers_draw_what_they_draw_for_a_plain_parameter(
    both: tuple[Language, Language, infinity.Runtime], draw: Callable[[nn.Parameter], Any]
) -> None:
    for each in both[:2]:
        torch.manual_seed(5)
        draw(each.head.weight)
    assert torch.equal(both[0].head.weight, both[1].head.weight)


REFUSED: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda p: p.data.mul_(2),
    "data row": lambda p: p.data[0].zero_(),
    "detached item": lambda p: p.detach().__setitem__(0, 1.0),
    "view": lambda p: p.detach().view(-1).t().add_(1),
    "numpy": lambda p: p.detach().numpy().__setitem__(0, 1.0),
    "foreach": lambda p: torch._foreach_zero_([p.detach()]),
    "out": lambda p: torch.add(p.detach(), 1, out=p.detach()),
    "address": lambda p: p.data_ptr(),
    "address of a copy": lambda p: p.detach().data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "set_": lambda p: p.set_(torch.zeros(1)),
    "resize_": lambda p: p.resize_(4),
    "hook": lambda p: p.register_hook(lambda gradient: None),
    "accumulated hook": lambda p: p.register_post_accumulate_grad_hook(lambda parameter: None),
    "another dtype": lambda p: setattr(p, "data", p.detach().double()),
    "to": lambda p: nn.ParameterList([p]).double(),
    "parametrization": nn.Parameter,
}


@pytest.mark.parametrize("act", REFUSED.values(), ids=REFUSED)
def test_what_tiles_would_not_see_is_refused_and_changes_nothing(
    both: tuple[Language, Language, infinity.Runtime], act: Callable[[nn.Parameter], Any]
) -> None:
    model, plain, _ = both
    with torch.no_grad(), pytest.raises((ConfigError, ValueError)):
        act(model.head.weight)
    assert torch.equal(model.head.weight, plain.head.weight)


def test_an_edit_in_a_graph_raises_as_in_pytorch(both: tuple[Language, Language, infinity.Runtime]) -> None:
    model, plain, _ = both
    for one in (model, plain):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            one.head.weight.mul_(2)
    assert torch.equal(model.head.weight, plain.head.weight)


def test_gradients_of_the_whole_parameter(both: tuple[Language, Language, infinity.Runtime]) -> None:
    model, plain, runtime = both
    for one in (model, plain):
        assert one.head.weight.grad is None
        loss = one.loss(inputs()) + one.head.weight.square().sum() * 1e-3  # another use, of a copy
        loss.backward()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(runtime.grad(model.get_parameter(name)), parameter.grad, rtol=1e-6)
    mine, theirs = model.head.weight.grad, plain.head.weight.grad
    assert mine is not None
    assert theirs is not None
    assert torch.allclose(mine.clone(), theirs, rtol=1e-6)
    assert float(mine.norm()) == pytest.approx(float(theirs.double().norm()), rel=1e-6)
    norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.01) for one in (model, plain)]
    assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-4)  # torch's sum in fp32 is rounded
    assert torch.allclose(model.head.weight.grad.clone(), theirs, rtol=1e-4)
    model.head.weight.grad = torch.full(theirs.shape, 2.0)
    assert torch.equal(runtime.grad(model.head.weight), torch.full(theirs.shape, 2.0))
    model.head.weight.grad.zero_()
    assert not model.head.weight.grad.clone().any()
    model.head.weight.grad = None
    assert runtime.grad(model.head.weight) is None
    with pytest.raises(ConfigError, match="was set to"):
        model.head.weight.grad = torch.zeros(3)


class _Fused(Language):
    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.layer(self.embedding(tokens)))
        return infinity.linear_cross_entropy(hidden, self.head.weight, tokens)


@pytest.mark.parametrize("tied", [False, True])
def test_a_fused_loss_takes_a_tiled_weight_tile_by_tile(tied: bool) -> None:
    plain = language(tied=tied, kind=_Fused)
    plain.loss(inputs()).backward()
    model, runtime = offloaded(tied=tied, budget=APART, kind=_Fused)
    with runtime:
        model.loss(inputs()).backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:  # the fused loss takes no bias here
                assert torch.equal(runtime.grad(model.get_parameter(name)), parameter.grad), name


def test_autograd_gives_gradients_of_the_whole_parameter(
    both: tuple[Language, Language, infinity.Runtime],
) -> None:
    model, plain, runtime = both
    found = [
        torch.autograd.grad(one.loss(inputs()), [one.layer.bias, one.head.weight]) for one in (model, plain)
    ]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
    model.loss(inputs()).backward(inputs=[model.head.weight])
    assert torch.equal(runtime.grad(model.head.weight), found[1][1])
    assert runtime.grad(model.layer.bias) is None


def test_a_whole_copy_beyond_the_budget_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 8192, bias=False))
    infinity.tiled(model[0])
    budget, precision = infinity.Budget(device="8MiB", host="96MiB"), infinity.Precision(compute="fp32")
    with infinity.offload(model, None, budget=budget, precision=precision) as runtime:
        assert model(torch.ones(1, 512)).shape == (1, 8192)
        with pytest.raises(BudgetError, match="tiled") as failed:
            model[0].weight.norm()
        assert failed.value.needed == 32 << 20
        assert repr(model[0].weight) == "Parameter 0.weight of 16 tiles, [8192, 512], torch.float32"
        held = pytest.raises(BudgetError, match=r"parameters of 0\.weight\[0:512\], 0\.weight\[512:")
        with held, runtime.full_parameters(model):
            pass
        assert model.state_dict()["0.weight"].shape == (8192, 512)  # in RAM


def test_load_state_dict_and_meta_models_and_weights_fill_tiles(tmp_path: Path) -> None:
    model, runtime = offloaded(tied=True, budget=APART)
    with runtime:
        losses_of(model, runtime, 2)
        state = model.state_dict()
        runtime.export(tmp_path / "weights")
        runtime.export(tmp_path / "fp32", dtype="fp32")
    files = load_file(tmp_path / "weights" / "model.safetensors")
    assert {*files} == {"embedding.weight", "layer.weight", "layer.bias"}
    assert all(torch.equal(files[name], state[name]) for name in files)
    other, runtime = offloaded(tied=True, budget=BUDGETS["ram"])
    with runtime:
        other.load_state_dict(state)
        assert all(torch.equal(other.state_dict()[name], state[name]) for name in state)
    with torch.device("meta"):
        blank = language(tied=True)
    optimizer = torch.optim.AdamW(blank.parameters())
    precision = infinity.Precision(compute="fp32")
    with infinity.offload(
        blank, optimizer, budget=APART, precision=precision, weights=tmp_path / "weights"
    ) as runtime:
        assert all(torch.equal(blank.state_dict()[name], state[name]) for name in state)
    drawn = language(tied=False)
    with torch.device("meta"):
        blank = language(tied=False)
    torch.manual_seed(3)
    with infinity.offload(blank, None, budget=APART, precision=precision):
        for name, value in drawn.state_dict().items():
            assert torch.equal(blank.state_dict()[name].bfloat16(), value.bfloat16())


def test_optimizer_states_have_the_shape_of_the_whole_parameter() -> None:
    model, runtime = offloaded(tied=True, budget=APART, compute="bf16")
    with runtime:
        weight = model.head.weight
        assert weight not in runtime.optimizer.state
        losses_of(model, runtime, 2)
        assert {name: each.shape for name, each in runtime.optimizer.state[weight].items()} == {
            "step": (),
            **dict.fromkeys(("exp_avg", "exp_avg_sq", "master"), weight.shape),
        }
        saved = runtime.optimizer.state_dict()
        losses = losses_of(model, runtime, 2, first=3)
        state = {name: value.clone() for name, value in model.state_dict().items()}
    other, runtime = offloaded(tied=True, budget=BUDGETS["ram"], compute="bf16")
    with runtime:
        losses_of(other, runtime, 2)
        before = runtime.optimizer.state_dict()
        for number, entries in saved["state"].items():
            assert all(torch.equal(value, before["state"][number][name]) for name, value in entries.items())
        runtime.optimizer.load_state_dict(saved)
        assert losses_of(other, runtime, 2, first=3) == losses
        assert all(torch.equal(other.state_dict()[name], value) for name, value in state.items())


def test_states_of_a_plain_optimizer_are_taken_over() -> None:
    model = language(tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model.loss(inputs()).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with infinity.offload(
        model, optimizer, budget=APART, precision=infinity.Precision(compute="fp32")
    ) as runtime:
        after = runtime.optimizer.state_dict()["state"]
        assert before.keys() == after.keys()
        for number, entries in before.items():
            assert all(torch.equal(entries[name], after[number][name]) for name in entries)


@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_a_commit_and_a_copy_continue_bit_by_bit(tmp_path: Path, states: str) -> None:
    def begun(budget: infinity.Budget, **options: Any) -> tuple[Language, infinity.Runtime]:
        model = language(tied=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        precision = infinity.Precision(compute="bf16", states=states)
        return model, infinity.offload(model, optimizer, budget=budget, precision=precision, **options)

    model, runtime = begun(APART, checkpoint=tmp_path / "run")
    with runtime:
        losses_of(model, runtime, 2)
        runtime.save(state=2).wait()
        runtime.save(tmp_path / "copy")
        losses = losses_of(model, runtime, 2, first=3)
    for budget in (APART, BUDGETS["ram"]):
        model, runtime = begun(budget, resume=tmp_path / "run", checkpoint=tmp_path / f"next {budget.host}")
        with runtime:
            assert runtime.load() == 2
            assert losses_of(model, runtime, 2, first=3) == losses
    model, runtime = begun(BUDGETS["ram"])
    with runtime:
        runtime.load(tmp_path / "copy")
        assert losses_of(model, runtime, 2, first=3) == losses


@pytest.mark.parametrize(
    "states, compute, steps",
    [("int8", "bf16", 2), ("fp32", "bf16", 0), pytest.param("bf16", "fp16", 0, marks=pytest.mark.slow)],
)
def test_a_commit_and_a_copy_continue_with_other_tiles_and_with_none(
    states: str, compute: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = infinity.Precision(compute=compute, states=states)

    def begun(cut: int, **options: Any) -> tuple[Language, infinity.Runtime]:
        monkeypatch.setattr(tiles, "FEWEST_ELEMENTS", cut or 1 << 18)
        model = language(tied=True, tiled=bool(cut))
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(1.001)  # so that masters are not what bf16 holds
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, infinity.offload(
            model, optimizer, budget=BUDGETS["ram"], precision=precision, **options
        )

    def held(model: Language, runtime: infinity.Runtime) -> list[torch.Tensor]:
        found = [*model.state_dict().values()]
        with runtime.masters():
            found += [each.detach().clone() for each in model.parameters()]
        for state in runtime.optimizer.state_dict()["state"].values():
            found += state.values()
        return found

    for number, (there, here) in enumerate([(0, 1 << 16), (1 << 16, 0), (1 << 16, 3 << 16)]):
        run, copied = tmp_path / f"run {number}", tmp_path / f"copy {number}"
        model, runtime = begun(there, checkpoint=run)
        with runtime:
            losses_of(model, runtime, steps)
            with torch.no_grad():
                model.head.weight[3] = 0.1234567  # in one tile; before the first step all its masters follow
            saved = held(model, runtime)
            runtime.save(state=2).wait()
            runtime.save(copied)
        model, runtime = begun(here, resume=run, checkpoint=tmp_path / f"next {number}")
        with runtime:
            assert runtime.load() == 2
            assert all(map(torch.equal, held(model, runtime), saved))
        model, runtime = begun(here)
        with runtime:
            runtime.load(copied)
            assert all(map(torch.equal, held(model, runtime), saved))
            losses_of(model, runtime, 1)


def test_a_closed_runtime_leaves_the_same_parameter_with_trained_values() -> None:
    model, runtime = offloaded(tied=True, budget=APART)
    weight = model.head.weight
    losses_of(model, runtime, 2)
    state = model.state_dict()
    runtime.close(keep=True)
    assert model.head.weight is model.embedding.weight is weight
    assert type(weight) is nn.Parameter
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.loss(inputs()).backward()
    assert weight.grad is not None
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.zero_grad()
    with infinity.offload(model, optimizer, budget=APART, precision=infinity.Precision(compute="fp32")):
        assert torch.equal(model.state_dict()["head.weight"], state["head.weight"])


def test_averages_of_the_whole_parameter() -> None:
    model, runtime = offloaded(tied=True, budget=APART, compute="bf16", average=0.5)
    with runtime:
        theirs = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        for step in range(1, 4):
            losses_of(model, runtime, 1, first=step)
            theirs.update_parameters(model)
        mine = runtime.average(model.head.weight)
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs.module.head.weight)


def test_freezing_reaches_the_tiles(both: tuple[Language, Language, infinity.Runtime]) -> None:
    model, _, runtime = both
    model.head.weight.requires_grad_(False)
    model.loss(inputs()).backward()
    assert runtime.grad(model.head.weight) is None
    runtime.optimizer.zero_grad()
    model.head.weight.requires_grad = True
    model.loss(inputs()).backward()
    assert runtime.grad(model.head.weight) is not None


def test_what_is_not_implemented_for_tiles_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    infinity.tiled(model[0])
    with pytest.raises(ConfigError, match="whole matrices"):
        infinity.plan(model, torch.optim.Muon(model.parameters()), budget=BUDGETS["ram"], device="cpu")
    model, runtime = offloaded(tied=False, budget=infinity.Budget(device="3MiB", host="96MiB"))
    with runtime:
        with pytest.raises(ConfigError, match="tiled module"):
            runtime.compile(Language)
        with pytest.raises(ConfigError, match="in pages already"):
            infinity.offload(model, None, budget=APART)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_tied_model_of_transformers_trains_and_is_exported_under_a_device_below_its_weight(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(tiles, "FEWEST_ELEMENTS", 1 << 14)  # eight tiles of 64 KiB
    sizes: dict[str, Any] = {"vocab_size": 2048, "tie_word_embeddings": True}
    if kind == "llama":
        sizes |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    else:
        sizes |= {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)
    tokens = torch.randint(2048, (2, 16), generator=torch.Generator().manual_seed(1))
    both = []
    for _ in range(2):
        torch.manual_seed(0)
        both.append(transformers.AutoModelForCausalLM.from_config(config))
        infinity.tiled(both[-1].get_input_embeddings())
        infinity.tiled(both[-1].lm_head)
    model, plain = both
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    budget, precision = infinity.Budget(device="448KiB", host="16MiB"), infinity.Precision(compute="fp32")
    with infinity.offload(model, optimizer, budget=budget, precision=precision) as runtime:
        losses = [each(input_ids=tokens, labels=tokens).loss for each in both]
        for each in losses:
            each.backward()
        assert torch.equal(*losses)
        for name, each in plain.named_parameters():
            assert torch.equal(runtime.grad(model.get_parameter(name)), each.grad), name
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        model._init_weights(model.model.norm if kind == "llama" else model.transformer.ln_f)
        runtime.export(tmp_path)
        state = model.state_dict()
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(other.lm_head) is nn.Linear
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
