"""Tiled modules: their arithmetic, with and without a runtime."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from parity import differences
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
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import ConfigError
from infinity.layout import tiles
from infinity.model import tiled_modules
from infinity.planning import fake_step, headroom
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier


def _rms(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_tiled_linear_is_as_exact_as_a_plain_one(dtype: torch.dtype, bias: bool) -> None:
    """The RMS errors against fp64 of outputs and of all gradients are at most 1.05 of nn.Linear's."""
    torch.manual_seed(0)
    plain = nn.Linear(1024, 2048, bias=bias, dtype=dtype)
    tiled = infinity.tiled(copy.deepcopy(plain))
    exact = copy.deepcopy(plain).double()
    given, upstream = torch.randn(3, 96, 1024).to(dtype), torch.randn(3, 96, 2048).to(dtype)

    def results(module: nn.Module, kind: torch.dtype) -> list[torch.Tensor]:
        x = given.to(kind).clone().requires_grad_()
        y = module(x)
        y.backward(upstream.to(kind))
        return [y.detach(), x.grad, *(each.grad for each in module.parameters())]

    found, of_plain, right = (
        results(module, kind) for module, kind in ((tiled, dtype), (plain, dtype), (exact, torch.float64))
    )
    for one, other, true in zip(found, of_plain, right, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert _rms(one, true) <= 1.05 * _rms(other, true)


def test_backwards_of_one_graph_in_two_threads_do_not_mix() -> None:
    torch.manual_seed(0)
    given = torch.randn(5, 16, requires_grad=True)
    parts = [torch.randn(8, 16, requires_grad=True) for _ in range(2)]
    result = torch.cat(tiled_modules._linear_graph(given, parts, [None, None]), dim=-1)

    def gradients(scale: float) -> tuple[torch.Tensor, ...]:
        upstream = torch.full_like(result, scale)
        return torch.autograd.grad(result, [given, *parts], upstream, retain_graph=True)

    right = [gradients(scale) for scale in (1.0, 3.0)]
    assert torch.allclose(right[0][0], torch.cat(parts).sum(0))
    both = threading.Barrier(2, timeout=60)

    def meet(_: torch.Tensor) -> None:
        both.wait()  # both have gone back through the first tile, and not through the second

    parts[0].register_hook(meet)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(gradients, (1.0, 3.0)))
    assert differences(found, right) == []


@pytest.mark.parametrize("options", [{}, {"padding_idx": 700}, {"scale_grad_by_freq": True}])
def test_a_tiled_embedding_has_the_bits_of_a_plain_one(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(1000, 768, **options)
    tiled = infinity.tiled(copy.deepcopy(plain))
    given = torch.cat([torch.randint(0, 1000, (3, 50)), torch.tensor([[0, 999, 700, 700, 341] * 10])])
    upstream = torch.randn(*given.shape, 768)
    for module in (plain, tiled):
        module(given).backward(upstream)
    assert torch.equal(tiled(given), plain(given))
    assert torch.equal(tiled.weight.grad, plain.weight.grad)
    assert tiled(given[:0]).shape == (0, 50, 768)
    for wrong in (1000, -1):
        with pytest.raises(IndexError):
            tiled(torch.tensor([5, wrong]))


def test_a_tiled_module_is_a_plain_one_in_all_other_ways() -> None:
    model = language(tied=True)
    plain = language(tied=True, tiled=False)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model.head, nn.Linear)
    assert infinity.tiled(model.head) is model.head
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(made(inputs()), model(inputs()))
        assert made.head.weight is made.embedding.weight


