"""Tests of speculative updates: they begin in the backward, and have the bits of lazy updates."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from homes import budget_for
from parity import Recipe, differences
from small_runtime import TIED, files, loss_of, settle
from torch import nn

import infinity
from infinity.aio import Faults
from infinity.errors import ConfigError, StorageError
from infinity.gradients.gradients import StagedChunks
from infinity.optim.chunk_update import ChunkUpdate
from infinity.pages.durable_io import DurableIO
from infinity.pages.gradient_page import GradientChunk
from infinity.pages.home import Home
from infinity.pages.store import Store
from infinity.system.disk_files import injected
from infinity.tiers import Tier
from infinity.tiers.link import Joined, Transfer

pytestmark = pytest.mark.usefixtures("cpu_updates")

HOMES = ("unified-nvme", "nvme", "host", "mixed", "mirrored")


@contextlib.contextmanager
def opened(
    directory: Path,
    *,
    home: str = "nvme",
    compute: str = "bf16",
    update: str = "speculative",
    accumulation: int = 1,
    checkpoint: Path | None = None,
) -> Iterator[tuple[nn.Module, Any]]:
    """Offload a small model with AdamW, and yield (model, runtime). Arguments: as of `offload`; home: see
    homes.py.
    """
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = infinity.Precision(compute=compute)
    budget = budget_for(
        home,
        model,
        optimizer,
        directory,
        precision,
        accumulation=accumulation,
        update=update,
        checkpoint=checkpoint,
    )
    with infinity.offload(
        model,
        optimizer,
        budget=budget,
        precision=precision,
        device="cpu",
        update=update,
        accumulation=accumulation,
        checkpoint=checkpoint,
    ) as runtime:
        yield model, runtime
    assert files(directory) == []


def counts(runtime: Any) -> tuple[int, int]:
    """(updates of units that were confirmed, those that were undone) in finished steps and since."""
    return runtime.stats.confirmed_updates, runtime.stats.undone_updates


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


def begun(runtime: Any) -> set[int]:
    """The units with a speculative update that is not confirmed."""
    scheduler = runtime._components.scheduler
    return {unit for unit in range(len(runtime.plan.layout.units)) if scheduler.tentative(unit)}


@pytest.mark.sweep
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(clip=5.0, steps=6),
        Recipe(clip=4.2, compute="bf16", accumulate=2, groups=2, decay_rate=True, steps=4),
        Recipe(clip=5.8, compute="bf16", states="int8"),
    ],
    ids=["fp32", "bf16", "int8"],
)
def test_bits_are_those_of_lazy_updates(home: str, recipe: Recipe, tmp_path: Path) -> None:
    """Also with injected delays, and with steps that are clipped and others that are not."""
    faults = Faults()
    for kind in ("read", "write"):
        faults.delay(kind, 1, 0.0005, times=None)
    lazy = parity.paged(TIED, recipe, home, tmp_path, declared=True)
    found = parity.paged(TIED, recipe, home, tmp_path, update="speculative", faults=faults)
    clipped = [norm > recipe.clip for norm in found.norms if recipe.clip is not None]
    assert any(clipped) and not all(clipped)
    assert differences(vars(lazy), vars(found)) == []


@pytest.mark.slow
@pytest.mark.parametrize("home", HOMES)
def test_bits_after_300_steps_with_clipped_and_skipped_ones(home: str, tmp_path: Path) -> None:
    found = {}
    for update in ("lazy", "speculative"):
        with opened(tmp_path, home=home, update=update, compute="fp16") as (model, runtime):
            losses, clipped = [], 0
            for step in range(300):
                loss = loss_of(model, step)
                (loss * (1e30 if step in (50, 120, 121, 250) else 1)).backward()
                limit = 1e-2 if step % 11 == 3 else 1e9
                clipped += runtime.clip_grad_norm_(limit) > limit
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
                losses.append(loss.item())
            assert clipped >= 20
            assert runtime.stats.skipped_steps >= 3
            if update == "speculative":
                confirmed, undone = counts(runtime)
                assert confirmed > 8 * undone > 0
            found[update] = {
                "losses": losses,
                "model": values(model),
                "states": runtime.optimizer.state_dict(),
            }
    assert differences(found["lazy"], found["speculative"]) == []


@pytest.mark.parametrize("home", HOMES)
def test_what_a_norm_confirms_is_written_once(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step writes each byte of parameters and states on NVMe once."""
    written: list[int] = []
    write = DurableIO._write

    def counting(io: DurableIO, position: int, source: torch.Tensor) -> Transfer:
        written.append(source.nbytes)
        return write(io, position, source)

    with opened(tmp_path, home=home) as (model, runtime):
        plan, parts = runtime.plan, runtime._components
        can = plan.speculating
        if home != "mixed":  # where RAM has no room for second places
            assert can == {unit for unit, each in enumerate(plan.homes) if Tier.DEVICE not in each.values()}
        pages = (*parts.pages, *parts.states.pages.values())
        there = [part.nbytes for page in pages for part in page.home.parts if part.trained]
        settle(runtime)
        monkeypatch.setattr(DurableIO, "_write", counting)
        for step in range(3):
            loss_of(model, step).backward()
            assert begun(runtime) == can != set()
            runtime.clip_grad_norm_(1e9)
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            settle(runtime)
        assert counts(runtime) == (3 * len(can), 0)
        assert sum(written) == 3 * sum(there)


