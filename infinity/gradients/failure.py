"""Gradient failure: the error that lost the gradients of a step, kept until the gradients are forgotten."""

from __future__ import annotations

from infinity.errors import ConfigError, InfinityError


class GradientFailure:
    """Holds, as `error`, the latest error that made the gradients of the current step invalid, or None.

    After such an error a gradient may be missing, may be added only in part to the sum of the step's earlier
    gradients, or may be written only in part to the home of its gradient page.
    """

    def __init__(self) -> None:
        self.error: InfinityError | None = None

    def lose(self, error: BaseException) -> None:
        """Record an error after which no gradient of this step is valid.

        A ConfigError takes the place of an error that is not an InfinityError, such as KeyboardInterrupt.
        """
        if isinstance(error, InfinityError):
            self.error = error.again()
        else:
            self.error = ConfigError(
                "A backward was interrupted while a gradient was added.",
                "Call runtime.optimizer.zero_grad() and repeat the step.",
            )

    def forget(self) -> None:
        """Forget the error. Called when the gradients are forgotten."""
        self.error = None
