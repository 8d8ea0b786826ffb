"""Compiled blocks: runs all modules of one class through one graph of torch.compile.

A graph that fetches pages would break at each parameter. So all pages of a block are fetched before its graph
runs, and the graph gets views of the parameters as plain tensors. Autograd saves references to pages in place
of these views.

[Note: shells] torch.compile traces a shell of the block: modules of the same classes with the same
attributes, but with the views in place of parameters, and without hooks. The attributes are copied before
each call, so a change of the block (train(), a dropout's rate) reaches the shell, and the graph's guards.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infinity.activations.recomputation import RecomputedBlock, is_recomputed
from infinity.errors import ConfigError
from infinity.layout.names import named_modules
from infinity.layout.tiles import TiledModule
from infinity.model.hooks import Hook
from infinity.model.pager import Pager
from infinity.model.transforms import in_transform

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN = frozenset(vars(nn.Module())) - {"training", "_buffers"}
"""Names of the attributes that are not copied from a module to its shell."""


class CompiledBlock:
    """Replaces the forward of a block. A copy of the block (deepcopy, pickle) has the plain forward again."""

    def __init__(self, block: nn.Module, compiled: Callable[..., Any], pager: Pager) -> None:
        """Replace the block's forward by `compiled`, the compiled forward of its class."""
        self._block = block
        self._compiled = compiled
        self._pager = pager
        self._lock = threading.RLock()
        self._shells: dict[nn.Module, nn.Module] = {}
        self._shell = self._shell_of(block)
        self._recomputed: Any = vars(block).get("forward")
        """The RecomputedBlock that runs this one, in forward and in backward; None: there is none."""
        if self._recomputed is None:
            vars(block)["forward"] = self
        else:
            self._recomputed.inner = self

    def remove(self) -> None:
        if self._recomputed is None:
            vars(self._block).pop("forward", None)
        else:
            self._recomputed.inner = _plain(self._block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block. Raises ConfigError if it cannot be compiled, or if one of its modules has a hook."""
        if in_transform():
            return type(self._block).forward(self._block, *args, **kwargs)
        with self._lock:
            return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        self._refresh()
        places: list[tuple[dict[str, Any], str, Any]] = [
            (shell._parameters, key, parameter)
            for module, shell in self._shells.items()
            for key, parameter in module._parameters.items()
        ]
        try:
            with self._pager.views([parameter for _, _, parameter in places]) as views:
                for (place, key, _), view in zip(places, views, strict=True):
                    place[key] = view
                return self._compiled(self._shell, *args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise self._refused(error) from error
        except RuntimeError as error:
            if "dtype" in str(error) or "scalar type" in str(error):
                raise self._refused(error) from error
            raise
        finally:
            for place, key, _ in places:
                place[key] = None

    def _refused(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"torch.compile cannot make one graph of a {type(self._block).__name__}: {error}",
            "Leave the class out of runtime.compile, or change what stops it. Operands in a graph are not "
            "cast, and must have one dtype.",
        )

    def _shell_of(self, module: nn.Module) -> nn.Module:
        if module not in self._shells:
            shell = self._shells[module] = object.__new__(type(module))
            nn.Module.__init__(shell)
            for key, child in module._modules.items():
                shell._modules[key] = None if child is None else self._shell_of(child)
        return self._shells[module]

    def _refresh(self) -> None:
        for module, shell in self._shells.items():
            if shell._modules != {key: self._shells.get(each) for key, each in module._modules.items()}:  # type: ignore
                self._shells.clear()
                self._shell = self._shell_of(self._block)
                break
        for module, shell in self._shells.items():
            for name in _HOOKS if module is not self._block else ():
                if any(not isinstance(each, Hook) for each in vars(module)[name].values()):
                    raise ConfigError(
                        f"A {type(module).__name__} in a compiled {type(self._block).__name__} has a hook.",
                        "Remove the hook, or leave the block's class out of runtime.compile.",
                    )
            for name in vars(shell).keys() - vars(module).keys():
                del vars(shell)[name]
            for name, value in vars(module).items():
                if name not in _OWN and value is not self and not isinstance(value, RecomputedBlock):
                    vars(shell)[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain(memo[id(self._block)])

    def __reduce__(self) -> Any:
        return _plain, (self._block,)


def _plain(block: nn.Module) -> Any:
    return types.MethodType(type(block).forward, block)


def compile_blocks(
    model: nn.Module, kind: type[nn.Module], pager: Pager, options: dict[str, Any]
) -> list[CompiledBlock]:
    """Compile the forward of the outermost modules of class `kind` in `model`. options: of torch.compile.
    Raises ConfigError if there is no such module, or if a module's `forward` has been replaced.
    """
    paths = {path: each for path, each in named_modules(model) if type(each) is kind}
    blocks = {
        path: each
        for path, each in paths.items()
        if not any(path.startswith(f"{other}.") for other in paths if other != path)
    }
    if not blocks:
        raise ConfigError(
            f"The model has no {getattr(kind, '__name__', kind)}.", "Give the class of a module in it."
        )
    for path, block in blocks.items():
        if any(is_recomputed(each) for each in block.modules() if each is not block):
            raise ConfigError(
                f"Blocks within {path}, which is to be one graph, are recomputed in backward.",
                'Compile the class of these blocks, or give infinity.offload activations="keep".',
            )
        if "forward" in vars(block) and not is_recomputed(block):
            raise ConfigError(
                f"{path} has a forward of its own, or is compiled already.", "Leave its forward as it is."
            )
    for path, block in blocks.items():
        if any(isinstance(each, TiledModule) for each in block.modules()):
            raise ConfigError(
                f"{path} has a tiled module, whose tiles are fetched one after the other; a graph takes all "
                "parameters together.",
                "Leave out infinity.tiled for its modules, or runtime.compile() for this class.",
            )
    compiled = torch.compile(kind.forward, fullgraph=True, **options)
    return [CompiledBlock(block, compiled, pager) for block in blocks.values()]
