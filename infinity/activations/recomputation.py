"""Recomputed blocks: blocks of a model that keep only their inputs for backward, and run again in it.

A block runs within torch.utils.checkpoint (non-reentrant), which restores torch's random numbers and autocast
for the second run. The block's `forward` is replaced, not its call, so its own hooks run once, and those of
the modules in it twice.

[Note: blocks that are left alone] A second run must compute what the first one did, and change nothing. So a
block is not recomputed if its forward changes a buffer or an attribute (running statistics, a table that is
filled at first use), if it changes its arguments, or if it gets objects that it might change, such as a cache
of keys and values. Nor is a block that is compiled, or that the model itself recomputes: once is enough. What
a block does is seen in a step without data (`observed`). Without one, modules with running statistics are
known, an unknown object has the call run as usual, and a changed buffer or argument raises ConfigError.
"""

from __future__ import annotations

import copy
import enum
import itertools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from infinity.activations import autograd_hooks
from infinity.activations.saved_tensors import SavedTensors, hooks_are_allowed
from infinity.errors import ConfigError
from infinity.formats.casts import CastOperands
from infinity.layout.names import named_modules
from infinity.layout.units import BLOCK_LISTS
from infinity.planning.fake_step import Ledger
from infinity.planning.predict import Work
from infinity.planning.residual_states import BY_ITSELF

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (tuple, list, dict)
_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, nn.Module),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, types.FunctionType, types.MethodType),
)
"""Types of arguments that a block can only read."""

_OF_TORCH = frozenset(nn.Module().__dict__)

