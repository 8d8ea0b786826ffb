"""Fake step: one training step on tensors without data, to learn the bytes and the work of a real step."""

from __future__ import annotations

import functools
import re
import signal
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from infinity.config import Precision, round_up
from infinity.formats.casts import CastOperands, InputCast, cast_sequences, hook_recomputation, hook_sequences
from infinity.losses.pieces import times
from infinity.planning.fake_model import CannotCopy, Copier, fake_model, same_generators, same_globals
from infinity.planning.predict import Work
from infinity.tiers.link import is_direct

_UNKNOWABLE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
"""Errors that FakeTensorMode raises where a step needs the data of its tensors."""


class Ledger(Protocol):
    """What a step has taken and done so far."""

    now: int
    """Bytes that the step's operations have allocated and that are in use."""

    @property
    def work(self) -> Work:
        """The work of all operations so far."""

    def mark(self) -> int:
        """Return the largest value of `now` since the last call of this method."""


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
_LONGEST = 300
"""Number of characters after which a reason is cut."""

_ATTENTION = re.compile(r"_scaled_dot_product_\w+_attention(_for_cpu)?_backward")
"""Operators that, on CUDA, sum gradients in fp32, in memory beside their results."""


@dataclass(frozen=True)
class FakeStep:
    """The memory and the work of one forward and, in training, of its backward."""

    activations: int | None
    """Peak bytes of the tensors that operations allocate; None if the step could not be run. Parameters,
    inputs and buffers do not count. A parameter's gradient counts until it is complete, because a real step
    then moves it to the gradient page.
    """
    work: Work
    unknown: str | None = None
    """Why the step could not be run; None if it was run."""


@dataclass(frozen=True)
class FakeMemory:
    """What a pair of saved-tensor hooks has to know of a step without data."""

    aside: Sequence[torch.Tensor]
    """Parameters, buffers and inputs, whose memory others keep."""
    save: Callable[[torch.Tensor], torch.Tensor]
    """Function that returns an alias of a tensor, for autograd to save."""
    uncounted: Callable[[int, torch.device], torch.Tensor]
    """Function (nbytes, device) that makes memory, uint8 (nbytes,), which operations do not allocate."""


Saving = Callable[[FakeMemory], tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]]
"""Function that makes the saved-tensor hooks (pack, unpack) of a step without data."""


def _keep(memory: FakeMemory) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    return memory.save, lambda tensor: tensor


def run_fake_step(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    precision: Precision,
    device: torch.device,
    train: bool,
    within: Callable[[nn.Module, Ledger], AbstractContextManager[Any]] = lambda model, ledger: nullcontext(),
    saving: Saving = _keep,
    add_up: Callable[[Any, Sequence[torch.Tensor], int], None] | None = None,
) -> FakeStep:
    """Run a step of a copy of the model under FakeTensorMode, which takes no memory and does no arithmetic.

    The model does not change, nor do its hooks, its attributes, the inputs or any random number generator.

    example_inputs: positional or keyword arguments of the model's forward. device: if it is a CUDA device
    that torch cannot use, the step has the CPU's operators, which may take more or fewer bytes for attention.
    train: whether a backward follows. within: function that takes the copy and the ledger of the step, and
    returns the context in which the step runs, such as one in which blocks are recomputed. saving: makes the
    saved-tensor hooks of the forward; by default what autograd saves stays. add_up: adds up the gradients of
    tied tiles away from the device (infinity/gradients/tile_sums.py); None: they stay. A model that cannot be
    copied, or a step that cannot be run, raises no error: `FakeStep.unknown` tells the reason. If the model's
    forward fails, for instance for wrong inputs, the first real forward raises that error.
    """
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    watch = _Watch(mode, scratch=device.type == "cuda")
    if add_up is not None:
        add_up = functools.partial(add_up, _Away(waits=not is_direct(device)))
    if not torch.cuda.is_available():
        device = torch.device("cpu")  # autograd would end the process
    unknown = None
    try:
        with _signals_wait(), same_generators(), _quiet(), torch.compiler.set_stance("force_eager"):
            with mode:
                fake, copier = fake_model(model, mode, precision, device, add_up)
                inputs = InputCast(model, precision, warn=False)
                args, kwargs = inputs(*_fake_inputs(example_inputs, device))
                hook_sequences(fake, cast_sequences)
                mixed = inputs.mixed(args, kwargs)
            casts = CastOperands(nn.Parameter, precision.compute_dtype if mixed else None)
            _cast_in_backward(fake, casts)
            with same_globals(copier), within(fake, watch), mode, watch, casts:
                _step(fake, args, kwargs, watch, train=train, saving=saving)
    except Exception as error:
        unknown = _reason(error)
    finally:
        watch.restore_gradients()
    if unknown is not None:
        return FakeStep(None, Work({}, 0), unknown)
    return FakeStep(activations=watch.peak, work=watch.work)