def test_a_gradient_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging gives up gradients that updates have taken, too, and writes none again that lies at home."""
    written: list[tuple[int, int]] = []
    write, taken = Store._begin_write, []
    put_home = StagedChunks.write_back_now

    def counting(store: Store, home: Home, offset: int, source: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if home.nvme_lease is not None and store._durable(home) is None:
            written.append((id(home), offset))
        return write(store, home, offset, source, *rest, **more)

    def putting(staged: StagedChunks, unit: int, chunk_index: int, chunk: GradientChunk) -> None:
        taken.append(chunk.at_home)
        put_home(staged, unit, chunk_index, chunk)

    monkeypatch.setattr(Store, "_begin_write", counting)
    monkeypatch.setattr(StagedChunks, "write_back_now", putting)
    with opened(tmp_path, home="unified-nvme") as (model, runtime):
        for step in range(3):
            written.clear()
            loss_of(model, step).backward()
            runtime.clip_grad_norm_(1e9)
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            settle(runtime)
            assert written and len(written) == len(set(written))
    assert True in taken and False in taken


def test_after_clipped_steps_it_pauses_until_a_norm_is_below_the_limit(tmp_path: Path) -> None:
    with opened(tmp_path) as (model, runtime):
        units = len(runtime.plan.layout.units)
        for step, (limit, tried) in enumerate(
            [(1e-3, True), (1e-3, True), (1e-3, True), (1e-3, False), (1e9, False), (1e9, True)]
        ):
            loss_of(model, step).backward()
            assert len(begun(runtime)) == tried * units
            runtime.clip_grad_norm_(limit)
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        assert counts(runtime) == (units, 3 * units)


def _forward(model: nn.Module, runtime: Any) -> object:
    with torch.no_grad():
        return loss_of(model, 7)


def _backward(model: nn.Module, runtime: Any) -> object:
    loss_of(model, 7).backward()
    return None


def _option(model: nn.Module, runtime: Any) -> object:
    runtime.optimizer.param_groups[0]["lr"] = 3e-3
    return None


def _dropped(model: nn.Module, runtime: Any) -> object:
    next(iter(model.parameters())).grad = None
    return None


def _scaled(model: nn.Module, runtime: Any) -> object:
    for each in model.parameters():
        each.grad.mul_(0.5)
    return None


def _edited(model: nn.Module, runtime: Any) -> object:
    with torch.no_grad():
        next(iter(model.parameters())).mul_(0.5)
    return None


BETWEEN: dict[str, Callable[[nn.Module, Any], object]] = {
    "forward": _forward,
    "state_dict": lambda model, _: values(model),
    "states": lambda _, runtime: runtime.optimizer.state_dict()["state"],
    "gradient": lambda model, runtime: [runtime.grad(each) for each in model.parameters()],
    "view": lambda model, _: next(iter(model.parameters())).detach().clone(),
    "edit": _edited,
    "one more gradient": _backward,
    "option": _option,
    "dropped gradient": _dropped,
    "scaled gradients": _scaled,
}


@pytest.mark.sweep
@pytest.mark.parametrize("home", ["nvme", "mirrored"])
@pytest.mark.parametrize("name", BETWEEN)
def test_what_comes_between_backward_and_step_sees_and_does_as_with_lazy_updates(
    name: str, home: str, tmp_path: Path
) -> None:
    found = {}
    for update in ("lazy", "speculative"):
        # One more gradient is an error where gradients are stored in the parameter's dtype.
        compute = "fp32" if name == "one more gradient" else "bf16"
        with opened(tmp_path, home=home, update=update, compute=compute) as (model, runtime):
            seen = []
            for step in range(3):
                loss_of(model, step).backward()
                if update == "speculative":
                    assert begun(runtime)
                seen.append(BETWEEN[name](model, runtime))
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            found[update] = {"seen": seen, "model": values(model), "states": runtime.optimizer.state_dict()}
    assert differences(found["lazy"], found["speculative"]) == []


def test_a_gradient_that_is_added_undoes_the_update(tmp_path: Path) -> None:
    """Whoever adds it, as where micro-batches run together."""
    with opened(tmp_path, compute="fp32") as (model, runtime):
        before = values(model)
        loss_of(model, 0).backward()
        parts = runtime._components
        for unit in begun(runtime):
            fresh = torch.zeros_like(before[parts.pages[unit].layout.parameters[0].names[0]])
            with parts.pager.lock:
                parts.scheduler.accumulate(unit, 0, fresh)
        assert begun(runtime) == set()
        assert differences(before, values(model)) == []


class Late(nn.Module):
    """A model whose backward uses a parameter's values after the parameter's last gradient."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            found: torch.Tensor = torch.utils.checkpoint.checkpoint(self._compute, x, use_reentrant=False)
            return found
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        held = self.second.weight.detach()
        x = self.second(torch.sin(self.first(x) @ held))
        return x * (self.first.weight * self.first.weight.detach()).sum()


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("home", ["unified-nvme", "nvme", "mirrored"])
def test_a_backward_that_needs_a_parameter_after_its_last_gradient(
    home: str, recomputes: bool, tmp_path: Path
) -> None:
    """With eager updates it fails (test_eager.py)."""
    found = {}
    for update in ("lazy", "speculative"):
        model = Late(recomputes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options = {"precision": infinity.Precision(compute="fp32"), "accumulation": 1, "update": update}
        # Two units at once, for autograd may hold both.
        budget = budget_for(home, model, optimizer, tmp_path, roomy=1 << 20, **options)
        budget = infinity.Budget(
            device=budget.device_bytes and 1 << 20, host=budget.host_bytes + (64 << 10), nvme=budget.nvme
        )
        with infinity.offload(model, optimizer, budget=budget, device="cpu", **options) as runtime:
            losses = []
            for step in range(3):
                torch.manual_seed(step)
                loss = model(torch.randn(3, 40)).square().sum()
                loss.backward()
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
                losses.append(loss.item())
            found[update] = {"losses": losses, "model": values(model)}
    assert differences(found["lazy"], found["speculative"]) == []


@pytest.mark.parametrize("home", ["nvme", "mirrored"])
def test_a_parameter_that_is_not_updated_keeps_its_values(home: str, tmp_path: Path) -> None:
    """It lies in the same chunk as others."""
    found = {}
    for update in ("lazy", "speculative"):
        model = TIED.make()
        some = [each for name, each in model.named_parameters() if "bias" not in name]
        optimizer = torch.optim.AdamW(some, lr=1e-2)
        options: dict[str, Any] = {"precision": infinity.Precision(compute="bf16"), "accumulation": 1}
        budget = budget_for(home, model, optimizer, tmp_path, update=update, **options)
        with infinity.offload(
            model, optimizer, budget=budget, device="cpu", update=update, **options
        ) as runtime:
            for step in range(4):
                loss_of(model, step).backward()
                assert bool(begun(runtime)) == (update == "speculative")
                runtime.optimizer.step()
                model.zero_grad()
            found[update] = {"model": values(model), "states": runtime.optimizer.state_dict()}
    assert differences(found["lazy"], found["speculative"]) == []


def test_where_ram_is_short_the_units_with_the_first_gradients_are_speculative(tmp_path: Path) -> None:
    """The others wait for step()."""
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"precision": infinity.Precision(compute="bf16"), "accumulation": 1}
    roomy = budget_for("mirrored", model, optimizer, tmp_path, update="speculative", **options)
    options |= {"device": "cpu", "update": "speculative"}
    plan = infinity.plan(model, optimizer, budget=roomy, **options)
    units = range(len(plan.layout.units))
    assert plan.speculating == set(units)
    assert "speculative updates: 100%" in str(plan)

    second = [plan.second_places(unit) for unit in units]
    host = plan.host_bytes - sum(second[:-2])
    budget = infinity.Budget(device=roomy.device_bytes, host=host)
    tight = infinity.plan(model, optimizer, budget=budget, **options)
    assert tight.host_bytes <= host
    assert tight.homes == plan.homes
    assert {units[-2], units[-1]} <= tight.speculating != set(units)
    assert "of the units whose gradients come first" in str(tight)

    found = {}
    for update in ("lazy", "speculative"):
        model = TIED.make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with infinity.offload(model, optimizer, budget=budget, **options | {"update": update}) as runtime:
            for step in range(4):
                loss_of(model, step).backward()
                assert begun(runtime) == (tight.speculating if update == "speculative" else set())
                runtime.clip_grad_norm_(5.0)
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            found[update] = {"model": values(model), "states": runtime.optimizer.state_dict()}
    assert differences(found["lazy"], found["speculative"]) == []


