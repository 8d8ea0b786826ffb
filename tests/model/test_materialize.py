"""Tests of materialize(), which fills models that were built on the meta device: values have the bits that
construction on the CPU gives, one module at a time is in RAM, and no tensor is left out.
"""

from collections.abc import Callable

import pytest
import torch
from meta_models import Tied, on_meta
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.errors import ConfigError
from infinity.model.materialize import materialize

CPU = torch.device("cpu")
SEED = 3


def fill_all(model: nn.Module, *, only: list[torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Run materialize() on `model`, and return copies of the values that it gives, by the parameter's name.

    A tied parameter has the first of its names. only: the tensors to materialise; None: all. Asserts that
    no parameter is filled twice, and that the model keeps its Parameter objects.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    before = dict(model.named_parameters())
    values: dict[str, torch.Tensor] = {}

    def fill(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        name = names[id(parameter)]
        assert name not in values, "filled once"
        assert parameter is before[name]
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (
            parameter.shape,
            parameter.stride(),
            parameter.dtype,
        )
        values[name] = tensor.clone()

    materialize(model, CPU, fill, only=only)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before), "the Parameter objects stay"
    return values


def assert_as_on_cpu(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(SEED)
    expected = build()
    after = torch.get_rng_state()
    model = on_meta(build)
    torch.manual_seed(SEED)
    values = fill_all(model)
    assert torch.equal(torch.get_rng_state(), after), "what is built next is the same too"
    assert values.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        assert torch.equal(values[name], parameter), name
    assert all(parameter.is_meta for parameter in model.parameters())
    buffers = dict(model.named_buffers())
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer), name
        assert buffers[name].dtype == buffer.dtype


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 3),
    "no bias": lambda: nn.Linear(5, 3, bias=False),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "conv": lambda: nn.Conv2d(3, 8, 3, groups=1),
    "transposed conv": lambda: nn.ConvTranspose1d(4, 6, 3),
    "layer norm": lambda: nn.LayerNorm(7),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "rms norm": lambda: nn.RMSNorm(7),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "prelu": lambda: nn.PReLU(3),
    "embedding": lambda: nn.Embedding(11, 4, padding_idx=2),
    "embedding bag": lambda: nn.EmbeddingBag(11, 4),
    "lstm": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True),
    "gru cell": lambda: nn.GRUCell(4, 5),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "attention, other sizes": lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16),
    "stack": lambda: nn.Sequential(
        nn.Conv1d(2, 4, 3),
        nn.BatchNorm1d(4),
        nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2), nn.LSTM(4, 4)),
        nn.LayerNorm(4),
        nn.Linear(4, 2, dtype=torch.float64),
    ),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_the_same_bits_as_on_the_cpu(build: Callable[[], nn.Module]) -> None:
    assert_as_on_cpu(build)


def test_lstm_keeps_its_own_list_of_weights() -> None:
    model = on_meta(lambda: nn.LSTM(2, 2))
    fill_all(model)
    assert all(flat is own for flat, own in zip(model._flat_weights, model.parameters(), strict=True))


def test_a_tied_parameter_is_filled_once_and_stays_tied() -> None:
    model = on_meta(Tied)
    assert list(fill_all(model)) == ["embedding.weight"]
    assert model.head.weight is model.embedding.weight


class Written(nn.Module):
    """A module that initialises parameters through .data, by replacing them, by slices and by copying."""

    def __init__(self) -> None:
        super().__init__()
        self.data = nn.Parameter(torch.empty(3))
        self.replaced = nn.Parameter(torch.empty(3))
        self.sliced = nn.Parameter(torch.empty(2, 3))
        self.frozen = nn.Parameter(torch.empty(2, dtype=torch.int64), requires_grad=False)
        self.register_buffer("mask", torch.empty(2, 2, dtype=torch.bool), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.empty(0))
        self.runs = 0

    def reset_parameters(self) -> None:
        self.data.data.uniform_(-1, 1)
        self.replaced = nn.Parameter(torch.arange(3.0))
        self.sliced[0].zero_()
        self.sliced[1].fill_(2)
        self.frozen.copy_(torch.tensor([4, 5]))
        self.register_buffer("mask", torch.tril(torch.ones(2, 2)).bool(), persistent=False)


def test_every_way_of_writing_counts() -> None:
    model = on_meta(Written)
    values = fill_all(model)
    assert values["data"].abs().max() <= 1
    assert values["replaced"].tolist() == [0, 1, 2]
    assert values["sliced"].tolist() == [[0, 0, 0], [2, 2, 2]]
    assert values["frozen"].tolist() == [4, 5]
    assert model.mask.tolist() == [[True, False], [True, True]]
    assert model.empty.device == CPU
    assert model.empty.numel() == 0


class Initialised(nn.Linear):
    def __init__(self, initialise: Callable[[torch.Tensor], object]) -> None:
        self.initialise = initialise
        super().__init__(6, 4, bias=False)

    def reset_parameters(self) -> None:
        self.initialise(self.weight)


@pytest.mark.parametrize(
    "initialise",
    [
        nn.init.trunc_normal_,
        nn.init.orthogonal_,
        nn.init.eye_,
        lambda weight: nn.init.sparse_(weight, 0.5),
        lambda weight: nn.init.dirac_(weight[:, :, None]),
    ],
    ids=["trunc_normal_", "orthogonal_", "eye_", "sparse_", "dirac_"],
)
def test_initialisers_that_do_nothing_on_meta(initialise: Callable[[torch.Tensor], object]) -> None:
    def build() -> nn.Module:
        with torch.no_grad():
            return nn.Sequential(Initialised(initialise), nn.Linear(2, 2))

    assert_as_on_cpu(build)


