"""Materialization of models built under torch.device("meta"): their values are made one module at a time.

First each initialiser runs while everything is still on the meta device, to find out which tensors it writes.
So an error names the tensors that no initialiser fills before any is filled, and a module's values are handed
over as soon as no later initialiser will write them.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.errors import ConfigError

Fill = Callable[[nn.Parameter, torch.Tensor], None]

_NAMED = 5
"""Most names that an error lists."""


@dataclass(eq=False)
class Registered:
    """A parameter or buffer, and every place where it is registered."""

    tensor: torch.Tensor
    places: list[tuple[dict[str, torch.Tensor | None], str]] = field(default_factory=list)
    """The `_parameters` or `_buffers` of a module, and the key there. More than one: tied."""
    names: list[str] = field(default_factory=list)
    """Its names in state_dict(); the first is the canonical one."""

    def put(self, tensor: torch.Tensor) -> None:
        """Set every place to `tensor`.

        Module.__setattr__ is bypassed: nn.LSTM's would rebuild what it keeps beside its parameters.
        """
        for place, key in self.places:
            place[key] = tensor


def registered(model: nn.Module) -> dict[int, Registered]:
    """Everything registered in `model`, by id() of the tensor, in order of named_modules()."""
    found: dict[int, Registered] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for place in (module._parameters, module._buffers):
            for key, tensor in place.items():
                if tensor is None:
                    continue
                entry = found.setdefault(id(tensor), Registered(tensor))
                entry.names.append(f"{prefix}.{key}" if prefix else key)
                if not any(place is known and key == name for known, name in entry.places):
                    entry.places.append((place, key))
    return found


def materialize(
    model: nn.Module, device: torch.device, fill: Fill, *, only: Iterable[torch.Tensor] | None = None
) -> None:
    """Initialise what is on the meta device in `model`, as constructing it on the CPU would have.

    Each module's `reset_parameters` (`_reset_parameters`), or `_init_weights(module)` of the nearest model
    around it that has one (transformers), runs on real tensors on the CPU. Children come before their
    parents, in order of registration, which is the order of construction: with the same seed, a stack of
    torch.nn modules gets the same bits as on the CPU. At any time RAM holds one module's own tensors, and
    those of its descendants that its initialiser writes as well (out_proj of nn.MultiheadAttention; all of
    nn.Transformer).

    `fill(parameter, values)` is called once for each parameter that is on the meta device, tied or not. It
    gets the Parameter itself, which stays registered and on the meta device (though while `fill` runs, a
    substitute is in its place), and a tensor of its shape, strides and dtype that is dropped afterwards.
    Buffers on the meta device are replaced by real ones on `device`. Real tensors keep their values.
    only: the tensors to do this for; None: all.

    Raises ConfigError before the first `fill` if no initialiser writes some tensors, which it names, and
    later if an initialiser fails.
    """
    tensors = registered(model)
    chosen = tensors.keys() if only is None else {id(tensor) for tensor in only}
    wanted = {key for key, entry in tensors.items() if entry.tensor.is_meta and key in chosen}
    if not wanted:
        return
    buffers = {}
    with torch.device("cpu"), torch.no_grad():
        substitutes = _Substitutes(tensors)
        try:
            steps = _steps(model, substitutes, wanted)
            _check_all_written(tensors, wanted, steps)
            for key, values in _run(steps, substitutes, wanted):
                tensor = tensors[key].tensor
                if isinstance(tensor, nn.Parameter):
                    fill(tensor, values)
                else:
                    buffers[key] = values.to(device)
        finally:
            substitutes.clear()
    for key, values in buffers.items():
        tensors[key].put(values)


class _Substitutes:
    """Substitutes for the model's tensors, which initialisers may write, until `clear`.

    They are on the meta device, where writing costs nothing and is lost, except for those that `open` made
    real.
    """

    def __init__(self, tensors: dict[int, Registered]) -> None:
        self.tensors = tensors
        self._placed: dict[int, tuple[torch.Tensor, int]] = {}
        self._keys: dict[int, int] = {}
        for key in tensors:
            self.shut(key)

    def open(self, key: int) -> None:
        """Make the substitute for `key` real; filled with NaN if its dtype has it, so that omissions show."""
        self._place(key, "cpu")
        tensor = self._placed[key][0]
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)

    def shut(self, key: int) -> None:
        """Put the substitute for `key` on the meta device again."""
        self._place(key, "meta")

    def clear(self) -> None:
        """Give the model its own tensors back."""
        for entry in self.tensors.values():
            entry.put(entry.tensor)

    def run(self, call: Callable[[], Any], own: Iterable[int]) -> set[int]:
        """Run an initialiser; returns the keys of the tensors that it wrote, or, among `own`, replaced."""
        with _Writes() as writes:
            call()
        written = {self._keys[storage] for storage in writes.storages & self._keys.keys()}
        return written | {key for key in own if self._replaced(key)}

    def values(self, key: int) -> torch.Tensor:
        """The values that initialisers left for `key`, in its original shape, strides and dtype."""
        placed = self._placed[key][0]
        for place, name in self.tensors[key].places:
            left = place[name]
            if left is not None and left is not placed:
                placed.copy_(left)
        return placed.detach()

    def _place(self, key: int, device: str) -> None:
        entry = self.tensors[key]
        like = entry.tensor
        new = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
        if isinstance(like, nn.Parameter):
            new = nn.Parameter(new, requires_grad=like.requires_grad)
        if key in self._placed:
            del self._keys[self._placed[key][1]]
        storage = _storage(new)
        self._placed[key] = new, storage
        self._keys[storage] = key
        entry.put(new)

    def _replaced(self, key: int) -> bool:
        placed, storage = self._placed[key]
        entries = self.tensors[key].places
        return _storage(placed) != storage or any(place[name] is not placed for place, name in entries)


class _Writes(TorchDispatchMode):
    """Records which storages are written, through whichever alias (`.data`, views)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(function._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    self.storages.add(_storage(tensor))
        return function(*args, **kwargs)


class _AsIfReal(TorchFunctionMode):
    """Makes `is_meta` False, because trunc_normal_ and others of torch.nn.init do nothing if it is True."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function == _IS_META:
            return False
        return function(*args, **(kwargs or {}))


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _storage(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage; unlike its data's address it exists on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


@dataclass
class _Step:
    """The initialisers that one module needs, in the order in which construction runs them."""

    name: str
    own: set[int]
    calls: list[Callable[[], Any]]
    writes: set[int]
    """Keys of the tensors that the calls write, also of other modules."""


def _steps(model: nn.Module, substitutes: _Substitutes, wanted: set[int]) -> list[_Step]:
    """The steps that write `wanted`, in the order to run them."""
    owned: dict[int, set[int]] = {}
    for key in wanted:
        for place, _ in substitutes.tensors[key].places:
            owned.setdefault(id(place), set()).add(key)
    steps = []
    for name, module, scope in _children_first("", model, None, set()):
        own = owned.get(id(module._parameters), set()) | owned.get(id(module._buffers), set())
        step = _step_of(name, module, scope, own, substitutes)
        step.writes &= wanted
        if step.writes:
            steps.append(step)
    return steps


def _children_first(
    name: str, module: nn.Module, scope: nn.Module | None, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """(name, module, the nearest module from it upwards that has an `_init_weights(module)`), once each.

    Children come before their parents.
    """
    if module in seen:
        return
    seen.add(module)
    scope = module if _initialises_others(module) else scope
    for key, child in module.named_children():
        yield from _children_first(f"{name}.{key}" if name else key, child, scope, seen)
    yield name, module, scope


def _initialises_others(module: nn.Module) -> bool:
    method = getattr(module, "_init_weights", None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(module)
    except (TypeError, ValueError):
        return False
    return True


def _step_of(
    name: str, module: nn.Module, scope: nn.Module | None, own: set[int], substitutes: _Substitutes
) -> _Step:
    step = _Step(name, own, [], set())
    if scope is not None:
        initialise: Any = scope._init_weights
        step.calls.append(functools.partial(initialise, module))
        step.writes |= _dry_run(step.calls[0], own, substitutes)
        if own <= step.writes:
            return step
    # The method that construction itself ran. A parent without tensors of its own need not have run
    # reset_parameters, which is often there for users to start over; _reset_parameters (nn.Transformer) is
    # only ever run by construction.
    method = getattr(module, "_reset_parameters", None)
    if method is None and own:
        method = getattr(module, "reset_parameters", None)
    if callable(method):
        step.calls.insert(0, method)
        step.writes |= _dry_run(method, own, substitutes)
    return step


def _dry_run(call: Callable[[], Any], own: set[int], substitutes: _Substitutes) -> set[int]:
    """The keys of the tensors that `call` would write. No tensor is real, and the RNG's state is restored."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _AsIfReal():
                return substitutes.run(call, own)
        except Exception:
            # Not every initialiser runs without values (item() does not). It is assumed to write its module's
            # own tensors; the real run shows whether it does, and why it fails if it fails there too.
            return set(own)
        finally:
            for key in own:
                substitutes.shut(key)


def _check_all_written(tensors: dict[int, Registered], wanted: set[int], steps: list[_Step]) -> None:
    written = set().union(*(step.writes for step in steps))
    left = [
        entry.names[0]
        for key, entry in tensors.items()
        if key in wanted and key not in written and entry.tensor.numel() > 0
    ]
    if left:
        raise _unwritten(left)


def _unwritten(names: list[str]) -> ConfigError:
    return ConfigError(
        f"Nothing initialises {listed(names)}, built on the meta device.",
        "Give the module a reset_parameters() that fills all its parameters and buffers, build it on the "
        "CPU, or load weights.",
    )


def listed(names: list[str]) -> str:
    """The first five of `names`, and how many more there are, for an error."""
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest


def _run(
    steps: list[_Step], substitutes: _Substitutes, wanted: set[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Run the steps; yields each key of `wanted` with its values after the last step that writes it."""
    last = {key: index for index, step in enumerate(steps) for key in step.writes}
    order = {key: index for index, key in enumerate(substitutes.tensors)}
    written: set[int] = set()
    opened: set[int] = set()
    for index, step in enumerate(steps):
        for key in step.writes - opened:
            substitutes.open(key)
        opened |= step.writes
        try:
            for call in step.calls:
                written |= substitutes.run(call, step.own)
            finished = sorted((key for key in step.writes if last[key] == index), key=order.__getitem__)
            done = [(key, substitutes.values(key)) for key in finished]
        except Exception as error:
            raise ConfigError(
                f"Initialising {step.name or 'the model'} failed: {type(error).__name__}: {error}",
                "Mend its initialiser, build the module on the CPU, or load weights.",
            ) from error
        if unwritten := [substitutes.tensors[key].names[0] for key, _ in done if key not in written]:
            raise _unwritten(unwritten)
        for key, values in done:
            opened.discard(key)
            substitutes.shut(key)
            yield key, values
    for key in wanted - last.keys():  # tensors without elements, which no step writes
        substitutes.open(key)
        yield key, substitutes.values(key)
