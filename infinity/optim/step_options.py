"""Step options: the options of param groups by which the updates of one step run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infinity import cpu_adam
from infinity.formats.optimizer_rules import Group, Rule


class StepOptions:
    """The options of all param groups in one step.

    The hyper-parameters of an update are computed once for all parameters of a group that have had equally
    many updates, not once for each unit.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        group_of: Mapping[tuple[int, int], int],
        rule: Rule,
        averaged: int = 0,
    ) -> None:
        """groups: the options of each param group. They must not change while this object is in use.

        group_of: (index of a unit, index of a parameter in this unit) -> index of the parameter's group.
        averaged: `States.averaged` before the step.
        """
        self.groups = groups
        self._group_of = group_of
        self._rule = rule
        self.average = (
            None if rule.average is None else cpu_adam.AverageStep(averaged == 0, 1 - float(rule.average))
        )
        """How running averages of masters change in the step; None if there are none."""
        self._hypers: dict[tuple[int, int, bool], tuple[cpu_adam.Hyper, cpu_adam.NativeHyper]] = {}

    def group(self, unit: int, parameter: int) -> int | None:
        """The index of a parameter's param group; None: the parameter is in no group."""
        return self._group_of.get((unit, parameter))

    def hyper(self, group: int, step: int, first: bool) -> tuple[cpu_adam.Hyper, cpu_adam.NativeHyper]:
        """Return the hyper-parameters of an update of parameters in a group, in two forms.

        They are (object for Python code, object for the native code) with equal values. group: the index of
        the group. step, first: as in `Rule.hyper`, whose errors are raised.
        """
        key = group, step, first
        if key not in self._hypers:
            found = self._rule.hyper(self.groups[group], step, first)
            self._hypers[key] = found, found.native()
        return self._hypers[key]

    def writes_moments(self, group: int) -> bool:
        """Whether an update of parameters in a group writes any moment."""
        return bool(self._rule.written(self.groups[group]))