Saving = Callable[[], AbstractContextManager[None]]
"""Function that returns a context with hooks on saved tensors."""


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that the model repeats, such as a decoder's layers, by path and in the model's order.

    A block is a direct child of an nn.ModuleList, nn.Sequential or nn.ModuleDict, has children itself, and
    has a sibling of the same type. Lists of modules are no blocks, nor are modules inside a block.
    """
    paths = {module: path for path, module in reversed(list(named_modules(model)))}
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, BLOCK_LISTS):
            continue
        children = [each for each in module.children() if next(each.children(), None) is not None]
        children = [each for each in children if not isinstance(each, _NEVER_CALLED)]
        types_of = [type(each) for each in children]
        for child in children:
            if types_of.count(type(child)) > 1 and child not in inside:
                found[paths[child]] = child
                inside.update(child.modules())
    return found


def obstacle(block: nn.Module) -> str | None:
    """Why a block must not be recomputed, as far as its modules tell, such as "is compiled"; or None."""
    for module in block.modules():
        if isinstance(getattr(module, "running_mean", None), torch.Tensor):
            return f"has running statistics ({type(module).__name__})"
        if "dynamo_ctx" in vars(module) or module._compiled_call_impl is not None:
            return "is compiled"
        if "_checkpoint_wrapped_module" in module._modules or getattr(
            module, "gradient_checkpointing", False
        ):
            return BY_ITSELF
    return None


class RecomputedBlock:
    """Replaces the forward of a block by one whose activations are recomputed in backward. A copy of the
    block (deepcopy, pickle) has the plain forward again.
    """

    def __init__(self, name: str, block: nn.Module, saving: Saving, warned: set[type]) -> None:
        """Replace the block's forward. name: its path in the model. saving: as in `recompute`. warned: the
        classes of arguments of which the model's user was told; blocks of one model share this set.
        """
        self._name = name
        self._block = block
        self._own: Callable[..., Any] | None = vars(block).get("forward")
        self._saving = saving
        self._buffers = _Buffers(block)
        self._warned = warned
        self.inner: Callable[..., Any] = block.forward
        """The forward that is recomputed: the block's own, or one that is compiled."""
        vars(block)["forward"] = self

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.inner  # for inspect.signature

    def remove(self) -> None:
        """Give the block the forward that it had."""
        if vars(self._block).get("forward") is self:
            del vars(self._block)["forward"]
            if self._own is not None:
                vars(self._block)["forward"] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block. Its activations are kept where no graph is made, within torch.func's transforms, in
        a backward, and where code around the block recomputes it already. Raises ConfigError if the block
        changes a buffer or an argument; see [Note: blocks that are left alone].
        """
        if not _is_first_run() or _is_checkpointed():
            return self.inner(*args, **kwargs)
        call = _Call(self.inner, args, kwargs, self._saving)
        if call.unknown is not None:
            self._warn(call.unknown)
            return self.inner(*args, **kwargs)
        tensors = call.tensors
        buffers, versions = self._buffers.versions, _versions(tensors)
        result = checkpoint(call, *tensors, use_reentrant=False)
        if self._buffers.versions != buffers:
            raise self._refused(f"its buffer {self._buffers.changed(buffers)}")
        if _versions(tensors) != versions:
            raise self._refused("a tensor that it is called with")
        return result

    def _warn(self, unknown: object) -> None:
        if type(unknown) not in self._warned:
            self._warned.add(type(unknown))
            warnings.warn(
                f"{self._name}, and blocks that are called alike, are not recomputed in backward: each "
                f'{_met(unknown)}. activations="keep" recomputes nothing.',
                stacklevel=2,
            )

    def _refused(self, what: str) -> ConfigError:
        return ConfigError(
            f"The block {self._name} changes {what}, and would do so again where backward recomputes it.",
            'Give infinity.offload example_inputs=, to leave such blocks alone, or activations="keep".',
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        return _plain(memo[id(self._block)])

    def __reduce__(self) -> Any:
        return (_plain, (self._block,)) if self._own is None else (_same, (self._own,))


def _plain(block: nn.Module) -> Any:
    return types.MethodType(type(block).forward, block)


def _same(forward: Any) -> Any:
    return forward


def recompute(model: nn.Module, names: Iterable[str], saving: Saving = nullcontext) -> list[RecomputedBlock]:
    """Have blocks recomputed, until `remove` of each result is called. Blocks that are recomputed already are
    left out.

    names: paths of blocks, as in `blocks_of`. saving: function that returns a context for both runs of a
    block, with hooks on saved tensors. Without those of a pager, views of pages that a block makes are kept
    from its second run to the end of its backward.
    """
    blocks = blocks_of(model)
    wanted = [name for name in names if not is_recomputed(blocks[name])]
    warned: set[type] = set()
    return [RecomputedBlock(name, blocks[name], saving, warned) for name in wanted]


@contextmanager
def recomputing(model: nn.Module, names: Iterable[str], saving: Saving = nullcontext) -> Iterator[None]:
    """Context in which blocks are recomputed. The arguments are those of `recompute`."""
    with ExitStack() as ends:
        for each in recompute(model, names, saving):
            ends.callback(each.remove)
        yield


def is_recomputed(block: nn.Module) -> bool:
    """Whether a block's forward is that of a RecomputedBlock."""
    return isinstance(vars(block).get("forward"), RecomputedBlock)


def _is_first_run() -> bool:
    """Whether autograd makes a graph here that a later backward may use."""
    return (
        torch.is_grad_enabled()
        and torch._C._current_graph_task_id() == -1
        and torch._C._functorch.peek_interpreter_stack() is None
        and hooks_are_allowed()
    )


def _is_checkpointed() -> bool:
    """Whether this is a forward or a recomputation within torch.utils.checkpoint (non-reentrant)."""
    pair = autograd_hooks.top()
    while pair is not None:
        hooks = getattr(pair[0], "__self__", None)
        if not isinstance(hooks, SavedTensors):
            return autograd_hooks.recomputes(pair)
        pair = hooks.outer
    return False


