"""Gradient failure: the error that lost the gradients of a step, kept until the gradients are forgotten."""

from __future__ import annotations

from infinity.errors import ConfigError, InfinityError


class GradientFailure:
    """Holds, as `error`, the latest error that made the gradients of the current step invalid, or None.

    Such an error left a gradient partly added to the stored one, or partly written to its page's home.
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
