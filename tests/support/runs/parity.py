"""One training loop, run by plain PyTorch and by the runtime, recorded so that the two can be compared.

Everything random is seeded before each micro-batch, so that both runs draw the same dropout masks.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from homes import budget_for, check_homes
from other_optimizers import Lion
from torch import Tensor, nn
from zoo import Batch, Entry

import infinity
from infinity.aio import Faults

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda groups, **options: torch.optim.SGD(groups, momentum=0.9, nesterov=True, **options),
    "plain_sgd": torch.optim.SGD,
    "adagrad": lambda groups, **options: torch.optim.Adagrad(
        groups, initial_accumulator_value=0.1, **options
    ),
    "lion": Lion,
}
RATE = 1e-3


@dataclass(frozen=True)
class Recipe:
    """The settings of a training. A recipe is hashable, so that runs can be kept and shared between tests."""

    accumulate: int = 1
    clip: float | None = None
    groups: int = 1
    compute: str = "fp32"
    states: str = "fp32"
    optimizer: str = "adamw"
    steps: int = 3
    decay_rate: bool = False
    """Whether a scheduler halves the learning rate after every step."""
    device: str = "cpu"


@dataclass
class Run:
    """What was recorded of a training run. Tensors are copies. A watched run is recorded at every step."""

    losses: list[float] = field(default_factory=list)
    """The loss of every micro-batch, exact."""
    norms: list[float] = field(default_factory=list)
    """The norm of the gradients of every step, where gradients are clipped."""
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    """Accumulated gradients before clipping, by parameter name: of every step if the run is watched,
    otherwise of the first step.
    """
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    """state_dict() of the model: after every step if the run is watched, otherwise after the last step."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """state_dict() of the optimizer after the last step."""


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Independent copies of the tensors, with their strides."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def make_optimizer(model: nn.Module, recipe: Recipe, **options: Any) -> torch.optim.Optimizer:
    """Make the recipe's torch optimizer over all parameters, frozen ones included.

    If the recipe has two groups, one has all parameters of two or more dimensions and the other has the rest.
    The groups differ in learning rate and weight decay. options: further arguments of the optimizer, such as
    fused.
    """
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if recipe.groups == 2:
        groups = [
            {"params": [each for each in parameters if each.dim() > 1], "lr": RATE, "weight_decay": 0.1},
            {"params": [each for each in parameters if each.dim() <= 1], "lr": 3 * RATE, "weight_decay": 0.0},
        ]
    return OPTIMIZERS[recipe.optimizer](groups, lr=RATE, **options)


def seeded_loss(entry: Entry, model: nn.Module, batch: Batch, step: int, micro: int) -> Tensor:
    torch.manual_seed(100 * step + micro)
    return entry.loss(model, batch)


def scheduler_of(optimizer: torch.optim.Optimizer, recipe: Recipe) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5 if recipe.decay_rate else 1.0)


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of every parameter's gradient, by name. None for a parameter without a gradient."""
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


def reference(entry: Entry, recipe: Recipe, **options: Any) -> Run:
    """Train in plain PyTorch in float32, and return the Run, recorded at every step.

    entry: the model with its batches and loss (see zoo.py). options: further arguments of the torch
    optimizer, such as fused.
    """
    model = entry.make(recipe.device)
    optimizer = make_optimizer(model, recipe, **options)
    scheduler = scheduler_of(optimizer, recipe)
    run = Run()
    for step in range(recipe.steps):
        for micro in range(recipe.accumulate):
            loss = seeded_loss(entry, model, entry.batch(step, micro), step, micro)
            (loss / recipe.accumulate).backward()
            run.losses.append(loss.item())
        run.gradients.append(gradients_of(model))
        if recipe.clip is not None:
            run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), recipe.clip).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.parameters.append(copied(model.state_dict()))
    run.optimizer = optimizer.state_dict()
    return run