class _Call:
    """One call of a block. After its first run it holds no tensors: torch.utils.checkpoint has them."""

    def __init__(
        self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any], saving: Saving = nullcontext
    ) -> None:
        """forward: function that is called in both runs; in the first one with these arguments themselves.
        saving: as in `recompute`.
        """
        self._forward = forward
        self._saving = saving
        self._given: tuple[Any, Any] | None = (args, kwargs)
        self._casts = CastOperands.active()
        leaves, self._structure = _leaves(args, kwargs)
        self.unknown = next(
            (each for each in leaves if not isinstance(each, (torch.Tensor, *_CONSTANTS))), None
        )
        """An argument that the block may change; None: there is none."""
        found = {id(each): each for each in leaves if isinstance(each, torch.Tensor)}
        self.tensors = list(found.values())
        """The tensors among the arguments, each once."""
        numbers = {key: number for number, key in enumerate(found)}
        self._leaves = [None if id(each) in found else each for each in leaves]
        self._places = [(place, numbers[id(each)]) for place, each in enumerate(leaves) if id(each) in found]

    def __call__(self, *tensors: Any) -> Any:
        """Run the block with the tensors of its arguments. Called first in forward, and then in backwards."""
        given, self._given = self._given, None
        if given is not None:
            self.tensors = []
            args, kwargs = given
            with self._saving():
                return self._forward(*args, **kwargs)
        leaves = list(self._leaves)
        for place, number in self._places:
            leaves[place] = tensors[number]
        args, kwargs = tree_unflatten(leaves, self._structure)
        with ExitStack() as stack:
            for each in self._casts:
                stack.enter_context(each.again())
            stack.enter_context(self._saving())
            return self._forward(*args, **kwargs)


