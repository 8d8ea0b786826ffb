"""Tests that random operations exceed no budget, and that the smallest budgets that plans name are exact."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hard_budgets import PLACES, adamw, check_budgets, offload, smallest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from parity import differences, gradients_of
from random_models import Forward, Part, Stack, forwards, models
from torch import Tensor, nn

from infinity.errors import BudgetError
from infinity.tiers import Tier

MiB = 1 << 20


class Twins(RuleBasedStateMachine):
    """A state machine that applies the same random operations to a paged model and to a plain twin."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.graphs: list[tuple[Forward, Tensor, Tensor]] = []
        """Forwards whose backward is still to come: (input, paged model's output, twin's output)."""
        self.held: list[tuple[Tensor, Tensor, str]] = []
        """Views that are held: (view of the paged model's parameter, the twin's view, `kind` in `hold`)."""
        self.clipped = False

    @initialize(
        parts=models(),
        place=st.sampled_from(PLACES),
        more=st.tuples(*[st.sampled_from([0.0, 0.0, 0.1, 0.3, 0.6, 1.0])] * 3),
    )
    def open(self, parts: tuple[Part, ...], place: str, more: tuple[float, ...]) -> None:
        self.directory = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.twin, self.model = Stack(parts), Stack(parts)
        self.sizes = smallest(self.model, place, self.directory)
        whole = 20 * sum(each.nbytes for each in self.model.parameters()) + 8192
        for tier, share in zip(self.sizes, more, strict=False):
            self.sizes[tier] += int(share * whole)
        self.optimizer = adamw(self.twin)
        self.runtime = self.stack.enter_context(offload(self.model, self.sizes, self.directory))
        self.names = [name for name, _ in self.model.named_parameters()]
        layouts = self.runtime.plan.layout.units
        self.units = {
            name: number
            for number, unit in enumerate(layouts)
            for each in unit.parameters
            for name in each.names
        }

    # --- what is done ----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.graphs) < 3)
    @rule(arguments=forwards())
    def forward(self, arguments: Forward) -> None:
        found = self.both(arguments.of, self.units_together(arguments))
        if found is not None and found[1].requires_grad:
            assert found[0].requires_grad
            self.graphs.append((arguments, *found))

    @precondition(lambda self: self.graphs and not self.clipped)
    @rule(which=st.integers(0, 2))
    def backward(self, which: int) -> None:
        arguments, ours, twins = self.graphs.pop(which % len(self.graphs))
        try:
            twins.square().mean().backward()
        except RuntimeError as error:  # a parameter was edited after the forward
            assert "modified by an inplace operation" in str(error)
            with pytest.raises((RuntimeError, BudgetError)) as raised:
                ours.square().mean().backward()
            if isinstance(raised.value, BudgetError):
                self.let_go(raised.value)
            else:
                assert "modified by an inplace operation" in str(raised.value)
            self.zero_grad()
            return
        try:
            ours.square().mean().backward()
        except BudgetError as error:
            del ours, twins
            self.let_go(error)
            self.zero_grad()
            for side in (self.model, self.twin):
                arguments.of(side).square().mean().backward()
        self.check_gradients()

    @rule(arguments=forwards(), inference=st.booleans())
    def evaluate(self, arguments: Forward, inference: bool) -> None:
        with torch.inference_mode() if inference else torch.no_grad():
            self.both(arguments.of, self.units_together(arguments))

    @rule(which=st.integers(0, 99))
    def read(self, which: int) -> None:
        name = self.names[which % len(self.names)]
        self.both(lambda model: model.get_parameter(name).detach().clone().sum())
        self.both(lambda model: model.get_parameter(name).square().mean().item())

    @rule(which=st.integers(0, 99), how=st.sampled_from(["inplace", "data", "assign", "item"]))
    def edit(self, which: int, how: str) -> None:
        name = self.names[which % len(self.names)]

        def act(model: nn.Module) -> None:
            parameter = model.get_parameter(name)
            with torch.no_grad():
                if how == "inplace":
                    parameter.mul_(0.75)
                elif how == "data":
                    parameter.data.add_(0.125)
                elif how == "assign" and model is self.model:
                    parameter.data = torch.full_like(parameter, 0.25)
                elif how == "assign":  # the page takes the values over, so views of the parameter follow
                    parameter.data.fill_(0.25)
                elif parameter.dim():
                    parameter[0] = 0.5

        self.both(act)

    @rule(which=st.integers(0, 9))
    def state_dict(self, which: int) -> None:
        self.both(lambda model: dict(self.part(model, which).state_dict()))

    @rule()
    def state_dict_of_all(self) -> None:
        self.both(lambda model: dict(model.state_dict()))

    @rule(which=st.integers(0, 9))
    def load_state_dict(self, which: int) -> None:
        state = {name: 0.5 * each.detach() for name, each in self.part(self.twin, which).state_dict().items()}

        def act(model: nn.Module) -> None:
            try:
                self.part(model, which).load_state_dict(state)
            except RuntimeError as error:  # torch's own error, which quotes the runtime's error
                if "let go of such views" not in str(error):
                    raise
                raise BudgetError(str(error), "", needed=1) from None

        self.both(act)

    @rule(which=st.integers(0, 9))
    def edit_whole(self, which: int) -> None:
        names = [
            f"parts.{which % len(self.model.parts)}.{name}"
            for name, _ in self.part(self.model, which).named_parameters()
        ]

        def act(model: nn.Module) -> None:
            context: Any = contextlib.nullcontext()
            if model is self.model:
                context = self.runtime.full_parameters(self.part(model, which))
            with context, torch.no_grad():
                for parameter in self.part(model, which).parameters():
                    parameter.add_(0.0625)

        self.both(act, [self.units[name] for name in names])

    @rule(which=st.integers(0, 99), kind=st.sampled_from(["detach", "data", "row", "graph"]))
    def hold(self, which: int, kind: str) -> None:
        name = self.names[which % len(self.names)]

        def act(model: nn.Module) -> Tensor:
            parameter = model.get_parameter(name)
            if kind == "data":
                return parameter.data
            if kind == "graph":
                return parameter.view(-1)
            return parameter.detach()[:1] if kind == "row" and parameter.dim() else parameter.detach()

        found = self.both(act)
        assert found is not None
        self.held.append((*found, kind))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def edit_held(self, which: int) -> None:
        ours, twins, _ = self.held[which % len(self.held)]
        with torch.no_grad():
            ours.add_(0.03125)
            twins.add_(0.03125)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        self.held.pop(which % len(self.held))

    @rule()
    def zero_grad(self) -> None:
        self.runtime.optimizer.zero_grad()
        self.optimizer.zero_grad()
        self.clipped = False

    @precondition(lambda self: any(each.grad is not None for each in self.twin.parameters()))
    @rule(clip=st.booleans(), keep=st.booleans())
    def step(self, clip: bool, keep: bool) -> None:
        if clip and not self.clipped:
            norm = float(nn.utils.clip_grad_norm_(self.twin.parameters(), 0.5))
            assert float(self.runtime.clip_grad_norm_(0.5)) == pytest.approx(norm, rel=1e-5)
            self.clipped = True
        self.runtime.optimizer.step()
        self.optimizer.step()
        if not keep:
            self.zero_grad()
        self.synchronise()

    # --- what must hold --------------------------------------------------------------------------------

    @invariant()
    def budgets_hold(self) -> None:
        if hasattr(self, "runtime"):
            check_budgets(self.runtime, self.sizes, self.directory)

    @invariant()
    def views_are_their_parameters(self) -> None:
        for ours, twins, kind in self.held:
            assert differences(ours.detach(), twins.detach()) == [], kind

    def teardown(self) -> None:
        self.held.clear()
        self.graphs.clear()
        self.stack.close()

    # --- how -------------------------------------------------------------------------------------------

    def both(self, act: Callable[[nn.Module], Any], units: list[int] | None = None) -> Any:
        """Call `act` on both models, assert equal bits, and return (paged model's result, twin's result).

        Returns None if the operation cannot fit the budget. units: indices of the units that one operation
        needs at the same time, if there is more than one.
        """
        pages = self.runtime._components.pages
        together = sum(pages[unit].nbytes for unit in set(units or ()) if not pages[unit].permanent)
        fits = together <= self.runtime.plan.resident_bytes
        try:
            got = act(self.model)
        except BudgetError as error:
            self.let_go(error, fits=fits)
            if not fits:
                return None
            got = act(self.model)
        expected = act(self.twin)
        assert differences(_values(got), _values(expected)) == []
        return got, expected

    def let_go(self, error: BudgetError, *, fits: bool = True) -> None:
        """Drop the views in `held`, which keep pages in memory, after an operation failed for lack of room.

        error: the operation's error; asserts that its `needed` is positive. fits: whether the operation would
        fit if no view were held. If it would, asserts that at least one view was held, because nothing else
        explains the error.
        """
        assert self.held or not fits, error
        assert error.needed is not None
        assert error.needed > 0
        error.__traceback__ = None
        self.held.clear()

    def units_together(self, arguments: Forward) -> list[int]:
        """The indices of the units that the largest module of this forward needs at the same time.

        The largest module is the one whose units have the most bytes.
        """
        modules = self.runtime.plan.layout.module_units
        pages = self.runtime._components.pages
        count = len(self.model.parts)
        taken = [list(modules.get(f"parts.{number % count}", ())) for number in arguments.order]
        return max(
            taken, key=lambda units: sum(pages[each].nbytes for each in units if not pages[each].permanent)
        )

    def part(self, model: nn.Module, which: int) -> nn.Module:
        found: nn.Module = model.parts[which % len(model.parts)]
        return found

    def check_gradients(self) -> None:
        ours = {name: self.runtime.grad(each) for name, each in self.model.named_parameters()}
        assert differences(ours, gradients_of(self.twin)) == []

    def synchronise(self) -> None:
        """Compare the parameters of both models, and copy the paged model's to the twin.

        Updates may differ in their last bits, so the comparison has a tolerance.
        """
        try:
            state = self.model.state_dict()
        except BudgetError as error:
            self.let_go(error)
            state = self.model.state_dict()
        for name, parameter in self.twin.state_dict(keep_vars=True).items():
            torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=1e-6)
            parameter.data.copy_(state[name])


