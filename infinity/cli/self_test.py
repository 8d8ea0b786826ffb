"""Self-test: trains a tiny model at every home that this machine has, on one rank and on two, and compares
the results with plain PyTorch's and with each other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity.api import offload, plan_for
from infinity.cli.finding import Finding
from infinity.cli.trial import Trial
from infinity.config import Budget, Precision
from infinity.errors import BudgetError, InfinityError, storage_errors
from infinity.layout.shards import ALONE, Share
from infinity.planning.headroom import Headroom
from infinity.planning.plan import Plan
from infinity.ranks import SingleRank
from infinity.tiers import PAGE_ALIGNMENT, Tier
from infinity.tiers.tier import usable_device

SECTION = "training"
BITS = "equal bits"
"""Name of the finding that compares all trainings."""

_ROOMY = 64 << 20
"""Bytes of a budget with room for all pages of the model."""
_STEPS = 4
_RANKS = 2
"""Number of ranks, and of micro-batches a step, which one rank takes one after the other."""
_RATE, _CLIP = 1e-3, 0.5
_NO_MATCH = (
    "Do not train there on this machine, and report this with the text at the end. Bits that change "
    "from run to run point to faulty memory."
)
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
_PATIENCE = 10
"""Seconds for which a rank waits for the other one."""


@dataclass(frozen=True)
class Home:
    """Where the pages of a training rest, and where the model computes."""

    name: str
    tier: Tier
    apart: bool
    """Whether the device has memory of its own. The CPU then gets a device budget."""
    device: str = "cpu"
    path: str | None = None
    """The directory of NVMe pages."""


def homes(paths: Sequence[str], device: str) -> list[Home]:
    """The homes to train at: in each tier, and in each directory of `paths`. device: "cpu" or "cuda"."""
    if device == "cuda":
        found = [Home("on the GPU", Tier.DEVICE, True, device), Home("GPU, RAM", Tier.HOST, True, device)]
        return found + [Home(f"GPU, {path}", Tier.NVME, True, device, path) for path in paths]
    found = [
        Home("CPU, RAM", Tier.HOST, False),
        Home("CPU with a device tier", Tier.DEVICE, True),
        Home("CPU with a device tier, RAM", Tier.HOST, True),
    ]
    for path in paths:
        found.append(Home(f"CPU, {path}", Tier.NVME, False, path=path))
        found.append(Home(f"CPU with a device tier, {path}", Tier.NVME, True, path=path))
    return found


def trials(paths: Sequence[str]) -> list[Trial]:
    """The trainings as trials. Those on a GPU find nothing where there is none."""
    places = homes(paths, "cpu") + homes(paths, "cuda")
    found = [Trial(SECTION, each.name, [functools.partial(train_alone, each)]) for each in places]
    for path in (None, *paths[:1]):
        name = f"two ranks, {path or 'RAM'}"
        home = Home(name, Tier.HOST if path is None else Tier.NVME, False, path=path)
        port = _free_port()
        ranks = [functools.partial(train_as_rank, home, rank, port) for rank in range(_RANKS)]
        found.append(Trial(SECTION, name, ranks))
    return found


def removal(paths: Sequence[str]) -> Trial:
    """The trial that removes what trials have left that were killed. It finds nothing."""
    return Trial(SECTION, "the removal of files", [functools.partial(_remove, paths)], seconds=5.0)


def _remove(paths: Sequence[str]) -> Iterable[Finding]:
    for path in paths:
        for left in Path(path).glob(f"{_prefix()}*"):
            shutil.rmtree(left, ignore_errors=True)
    return ()


def train_alone(home: Home) -> Iterator[Finding]:
    """Train at a home in fp32, beside plain PyTorch, and in bf16. Yields what has come of it.

    Raises InfinityError if the results differ from plain PyTorch's, and the errors of `infinity.offload`.
    """
    if home.device == "cuda" and not torch.cuda.is_available():
        return
    begun = time.perf_counter()
    with _in_process(home.device), _directory(home.path) as directory:
        ours, off = _paged(home, directory, "fp32", range(_RANKS))
        _check(ours, _plain(home.device))
        rounded, _ = _paged(home, directory, "bf16", range(_RANKS))
        if directory is not None and _resumed(home, directory) != ours.digest:
            raise InfinityError("A run that goes on from a commit there has other bits.", _NO_MATCH)
    took = time.perf_counter() - begun
    more = "" if directory is None else ", and go on from a commit"
    text = f"{_STEPS} steps as plain PyTorch, and in bf16{more}, in {took:.1f} s"
    figures = {
        "seconds": took,
        "device": home.device,
        "fp32": ours.digest,
        "bf16": rounded.digest,
        "off": off,
    }
    without = f"Slower, without {'; '.join(off)}."
    yield Finding(SECTION, home.name, text, figures, bool(off), without, "See what is said of it above.")


def train_as_rank(home: Home, rank: int, port: int) -> Iterator[Finding]:
    """Train as one of two ranks, each with one of the micro-batches. Rank 0 yields what has come of it.

    port: a free TCP port. Raises the errors of `train_alone` and RankFailure.
    """
    begun = time.perf_counter()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": _RANKS, "LOCAL_WORLD_SIZE": _RANKS}
    variables |= {"MASTER_PORT": port, "INFINITY_RANK_TIMEOUT": _PATIENCE}
    with _in_process(home.device), _directory(home.path) as directory:
        os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
        ours, _ = _paged(home, directory, "fp32", [rank], Share(rank, _RANKS, stage=3))
    took = time.perf_counter() - begun
    if rank == 0:
        text = f"{_STEPS} steps of two processes in {took:.1f} s"
        figures = {"seconds": took, "device": home.device, "fp32": ours.digest}
        yield Finding(SECTION, home.name, text, figures)


def compared(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Compare the parameters after all trainings, bit by bit: those of a device must be equal."""
    by_kind: dict[tuple[str, str], dict[str, list[str]]] = {}
    for each in findings:
        for compute in ("fp32", "bf16"):
            if each.section == SECTION and compute in each.figures:
                known = by_kind.setdefault((each.figures["device"], compute), {})
                known.setdefault(each.figures[compute], []).append(each.name)
    for (device, compute), digests in by_kind.items():
        name = f"{BITS}, {device}, {compute}"
        if len(digests) == 1:
            (names,) = digests.values()
            yield Finding(SECTION, name, f"at all {len(names)} homes", {"homes": names})
            continue
        alike = sorted(digests.values(), key=len, reverse=True)
        sides = " against ".join(", ".join(names) for names in alike)
        error = InfinityError(f"Parameters differ between homes: {sides}.", _NO_MATCH)
        yield Finding.of(error, SECTION, name, "differ", homes=alike)


