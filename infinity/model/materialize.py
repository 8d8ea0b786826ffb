"""Materialization: gives models built under torch.device("meta") their initial values, module by module.

First each initialiser runs with all tensors on the meta device, to find out which tensors it writes. So
tensors that no initialiser fills are reported before any tensor is filled. Then the initialisers run on real
tensors in RAM. As soon as no later initialiser will write to a tensor, its values are handed to the caller
and dropped.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.config import format_size
from infinity.errors import BudgetError, ConfigError
from infinity.layout.adapters import base_names
from infinity.layout.names import named_modules
from infinity.model.draws import Draws
from infinity.model.paged_parameter import Place, release
from infinity.model.pager import Pager
from infinity.model.tiled_parameter import TiledParameter, release_tiled
from infinity.system import machine

Fill = Callable[[nn.Parameter, torch.Tensor], None]

_NAMED = 5


@dataclass(eq=False)
class Registered:
    """A parameter or buffer of a model, and where it is registered."""

    tensor: torch.Tensor
    places: list[tuple[dict[str, torch.Tensor | None], str]] = field(default_factory=list)
    """The `_parameters` or `_buffers` dictionary of a module, and the tensor's key in it; several for a tied
    tensor.
    """
    names: list[str] = field(default_factory=list)
    """The tensor's names in state_dict(); the first is the canonical name."""

    def put(self, tensor: torch.Tensor) -> None:
        """Register `tensor` in all of `places`. Module.__setattr__ is bypassed, because that of nn.LSTM
        would rebuild the list of flat weights.
        """
        for place, key in self.places:
            place[key] = tensor


def registered(model: nn.Module) -> dict[int, Registered]:
    """Return all parameters and buffers of `model`, by id(), in the order of named_modules(). Their names are
    those without wrappers (infinity/layout/names.py).
    """
    found: dict[int, Registered] = {}
    for prefix, module in named_modules(model, remove_duplicate=False):
        tables: tuple[Any, ...] = (module._parameters, module._buffers)
        for place in tables:
            for key, tensor in place.items():
                if tensor is None:
                    continue
                entry = found.setdefault(id(tensor), Registered(tensor))
                entry.names.append(f"{prefix}.{key}" if prefix else key)
                if not any(place is known and key == name for known, name in entry.places):
                    entry.places.append((place, key))
    return found


def _refuse_adapters(model: nn.Module, wanted: Collection[int]) -> None:
    """Raise ConfigError if an adapter of PEFT is among the tensors with an id() in `wanted`: the initialisers
    of its modules do not give PEFT's values, such as zeros for one of the two matrices of LoRA.
    """
    base = base_names(model)
    for key, entry in registered(model).items():
        if key in wanted and key not in base:
            raise ConfigError(
                f"The adapter {entry.names[0]} is on the meta device, and PEFT alone knows its values.",
                "Give weights=, the directory of the base: adapters of LoRA are initialised beside it. Or "
                "load the base into RAM (from_pretrained), and add the adapters there.",
            )


