"""Tests of activations that leave the memory that computes, in whole trainings: bits, bytes and failures."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_device import EmulatedDevice
from parity import copied, differences
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import BudgetError, ConfigError
from infinity.planning import fake_step
from infinity.planning.machine_rates import MachineRates
from infinity.planning.plan import Plan
from infinity.tiers import Tier
from infinity.tiers import nvme as nvme_tier

DIM, ROWS = 64, 512
AMPLE = 64 << 20
OFFLOAD = ("recompute+offload", "offload")
SOME = ("unified-nvme", "apart", "streams-nvme")
PLACES = ("unified", "unified-nvme", "apart", "apart-nvme", "streams", "streams-nvme")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("scale", torch.full((ROWS, DIM), 0.5))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


class Gated(Model):
    """A model that saves its input again at its end."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * x).square().mean()


class Forgetful(Model):
    """A model that lets go of a saved tensor in its forward, where a larger one does not fit then."""

    def forward(self, x: Tensor) -> Tensor:
        first, whole = torch.tanh(self.stem(x[:300])), torch.tanh(self.stem(x))
        last = torch.tanh(self.head(x[:256]))
        del first
        more, end = torch.tanh(self.head(x[:400])), torch.tanh(self.head(x[:256]))
        return whole.mean() + last.mean() + more.mean() + end.mean()


