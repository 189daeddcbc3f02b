"""Passkey documents: filler text that hides a few sequences of words, and the questions about them.

A retrieval head can find such a sequence however far back it lies. So these documents train the built-in
model, identify heads, and measure the accuracy of head patterns. The construction follows the multi-passkey
data of DuoAttention (Xiao et al. 2024, arXiv:2410.10819), with names instead of ordinals and with text of our
own.

Everything is a pure function of the seed: the same arguments give the same text on every platform and Python
version, because only ``random.Random.random`` (a documented invariant of Python) is drawn from.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hpu_duo.lab.tasks.draws import choice, sample
from hpu_duo.lab.tasks.placing import place
from hpu_duo.lab.tasks.words import (
    ADJECTIVES,
    ADVERBS,
    NAMES,
    NOUNS,
    PASSKEY_WORDS,
    PEOPLE,
    PLACES,
    TIMES,
    VERBS,
)

TokenCounter = Callable[[str], int]
"""Number of tokens of a piece of text, special tokens not counted."""

_WORD_LISTS = {
    "adj": ADJECTIVES,
    "noun": NOUNS,
    "person": PEOPLE,
    "verb": VERBS,
    "place": PLACES,
    "time": TIMES,
    "adv": ADVERBS,
}
SENTENCES: tuple[str, ...] = (
    "The {adj} {person} {verb} a {noun} near the {place}.",
    "One {time} the {person} {adv} {verb} the {adj} {noun}.",
    "There was a {noun} and a {noun} in the {adj} {place}.",
    "A {person} from the {place} {adv} {verb} every {noun}.",
    "Nobody in the {place} {verb} the {noun} before {time}.",
    "Behind the {adj} {noun} stood a {adj} {noun}.",
    "After the {time} the {person} {verb} the {noun} and the {noun}.",
    "It was a {adj} {time} when the {person} {verb} the {noun}.",
    "The {noun} of the {person} was {adj} but not {adj}.",
    "Between the {place} and the {place} the {person} {verb} a {adj} {noun}.",
)
NEEDLE = "The passkey for {name} is {words}. Remember it."
QUESTION = "\nWhat is the passkey for {name}? The passkey for {name} is"


@dataclass(frozen=True)
class Passkey:
    """A hidden sequence of words and where it lies.

    Attributes:
        name: owner of the passkey; unique within a document.
        words: the words to retrieve, in order.
        depth: fraction in [0, 1] of the filler tokens that lie before it.
    """

    name: str
    words: tuple[str, ...]
    depth: float

    @property
    def needle(self) -> str:
        """The text that hides this passkey in the document."""
        return NEEDLE.format(name=self.name, words=" ".join(self.words))

    @property
    def answer(self) -> str:
        """The text that continues :func:`question`: a leading space, the words, a full stop."""
        return " " + " ".join(self.words) + "."


@dataclass(frozen=True)
class PasskeyDocument:
    """A text with its passkeys, in the order in which they occur."""

    text: str
    passkeys: tuple[Passkey, ...]


def question(passkey: Passkey) -> str:
    """The text to append to the document; a model that retrieves continues it with ``passkey.answer``."""
    return QUESTION.format(name=passkey.name)


def document(
    count_tokens: TokenCounter,
    num_tokens: int,
    num_passkeys: int,
    passkey_words: int,
    seed: int,
    depths: Sequence[float] | None = None,
    *,
    words: Sequence[str] = PASSKEY_WORDS,
    filler: Callable[[random.Random], Iterator[str]] | None = None,
) -> PasskeyDocument:
    """Write a document of at most ``num_tokens`` tokens, as long as whole sentences allow.

    No passkey word occurs twice in a document, so every answer is unambiguous. The length is exact for
    tokenizers that never join text across a sentence boundary, and close for all others.

    Args:
        count_tokens: the length measure, e.g. :func:`token_counter` of a tokenizer.
        num_tokens: token budget of the text, without special tokens and without the questions.
        num_passkeys: passkeys to hide.
        passkey_words: words per passkey.
        seed: any integer; equal arguments give equal documents.
        depths: one fraction in [0, 1] per passkey; uniformly random if not given.
        words: vocabulary of the passkeys, without repetitions.
        filler: pieces of the text around them, without end; :func:`sentences` if not given.

    Raises:
        ValueError: if the word lists or the token budget are too small, the depths do not fit, or a piece of
            the text has no tokens.
    """
    check_passkeys(num_passkeys, passkey_words, len(words), depths)
    rng = random.Random(seed)
    drawn_words = sample(rng, words, num_passkeys * passkey_words)
    names = sample(rng, NAMES, num_passkeys)
    drawn = [rng.random() for _ in range(num_passkeys)] if depths is None else list(depths)
    passkeys = [
        Passkey(name, tuple(drawn_words[i * passkey_words : (i + 1) * passkey_words]), depth)
        for i, (name, depth) in enumerate(zip(names, drawn, strict=True))
    ]
    passkeys.sort(key=lambda passkey: passkey.depth)

    budget = num_tokens - sum(count_tokens(" " + passkey.needle) for passkey in passkeys)
    if budget < 0:
        raise ValueError(
            f"num_tokens={num_tokens} cannot hold {num_passkeys} passkeys of {passkey_words} words: "
            f"{-budget} more tokens are needed"
        )
    pieces, lengths = pieces_within((filler or sentences)(rng), count_tokens, budget)
    needles, where = [one.needle for one in passkeys], [one.depth for one in passkeys]
    return PasskeyDocument(" ".join(place(needles, where, pieces, lengths)), tuple(passkeys))


def token_counter(tokenizer: object) -> TokenCounter:
    """Length measure of a transformers tokenizer; pass ``len`` or a lambda to :func:`document` for others."""
    encode = tokenizer.encode  # type: ignore[attr-defined]
    return lambda text: len(encode(text, add_special_tokens=False))


def sentence(rng: random.Random) -> str:
    """One sentence of filler text, without a passkey word in it."""
    pieces = choice(rng, SENTENCES).split(" ")
    return " ".join(_fill(rng, piece) for piece in pieces)


def sentences(rng: random.Random) -> Iterator[str]:
    """Filler text sentence by sentence, without end."""
    while True:
        yield sentence(rng)


def check_passkeys(
    num_passkeys: int, passkey_words: int, num_words: int, depths: Sequence[float] | None
) -> None:
    """Refuse passkeys that the lists of names and words cannot give.

    Args:
        num_words: length of the list of words.
        depths: one fraction in [0, 1] per passkey, or None.

    Raises:
        ValueError: a number or a depth is out of its range.
    """
    if num_passkeys < 0 or passkey_words < 1:
        raise ValueError(
            f"expected num_passkeys >= 0 and passkey_words >= 1, got {num_passkeys} and {passkey_words}"
        )
    if num_passkeys > len(NAMES):
        raise ValueError(f"expected at most {len(NAMES)} passkeys, got {num_passkeys}")
    if num_passkeys * passkey_words > num_words:
        raise ValueError(
            f"expected num_passkeys * passkey_words <= {num_words}, got {num_passkeys} * {passkey_words}"
        )
    if depths is not None and (len(depths) != num_passkeys or not all(0.0 <= d <= 1.0 for d in depths)):
        raise ValueError(f"expected {num_passkeys} depths in [0, 1], got {list(depths)}")


def pieces_within(
    pieces: Iterator[str], count_tokens: TokenCounter, budget: int
) -> tuple[list[str], list[int]]:
    """The first pieces that fit into a budget of tokens, and their lengths.

    Raises:
        ValueError: a piece has no tokens.
    """
    chosen: list[str] = []
    lengths: list[int] = []
    for written in pieces:
        length = count_tokens(" " + written)
        if length < 1:
            raise ValueError(f"expected a tokenizer that can encode {written!r}, got no tokens")
        if length > budget:
            break
        chosen.append(written)
        lengths.append(length)
        budget -= length
    return chosen, lengths


def _fill(rng: random.Random, piece: str) -> str:
    if not piece.startswith("{"):
        return piece
    slot, _, tail = piece[1:].partition("}")
    return choice(rng, _WORD_LISTS[slot]) + tail