def _values(found: Any) -> Any:
    """Return `found` without its autograd graph if it is a tensor, and as it is otherwise."""
    return found.detach() if isinstance(found, Tensor) else found


RANDOM = {
    "deadline": None,
    "database": None,
    "report_multiple_bugs": False,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}


def operate(examples: int) -> None:
    chosen = settings(max_examples=examples, stateful_step_count=20, **RANDOM)
    run_state_machine_as_test(Twins, settings=chosen)


def test_random_operations() -> None:
    operate(30)


@pytest.mark.slow
def test_many_more_random_operations() -> None:
    operate(600)


def train(runtime: Any, model: nn.Module, twin: nn.Module, steps: int) -> None:
    """Train the paged model and its plain twin for `steps` steps.

    Asserts at every step that losses and gradients have equal bits, and that parameters are close.
    """
    optimizer = adamw(twin)
    arguments = Forward(tuple(range(len(twin.parts))), 0, 0)
    for _ in range(steps):
        losses = []
        for side in (model, twin):
            loss = arguments.of(side).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        ours = {name: runtime.grad(each) for name, each in model.named_parameters()}
        assert differences(ours, gradients_of(twin)) == []
        runtime.optimizer.step()
        optimizer.step()
        for side in (runtime.optimizer, optimizer):
            side.zero_grad()
        state = model.state_dict()
        for name, parameter in twin.state_dict(keep_vars=True).items():
            torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=1e-6)
            parameter.data.copy_(state[name])


