"""Tests of linear_cross_entropy: torch's values and errors, bytes, and equal bits wherever the weight is."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counted_steps import counted
from homes import HOMES
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import differences
from small_runtime import opened
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import infinity
from infinity import linear_cross_entropy
from infinity.activations.autograd_hooks import drop_left_tasks
from infinity.errors import ConfigError
from infinity.layout import tiles
from infinity.losses import linear_cross_entropy as module
from infinity.planning.fake_step import run_fake_step

FP32, FP64 = torch.float32, torch.float64
WIDTH, VOCABULARY, TOKENS = 16, 3000, 24
"""Sizes with two panels, of 2048 and 952 entries."""
LARGE = 8200, 2100
"""(tokens, vocabulary) with four panels: two by two."""


def plain(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == FP64 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


def operands(
    tokens: int = TOKENS, vocabulary: int = VOCABULARY, width: int = WIDTH, dtype: torch.dtype = FP32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (hidden, weight, target), of which every fifth is ignored."""
    draw = torch.Generator().manual_seed(tokens + vocabulary)
    hidden = torch.randn(tokens, width, generator=draw, dtype=FP64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=draw, dtype=FP64).to(dtype).requires_grad_()
    target = torch.randint(vocabulary, (tokens,), generator=draw)
    target[::5] = -100
    return hidden, weight, target


def outcome(loss: Tensor, inputs: Any) -> list[Tensor]:
    """Return the loss, and the gradients of a random sum of its elements."""
    scale = torch.randn(loss.shape, generator=torch.Generator().manual_seed(5), dtype=FP64)
    return [loss.detach(), *torch.autograd.grad(loss, inputs, scale.to(loss.dtype))]


def distance(found: Tensor, right: Tensor) -> float:
    """The RMS of the differences, relative to the RMS of `right`."""
    return float((found.double() - right).square().mean().sqrt() / right.square().mean().sqrt())


# --- values -------------------------------------------------------------------------------------------


def compare(tokens: int, vocabulary: int, width: int, biased: bool, **options: Any) -> None:
    hidden, weight, target = operands(tokens, vocabulary, width, FP64)
    target[target == -100] = options.get("ignore_index", -100)
    bias = torch.linspace(-1, 1, vocabulary, dtype=FP64).requires_grad_() if biased else None
    inputs = [each for each in (hidden, weight, bias) if each is not None]
    right = outcome(plain(hidden, weight, target, bias, **options), inputs)
    for found, wanted in zip(
        outcome(linear_cross_entropy(hidden, weight, target, bias, **options), inputs), right, strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 7, 2047, 2048, 2049, 4100]), st.integers(1, 5)),
    biased=st.booleans(),
    reduction=st.sampled_from(["none", "mean", "sum"]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    ignore=st.sampled_from([-100, 0]),
)
def test_values_and_gradients_are_torchs(
    sizes: tuple[int, int, int], *, biased: bool, reduction: str, smoothing: float, ignore: int
) -> None:
    compare(*sizes, biased, reduction=reduction, label_smoothing=smoothing, ignore_index=ignore)