class NeedsValues(nn.Module):
    """A module whose initialiser reads the values of its weight, which a meta tensor does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))

    def reset_parameters(self) -> None:
        self.weight.fill_(1)
        self.weight.mul_(2 / self.weight.norm().item())


def test_an_initialiser_that_reads_values() -> None:
    values = fill_all(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), NeedsValues())))
    assert values["1.weight"].tolist() == [1, 1, 1, 1]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3))


class Forgetful(Bare):
    def reset_parameters(self) -> None:
        pass


class ForgetfulAndBlind(Bare):
    def reset_parameters(self) -> None:
        self.scale.sum().item()


@pytest.mark.parametrize("kind", [Bare, Masked, Forgetful])
def test_what_nothing_initialises_is_named_before_anything_is_filled(kind: type[nn.Module]) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), kind()))
    filled = []
    with pytest.raises(ConfigError, match=r"1\.(scale|mask)") as caught:
        materialize(model, CPU, lambda parameter, values: filled.append(parameter))
    assert "reset_parameters" in caught.value.cure
    assert filled == []
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_an_initialiser_that_writes_nothing_after_all_is_named() -> None:
    with pytest.raises(ConfigError, match="initialises scale"):
        materialize(on_meta(ForgetfulAndBlind), CPU, lambda parameter, values: None)


class Failing(Bare):
    def reset_parameters(self) -> None:
        raise ValueError("no luck")


def test_an_initialiser_that_fails_leaves_the_model_as_it_was() -> None:
    model = on_meta(lambda: nn.Sequential(nn.BatchNorm1d(2), Failing()))
    before = list(model.parameters()) + list(model.buffers())
    with pytest.raises(ConfigError, match="1 failed: ValueError: no luck"):
        materialize(model, CPU, lambda parameter, values: None)
    after = list(model.parameters()) + list(model.buffers())
    assert all(now is then for now, then in zip(after, before, strict=True))


def test_an_error_names_five_and_counts_the_rest() -> None:
    model = on_meta(lambda: nn.Sequential(*(Bare() for _ in range(7))))
    with pytest.raises(ConfigError, match=r"0\.scale, .*4\.scale and 2 more"):
        materialize(model, CPU, lambda parameter, values: None)


class BaseTunerLayer(nn.Module):
    """Has the name and the form of PEFT's class of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora_B = nn.Linear(2, 4, bias=False)


def test_adapters_of_peft_are_refused_and_their_base_is_not() -> None:
    model = on_meta(lambda: nn.Sequential(BaseTunerLayer()))
    with pytest.raises(ConfigError, match=r"adapter 0\.lora_B\.weight is on the meta device.*weights="):
        materialize(model, torch.device("cpu"), lambda parameter, values: None)
    model[0].lora_B = nn.Linear(2, 4, bias=False)
    filled: list[tuple[int, ...]] = []
    materialize(model, torch.device("cpu"), lambda parameter, values: filled.append(tuple(values.shape)))
    assert filled == [(4, 4), (4,)]


def test_what_is_real_keeps_its_values() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    real = nn.Parameter(torch.full((2, 2), 7.0))
    model[0].weight = real
    model[1].running_mean = torch.full((2,), 8.0)
    values = fill_all(model)
    assert set(values) == {"0.bias", "1.weight", "1.bias"}
    assert model[0].weight is real
    assert real.tolist() == [[7, 7], [7, 7]]
    assert model[1].running_mean.tolist() == [8, 8]
    assert model[1].running_var.tolist() == [1, 1]


def test_only_what_is_asked_for() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert fill_all(model, only=[model[1].running_var]) == {}
    assert model[1].running_var.tolist() == [1, 1]
    assert model[1].running_mean.is_meta
    assert model[0].weight.is_meta


def test_one_module_at_a_time_is_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever materialize() hands a parameter's values to `fill`, only one module's tensors take memory."""
    made: list[tuple[StorageWeakRef, int]] = []
    original = torch.empty_strided

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        if not tensor.is_meta:
            made.append((StorageWeakRef(tensor.untyped_storage()), tensor.numel()))
        return tensor

    def fill(parameter: nn.Parameter, values: torch.Tensor) -> None:
        peaks.append(sum(elements for storage, elements in made if not storage.expired()))

    monkeypatch.setattr(torch, "empty_strided", counted)
    peaks: list[int] = []
    materialize(on_meta(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))), CPU, fill)
    assert len(peaks) == 10
    assert max(peaks) == 4 * 4 + 4


GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "vocab_size": 50,
}


def test_transformers_models_get_their_own_initialisation() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(**GPT2, initializer_range=0.5)
    values = fill_all(on_meta(lambda: transformers.GPT2LMHeadModel(config)))
    assert "lm_head.weight" not in values, "tied"
    assert values["transformer.h.0.ln_1.weight"].tolist() == [1] * 16
    assert values["transformer.h.1.mlp.c_fc.bias"].abs().max() == 0
    assert values["transformer.h.1.mlp.c_fc.weight"].std().item() == pytest.approx(0.5, rel=0.1)
    # The parent, which has no parameters of its own, initialises this parameter a second time.
    assert values["transformer.h.1.mlp.c_proj.weight"].std().item() == pytest.approx(0.25, rel=0.1)


def test_transformers_buffers_are_computed() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**LLAMA)
    model = on_meta(lambda: transformers.LlamaForCausalLM(config))
    values = fill_all(model)
    assert len(values) == len(list(model.parameters()))
    expected = dict(transformers.LlamaForCausalLM(config).named_buffers())
    assert expected
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name
