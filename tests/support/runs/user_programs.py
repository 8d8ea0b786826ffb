"""Training programs of users, drawn at random, run by plain PyTorch and by the runtime.

A number determines a program: a model with habits that real models have (caches made in the first forward,
counters, generators of its own, branches that some steps leave out, hooks, checkpointing, losses beside the
output), a loop with habits that real loops have, a budget and a precision. `compare` says where the two runs
differ. Where the runtime refuses a program, it must do so by an InfinityError.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import InfinityError
from infinity.tiers import Tier

VOCABULARY = 31
SEQUENCE = 6
ROOMY = 64 << 20
"""Bytes of a tier that has room for all pages."""
STEPS = 4


@dataclass(frozen=True)
class Habits:
    """What a model and its loop do. Each field is drawn by `program_of`."""

    width: int
    blocks: int
    tied: bool
    checkpointing: bool | None
    """use_reentrant of checkpoint, by which each block runs; None: no checkpointing."""
    cache: bool
    """Whether the first forward makes a table, which is kept in an attribute, as rotary embeddings are."""
    counter: bool
    """Whether a forward counts in an attribute, on which its output depends."""
    noise: bool
    """Whether the model draws from a torch.Generator of its own."""
    running: bool
    """Whether the forward updates a buffer, a running mean."""
    branches: bool
    """Whether the step chooses one of two branches, so that the other one's parameters have no gradient."""
    timed: bool
    """Whether the forward takes a float time, which bf16 would round, beside its tokens."""
    contained: bool
    """Whether the inputs come in a dataclass."""
    auxiliary: str | None
    """A second loss: kept in an "attribute", or made of what a forward "hook" has kept."""
    frozen: bool
    """Whether the first block is frozen."""
    clamped: bool
    """Whether a hook of a parameter clamps its gradient."""
    watched: str | None
    """What has a hook that notes the norm of its gradient: a "hidden state", or the output of a "module"."""
    optimizer: str
    accumulate: int
    clip: float | None
    zeros: str | None
    """Who calls zero_grad(set_to_none=False): "optimizer" or "model"; None: gradients become None."""
    penalty: str | None
    """The loss has a penalty on the gradient of the hidden state before this: the "blocks" or the "head"."""
    average: str | None
    """When an AveragedModel is made: "before" or "after" offload; None: there is none."""
    reloaded: str | None
    """What is saved and loaded in the middle: "model first", "optimizer first", or None."""
    thawed: bool
    """Whether a block is frozen in the loop, and trained again a step later."""
    edited: str | None
    """What changes a parameter in place after a step: the "parameter", or a "view" from before the step."""
    forgotten: bool
    """Whether the gradient of one parameter is set to None before a step."""
    retained: bool
    """Whether each loss has two backwards, by retain_graph."""
    divided: bool
    """Whether the loss is divided in place (loss /= n)."""
    evaluated: bool
    """Whether the model is evaluated between backward and step."""
    scheduled: bool
    second_optimizer: bool
    """Whether an optimizer of its own trains the head."""


@dataclass(frozen=True)
class Place:
    """How a program is offloaded."""

    home: str
    """Where pages rest: "host", "nvme", or "apart" and "apart, nvme", where the device has its own memory."""
    room: float
    """Share of the pages for which the tiers above the lowest have room, beside what every run needs."""
    compute: str
    update: str
    example: bool
    """Whether offload gets example_inputs."""


@dataclass(frozen=True)
class Program:
    number: int
    habits: Habits
    place: Place

    def __str__(self) -> str:
        usual = [
            f"{each.name}={value!r}"
            for each in fields(Habits)
            if (value := getattr(self.habits, each.name)) not in (None, False)
        ]
        return f"program {self.number}: {', '.join(usual)}; {self.place}"