def test_gradients_that_are_dropped_leave_everything_as_it_was(tmp_path: Path) -> None:
    with opened(tmp_path) as (model, runtime):
        loss_of(model, 0).backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        before, states = values(model), runtime.optimizer.state_dict()
        loss_of(model, 1).backward()
        assert begun(runtime)
        runtime.optimizer.zero_grad()
        assert differences(before, values(model)) == []
        assert differences(states, runtime.optimizer.state_dict()) == []


def test_overflows_under_a_dynamic_loss_scale(tmp_path: Path) -> None:
    """A step that is skipped undoes its updates."""
    found = {}
    for update in ("lazy", "speculative"):
        with opened(tmp_path, update=update, compute="fp16") as (model, runtime):
            losses = []
            for step in range(6):
                loss = loss_of(model, step)
                (loss * (1e30 if step in (2, 3) else 1)).backward()
                runtime.clip_grad_norm_(5.0)
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
                losses.append(loss.item())
            found[update] = {"losses": losses, "model": values(model)}
            skipped = runtime.stats.skipped_steps
    assert skipped >= 2
    assert differences(found["lazy"], found["speculative"]) == []


@pytest.mark.parametrize("home", ["nvme", "mixed", "host"])
def test_commits_hold_what_step_has_confirmed(home: str, tmp_path: Path) -> None:
    """A slot that a commit holds and the newest bytes are left alone by updates that may be undone."""
    pages, first, second = (tmp_path / name for name in ("pages", "first", "second"))
    found = {}
    for update, commits in (("lazy", first), ("speculative", second)):
        pages.mkdir()
        with contextlib.ExitStack() as stack:
            faults = Faults()
            faults.delay("write", 1, 0.001, times=None)
            stack.enter_context(injected(faults))
            model = TIED.make()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            options = {"precision": infinity.Precision(compute="bf16"), "device": "cpu", "accumulation": 1}
            budget = budget_for(
                home,
                model,
                optimizer,
                pages,
                options["precision"],
                accumulation=1,
                update=update,
                checkpoint=commits,
            )
            runtime = stack.enter_context(
                infinity.offload(
                    model, optimizer, budget=budget, update=update, checkpoint=commits, **options
                )
            )
            for step in range(7):
                loss_of(model, step).backward()
                if update == "speculative" and step < 2:  # later ones may lack a slot, for a slow commit
                    assert begun(runtime)
                runtime.clip_grad_norm_(5.0)
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
                if step in (1, 2, 4):
                    commit = runtime.save(state={"step": step})
            commit.wait()
        model = TIED.make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with infinity.offload(model, optimizer, budget=budget, resume=commits, **options) as runtime:
            assert runtime.load() == {"step": 4}
            loss_of(model, 8).backward()
            runtime.optimizer.step()
            found[update] = {"model": values(model), "states": runtime.optimizer.state_dict()}
        for each in pages.iterdir():
            each.unlink()
        pages.rmdir()
    assert differences(found["lazy"], found["speculative"]) == []


