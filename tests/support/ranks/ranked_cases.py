"""Cases of training on several ranks, each trained by one rank, too, with the same micro-batches.

Micro-batch m of rank r among N is number m*N+r of one rank. One rank divides its losses by N as well, because
several ranks average their gradients. With N a power of two that changes no bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from homes import ROOMY, check_homes
from ranked_models import SUBJECTS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import infinity
from infinity.api import plan_for
from infinity.config import Precision
from infinity.layout import tiles
from infinity.layout.shards import ALONE, Share
from infinity.ranks import SingleRank
from infinity.runtime import Runtime
from infinity.tiers import Tier

PARTITIONS = (None, "optimizer", "gradients", "parameters")
"""Stage of ZeRO -> name of what is divided."""
HOMES = ("unified", "device", "host", "nvme")
"""In RAM where the model computes; on a device with memory of its own; in RAM beside such a device; on NVMe
beside such a device. A case may also have "mirrored": parameters on the device, and all pages in RAM; and
"uneven": in RAM on rank 0 and on one rank, and on NVMe as far as possible on the others.
"""
SEED = 7


@dataclass(frozen=True)
class Case:
    """The settings of one training."""

    subject: str = "mlp"
    stage: int = 3
    accumulate: int = 1
    clip: float | None = None
    home: str = "unified"
    compute: str = "fp32"
    states: str = "fp32"
    optimizer: str = "adamw"
    rate: float = 0.02
    """Muon's learning rate."""
    declared: bool = False
    """Whether offload is told the number of backwards in a step."""
    together: bool = False
    """Whether runtime.accumulate runs the micro-batches."""
    update: str = "lazy"
    activations: str = "keep"
    """The policy of activations on several ranks; one rank keeps them. If they leave and `home` is "nvme",
    half of them go to NVMe.
    """
    steps: int = 3
    generates: bool = False
    """Whether each rank runs forwards alone between steps, each rank another number of them."""
    copy: str = ""
    """Name of a copy that is saved or loaded."""
    first: int = 0
    """Number of the first step of a run that goes on from a commit."""
    roomy: int = ROOMY
    """Budget in bytes of a tier that has room for all that shall rest there."""

    @property
    def exact(self) -> bool:
        """Whether several ranks have the bits of one rank."""
        return self.stage >= 2 or self.accumulate == 1

    @property
    def name(self) -> str:
        """The settings that are not the defaults, as the test's name."""
        plain = asdict(Case())
        mine = {name: value for name, value in asdict(self).items() if value != plain[name]}
        words = [str(mine.pop("subject", "mlp")), f"stage{self.stage}"]
        mine.pop("stage", None)
        return "-".join(
            words + [name if value is True else f"{name}={value}" for name, value in mine.items()]
        )


MODELS = (
    Case("frozen", 3, accumulate=2, clip=0.05),
    Case("frozen", 2, home="nvme"),
    Case("convolutions", 3, home="nvme"),
    Case("convolutions", 2, accumulate=2),
    Case("dtypes", 3, compute="bf16", accumulate=2),
    Case("dtypes", 2, compute="bf16", home="nvme", clip=0.05),
    Case("groups", 3, accumulate=2),
    Case("groups", 2, home="nvme"),
    Case("meta", 3),
    Case("meta", 2, home="nvme"),
    Case("odd", 3, accumulate=2, clip=0.05),
    Case("odd", 2, home="nvme", compute="bf16"),
    Case("tiny", 3),
    Case("decoder", 3, update="sync"),
    Case("decoder", 3, accumulate=3, compute="fp16", steps=6),
    Case("mlp", 2, accumulate=2, update="eager", declared=True),
    Case("decoder", 3, accumulate=2, update="eager", declared=True, compute="bf16"),
    Case("mlp", 3, update="eager", declared=True, home="nvme"),
    Case("recomputed", 3, accumulate=2, clip=0.05, home="nvme"),
    Case("reentrant", 3, accumulate=2, clip=0.05, home="nvme"),
    Case("reentrant", 2),
    Case("reentrant", 1),
    Case("tiled", 3, home="host", accumulate=2, clip=0.05, compute="bf16"),
    Case("tiled", 0, clip=0.05),
    Case("tiled", 2, home="nvme", accumulate=2, states="int8"),
    Case("tiled", 1, home="host", compute="bf16"),
    Case("tiled", 2, home="host", accumulate=2, update="eager", declared=True),
    Case("tiled", 3, home="nvme", clip=0.05),
)
"""Cases with models of all kinds, for two ranks."""
ON_FOUR = (
    Case("mlp", 3, accumulate=2, clip=0.05),
    Case("decoder", 2, home="nvme", compute="bf16"),
    Case("decoder", 2, compute="fp16", steps=6),
    Case("decoder", 3, home="host", accumulate=2, together=True),
    Case("tiled", 3, home="host", compute="bf16"),
    Case("odd", 3, states="int8"),
    Case("tiny", 2, optimizer="sgd"),
    Case("convolutions", 3, compute="bf16", states="bf16", declared=True),
)
"""Cases for four ranks."""
SOME = pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
"""For tests of many cases: every tenth of them, or all."""


