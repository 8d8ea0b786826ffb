"""infinity: virtual memory for training."""

from infinity.errors import (
    BudgetError,
    ConfigError,
    InfinityError,
    NonFiniteGradient,
    StorageError,
    StorageFull,
    UnsupportedOptimizer,
)

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ConfigError",
    "InfinityError",
    "NonFiniteGradient",
    "StorageError",
    "StorageFull",
    "UnsupportedOptimizer",
]
