"""Decisions: what becomes of each field of another library's configuration, and the table that says so."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infinity.config import Budget, Size
from infinity.errors import ConfigError, storage_errors
from infinity.planning.plan_text import render
from infinity.system.directory import free_bytes

TAKEN = "taken"
"""It is part of the result."""
IGNORED = "ignored"
"""It changes no result of training: the plan decides it, or there is nothing to decide."""
ELSEWHERE = "said otherwise"
"""Another call says it."""
MISSING = "not there"
"""This package has nothing for it, and training has the same result without it."""
REFUSED = "refused"
"""This package has nothing for it, and training would have another result: ConfigError unless it is off."""
SINGLE = "refused above 1"
"""As REFUSED, for a number of ranks that is off where it is 1."""

Directories = Mapping[str | os.PathLike[str], Size]
"""As `Budget.nvme`."""

OPEN = "auto: comes from your trainer"


@dataclass(frozen=True)
class Decision:
    """What becomes of one field."""

    field: str
    """The path of the field in the configuration, with dots."""
    value: Any
    """The value in the configuration."""
    decision: str
    """TAKEN, IGNORED, ELSEWHERE or MISSING."""
    why: str
    """The reason, the argument that it has become, or the call that says it here."""


@dataclass(frozen=True)
class Rule:
    """What becomes of a field whatever its value is."""

    decision: str
    why: str
    """As in `Decision`; the cure of the error where the field is refused."""


def make_rules(*groups: tuple[str, str, str]) -> dict[str, Rule]:
    """Rules by the path of their field. groups: decision, reason, and paths with spaces between them. A path
    that ends in "." begins the paths after it.
    """
    rules = {}
    for decision, why, paths in groups:
        before = ""
        for path in paths.split():
            if path.endswith("."):
                before = path.removeprefix(".")
            else:
                rules[before + path] = Rule(decision, why)
    return rules


@dataclass(frozen=True)
class ConvertedConfig:
    """Another library's configuration, as arguments of this one. `str()` is the table of its decisions."""

    offload: dict[str, Any]
    """Keyword arguments for `infinity.offload`. What the configuration leaves open is not among them."""
    clip: float | None
    """The max_norm for `Runtime.clip_grad_norm_`; None: no clipping, or left open."""
    optimizer: tuple[str, dict[str, Any]] | None
    """The name of a class of torch.optim and its options; None if the configuration has no optimizer."""
    decisions: tuple[Decision, ...]
    """One for each field, in the order of the configuration."""

    @property
    def open(self) -> tuple[str, ...]:
        """The fields that are "auto" and would have become part of the result."""
        return tuple(each.field for each in self.decisions if each.why == OPEN)

    def build_optimizer(self, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        """Make the optimizer of the configuration. parameters: as for any optimizer of torch. options: take
        the place of the configuration's. Raises ConfigError if there is none, or if an option is left open.
        """
        if self.optimizer is None:
            raise ConfigError("The configuration has no optimizer.", "Make one of torch.optim's.")
        name, known = self.optimizer
        left = [field.rpartition(".")[2] for field in self.open if field.startswith("optimizer.params.")]
        missing = [each for each in left if each not in options]
        if missing:
            raise ConfigError(
                f"The optimizer's {', '.join(missing)} is auto in the configuration.",
                f"Give build_optimizer(parameters, {', '.join(f'{each}=...' for each in missing)}).",
            )
        made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **{**known, **options})
        return made

    def __str__(self) -> str:
        rows, last = [], ""
        for each in self.decisions:
            block, _, name = each.field.rpartition(".")
            if block != last:
                rows.append({"field": block, "value": "", "decision": "", "why": ""})
            shown = f"  {name}" if block else name
            rows.append(
                {"field": shown, "value": _shown(each.value), "decision": each.decision, "why": each.why}
            )
            last = block
        return render([row for row in rows if row["field"]], words=True)