def test_many_tokens_by_a_large_vocabulary() -> None:
    compare(*LARGE, 3, True, label_smoothing=0.1)


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["small", "trained", "large"])
def test_errors_against_fp64_are_those_of_torch(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows, elements in ((TOKENS * 10, 1 << 20), (64, 1 << 20), (TOKENS * 10, 1 << 12)):
        monkeypatch.setattr(module, "_PANEL", rows * 2048)  # tokens in a panel: all, a few
        monkeypatch.setattr(tiles, "FEWEST_ELEMENTS", elements)  # panels of 2048 rows, and of a tile's 256
        hidden, weight, target = (each.detach() for each in operands(TOKENS * 10))
        weight *= {"small": 0.02, "trained": 0.3, "large": 20.0}[kind]
        if kind == "trained":  # most targets have a probability near 1
            hidden = hidden + 6 * weight[target.clamp_min(0)]
        leaves = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        exact = [each.detach().double().requires_grad_() for each in leaves]
        right = outcome(plain(*exact, target, reduction="none"), exact)
        torchs = outcome(plain(*leaves, target, reduction="none"), leaves)
        ours = outcome(linear_cross_entropy(*leaves, target, reduction="none"), leaves)
        for found, other, wanted in zip(ours, torchs, right, strict=True):
            assert found.dtype == other.dtype
            assert distance(found, wanted) <= 1.05 * distance(other, wanted)


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 9, 24])
def test_all_of_a_gradient_is_written(
    tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels of 2048 and of 952 entries, by 9 tokens at most. New memory has NaN in this mode of torch."""
    monkeypatch.setattr(module, "_PANEL", 9 * 2048)
    hidden, weight, target = operands(tokens, dtype=dtype)
    torch.use_deterministic_algorithms(True)
    try:
        found = outcome(linear_cross_entropy(hidden, weight, target, reduction="sum"), (hidden, weight))
        assert torch.empty(1).isnan()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(each.isfinite().all() for each in found)


def test_converted_blocks_are_whole_vectors_wide() -> None:
    total, matrix = torch.empty(9, 768), torch.empty(1376, 768, dtype=torch.bfloat16)
    assert [part.shape[1] for _, part in module.in_blocks(total, matrix)] == [320, 320, 128]
    assert [part.shape[1] for _, part in module.in_blocks(total, matrix.float())] == [768]
    tall = torch.empty(1 << 18, 3, dtype=torch.bfloat16)
    assert [part.shape[1] for _, part in module.in_blocks(total[:, :3], tall)] == [2, 1]


def test_losses_of_tokens_are_summed_once() -> None:
    hidden, weight, target = operands(*LARGE)
    each = linear_cross_entropy(hidden, weight, target, reduction="none")
    assert torch.equal(linear_cross_entropy(hidden, weight, target, reduction="sum"), each.sum())
    mean = each.sum() / (target != -100).sum()
    assert torch.equal(linear_cross_entropy(hidden, weight, target), mean)


def test_infinite_logits() -> None:
    hidden, weight, target = operands()
    bias = torch.zeros(VOCABULARY)
    bias[:2048] = -torch.inf  # the whole first panel
    target = torch.where(target < 2048, -100, target)
    right = outcome(plain(hidden, weight, target, bias), [hidden, weight])
    found = outcome(linear_cross_entropy(hidden, weight, target, bias), [hidden, weight])
    torch.testing.assert_close(found, right)
    assert linear_cross_entropy(hidden, weight, target, bias - torch.inf).isnan()


def test_no_token_with_a_loss() -> None:
    hidden, weight, target = operands()
    loss = linear_cross_entropy(hidden, weight, target.fill_(-100))
    assert loss.isnan()
    assert not any(each.any() for each in torch.autograd.grad(loss, [hidden, weight]))


def test_shapes_strides_and_tensors_without_gradients() -> None:
    hidden, weight, target = operands()
    inputs = [hidden, weight]
    right = outcome(linear_cross_entropy(hidden, weight, target), inputs)
    other = hidden.reshape(3, 8, WIDTH).transpose(0, 1).contiguous().transpose(0, 1)
    stored = weight.t().contiguous().t()
    assert not other.is_contiguous() and not stored.is_contiguous()
    found = outcome(linear_cross_entropy(other, stored, target.view(3, 8)), inputs)
    torch.testing.assert_close(found, right)
    assert linear_cross_entropy(other, weight, target.view(3, 8), reduction="none").shape == (3, 8)
    one = linear_cross_entropy(hidden[1], weight, target[1], reduction="none")
    torch.testing.assert_close(one, linear_cross_entropy(hidden, weight, target, reduction="none")[1])
    for number, given_gradient in itertools.product((0, 1), (False, True)):
        given = [each.detach() for each in inputs]
        given[number].requires_grad_(given_gradient)
        loss = linear_cross_entropy(*given, target)
        assert torch.equal(loss, right[0]) and loss.requires_grad == given_gradient
        if given_gradient:
            assert torch.equal(outcome(loss, given[number])[1], right[1 + number])


def test_autocast_computes_in_its_dtype() -> None:
    hidden, weight, target = operands()
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(linear_cross_entropy(hidden, weight, target), [hidden, weight])
        right = outcome(plain(hidden, weight, target), [hidden, weight])
    torch.testing.assert_close(found[0], right[0])
    for ours, torchs in zip(found[1:], right[1:], strict=True):
        assert ours.dtype == FP32 and distance(ours, torchs.double()) < 0.01
    outside = linear_cross_entropy(hidden, weight, target)
    with torch.autocast("cpu", torch.bfloat16):
        inside = outcome(outside, [hidden, weight])  # a backward computes as its forward did
    again = outcome(linear_cross_entropy(hidden, weight, target), [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(inside, again, strict=True))


def test_recomputation_keeps_bits() -> None:
    hidden, weight, target = operands()
    right = outcome(linear_cross_entropy(hidden, weight, target), [hidden, weight])
    for reentrant in (False, True):
        loss = checkpoint(linear_cross_entropy, hidden, weight, target, use_reentrant=reentrant)
        loss.backward()
        assert torch.equal(
            hidden.grad, torch.autograd.grad(linear_cross_entropy(hidden, weight, target), hidden)[0]
        )
        assert torch.equal(loss.detach(), right[0])
        hidden.grad = weight.grad = None


def test_torch_compile_breaks_its_graph() -> None:
    hidden, weight, target = operands()
    compiled = torch.compile(lambda x: linear_cross_entropy(x.tanh(), weight, target), backend="eager")
    found, right = compiled(hidden), linear_cross_entropy(hidden.tanh(), weight, target)
    assert torch.equal(found, right)


# --- pages --------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A model whose loss is computed in or after its forward, by a matrix that may be the embedding's."""

    def __init__(self, *, tied: bool = True, frozen: bool = False, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.head.requires_grad_(not frozen)
        for each in self.parameters():  # values that bf16 has: pages round others half up, torch to even
            each.data.copy_(each.bfloat16())

    def forward(self, tokens: Tensor, target: Tensor | None = None) -> Tensor:
        hidden = self.layers(self.embedding(tokens))
        return hidden if target is None else linear_cross_entropy(hidden, self.head.weight, target)


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.arange(2 * TOKENS).view(2, TOKENS) * 61
    return tokens, tokens.roll(1, 1)


def loss_of(model: Model, *, inside: bool = True) -> Tensor:
    tokens, target = batch()
    if inside:
        return model(tokens, target)
    return linear_cross_entropy(model(tokens), model.head.weight, target)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("home", [each for each in HOMES if each != "mixed"])
def test_bits_are_those_of_a_plain_model(home: str, compute: str, tmp_path: Path) -> None:
    tied = compute == "fp32"  # in bf16 the two gradients of a tied matrix are summed in fp32, unlike torch's
    for inside, frozen in ((True, False), (False, False), (True, True)):
        right = Model(tied=tied, frozen=frozen).to(infinity.Precision(compute=compute).compute_dtype)
        model = Model(tied=tied, frozen=frozen)
        with opened(model, tmp_path, home=home, compute=compute) as runtime:
            for _ in range(2):
                loss, wanted = loss_of(model, inside=inside), loss_of(right, inside=inside)
                loss.backward()
                wanted.backward()
                assert torch.equal(loss, wanted)
                for name, each in right.named_parameters():
                    gradient = runtime.grad(model.get_parameter(name))
                    assert (each.grad is None) == (gradient is None)
                    assert each.grad is None or torch.equal(gradient, each.grad.float()), name
                runtime.optimizer.zero_grad()
                right.zero_grad()


def test_fp16_and_its_loss_scale(tmp_path: Path) -> None:
    model, right = Model(), Model().half().float()
    with opened(model, tmp_path, compute="fp16") as runtime:
        loss, wanted = loss_of(model), loss_of(right)
        loss.backward()
        wanted.backward()
        torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=0)
        for name, each in right.named_parameters():
            assert distance(runtime.grad(model.get_parameter(name)), each.grad.double()) < 0.01, name


def test_masters_are_read(tmp_path: Path) -> None:
    model, right = Model(), Model()
    hidden, _, target = operands()
    with opened(model, tmp_path, compute="bf16") as runtime, runtime.masters():
        found = linear_cross_entropy(hidden, model.head.weight, target)
    assert torch.equal(found, linear_cross_entropy(hidden, right.head.weight, target))


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_weight_beyond_its_device_has_the_bits_of_a_plain_one(
    tied: bool, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "FEWEST_ELEMENTS", 1 << 16)  # a tile has 4096 rows, and two panels
    tokens, target = batch()
    for inside in (True, False):
        right, model = Model(tied=tied, vocabulary=1 << 15), Model(tied=tied, vocabulary=1 << 15)
        right.to(infinity.Precision(compute=compute).compute_dtype)
        infinity.tiled(model.embedding)
        infinity.tiled(model.head)
        optimizer = torch.optim.AdamW(model.parameters())
        nbytes = model.head.weight.numel() * (4 if compute == "fp32" else 2)
        budget = infinity.Budget(device=nbytes // 2, host="64MiB")
        precision = infinity.Precision(compute=compute)
        with infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu") as runtime:
            bias = torch.linspace(-1, 1, 1 << 15, dtype=right.head.weight.dtype).requires_grad_()
            found = []
            for each in (model, right):
                if inside:
                    loss = each(tokens, target)
                else:
                    options: dict[str, Any] = {"label_smoothing": 0.1, "reduction": "sum"}
                    loss = linear_cross_entropy(each(tokens), each.head.weight, target, bias, **options)
                loss.backward()
                found += [(loss.detach(), bias.grad)]
                bias.grad = None
            assert torch.equal(found[0][0], found[1][0])
            assert inside or torch.equal(found[0][1], found[1][1])
            for name, each in right.named_parameters():
                assert torch.equal(runtime.grad(model.get_parameter(name)), each.grad.float()), name
            runtime.optimizer.zero_grad()
            with runtime.masters():
                rows = torch.ones(3, WIDTH)
                found = [
                    linear_cross_entropy(rows, each.head.weight, target[0, :3])
                    for each in (model, Model(tied=tied, vocabulary=1 << 15))
                ]
            assert torch.equal(*found)


# --- bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [True, False])
def test_bytes_of_a_step(train: bool) -> None:
    tokens, target = batch()
    found, (small, large) = {}, (4096, 16 * 4096)
    for entries in (small, large):
        with torch.set_grad_enabled(train):
            dry = run_fake_step(
                Model(vocabulary=entries),
                (tokens, target),
                precision=infinity.Precision(compute="fp32"),
                device=torch.device("cpu"),
                train=train,
            )
            assert dry.activations is not None, dry.unknown
            found[entries] = dry.activations
            if train:
                assert found[entries] == counted(Model(vocabulary=entries), tokens, target)
    # A step has the two gradients of the tied matrix, and their sum. Each token has a few numbers a panel.
    gradients = 3 * (large - small) * WIDTH * 4 if train else 0
    assert found[large] - found[small] <= gradients + tokens.numel() * (large - small) // 2048 * 40
    logits = tokens.numel() * large * 4
    assert found[large] - gradients < logits / 8


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_step_without_data_counts_panels_that_it_leaves_out(
    smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels of 2048 and of 952 entries, by 3 times 9 tokens and once 5."""
    monkeypatch.setattr(module, "_PANEL", 9 * 2048)

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 2 * 2048 + 952)

        def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
            head = self.head
            return linear_cross_entropy(hidden, head.weight, target, head.bias, label_smoothing=smoothing)

    def step() -> Any:
        inputs = torch.ones(32, WIDTH, requires_grad=True), torch.zeros(32, dtype=torch.int64)
        precision, device = infinity.Precision(compute="fp32"), torch.device("cpu")
        return run_fake_step(Head(), inputs, precision=precision, device=device, train=True)

    products = []
    product = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a, **k: (products.append(a), product(*a, **k))[1])
    found, some = step(), len(products)
    monkeypatch.setattr(module, "each_size", lambda pieces, size, tensor: pieces)
    products.clear()
    assert found == step() and found.activations is not None
    assert (some, len(products)) == (2 * 2 * 2, 2 * 3 * 4), "in forward and backward"


def test_a_step_has_the_bytes_of_a_tile() -> None:
    """8192 entries of width 1024 in bf16: 16 MiB, in tiles of 2 MiB."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1024, 8192, bias=False)

        def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, self.head.weight, target)

    found = []
    for tiled in (False, True):
        with torch.device("meta"):
            model = Head()
        if tiled:
            infinity.tiled(model.head)
        hidden = torch.empty(64, 1024, dtype=torch.bfloat16, device="meta").requires_grad_()
        step = run_fake_step(
            model,
            (hidden, torch.zeros(64, dtype=torch.int64)),
            precision=infinity.Precision(compute="bf16"),
            device=torch.device("cpu"),
            train=True,
        )
        assert step.activations is not None, step.unknown
        found.append(step.activations)
    assert found[0] - found[1] == (8192 - 1024) * 1024 * 2
    assert found[1] < 8 << 20


# --- several backwards of one graph -------------------------------------------------------------------


def two_tiles() -> tuple[Tensor, list[Tensor]]:
    """Return (the loss, [hidden, the first tile, the second one]). Backward takes the first tile first."""
    hidden, weight, target = operands()
    parts = [each.clone().requires_grad_() for each in weight.detach().split(2048)]
    return module.of_tiles(hidden, weight.detach(), target, tiles=parts), [hidden, *parts]


def gradients(loss: Tensor, inputs: Sequence[Tensor], scale: float = 1) -> tuple[Tensor, ...]:
    """The gradients of `scale` times the loss, in a backward that retains the graph."""
    return torch.autograd.grad(loss, inputs, torch.tensor(scale), retain_graph=True)


def test_backwards_in_two_threads_do_not_mix() -> None:
    loss, inputs = two_tiles()
    scales = (1.0, 3.0)
    right = [gradients(loss, inputs, scale) for scale in scales]
    both = threading.Barrier(2, timeout=60)

    def meet(_: Tensor) -> None:
        both.wait()  # both have gone back through the first tile, and not through the second

    inputs[1].register_hook(meet)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda scale: gradients(loss, inputs, scale), scales))
    assert differences(found, right) == []