class Checkpointed(Block):
    """A block that is recomputed by the model itself."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return found


class Reentrant(Checkpointed):
    reentrant = True


def made(
    compute: str = "fp32", kind: type[nn.Module] = Model
) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(3)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    facts = {"precision": infinity.Precision(compute=compute), "device": "cpu"}
    return model, optimizer, {**facts, "example_inputs": (rows(0, compute),)}


def rows(number: int, compute: str = "fp32") -> Tensor:
    made = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(number))
    return made.bfloat16() if compute == "bf16" else made


@functools.cache
def sizes_of(memory: str, policy: str, compute: str) -> tuple[int | None, int]:
    """The smallest device budget, None if the device is RAM, and a host budget with half of the room in RAM
    that activations take which leave. memory: "unified", "apart", or "streams" while these are in use.
    """
    model, optimizer, facts = made(compute)
    planned = functools.partial(infinity.plan, model, optimizer, activations=policy, **facts)
    device = None
    if memory != "unified":
        with pytest.raises(BudgetError) as error:
            planned(budget=infinity.Budget(device="64KiB", host=AMPLE))
        device = error.value.needed
    ample = planned(budget=infinity.Budget(device=device, host=AMPLE))
    return device, ample.smallest[Tier.HOST] - ample.residuals.ram // 2


def budget_of(place: str, policy: str, directory: Path, compute: str = "fp32") -> infinity.Budget:
    """A budget with which activations leave for RAM, or nearly all of them for NVMe."""
    device, half = sizes_of(place.removesuffix("-nvme"), policy, compute)
    if not place.endswith("nvme"):
        return infinity.Budget(device=device, host=AMPLE)
    return infinity.Budget(device=device, host=half, nvme={str(directory): AMPLE})


def trained(
    place: str,
    policy: str,
    directory: Path,
    *,
    compute: str = "fp32",
    backwards: int = 1,
    together: bool = False,
    budget: infinity.Budget | None = None,
) -> tuple[dict[str, Any], Plan, dict[str, Any]]:
    """Train for two steps. Returns (what must not differ, the plan, the bytes of the last step)."""
    model, optimizer, facts = made(compute)
    streams = EmulatedDevice(5).in_use() if place.startswith("streams") else contextlib.nullcontext()
    with streams:
        budget = budget or budget_of(place, policy, directory, compute)
        together_or_not = {"accumulation": backwards} if together else {}
        runtime = infinity.offload(
            model, optimizer, budget=budget, activations=policy, **together_or_not, **facts
        )
        torch.manual_seed(4)
        losses, gradients, bytes_of_a_step = [], [], {}
        with runtime:
            for step in range(2):
                batches = [rows(10 * step + number, compute) for number in range(backwards)]
                watch = fake_step._Watch()
                with contextlib.nullcontext() if together or step == 0 else watch:
                    if together:
                        losses += runtime.accumulate(batches, model)
                    else:
                        for batch in batches:
                            loss = model(batch)
                            loss.backward()
                            losses.append(loss.detach())
                            del loss
                gradients += [runtime.grad(each) for each in model.parameters()]
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            state = copied(model.state_dict())
            pages = runtime._components.pager.residual
            bytes_of_a_step["peak"] = watch.peak
            if pages is not None:
                pages.rest()
                bytes_of_a_step.update(vars(pages.counts))
                assert runtime._components.store.activations.leased == 0
                bytes_of_a_step["ram"] = runtime._components.store.activations.counters.peak
            plan = runtime._components.plan
    assert list(directory.iterdir()) == []
    found = {"losses": losses, "gradients": gradients, "state": state, "random": torch.get_rng_state()}
    return found, plan, bytes_of_a_step


@functools.cache
def kept(compute: str = "fp32", backwards: int = 1, together: bool = False) -> dict[str, Any]:
    """What a training finds that keeps all activations."""
    with tempfile.TemporaryDirectory() as empty:
        facts: dict[str, Any] = {"compute": compute, "backwards": backwards, "together": together}
        return trained("unified", "keep", Path(empty), **facts)[0]


@pytest.mark.parametrize("policy", OFFLOAD)
@pytest.mark.parametrize(
    "place", [place if place in SOME else pytest.param(place, marks=pytest.mark.slow) for place in PLACES]
)
def test_policies_have_the_bits_and_the_bytes_of_the_plan(place: str, policy: str, tmp_path: Path) -> None:
    found, plan, moved = trained(place, policy, tmp_path)
    assert differences(kept(), found) == []
    room = plan.residuals.room
    assert room is not None
    assert room.saved > room.kept
    assert room.written > 0 or not (place.endswith("nvme") and policy == "offload")
    assert {name: moved[name] for name in ("saved", "down", "written")} == {
        name: 2 * getattr(room, name) for name in ("saved", "down", "written")
    }
    assert moved["peak"] == plan.activations
    if not place.startswith("streams"):
        assert (moved["up"], moved["read"]) == (2 * room.up, 2 * room.read)
        assert moved["ram"] <= room.ram


DISK = {"read": 3e8, "write": 3e8, "mixed": 3e8}


@pytest.mark.parametrize(
    ("place", "memory", "rates", "blocks"),
    [
        ("apart", {"device": "4MiB", "host": AMPLE}, {"link": 1.0e8}, (1, 2, 1)),
        ("unified-nvme", {"host": "9MiB"}, {"disk": DISK}, (0, 3, 1)),
        pytest.param(
            *("streams", {"device": "3584KiB", "host": AMPLE}, {"link": 1.2e8}, (2, 2, 0)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_auto_lets_blocks_run_again_leave_and_stay(
    place: str,
    memory: dict[str, Any],
    rates: dict[str, Any],
    blocks: tuple[int, int, int],
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On machines whose link or disk has the time of some blocks' saved tensors, and no more. blocks: how
    many run again, leave and stay.
    """
    speeds = MachineRates(host_stream=1e10, flops={torch.float32: 1e10}, compute_memory=1e9, **rates)
    monkeypatch.setattr("infinity.api.measure_rates", lambda *_: speeds)
    budget = infinity.Budget(**memory, nvme={str(tmp_path): AMPLE} if "disk" in rates else None)
    found, plan, moved = trained(place, "auto", tmp_path, budget=budget)
    assert differences(kept(), found) == []
    residuals, room = plan.residuals, plan.residuals.room
    assert room is not None
    groups = residuals.recomputed, residuals.leaving, residuals.kept
    assert tuple(map(len, groups)) == blocks
    assert sum(groups, ()) == tuple(f"blocks.{number}" for number in range(4))
    assert 0 < room.down < room.saved
    assert (room.written > 0) == ("disk" in rates)
    assert "because not all activations fit, predicted" in residuals.why
    names = ("saved", "down", "written")
    assert [moved[name] for name in names] == [2 * getattr(room, name) for name in names]
    if place != "streams":
        assert moved["peak"] == plan.activations
        assert (moved["up"], moved["read"]) == (2 * room.up, 2 * room.read)
    assert moved["ram"] <= room.ram


