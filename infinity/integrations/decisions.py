"""Decisions: what happens to each field of another library's configuration, and their table."""

from __future__ import annotations

import difflib
import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.errors import ConfigError, storage_errors
from infinity.planning.plan_text import render

TAKEN = "taken"
"""The field is part of the result."""
IGNORED = "ignored"
"""The field changes no result of training: the plan decides it, or there is nothing to decide."""
ELSEWHERE = "said otherwise"
"""Another call sets the value."""
MISSING = "not there"
"""This package has no equivalent, and training has the same result without it."""
REFUSED = "refused"
"""This package has no equivalent, and training would have another result: ConfigError unless it is off."""

OPEN = "auto: comes from your trainer"


@dataclass(frozen=True)
class FieldDecision:
    field: str
    """The path of the field in the configuration, with dots."""
    value: Any
    decision: str
    """TAKEN, IGNORED, ELSEWHERE or MISSING."""
    why: str
    """The reason, the argument that the field sets, or the call that sets it here."""


@dataclass(frozen=True)
class ConvertedConfig:
    """Another library's configuration, converted for this package. `str()` is the table of decisions."""

    offload: dict[str, Any]
    """Keyword arguments for `infinity.offload`. Missing are those whose fields are "auto"."""
    clip: float | None
    """The max_norm for `Runtime.clip_grad_norm_`; None: no clipping, or the field is "auto"."""
    optimizer: tuple[str, dict[str, Any]] | None
    """(name of a class of torch.optim, or "Lion" for lion-pytorch's, its options); None without an
    optimizer.
    """
    decisions: tuple[FieldDecision, ...]
    """The decision on each field, in the order of the configuration."""

    @property
    def open(self) -> tuple[str, ...]:
        """The fields that would be TAKEN, but are "auto": the trainer sets them."""
        return tuple(each.field for each in self.decisions if each.why == OPEN)

    def build_optimizer(self, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        """Make the optimizer of the configuration.

        parameters: as for any optimizer of torch. options: options of the optimizer, which take precedence
        over those of the configuration. Raises ConfigError if the configuration has no optimizer, if an
        option that is "auto" there is not given, or if Lion's package is not installed.
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
        package = _package("lion_pytorch", "lion-pytorch") if name == "Lion" else torch.optim
        made: torch.optim.Optimizer = getattr(package, name)(parameters, **{**known, **options})
        return made

    def __str__(self) -> str:
        rows, last = [], ""
        for each in self.decisions:
            block, _, name = each.field.rpartition(".")
            if block not in ("", last):
                rows.append((block, "", "", ""))
            rows.append((f"  {name}" if block else name, _shown(each.value), each.decision, each.why))
            last = block
        titles = ("field", "value", "decision", "why")
        return render([dict(zip(titles, row, strict=True)) for row in rows], words=True)


def read_rules(file: str) -> dict[str, tuple[str, str]]:
    """Return path of a field -> (decision, reason), from a table beside this module.

    The table's first line is a title. An indented line continues the row before it. In a row, a path that
    ends in "." is put before the paths that follow it, up to the next such path; "." alone ends this.
    """
    rules = {}
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    for row in text.replace("\n ", " ").splitlines()[1:]:
        decision, why, paths = (cell.strip() for cell in row.split("|"))
        before = ""
        for path in paths.split():
            if path.endswith("."):
                before = path.removeprefix(".")
            else:
                rules[before + path] = decision, why
    return rules


def decide(
    values: Mapping[str, Any], rules: Mapping[str, tuple[str, str]], source: str
) -> Iterator[FieldDecision]:
    """Yield the decision on each field of a configuration, in the configuration's order.

    values: nested mappings. rules: from `read_rules`. A block that has a rule, and whose fields have none,
    counts as one field. source: the name of the library, for errors. Raises ConfigError for a field without
    a rule, and for a field that is REFUSED and turned on.
    """
    blocks = {path[:end] for path in rules for end, letter in enumerate(path) if letter == "."}
    for path, value in _flat(values, blocks):
        block = path.rpartition(".")[0]
        if path not in rules and path in blocks:
            if value is None:
                continue
            raise ConfigError(f"The field {path} is {value!r}.", "Give its block of fields, or remove it.")
        if path not in rules:
            nearest = difflib.get_close_matches(path, rules, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"The field {path} of the configuration is not one of {source}'s.",
                f"The nearest is {nearest}: correct the name, or remove the field.",
            )
        decision, why = rules[path]
        switch = values[block].get("enabled") if f"{block}.enabled" in rules else True
        if not (is_on(switch) or switch == "auto"):
            decision, why = IGNORED, f"{block} is off"
        elif decision == REFUSED:
            # A size of 1 divides nothing among ranks.
            if is_on(value) and not (path.endswith("_size") and value == 1):
                raise ConfigError(
                    f"The configuration asks for {path} ({_shown(value)}), which infinity does not have, "
                    "and without which training has another result.",
                    why,
                )
            decision, why = MISSING, "it is off"
        elif decision == TAKEN and value == "auto":
            why = OPEN
        yield FieldDecision(path, value, decision, why)


def is_on(value: Any) -> bool:
    """Whether the value of a field turns something on. A mapping with switches ("enabled"), at any depth, is
    on if one of them is.
    """
    if isinstance(value, Mapping):
        switches = [each for path, each in _flat(value, None) if path.rpartition(".")[2] == "enabled"]
        return any(map(is_on, switches)) if switches else bool(value)
    if isinstance(value, str):
        return value.lower() not in ("", "auto", "none", "no", "false")
    return bool(value)


def _flat(values: Mapping[str, Any], blocks: set[str] | None, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each field. blocks: the paths of mappings to descend into; None: all."""
    for name, value in values.items():
        path = f"{before}{name}"
        if isinstance(value, Mapping) and (blocks is None or path in blocks):
            yield from _flat(value, blocks, f"{path}.")
        else:
            yield path, value


def _shown(value: Any) -> str:
    """A value as text. Mappings are long, and may have keys that are secret."""
    return "{...}" if isinstance(value, Mapping) and value else str(value)


def one_of(path: str, value: Any, choices: Mapping[Any, Any]) -> Any:
    """Return choices[value]. Raises ConfigError, which names the field `path`, for any other value."""
    try:
        return choices[value]
    except (KeyError, TypeError):
        known = ", ".join(str(each) for each in choices)
        raise ConfigError(f"The field {path} is {value!r}.", f"Give one of {known}.") from None


def read_mapping(path: str | os.PathLike[str], language: str = "JSON") -> dict[str, Any]:
    """Read the mapping in a file. language: "JSON" or "YAML", which needs the package pyyaml. Raises
    StorageError if the file cannot be read, and ConfigError if it has no mapping.
    """
    name, yaml = os.fspath(path), _package("yaml", "pyyaml") if language == "YAML" else None
    wrong = yaml.YAMLError if yaml else ValueError
    try:
        with storage_errors("read", path), open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file) if yaml else json.load(file, object_pairs_hook=_once)
    except (wrong, ValueError) as error:
        raise ConfigError(f"{name} is not {language}: {error}.", f"Give a file of {language}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name} holds no configuration.", "Give a file that has fields by name.")
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return `pairs` as a dict. Raises ConfigError for a repeated name, which json would accept."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"The configuration has the field {name} twice.", "Remove one of them.")
    return dict(pairs)


def _package(module: str, name: str) -> Any:
    """Import the module of another package. name: the package's name for pip. Raises ConfigError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"The package {name} is not installed.", f"Run `pip install {name}`.") from error