def test_backwards_in_part_and_with_errors_leave_nothing() -> None:
    loss, inputs = two_tiles()
    right = gradients(loss, inputs)
    for number in range(3):
        assert torch.equal(gradients(loss, inputs[number : number + 1])[0], right[number])
    handle = inputs[1].register_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        gradients(loss, inputs)
    handle.remove()
    drop_left_tasks()
    assert not [each for each in gc.get_objects() if type(each) is module._Backward]
    assert differences(gradients(loss, inputs), right) == []


def interrupted(_: Tensor) -> None:
    raise KeyboardInterrupt


# --- refusals -----------------------------------------------------------------------------------------


def test_edits_of_what_was_saved_are_found() -> None:
    hidden, weight, target = operands()
    activation = hidden * 1
    loss = linear_cross_entropy(activation, weight, target)
    with torch.no_grad():
        activation.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def dual() -> Tensor:
    hidden, weight, target = operands()
    with forward_ad.dual_level():
        return linear_cross_entropy(forward_ad.make_dual(hidden.detach(), hidden.detach()), weight, target)


def twice() -> Any:
    hidden, weight, target = operands()
    return torch.autograd.grad(linear_cross_entropy(hidden, weight, target), hidden, create_graph=True)


def transformed(transform: Callable[..., Any]) -> Callable[[], Any]:
    hidden, weight, target = operands()
    return lambda: transform(lambda each: linear_cross_entropy(each, weight, target))(hidden)


