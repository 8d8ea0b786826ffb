"""The words of a Mersenne Twister (csrc/twister/bindings.cpp). Use infinity.model.draws."""

import numpy as np
import numpy.typing as npt

def count_on(words: npt.NDArray[np.uint32], place: int, count: int) -> int:
    """Count `count` words of MT19937 on, without the GIL, and return the index of the next one.

    words: uint32 (624,), which change. place: the index of the next word; 624 if the words have to be made
    first. Raises ValueError for a larger one.
    """
