"""Names: the dotted names of modules, parameters and buffers that a model has without wrappers.

torch.compile(module) and checkpoint_wrapper(module) return a module that holds the given one as a child, and
the child's name becomes a part of the names of all tensors in it. Checkpoints of the plain model do not have
that part. So wherever a name is kept or compared, it comes from this file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

_WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Names under which a wrapper of torch holds the module that it wraps."""


def plain_name(name: str) -> str:
    """Return a dotted name, or a pattern of names, without the names of wrapped modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def named_modules(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of all modules as `named_modules` does. A wrapped module has its wrapper's path,
    and comes after the wrapper.
    """
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        yield plain_name(path), module


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) for each name of each parameter."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield plain_name(name), parameter


def named_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) of all buffers."""
    for name, buffer in model.named_buffers(remove_duplicate=remove_duplicate):
        yield plain_name(name), buffer


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside all wrappers of torch.compile and checkpoint_wrapper."""
    inner = next((model._modules[name] for name in _WRAPPED if name in model._modules), None)
    return model if inner is None else unwrapped(inner)


def is_a(module: nn.Module, *classes: str) -> bool:
    """Whether the class of a module, or one of its bases, has one of these names. No library is imported."""
    return any(each.__name__ in classes for each in type(module).__mro__)


def transformers_model(model: nn.Module) -> nn.Module | None:
    """Return the outermost module of `model` that is a PreTrainedModel of transformers; None: there is none,
    or transformers is older than 5.22 and has no conversion table that can be applied group by group.

    transformers is not imported: the code that made such a model has imported it.
    """
    theirs, table = (
        sys.modules.get(f"transformers.{name}") for name in ("modeling_utils", "core_model_loading")
    )
    if theirs is None or not hasattr(table, "apply_converters"):
        return None
    return next((each for each in model.modules() if isinstance(each, theirs.PreTrainedModel)), None)
