"""Tests of runtime.accumulate: gradients have the same bits as in a plain loop over the micro-batches, and
each page comes up once for all micro-batches of a step.
"""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from homes import budget_for, places
from micro_batches import (
    PLAIN,
    assert_same,
    batches_of,
    found_by,
    no_warnings,
    plain_loop,
    threads_as_before,
    without_dropout,
)
from small_runtime import TIED, files, opened
from torch import Tensor, nn
from zoo import DIM, Entry, entry, vectors

import infinity
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier

OF_THEIR_OWN_RECOMPUTATION = ("checkpointed", "reentrant")
ORDINARY = [each for each in zoo.ENTRIES if str(each) not in OF_THEIR_OWN_RECOMPUTATION]


# --- equal bits ----------------------------------------------------------------------------------------


@pytest.mark.sweep(most=6)
@places("nvme", cuda=("nvme", "host"))
@pytest.mark.parametrize("of", ORDINARY, ids=str)
def test_gradients_have_the_bits_of_the_plain_loop(of: Entry, home: str, device: str, tmp_path: Path) -> None:
    with no_warnings(), threads_as_before():
        assert_same(of, tmp_path, home=home, device=device)


@pytest.mark.sweep(most=1)
@pytest.mark.parametrize("home", ["unified-nvme", "mixed"])
def test_wherever_pages_rest(home: str, tmp_path: Path) -> None:
    with no_warnings():
        assert_same(entry("mixture"), tmp_path, home=home)


@pytest.mark.sweep
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
    """A model in which values bypass blocks: a residual stream, and skip connections as in a U-Net.

    Blocks also take keyword arguments and nested lists, and return tuples.
    """

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
    """A model in which the input's values decide which blocks a forward uses, how often and in which order.

    One layer is shared: it runs after every block with an odd number.
    """

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


@pytest.mark.sweep
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
        assert_same(of, tmp_path, loss_of=loss_of, recompute=True, device_factor=4)


def test_random_numbers_before_the_first_block_are_the_plain_loops(tmp_path: Path) -> None:
    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0] + torch.randn_like(batch[0])), batch[1])

    assert_same(Entry("noisy", Skips, vectors), tmp_path, loss_of=noisy)


# --- what crosses --------------------------------------------------------------------------------------


def crossed(
    of: Entry, directory: Path, *edges: Edge, count: int, vertical: bool, **options: Any
) -> list[int]:
    """Run all micro-batches twice, and return the bytes that the second time moved over each of `edges`.

    The first time the engine records in which order pages are used, and the second time it prefetches them.
    count: number of micro-batches. vertical: True takes them through
    runtime.accumulate, False through the plain loop. options: home and device_factor say where pages are and
    how much device memory there is; all others are passed to runtime.accumulate.
    """
    model = without_dropout(of.make())
    home, factor = options.pop("home", "nvme"), options.pop("device_factor", 1)
    with opened(model, directory, home=home, device_factor=factor) as runtime:
        for _ in range(2):
            runtime.optimizer.zero_grad()
            before = [runtime.stats.edges[edge].bytes for edge in edges]
            if vertical:
                runtime.accumulate(batches_of(of, count), lambda batch: of.loss(model, batch), **options)
            else:
                plain_loop(lambda batch: of.loss(model, batch), batches_of(of, count))
        return [runtime.stats.edges[edge].bytes - old for edge, old in zip(edges, before, strict=True)]


def test_gradients_stay_in_their_slots_as_long_as_there_are_enough(tmp_path: Path) -> None:
    written = {
        vertical: crossed(TIED, tmp_path, Edge.HOST_TO_NVME, count=4, vertical=vertical)[0]
        for vertical in (False, True)
    }
    assert 0 < written[True] < 0.9 * written[False]


def test_parameters_cross_once_for_all_micro_batches(tmp_path: Path) -> None:
    edges = (Edge.HOST_TO_DEVICE, Edge.NVME_TO_HOST)
    (up, read), (plain_up, plain_read), (vertical_up, vertical_read) = (
        crossed(TIED, tmp_path, *edges, count=count, vertical=vertical)
        for count, vertical in ((1, False), (4, False), (4, True))
    )
    assert plain_up > 3.5 * up and vertical_up <= 1.05 * up
    # Gradients come from the disk, too, because a slot holds only one chunk of the several in a unit.
    assert plain_read > 3.5 * read and vertical_read <= 0.6 * plain_read


def test_parameters_alone_come_from_the_disk_once(tmp_path: Path) -> None:
    """With frozen blocks, four micro-batches read at most 1.1 times as many bytes from the disk as one.

    In the plain loop they read more than 3.5 times as many. Only norm and head are trained, so only
    parameters of blocks are moved, and no gradients of blocks.
    """

    def frozen() -> nn.Module:
        model = Skips().requires_grad_(False)
        model.head.requires_grad_(True)
        model.norm.requires_grad_(True)
        return model

    of = Entry("frozen", frozen, vectors)
    read = {
        (count, vertical): crossed(
            of, tmp_path, Edge.NVME_TO_HOST, count=count, vertical=vertical, home="unified-nvme"
        )[0]
        for count, vertical in ((1, True), (4, True), (4, False))
    }
    assert read[4, True] <= 1.1 * read[1, True]
    assert read[4, False] > 3.5 * read[1, True]