class _Away:
    """Implements infinity.gradients.tile_sums.Away for a step without data."""

    def __init__(self, *, waits: bool) -> None:
        """waits: whether copies go on after `put`, so that the newest gradient is kept."""
        self._waits = waits
        self._going: torch.Tensor | None = None

    def put(self, gradient: torch.Tensor) -> bool:
        self._going = gradient if self._waits else None
        return True

    def get(self, there: bool, like: torch.Tensor) -> torch.Tensor:
        self._going = None
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _step(
    model: nn.Module, args: Any, kwargs: Any, watch: _Watch, *, train: bool, saving: Saving = _keep
) -> None:
    hooks = saving(watch.memory(model, args, kwargs))
    with torch.set_grad_enabled(train):
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            output = model(*args, **kwargs)
        if train:
            watch.forward = watch.work
            _backward(output)


def _cast_in_backward(model: nn.Module, casts: CastOperands) -> None:
    """Have modules enter `casts` if they run within a backward, as under torch.utils.checkpoint."""
    entered = []

    def begin(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            casts.__enter__()  # type: ignore[no-untyped-call]
            entered.append(casts)

    def end(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    hook_recomputation(model, begin, end)


def _reason(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, CannotCopy):
        text = line
    elif isinstance(error, _UNKNOWABLE):
        text = f"the model needs values of tensors, and a dry run has none ({line})"
    else:
        text = f"the dry run ended with {type(error).__name__}: {line}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Context that delays Ctrl-C, SIGTERM and SIGALRM to its end; a second signal of the same kind is handled
    at once. If a handler raised an error within Python code to which torch dispatches operations, the process
    might end (std::terminate).
    """
    came: list[int] = []

    def arrived(number: int, frame: FrameType | None) -> None:
        if number in came:
            handlers[number](number, frame)
        came.append(number)

    main = threading.current_thread() is threading.main_thread()  # others can set no handler, and get none
    found = {number: signal.getsignal(number) for number in _SIGNALS if main}
    handlers: dict[int, Any] = {number: handler for number, handler in found.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, arrived)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress FakeTensorMode's log of errors, and all warnings, within a context. The first real forward
    gives the warnings again.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, fake_tensor.log.disabled = fake_tensor.log.disabled, True
        try:
            yield
        finally:
            fake_tensor.log.disabled = before


def _fake_inputs(
    example_inputs: tuple[Any, ...] | Mapping[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the inputs with fake tensors in new containers, as (positional, keyword arguments)."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device).requires_grad_(tensor.requires_grad)

    copier = Copier(fake)
    if isinstance(example_inputs, Mapping):
        return (), copier.copy(dict(example_inputs))
    if not isinstance(example_inputs, (tuple, list)):
        example_inputs = (example_inputs,)
    return copier.copy(tuple(example_inputs)), {}


def _backward(output: Any) -> None:
    leaves = [
        leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if leaves:
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])


class _Watch(TorchDispatchMode):
    """Counts the work of all operations, and the bytes of the storages that operations made and that are
    still alive: `now` is the present number of bytes, and `peak` the largest so far.
    """

    def __init__(self, mode: fake_tensor.FakeTensorMode | None = None, *, scratch: bool = False) -> None:
        """mode: the fake tensor mode in which the step runs. With it, operations in place leave the real
        tensors that the model's code refers to unchanged; with None, they may change them. scratch: whether
        to count memory that operators take on CUDA only.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._has_scratch = scratch
        self._formulas = _flop_formulas()
        self._flops: Counter[torch.dtype] = Counter()
        self.forward: Work | None = None
        """The work of the forward, once it has ended and a backward follows."""
        self._bytes = 0
        self.now = 0
        self.peak = 0
        self._marked = 0
        """The largest value of `now` since the last call of `mark`."""
        self._seen = WeakIdKeyDictionary()
        self._saving = False
        self._real: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a detached alias of `tensor` for autograd to save. If autograd saved `tensor` itself, the
        tensor and its graph could refer to each other.
        """
        self._saving = True
        try:
            return tensor.detach()
        finally:
            self._saving = False

    def memory(self, model: nn.Module, args: Any, kwargs: Any) -> FakeMemory:
        """What the hooks of a step of `model` with these arguments have to know."""
        leaves = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        parameters = [tile for each in model.parameters() for tile in getattr(each, "tiles", (each,))]
        aside = (*parameters, *model.buffers(), *leaves)
        return FakeMemory(aside=aside, save=self.save, uncounted=self._uncounted)

    def _uncounted(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self._saving = True
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        finally:
            self._saving = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._saving:  # this operation is not the model's
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        operands = [*_tensors(args), *_tensors(kwargs.values())]
        for leaf in operands:
            self._seen[leaf.untyped_storage()] = None  # made outside of the step, or counted before
            if self._mode is not None and not isinstance(leaf, fake_tensor.FakeTensor):
                self._real.setdefault(id(leaf), (leaf, leaf.grad if leaf.is_leaf else None))
        if self._real and func._schema.is_mutable:  # on a real tensor, the mode would run it
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        result = func(*args, **kwargs)
        if self._mode is not None and func.overloadpacket in _LSTM:
            result = _LSTM[func.overloadpacket](args, result)
        results = [*_tensors((result,))]
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None and operands:
            self._flops[operands[0].dtype] += times() * formula(*args, **kwargs, out_val=result)
        elif func.namespace != "prim" and not func.is_view:  # views do no work
            self._bytes += times() * sum(
                min(each.numel() * each.itemsize, each.untyped_storage().nbytes())
                for each in (*operands, *results)
            )
        for leaf in results:
            if (storage := leaf.untyped_storage()) not in self._seen:
                self._seen[storage] = None
                self._made(storage)
        self._scratch(func, result)
        return result

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._mode is not None
        return tensor if isinstance(tensor, fake_tensor.FakeTensor) else self._mode.from_tensor(tensor)

    def restore_gradients(self) -> None:
        """Set the gradients of real tensors to what they were before the step."""
        for tensor, gradient in self._real.values():
            if tensor.is_leaf and tensor.grad is not gradient:
                tensor.grad = gradient
        self._real.clear()

    @property
    def work(self) -> Work:
        """The work of all operations so far."""
        return Work(dict(self._flops), self._bytes, self.forward)

    def _made(self, storage: torch.UntypedStorage) -> None:
        self._grow(storage.nbytes())
        weakref.finalize(storage, self._grow, -storage.nbytes()).atexit = False

    def _scratch(self, func: Any, result: Any) -> None:
        """Let `peak` include memory that the operator `func` frees again within its call; see _ATTENTION."""
        if self._has_scratch and _ATTENTION.fullmatch(func.overloadpacket.__name__):
            nbytes = 4 * sum(each.numel() for each in _tensors((result,)))
            self._grow(nbytes)
            self._grow(-nbytes)

    def _grow(self, nbytes: int) -> None:
        self.now += nbytes
        self._marked = max(self._marked, self.now)
        self.peak = max(self.peak, self._marked)

    def mark(self) -> int:
        found, self._marked = self._marked, self.now
        return found


def _with_workspace(args: Sequence[Any], result: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results of oneDNN's LSTM with its workspace, which without data has no bytes.

    The workspace consists of the gates and outputs of each time step, of two of three states before and after
    each step, and of their gradients (set_workspace_sizes in src/cpu/rnn/rnn_utils.hpp of oneDNN 3.12). Each
    begins at a page, and rows that are operands of matrix products are padded.
    """
    if not torch.is_grad_enabled():
        return tuple(result)
    (steps, batch, inputs), nbytes, hidden = args[0].shape, args[0].itemsize, args[10]

    def row(elements: int, nbytes: int) -> int:
        padded = round_up(elements, 64 // nbytes)
        return nbytes * padded + 64 * (padded % 256 == 0)

    cells, states, wide = batch * steps, 2 * batch * (steps + 1), max(inputs, hidden)
    parts = [cells * row(4 * hidden, nbytes), cells * row(hidden, nbytes)]
    parts += [states * row(wide, nbytes), states * hidden * nbytes]
    parts += [states * row(wide, 4), states * row(wide, 4), states * hidden * 4]
    return (*result[:3], torch.empty(sum(round_up(each, 4096) for each in parts), dtype=torch.uint8))


def _with_both_biases(args: Sequence[Any], result: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results of its backward, in which the gradients of both biases are one tensor without data."""
    return (*result[:4], torch.empty_like(result[4]), *result[5:])


_LSTM = {
    torch.ops.aten.mkldnn_rnn_layer: _with_workspace,
    torch.ops.aten.mkldnn_rnn_layer_backward: _with_both_biases,
}
"""Operators whose results have other bytes without data than with data -> function of their arguments and
results that returns results with the right bytes.
"""


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results, and in lists of them. For every operator of a
    step, torch's pytree would take a sixth of the step's time.
    """
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)


def _flop_formulas() -> dict[Any, Any]:
    """Return operator -> function that computes the FLOPs of a call, for operators such as matrix products.

    The functions take the operator's arguments, and its result as `out_val`.
    """
    from torch.utils.flop_counter import flop_registry  # imports Triton, where there is one

    aten = torch.ops.aten
    return {
        **flop_registry,
        aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
            aten._scaled_dot_product_flash_attention
        ],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
            aten._scaled_dot_product_flash_attention_backward
        ],
    }
