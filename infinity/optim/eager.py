"""Eager updates: a unit is updated in the backward that brings its last gradient, not after `step()`.

Gradients then need not leave the memory in which they arrive. Also, the disk can move states during the
backward, not only during the next forward. Updates that are not done when the backward ends go on during
the next forward.

A unit that the device updates is left to `step()`. Such a unit needs no staging, and an eager update of it
would have to wait for the device, to check that the gradients are finite.

The runtime cannot tell which gradient is the last of a step, so the trainer declares how many backwards a
step has. Features that need all gradients before the first update are refused: clipping, and the loss
scaling of fp16. An update cannot be undone. After zero_grad() without step(), the updates that have begun
remain, and they count as steps. Several ranks then agree on these updates (`TrainingStep.zero_grad`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.formats.optimizer_rules import Group, Rule
from infinity.gradients.host import Gradients
from infinity.optim.step_options import StepOptions
from infinity.pages.parameter_page import ParameterPage


class EagerStep:
    """The state that all eager updates of a step share: the step's gradients and the optimizer's options."""

    def __init__(
        self,
        pages: Sequence[ParameterPage],
        gradients: Gradients,
        rule: Rule,
        *,
        accumulation: int,
    ) -> None:
        """accumulation: number of gradients that each parameter gets in a step, as declared by the user."""
        self._pages = pages
        self._gradients = gradients
        self._rule = rule
        self._accumulation = accumulation
        self._options: StepOptions | None = None
        """Copies of the param groups' options, made when the step's first unit is updated; None before."""
        self._updated = 0
        """Number of units that eager updates have updated in this step."""
        self._broken = False
        """Whether a gradient of this step was not finite. No further unit is updated then."""
        self._stepped = False

    def admits(self, unit: int) -> bool:
        """Whether to update a unit now: it has all gradients of the step, and all gradients were finite so
        far.

        False for a unit that the device updates. Called after every new gradient of the unit.
        """
        page, gradients = self._pages[unit], self._gradients.pages[unit]
        if self._gradients.on_device(unit):
            return False
        if self._broken or not gradients.complete(page.parameters, self._accumulation):
            return False
        self._broken = not self._finite(unit)
        return not self._broken

    def has_all(self, unit: int, added: Mapping[tuple[int, int], int]) -> bool:
        """Whether one of several ranks has added all its gradients of a unit that belong to the step.

        added: (unit, index of a parameter) -> number of gradients that the rank has added in the step.
        """
        page = self._pages[unit]
        return all(
            added.get((unit, index), 0) >= self._accumulation
            for index, layout in enumerate(page.layout.parameters)
            if layout.trainable and page.parameters[index].requires_grad
        )

    def can_follow(self, unit: int) -> bool:
        """Whether one of several ranks can update its part of a unit because another one has: this rank has
        all gradients of the part, and they are finite.
        """
        page, gradients = self._pages[unit], self._gradients.pages[unit]
        return (
            not self._gradients.lost
            and gradients.complete(page.parameters, self._accumulation)
            and self._finite(unit)
        )

    def _finite(self, unit: int) -> bool:
        gradients = self._gradients.pages[unit]
        return all(gradients.finite(index) for index in gradients.content)

    def options(self, groups: Sequence[Group], group_of: Mapping[tuple[int, int], int]) -> StepOptions:
        """Count one more unit as updated, and return the options of all param groups for its update.

        The first call in a step checks the groups and copies their options. Later calls in the step return
        the same copies. groups: the optimizer's param groups. group_of: as in `StepOptions`. Raises the
        errors of `Rule.check`.
        """
        if self._options is None:
            self._rule.check(groups)
            self._options = StepOptions(_frozen(groups), group_of, self._rule)
        self._updated += 1
        return self._options

    def step(self, groups: Sequence[Group]) -> None:
        """Check that user code may call `optimizer.step()` now, after the eager updates of this step.

        groups: the optimizer's param groups. Raises ConfigError if their options have changed since the
        first of these updates, or if `optimizer.step()` was called before with the same gradients.
        """
        if self._stepped:
            raise ConfigError(
                "step() was called again for gradients that eager updates have used.",
                "Call runtime.optimizer.zero_grad() after step(), and a backward before the next one.",
            )
        self.check_options(groups)

    def check_options(self, groups: Sequence[Group]) -> None:
        """Raise ConfigError if options of param groups have changed since the first update of this step."""
        if self._options is not None and not _same(self._options.groups, _frozen(groups)):
            raise ConfigError(
                f"The optimizer's options were changed after {self._updated} units were updated with others.",
                "Set the options back, and change them (or call a scheduler) after step(), or offload with "
                'update="lazy".',
            )

    def stepped(self) -> None:
        """Note that `optimizer.step()` has ended the step. Its gradients stay in use until `clear` is
        called.
        """
        self._stepped = True

    @property
    def begun(self) -> bool:
        """Whether a unit was updated in this step, so that its options are copied."""
        return self._options is not None

    @property
    def ended(self) -> bool:
        """Whether `stepped` was called for this step."""
        return self._stepped

    def clear(self) -> None:
        """Forget this step, so that the next step can begin. Called when the step's gradients have been
        forgotten.
        """
        self._options = None
        self._updated = 0
        self._broken = self._stepped = False

    @property
    def done(self) -> str:
        """A clause for an error message: how many units this step had updated before the error came."""
        return f"{self._updated} of {len(self._pages)} units were updated before it came"


def _frozen(groups: Sequence[Group]) -> list[Group]:
    """Copies of the options of all groups, with the identities of their parameters."""
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in (*group.items(), ("params", [id(each) for each in group["params"]]))
        }
        for group in groups
    ]


def _same(one: Sequence[Group], other: Sequence[Group]) -> bool:
    return len(one) == len(other) and all(
        mine.keys() == theirs.keys() and all(_equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(one, other, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.as_tensor(one).equal(torch.as_tensor(other)))
    return bool(one == other)