def check_smallest(parts: tuple[Part, ...], place: str) -> None:
    """Assert that a model of `parts` trains in the smallest budgets that its plan names, and in no less.

    place: kind of machine, one of PLACES in hard_budgets.py. With 4 KiB less in any one tier, `offload`
    must raise BudgetError, and must accept the budget that this error names for the tier.
    """
    parts = tuple(part for part in parts if part.kind != "tied") or (Part("norm", 1),)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = Stack(parts)
        least = smallest(model, place, directory)
        with offload(model, least, directory) as runtime:
            train(runtime, model, Stack(parts), 2)
            check_budgets(runtime, least, directory)
        for tier in least:
            model = Stack(parts)
            with pytest.raises(BudgetError, match=f"the {tier.value} tier") as raised:
                offload(model, {**least, tier: max(1, least[tier] - 4096)}, directory)
            needed = raised.value.needed
            assert needed is not None
            sizes = {**least, tier: needed}
            with offload(model, sizes, directory) as runtime:
                train(runtime, model, Stack(parts), 1)
                check_budgets(runtime, sizes, directory)


@settings(max_examples=14, **RANDOM)
@given(parts=models(), place=st.sampled_from(PLACES))
def test_the_smallest_budgets_are_true_minima(parts: tuple[Part, ...], place: str) -> None:
    check_smallest(parts, place)


@pytest.mark.slow
@settings(max_examples=280, **RANDOM)
@given(parts=models(), place=st.sampled_from(PLACES))
def test_many_more_smallest_budgets(parts: tuple[Part, ...], place: str) -> None:
    check_smallest(parts, place)


HUNDRED_THOUSAND = (Part("wide", 1024), Part("norm", 1), Part("table", 1500), Part("wide", 2300))


@pytest.mark.parametrize(
    "sizes",
    [
        {Tier.DEVICE: MiB, Tier.HOST: 8 * MiB},
        {Tier.DEVICE: 192 << 10, Tier.HOST: 256 << 10, Tier.NVME: 4 * MiB},
        {Tier.HOST: 8 * MiB},
        {Tier.HOST: 512 << 10, Tier.NVME: 4 * MiB},
    ],
    ids=["1 MiB and 8 MiB", "less and a disk", "unified", "unified and a disk"],
)
def test_a_hundred_thousand_parameters(sizes: dict[Tier, int], tmp_path: Path) -> None:
    model = Stack(HUNDRED_THOUSAND)
    assert sum(each.numel() for each in model.parameters()) > 100_000
    with offload(model, sizes, tmp_path) as runtime:
        train(runtime, model, Stack(HUNDRED_THOUSAND), 3)
        check_budgets(runtime, sizes, tmp_path)
