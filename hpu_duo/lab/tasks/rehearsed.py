"""Passkey documents whose passkeys are asked and answered again and again before the end: heavy hitters.

What is asked for often is attended to often, so its keys and values have large sums of attention weights,
which is what H2O keeps (Zhang et al. 2023, arXiv:2306.14048). All mentions of a passkey lie before a tail of
plain text, so a window of recent tokens that is shorter than the tail has none of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hpu_duo.lab.tasks.draws import sample
from hpu_duo.lab.tasks.passkeys import (
    Passkey,
    PasskeyDocument,
    TokenCounter,
    check_passkeys,
    pieces_within,
    question,
    sentences,
)
from hpu_duo.lab.tasks.placing import place
from hpu_duo.lab.tasks.words import NAMES, PASSKEY_WORDS

_FIRST, _LAST = 0.05, 0.1
"""Part of the filler in which the passkeys are stated: behind the tokens that a sink keeps."""


@dataclass(frozen=True)
class Rehearsals:
    """Repetitions of the questions within a document.

    Attributes:
        num_rehearsals: times that each passkey is asked and answered.
        tail: share of the document, at its end, that mentions no passkey.
    """

    num_rehearsals: int
    tail: float = 0.35

    def __post_init__(self) -> None:
        if self.num_rehearsals < 0 or not 0.0 <= self.tail <= 0.9:
            raise ValueError(
                f"expected rehearsals of 0 or more and a tail in [0, 0.9], got {self.num_rehearsals} and "
                f"{self.tail}"
            )


def rehearsed_document(
    count_tokens: TokenCounter,
    num_tokens: int,
    num_passkeys: int,
    passkey_words: int,
    seed: int,
    rehearsals: Rehearsals,
    *,
    words: Sequence[str] = PASSKEY_WORDS,
    filler: Callable[[random.Random], Iterator[str]] | None = None,
) -> PasskeyDocument:
    """Write a document of at most ``num_tokens`` tokens: passkeys, rehearsals of them, a tail without any.

    Without rehearsals it is the same document but for them, to compare with.

    Args:
        count_tokens, num_tokens, num_passkeys, passkey_words, seed, words, filler: as for ``document``.

    Raises:
        ValueError: the word lists or the token budget are too small.
    """
    check_passkeys(num_passkeys, passkey_words, len(words), None)
    rng = random.Random(seed)
    drawn = sample(rng, words, num_passkeys * passkey_words)
    names = sample(rng, NAMES, num_passkeys)
    passkeys = [
        Passkey(name, tuple(drawn[at * passkey_words : (at + 1) * passkey_words]), 0.0)
        for at, name in enumerate(names)
    ]
    asked = sample(rng, passkeys * rehearsals.num_rehearsals, num_passkeys * rehearsals.num_rehearsals)
    told = [one.needle for one in passkeys]
    told += [question(one) + one.answer for one in asked]
    budget = num_tokens - sum(count_tokens(" " + text) for text in told)
    tail = int(rehearsals.tail * num_tokens)
    if budget <= tail:
        raise ValueError(
            f"num_tokens={num_tokens} cannot hold {num_passkeys} passkeys of {passkey_words} words, "
            f"{rehearsals.num_rehearsals} rehearsals of each and a tail of {tail} tokens: "
            f"{tail - budget + 1} more tokens are needed"
        )
    pieces, lengths = pieces_within((filler or sentences)(rng), count_tokens, budget)
    middle = max(0.0, 1.0 - tail / budget - _LAST)
    depths = [_FIRST + (_LAST - _FIRST) * at / num_passkeys for at in range(num_passkeys)]
    depths += [_LAST + middle * at / max(1, len(asked)) for at in range(len(asked))]
    found = [Passkey(one.name, one.words, depth) for one, depth in zip(passkeys, depths)]
    # A question begins with the end of a line, as it does behind a document.
    text = " ".join(place(told, depths, pieces, lengths)).replace(" \n", "\n")
    return PasskeyDocument(text, tuple(found))