# --- the training ------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 96), nn.Linear(96, width)

    def forward(self, x: Tensor) -> Tensor:
        more: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + more


class _Model(nn.Module):
    """Blocks between an embedding and a head that share their weight, which is used outside of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 40)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = nn.ModuleList(_Block(40) for _ in range(3))
        self.norm = nn.LayerNorm(40)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.embedding.weight), targets)


@dataclass
class _Run:
    """What a training has computed. Tensors are copies in RAM, by the parameter's name."""

    losses: list[float] = field(default_factory=list)
    """Of each micro-batch."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, before clipping."""
    first: dict[str, Tensor] = field(default_factory=dict)
    """Parameters after the first step."""
    last: dict[str, Tensor] = field(default_factory=dict)
    """Parameters after the last step."""

    @property
    def digest(self) -> str:
        """A hash of the last parameters."""
        found = hashlib.sha256()
        for name, each in sorted(self.last.items()):
            found.update(name.encode() + each.contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _Model()
    return model, torch.optim.AdamW(model.parameters(), lr=_RATE)


def _batch(step: int, micro: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and targets, each int64 (24,)."""
    random = torch.Generator().manual_seed(100 * step + micro)
    tokens = torch.randint(0, 61, (25,), generator=random).to(device)
    return tokens[:-1], tokens[1:]


def _trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: str,
    micros: Sequence[int],
    *,
    clip: Callable[[float], object],
    gradient: Callable[[nn.Parameter], Tensor | None],
    steps: range = range(_STEPS),
) -> _Run:
    """Train in an ordinary loop. micros: the numbers of the micro-batches of a step. steps: their numbers."""
    run = _Run()
    for step in steps:
        for micro in micros:
            loss = model(*_batch(step, micro, device))
            (loss / len(micros)).backward()
            run.losses.append(loss.item())
        if step == 0 and len(micros) == _RANKS:
            found = {name: gradient(each) for name, each in model.named_parameters()}
            run.gradients = _copies({name: each for name, each in found.items() if each is not None})
        clip(_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            run.first = _copies(model.state_dict())
    run.last = _copies(model.state_dict())
    return run


def _plain(device: str) -> _Run:
    """Train in plain PyTorch, in fp32."""
    model, optimizer = _made()
    model.to(device)
    clip = functools.partial(nn.utils.clip_grad_norm_, [*model.parameters()])
    return _trained(model, optimizer, device, range(_RANKS), clip=clip, gradient=lambda each: each.grad)


def _paged(
    home: Home, directory: str | None, compute: str, micros: Sequence[int], share: Share = ALONE
) -> tuple[_Run, tuple[str, ...]]:
    """Train with pages at a home. Returns the run, and the facilities that the runtime did without.

    share: this rank's.
    """
    model, optimizer = _made()
    precision = Precision(compute=compute, states="fp32")

    def planned(budget: Budget) -> Plan:
        ranks = SingleRank(home.device, share=share)
        options: dict[str, Any] = {"example_inputs": None, "update": "auto", "accumulation": None}
        return plan_for(ranks, model, optimizer, budget=budget, precision=precision, **options)

    budget = _budget(home, directory, planned)
    with offload(model, optimizer, budget=budget, precision=precision, device=home.device) as runtime:
        tiers = {tier for unit in runtime.plan.homes for tier in unit.values() if tier is not None}
        if home.tier not in tiers or (home.tier is not Tier.HOST and len(tiers) > 1):
            raise InfinityError(
                f"The plan puts pages in {', '.join(sorted(each.value for each in tiers))} instead of "
                f"{home.tier.value}.",
                "Report this, with the text at the end.",
            )
        clip, gradient = runtime.clip_grad_norm_, runtime.grad
        run = _trained(model, runtime.optimizer, home.device, micros, clip=clip, gradient=gradient)
        return run, runtime.plan.off


def _resumed(home: Home, directory: str) -> str:
    """Train at a home on disk in fp32, commit after half of the steps, and go on from the commit with another
    model. Returns the digest.
    """
    half, micros, commits = _STEPS // 2, range(_RANKS), os.path.join(directory, "commits")
    for steps in (range(half), range(half, _STEPS)):
        model, optimizer = _made()
        budget = Budget(device=_ample(home), host=_ROOMY, nvme={directory: _ROOMY})
        where = {"resume": commits} if steps.start else {"checkpoint": commits}
        options: dict[str, Any] = {"precision": Precision(compute="fp32", states="fp32"), **where}
        with offload(model, optimizer, budget=budget, device=home.device, **options) as runtime:
            clip, gradient = runtime.clip_grad_norm_, runtime.grad
            given = (model, runtime.optimizer, home.device, micros)
            run = _trained(*given, clip=clip, gradient=gradient, steps=steps)
            if not steps.start:
                runtime.save().wait()
    return run.digest


def _budget(home: Home, directory: str | None, planned: Callable[[Budget], Plan]) -> Budget:
    """A budget under which pages rest at the home. planned: makes a plan for a budget."""
    nvme: dict[str | os.PathLike[str], int | str] | None = None if directory is None else {directory: _ROOMY}
    apart = _ample(home)
    if home.tier is Tier.DEVICE:
        try:
            planned(Budget(device=apart, host=PAGE_ALIGNMENT))
        except BudgetError as error:
            return Budget(device=apart, host=error.needed)
        return Budget(device=apart, host=PAGE_ALIGNMENT)
    least = planned(Budget(device=apart, host=_ROOMY, nvme=nvme)).smallest
    near = least[Tier.DEVICE] if home.apart else None
    return Budget(device=near, host=_ROOMY if home.tier is Tier.HOST else least[Tier.HOST], nvme=nvme)


def _ample(home: Home) -> int | None:
    """A device budget with room for all pages; None for a device without memory of its own."""
    if not home.apart:
        return None
    target = usable_device(home.device)
    return _ROOMY + (Headroom.of(target).beside(_ROOMY) if target.type == "cuda" else 0)


def _check(ours: _Run, plain: _Run) -> None:
    """Raise InfinityError unless a training in fp32 has what plain PyTorch computes: the first losses and
    gradients in every bit, the first update within 8 ULP of its operands, later losses within 1e-5.
    """
    wrong = [] if ours.losses[:_RANKS] == plain.losses[:_RANKS] else ["the first losses"]
    for name, each in plain.gradients.items():
        if name not in ours.gradients or not torch.equal(ours.gradients[name], each):
            wrong.append(f"the gradient of {name}")
    for name, each in plain.first.items():
        bound = 8 * 2.0**-23 * each.double().abs().clamp(min=_RATE)
        if not bool(((ours.first[name].double() - each.double()).abs() <= bound).all()):
            wrong.append(f"the first update of {name}")
    pairs = zip(ours.losses, plain.losses, strict=True)
    if not all(abs(mine - theirs) <= 1e-5 * abs(theirs) for mine, theirs in pairs):
        wrong.append("later losses")
    if wrong:
        more = f" and {len(wrong) - 3} others" if len(wrong) > 3 else ""
        raise InfinityError(f"Not as in plain PyTorch: {', '.join(wrong[:3])}{more}.", _NO_MATCH)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.detach().to("cpu", copy=True) for name, each in tensors.items()}


# --- the process of a trial --------------------------------------------------------------------------------


@contextlib.contextmanager
def _in_process(device: str) -> Iterator[None]:
    """Have torch compute the same bits every time, in a process that is no rank of its own accord."""
    before = dict(os.environ)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    for name in _LAUNCHERS:
        os.environ.pop(name, None)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(device != "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _directory(path: str | None) -> Iterator[str | None]:
    """Make a directory in `path` for pages, and remove it at the end. Raises StorageError."""
    if path is None:
        yield None
        return
    with storage_errors("make a directory in", path):
        made = tempfile.mkdtemp(prefix=_prefix(), dir=path)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _prefix() -> str:
    """Beginning of the names of directories of all trials, which are processes of one parent."""
    return f".infinity-self-test-{os.getppid()}-"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
