"""Adapter files: exports a model with adapters of PEFT, merged into its base, or the adapters alone.

PEFT merges a copy of one layer at a time, and says which tensors an adapter's file has, under which names. It
is not imported here: what has made such a model has imported it.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.atomic_directory import sync
from infinity.checkpoint.safetensors_files import persistent
from infinity.checkpoint.tensor_files import Entry, in_logical_order, whole
from infinity.errors import ConfigError, InfinityError
from infinity.layout.adapters import adapter_configs, base_model, base_tensors, tuned_layers
from infinity.layout.names import is_a, plain_name, unwrapped

_CURE = (
    "Do it in RAM: runtime.close(keep=True), then model.merge_and_unload() or model.save_pretrained(path) of "
    "PEFT."
)


def merged(model: nn.Module, entries: Sequence[Entry]) -> list[Entry]:
    """Return the tensors that the model has after PEFT's merge_and_unload, under their names there.

    entries: those of `model_entries`. The active adapters are merged, with the bits that PEFT gives for these
    values and dtypes. RAM holds about three times the bytes of one layer.

    Raises ConfigError if the model has no layers with adapters, if PEFT does not allow a merge, or if a
    tensor that adapters change is tied to one that they do not. Reading the tensors raises ConfigError if
    PEFT cannot merge a layer.
    """
    if not tuned_layers(model):
        raise ConfigError(
            f"The model, a {type(unwrapped(model)).__name__}, has no layers with adapters of PEFT to merge.",
            "Leave merge=True out.",
        )
    for module in model.modules():
        if is_a(module, "BaseTuner"):
            _peft(module._check_merge_allowed, "merge the adapters")
    known = dict(zip(persistent(model), entries, strict=True))
    found: list[Entry] = []
    first: dict[int, tuple[str, tuple[str, nn.Module] | None]] = {}
    for name, tensor, wrapper in base_tensors(model):
        if id(tensor) not in known:
            continue
        before, owner = first.setdefault(id(tensor), (name, wrapper))
        if owner != wrapper:
            raise ConfigError(
                f"{before} and {name} are one tensor, and become two if adapters are merged.",
                _CURE,
            )
        if name != before:
            continue
        entry = replace(known[id(tensor)], name=name)
        if wrapper is not None:
            path, layer = wrapper
            key = name[len(path) + 1 :] if path else name
            if is_a(layer, "ModulesToSaveWrapper"):
                entry = replace(known[id(_tensors(_trained(layer))[key])], name=name)
            else:
                entry = replace(entry, parts=functools.partial(_merge, layer, key, name, known))
        found.append(entry)
    return found


def _merge(layer: Any, key: str, name: str, known: Mapping[int, Entry]) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor of a layer's base after the merge, in row-major order.

    key, name: the tensor's names in the base layer and in the model. known: the entries of tensors by id().
    """
    memo: dict[int, Any] = {}
    for tensor in _tensors(layer).values():
        if id(tensor) in known:
            real = whole(known[id(tensor)])
            memo[id(tensor)] = nn.Parameter(real, False) if isinstance(tensor, nn.Parameter) else real

    def merge() -> nn.Module:
        plain: Any = copy.deepcopy(layer, memo)  # a copy of a tensor in the memo is the tensor there
        if hasattr(plain, "unload_and_optionally_merge_module"):
            made: nn.Module = plain.unload_and_optionally_merge_module(
                merge=True, safe_merge=False, adapter_names=None
            )
            return made
        plain.merge()
        return plain.get_base_layer()  # type: ignore[no-any-return]

    with torch.no_grad():
        yield from in_logical_order(_tensors(_peft(merge, f"merge {name}"))[key])


def _trained(wrapper: Any) -> nn.Module:
    """The copy of a module that stands in its place after merge_and_unload."""
    active = wrapper.active_adapters
    copies = wrapper.modules_to_save
    return copies[active[0]] if active and active[0] in copies else wrapper.original_module  # type: ignore


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        plain_name(name): each
        for name, each in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    }


def adapter_files(model: nn.Module, entries: Sequence[Entry]) -> dict[str, tuple[Any, list[Entry]]]:
    """Return name -> (configuration, tensors) of the adapters of a model, as PEFT's save_pretrained would.

    entries: those of `model_entries`. Raises ConfigError if PEFT would write other tensors than the model's.
    """
    model = unwrapped(model)
    known: dict[int, Entry] = {}
    state: dict[str, torch.Tensor] = {}
    for registered, entry in zip(persistent(model).values(), entries, strict=True):
        blank = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        known[id(blank)] = entry
        state |= dict.fromkeys(registered.names, blank)
    prefix = "" if is_a(model, "PeftModel") else "base_model.model."
    found = {}
    configs = adapter_configs(model)
    if not configs:
        raise ConfigError(f"The model, a {type(model).__name__}, has adapters without tuned layers.", _CURE)
    for adapter, config in configs.items():

        def select(adapter: str = adapter) -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = sys.modules["peft"].get_peft_model_state_dict(
                model, state, adapter_name=adapter
            )
            return found

        tensors = _peft(select, f"list the tensors of the adapter {adapter!r}")
        if not tensors or any(id(each) not in known for each in tensors.values()):
            raise ConfigError(
                f"The file of the adapter {adapter!r} has other tensors than the model has.",
                _CURE,
            )
        found[adapter] = (
            _configuration(model, config),
            [replace(known[id(each)], name=f"{prefix}{name}") for name, each in tensors.items()],
        )
    return found


def _configuration(model: nn.Module, config: Any) -> Any:
    """The configuration of an adapter as PEFT saves it."""
    said, base = copy.copy(config), base_model(model)
    said.inference_mode = True
    said.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None)
    if config.task_type is None:
        said.auto_mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    return said


def save_configuration(config: Any, directory: Path) -> None:
    """Write adapter_config.json. Raises ConfigError if PEFT cannot."""
    _peft(functools.partial(config.save_pretrained, directory), "save the configuration of an adapter")
    for file in directory.glob("*.json"):
        sync(file)


def _peft(call: Any, what: str) -> Any:
    """Return call(). An error of PEFT becomes ConfigError."""
    try:
        return call()
    except (InfinityError, OSError):
        raise
    except Exception as error:
        raise ConfigError(
            f"PEFT could not {what}: {type(error).__name__}: {error}",
            _CURE,
        ) from error