def materialize(
    model: nn.Module,
    device: torch.device,
    fill: Fill,
    *,
    only: Iterable[torch.Tensor] | None = None,
    threads: int = 1,
    room: int = 0,
) -> None:
    """Initialise the parameters and buffers of `model` that are on the meta device.

    The values are those that construction on the CPU would have given. Each module's initialiser runs on real
    tensors on the CPU: its `reset_parameters` or `_reset_parameters`, or the `_init_weights(module)` of the
    nearest enclosing model that has this method (transformers). Children come before their parents, in the
    order of registration, which is the order of construction. So with the same seed, a stack of torch.nn
    modules gets the same bits as on the CPU. At any time RAM holds one module's own tensors, those of its
    descendants that its initialiser writes as well (out_proj of nn.MultiheadAttention; all of
    nn.Transformer), and tensors of at most `room` bytes whose numbers `threads` threads draw meanwhile.

    fill: function (parameter, values), called once for each parameter on the meta device, even if it is tied.
    `parameter` is the model's Parameter, which stays on the meta device; a substitute is registered in the
    model meanwhile. `values` has the parameter's shape, strides and dtype, and is dropped after the call.
    device: where the buffers that replace buffers on the meta device are made. only: the tensors to
    initialise; None: all. Tensors that are not on the meta device keep their values.

    Raises ConfigError before the first call of `fill` if no initialiser writes some of the tensors, which the
    message names, or if they are adapters of PEFT. Raises ConfigError later if an initialiser fails.
    """
    tensors = registered(model)
    chosen = tensors.keys() if only is None else {id(tensor) for tensor in only}
    wanted = {key for key, entry in tensors.items() if entry.tensor.is_meta and key in chosen}
    if not wanted:
        return
    _refuse_adapters(model, wanted)
    buffers = {}
    with torch.device("cpu"), torch.no_grad(), Draws(threads) as draws:
        substitutes = _Substitutes(tensors, draws)
        try:
            substitutes.place()
            steps = _steps(model, substitutes, wanted)
            _check_all_written(tensors, wanted, steps)
            for key, values in _run(steps, substitutes, wanted, room):
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
    """Substitutes for a model's tensors, registered in the model from `place` until `clear`.

    Initialisers write to the substitutes. A substitute is on the meta device, where a write costs nothing and
    is lost, unless `open` made it real. A key is the id() of a tensor of the model, and also names the
    tensor's substitute.
    """

    def __init__(self, tensors: dict[int, Registered], draws: Draws) -> None:
        self.tensors = tensors
        self.draws = draws
        self._placed: dict[int, tuple[torch.Tensor, int]] = {}
        self._keys: dict[int, int] = {}

    def place(self) -> None:
        for key in self.tensors:
            self.shut(key)

    def open(self, key: int) -> None:
        """Replace the substitute for tensor `key` by a real tensor in RAM. A floating-point tensor is filled
        with NaN, so that elements that no initialiser writes are noticed.
        """
        self._place(key, "cpu")
        tensor = self._placed[key][0]
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)

    def shut(self, key: int) -> None:
        self._place(key, "meta")

    def clear(self) -> None:
        """Register the model's own tensors again."""
        for entry in self.tensors.values():
            entry.put(entry.tensor)

    def run(self, call: Callable[[], Any], own: Iterable[int]) -> set[int]:
        """Run the initialiser `call`, and return the keys of the tensors that it wrote to.

        own: keys of the tensors of the initialiser's module. A tensor of these that the initialiser replaced
        by another one counts as written.
        """
        with _Writes(self.draws) as writes:
            call()
        written = {self._keys[storage] for storage in writes.storages & self._keys.keys()}
        return written | {key for key in own if self._replaced(key)}

    def values(self, key: int) -> torch.Tensor:
        """The values that initialisers gave tensor `key`, in the shape, strides and dtype of that tensor.

        Its numbers may still be drawn; `draws.wait` tells when they are there.
        """
        placed = self._placed[key][0]
        for place, name in self.tensors[key].places:
            left = place[name]
            if left is not None and left is not placed:
                self.draws.wait(placed)
                self.draws.wait(left)
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
    """A mode that records the storages to which operations write, directly or through views and `.data`, and
    that hands fills over to `draws`.
    """

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()
        self._draws = draws

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
        return args[0] if self._draws.take(function, args, kwargs) else function(*args, **kwargs)


class _AsIfReal(TorchFunctionMode):
    """A mode in which `is_meta` of every tensor is False. Without it, trunc_normal_ and other functions of
    torch.nn.init would do nothing to tensors on the meta device.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function == _IS_META:
            return False
        return function(*args, **(kwargs or {}))


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _storage(tensor: torch.Tensor) -> int:
    """A number that identifies a tensor's storage, also on the meta device, where data has no address."""
    return int(tensor.untyped_storage()._cdata)


@dataclass
class _Step:
    """The initialisers of one module, in the order in which its construction runs them."""

    name: str
    own: set[int]
    calls: list[Callable[[], Any]]
    writes: set[int]
    """Keys (see _Substitutes) of the tensors that `calls` write, including tensors of other modules."""


