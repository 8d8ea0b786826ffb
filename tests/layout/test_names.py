"""Tests of names in models with wrappers of torch: files and commits have the names of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import infinity
from infinity.errors import ConfigError
from infinity.layout.names import plain_name

INPUTS = torch.ones(2, 8)


class Net(nn.Module):
    """Two blocks with a buffer each, and a head that is tied to the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))
        for block in self.blocks:
            block.register_buffer("mask", torch.rand(8))
        self.head = nn.Linear(8, 8)
        self.head.weight = self.blocks[0][0].weight  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def inside(model: Net) -> nn.Module:
    model.blocks[1] = compiled(model.blocks[1])
    return model


def nested(model: Net) -> nn.Module:
    model.blocks[0] = compiled(model.blocks[0])
    whole: nn.Module = compiled(inside(model))
    return whole


def checkpointed(model: Net) -> nn.Module:
    model.blocks[1] = checkpoint_wrapper(compiled(model.blocks[1]))
    return model


WRAPPERS: list[Callable[[Net], nn.Module]] = [compiled, inside, nested, checkpointed]
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS)


def made(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def offloaded(model: nn.Module, directory: Path | None = None, **options: Any) -> Any:
    precision = options.pop("precision", infinity.Precision(compute="fp32"))
    return infinity.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        budget=infinity.Budget(host="8MiB", nvme=None if directory is None else {directory: "8MiB"}),
        precision=precision,
        device="cpu",
        **options,
    )


def train(model: nn.Module, runtime: Any) -> None:
    model(INPUTS * torch.arange(2).unsqueeze(1)).square().sum().backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the tensors in a model's state_dict by plain names."""
    return {plain_name(name): each.clone() for name, each in model.state_dict().items()}


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


@each_wrapper
def test_exports_have_the_plain_names(wrap: Callable[[Net], nn.Module], tmp_path: Path) -> None:
    model = wrap(made())
    with offloaded(model) as runtime:
        train(model, runtime)
        expected = values(model)
        runtime.export(tmp_path / "out")
    plain = made(seed=1)
    found = load_file(tmp_path / "out" / "model.safetensors")
    missing, unexpected = plain.load_state_dict(found, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])  # a tied tensor is written once
    check_equal(values(plain), expected)


@each_wrapper
def test_weights_fill_a_wrapped_model(wrap: Callable[[Net], nn.Module], tmp_path: Path) -> None:
    expected = made().state_dict()
    untied = {name: each for name, each in expected.items() if name != "head.weight"}
    save_file(untied, tmp_path / "plain.safetensors")
    save_file({f"_orig_mod.{name}": each for name, each in untied.items()}, tmp_path / "wrapped.safetensors")
    for file in ("plain.safetensors", "wrapped.safetensors"):
        model = wrap(made(seed=1))
        with offloaded(model, weights=tmp_path / file):
            check_equal(values(model), expected)


@each_wrapper
@pytest.mark.parametrize("first", [True, False])
def test_commits_and_copies_are_those_of_the_plain_model(
    first: bool, wrap: Callable[[Net], nn.Module], tmp_path: Path
) -> None:
    """first: whether the run that is continued has the wrapped model, and not the other."""
    makers: list[Callable[[], nn.Module]] = [lambda: wrap(made()), made]
    one, two = makers if first else makers[::-1]
    swap, commits = tmp_path / "swap", tmp_path / "commits"
    swap.mkdir()
    model = one()
    with offloaded(model, swap, checkpoint=commits) as runtime:
        train(model, runtime)
        runtime.save(state=5).wait()
        runtime.save(tmp_path / "copy")
        before = values(model)
        train(model, runtime)
        after = values(model)
    for resume in (True, False):
        model = two()
        with offloaded(model, swap if resume else None, **({"resume": commits} if resume else {})) as runtime:
            if resume:
                assert runtime.load() == 5
            else:
                runtime.load(tmp_path / "copy")
            check_equal(values(model), before)
            train(model, runtime)
            check_equal(values(model), after)


@pytest.mark.parametrize("pattern", ["blocks.1.0.*", "_orig_mod.blocks.1._orig_mod.0.*"])
def test_patterns_match_with_and_without_wrappers(pattern: str) -> None:
    model = nested(made())
    with offloaded(model, precision=infinity.Precision(compute="bf16", keep=(pattern,))):
        kept = {plain_name(name) for name, each in model.named_parameters() if each.dtype == torch.float32}
    assert kept == {"blocks.1.0.weight", "blocks.1.0.bias"}


def test_two_tensors_with_one_plain_name_are_refused() -> None:
    model = nn.Module()
    model.layer = nn.Linear(2, 2)
    model._orig_mod = nn.Module()
    model._orig_mod.layer = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"layer\.weight.*Rename"):
        offloaded(model)


def test_export_names_the_class_of_the_wrapped_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    with offloaded(compiled(model)) as runtime:
        runtime.export(tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert again.config.architectures == ["LlamaForCausalLM"]
    check_equal(values(again), expected)