def decide(values: Mapping[str, Any], rules: Mapping[str, Rule], source: str) -> Iterator[Decision]:
    """The decision on each field of a configuration, in its order.

    values: nested mappings. rules: by path; a rule for a block holds for all fields in it that have no rule
    of their own. source: the name of the library, for errors. Raises ConfigError for a field without a rule,
    and for one that is REFUSED and on.
    """
    blocks = {path[:end] for path in rules for end, letter in enumerate(path) if letter == "."}
    for path, value in _flat(values, blocks):
        rule, block = rule_of(path, rules), path.rpartition(".")[0]
        if rule is None and path in blocks:
            if value is not None:
                raise ConfigError(
                    f"The field {path} is {value!r}.", "Give its block of fields, or leave it out."
                )
            continue
        if rule is None:
            near = [each for each in rules if each.rpartition(".")[0] == block] or list(rules)
            nearest = difflib.get_close_matches(path, near, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"The field {path} of the configuration is not one of {source}'s.",
                f"The nearest is {nearest}: correct the name, or remove the field.",
            )
        if f"{block}.enabled" in rules and not is_on(values[block].get("enabled", False), auto=True):
            yield Decision(path, value, IGNORED, f"{block} is off")
        elif rule.decision not in (REFUSED, SINGLE):
            open_ = rule.decision == TAKEN and value == "auto"
            yield Decision(path, value, rule.decision, OPEN if open_ else rule.why)
        elif is_on(value) and not (rule.decision == SINGLE and value == 1):
            raise ConfigError(
                f"The configuration asks for {path} ({_shown(value)}), which is not there, and without which "
                "training has another result.",
                rule.why,
            )
        else:
            yield Decision(path, value, MISSING, "it is off")


def rule_of(path: str, rules: Mapping[str, Rule]) -> Rule | None:
    """The rule for a field: its own, or that of the nearest block around it; None if there is none."""
    while path:
        if path in rules:
            return rules[path]
        path = path.rpartition(".")[0]
    return None


def is_on(value: Any, *, auto: bool = False) -> bool:
    """Whether the value of a field asks for something. A mapping with switches ("enabled"), at any depth, is
    on if one of them is. auto: the answer for "auto".
    """
    if isinstance(value, Mapping):
        switches = list(_switches(value))
        return any(switches) if switches else bool(value)
    if isinstance(value, str):
        return auto if value == "auto" else value.lower() not in ("", "none", "no", "false")
    return bool(value)


def _switches(values: Mapping[str, Any]) -> Iterator[bool]:
    for name, value in values.items():
        if name == "enabled":
            yield is_on(value)
        elif isinstance(value, Mapping):
            yield from _switches(value)


def _shown(value: Any) -> str:
    """A value as text. Mappings are long, and may have keys that are secret."""
    return "{...}" if isinstance(value, Mapping) and value else str(value)


def _flat(values: Mapping[str, Any], blocks: set[str], before: str = "") -> Iterator[tuple[str, Any]]:
    """The path and value of each field. A mapping whose path is in `blocks` is taken apart."""
    for name, value in values.items():
        path = f"{before}{name}"
        if path in blocks and isinstance(value, Mapping):
            yield from _flat(value, blocks, f"{path}.")
        else:
            yield path, value


def one_of(path: str, value: Any, choices: Mapping[Any, Any]) -> Any:
    """What `choices` has for the value of the field at `path`. Raises ConfigError if it has nothing."""
    try:
        return choices[value]
    except (KeyError, TypeError):
        known = ", ".join(str(each) for each in choices)
        raise ConfigError(f"The field {path} is {value!r}.", f"Give one of {known}.") from None


def budget_of(paths: Iterable[str], nvme: Directories | None) -> Budget:
    """The budget with the NVMe directories of a configuration, which gives them no sizes: each gets 90% of
    what is free there, divided among directories of one file system. nvme: directories and sizes that take
    the place of `paths`; None if there are none. Raises StorageError for a directory that cannot be looked
    at.
    """
    if nvme is not None:
        return Budget(nvme=nvme)
    free = {}
    for path in dict.fromkeys(paths):
        with storage_errors("look at", path, cure=f'Make it, or give nvme={{"{path}": "400GiB"}}.'):
            free[path] = os.stat(path).st_dev, free_bytes(path)
    systems = [system for system, _ in free.values()]
    sizes: dict[str | os.PathLike[str], Size] = {
        path: room * 9 // 10 // systems.count(system) for path, (system, room) in free.items()
    }
    return Budget(nvme=sizes or None)