@pytest.mark.parametrize("home", ["nvme", "mixed", "host"])
def test_a_commit_after_a_skipped_step_holds_the_values_before(home: str, tmp_path: Path) -> None:
    """Even if gradients are not dropped before the commit."""
    pages, commits = tmp_path / "pages", tmp_path / "commits"
    pages.mkdir()
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = infinity.Precision(compute="fp16")
    options: dict[str, Any] = {"precision": precision, "device": "cpu", "accumulation": 1}
    budget = budget_for(
        home,
        model,
        optimizer,
        pages,
        precision,
        accumulation=1,
        update="speculative",
        checkpoint=commits,
    )
    with infinity.offload(
        model, optimizer, budget=budget, update="speculative", checkpoint=commits, **options
    ) as runtime:
        for step in range(2):
            loss_of(model, step).backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        before = values(model)
        next(iter(model.parameters())).register_hook(lambda each: each * torch.inf)
        loss_of(model, 2).backward()
        assert begun(runtime)
        runtime.optimizer.step()
        assert runtime.stats.skipped_steps == 1
        commit = runtime.save()
        runtime.optimizer.zero_grad()
        commit.wait()
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with infinity.offload(model, optimizer, budget=budget, resume=commits, **options):
        assert differences(before, values(model)) == []


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_disk_that_fails_ends_in_a_typed_error(kind: str, tmp_path: Path) -> None:
    faults = Faults()
    with injected(faults), opened(tmp_path, home="unified-nvme") as (model, runtime):
        loss_of(model, 0).backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        settle(runtime)
        loss = loss_of(model, 1)
        settle(runtime)
        faults.fail(kind, 1, errno.EIO, times=None)
        with pytest.raises(StorageError):
            loss.backward()
            runtime.optimizer.step()
            settle(runtime)


