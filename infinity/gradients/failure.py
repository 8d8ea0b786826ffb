"""Gradient failure: what lost the gradients of a step, until they are forgotten."""

from __future__ import annotations

from infinity.errors import ConfigError, InfinityError


class GradientFailure:
    """The latest error with which a gradient was left half added, or half way home."""

    def __init__(self) -> None:
        self.error: InfinityError | None = None

    def lose(self, error: BaseException) -> None:
        """No gradient of this step counts any more."""
        if isinstance(error, InfinityError):
            self.error = error.again()
        else:
            self.error = ConfigError(
                "A backward was interrupted while a gradient was added.",
                "Call runtime.optimizer.zero_grad() and repeat the step.",
            )

    def forget(self) -> None:
        """The gradients are forgotten."""
        self.error = None