def half_up(master: Tensor) -> Tensor:
    """Round finite float32 to bfloat16, half up: (bits + 0x8000) >> 16, as the runtime rounds masters."""
    bits = master.detach().contiguous().view(torch.int32).to(torch.int64) + 0x8000
    high = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.empty_like(master, dtype=torch.bfloat16).copy_(high)


def reference_bf16(entry: Entry, recipe: Recipe, **options: Any) -> Run:
    """Train in plain PyTorch with bfloat16 parameters, float32 masters and float32 sums of gradients.

    entry, options: as in `reference`. Returns the Run, with the losses, norms and gradients of every step.
    """
    model = entry.make(recipe.device)
    parameters = dict(model.named_parameters())
    masters = {name: nn.Parameter(each.detach().clone()) for name, each in parameters.items()}
    small = [name for name in parameters if not any(fnmatch.fnmatch(name, keep) for keep in entry.keep)]
    for name, parameter in parameters.items():
        masters[name].requires_grad_(parameter.requires_grad)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_moved_to(masters[name]))
    holder = nn.Module()
    for number, master in enumerate(masters.values()):
        holder.register_parameter(str(number), master)
    optimizer = make_optimizer(holder, recipe, **options)
    scheduler = scheduler_of(optimizer, recipe)
    run = Run()
    for step in range(recipe.steps):
        for name in small:
            parameters[name].data = half_up(masters[name])
        for name in parameters.keys() - set(small):
            parameters[name].data = masters[name].detach().clone()
        for micro in range(recipe.accumulate):
            inputs, targets = entry.batch(step, micro)
            inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs
            loss = seeded_loss(entry, model, (inputs, targets), step, micro)
            (loss / recipe.accumulate).backward()
            run.losses.append(loss.item())
        gradients = gradients_of(holder)
        run.gradients.append(dict(zip(parameters, gradients.values(), strict=True)))
        if recipe.clip is not None:
            run.norms.append(nn.utils.clip_grad_norm_(masters.values(), recipe.clip).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return run


def _moved_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad + gradient
        parameter.grad = None

    return move


def paged(
    entry: Entry,
    recipe: Recipe,
    home: str,
    directory: Path,
    *,
    watch: bool = False,
    faults: Faults | None = None,
    update: str = "auto",
    declared: bool = False,
    activations: str = "auto",
) -> Run:
    """Train on the runtime with the pages at `home` (see homes.py) and slabs in `directory`; return the Run.

    watch: record all gradients and parameters at every step, which waits for updates. Otherwise the first
    step's gradients and the last step's parameters are recorded. With eager updates, which consume the
    gradients, no gradients are recorded. faults: injected into the disk's I/O. update: the argument of
    `infinity.offload`. declared: tell `offload` the number of backwards a step; eager and speculative updates
    are always told. activations: the argument of `infinity.offload`.

    Asserts that the pages are where they should be, and that the directory is empty at the end.
    """
    model = entry.make(recipe.device)
    optimizer = make_optimizer(model, recipe)
    precision = infinity.Precision(compute=recipe.compute, states=recipe.states, keep=entry.keep)
    early = update in ("eager", "speculative")
    accumulation = recipe.accumulate if declared or early else None
    budget = budget_for(
        home,
        model,
        optimizer,
        directory,
        precision,
        device=recipe.device,
        accumulation=accumulation,
        update=update,
    )
    with (
        injected(faults),
        infinity.offload(
            model,
            optimizer,
            budget=budget,
            precision=precision,
            device=recipe.device,
            update=update,
            accumulation=accumulation,
            **({} if activations == "auto" else {"activations": activations}),  # as in budget_for
        ) as runtime,
    ):
        check_homes(home, runtime.plan)
        run = _trained(entry, recipe, model, runtime, watch=watch, spends=update == "eager")
    assert [each.name for each in directory.iterdir()] == []
    return run


def _trained(
    entry: Entry, recipe: Recipe, model: nn.Module, runtime: infinity.Runtime, *, watch: bool, spends: bool
) -> Run:
    """Train `model` on `runtime` as the recipe says, and return the Run.

    watch: as in `paged`. spends: updates consume the gradients, so that no gradients are recorded.
    """
    run, optimizer = Run(), runtime.optimizer
    scheduler = scheduler_of(optimizer, recipe)
    for step in range(recipe.steps):
        for micro in range(recipe.accumulate):
            loss = seeded_loss(entry, model, entry.batch(step, micro), step, micro)
            (loss / recipe.accumulate).backward()
            run.losses.append(loss.item())
        if (watch or step == 0) and not spends:
            run.gradients.append({name: runtime.grad(each) for name, each in model.named_parameters()})
        if recipe.clip is not None:
            run.norms.append(float(runtime.clip_grad_norm_(recipe.clip)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if watch or step == recipe.steps - 1:
            run.parameters.append(copied(model.state_dict()))
    run.optimizer = tensors_copied(optimizer.state_dict())
    return run


@contextlib.contextmanager
def injected(faults: Faults | None) -> Iterator[None]:
    """Inject faults, if any, into the disk I/O of runtimes that are opened inside the `with`."""
    if faults is None:
        yield
        return
    from infinity.system.disk_files import injected  # internal, and used by tests with faults only

    with injected(faults):
        yield


def tensors_copied(tree: Any) -> Any:
    """A copy of a nest of dicts, lists and tuples in which all tensors are cloned."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: tensors_copied(each) for key, each in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(tensors_copied(each) for each in tree)
    return tree


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Descriptions of all places where two nests of dicts, lists, tensors and numbers differ; [] if none.

    Tensors differ if any bit, the shape, the dtype or a stride does. where: text with which every
    description begins.
    """
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return [] if _same_bits(left, right) else [where]
    if isinstance(left, dict) and isinstance(right, dict):
        found = [f"{where}.{key}: only on one side" for key in left.keys() ^ right.keys()]
        return found + [
            each
            for key in left.keys() & right.keys()
            for each in differences(left[key], right[key], f"{where}.{key}")
        ]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        found = [] if len(left) == len(right) else [f"{where}: {len(left)} against {len(right)}"]
        pairs = enumerate(zip(left, right, strict=False))
        return found + [each for at, (a, b) in pairs for each in differences(a, b, f"{where}[{at}]")]
    same = type(left) is type(right) and left == right
    return [] if same else [f"{where}: {left!r} against {right!r}"]


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape or _strides(left) != _strides(right):
        return False
    # Compared as bytes, because -0.0 equals 0.0 and NaN does not equal itself.
    return torch.equal(*(each.cpu().reshape(-1).contiguous().view(torch.uint8) for each in (left, right)))


def _strides(tensor: Tensor) -> list[int]:
    """The strides of all dimensions with more than one element. Strides of other dimensions mean nothing."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def loss_distance(left: Run, right: Run) -> float:
    """The largest difference between losses of the same micro-batch, relative to the loss in `left`."""
    pairs = zip(left.losses, right.losses, strict=True)
    return max(abs(a - b) / max(abs(a), 1e-6) for a, b in pairs)


def check_losses(entry: Entry, recipe: Recipe, run: Run, truth: Run) -> None:
    """Assert that `loss_distance(run, truth)` is at most 1e-5 in fp32 compute, and at most 5e-4 otherwise.

    With bfloat16 parameters, an update that differs in its last bit may round a parameter to another value. A
    larger distance is allowed if it is at most twice the distance between two runs in plain PyTorch, with
    torch's fused and with its foreach optimizer. entry, recipe: those of both runs, for these two further
    runs.
    """
    train, least = (reference, 1e-5) if recipe.compute == "fp32" else (reference_bf16, 5e-4)
    distance = loss_distance(run, truth)
    if distance > least:
        fused, foreach = train(entry, recipe, fused=True), train(entry, recipe, foreach=True)
        assert distance <= 2 * loss_distance(fused, foreach)
