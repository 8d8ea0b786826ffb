"""Module hooks: the hooks that the runtime puts on a model's modules, which copies of the model do not get.

deepcopy and pickle copy hooks with their modules. So each hook is an object whose copy is a function that
does nothing, and a copied model is a plain model.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from infinity.activations.saved_tensors import has_memory
from infinity.errors import ConfigError
from infinity.formats.casts import CastOperands, InputCast, cast_sequences, hook_recomputation, hook_sequences
from infinity.layout.names import named_modules
from infinity.model.paged_parameter import PagedParameter
from infinity.model.pager import OpenCalls, Pager
from infinity.model.tiled_parameter import paged
from infinity.model.transforms import admit
from infinity.tiers.device import is_capturing

_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
"""torch.compiler.is_exporting, which torch 2.6 does not have."""


@functools.cache
def keep_out_of_graphs() -> None:
    """Make torch.compile break its graphs where the package `infinity` is called, and never trace into it.

    A graph that was traced through the package would later run without its hooks and page faults, and compute
    with wrong data. Only the first call does anything: torch then takes 80 ms to compile its regular
    expression of excluded packages.
    """
    import torch._dynamo.trace_rules as rules  # torch loads it late, when the first optimizer is made

    rules.add("infinity")


def inert(*_: Any, **__: Any) -> None:
    """Replaces a hook in a copy of the model."""


class Hook:
    """A hook that calls `function`. A copy of this object, by deepcopy or pickle, is `inert`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def __name__(self) -> Any:  # a str
        if sys._getframe(1).f_globals["__name__"].startswith("torch.jit."):  # which compiles hooks by name
            raise _traced()
        return type(self).__name__

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> Any:
        return _inert, ()


def _inert() -> Callable[..., None]:
    return inert


