"""Text that a model writes: what shows, to the eye, that it learned."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from infinity.config import round_up
from infinity.errors import ConfigError
from infinity.lm.language_model import LanguageModel

_LONGEST_CONTEXT = 256
"""Tokens. Every token costs a forward over all of them: nothing is kept from one to the next."""

_LENGTHS = 64
"""A context is filled up to a multiple: operations on the CPU keep memory for every length that they met,
some 3 MiB of it for a model of 10M parameters."""


def generate(
    language_model: LanguageModel,
    prompt: str,
    *,
    tokens: int,
    seconds: float,
    temperature: float,
    seed: int,
    device: torch.device | str,
) -> str:
    """The prompt and how the model goes on, by at most `tokens` tokens.

    It stops after `seconds`, for a model whose weights come from disk for every token, but makes at least one
    token. temperature: what logits are divided by; 0 takes the likeliest token. The same seed gives the same
    text from the same logits, on any device. Training modes and the global random state stay as they were.
    A model that has come to give NaN or infinity writes no further.

    Raises ConfigError for a number below 1 token or a temperature below 0.
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
    deadline = time.monotonic() + seconds
    with torch.no_grad(), _evaluating(language_model.model):
        while len(made) < tokens and (not made or time.monotonic() < deadline):
            seen = [*context, *made][-longest:]
            filled = seen + [0] * (min(round_up(len(seen), _LENGTHS), longest) - len(seen))
            tokens_in = torch.tensor([filled], dtype=torch.int64, device=device)
            logits = language_model.next_token_logits(tokens_in, len(seen) - 1)
            token = _choose(logits[0].cpu(), temperature, generator)
            if token is None:
                break
            made.append(token)
    # Together, for a tokenizer may write a token otherwise at the beginning than inside.
    return prompt + vocabulary.decode([*given, *made])[len(vocabulary.decode(given)) :]


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int | None:
    """logits: float32 (vocabulary,). None: the largest is NaN or infinite."""
    if not logits.max().isfinite():
        return None
    if temperature == 0:
        return int(logits.argmax())
    # float64, and the largest at 0: no temperature makes them overflow.
    shifted = (logits.double() - logits.max()) / temperature
    return int(torch.multinomial(shifted.softmax(dim=0), 1, generator=generator))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