def program_of(number: int) -> Program:
    draw = random.Random(number)

    def sometimes(share: float = 0.2) -> bool:
        return draw.random() < share

    eager = sometimes(0.15)
    accumulate = draw.choice([1, 1, 2, 3])
    checkpointing = draw.choice([None, None, True, False])
    habits = Habits(
        width=draw.choice([8, 12, 20]),
        blocks=draw.randint(1, 4),
        tied=sometimes(0.3),
        checkpointing=checkpointing,
        cache=sometimes(),
        counter=sometimes(),
        noise=sometimes(),
        running=sometimes(),
        branches=sometimes(0.4),
        timed=sometimes(),
        contained=sometimes(),
        auxiliary=draw.choice([None, None, None, "attribute", "hook"]),
        frozen=sometimes(0.15),
        clamped=sometimes(),
        watched=draw.choice([None, None, None, "hidden state", "module"]),
        optimizer=draw.choice(["adamw", "adam", "sgd", "adagrad"]),
        accumulate=accumulate,
        clip=0.3 if sometimes(0.4) and not eager else None,
        zeros=draw.choice([None, None, None, "optimizer", "model"]),
        # torch cannot differentiate twice through a reentrant checkpoint.
        penalty=draw.choice(["head", "head" if checkpointing else "blocks"]) if sometimes(0.15) else None,
        average=draw.choice([None, None, None, None, "before", "after"]),
        reloaded=draw.choice([None, None, None, "model first", "optimizer first"]),
        thawed=sometimes(0.1) and not eager,
        edited=draw.choice([None, None, None, None, "parameter", "view"]),
        forgotten=sometimes(0.1) and not eager,
        retained=sometimes(0.1) and not eager,
        divided=sometimes(),
        evaluated=sometimes() and not eager,
        scheduled=sometimes(0.3),
        second_optimizer=sometimes(0.05),
    )
    place = Place(
        home=draw.choice(["host", "nvme", "nvme", "apart", "apart, nvme"]),
        # A view keeps its page in memory, which the smallest budget has no room for.
        room=draw.choice([0.4 if habits.edited == "view" else 0.0, draw.random()]),
        compute="fp32" if eager else draw.choice(["fp32", "fp32", "bf16", "fp16"]),
        update="eager" if eager else draw.choice(["lazy", "lazy", "sync"]),
        example=sometimes(0.4),
    )
    return Program(number, habits, place)


# --- the model --------------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """Inputs of a forward in one object, as collators of batches make them."""

    tokens: Tensor
    time: Tensor | None
    branch: int


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(SEQUENCE, SEQUENCE)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, habits: Habits) -> None:
        super().__init__()
        width = habits.width
        self.habits = habits
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(habits.blocks))
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if habits.tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros(width))
        self.table: Tensor | None = None
        self.calls = 0
        self.generator = torch.Generator().manual_seed(5)
        self.auxiliary: Tensor | None = None
        self.hidden: dict[str, Tensor] = {}

    def forward(self, inputs: Inputs | Tensor, time: Tensor | None = None, branch: int = 0) -> Tensor:
        habits = self.habits
        if isinstance(inputs, Inputs):
            inputs, time, branch = inputs.tokens, inputs.time, inputs.branch
        x = self.embedding(inputs)
        if habits.cache:
            if self.table is None:
                angles = torch.outer(torch.arange(SEQUENCE), torch.arange(1, habits.width + 1))
                self.table = angles.float().sin()
            x = x + self.table.to(x.dtype)
        if habits.counter:
            self.calls += 1
            x = x * (1 if self.calls < 4 else 1.5)
        if habits.noise:
            x = x + 0.1 * torch.randn(x.shape, generator=self.generator).to(x.dtype)
        if time is not None:
            x = x + (time[:, None, None] * torch.ones(habits.width)).sin().to(x.dtype)
        self.hidden["blocks"] = x
        for block in self.blocks:
            if habits.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=habits.checkpointing)
        if habits.branches:
            x = self.branches[branch](x)
        if habits.running:
            with torch.no_grad():
                self.mean.lerp_(x.float().mean((0, 1)), 0.1)
            x = x - self.mean.to(x.dtype)
        self.hidden["head"] = x
        self.auxiliary = x.float().softmax(-1).mean((0, 1)).square().sum()
        return self.head(x).float()


def made(habits: Habits) -> Model:
    torch.manual_seed(3)
    model = Model(habits)
    if habits.frozen:
        model.blocks[0].requires_grad_(False)
    return model


def batch(habits: Habits, step: int, micro: int) -> tuple[Inputs, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator)
    time = torch.tensor([998.0, 999.0]) + step if habits.timed else None
    return Inputs(tokens[:, :-1], time, (step + micro) % 2), tokens[:, 1:]


RATE = 1e-2

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda given: torch.optim.AdamW(given, lr=RATE, weight_decay=0.1),
    "adam": lambda given: torch.optim.Adam(given, lr=RATE),
    # A greater rate makes much of bf16's rounding: plain bf16 was off by 0.5 of 1.09 from fp32 in four steps.
    "sgd": lambda given: torch.optim.SGD(given, lr=3e-2, momentum=0.9),
    "adagrad": lambda given: torch.optim.Adagrad(given, lr=RATE),
}


