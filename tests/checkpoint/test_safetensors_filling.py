"""Tests of filling a model's parameters and buffers from safetensors files.

Weights must be found under every name that they may have in a file, with or without a prefix and for tied
parameters. Weights that are missing or have another shape or dtype must raise an error that names them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from meta_models import Tied, on_meta
from safetensors.torch import save_file
from torch import nn

from infinity.checkpoint.safetensors_files import load, match, open_weights
from infinity.errors import ConfigError

CPU = torch.device("cpu")


def load_all(model: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """Load `path` into the model, and return the value that each parameter was given, by name.

    A tied parameter stands under the first of its names. Asserts that every parameter is filled exactly once.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values: dict[str, torch.Tensor] = {}

    def fill(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        assert names[id(parameter)] not in values, "filled once"
        values[names[id(parameter)]] = tensor.clone()

    load(model, open_weights(path), fill, CPU)
    assert list(values) == list(dict(model.named_parameters()))
    return values


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def save(tensors: dict[str, torch.Tensor], path: Path) -> Path:
    save_file(tensors, path)
    return path


def save_shards(tensors: dict[str, torch.Tensor], directory: Path) -> Path:
    mapping = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{number:05}.safetensors"
        save({name: tensor}, directory / file)
        mapping[name] = file
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    return directory


def test_names_shapes_types_and_values(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(2, 3),
        "b.half": torch.randn(4).half(),
        "b.brain": torch.randn(()).bfloat16(),
        "flags": torch.tensor([True, False]),
        "count": torch.tensor(5),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "none": torch.empty(0, 2),
    }
    weights = open_weights(save(tensors, tmp_path / "model.safetensors"))
    assert set(weights.names) == tensors.keys()
    for name, tensor in tensors.items():
        assert weights.shape(name) == tuple(tensor.shape)
        assert weights.dtype(name) == tensor.dtype
        assert torch.equal(weights.read(name), tensor)


@pytest.mark.parametrize("where", ["file", "directory", "other name", "several", "shards", "index"])
def test_everywhere_that_weights_lie(tmp_path: Path, where: str) -> None:
    expected = dict(stack().state_dict())
    path = tmp_path
    if where == "file":
        path = save(expected, tmp_path / "some.safetensors")
    elif where == "directory":
        save(expected, tmp_path / "model.safetensors")
        save({"0.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    elif where == "other name":
        save(expected, tmp_path / "weights.safetensors")
    elif where == "several":
        for number, (name, tensor) in enumerate(expected.items()):
            save({name: tensor}, tmp_path / f"part{number}.safetensors")
    else:
        save_shards(expected, tmp_path)
        path = tmp_path / "model.safetensors.index.json" if where == "index" else tmp_path
    weights = open_weights(path)
    assert_equal({name: weights.read(name) for name in weights.names}, expected)


def test_a_meta_model_is_filled_and_its_buffers_become_real(tmp_path: Path) -> None:
    saved = stack()
    saved[1].running_var.fill_(3)
    save(dict(saved.state_dict()), tmp_path / "model.safetensors")
    model = on_meta(stack)
    assert_equal(load_all(model, tmp_path), dict(saved.named_parameters()))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert_equal(dict(model.named_buffers()), dict(saved.named_buffers()))


def test_a_real_model_keeps_its_buffer_objects(tmp_path: Path) -> None:
    saved = stack()
    saved[1].running_var.fill_(3)
    save(dict(saved.state_dict()), tmp_path / "model.safetensors")
    model = stack()
    buffer = model[1].running_var
    load_all(model, tmp_path)
    assert model[1].running_var is buffer
    assert buffer.tolist() == [3] * 4


def test_what_was_read_leaves_ram_with_the_tensor(tmp_path: Path) -> None:
    save({"a": torch.ones(8 << 20), "b": torch.ones(8 << 20)}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    assert "model.safetensors" not in Path("/proc/self/maps").read_text()
    tensor = weights.read("a")
    assert tensor.sum() == 8 << 20
    del tensor
    assert "model.safetensors" not in Path("/proc/self/maps").read_text()


BOTH = ["embedding.weight", "head.weight"]


@pytest.mark.parametrize("names", [BOTH[:1], BOTH[1:], BOTH])
def test_any_name_of_a_tied_parameter_will_do(tmp_path: Path, names: list[str]) -> None:
    tensor = torch.randn(6, 3)
    path = save({name: tensor.clone() for name in names}, tmp_path / "tied.safetensors")
    model = on_meta(Tied)
    assert_equal(load_all(model, path), {"embedding.weight": tensor})
    assert match(model, open_weights(path)).unexpected == ()


@pytest.mark.parametrize(
    ("ours", "theirs"), [("", "module."), ("module.", ""), ("model.", "model."), ("", "0.")]
)
def test_a_prefix_may_be_missing_or_added(tmp_path: Path, ours: str, theirs: str) -> None:
    expected = dict(stack().state_dict())
    path = save({theirs + name: tensor for name, tensor in expected.items()}, tmp_path / "a.safetensors")
    model = nn.ModuleDict({ours[:-1]: stack()}) if ours else stack()
    values = load_all(model, path)
    assert_equal(
        {name.removeprefix(ours): tensor for name, tensor in values.items()},
        {name: expected[name] for name, _ in stack().named_parameters()},
    )


def test_a_weight_is_never_given_to_two_tensors(tmp_path: Path) -> None:
    class Nested(nn.Module):
        base_model_prefix = "inner"

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.inner = nn.PReLU(2)

    path = save({"weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"no weights for inner\.weight\."):
        match(Nested(), open_weights(path))


def test_what_the_model_has_no_place_for_is_listed(tmp_path: Path) -> None:
    others = {"z": torch.ones(1), "y": torch.ones(1)}
    path = save(dict(stack().state_dict()) | others, tmp_path / "a.safetensors")
    assert match(stack(), open_weights(path)).unexpected == ("y", "z")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    tensors = dict(stack().state_dict())
    del tensors["1.running_mean"], tensors["0.bias"]
    path = save(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"no weights for 0\.bias, 1\.running_mean\."):
        match(stack(), open_weights(path))
    path = save({"x": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match=r"1\.running_mean and 2 more"):
        match(stack(), open_weights(path))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (torch.ones(4, 2), r"0\.weight \(\[4, 2\] float32; the model has \[4, 3\] float32\)"),
        (torch.ones(12), r"\[12\] float32"),
        (torch.ones(4, 3, dtype=torch.int8), r"\[4, 3\] int8"),
        (torch.ones(4, 3).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    ],
)
def test_another_shape_or_type_is_refused(tmp_path: Path, other: torch.Tensor, said: str) -> None:
    path = save(dict(stack().state_dict()) | {"0.weight": other}, tmp_path / "a.safetensors")
    filled: list[Any] = []
    with pytest.raises(ConfigError, match=said):
        load(stack(), open_weights(path), lambda parameter, values: filled.append(parameter), CPU)
    assert filled == []


def test_any_float_fills_any_other(tmp_path: Path) -> None:
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in stack().state_dict().items()}
    path = save(tensors, tmp_path / "a.safetensors")
    model = on_meta(stack)
    assert all(values.dtype == torch.bfloat16 for values in load_all(model, path).values())
    assert model[1].running_var.dtype == torch.float32


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


class RotaryWithInitialiser(Rotary):
    def reset_parameters(self) -> None:
        self.weight.fill_(9)
        self.angles.copy_(torch.arange(3.0))


def test_buffers_that_are_not_saved_are_initialised(tmp_path: Path) -> None:
    path = save({"weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    model = on_meta(RotaryWithInitialiser)
    assert_equal(load_all(model, path), {"weight": torch.zeros(2)})
    assert model.angles.tolist() == [0, 1, 2]
    filled: list[Any] = []
    with pytest.raises(ConfigError, match="initialises angles"):
        load(on_meta(Rotary), open_weights(path), lambda parameter, values: filled.append(parameter), CPU)
    assert filled == []


SMALL = {"vocab_size": 50, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}


@pytest.mark.parametrize("kind", ["llama", "llama, sharded", "tied llama", "gpt2", "bert"])
def test_transformers_models(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
        build = transformers.GPT2LMHeadModel
    elif kind == "bert":
        config = transformers.BertConfig(**SMALL, intermediate_size=24)
        build = transformers.BertForMaskedLM
    else:
        config = transformers.LlamaConfig(
            **SMALL, intermediate_size=24, tie_word_embeddings=kind == "tied llama"
        )
        build = transformers.LlamaForCausalLM
    saved = build(config)
    saved.save_pretrained(tmp_path, max_shard_size="8KB" if "sharded" in kind else "1GB")
    assert ("sharded" in kind) == (tmp_path / "model.safetensors.index.json").exists()
    model = on_meta(lambda: build(config))
    assert_equal(load_all(model, tmp_path), dict(saved.named_parameters()))
    assert_equal(dict(model.named_buffers()), dict(saved.named_buffers()))
    assert match(model, open_weights(tmp_path)).unexpected == ()


def test_a_transformers_base_model_and_its_head(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SMALL, intermediate_size=24)
    whole = transformers.LlamaForCausalLM(config)
    whole.save_pretrained(tmp_path / "whole")
    base = on_meta(lambda: transformers.LlamaModel(config))
    assert_equal(load_all(base, tmp_path / "whole"), dict(whole.model.named_parameters()))
    assert match(base, open_weights(tmp_path / "whole")).unexpected == ("lm_head.weight",)

    whole.model.save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"no weights for lm_head\.weight\."):
        match(whole, open_weights(tmp_path / "base"))
    config.tie_word_embeddings = True
    tied = on_meta(lambda: transformers.LlamaForCausalLM(config))
    assert load_all(tied, tmp_path / "base").keys() == dict(tied.named_parameters()).keys()
