"""Work: how much of a run's evaluation and sample is done, by the size of the model alone. Pure.

Both cost a forward for each batch or token, for which a model may be read from disk. A limit in seconds would
let their results depend on the machine, and on the number of ranks that share the work.
"""

from __future__ import annotations

_EVALUATION = 160 * 10**9
"""Parameters times tokens of an evaluation: 10M parameters have 16 Ki tokens, as many as there are."""
_SAMPLE = 10**10
"""Parameters times tokens of a sample. Its tokens cost more, because each is a forward over a context."""
_FEWEST_TOKENS, _MOST_TOKENS = 8, 200


def evaluation_batches(parameters: int, tokens: int) -> int:
    """Number of batches over which the loss on held-out text is measured, if there are as many.

    parameters: the model's elements. tokens: those that a batch predicts.
    """
    return max(1, _EVALUATION // (max(1, parameters) * tokens))


def sample_tokens(parameters: int) -> int:
    """Number of tokens that a sample has at most. parameters: the model's elements."""
    return max(_FEWEST_TOKENS, min(_MOST_TOKENS, _SAMPLE // max(1, parameters)))
