"""Update form: the dtypes and the length of an update's arrays, and where in memory they lie. Later updates
of the same form are submitted by `ThreadPool.submit_again`, without checks of their arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity import _cpu_adam
from infinity.cpu_adam.page import GRAD_DTYPES, MOMENT_FORMATS, moment_dtype, parameter_format
from infinity.cpu_adam.work import Update

_FIELDS = (
    "grad",
    "parameter",
    "remainder",
    "copy",
    "first_moment",
    "second_moment",
    "first_scale",
    "second_scale",
    "average",
)
"""The fields of `Update` that hold arrays, in the order of `UpdateForm.places`."""


@dataclass(frozen=True, slots=True)
class UpdateForm:
    """The dtypes and the length of an update's arrays, and where each one lies; without hyper-parameters."""

    elements: int
    grad_dtype: _cpu_adam.Dtype
    format: _cpu_adam.ParameterFormat
    moments: _cpu_adam.MomentFormat
    places: tuple[tuple[int, int] | None, ...]
    """For each of _FIELDS (index of a tensor in `memory`, see `of`, offset in bytes in this tensor), or None
    for a missing array.
    """

    @staticmethod
    def of(work: Update, memory: Sequence[torch.Tensor]) -> UpdateForm:
        """Make the form of an update whose arrays a pool has checked. memory: the contiguous CPU tensors in
        which the arrays of `work` lie.
        """
        assert work.accumulated is None and isinstance(work.grad, torch.Tensor)
        bounds = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in memory]
        places: list[tuple[int, int] | None] = []
        for field in _FIELDS:
            array = getattr(work, field)
            if array is None:
                places.append(None)
                continue
            assert isinstance(array, torch.Tensor)
            start, end = array.data_ptr(), array.data_ptr() + array.nbytes
            index = next(i for i, (first, last) in enumerate(bounds) if first <= start and end <= last)
            places.append((index, start - bounds[index][0]))
        return UpdateForm(
            elements=work.grad.numel(),
            grad_dtype=GRAD_DTYPES[work.grad.dtype],
            format=parameter_format(work),
            moments=MOMENT_FORMATS[moment_dtype(work)],
            places=tuple(places),
        )

    def addresses(self, memory: Sequence[torch.Tensor]) -> list[int]:
        """Return the addresses of an update's arrays, in the order of `places`; 0 for a missing array.

        memory: the contiguous CPU tensors in which the arrays lie, in the order and of the sizes given to
        `of`.
        """
        begins = [each.data_ptr() for each in memory]
        return [0 if each is None else begins[each[0]] + each[1] for each in self.places]