class RefuseDDP:
    """Replaces the list of parameters that DistributedDataParallel is to ignore. Iterating over it raises
    ConfigError, so DistributedDataParallel cannot wrap an offloaded model.
    """

    def __iter__(self) -> Any:
        raise ConfigError(
            "DistributedDataParallel was given an offloaded model, whose parameters are in pages.",
            "Use the model that was given to infinity.offload, without DistributedDataParallel.",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> list[str]:
        return []

    def __reduce__(self) -> Any:
        return list, ()


class ModuleHooks:
    """The hooks that the runtime adds to the modules of one model."""

    def __init__(
        self,
        model: nn.Module,
        pager: Pager,
        module_units: dict[str, tuple[int, ...]],
        inputs: InputCast,
        *,
        check_copy: Callable[[nn.Module], None],
        forward_done: Callable[[], None],
    ) -> None:
        """Add the hooks to the model.

        pager: fetches the pages that a module needs. module_units: path of a module -> indices of the units
        of its direct parameters. inputs: casts arguments of the model's forward. check_copy: raises an error
        if a module's state_dict does not fit in RAM. forward_done: called after each forward of the model.
        """
        keep_out_of_graphs()
        admit()
        self._model = model
        self._pager = pager
        self._inputs = inputs
        self._recomputed = OpenCalls()
        """The calls of modules that a backward has begun (torch.utils.checkpoint) and that have not ended."""
        self._casts_in_backward = False
        self._on_gpu = torch.cuda.is_available()  # asked once: each module's call would pay for it
        self._check_copy = check_copy
        self._forward_done = forward_done
        self._tree = _tree(model)
        self._handles: list[RemovableHandle] = []
        self._loading: list[RemovableHandle] = []
        """The hooks that raise ConfigError if load_state_dict() is called after closing. Without them, torch
        would raise an error that lists every parameter.
        """
        modules = dict(named_modules(model, remove_duplicate=False))
        for path, units in module_units.items():
            self._before(modules[path], self._access(units))
        self._before(model, Hook(self._enter), with_kwargs=True)
        self._handles.append(model.register_forward_hook(Hook(self._leave), always_call=True))
        self._handles += hook_sequences(model, Hook(cast_sequences))
        for module in model.modules():
            self._loading.append(module.register_load_state_dict_pre_hook(Hook(self._before_loading)))
            self._handles.append(module.register_state_dict_pre_hook(Hook(self._start_copying)))
            self._handles.append(module.register_state_dict_post_hook(Hook(self._stop_copying)))
        model._ddp_params_and_buffers_to_ignore = RefuseDDP()  # type: ignore[assignment]

    def remove(self, *, all_of_them: bool = False) -> None:
        """Remove the hooks from the model. all_of_them: also remove the hooks that make load_state_dict()
        raise after closing.
        """
        for handle in (*self._handles, *(self._loading if all_of_them else ())):
            handle.remove()
        self._handles.clear()
        self._model.__dict__.pop("_ddp_params_and_buffers_to_ignore", None)

    def _before(self, module: nn.Module, hook: Hook, *, with_kwargs: bool = False) -> None:
        handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=with_kwargs)
        self._handles.append(handle)

    def _access(self, units: Sequence[int]) -> Hook:
        wanted = list(units)

        def access(module: nn.Module, args: Any) -> None:
            self._refuse_graphs()  # also of a child that is called alone
            self._pager.access(wanted)

        return Hook(access)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._pager.refuse()
        self._refuse_graphs()
        if not _same(self._tree, _tree(self._model)):
            check_unsharded(self._model)
            raise ConfigError(
                f"{_changed(self._model, self._tree)} after it was offloaded.",
                "Change the model first, then offload it (close the runtime and offload again). Give "
                "torch.func.functional_call tensors that are no Parameters (p.detach()).",
            )
        args, kwargs = self._inputs(args, kwargs)
        for calls in (self._recomputed, self._pager.copies):
            calls.prune()  # the frame of a call that was interrupted keeps those around it, and their graphs
        CastOperands.remove_ended()
        mixed = self._inputs.mixed(args, kwargs)
        if mixed and not self._casts_in_backward:
            self._cast_in_backward()
        if self._pager.residual is not None and not self._pager.forwards:
            leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            kept = (each for each in (*leaves, *module.buffers()) if has_memory(each))
            self._pager.residual.set_aside(kept)
        self._pager.begin_forward(_caller(), self._casts() if mixed else None)
        return args, kwargs

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._pager.end_forward()
        if not self._pager.forwards:
            self._forward_done()

    def _refuse_graphs(self) -> None:
        """Raise ConfigError if operations are recorded into a graph that would run without the hooks."""
        _refuse_tracing()
        if self._on_gpu and is_capturing():
            raise ConfigError(
                "An offloaded model was called while a CUDA graph is captured, whose replay would run no "
                "hook: pages would not come, and gradients would not be taken.",
                "Leave out the capture (torch.cuda.graph, make_graphed_callables, CUDA graphs of "
                "torch.compile), or capture a plain copy of the model (copy.deepcopy(model)).",
            )

    def _casts(self) -> CastOperands:
        return CastOperands(PagedParameter, self._inputs.dtype)

    def _cast_in_backward(self) -> None:
        """Add hooks that cast operands in modules that are called again in a backward, to recompute their
        activations. Most models do not need these hooks, which cost time in every call of a module.
        """
        self._casts_in_backward = True
        self._handles += hook_recomputation(self._model, Hook(self._recompute), Hook(self._end_recompute))

    def _recompute(self, module: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            outermost = not self._recomputed
            self._recomputed.begin(_caller(), self._casts() if outermost else None)

    def _end_recompute(self, *_: Any) -> None:
        self._recomputed.end()

    def _before_loading(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        self._pager.refuse()
        for name, each in module.named_parameters(remove_duplicate=False):
            for part in paged([each]) if prefix + name in state else ():
                self._pager.edits.check(part._place.page, part._place.index)

    def _start_copying(self, module: nn.Module, *_: Any) -> None:
        if not self._pager.copying:
            self._check_copy(module)
        self._pager.copies.begin(_caller())

    def _stop_copying(self, *_: Any) -> None:
        self._pager.copies.end()


def _caller() -> FrameType:
    """Return the frame of torch's code that called the running `Hook`. That is three calls up, so only the
    Hook's function may call `_caller`.
    """
    return sys._getframe(3)


def check_unsharded(model: nn.Module) -> None:
    """Raise ConfigError if FSDP has sharded the model or a module of it, or if a parameter is a DTensor."""
    # Not imported: where FSDP has sharded a module, its package has been, and so it is with DTensors.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = {
        "FullyShardedDataParallel": getattr(fsdp, "FullyShardedDataParallel", ()),
        "fully_shard": getattr(fsdp, "FSDPModule", ()),
    }
    for path, module in model.named_modules():
        for name, kind in kinds.items():
            if isinstance(module, kind):
                raise ConfigError(
                    f"{f'The module {path} of the model' if path else 'The model'} is sharded by {name}.",
                    "Give infinity.offload the plain model: partition= says what ranks divide among them.",
                )
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for parameter_name, parameter in model.named_parameters():
        if isinstance(parameter, kind):
            raise ConfigError(
                f"The parameter {parameter_name} is a DTensor.",
                "Leave parameters plain (parameter.full_tensor()): pages are shared over one dimension of a "
                "mesh, that of mesh=.",
            )


def _tree(model: nn.Module) -> list[torch.Tensor]:
    return [
        parameter
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    ]


def _same(before: list[torch.Tensor], now: list[torch.Tensor]) -> bool:
    """Whether no Parameter was added, removed or replaced between two results of `_tree`. Other tensors in
    place of Parameters are ignored: torch.func.functional_call puts them there during a call.
    """
    if len(before) != len(now):
        return False
    changed = (new for old, new in zip(before, now, strict=True) if new is not old)
    return not any(isinstance(each, nn.Parameter) for each in changed)


def _changed(model: nn.Module, before: list[torch.Tensor]) -> str:
    """Describe the change that `_same` has found. before: the parameters at offload."""
    known = {id(each) for each in before}
    for name, each in model.named_parameters(remove_duplicate=False):
        if id(each) not in known and isinstance(each, nn.Parameter):
            return f"The parameter {name} of the model, a {type(each.data).__name__}, was added or replaced"
    return "A module or parameter of the model was added, removed or moved"


def _refuse_tracing() -> None:
    """Raise ConfigError if torch is recording operations into a graph for another program."""
    jit: Any = torch.jit  # has no types for this function
    if jit.is_tracing() or _is_exporting() or get_proxy_mode() is not None:
        raise _traced()


def _traced() -> ConfigError:
    return ConfigError(
        "An offloaded model was given to torch.export, torch.jit, make_fx or torch.func.linearize, whose "
        "graphs would keep the bytes of pages.",
        "Trace a plain copy (copy.deepcopy(model)), or what runtime.export() writes; in place of linearize, "
        "use torch.func.jvp.",
    )


def weakly(method: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return a function that calls the bound method `method` without keeping its object alive, and does
    nothing once the object is gone.

    Hooks on gradients need this: the garbage collector cannot see the references in torch's hooks.
    """
    reference = weakref.WeakMethod(method)

    def call(parameter: torch.Tensor) -> None:
        found = reference()
        if found is not None:
            found(parameter)

    return call