def _leaves(args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """(arguments in tuples, lists and dicts of any depth, the structure of these containers)."""
    return tree_flatten((args, kwargs), is_leaf=lambda each: not isinstance(each, _CONTAINERS))


def _met(unknown: object) -> str:
    name = type(unknown).__name__
    cure = " (call the model with use_cache=False)" * name.endswith("Cache")
    return f"is called with a {name}, which it may change{cure}"


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():  # a paged parameter's page is not needed
        return [each._version for each in tensors if not each.is_inference()]


class _Buffers:
    """The buffers of a block, and what tells that one has changed."""

    def __init__(self, block: nn.Module) -> None:
        self._held = [(path, each._buffers) for path, each in block.named_modules() if each._buffers]

    @property
    def versions(self) -> list[tuple[int, int]]:
        """(id, version counter) of each buffer."""
        found = (each for _, buffers in self._held for each in buffers.values())
        return [(id(each), 0 if each is None or each.is_inference() else each._version) for each in found]

    def changed(self, before: list[tuple[int, int]]) -> str:
        """The name of the first buffer that differs from `before`, a value of `versions`."""
        names = [f"{path}.{name}" if path else name for path, held in self._held for name in held]
        pairs = itertools.zip_longest(names, before, self.versions)
        return str(next((name for name, old, new in pairs if old != new), "list"))


# --- what blocks do ---------------------------------------------------------------------------------------


@dataclass
class BlockFacts:
    """What a step without data has seen of one block."""

    reason: str | None = None
    """Why the block must not be recomputed, such as "changes its buffer calls"; None: it may be."""
    nbytes: int = 0
    """Bytes that its forwards have left in use: activations and results."""
    calls: int = 0
    """The number of its forwards."""
    before: int = 0
    """The most bytes that the step has had in use before the block's last second run, and after the second
    run of the block before that in the backward, or since the beginning; 0 if it is not recomputed.
    """
    work: Work = field(default_factory=lambda: Work({}, 0))
    """The work of its forwards."""
    saved: int = 0
    """Bytes of all residual pages that the step had saved at the end of the last of them."""


@contextmanager
def observed(
    model: nn.Module, names: Iterable[str], ledger: Ledger, again: Iterable[str], saved: Callable[[], int]
) -> Iterator[dict[str, BlockFacts]]:
    """Context in which the blocks `again` are recomputed. Yields a dict, name -> facts, of those of the
    blocks `names` that are called in it, in the order of their first calls. ledger: of the step that runs in
    the context. saved: function that returns the bytes of all residual pages that the step has saved.
    """
    facts: dict[str, BlockFacts] = {}
    blocks = blocks_of(model)
    with ExitStack() as ends:
        for name in names:
            before = vars(blocks[name]).get("forward")
            vars(blocks[name])["forward"] = _Observed(name, blocks[name], facts, ledger, saved)
            ends.callback(_put_back, blocks[name], before)
        ends.enter_context(recomputing(model, again))
        yield facts


def _put_back(block: nn.Module, forward: Any) -> None:
    del vars(block)["forward"]
    if forward is not None:
        vars(block)["forward"] = forward


class _Observed:
    """A block's forward that notes facts on the block."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        facts: dict[str, BlockFacts],
        ledger: Ledger,
        saved: Callable[[], int],
    ) -> None:
        self._name, self._block, self._facts, self._ledger = name, block, facts, ledger
        self._saved = saved
        self._forward = block.forward
        self._buffers = _Buffers(block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        facts = self._facts.setdefault(self._name, BlockFacts())
        if not _is_first_run():
            facts.before = self._ledger.mark()
            return self._forward(*args, **kwargs)
        facts.calls += 1
        nbytes, work = self._ledger.now, self._ledger.work
        result, reason = self._run(args, kwargs)
        facts.reason = facts.reason or reason
        facts.nbytes += self._ledger.now - nbytes
        facts.work = facts.work + (self._ledger.work - work)
        facts.saved = self._saved()
        return result

    def _run(self, args: Any, kwargs: Any) -> tuple[Any, str | None]:
        """Run the block. Returns (its result, why it must not be recomputed)."""
        around, call, look = _is_checkpointed(), _Call(self._forward, args, kwargs), _LookForCheckpoints()
        tensors, attributes, buffers = call.tensors, attributes_of(self._block), self._buffers.versions
        versions = _versions(tensors)
        with look:
            result = self._forward(*args, **kwargs)
        name, reason = changed_attribute(self._block, attributes), None
        if around or look.found or _has_reentrant(result, tensors):
            reason = BY_ITSELF
        elif call.unknown is not None:
            reason = _met(call.unknown)
        elif self._buffers.versions != buffers:
            reason = f"changes its buffer {self._buffers.changed(buffers)}"
        elif name is not None:
            reason = f"changes its attribute {name}"
        elif _versions(tensors) != versions:
            reason = "changes a tensor that it is called with"
        return result, reason


class _LookForCheckpoints(TorchDispatchMode):
    """Notes whether an operation runs within torch.utils.checkpoint (non-reentrant)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or _is_checkpointed()
        return func(*args, **(kwargs or {}))


def _has_reentrant(result: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the graph of a block's results has a node of a reentrant torch.utils.checkpoint. tensors: those
    with which the block was called, where its graph begins.
    """
    seen = {each.grad_fn for each in tensors}
    left = [each.grad_fn for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        left += [each for each, _ in node.next_functions]
    return False


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """All attributes and buffers of a module and of the modules in it, by dotted name, without parameters and
    without the attributes that torch keeps on every module.
    """
    found: dict[str, Any] = {}
    for path, each in module.named_modules():
        for name, value in itertools.chain(each.__dict__.items(), each._buffers.items()):
            if name not in _OF_TORCH and name != "forward":
                found[f"{path}.{name}" if path else name] = value
    return found


def changed_attribute(module: nn.Module, before: dict[str, Any]) -> str | None:
    """Return the name of the first attribute that is new or differs from `before`, a result of
    `attributes_of`; or None. Edits of a value in place are not noticed.
    """
    for name, value in attributes_of(module).items():
        if name not in before:
            return name
        old = before[name]
        simple = isinstance(value, (bool, int, float, str)) and type(old) is type(value)
        if old is not value and not (simple and old == value):
            return name
    return None
