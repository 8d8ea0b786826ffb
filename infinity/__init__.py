"""infinity: virtual memory for training.

Parameters, gradients and optimizer states are pages that live in device memory, host RAM and NVMe.
"""

import os

# GNU's OpenMP reads this variable when torch loads it, so it helps only if this package is imported before
# torch, as on the command line. Threads that spin for long at barriers keep cores from the threads of I/O and
# updates, and a step takes up to 20 times as long while another process is busy. 5,000 spins cost no speed
# otherwise.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

from infinity.api import offload, plan
from infinity.checkpoint.commit import Commit
from infinity.config import Budget, Precision
from infinity.errors import (
    BudgetError,
    ConfigError,
    CorruptState,
    DeviceError,
    IncompatibleCheckpoint,
    InfinityError,
    NonFiniteGradient,
    RankDivergence,
    RankFailure,
    StorageError,
    StorageFull,
    UnsupportedOptimizer,
)
from infinity.planning.plan import Plan
from infinity.runtime import Runtime
from infinity.system.version import VERSION
from infinity.telemetry.stats import Stats

__version__ = VERSION

__all__ = [
    "Budget",
    "BudgetError",
    "Commit",
    "ConfigError",
    "CorruptState",
    "DeviceError",
    "IncompatibleCheckpoint",
    "InfinityError",
    "NonFiniteGradient",
    "Plan",
    "Precision",
    "RankDivergence",
    "RankFailure",
    "Runtime",
    "Stats",
    "StorageError",
    "StorageFull",
    "UnsupportedOptimizer",
    "offload",
    "plan",
]