# --- the loop ---------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a run shows: equal keys have values of equal form in two runs of a program."""

    numbers: dict[str, list[float]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    refusal: InfinityError | None = None

    def note(self, name: str, value: Any) -> None:
        self.numbers.setdefault(name, []).append(float(value))


class Plain:
    """The calls of a loop in which a plain program and an offloaded one are written otherwise."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad


class Offloaded(Plain):
    def __init__(self, model: nn.Module, runtime: Any) -> None:
        super().__init__(model, runtime.optimizer)
        self._runtime = runtime

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return self._runtime.grad(parameter)


def run(program: Program, trainer: Plain, seen: Seen, average: AveragedModel | None, other: Any) -> None:
    """Train STEPS steps, and note in `seen` what can differ.

    average: updated after each step, if there is one. other: the second optimizer, if there is one.
    """
    habits = program.habits
    early = program.place.update == "eager"  # gradients are used before step()
    model, optimizer = trainer.model, trainer.optimizer
    assert isinstance(model, Model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if habits.scheduled else None
    if habits.clamped and model.blocks[-1].up.weight.requires_grad:
        model.blocks[-1].up.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    if habits.watched == "module":
        model.blocks[-1].register_full_backward_hook(
            lambda module, inner, outer: seen.note("slope", outer[0].detach().float().norm())
        )
    names = dict(model.named_parameters())
    for step in range(STEPS):
        edited = model.blocks[-1].down.weight
        if habits.edited == "view":
            edited = edited.detach()
        if habits.thawed:
            model.blocks[-1].requires_grad_(step % 2 == 0)
        for micro in range(habits.accumulate):
            backward(program, model, seen, *batch(habits, step, micro))
        if habits.evaluated:
            with torch.no_grad():
                seen.note("evaluated", model(batch(habits, 9, 0)[0]).square().mean())
        if habits.forgotten:
            names["blocks.0.down.bias"].grad = None
        for name, parameter in names.items():
            if step in (0, STEPS - 1) and not early and (found := trainer.gradient(parameter)) is not None:
                seen.tensors[f"gradient of {name} in step {step}"] = found.detach().float().clone()
        if habits.clip is not None:
            seen.note("norm", nn.utils.clip_grad_norm_(model.parameters(), habits.clip))
        optimizer.step()
        if other is not None:
            other.step()
        if scheduler is not None:
            scheduler.step()
        forget(habits, trainer, other)
        if average is not None:
            average.update_parameters(model)
        if habits.edited is not None and step == 1:
            with torch.no_grad():
                edited.mul_(0.5)
        if habits.reloaded is not None and step == 2:
            reload(model, optimizer, model_first=habits.reloaded == "model first")
    for name, tensor in model.state_dict().items():
        seen.tensors[name] = tensor.detach().float().clone()
    if average is not None:
        for name, parameter in average.module.named_parameters():
            seen.tensors[f"average of {name}"] = parameter.detach().float().clone()
    if habits.cache:
        assert type(model.table) is Tensor


def backward(program: Program, model: Model, seen: Seen, inputs: Inputs, targets: Tensor) -> None:
    """Run forward and backward of a micro-batch."""
    habits, kept = program.habits, []
    handle = model.blocks[-1].register_forward_hook(lambda module, args, result: kept.append(result))
    if habits.contained:
        output = model(inputs)
    else:
        output = model(inputs.tokens, time=inputs.time, branch=inputs.branch)
    handle.remove()
    loss = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
    if habits.auxiliary is not None:
        loss = loss + 0.3 * (
            model.auxiliary if habits.auxiliary == "attribute" else kept[0].float().square().mean()
        )
    if habits.penalty is not None:
        (slope,) = torch.autograd.grad(loss, model.hidden[habits.penalty], create_graph=True)
        loss = loss + 10 * slope.float().square().sum()
    if habits.watched == "hidden state" and model.hidden["head"].requires_grad:
        model.hidden["head"].register_hook(
            lambda gradient: seen.note("slope", gradient.detach().float().norm())
        )
    if habits.divided:
        loss /= habits.accumulate
    # With a loss scale in fp16, larger gradients overflow, and the step is skipped.
    loss = loss * (2.0**-9 if program.place.compute == "fp16" else 1.0)
    if habits.retained:
        loss.backward(retain_graph=True)
    loss.backward()
    seen.note("loss", loss.detach())
    model.hidden, model.auxiliary = {}, None


def forget(habits: Habits, trainer: Plain, other: Any) -> None:
    if habits.zeros == "model":
        trainer.model.zero_grad(set_to_none=False)
        return
    trainer.optimizer.zero_grad(set_to_none=habits.zeros is None)
    if other is not None:
        other.zero_grad(set_to_none=habits.zeros is None)


def reload(model: nn.Module, optimizer: torch.optim.Optimizer, *, model_first: bool) -> None:
    """Save model and optimizer, and load them at once: nothing may change, whatever the order."""
    values, states = model.state_dict(), optimizer.state_dict()
    if model_first:
        model.load_state_dict(values)
    optimizer.load_state_dict(states)
    if not model_first:
        model.load_state_dict(values)


def optimizers(habits: Habits, model: Model) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer | None]:
    make = OPTIMIZERS[habits.optimizer]
    if not habits.second_optimizer:
        return make(model.parameters()), None
    head = {id(each) for each in model.head.parameters()}
    return (
        make([each for each in model.parameters() if id(each) not in head]),
        make(model.head.parameters()),
    )


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def plain(program: Program) -> Seen:
    habits, seen = program.habits, Seen()
    model = made(habits)
    optimizer, other = optimizers(habits, model)
    average = None if habits.average is None else averaged(model)
    run(program, Plain(model, optimizer), seen, average, other)
    return seen


def offloaded(program: Program, directory: Path) -> Seen:
    """Run a program with its model offloaded. An InfinityError ends it and becomes `Seen.refusal`."""
    habits, seen = program.habits, Seen()
    model = made(habits)
    optimizer, other = optimizers(habits, model)
    average = averaged(model) if habits.average == "before" else None
    try:
        with opened(program, model, optimizer, directory) as runtime:
            if habits.average == "after":
                average = averaged(model)
            run(program, Offloaded(model, runtime), seen, average, other)
    except InfinityError as error:
        seen.refusal = error.again()
    return seen


@contextlib.contextmanager
def opened(
    program: Program, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path
) -> Iterator[Any]:
    habits, place = program.habits, program.place
    inputs, _ = batch(habits, 0, 0)
    example: Any = (inputs,)
    if not habits.contained:
        example = {"inputs": inputs.tokens, "time": inputs.time, "branch": inputs.branch}
    options: dict[str, Any] = {
        "precision": infinity.Precision(compute=place.compute),
        "device": "cpu",
        "update": place.update,
        "accumulation": habits.accumulate * (1 + habits.retained) if place.update == "eager" else None,
        "example_inputs": example if place.example else None,
    }
    budget = infinity.Budget(
        device=ROOMY if "apart" in place.home else None,
        host=ROOMY,
        nvme={str(directory): ROOMY} if "nvme" in place.home else None,
    )
    plan = infinity.plan(model, optimizer, budget=budget, **options)
    extra = int(place.room * sum(plan.home_bytes.values()))
    tight = {tier.value: nbytes + extra for tier, nbytes in plan.smallest.items() if tier is not Tier.NVME}
    with infinity.offload(model, optimizer, budget=replace(budget, **tight), **options) as runtime:
        yield runtime


# --- the comparison ---------------------------------------------------------------------------------------

CLOSE = {"fp32": 2e-4, "fp16": 0.1, "bf16": 0.35}
"""How far two runs of a program may be apart, relative to what a tensor holds, by the dtype of computation.

fp32: updates round otherwise than torch's, and Adam makes much of small gradients. Wrong values are wrong by
far more: a gradient that is lost, doubled, or times a loss scale; a decay that is left out.
"""


def compare(program: Program, expected: Seen, got: Seen) -> list[str]:
    """Say in what the run `got` differs from the run `expected`."""
    close, found = CLOSE[program.place.compute], []
    for name, numbers in expected.numbers.items():
        for number, (one, two) in enumerate(zip(numbers, got.numbers.get(name, []), strict=False)):
            if not math.isclose(one, two, rel_tol=close, abs_tol=close * 1e-2):
                found.append(f"{name} number {number} is {two}, right {one}")
    if got.refusal is not None:
        return found
    if any(len(each) != len(got.numbers.get(name, [])) for name, each in expected.numbers.items()):
        found.append(f"{ {name: len(each) for name, each in got.numbers.items()} } figures were noted")
    for name in expected.tensors.keys() ^ got.tensors.keys():
        found.append(f"{name} is in one run only")
    for name, right in expected.tensors.items():
        if name in got.tensors:
            error = (got.tensors[name] - right).norm().item()
            # With rounding, an element near zero may take a step of Adam the other way.
            near = 1e-6 if close < 1e-2 or name.startswith("gradient") else 2.5 * RATE
            if not error <= close * right.norm().item() + near:
                found.append(f"{name} is off by {error:.3g}, of {right.norm().item():.3g}")
    return found
