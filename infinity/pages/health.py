"""Health of a runtime: whether it may still be used, and if not, why."""

from __future__ import annotations

from infinity.errors import ConfigError, InfinityError


class Health:
    """The health of one runtime, shared by its parts."""

    def __init__(self) -> None:
        self.closed = False
        self.failure: InfinityError | None = None
        """The error that lost the only copy of some parameters; None while there was none."""

    def lose(self, error: InfinityError) -> None:
        """Note an error after which the model can no longer be right; the first one is kept."""
        self.failure = self.failure or error.again()

    def check(self) -> None:
        """Raises ConfigError if the runtime is closed, and the failure if there is one."""
        if self.closed:
            raise ConfigError(
                "The runtime of this model is closed, and its parameters are gone with it.",
                "Use the model before runtime.close(); copy its state_dict() if it is wanted afterwards.",
            )
        if self.failure is not None:
            raise self.failure.again()
