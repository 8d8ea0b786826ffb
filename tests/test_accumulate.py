"""runtime.accumulate: the bits of the plain loop, with every page brought up once for all micro-batches."""

from __future__ import annotations

import contextvars
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from homes import budget_for, places
from parity import differences
from small_runtime import TIED, files, gradients, opened
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from zoo import DIM, Entry, entry, vectors

import infinity
from infinity.accumulate import blocks_of
from infinity.errors import ConfigError
from infinity.telemetry import Edge
from infinity.tiers import Tier

MICRO_BATCHES = 4
PLAIN = "runs the plain loop"

Found = tuple[list[Tensor], dict[str, Tensor | None]]


def without_dropout(model: nn.Module) -> nn.Module:
    """In training mode, but with nothing random in it."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def batches_of(of: Entry, count: int = MICRO_BATCHES) -> list[Any]:
    return [of.batch(0, micro) for micro in range(count)]


def plain_loop(loss_fn: Callable[[Any], Tensor], batches: list[Any]) -> list[Tensor]:
    losses = []
    for batch in batches:
        loss = loss_fn(batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def found_by(
    of: Entry,
    directory: Path,
    *,
    vertical: bool,
    home: str = "nvme",
    device: str = "cpu",
    compute: str = "fp32",
    device_factor: int = 1,
    loss_of: Callable[[nn.Module, Any], Tensor] | None = None,
    steps: int = 2,
    count: int = MICRO_BATCHES,
    **options: Any,
) -> Found:
    """Losses of all steps, gradients of the last; in the plain loop on a runtime, or by accumulate."""
    model = without_dropout(of.make(device))
    with opened(model, directory, home=home, compute=compute, device_factor=device_factor) as runtime:
        losses: list[Tensor] = []
        for step in range(steps):
            if step:
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            torch.manual_seed(step)

            def loss_fn(batch: Any) -> Tensor:
                return (loss_of or of.loss)(model, batch) / count

            batches = batches_of(of, count)
            losses += (
                runtime.accumulate(batches, loss_fn, **options) if vertical else plain_loop(loss_fn, batches)
            )
        assert not any(each.requires_grad for each in losses) or not vertical
        return losses, gradients(runtime, model)


def assert_same(of: Entry, directory: Path, **options: Any) -> None:
    """accumulate finds what the plain loop finds, to the bit."""
    kept = {name: options[name] for name in options if name not in ("together", "recompute")}
    expected = found_by(of, directory, vertical=False, **kept)
    got = found_by(of, directory, vertical=True, **options)
    assert any(each is not None for each in expected[1].values())
    assert differences(got, expected) == []


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*plain loop")
        yield


@contextmanager
def threads_as_before() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert {each.name for each in set(threading.enumerate()) - before} == set()


OF_THEIR_OWN_RECOMPUTATION = ("checkpointed", "reentrant")
ORDINARY = [each for each in zoo.ENTRIES if str(each) not in OF_THEIR_OWN_RECOMPUTATION]


# --- equal bits ----------------------------------------------------------------------------------------


@places("nvme", cuda=("nvme", "host"))
@pytest.mark.parametrize("of", ORDINARY, ids=str)
def test_gradients_have_the_bits_of_the_plain_loop(of: Entry, home: str, device: str, tmp_path: Path) -> None:
    with no_warnings(), threads_as_before():
        assert_same(of, tmp_path, home=home, device=device)


@pytest.mark.parametrize("home", ["unified-nvme", "mixed"])
def test_wherever_pages_rest(home: str, tmp_path: Path) -> None:
    with no_warnings():
        assert_same(entry("mixture"), tmp_path, home=home)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("of", [entry("tied"), entry("mixture")], ids=str)
def test_so_they_have_in_half_precision(of: Entry, compute: str, tmp_path: Path) -> None:
    with no_warnings():
        assert_same(of, tmp_path, compute=compute)


@pytest.mark.parametrize("name", OF_THEIR_OWN_RECOMPUTATION)
def test_a_model_that_recomputes_by_itself_gets_the_plain_loop(name: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="recomputes its blocks.*recompute=True"):
        assert_same(entry(name), tmp_path)


class Skips(nn.Module):
    """Values that pass blocks by: a residual stream outside of them, a U's skips, tuples and keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.down = nn.ModuleList(Half() for _ in range(3))
        self.up = nn.ModuleList(Half() for _ in range(3))
        self.head = nn.Linear(DIM, zoo.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        gain = self.norm.weight.sigmoid()
        side, kept = x * gain, []
        for block in self.down:
            x = x + block(self.norm(x), side=side, extra=[{"gain": gain}])[0]
            kept.append(x)
        for block in self.up:
            found, side = block(x * kept.pop(), side=side, extra=[{"gain": gain}])
            x = x + found + kept[0] if kept else x + found
        return self.head(x * side)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, *, side: Tensor, extra: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        x = self.second(torch.tanh(self.first(x + side))) * extra[0]["gain"]
        return x, side + x.mean()


class Wandering(nn.Module):
    """Which blocks it takes, how often and in which order depends on the data, and one is in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(5))
        self.head = nn.Linear(DIM, zoo.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(1000 * float(x.detach().abs().sum())))
        for number in torch.randint(5, (6,), generator=generator).tolist():
            x = torch.tanh(self.blocks[number](x))
            if number % 2:
                x = x + self.shared(x)
        return self.head(x)


@pytest.mark.parametrize("model", [Skips, Wandering])
@pytest.mark.parametrize("device_factor", [1, 3])
def test_whatever_way_values_take(model: type[nn.Module], device_factor: int, tmp_path: Path) -> None:
    with no_warnings():
        of = Entry("way", model, vectors)
        assert_same(of, tmp_path, device_factor=device_factor, count=6)


def test_a_gradient_that_a_loss_function_asks_for(tmp_path: Path) -> None:
    def penalised(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(model(inputs), batch[1])
        (slope,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        return loss * slope.norm() + F.cross_entropy(model(batch[0] + 1), batch[1])

    with no_warnings():
        assert_same(Entry("penalty", Skips, vectors), tmp_path, loss_of=penalised, device_factor=3)


def test_parameters_in_the_loss_and_outside_of_the_model(tmp_path: Path) -> None:
    def regularised(model: Any, batch: Any) -> Tensor:
        return TIED.loss(model, batch) + model.norm.weight.square().sum() + model.head.weight.mean()

    assert_same(TIED, tmp_path, loss_of=regularised, compute="fp16")


def test_llama(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )

    def loss_of(model: Any, batch: Any) -> Tensor:
        return model(input_ids=batch[0], labels=batch[0], use_cache=False).loss

    of = Entry("llama", lambda: transformers.LlamaForCausalLM(config).train(), zoo.words)
    with no_warnings():
        assert_same(of, tmp_path, loss_of=loss_of)
        assert_same(of, tmp_path, loss_of=loss_of, recompute=True, device_factor=4)


def test_random_numbers_before_the_first_block_are_the_plain_loops(tmp_path: Path) -> None:
    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0] + torch.randn_like(batch[0])), batch[1])

    assert_same(Entry("noisy", Skips, vectors), tmp_path, loss_of=noisy)


# --- what crosses --------------------------------------------------------------------------------------


def crossed(of: Entry, directory: Path, edge: Edge, count: int, *, vertical: bool, **options: Any) -> int:
    """Bytes over an edge in the forwards and backwards of a step's micro-batches, the trace known."""
    model = without_dropout(of.make())
    home, factor = options.pop("home", "nvme"), options.pop("device_factor", 1)
    with opened(model, directory, home=home, device_factor=factor) as runtime:
        for _ in range(2):
            runtime.optimizer.zero_grad()
            before = runtime.stats.edges[edge].bytes
            if vertical:
                runtime.accumulate(batches_of(of, count), lambda batch: of.loss(model, batch), **options)
            else:
                plain_loop(lambda batch: of.loss(model, batch), batches_of(of, count))
            after = runtime.stats.edges[edge].bytes
        return after - before


def test_gradients_stay_in_their_slots_as_long_as_there_are_enough(tmp_path: Path) -> None:
    written = {
        vertical: crossed(TIED, tmp_path, Edge.HOST_TO_NVME, 4, vertical=vertical)
        for vertical in (False, True)
    }
    assert 0 < written[True] < 0.9 * written[False]


@pytest.mark.parametrize("name", ["transformer", "tied"])
@pytest.mark.parametrize("edge", [Edge.HOST_TO_DEVICE, Edge.NVME_TO_HOST])
def test_parameters_cross_once_for_all_micro_batches(name: str, edge: Edge, tmp_path: Path) -> None:
    of = entry(name)
    once = crossed(of, tmp_path, edge, 1, vertical=False)
    plain = crossed(of, tmp_path, edge, 4, vertical=False)
    vertical = crossed(of, tmp_path, edge, 4, vertical=True)
    assert plain > 3.5 * once
    # From the disk come gradients too: a slot holds one chunk of several in a unit.
    assert vertical <= (1.05 * once if edge is Edge.HOST_TO_DEVICE else 0.6 * plain)


def test_parameters_alone_come_from_the_disk_once(tmp_path: Path) -> None:
    """With nothing to train in the blocks no gradient crosses; the last linear is all that is trained."""

    def frozen() -> nn.Module:
        model = Skips().requires_grad_(False)
        model.head.requires_grad_(True)
        model.norm.requires_grad_(True)
        return model

    of = Entry("frozen", frozen, vectors)
    read = {
        count: crossed(of, tmp_path, Edge.NVME_TO_HOST, count, vertical=True, home="unified-nvme")
        for count in (1, 4)
    }
    assert read[4] <= 1.1 * read[1]
    assert crossed(of, tmp_path, Edge.NVME_TO_HOST, 4, vertical=False, home="unified-nvme") > 3.5 * read[1]


def test_groups_go_together(tmp_path: Path) -> None:
    edge = Edge.HOST_TO_DEVICE
    once = crossed(TIED, tmp_path, edge, 2, vertical=True)
    assert 1.8 * once < crossed(TIED, tmp_path, edge, 4, vertical=True, together=2) < 2.2 * once
    with no_warnings():
        assert_same(TIED, tmp_path, together=3)


# --- memory --------------------------------------------------------------------------------------------


def test_blocks_that_are_recomputed_keep_less_and_change_no_bit(tmp_path: Path) -> None:
    of, kept = entry("tied"), {}
    for recompute in (False, True):
        model = of.make()
        with opened(model, tmp_path, device_factor=4) as runtime, no_warnings():
            runtime.accumulate(batches_of(of), functools.partial(of.loss, model), recompute=recompute)
            kept[recompute] = runtime._parts.paging.saved_bytes.peak
        assert all("forward" not in each.__dict__ for each in model.modules())
    assert kept[True] < 0.5 * kept[False]
    with no_warnings():
        assert_same(of, tmp_path, device_factor=4, recompute=True)


def test_recomputed_blocks_drop_what_they_dropped(tmp_path: Path) -> None:
    masks: dict[bool, list[Tensor]] = {False: [], True: []}

    class Dropping(Half):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            mask = F.dropout(torch.ones(DIM))
            masks[torch._C._current_graph_task_id() != -1].append(mask)
            return super().forward(x * mask, side=x, extra=[{"gain": mask}])[0]

    model = nn.Sequential(*(Dropping() for _ in range(3)))
    batches = [vectors(0, micro)[0] for micro in range(2)]
    with opened(model, tmp_path, device_factor=4) as runtime, no_warnings():
        runtime.accumulate(batches, lambda batch: model(batch).square().mean(), recompute=True)
    forward = [
        masks[False][each : each + 2] for each in (4, 2, 0)
    ]  # both micro-batches of the last block first
    assert differences(masks[True], [mask for block in forward for mask in block]) == []


def test_which_modules_are_blocks() -> None:
    model = zoo.Transformer()
    assert blocks_of(model) == list(model.blocks)
    assert blocks_of(zoo.Convolutions()) == []
    encoder = zoo.Encoder()
    assert blocks_of(encoder) == list(encoder.encoder.layers)


def test_without_blocks_nothing_is_recomputed(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no list of blocks"):
        assert_same(entry("recurrent"), tmp_path, recompute=True)


def with_known_activations(directory: Path, extra: float) -> tuple[nn.Module, Any]:
    """A model and its budget: the smallest, with `extra` micro-batches' activations more."""
    model = without_dropout(entry("transformer").make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = (zoo.words(0, 0)[0],)
    precision = infinity.Precision(compute="fp32")
    roomy = budget_for("unified-nvme", model, optimizer, directory, precision)
    roomy = infinity.Budget(host="64MiB", nvme=roomy.nvme)
    plan = infinity.plan(model, optimizer, budget=roomy, precision=precision, example_inputs=inputs)
    assert plan.activations is not None
    host = plan.smallest[Tier.HOST] + int(extra * plan.activations)
    budget = infinity.Budget(host=host, nvme=roomy.nvme)
    return model, infinity.offload(
        model, optimizer, budget=budget, precision=precision, example_inputs=inputs
    )


def test_a_budget_with_room_for_one_micro_batch_gets_the_plain_loop(tmp_path: Path) -> None:
    of = entry("transformer")
    model, runtime = with_known_activations(tmp_path, 0)
    with runtime:
        loss_fn = functools.partial(of.loss, model)
        with pytest.warns(UserWarning, match="room for the activations of one") as told:
            runtime.accumulate(batches_of(of), loss_fn)
            runtime.accumulate(batches_of(of), loss_fn)
        assert len([each for each in told if PLAIN in str(each.message)]) == 1
        assert told[0].filename == __file__
        with no_warnings():
            runtime.accumulate(batches_of(of), loss_fn, together=2)


def test_where_all_pages_stay_up_there_is_nothing_to_save(tmp_path: Path) -> None:
    seen = []

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        seen.append(threading.current_thread())
        return TIED.loss(model, batch)

    with no_warnings():
        found_by(TIED, tmp_path, vertical=True, home="unified", loss_of=loss_of)
        found_by(TIED, tmp_path, vertical=True, home="device", loss_of=loss_of)
    assert set(seen) == {threading.current_thread()}
    found_by(TIED, tmp_path, vertical=True, home="nvme", loss_of=loss_of)
    assert len(set(seen)) > 1


# --- what is not to be mixed up ------------------------------------------------------------------------


class Auxiliary(zoo.Tied):
    """Its blocks keep a loss of their own on themselves, as mixtures of experts do."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
            block.auxiliary = x.square().mean()
        return self.head(self.norm(x))


def with_auxiliary(model: Any, batch: Any) -> Tensor:
    return TIED.loss(model, batch) + sum(block.auxiliary for block in model.blocks)


def test_what_modules_keep_from_a_forward_is_not_mixed_up(tmp_path: Path) -> None:
    of = Entry("auxiliary", Auxiliary, zoo.words)
    with pytest.warns(UserWarning, match=r"keeps blocks\.0\.auxiliary"), threads_as_before():
        assert_same(of, tmp_path, loss_of=with_auxiliary, steps=3)


class Detached(zoo.Tied):
    """What it keeps has no graph: numbers of the batch that are needed at the end."""

    def forward(self, ids: Tensor) -> Tensor:
        self.scale = self.embedding(ids).detach().std()
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def test_nor_is_what_has_no_graph(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="keeps scale"):
        assert_same(Entry("detached", Detached, zoo.words), tmp_path)


def test_what_a_module_makes_once_is_no_reason_for_ever(tmp_path: Path) -> None:
    class Lazy(zoo.Tied):
        def forward(self, ids: Tensor) -> Tensor:
            if not hasattr(self, "table"):
                self.table = torch.linspace(0, 1, DIM)
            return super().forward(ids)

    with no_warnings():
        assert_same(Entry("lazy", Lazy, zoo.words), tmp_path)


def test_tensors_that_a_hook_hands_on_are_not_mixed_up(tmp_path: Path) -> None:
    seen: dict[str, Tensor] = {}

    def make() -> nn.Module:
        model = zoo.Tied()
        model.blocks[0].register_forward_hook(lambda *each: seen.update(found=each[2]))
        return model

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return TIED.loss(model, batch) + seen["found"].square().mean()

    with pytest.warns(UserWarning, match="from tensors of another"):
        assert_same(Entry("hooked", make, zoo.words), tmp_path, loss_of=loss_of, steps=3)


def test_a_mixture_found_too_late_is_an_error_and_the_next_step_is_right(tmp_path: Path) -> None:
    """Only the second micro-batch looks at what the others leave."""
    seen: dict[str, Tensor] = {}
    model = zoo.entry("tied").make()
    model.blocks[0].register_forward_hook(lambda *each: seen.update(found=each[2]))
    batches = batches_of(TIED)

    def loss_fn(batch: Any) -> Tensor:
        loss = TIED.loss(model, batch)
        return loss + seen["found"].mean() if batch is batches[1] else loss

    with opened(model, tmp_path) as runtime:
        with pytest.raises(ConfigError, match="mixed up"), threads_as_before():
            runtime.accumulate(batches, loss_fn)
        with pytest.raises(ConfigError, match=r"broken off|no parameter has a gradient"):
            runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        with pytest.warns(UserWarning, match=PLAIN):
            runtime.accumulate(batches, loss_fn)
        got = gradients(runtime, model)
        runtime.optimizer.zero_grad()
        plain_loop(loss_fn, batches)
        assert differences(got, gradients(runtime, model)) == []


# --- what is broken off --------------------------------------------------------------------------------


def failing(where: str, act: Callable[[], None]) -> Callable[[nn.Module, Any], Tensor]:
    """A loss whose third micro-batch acts: before its forward, in a block's, after it or in a backward."""

    def loss_of(model: Any, batch: Any) -> Tensor:
        if batch[0] is not marked[0][0]:
            return TIED.loss(model, batch)
        if where == "before":
            act()
        handle = None
        if where == "forward":
            handle = model.blocks[1].register_forward_hook(lambda *_: act())
        try:
            loss = TIED.loss(model, batch)
        finally:
            if handle is not None:
                handle.remove()
        if where == "after":
            act()
        if where == "backward":
            loss.register_hook(lambda _: act())
        return loss

    marked: list[Any] = []
    loss_of.marked = marked  # type: ignore[attr-defined]
    return loss_of


def raise_it() -> None:
    raise LookupError("of the third")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)  # to the process, as the terminal sends it


@pytest.mark.parametrize("where", ["before", "forward", "after", "backward"])
@pytest.mark.parametrize("act, error", [(raise_it, LookupError), (interrupt, KeyboardInterrupt)])
def test_an_exception_ends_all_and_the_next_step_is_right(
    where: str, act: Callable[[], None], error: type[BaseException], tmp_path: Path
) -> None:
    model = TIED.make()
    batches = batches_of(TIED)
    loss_of = failing(where, act)
    loss_of.marked.append(batches[2])  # type: ignore[attr-defined]
    with opened(model, tmp_path) as runtime:
        with pytest.raises(error), threads_as_before():
            runtime.accumulate(batches, lambda batch: loss_of(model, batch))
        with pytest.raises(ConfigError, match=r"broken off|no parameter has a gradient"):
            runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        hooks = [len(each._forward_pre_hooks) for each in model.modules()]
        runtime.accumulate(batches, lambda batch: TIED.loss(model, batch))
        assert [len(each._forward_pre_hooks) for each in model.modules()] == hooks
        got = gradients(runtime, model)
        runtime.optimizer.zero_grad()
        plain_loop(lambda batch: TIED.loss(model, batch), batches)
        assert differences(got, gradients(runtime, model)) == []
        assert not runtime._parts.paging.forwards
    assert files(tmp_path) == []


def test_wrong_arguments(tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path) as runtime:
        with pytest.raises(ConfigError, match="together=0"):
            runtime.accumulate(batches_of(TIED), lambda batch: TIED.loss(model, batch), together=0)
        with pytest.raises(ConfigError, match="returned float"), threads_as_before():
            runtime.accumulate(batches_of(TIED), lambda batch: TIED.loss(model, batch).item())
        with pytest.raises(RuntimeError, match="scalar"), threads_as_before():
            runtime.accumulate(batches_of(TIED), lambda batch: model(batch[0]))
        runtime.optimizer.zero_grad()
        assert runtime.accumulate([], lambda batch: TIED.loss(model, batch)) == []
    with pytest.raises(ConfigError, match="closed"):
        runtime.accumulate(batches_of(TIED), lambda batch: TIED.loss(model, batch))


def test_without_an_optimizer_there_is_nothing_to_accumulate() -> None:
    model = TIED.make()
    with (
        infinity.offload(model, None, budget=infinity.Budget(host="64MiB")) as runtime,
        pytest.raises(ConfigError, match="without an optimizer"),
    ):
        runtime.accumulate(batches_of(TIED), lambda batch: TIED.loss(model, batch))


# --- what torch keeps by thread ------------------------------------------------------------------------


def test_micro_batches_run_under_what_is_in_force_around_them(tmp_path: Path) -> None:
    label: contextvars.ContextVar[str] = contextvars.ContextVar("label", default="none")
    model, packed, seen = TIED.make(), [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor

    def loss_fn(batch: Any) -> Tensor:
        loss = TIED.loss(model, batch)
        with torch.no_grad():
            product = torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")
        seen.append((label.get(), product.dtype, torch.empty(0).device.type, torch.get_num_threads()))
        label.set("changed")
        return loss

    with opened(model, tmp_path) as runtime:
        label.set("ours")
        with (
            torch.device("meta"),
            torch.autocast("cpu", torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            batches = [(ids.cpu(), targets.cpu()) for ids, targets in batches_of_cpu()]
            runtime.accumulate(batches, loss_fn)
        assert seen == [("ours", torch.bfloat16, "meta", torch.get_num_threads())] * MICRO_BATCHES
        assert label.get() == "ours"
        assert packed


def batches_of_cpu() -> list[Any]:
    with torch.device("cpu"):
        return batches_of(TIED)


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class WatchingBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Watching, WatchingBelow])
def test_a_mode_that_sees_one_thread_gets_the_plain_loop(mode: Any, tmp_path: Path) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        assert threading.current_thread() is threading.main_thread()
        return TIED.loss(model, batch)

    with pytest.warns(UserWarning, match="one thread only"), mode():
        found_by(TIED, tmp_path, vertical=True, loss_of=loss_of)


def test_a_checkpoint_around_a_part_draws_the_numbers_that_it_drew(tmp_path: Path) -> None:
    """To stop inside would hand them to another micro-batch: recomputed masks would be others."""

    def loss_of(model: Any, batch: Any) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return model[3](F.dropout(torch.tanh(model[2](x))))

        x = torch.tanh(model[1](model[0](batch[0])))
        x = checkpoint(part, x, use_reentrant=False)
        return F.cross_entropy(model[5](torch.tanh(model[4](x))), batch[1])

    def chain() -> nn.Module:
        return nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(6)))

    with pytest.warns(UserWarning, match="recomputes"):
        assert_same(Entry("chain", chain, vectors), tmp_path, loss_of=loss_of, device_factor=3)


# --- the benchmark ----------------------------------------------------------------------------------------


def test_the_benchmark_runs_and_leaves_nothing(tmp_path: Path) -> None:
    benchmark = Path(__file__).parents[1] / "benchmarks" / "accumulate.py"
    done = subprocess.run(
        [sys.executable, str(benchmark), "--directory", str(tmp_path), "--quick", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["same_bits"]
    assert list(report["results"]) == ["plain loop", "together", "recomputed"]
    assert "plain loop, and" not in done.stderr, "accumulate fell back"
    assert files(tmp_path) == []