@pytest.mark.sweep
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", ["keep", "recompute", *OFFLOAD])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("steps", ["one backward", "three backwards", "accumulate"])
def test_bits_of_all_policies(place: str, policy: str, compute: str, steps: str, tmp_path: Path) -> None:
    backwards, together = 1 if steps == "one backward" else 3, steps == "accumulate"
    facts: dict[str, Any] = {"compute": compute, "backwards": backwards, "together": together}
    found, _, _ = trained(place, policy, tmp_path, **facts)
    assert differences(kept(**facts), found) == []


def test_keep_has_the_gradients_of_plain_torch() -> None:
    model, _, _ = made()
    torch.manual_seed(4)
    model(rows(0)).backward()
    plain = [each.grad for each in model.parameters()]
    for policy in OFFLOAD:
        model, optimizer, facts = made()
        budget = infinity.Budget(host=AMPLE)
        with infinity.offload(model, optimizer, budget=budget, activations=policy, **facts) as runtime:
            torch.manual_seed(4)
            model(rows(0)).backward()
            assert all(
                torch.equal(a, runtime.grad(b)) for a, b in zip(plain, model.parameters(), strict=True)
            )


@pytest.mark.parametrize("policy", OFFLOAD)
@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_what_the_model_recomputes_in_a_backward_stays(kind: type[Block], policy: str) -> None:
    found = {}
    for each in ("keep", policy):
        model, _, facts = made()
        torch.manual_seed(3)
        model.blocks = nn.ModuleList(kind() for _ in range(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        budget = infinity.Budget(host=AMPLE)
        with infinity.offload(model, optimizer, budget=budget, activations=each, **facts) as runtime:
            torch.manual_seed(4)
            model(rows(0)).backward()
            found[each] = [runtime.grad(one) for one in model.parameters()]
            pages, room = runtime._components.pager.residual, runtime.plan.residuals.room
            assert pages is None or (pages.counts.saved, pages.counts.down) == (room.saved, room.down)
    assert differences(found["keep"], found[policy]) == []


def test_pages_of_other_sizes_may_lie_between_those_that_are_free(tmp_path: Path) -> None:
    model, optimizer, facts = made(kind=Forgetful)
    budget = infinity.Budget(host=AMPLE)
    with infinity.offload(model, optimizer, budget=budget, activations="offload", **facts) as runtime:
        model(rows(0)).backward()
        pool, room = runtime._components.store.activations, runtime.plan.residuals.room
        assert pool is not None and room is not None
        assert pool.counters.peak < room.ram == pool.nbytes


@contextlib.contextmanager
def offloaded(place: str, policy: str, directory: Path) -> Iterator[tuple[nn.Module, infinity.Runtime]]:
    model, optimizer, facts = made()
    budget = budget_of(place, policy, directory)
    with infinity.offload(model, optimizer, budget=budget, activations=policy, **facts) as runtime:
        yield model, runtime


def left(runtime: infinity.Runtime) -> tuple[int, int]:
    """Bytes of RAM and of disk that activations take."""
    pages = runtime._components.pager.residual
    assert pages is not None
    pages.rest()
    store = runtime._components.store
    assert store.activations is not None
    disk = 0 if store.scratch is None else store.scratch.budget - store.scratch.free_bytes
    return store.activations.leased, disk


@pytest.mark.parametrize("place", ["unified-nvme", "apart-nvme"])
def test_a_backward_in_which_the_runtime_is_closed_says_so(place: str, tmp_path: Path) -> None:
    with offloaded(place, "offload", tmp_path) as (model, runtime):
        model.blocks[1].down.register_full_backward_hook(lambda *_: runtime.close())
        with pytest.raises(ConfigError, match="runtime of this model is closed"):
            model(rows(0)).backward()


def test_a_forward_beside_one_without_backward_tells_the_cause(tmp_path: Path) -> None:
    with offloaded("unified", "offload", tmp_path) as (model, runtime):
        loss = model(rows(0))
        with pytest.raises(BudgetError, match="results of earlier forwards"):
            model(rows(1))
        loss.backward()
        runtime.optimizer.step()
        model(rows(1)).backward()


@pytest.mark.parametrize("place", ["unified-nvme", "apart-nvme"])
def test_forwards_without_backward_and_in_evaluation_leave_nothing(place: str, tmp_path: Path) -> None:
    with offloaded(place, "offload", tmp_path) as (model, runtime):
        model(rows(0))
        assert left(runtime) == (0, 0)
        with torch.no_grad():
            model(rows(0))
        loss = model(rows(0))
        assert left(runtime) != (0, 0)
        del loss
        model.train(False)
        model(rows(0)).backward()
        runtime.optimizer.zero_grad()
        assert left(runtime) == (0, 0)


def test_longer_inputs_than_planned_leave_in_greater_number_or_are_refused(tmp_path: Path) -> None:
    with offloaded("unified-nvme", "offload", tmp_path) as (model, runtime):
        model.scale = torch.full((1, DIM), 0.5)
        pages = runtime._components.pager.residual
        assert pages is not None
        model(rows(0)).backward()
        written = pages.counts.written
        longer = torch.randn(4 * ROWS, DIM)
        with pytest.raises(BudgetError, match="Saved activations"):
            model(longer)
        runtime.optimizer.zero_grad()
        assert left(runtime) == (0, 0)
        model(rows(0)).backward()
        assert pages.counts.written >= 2 * written
        runtime.optimizer.step()


def test_what_is_unknown_or_absent_is_refused() -> None:
    model, optimizer, facts = made()
    del facts["example_inputs"]
    budget = infinity.Budget(host=AMPLE)
    with pytest.raises(ConfigError, match="example_inputs"):
        infinity.offload(model, optimizer, budget=budget, activations="offload", **facts)
    assert type(next(model.parameters())) is nn.Parameter
    with pytest.raises(ConfigError, match="recompute\\+offload"):
        infinity.plan(model, optimizer, budget=budget, activations="everything", **facts)


@pytest.mark.parametrize("place", ["unified-nvme", "apart-nvme"])
def test_a_budget_error_names_a_budget_that_is_enough(place: str, tmp_path: Path) -> None:
    model, optimizer, facts = made()
    near = {} if place.startswith("unified") else {"device": AMPLE}
    for nvme in (None, {str(tmp_path): AMPLE}):
        with pytest.raises(BudgetError) as error:
            infinity.plan(
                model,
                optimizer,
                budget=infinity.Budget(**near, host="256KiB", nvme=nvme),
                activations="offload",
                **facts,
            )
        budget = infinity.Budget(**near, host=error.value.needed, nvme=nvme)
        plan = infinity.plan(model, optimizer, budget=budget, activations="offload", **facts)
        assert plan.residuals.room is not None


@pytest.mark.parametrize("policy", OFFLOAD)
def test_micro_batches_that_run_together_have_room_and_bits(policy: str, tmp_path: Path) -> None:
    found, plain = {}, {}
    for together in (False, True):
        model, optimizer, facts = made(kind=Gated)
        planned = functools.partial(infinity.plan, model, optimizer, accumulation=3, **facts)
        with pytest.raises(BudgetError) as error:
            planned(budget=infinity.Budget(device="64KiB", host=AMPLE), activations=policy)
        budget = infinity.Budget(device=error.value.needed, host=AMPLE)
        runtime = infinity.offload(
            model, optimizer, budget=budget, activations=policy, accumulation=3, **facts
        )
        with runtime, warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            room = runtime.plan.residuals.room
            assert room is not None
            assert room.together == (3 if room.down else 1)
            model.train(False)
            batches = [rows(number) for number in range(3)]
            if together:
                losses = runtime.accumulate(batches, model, together=3)
                assert runtime._accumulator is not None and runtime._accumulator._pays()
            else:
                losses = []
                for batch in batches:
                    losses.append(model(batch))
                    losses[-1].backward()
            into = found if together else plain
            into["losses"] = [each.detach() for each in losses]
            into["gradients"] = [runtime.grad(each) for each in model.parameters()]
            pages = runtime._components.pager.residual
            assert pages is not None
            into["saved"] = pages.counts.saved
    assert differences(plain, found) == []


@pytest.mark.parametrize(("place", "counts"), [("unified", (1, 2)), ("apart", (2, 3))])
def test_the_room_of_what_leaves_takes_few_steps_without_data(
    place: str, counts: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it gets RAM where there is room, and goes on to disk where there is not."""
    model, optimizer, facts = made()
    half = budget_of(f"{place}-nvme", "offload", tmp_path)
    speeds = MachineRates(
        host_stream=1e10, flops={torch.float32: 1e10}, compute_memory=1e9, link=1e9, disk=DISK
    )
    monkeypatch.setattr("infinity.api.measure_rates", lambda *_: speeds)
    run, ran = fake_step.run_fake_step, []
    monkeypatch.setattr("infinity.api.run_fake_step", lambda *args, **kw: ran.append(1) or run(*args, **kw))
    for host, count in zip((AMPLE, half.host), counts, strict=True):
        ran.clear()
        budget = infinity.Budget(host=host, device=half.device, nvme=half.nvme)
        plan = infinity.plan(model, optimizer, budget=budget, activations="offload", **facts)
        assert (plan.residuals.disk > 0) == (host != AMPLE)
        assert len(ran) == count


@pytest.mark.slow  # it measures the speeds of both
def test_two_disks_have_room_for_pages_and_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, facts = made()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()

    def budget(host: int | str, each: int) -> infinity.Budget:
        return infinity.Budget(host=host, nvme={str(path): each for path in tmp_path.iterdir()})

    plan = infinity.plan(model, optimizer, budget=budget("3MiB", AMPLE), activations="offload", **facts)
    assert plan.residuals.disk > 0
    each = -(-plan.smallest[Tier.NVME] // 8192) * 4096
    small = budget(plan.smallest[Tier.HOST], each)
    probed: list[str] = []
    probe = nvme_tier._probe

    def counted(path: str, limit: int) -> float:
        probed.append(path)
        return probe(path, limit)

    monkeypatch.setattr(nvme_tier, "_probe", counted)
    with infinity.offload(model, optimizer, budget=small, activations="offload", **facts) as runtime:
        assert len(probed) == 2, "each disk once"
        store = runtime._components.store
        slabs = [slab for tier in (store.nvme, store.scratch) if tier for slab in tier.slabs]
        for path in tmp_path.iterdir():
            assert sum(slab.nbytes for slab in slabs if slab.directory == path) <= each
        model(rows(0)).backward()


def test_scratch_that_exceeds_the_nvme_budget_is_refused_by_the_plan(tmp_path: Path) -> None:
    model, optimizer, facts = made()
    planned = functools.partial(infinity.plan, model, optimizer, activations="offload", **facts)
    _, half = sizes_of("unified", "offload", "fp32")
    with pytest.raises(BudgetError) as error:
        planned(budget=infinity.Budget(host=half, nvme={str(tmp_path): "256KiB"}))
    assert error.value.needed is not None
    tier = {error.value.tier: error.value.needed}
    budget = infinity.Budget(host=tier.get("host", half), nvme={str(tmp_path): tier.get("nvme", "256KiB")})
    with infinity.offload(model, optimizer, budget=budget, activations="offload", **facts):
        model(rows(0)).backward()


@pytest.mark.parametrize("place", ["unified", "apart"])
def test_the_smallest_budgets_are_enough_together(place: str, tmp_path: Path) -> None:
    model, optimizer, facts = made()
    planned = functools.partial(infinity.plan, model, optimizer, activations="offload", **facts)
    near = {} if place == "unified" else {"device": AMPLE}
    nvme = {str(tmp_path): AMPLE}
    smallest = planned(budget=infinity.Budget(**near, host="3MiB", nvme=nvme)).smallest
    near = {name: smallest[Tier.DEVICE] for name in near}
    budget = infinity.Budget(**near, host=smallest[Tier.HOST], nvme={str(tmp_path): smallest[Tier.NVME]})
    with infinity.offload(model, optimizer, budget=budget, activations="offload", **facts):
        model(rows(0)).backward()
