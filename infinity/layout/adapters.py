"""Adapters: tells PEFT's adapters from the modules of the base model, and finds the names that tensors have
in the base model.

PEFT wraps a model (PeftModel, then a BaseTuner), each layer that it adapts (BaseTunerLayer), and each module
that is trained as a whole (ModulesToSaveWrapper). A wrapper holds what it wraps as one child, and adapters as
its other children. PEFT is not imported: its classes are known by their names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from infinity.config import Precision
from infinity.layout.names import is_a, plain_name

_WRAPPERS = {
    "PeftModel": "base_model",
    "BaseTuner": "model",
    "BaseTunerLayer": "base_layer",
    "AuxiliaryTrainingWrapper": "original_module",
}
"""Name of a class of PEFT -> name of the child that it wraps."""


def has_adapters(model: nn.Module) -> bool:
    """Whether a model or a module in it has adapters of PEFT: is a PeftModel, a tuner or a layer of PEFT, or
    a model of transformers after add_adapter().
    """
    return any("peft_config" in vars(each) or is_a(each, *_WRAPPERS) for each in model.modules())


def tuned_layers(model: nn.Module) -> list[Any]:
    """The layers of PEFT in `model` that have adapters, in the order of model.modules()."""
    return [each for each in model.modules() if is_a(each, "BaseTunerLayer")]


def adapter_configs(model: nn.Module) -> dict[str, Any]:
    """The configurations of all adapters by name, in the order in which they were added."""
    found: dict[str, Any] = {}
    for module in model.modules():
        configs = vars(module).get("peft_config")
        found |= configs if isinstance(configs, dict) else {}
    return found


def base_modules(
    module: nn.Module, name: str | None = "", wrapper: tuple[str, nn.Module] | None = None
) -> Iterator[tuple[str | None, nn.Module, tuple[str, nn.Module] | None]]:
    """Yield (name, module, wrapper) for each place of `module` and of its descendants, parents first.

    The yielded name is the module's name in the base model, without PEFT's wrappers; None for adapters. The
    yielded wrapper is (name, module) of the outermost layer or trained module of PEFT that contains the
    place; None outside of all. The arguments name and wrapper are those of `module` itself.
    """
    inner = next((child for kind, child in _WRAPPERS.items() if is_a(module, kind)), None)
    if wrapper is None and name is not None and is_a(module, "BaseTunerLayer", "AuxiliaryTrainingWrapper"):
        wrapper = name, module
    yield name, module, wrapper
    for key, child in module._modules.items():
        if child is not None:
            under = plain_name(f"{name}.{key}").removeprefix(".") if inner is None else name
            adapter = name is None or inner not in (None, key)
            yield from base_modules(child, None if adapter else under, wrapper)


def base_tensors(
    model: nn.Module,
) -> Iterator[tuple[str, torch.Tensor, tuple[str, nn.Module] | None]]:
    """Yield (name, tensor, wrapper) for each place of each parameter and buffer of the base model of `model`.

    Names and wrappers are those of `base_modules`.
    """
    for name, module, wrapper in base_modules(model):
        tables: tuple[Any, ...] = (module._parameters, module._buffers)
        for table in tables if name is not None else ():
            for key, tensor in table.items():
                if tensor is not None:
                    yield f"{name}.{key}" if name else key, tensor, wrapper


def base_names(model: nn.Module) -> dict[int, list[str]]:
    """Return id(tensor) -> the tensor's names in the base model, for all parameters and buffers except
    adapters.
    """
    found: dict[int, list[str]] = {}
    for name, tensor, _ in base_tensors(model):
        found.setdefault(id(tensor), []).append(name)
    return found


def base_model(model: nn.Module) -> nn.Module:
    """Return the model that was given to PEFT, without the wrappers that PEFT put around the whole model."""
    return [module for name, module, _ in base_modules(model) if name == ""][-1]


def keep_adapters(precision: Precision, model: nn.Module) -> Precision:
    """Return `precision` with patterns that keep the adapters in the layers of `model` in fp32."""
    names = {
        f"*.{key}.*"
        for layer in tuned_layers(model)
        for key, child in layer.named_children()
        if key != "base_layer" and any(True for _ in child.parameters())
    }
    return dataclasses.replace(precision, keep=(*precision.keep, *sorted(names))) if names else precision
