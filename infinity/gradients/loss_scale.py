"""Dynamic loss scaling for fp16: gradients are made larger in backward, and smaller again in the update.

The scale is a power of two, so scaling is exact unless a value over- or underflows. If the gradients of a
step are not all finite, the step is skipped and the scale is halved. After 2,000 good steps the scale is
doubled (Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2; the constants are
those of torch.amp.GradScaler, whose scale begins with 2^16).

infinity/model/scaled_backward.py scales the gradients from which a backward starts. If they are in fp16, as
for a loss in fp16, the scale grows to 2^15 at most, because the largest fp16 number is 65504.

[Note: the scale of several ranks]
N ranks average their gradients. One rank that runs the micro-batches of all N ranks divides its losses by N
instead. With a scale that is N times larger, its backward has the same values as the backwards of the N
ranks: the same values overflow, and the same values underflow. So the scale of N ranks is smaller than the
scale of one rank, by N rounded down to a power of two.
"""

from __future__ import annotations

_INITIAL = 2.0**15
_LARGEST_IN_FP16 = 2.0**15
_LARGEST = 2.0**24
_SMALLEST = 2.0**-14
_GROWTH_INTERVAL = 2000


class LossScale:
    """The loss scale of one runtime: a number that `step_was` adapts. It stays 1 unless `dynamic`."""

    def __init__(self, *, dynamic: bool, ranks: int = 1) -> None:
        """ranks: number of ranks that average their gradients; see [Note: the scale of several ranks]."""
        self.dynamic = dynamic
        self._smaller = 2.0 ** (ranks.bit_length() - 1)
        """The scale of one rank, divided by the scale of these ranks."""
        self.value = _INITIAL / self._smaller if dynamic else 1.0
        self._largest = _LARGEST
        self.good_steps = 0
        """Number of steps in a row whose gradients were finite, since the scale last changed."""

    @property
    def of_one_rank(self) -> float:
        """The scale with which a run on one rank would have the same backward; see [Note: the scale of
        several ranks].

        Commits and copies of runs hold this scale, so that any number of ranks can continue them.
        """
        return self.value * self._smaller

    @of_one_rank.setter
    def of_one_rank(self, value: float) -> None:
        self.value = value / self._smaller

    def step_was(self, *, finite: bool) -> None:
        """Adapt the scale after an optimizer step. finite: whether all gradients of the step were finite."""
        if not self.dynamic:
            return
        if not finite:
            self.value = max(_SMALLEST / self._smaller, self.value / 2)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == _GROWTH_INTERVAL:
            self.value = max(self.value, min(self._largest / self._smaller, self.value * 2))
            self.good_steps = 0

    def limit_to_fp16(self) -> None:
        """Note that a backward starts from gradients in fp16, so that the scale grows to 2^15 at most."""
        self._largest = _LARGEST_IN_FP16