class Place(NamedTuple):
    """Where a process stands among the ranks of a case."""

    rank: int
    ranks: int
    """Number of ranks."""
    alone: bool
    """Whether one rank runs the micro-batches of all."""


def budget_of(case: Case, place: Place, model: nn.Module, optimizer: Any, directory: Path) -> infinity.Budget:
    """A budget under which the pages of the case rest at its home."""
    roomy = case.home == "uneven" and place.rank == 0
    if case.home == "unified" or roomy:
        return infinity.Budget(host=case.roomy)
    nvme = {str(directory): case.roomy}
    apart = None if case.home == "uneven" else case.roomy
    share = ALONE if place.alone else Share(place.rank, place.ranks, case.stage)
    ample = plan_for(
        SingleRank("cpu", share=share),
        model,
        optimizer,
        budget=infinity.Budget(device=apart, host=case.roomy, nvme=nvme),
        precision=precision_of(case),
        example_inputs=_example(case, place),
        update=case.update,
        activations="recompute" if case.home == "uneven" else _policy(case, place),
        accumulation=_backwards(case, place) if case.declared else None,
    )
    smallest = ample.smallest
    if case.home == "device":
        return infinity.Budget(device=case.roomy, host=smallest[Tier.HOST])
    if case.home in ("host", "mirrored"):
        pages = [unit.nbytes for unit in ample.layout.units]
        more = sum(pages) - max(pages) if case.home == "mirrored" else 0
        return infinity.Budget(device=smallest[Tier.DEVICE] + more, host=case.roomy)
    near = {} if case.home == "uneven" else {"device": smallest[Tier.DEVICE]}
    return infinity.Budget(**near, host=smallest[Tier.HOST] - ample.residuals.ram // 2, nvme=nvme)


def _policy(case: Case, place: Place) -> str:
    return "keep" if place.alone else case.activations


def _example(case: Case, place: Place) -> tuple[Tensor, ...] | None:
    """The example inputs, for policies that need them."""
    subject = SUBJECTS[case.subject]
    known = _policy(case, place) in ("keep", "recompute")
    return None if known else subject.arguments(subject.batch(0, 0))


def precision_of(case: Case) -> Precision:
    return Precision(compute=case.compute, states=case.states, keep=SUBJECTS[case.subject].keep)


@contextmanager
def opened(case: Case, place: Place, directory: Path, *, seed: int = SEED, **options: Any) -> Any:
    """Yield (model, runtime). Ranks have seeds of their own; that of rank 0 is the reference's.

    seed: that of rank 0. options: further ones of offload.
    """
    subject = SUBJECTS[case.subject]
    torch.manual_seed(seed + place.rank)
    with torch.device("meta" if subject.meta else "cpu"):
        model = subject.make()
    groups: Any = subject.groups(model) if subject.groups else list(model.parameters())
    optimizer: torch.optim.Optimizer
    if case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
    elif case.optimizer == "muon":
        optimizer = torch.optim.Muon([each for each in model.parameters() if each.ndim == 2], lr=case.rate)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    with (
        mock.patch.object(tiles, "FEWEST_ELEMENTS", 1 << 12),
        infinity.offload(
            model,
            optimizer,
            budget=budget_of(case, place, model, optimizer, directory),
            precision=precision_of(case),
            device="cpu",
            update=case.update,
            activations=_policy(case, place),
            example_inputs=_example(case, place),
            accumulation=_backwards(case, place) if case.declared else None,
            partition=PARTITIONS[case.stage],
            **options,
        ) as runtime,
    ):
        if case.home != "uneven" and _example(case, place) is None:  # else the prediction has a say in it
            check_homes(case.home, runtime.plan)
        yield model, runtime


@dataclass(frozen=True)
class Run:
    """A runtime that trains a case, with the schedulers of the case."""

    case: Case
    place: Place
    model: nn.Module
    runtime: Runtime
    schedulers: Sequence[torch.optim.lr_scheduler.StepLR]

    def take_steps(
        self, steps: range, found: dict[str, Any], *, then: Callable[[], object] = lambda: None
    ) -> None:
        """Take the steps with these numbers, each followed by one of the schedulers and a call of `then`. Add
        their losses, norms and what was generated to `found`.
        """
        for step in steps:
            self._take_step(step, found)
            for each in self.schedulers:
                each.step()
            then()

    def schedules(self) -> list[dict[str, Any]]:
        """The states of the schedulers."""
        return [each.state_dict() for each in self.schedulers]

    def load_schedules(self, saved: Sequence[dict[str, Any]]) -> None:
        """Have the schedulers go on from what `schedules` returned."""
        for each, state in zip(self.schedulers, saved, strict=True):
            each.load_state_dict(state)

    def _take_step(self, step: int, found: dict[str, Any]) -> None:
        found["losses"] += backwards(self.case, self.place, self.model, self.runtime, step)
        if self.case.clip is not None:
            found["norms"].append(float(self.runtime.clip_grad_norm_(self.case.clip)))
        self.runtime.optimizer.step()
        self.runtime.optimizer.zero_grad()
        if self.case.generates:
            found["generated"].append(_generated(self.model, self.place.rank, step))


@contextmanager
def running(case: Case, place: Place, directory: Path, **options: Any) -> Iterator[Run]:
    """Yield a run of a case that has taken no step. options: those of `opened`."""
    with opened(case, place, directory, **options) as (model, runtime):
        schedulers = []
        if SUBJECTS[case.subject].schedule:
            schedulers.append(torch.optim.lr_scheduler.StepLR(runtime.optimizer, 1, gamma=0.7))
        yield Run(case, place, model, runtime, schedulers)


def nothing() -> dict[str, Any]:
    """What a run has found before its first step."""
    return {"losses": [], "norms": [], "generated": []}


def train(case: Case, place: Place, directory: Path, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """Train a case. Returns digests of all parameters by name, losses, norms, and what was generated.

    mesh: the ranks that train; None: all.
    """
    found = nothing()
    with running(case, place, directory, mesh=mesh) as run:
        run.take_steps(range(case.steps), found)
        tell_values(run.model, found)
        tell_updates(run.runtime, found)
    return found


def tell_updates(runtime: Runtime, found: dict[str, Any]) -> None:
    """Add how many speculative updates were confirmed, and how many were undone, to `found`."""
    found["speculative"] = runtime.stats.confirmed_updates, runtime.stats.undone_updates


def tell_values(model: nn.Module, found: dict[str, Any]) -> None:
    """Add what the model's state_dict has to `found`."""
    state = model.state_dict()
    found["digests"] = {name: digest(each) for name, each in state.items()}
    found["values"] = [float(each.double().norm()) for each in state.values()]


def backwards(case: Case, place: Place, model: nn.Module, runtime: Runtime, step: int) -> list[float]:
    """Run the forwards and backwards of a step. Returns the losses, divided by the number of backwards of a
    rank.
    """
    subject = SUBJECTS[case.subject]
    count = _backwards(case, place)
    apart = 1 if place.alone else place.ranks
    first = step * case.accumulate * place.ranks + (0 if place.alone else place.rank)
    batches = [subject.batch(step, first + apart * each) for each in range(count)]

    def loss_of(batch: tuple[Tensor, ...]) -> Tensor:
        return subject.loss_of(model, batch) / count

    losses = []
    if case.together:
        losses = runtime.accumulate(batches, loss_of)
    else:
        for batch in batches:
            loss = loss_of(batch)
            loss.backward()
            losses.append(loss.detach())
    return [float(each) * (place.ranks if place.alone else 1) for each in losses]


def _generated(model: nn.Module, rank: int, step: int) -> list[int]:
    """Have a decoder go on with a text, by more tokens the higher the rank. Returns the first three."""
    tokens = SUBJECTS["decoder"].batch(step, 0)[0][:1]
    model.eval()
    with torch.no_grad():
        for _ in range(3 + 4 * rank):
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), 1)
    model.train()
    found: list[int] = tokens[0, 9:12].tolist()
    return found


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's values, in the order of its indices."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def differences(case: Case, ranks: int, found: Sequence[Any], alone: dict[str, Any]) -> list[str]:
    """What is not the same on several ranks and on one, as phrases; empty if all is.

    found: what `train` returned on each rank, or else an error's text. alone: what it returned on one rank.
    Stages 0 and 1 may differ in the last bits if a rank has several backwards in a step: each rank adds its
    own gradients first.
    """
    broken = [each for each in found if not isinstance(each, dict)]
    if broken:
        return [f"{case.name} ended with {broken[0]}"]
    told = []
    for name in ("digests", "norms", "generated"):
        if any(each[name] != found[0][name] for each in found):
            told.append(f"{case.name}: the {name} of ranks differ")
    losses = [found[number % ranks]["losses"][number // ranks] for number in range(len(alone["losses"]))]
    mine = {**found[0], "losses": losses}
    if case.exact:
        told += [
            f"{case.name}: {name} {mine[name]} where one rank has {alone[name]}"
            for name in ("digests", "losses", "norms", "generated")
            if mine[name] != alone[name]
        ]
        return told
    for name in ("values", "losses", "norms"):
        far = [(a, b) for a, b in zip(mine[name], alone[name], strict=True) if abs(a - b) > 1e-5 * abs(b)]
        if far:
            told.append(f"{case.name}: {name} of ranks and of one rank are far apart: {far}")
    return told


def pairwise(options: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few combinations of options in which every two values of two options meet."""
    names = list(options)
    open_pairs = {
        (a, x, b, y)
        for at, a in enumerate(names)
        for b in names[at + 1 :]
        for x in options[a]
        for y in options[b]
    }
    found = []
    while open_pairs:
        a, x, b, y = min(open_pairs, key=repr)
        chosen = {a: x, b: y}
        for name in names:
            if name not in chosen:
                chosen[name] = max(
                    options[name], key=lambda value, name=name: _meets(open_pairs, chosen, name, value)
                )
        open_pairs -= {
            each for each in open_pairs if chosen[each[0]] == each[1] and chosen[each[2]] == each[3]
        }
        found.append({name: chosen[name] for name in names})
    return found


def _meets(open_pairs: set[Any], chosen: dict[str, Any], name: str, value: Any) -> int:
    """The number of open pairs that a value would close, given the values chosen so far."""
    return sum(
        (a == name and x == value and chosen.get(b) == y and b in chosen)
        or (b == name and y == value and a in chosen and chosen[a] == x)
        for a, x, b, y in open_pairs
    )


def _backwards(case: Case, place: Place) -> int:
    return case.accumulate * (place.ranks if place.alone else 1)
