"""Sample: text that a model writes, from which a reader sees what it learned."""

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
"""Most tokens of context. Every new token costs a forward over all of them, because there is no cache."""

_LENGTHS = 64
"""Contexts are padded to a multiple of this many tokens: operations on the CPU keep memory for every length
they have seen, some 3 MiB for a model of 10M parameters."""


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
    """The prompt and the model's continuation, of at most `tokens` tokens.

    seconds: time after which it stops, after at least one token, because a model may be read from disk for
    every token. temperature: divisor of the logits; 0 takes the likeliest token. The same seed gives the same
    text from the same logits, on any device. Training modes and the global random state stay as they were.
    The text ends where the model's logits are NaN or infinite.

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
    # Decoded together, because a tokenizer may write a token differently at the beginning of a text.
    return prompt + vocabulary.decode([*given, *made])[len(vocabulary.decode(given)) :]


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int | None:
    """The next token; None if the largest logit is NaN or infinite. logits: float32 (vocabulary,)."""
    if not logits.max().isfinite():
        return None
    if temperature == 0:
        return int(logits.argmax())
    # In float64, with the largest at 0, so that no temperature makes them overflow.
    shifted = (logits.double() - logits.max()) / temperature
    return int(torch.multinomial(shifted.softmax(dim=0), 1, generator=generator))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context in evaluation mode; afterwards every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
