"""Tests of runtime.compile: blocks of one class run as one graph, and learn as plain compiled blocks do."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import differences
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import ConfigError
from infinity.tiers import Tier

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = 1.0
        self.activation = nn.Tanh()
        self.register_buffer("offset", torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.activation(self.up(self.norm(x)))) + self.offset


class Stack(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Block, *, recompute: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class Reading(nn.Module):
    """A block that no graph can hold as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x.sum().item() > 0 else x


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def made(**options: Any) -> Stack:
    torch.manual_seed(5)
    return Stack(**options)


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def offloaded(model: nn.Module, directory: Path | None = None) -> Any:
    """directory: where all pages rest; None: in RAM. The device has room for one block beside them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    budget = infinity.Budget(host="64MiB")
    precision = infinity.Precision(compute="fp32")
    if directory is not None:
        nvme = {str(directory): "64MiB"}
        roomy = infinity.Budget(device="64MiB", host="64MiB", nvme=nvme)
        smallest = infinity.plan(model, optimizer, budget=roomy, precision=precision, device="cpu").smallest
        block = sum(each.nbytes for each in Block().parameters())
        device = smallest[Tier.DEVICE] + 2 * block
        budget = infinity.Budget(device=device, host=smallest[Tier.HOST], nvme=nvme)
    return infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu")


@pytest.mark.sweep
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_blocks_share_a_graph_and_learn_as_compiled_ones(
    backend: str, home: str, recompute: bool, tmp_path: Path
) -> None:
    plain, model = made(recompute=recompute), made(recompute=recompute)
    for block in plain.blocks:
        block.compile(backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with offloaded(model, tmp_path if home == "nvme" else None) as runtime:
        assert runtime.compile(Block, backend=backend) == 3
        for step in range(3):
            loss = model(inputs()).square().mean()
            loss.backward()
            if step == 0:
                assert counters["stats"]["unique_graphs"] == 1
                assert not counters["graph_break"]
            expected = plain(inputs()).square().mean()
            expected.backward()
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
            if step == 0:  # later torch has rounded its updates in another order
                for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(runtime.grad(mine), theirs.grad)
            for each in (runtime.optimizer, optimizer):
                each.step()
                each.zero_grad()


def test_what_changes_in_a_block_changes_in_its_graph() -> None:
    plain, model = made(), made()
    with offloaded(model) as runtime, torch.no_grad():
        runtime.compile(Block, backend="aot_eager")
        assert torch.equal(model(inputs()), plain(inputs()))
        for each in (model, plain):
            each.blocks[1].scale = 3.0
            each.blocks[2].offset.fill_(7)
            each.blocks[0].down.bias.copy_(torch.ones(WIDTH))
            each.blocks[1].down.register_buffer("added", torch.ones(1))
            each.blocks[1].activation = nn.ReLU()
        assert torch.equal(model(inputs()), plain(inputs()))
        others = {name: torch.full_like(each, 0.5) for name, each in plain.named_parameters()}
        call = torch.func.functional_call
        assert torch.equal(call(model, others, (inputs(),)), call(plain, others, (inputs(),)))


def test_transforms_of_functions_run_the_plain_forward() -> None:
    plain, model = made(), made()
    with offloaded(model) as runtime:
        runtime.compile(Block, backend="aot_eager")
        at, along = (inputs(),), (torch.ones(4, WIDTH),)
        found = torch.func.jvp(model, at, along)
        for mine, theirs in zip(found, torch.func.jvp(plain, at, along), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_hooks_of_a_block_run_and_hooks_inside_of_one_are_refused() -> None:
    model = made()
    with offloaded(model) as runtime:
        runtime.compile(Block, backend="aot_eager")
        seen: list[nn.Module] = []
        model.blocks[1].register_forward_hook(lambda module, *_: seen.append(module))
        model(inputs())
        assert seen == [model.blocks[1]]
        handle = model.blocks[2].up.register_forward_hook(lambda *_: None)
        with pytest.raises(ConfigError, match="Linear in a compiled Block has a hook"):
            model(inputs())
        handle.remove()
        model(inputs())


def test_copies_and_a_closed_model_have_the_plain_forward() -> None:
    model = made()
    expected = model(inputs()).detach()
    with offloaded(model) as runtime:
        runtime.compile(Block, backend="aot_eager")
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        runtime.close(keep=True)
    counters.clear()
    for each in (model, *copies):
        assert torch.equal(each(inputs()), expected)
        assert each.blocks[0].forward.__self__ is each.blocks[0]
    assert not counters["stats"]


def test_what_cannot_be_compiled_is_refused() -> None:
    model = made(kind=Reading)
    with offloaded(model) as runtime:
        with pytest.raises(ConfigError, match="has no Block"):
            runtime.compile(Block)
        runtime.compile(Reading, backend="aot_eager")
        with pytest.raises(ConfigError, match="compiled already"):
            runtime.compile(Reading)
        with pytest.raises(ConfigError, match="cannot make one graph of a Reading"):
            model(inputs())
    model = made()
    precision = infinity.Precision(compute="bf16", keep=("*.norm.*",))
    budget = infinity.Budget(host="64MiB")
    with infinity.offload(model, None, budget=budget, precision=precision, device="cpu") as runtime:
        runtime.compile(Block, backend="aot_eager")
        with torch.no_grad(), pytest.raises(ConfigError, match="must have one dtype"):
            model(inputs().bfloat16())


def test_a_unit_costs_two_calls_a_step_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    with offloaded(model) as runtime:
        runtime.compile(Block, backend="aot_eager")
        pager, calls = runtime._components.pager, Counter[str]()
        for name in ("access", "run", "views", "_fetch"):
            monkeypatch.setattr(pager, name, counting(getattr(pager, name), calls, name))
        for _ in range(2):
            calls.clear()
            model(inputs()).sum().backward()
            runtime.optimizer.zero_grad()
        assert calls["views"] == 3
        assert calls.total() <= 2 * len(runtime.plan.layout.units)


def counting(call: Callable[..., Any], calls: Counter[str], name: str) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return call(*args, **kwargs)

    return counted


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks_may_be_recomputed(backend: str) -> None:
    found = []
    for policy in ("keep", "recompute"):
        model = made()
        optimizer = torch.optim.AdamW(model.parameters())
        options = {"budget": infinity.Budget(host="64MiB"), "precision": infinity.Precision(compute="fp32")}
        with infinity.offload(model, optimizer, device="cpu", activations=policy, **options) as runtime:
            assert runtime.compile(Block, backend=backend) == 3
            loss = model(inputs()).square().sum()
            kept = runtime._components.pager.saved_bytes.peak
            loss.backward()
            found.append((loss.item(), {name: runtime.grad(p) for name, p in model.named_parameters()}, kept))
        assert all("forward" not in vars(each) for each in model.modules())
    assert differences(found[0][:2], found[1][:2]) == []
    assert found[1][2] < found[0][2]


def test_recomputed_blocks_within_one_graph_are_refused() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = made()

        def forward(self, x: Tensor) -> Tensor:
            return self.stack(x)

    model = nn.Sequential(Outer())
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"budget": infinity.Budget(host="64MiB"), "device": "cpu", "activations": "recompute"}
    with infinity.offload(model, optimizer, **options) as runtime:
        with pytest.raises(infinity.ConfigError, match="Blocks within 0, which is to be one graph"):
            runtime.compile(Outer)
        model(inputs()).sum().backward()