def test_groups_go_together(tmp_path: Path) -> None:
    (once,) = crossed(TIED, tmp_path, Edge.HOST_TO_DEVICE, count=2, vertical=True)
    (twice,) = crossed(TIED, tmp_path, Edge.HOST_TO_DEVICE, count=4, vertical=True, together=2)
    assert 1.8 * once < twice < 2.2 * once
    with no_warnings():
        assert_same(TIED, tmp_path, together=3)


# --- memory --------------------------------------------------------------------------------------------


def test_blocks_that_are_recomputed_keep_less_and_change_no_bit(tmp_path: Path) -> None:
    of, kept = entry("tied"), {}
    for recompute in (False, True):
        model = of.make()
        with opened(model, tmp_path, device_factor=4) as runtime, no_warnings():
            runtime.accumulate(batches_of(of), functools.partial(of.loss, model), recompute=recompute)
            kept[recompute] = runtime._components.pager.saved_bytes.peak
        assert all("forward" not in each.__dict__ for each in model.modules())
    assert kept[True] < 0.5 * kept[False]
    with no_warnings():
        assert_same(of, tmp_path, device_factor=4, recompute=True)


def blocks_that_move(runtime: Any, count: int) -> list[int]:
    """Return the indices, below `count`, of modules of the nn.Sequential that are not always resident.

    Such a module has a page that is brought up before a use and may leave afterwards.
    """
    pages = runtime._components.pages
    return [
        block
        for block in range(count)
        if any(
            not pages[unit].permanent
            for path, units in runtime.plan.layout.module_units.items()
            if path.split(".")[0] == str(block)
            for unit in units
        )
    ]


@pytest.mark.parametrize(("device_factor", "resting"), [(3, 0), (4, 0), (5, 1)])
def test_recomputed_blocks_drop_what_they_dropped(device_factor: int, resting: int, tmp_path: Path) -> None:
    """Blocks that are recomputed in the backward draw the same dropout masks as in the forward.

    The blocks also run in the order that follows from where pages rest. A block is moving if its page is not
    always resident. In the forward, a micro-batch stops before each moving block except the first of them.
    In the backward it stops after each moving block. Once all micro-batches have stopped there, they go on,
    the first micro-batch first. resting: how many blocks, from the first on, are always resident.
    """
    here = threading.local()
    Masks = dict[tuple[int, int], list[float]]  # masks by (block, micro-batch), in the order of the draws
    first: Masks = {}
    again: Masks = {}

    class Dropping(Half):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            mask = F.dropout(torch.ones(DIM))
            masks = first if torch._C._current_graph_task_id() == -1 else again
            key = (list(model).index(self), here.micro)
            assert key not in masks
            masks[key] = mask.tolist()
            return super().forward(x * mask, side=x, extra=[{"gain": mask}])[0]

    def loss_of(micro: int) -> Tensor:
        here.micro = micro  # set in the micro-batch's thread, which also runs the backward
        return model(vectors(0, micro)[0]).square().mean()

    count, micro_batches = 3, 3
    model = nn.Sequential(*(Dropping() for _ in range(count)))
    with opened(model, tmp_path, device_factor=device_factor) as runtime, no_warnings():
        moving = blocks_that_move(runtime, count)
        runtime.accumulate(range(micro_batches), loss_of, recompute=True)
    assert moving == list(range(resting, count))
    every = list(itertools.product(range(count), range(micro_batches)))

    def down(each: tuple[int, int]) -> tuple[int, int, int]:
        block, micro = each
        return sum(stop <= block for stop in moving[1:]), micro, block

    def up(each: tuple[int, int]) -> tuple[int, int, int]:
        block, micro = each
        return -sum(stop <= block for stop in moving), micro, -block

    assert list(first) == sorted(every, key=down)
    assert list(again) == sorted(every, key=up)
    assert again == first


def test_without_blocks_nothing_is_recomputed(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no list of blocks"):
        assert_same(entry("recurrent"), tmp_path, recompute=True)


def with_known_activations(directory: Path, extra: float) -> tuple[nn.Module, Any]:
    """Return (model, runtime), where the plan knows from example inputs how large activations are.

    The budget of RAM is the smallest that the model needs, plus `extra` times the bytes of activations of one
    micro-batch.
    """
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


# --- the benchmark -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_runs_and_leaves_nothing(warm: None, tmp_path: Path) -> None:
    benchmark = Path(__file__).parents[2] / "benchmarks" / "accumulate.py"
    done = subprocess.run(
        [sys.executable, str(benchmark), "--directory", str(tmp_path), "--quick", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["same_bits"]
    assert list(report["results"]) == ["plain loop", "together", "recomputed"]
    assert "plain loop, and" not in done.stderr, "accumulate fell back"
    assert files(tmp_path) == []