def called(**changes: Any) -> Callable[[], Any]:
    hidden, weight, target = operands()
    return lambda: linear_cross_entropy(**{"hidden": hidden, "weight": weight, "target": target, **changes})


@pytest.mark.parametrize(
    "call, said",
    [
        (twice, "create_graph=True"),
        (dual, "forward-mode"),
        (transformed(torch.func.grad), "torch.func"),
        (transformed(torch.func.vmap), "torch.func"),
        (called(target=torch.zeros(TOKENS, VOCABULARY)), "probabilities"),
        (called(target=torch.zeros(TOKENS + 1, dtype=torch.int64)), "shapes"),
        (called(weight=torch.zeros(VOCABULARY, WIDTH + 1)), "shapes"),
        (called(weight=torch.zeros(0, WIDTH)), "shapes"),
        (called(weight=torch.zeros(VOCABULARY, WIDTH, dtype=FP64)), "float32, torch.float64"),
        (called(bias=torch.zeros(1)), "bias"),
        (called(reduction="batchmean"), "batchmean"),
        (called(label_smoothing=1.5), "1.5"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()


def test_integers_are_refused() -> None:
    hidden, weight, target = operands()
    with pytest.raises(ConfigError, match="floats"):
        linear_cross_entropy(hidden.detach().long(), weight.detach().long(), target)
