"""The health of a runtime: whether it may still be used, and if not, why."""

from __future__ import annotations

from infinity.errors import ConfigError, InfinityError


class Health:
    """One for a runtime, shared by its parts."""

    def __init__(self) -> None:
        self.closed = False
        self.failure: InfinityError | None = None
        """Why there are parameters that nobody has any more."""

    def lose(self, error: InfinityError) -> None:
        """Nothing that is used from now on can be right, because of this error; the first one counts."""
        self.failure = self.failure or error.again()

    def check(self) -> None:
        """Raises ConfigError once closed, and the failure if there is one."""
        if self.closed:
            raise ConfigError(
                "The runtime of this model is closed, and its parameters are gone with it.",
                "Use the model before runtime.close(); copy its state_dict() if it is wanted afterwards.",
            )
        if self.failure is not None:
            raise self.failure.again()