def test_what_cannot_be_tiled_is_refused() -> None:
    for module in (nn.LayerNorm(4), nn.Conv1d(3, 3, 3), nn.Sequential(nn.Linear(2, 2))):
        with pytest.raises(ConfigError, match=r"given to infinity\.tiled"):
            infinity.tiled(module)
    for options in ({"max_norm": 1.0}, {"sparse": True}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            infinity.tiled(nn.Embedding(8, 8, **options))
    model = language(tied=False, tiled=False)
    with infinity.offload(model, None, budget=BUDGETS["ram"]), pytest.raises(ConfigError, match="before"):
        infinity.tiled(model.head)
    model = language(tied=False)
    transformed = torch.func.grad(lambda given: model.head(given).sum())
    with pytest.raises(ConfigError, match=r"torch\.func"):
        transformed(torch.ones(2, 512))
    with pytest.raises(ConfigError, match="create_graph"):
        torch.autograd.grad(model(inputs()).sum(), [model.head.weight], create_graph=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_budgets_change_no_bit_and_gradients_are_those_without_offload(tied: bool, compute: str) -> None:
    plain = language(tied=tied).to(torch.float32 if compute == "fp32" else torch.bfloat16)
    loss = plain.loss(inputs())
    loss.backward()
    found = []
    for budget in BUDGETS.values():
        model, runtime = offloaded(tied=tied, budget=budget, compute=compute)
        with runtime:
            first = model.loss(inputs())
            first.backward()
            assert torch.equal(first.detach(), loss.detach())
            for name, parameter in plain.named_parameters():
                gradient = runtime.grad(model.get_parameter(name))
                assert torch.equal(gradient, parameter.grad.float()), name
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            losses = losses_of(model, runtime, 3)
            found.append((losses, model.state_dict()))
    for losses, state in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(state[name], found[0][1][name]) for name in state)


@pytest.mark.parametrize("update", ["eager", "speculative", "sync"])
def test_the_time_of_updates_changes_no_bit(update: str) -> None:
    found = []
    for options in ({}, {"update": update, "accumulation": 1}):
        model, runtime = offloaded(tied=True, budget=BUDGETS["device apart"], **options)
        with runtime:
            losses = losses_of(model, runtime, 3)
            found.append((losses, model.state_dict()["head.weight"]))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


class _Twice(Language):
    """Uses the tied weight in three places: the gradient of each tile has three contributions."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.layer(self.embedding(tokens)))
        loss = infinity.linear_cross_entropy(hidden, self.head.weight, tokens)
        return loss + nn.functional.cross_entropy(self.head(hidden).flatten(0, -2), tokens.flatten())

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self(tokens)
        return result


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        raise ValueError("on purpose")


@pytest.mark.parametrize(("kind", "compute"), [(Language, "bf16"), (_Twice, "fp32")])
def test_gradients_of_tied_tiles_wait_in_ram(
    kind: type[Language], compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "FEWEST_ELEMENTS", 1 << 15)  # 16 tiles
    plain = language(tied=True, kind=kind).to(infinity.Precision(compute=compute).compute_dtype)
    options: dict[str, Any] = {"kind": kind, "compute": compute, "device": "cpu"}
    options["budget"] = infinity.Budget(device="4MiB", host="96MiB")
    unified = infinity.plan(
        language(tied=True, kind=kind),
        torch.optim.AdamW(plain.parameters()),
        budget=BUDGETS["ram"],
        precision=infinity.Precision(compute=compute),
        example_inputs=(inputs(1),),
    )
    for seed in (None, 1):
        device = nullcontext() if seed is None else EmulatedDevice(seed).in_use()
        with device:
            model, runtime = offloaded(tied=True, example_inputs=(inputs(1),), **options)
            with runtime:
                weight, watch = model.head.weight, fake_step._Watch()
                pool = runtime._components.store.pools["sums of tiles"]
                for step in (1, 2):  # the second gradient of a step is added to the first
                    with watch:
                        found = model(inputs(step))
                        found.backward(torch.ones_like(found))
                    wanted = plain(inputs(step))
                    wanted.backward(torch.ones_like(wanted))
                    if step == 1 or compute == "fp32":  # torch adds gradients of bf16 in bf16
                        assert torch.equal(runtime.grad(weight), plain.head.weight.grad.float())
                plan = runtime.plan
                assert plan.activations < unified.activations - weight.nbytes * 3 // 4
                assert watch.peak == plan.activations
                assert pool.counters.peak == plan.tile_sum_bytes == weight.nbytes
                handle = model.embedding.register_forward_hook(lambda *each: _Fails.apply(each[-1]))
                with pytest.raises(ValueError, match="on purpose"):
                    model(inputs(1)).sum().backward()
                handle.remove()
                assert pool.leased == 0
                plain.zero_grad()


class _TwoHeads(Language):
    """Three modules have the tied weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__(tied=tied)
        self.second = infinity.tiled(nn.Linear(512, 1024, bias=False))
        self.second.weight = self.head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embedding(tokens))
        return self.head(hidden) + self.second(torch.tanh(hidden))


@pytest.mark.parametrize(("kind", "modules"), [(Language, 2), (_TwoHeads, 3)])
def test_the_plan_counts_the_copies_of_sums(kind: type[Language], modules: int) -> None:
    """On a device on which all parameters stay, so that nothing else is copied in a backward."""
    budget = infinity.Budget(device="24MiB", host="96MiB")
    model, runtime = offloaded(tied=True, kind=kind, budget=budget, compute="bf16", device="cpu")
    with runtime:
        loss = model.loss(inputs(1))
        before = runtime.stats.edges
        loss.backward()
        after = runtime.stats.edges
        down, up = (after[e].bytes - before[e].bytes for e in (Edge.DEVICE_TO_HOST, Edge.HOST_TO_DEVICE))
        assert down == up == runtime.plan.traffic.backward.to_host == (modules - 1) * model.head.weight.nbytes


