"""Sample: text that a language model generates, which shows a reader what the model has learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from infinity.config import round_up
from infinity.errors import ConfigError
from infinity.lm.language_model import LanguageModel
from infinity.lm.training import do_nothing

_LONGEST_CONTEXT = 256
"""Greatest number of tokens of context. Every new token costs a forward over the whole context, because keys
and values of earlier tokens are not cached."""

_LENGTHS = 64
"""Contexts are padded to a multiple of this number of tokens, so that few different lengths occur. Operations
on the CPU keep memory for every length that they have seen: some 3 MiB for a model of 10M parameters."""


def generate(
    language_model: LanguageModel,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    device: torch.device | str,
    between: Callable[[], object] = do_nothing,
) -> str:
    """Return the prompt and the model's continuation, which has at most `tokens` tokens.

    temperature: divisor of the logits; 0 takes the likeliest
    token. seed: the same seed and the same logits give the same text on any device. device: where the model
    computes. between: called after each token, and may raise an exception to end the call.

    The training modes of modules and the global random state stay as they were. If a token's largest logit is
    NaN or infinite, the text ends before this token.

    Raises ConfigError if `tokens` is below 1 or `temperature` is below 0.
    """
    if tokens < 1 or not temperature >= 0:
        raise ConfigError(
            f"A sample of {tokens} tokens at temperature {temperature} was asked for.",
            "Give at least 1 token and a temperature from 0 on.",
        )
    generator = torch.Generator().manual_seed(seed)
    longest = min(language_model.longest or _LONGEST_CONTEXT, _LONGEST_CONTEXT)
    vocabulary = language_model.vocabulary
    given = vocabulary.encode(prompt)
    context = given or vocabulary.encode("\n") or [0]
    made: list[int] = []
    with torch.no_grad(), _evaluating(language_model.model):
        while len(made) < tokens:
            seen = [*context, *made][-longest:]
            filled = seen + [0] * (min(round_up(len(seen), _LENGTHS), longest) - len(seen))
            tokens_in = torch.tensor([filled], dtype=torch.int64, device=device)
            logits = language_model.next_token_logits(tokens_in, len(seen) - 1)
            token = _choose(logits[0].cpu(), temperature, generator)
            if token is None:
                break
            made.append(token)
            between()
    # Prompt and continuation are decoded together: a tokenizer may decode a token differently at the
    # beginning of a text.
    return prompt + vocabulary.decode([*given, *made])[len(vocabulary.decode(given)) :]


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int | None:
    """Draw the next token from `logits`, float32 (vocabulary,), and return its number in the vocabulary.

    Returns None if the largest logit is NaN or infinite. temperature: as in `generate`.
    """
    if not logits.max().isfinite():
        return None
    if temperature == 0:
        return int(logits.argmax())
    # In float64 and with the largest logit shifted to 0, so that no temperature makes a logit overflow.
    shifted = (logits.double() - logits.max()) / temperature
    return int(torch.multinomial(shifted.softmax(dim=0), 1, generator=generator))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in evaluation mode; at the end every module has its former mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