@pytest.mark.parametrize("when", ["begun", "computed", "written"])
def test_a_speculative_update_that_fails_is_done_again_by_step(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results are not needed yet, so nothing is lost. The results have the bits of lazy updates."""
    place, name = {
        "begun": (ChunkUpdate, "acquire"),
        "computed": (DurableIO, "write"),
        "written": (DurableIO, "_write_beside"),
    }[when]
    method, failures = getattr(place, name), 0

    def fail() -> None:
        nonlocal failures
        failures += 1
        raise StorageError("A disk fails.", "Test on.", path=tmp_path)

    def failing(*arguments: Any, **options: Any) -> Any:
        if failures or (when == "computed" and not options["tentative"]):
            return method(*arguments, **options)
        return Joined([method(*arguments)], fail) if when == "written" else fail()

    found = {}
    for update in ("lazy", "speculative"):
        with opened(tmp_path, update=update) as (model, runtime):
            for step in range(4):
                if step == 1 and update == "speculative":
                    monkeypatch.setattr(place, name, failing)
                    if when == "begun":
                        with contextlib.suppress(StorageError):
                            loss_of(model, step).backward()
                        assert failures
                        runtime.optimizer.zero_grad()
                loss_of(model, step).backward()
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            found[update] = {"model": values(model), "states": runtime.optimizer.state_dict()}
    assert failures
    assert differences(found["lazy"], found["speculative"]) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "does not say which"),
        ({"accumulation": 1, "average": 0.9}, "averages"),
    ],
)
def test_what_cannot_be_together_is_refused(options: dict[str, Any], words: str) -> None:
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(ConfigError, match=words):
        infinity.plan(
            model,
            optimizer,
            budget=infinity.Budget(host="64MiB"),
            device="cpu",
            update="speculative",
            **options,
        )