class _Recomputing(Language):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, tokens, use_reentrant=False)


def test_recomputation_and_retained_graphs_give_the_same_gradients() -> None:
    plain = language(tied=True)
    plain.loss(inputs()).backward()
    for kind in (Language, _Recomputing):
        model, runtime = offloaded(tied=True, budget=BUDGETS["device apart"], kind=kind)
        with runtime:
            model.loss(inputs()).backward()
            assert torch.equal(runtime.grad(model.head.weight), plain.head.weight.grad)
            runtime.optimizer.zero_grad()
            loss = model.loss(inputs())
            loss.backward(retain_graph=True)
            runtime.optimizer.zero_grad()
            if kind is Language:  # a recomputed forward may be gone back through once
                loss.backward()
                assert torch.equal(runtime.grad(model.head.weight), plain.head.weight.grad)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 4096), nn.Linear(4096, 128)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.drop(self.down(torch.relu(self.up(x))))
        return result


def test_what_becomes_of_the_activations_of_tiles_changes_no_bit() -> None:
    found = []
    policies = ("keep", "recompute", "offload", "recompute+offload")
    for activations, budget in (("keep", "ram"), *((policy, "device apart") for policy in policies)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 128), nn.Sequential(*[_Block() for _ in range(3)]))
        for block in model[1]:
            infinity.tiled(block.up)
            infinity.tiled(block.down)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        precision = infinity.Precision(compute="fp32")
        with infinity.offload(
            model,
            optimizer,
            budget=BUDGETS[budget],
            precision=precision,
            example_inputs=(torch.zeros(16, 8),),
            activations=activations,
        ) as runtime:
            for step in range(2):
                given = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
                torch.manual_seed(step)
                model(given).square().mean().backward()
                runtime.clip_grad_norm_(0.1)
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            found.append(model.state_dict())
    for state in found[1:]:
        assert all(torch.equal(value, found[0][name]) for name, value in state.items())


