"""The native core of infinity.cpu_adam. That package documents every argument."""

from collections.abc import Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from infinity._driver import CopiesAround

AVERAGED: int
BLOCK: int
CODE_BLOCK: int
FIRST_SPAN: int
SECOND_SPAN: int
CODE_BIT: int
NOT_FINITE: int
ROUNDS_UP: int
DEFAULT_CHUNK: int
TILE: int
PIECE_BYTES: int
FOLDED_BYTES: int
MOST_HYPERS: int
MOST_PARAMETERS: int
MOST_PIECES: int
NO_UPDATE: int

class Dtype(Enum):
    F32 = 0
    BF16 = 1
    F16 = 2

class ParameterFormat(Enum):
    PLAIN = 0
    PLAIN_F32 = 1
    PLAIN_BF16 = 2
    PLAIN_F16 = 3
    SPLIT = 4

class MomentFormat(Enum):
    F32 = 0
    BF16 = 1
    INT8 = 2

class Rule(Enum):
    ADAM_W = 0
    ADAM_W_SMALL_BETA = 1
    ADAM = 2
    ADAM_SMALL_BETA = 3
    SGD = 4
    SGD_MOMENTUM = 5
    ADAGRAD = 6
    LION = 7

class Access(Enum):
    READ = 0
    WRITE = 1
    READ_WRITE = 2

class AdamHyper:
    def __init__(
        self,
        decoupled: bool,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        maximize: bool,
    ) -> None: ...

class SgdHyper:
    def __init__(
        self,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        first_step: bool,
        maximize: bool,
    ) -> None: ...

class AdagradHyper:
    def __init__(
        self, lr: float, lr_decay: float, eps: float, weight_decay: float, step: int, maximize: bool
    ) -> None: ...

class LionHyper:
    def __init__(
        self, lr: float, beta1: float, beta2: float, weight_decay: float, maximize: bool
    ) -> None: ...

class AverageStep:
    def __init__(self, begins: bool, weight: float) -> None: ...

class UpdateForm:
    def __init__(
        self,
        elements: int,
        grad_dtype: Dtype,
        format: ParameterFormat,
        moments: MomentFormat,
        places: Sequence[tuple[int, int] | None],
        parts: Sequence[tuple[int, int, int, int]],
    ) -> None: ...

class UpdateTicket:
    @property
    def elements(self) -> int: ...
    def done(self) -> bool: ...
    def times(self) -> tuple[int, int] | None: ...
    def wait(self, timeout: float | None) -> bool: ...
    def nonfinite(self) -> list[int]: ...

class UpdateTickets:
    @property
    def each(self) -> list[UpdateTicket]: ...
    def done(self) -> bool: ...
    def wait(self) -> None: ...

class GradientTicket:
    def done(self) -> bool: ...
    def times(self) -> tuple[int, int] | None: ...
    def wait(self, timeout: float | None) -> bool: ...
    def block_sums(self) -> list[npt.NDArray[np.float64]]: ...

class StreamTicket:
    def done(self) -> bool: ...
    def times(self) -> tuple[int, int] | None: ...
    def wait(self, timeout: float | None) -> bool: ...

class Pool:
    def __init__(self, cpus: Sequence[int], isa: str, chunk: int, openmp: bool) -> None: ...
    def close(self) -> None: ...
    @property
    def cpus(self) -> list[int]: ...
    @property
    def isa(self) -> str: ...
    def reap(self) -> None: ...
    def submit_updates(
        self,
        owners: object,
        forms: Sequence[UpdateForm],
        memory: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]] | None,
        chosen: Sequence[tuple[int, int, int]],
        hypers: Sequence[AdamHyper | SgdHyper | AdagradHyper | LionHyper],
        scale: float,
        average_step: AverageStep,
        awaited: bool,
        priority: int,
        hooks: CopiesAround | None,
    ) -> UpdateTickets: ...
    def submit_gradient(
        self,
        owners: object,
        elements: int,
        grad_dtype: Dtype,
        grad: int,
        accumulated: int,
        copy: int,
        read_accumulated: bool,
        write_accumulated: bool,
        squares: bool,
        segments: Sequence[tuple[int, int, int, int, int]],
        scale: float,
        awaited: bool,
    ) -> GradientTicket: ...
    def submit_stream(
        self,
        owners: object,
        elements: int,
        granule: int,
        arrays: Sequence[tuple[int, int, Access]],
        awaited: bool,
    ) -> StreamTicket: ...

def add_exactly(arrays: Sequence[npt.NDArray[np.float64]]) -> tuple[bytes, float]: ...
def runnable_isas() -> list[str]: ...
def fold(hyper: AdamHyper | SgdHyper | AdagradHyper | LionHyper, scale: float) -> bytes: ...
