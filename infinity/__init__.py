"""infinity: virtual memory for training."""

from infinity.config import Budget, Precision
from infinity.errors import (
    BudgetError,
    ConfigError,
    InfinityError,
    NonFiniteGradient,
    StorageError,
    StorageFull,
    UnsupportedOptimizer,
)
from infinity.offload import offload
from infinity.plan import Plan, plan
from infinity.runtime import Runtime
from infinity.telemetry import Stats

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "BudgetError",
    "ConfigError",
    "InfinityError",
    "NonFiniteGradient",
    "Plan",
    "Precision",
    "Runtime",
    "Stats",
    "StorageError",
    "StorageFull",
    "UnsupportedOptimizer",
    "offload",
    "plan",
]
