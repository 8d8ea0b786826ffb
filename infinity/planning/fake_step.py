"""Fake step: runs one training step on tensors without data, to learn the bytes and the operations of a
real step.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from infinity.config import Precision
from infinity.planning.operator_timing import Operations

_UNKNOWABLE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
"""Errors that FakeTensorMode raises where a step cannot go on without the data of its tensors."""


_ATTENTION = re.compile(r"_scaled_dot_product_\w+_attention_backward")
"""A pattern for the names of attention's backward operators. On CUDA these operators sum gradients in fp32,
in memory that they take in addition to their results.
"""


@dataclass(frozen=True)
class FakeStep:
    """The memory and the operations of one forward and, in training, of its backward."""

    activations: int
    """Peak bytes of the tensors that operations allocate. Parameters, inputs and buffers do not count.

    A parameter's gradient counts until it is complete, because a real step then moves it to the gradient
    page.
    """
    operations: Operations
    """All tensor operations of the step, including those that only make views."""


def run_fake_step(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    precision: Precision,
    device: torch.device,
    train: bool,
) -> FakeStep | None:
    """Run a step under FakeTensorMode, which takes no memory and does no arithmetic. The model does not
    change.

    example_inputs: positional or keyword arguments of the model's forward. precision: gives the dtypes of
    parameters and of floating-point inputs. device: the device of the fake tensors. train: whether a
    backward follows the forward. Returns None if the step cannot be run without data, for instance because
    the model's control flow depends on data. Errors that forward itself raises, for instance for wrong
    inputs, are not caught.
    """
    args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (example_inputs, {})
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.random.fork_rng(devices=[]):
        state = dict(_fake_state(model, precision, device))
        watch = _Watch()
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda each: _fake_input(each, precision, device), (args, kwargs)
        )
        try:
            with torch.set_grad_enabled(train), watch:
                with torch.autograd.graph.saved_tensors_hooks(watch.save, _as_it_is):
                    output = functional_call(model, state, args, kwargs)
                if train:
                    _backward(output)
        except _UNKNOWABLE:
            return None
    return FakeStep(activations=watch.peak, operations=watch.operations)


def _fake_state(
    model: nn.Module, precision: Precision, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, fake tensor) for every parameter and buffer. Parameters have the dtypes of their pages.

    A hook on each trainable parameter drops its gradient as soon as the gradient is complete, because a
    real step then moves it to the gradient page.
    """
    for name, parameter in model.named_parameters():
        fake = torch.empty_strided(
            parameter.shape,
            parameter.stride(),
            dtype=precision.dtype_of(name, parameter.dtype),
            device=device,
            requires_grad=parameter.requires_grad,
        )
        if fake.requires_grad:
            hooked: Any = fake  # torch gives this method no types
            hooked.register_post_accumulate_grad_hook(_drop_gradient)
        yield name, fake
    for name, buffer in model.named_buffers():
        yield name, torch.empty_like(buffer, device=device)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _fake_input(tensor: torch.Tensor, precision: Precision, device: torch.device) -> torch.Tensor:
    dtype = precision.compute_dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty_like(tensor, dtype=dtype, device=device).requires_grad_(tensor.requires_grad)


def _backward(output: Any) -> None:
    leaves = [
        leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if leaves:
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])


class _Watch(TorchDispatchMode):
    """A dispatch mode that records all operations, and counts the bytes of the storages that operations
    made and that are still alive. The attribute `now` is the present number of bytes, and `peak` the
    largest number so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.operations = Operations()
        self._seen = WeakIdKeyDictionary()
        self._saving = False

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a detached alias of `tensor`, for autograd to save instead of `tensor`.

        If autograd saved `tensor` itself, its graph and the tensor would keep each other alive, and the
        bytes of the tensor would be counted for ever.
        """
        self._saving = True
        try:
            return tensor.detach()
        finally:
            self._saving = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._saving:  # this operation is not the model's
            return func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        for storage in _storages(leaves):
            self._seen[storage] = None  # made outside of the step, or counted before
        result = func(*args, **(kwargs or {}))
        self.operations.record(func, args, kwargs or {}, result)
        for storage in _storages(pytree.tree_leaves(result)):
            if storage not in self._seen:
                self._seen[storage] = None
                self._made(storage)
        self._scratch(func, result)
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        self._grow(storage.nbytes())
        weakref.finalize(storage, self._grow, -storage.nbytes()).atexit = False

    def _scratch(self, func: Any, result: Any) -> None:
        """Let `peak` include memory that the operator `func` allocates and frees again within its call.

        Only the backward operators of attention on CUDA do so: they sum the gradients that they return in
        an fp32 copy. result: what the operator returned, a tree of tensors.
        """
        if _ATTENTION.fullmatch(func.overloadpacket.__name__):
            gradients = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
            nbytes = 4 * sum(each.numel() for each in gradients if each.device.type == "cuda")
            self._grow(nbytes)
            self._grow(-nbytes)

    def _grow(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _storages(leaves: Iterable[Any]) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]