def _steps(model: nn.Module, substitutes: _Substitutes, wanted: set[int]) -> list[_Step]:
    """List the modules' initialisers that write to a wanted tensor, in the order in which they must run.
    wanted: keys (see _Substitutes) of the tensors that need values.
    """
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
    """Yield (name, module, scope) once for `module` and for each of its descendants, children before parents.

    The scope of a module is the module itself or the nearest ancestor that has a method
    `_init_weights(module)`; None without such an ancestor. scope: the scope of `module`'s parent. seen:
    modules to leave out; every visited module is added.
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
    # Call the method that construction would have run. reset_parameters of a parent without tensors of its
    # own is left out: it is often there for users to start over. _reset_parameters (nn.Transformer) is only
    # ever run by construction.
    method = getattr(module, "_reset_parameters", None)
    if method is None and own:
        method = getattr(module, "reset_parameters", None)
    if callable(method):
        step.calls.insert(0, method)
        step.writes |= _dry_run(method, own, substitutes)
    return step


def _dry_run(call: Callable[[], Any], own: set[int], substitutes: _Substitutes) -> set[int]:
    """Run the initialiser `call` with all tensors on the meta device, and return the keys of the tensors that
    it writes.

    own: keys of the tensors of the initialiser's module. They are returned if `call` fails, because it may
    need real values. The random number generator's state is restored.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _AsIfReal():
                return substitutes.run(call, own)
        except Exception:
            # Not every initialiser runs without values (item() does not). The real run shows whether the
            # assumption holds, and the error if it fails there too.
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
    """Return text for an error message: the first five of `names`, and how many more there are."""
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest


def _run(
    steps: list[_Step], substitutes: _Substitutes, wanted: set[int], room: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Run the initialisers in `steps`. Yield (key, values) of a tensor after the last step that writes it.

    wanted: keys (see _Substitutes) of the tensors to yield. room: as in `materialize`.
    """
    drawn: deque[tuple[int, torch.Tensor]] = deque()
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
        for key, _ in done:
            opened.discard(key)
            substitutes.shut(key)
        drawn += done
        while sum(values.nbytes for _, values in drawn) > room or (drawn and step is steps[-1]):
            substitutes.draws.wait(drawn[0][1])
            yield drawn.popleft()
    for key in wanted - last.keys():  # tensors without elements, which no step writes
        substitutes.open(key)
        yield key, substitutes.values(key)


class PlainParameters:
    """Copies, in RAM, of an offloaded model's parameters, in the dtypes that they had before `offload`. A
    trained parameter that had another floating-point dtype than its page is converted from its fp32 master.
    """

    def __init__(self, model: nn.Module, pager: Pager, on_node: int = 1) -> None:
        """Copy all parameters. The caller holds the runtime's lock, and all updates are complete.

        on_node: number of ranks that share this node's RAM, each of which copies all parameters. Raises
        BudgetError, before anything is copied, if RAM has no room for all copies.
        """
        self._model = model
        self._pager = pager
        places = [Place(pager, page, index) for page in pager.pages for index in range(len(page.parameters))]
        needed = on_node * sum(
            place.page.layout.parameters[place.index].numel * place.page.given[place.index].itemsize
            for place in places
        )
        usable = machine.memory().usable
        if needed > usable:
            raise BudgetError(
                f"Parameters of {format_size(needed)} were to stay after close(), and {format_size(usable)} "
                "of RAM are free.",
                "Write them with runtime.export(path) or runtime.save(path), and call close() without keep.",
                needed=needed,
            )
        with torch.inference_mode(False), torch.no_grad():
            self._values = [self._read(place) for place in places]

    def _read(self, place: Place) -> torch.Tensor:
        dtype = place.page.given[place.index]
        if dtype.is_floating_point:
            return self._pager.master(place, dtype)
        return self._pager.copy(place, "cpu")

    def give_back(self) -> None:
        """Convert the model's parameters to plain Parameters that hold the copied values, and move all
        buffers to RAM. The parameters stay the same objects. Called after the pages are closed.
        """
        parameters = [each for page in self._pager.pages for each in page.parameters]
        kept = {id(each): values for each, values in zip(parameters, self._values, strict=True)}
        self._values.clear()
        for entry in registered(self._model).values():
            if isinstance(entry.tensor, TiledParameter):
                parts = [kept.pop(id(tile)) for tile in entry.tensor.tiles]
                for tile in entry.tensor.tiles:
                    release(tile, torch.empty(0))
                release_tiled(entry.tensor, torch.cat(parts))
        for parameter in parameters:
            if id(parameter) in kept:
                release(parameter, kept[id(parameter)])
        for entry in registered(self._model).values():
            if not isinstance(entry.tensor, nn.Parameter) and entry.tensor.device.type != "cpu":
                entry.put(entry.tensor.cpu())