class _Blocks(Language):
    """Three blocks of tiled layers, between an embedding, two other layers and a head."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__(tied=tied)
        self.layer = nn.Linear(512, 128)
        self.out = nn.Linear(128, 512)
        self.blocks = nn.ModuleList([_Block() for _ in range(3)])
        for block in self.blocks:
            block.drop.p = 0.0
            infinity.tiled(block.up)
            infinity.tiled(block.down)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(self.out(x))
        return result

    def fused(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.out(self.layer(self.embedding(tokens)))
        return infinity.linear_cross_entropy(x, self.head.weight, tokens)


@pytest.mark.filterwarnings("error:accumulate")
@pytest.mark.parametrize("compute", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [pytest.param("loss", marks=pytest.mark.slow), "fused"])
def test_micro_batches_that_run_together_have_the_bits_of_the_plain_loop(
    way: str, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "FEWEST_ELEMENTS", 1 << 14)
    found, order = [], []
    budget = infinity.Budget(device="640KiB" if compute == "fp32" else "320KiB", host="96MiB")
    for together in (False, True):
        model, runtime = offloaded(tied=True, budget=budget, compute=compute, kind=_Blocks)
        with runtime:
            if together:
                model.out.register_forward_pre_hook(lambda *_: order.append("out"))
                model.layer.register_forward_pre_hook(lambda *_: order.append("layer"))
            for step in range(2):
                batches = [inputs(10 * step + each) for each in range(1, 4)]
                loss_of = getattr(model, way) if way == "fused" else model.loss
                if together:
                    runtime.accumulate(batches, loss_of, together=3)
                else:
                    for each in batches:
                        loss_of(each).backward()
                gradients = [runtime.grad(each) for each in model.parameters()]
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            found.append((gradients, model.state_dict()))
    assert order == ["layer"] * 3 + ["out"] * 3 + ["layer"] * 3 + ["out"] * 3
    for mine, plain in zip(found[1][0], found[0][0], strict=True):
        assert (mine is None) == (plain is None) and (mine is None or torch.equal(mine, plain))
    assert all(torch.equal(value, found[0][1][name]) for name, value in found[1][1].items())


def test_a_weight_that_changed_since_the_forward_is_noticed() -> None:
    for runtime_too in (False, True):
        model = language(tied=False)
        if runtime_too:
            model, runtime = offloaded(tied=False, budget=BUDGETS["device apart"])
        loss = model.loss(inputs())
        with torch.no_grad():
            model.head.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        if runtime_too:
            runtime.close()


def test_frozen_tiles_get_no_gradient_and_pass_that_of_the_input_on() -> None:
    plain = language(tied=False)
    plain.head.weight.requires_grad_(False)
    plain.loss(inputs()).backward()
    model = language(tied=False)
    model.head.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    precision = infinity.Precision(compute="fp32")
    with infinity.offload(model, optimizer, budget=BUDGETS["device apart"], precision=precision) as runtime:
        model.loss(inputs()).backward()
        assert runtime.grad(model.head.weight) is None
        for name in ("embedding.weight", "layer.weight", "layer.bias", "head.bias"):
            gradient = runtime.grad(model.get_parameter(name))
            assert torch.equal(gradient, plain.get_parameter(name).grad)


def test_a_layer_beyond_the_device_has_a_plan_and_the_error_without_tiles_names_the_calls() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 16), nn.Linear(16, 4096), nn.Linear(4096, 4096))
        tied = nn.Sequential(nn.Embedding(32768, 512), nn.Linear(512, 32768))
        tied[1].weight = tied[0].weight
    budget = infinity.Budget(device="8MiB", host="1GiB")
    cases = {r"call infinity\.tiled\(model\.2\) before": (model, [2])}
    cases[r"call infinity\.tiled\(model\.0\) and infinity\.tiled\(model\.1\) before"] = (tied, [0, 1])
    for text, (each, oversized) in cases.items():
        optimizer = torch.optim.AdamW(each.parameters())
        with pytest.raises(infinity.BudgetError, match=text):
            infinity.plan(each, optimizer, budget=budget, device="cpu")
        for index in oversized:
            infinity.tiled(each[index])
        assert infinity.plan(each, optimizer, budget=budget, device="cpu").device_tier_bytes <= 8 << 20


def test_the_error_names_no_tiles_where_they_are_no_cure() -> None:
    with torch.device("meta"):
        convolution = nn.Sequential(nn.Conv1d(4096, 4096, 1))
        layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(64)])
    cases = {convolution: infinity.Budget(device="8MiB", host="1GiB"), layers: infinity.Budget(host="8MiB")}
    for model, budget in cases.items():
        with pytest.raises(infinity.BudgetError) as failed:
            infinity.plan(model, torch.optim.AdamW(model.parameters()), budget=budget, device="cpu")
        assert "tiled" not in str(failed.value)


def test_a_dry_run_sees_one_tile_at_a_time() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 16384))
    infinity.tiled(model[1])
    optimizer = torch.optim.AdamW(model.parameters())
    budget = infinity.Budget(device="64MiB", host="1GiB")
    plan = infinity.plan(
        model, optimizer, budget=budget, example_inputs=(torch.zeros(16, 1024),), device="cpu"
    )
    assert plan.activations is not None
    assert plan.activations < 8 << 20, "the weight has 64 MiB"


@pytest.mark.slow
def test_a_tied_weight_of_64_mib_trains_on_a_device_of_8_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "FEWEST_ELEMENTS", 1 << 20)
    monkeypatch.setattr(headroom, "_SMALL_STEP", 8 << 20)  # what oneDNN takes is no memory of the device

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(32768, 1024), nn.Linear(1024, 32768, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.embedding(tokens))
            return infinity.linear_cross_entropy(hidden, self.head.weight, tokens.roll(1))

    def made(dtype: torch.dtype = torch.float32, *, tiled: bool = True) -> Model:
        torch.manual_seed(5)
        model = Model().bfloat16().to(dtype)
        for each in (model.embedding, model.head) if tiled else ():
            infinity.tiled(each)
        return model

    tokens = torch.randint(0, 32768, (64,), generator=torch.Generator().manual_seed(6))
    gradients = []
    for dtype, tiled in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        plain = made(dtype, tiled=tiled)
        plain(tokens).backward()
        gradients.append(plain.head.weight.grad)
    exact, untiled, right = gradients
    assert _rms(right, exact) <= 1.05 * _rms(untiled, exact)
    states = []
    for device in ("8MiB", "64MiB", None):
        model = made()
        budget = infinity.Budget(device=device, host="2GiB")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        watch = fake_step._Watch()
        with infinity.offload(
            model, optimizer, budget=budget, device="cpu", example_inputs=(tokens,)
        ) as runtime:
            with watch:
                model(tokens).backward()
            # A step without data does not look for the least and the greatest token.
            assert 0 <= runtime.plan.activations - watch.peak <= 64
            assert torch.equal(runtime.grad(model.head.weight), right.float())
            if device is not None:
                peaks = runtime._components.store.device.pools.values()
                within = watch.peak + sum(each.counters.peak for each in peaks)
                assert within <= runtime.plan.device_bytes + watch.peak <= runtime.plan.budgets[Tier.DEVICE]
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            states.append((model(tokens).item(), model.state_dict()["head.weight"]))
    assert all(each[0] == states[0][0] and torch.equal(each[1], states[0][1]) for each in states)
