"""Documents that hide passkeys and end with all of them asked back: what retrieval heads are found with.

Document number i is a pure function of the settings, the haystack and the tokenizer, whatever came before
it, so a run can be resumed, or shared among processes, without exchanging data. Only
``random.Random.random`` is drawn from, which gives the same numbers on every platform.

Source: the multi-passkey data of DuoAttention (Xiao et al. 2024, arXiv:2410.10819), with texts of our own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import numpy as np
from numpy.typing import NDArray

from hpu_duo.lab.identify.encoding import Encoder
from hpu_duo.lab.identify.gated_model import Form
from hpu_duo.lab.tasks.draws import choice, sample
from hpu_duo.lab.tasks.haystack import Haystack
from hpu_duo.lab.tasks.placing import place


@dataclass(frozen=True)
class DatasetSettings:
    """Sizes and form of the documents; the defaults are the paper's, except for the form of the texts.

    Attributes:
        min_length, max_length: tokens of a document before the first question; questions and answers, which
            follow, come on top.
        num_lengths: distinct lengths, evenly spaced between the two.
        num_passkeys, passkey_words: how many, and words of each.
        min_depth, max_depth: where passkeys may lie, as a share of the filler text.
        num_depths: distinct depths, evenly spaced between the two.
        label_questions: whether the tokens of questions count as well, as in the published code.
        form: the texts around passkeys.
        seed: any integer >= 0.
    """

    min_length: int = 1000
    max_length: int = 32000
    num_lengths: int = 50
    num_passkeys: int = 10
    passkey_words: int = 32
    min_depth: float = 0.05
    max_depth: float = 0.95
    num_depths: int = 1000
    label_questions: bool = False
    form: Form = Form.ORDINALS
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(
                f"expected 1 <= min_length <= max_length, got {self.min_length} and {self.max_length}"
            )
        if not 0 <= self.min_depth <= self.max_depth <= 1:
            raise ValueError(
                f"expected 0 <= min_depth <= max_depth <= 1, got {self.min_depth} and {self.max_depth}"
            )
        if self.num_lengths < 1 or self.num_depths < self.num_passkeys:
            raise ValueError(
                f"expected num_lengths >= 1 and num_depths >= num_passkeys, got {self.num_lengths}, "
                f"{self.num_depths} and {self.num_passkeys}"
            )
        if self.seed < 0:
            raise ValueError(f"expected seed >= 0, got {self.seed}")
        self.form.texts.check(self.num_passkeys, self.passkey_words)


@dataclass(frozen=True)
class Sample:
    """One document.

    Attributes:
        ids: int64 ``[T]``, token ids.
        labelled: int64, ascending positions of the tokens that count.
        questions: int64 ``[P]``, position of the first token behind each question, where its answer begins.
        answer_ends: int64 ``[P]``, position behind the last token of each answer, its end of text left out.
        needles: int64 ``[P, 2]``, first position of each passkey's needle and the one behind its last, in the
            order of the questions.
    """

    ids: NDArray[np.int64]
    labelled: NDArray[np.int64]
    questions: NDArray[np.int64]
    answer_ends: NDArray[np.int64]
    needles: NDArray[np.int64]


@dataclass(frozen=True)
class _Passkey:
    needle: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class _Draft:
    """The draws of a document that come before those of its filler, which ``rng`` continues with."""

    length: int
    passkeys: tuple[_Passkey, ...]
    depths: tuple[float, ...]
    rng: random.Random


class PasskeyDataset:
    """Documents by number.

    Raises:
        ValueError: the tokenizer cannot encode the passkeys.
    """

    def __init__(self, settings: DatasetSettings, haystack: Haystack, encoder: Encoder) -> None:
        form = settings.form.texts
        encoder.check_words(form.words)
        self.settings = settings
        self._haystack = haystack
        self._encoder = encoder
        self._opening = (*encoder.start, *encoder.encode(form.opening))
        self._closing = encoder.encode(form.closing)
        self._separator = encoder.encode(form.separator)

    def sample(self, index: int) -> Sample:
        """Document number ``index``, counted from 0.

        Raises:
            ValueError: its length cannot hold its passkeys.
        """
        draft = self._draft(index)
        budget = draft.length - self._num_fixed(draft)
        if budget < 0:
            raise ValueError(self._too_short(draft))
        filler = self._filler(draft.rng, budget)
        needles = [one.needle for one in draft.passkeys]
        pieces = place(needles, draft.depths, filler, list(map(len, filler)))
        ids = [*self._opening, *(token for piece in pieces for token in piece), *self._closing]
        starts = dict(zip(pieces, accumulate(map(len, pieces), initial=len(self._opening))))
        labelled: list[int] = []
        questions: list[int] = []
        answer_ends: list[int] = []
        # The end-of-text token is no token of the passkey.
        num_end = len(self._encoder.end) if self.settings.form.texts.ends else 0
        for one in draft.passkeys:
            start = len(ids) if self.settings.label_questions else len(ids) + len(one.question)
            questions.append(len(ids) + len(one.question))
            ids += one.question + one.answer
            answer_ends.append(len(ids) - num_end)
            labelled += range(start, answer_ends[-1])
            ids += self._separator
        places = [(starts[needle], starts[needle] + len(needle)) for needle in needles]
        numbers = (ids, labelled, questions, answer_ends, places)
        return Sample(*(np.array(one, dtype=np.int64) for one in numbers))

    def check(
        self,
        num_documents: int,
        max_positions: int | None,
        length_options: Sequence[str] = ("--max-length", "--min-length"),
    ) -> None:
        """Check that the first documents can be written, and that a model has positions for them.

        Args:
            num_documents: the first ones, that are checked.
            max_positions: of the model; None for any number.
            length_options: options of the caller that set the longest length, and the shortest one.

        Raises:
            ValueError: one cannot; the message says which options make them fit.
        """
        if not self._num_haystack_tokens(1):
            raise ValueError("expected a tokenizer that can encode the haystack, got no tokens")
        for index in range(num_documents):
            draft = self._draft(index)
            fixed, asked = self._num_fixed(draft), self._num_asked(draft)
            if max_positions is not None and max(fixed, draft.length) + asked > max_positions:
                raise ValueError(
                    f"expected documents of at most {max_positions} tokens, the positions of the model, got "
                    f"one of {draft.length} with {asked} of questions and answers"
                    f"{self._smaller(num_documents, max_positions, length_options)}"
                )
            if fixed > draft.length:
                raise ValueError(self._too_short(draft))

    def _smaller(self, num_documents: int, max_positions: int, length_options: Sequence[str]) -> str:
        """Options of the most and longest passkeys that fit into a model, beside as much text; or nothing."""
        given = self.settings
        for num, words in _smaller_passkeys(given.num_passkeys, given.passkey_words):
            smaller = replace(given, num_passkeys=num, passkey_words=words)
            dataset = PasskeyDataset(smaller, self._haystack, self._encoder)
            drafts = [dataset._draft(index) for index in range(num_documents)]
            length = max_positions - max(map(dataset._num_asked, drafts))
            if 2 * max(map(dataset._num_fixed, drafts)) <= length:
                values = {name: length for name in length_options if length < given.min_length}
                values |= {length_options[0]: length}
                values |= {"--num-passkeys": num} if num < given.num_passkeys else {}
                values |= {"--passkey-words": words} if words < given.passkey_words else {}
                return f"; what fits: {' '.join(f'{name} {value}' for name, value in values.items())}"
        return ""

    def check_filler(self, length: int, max_positions: int | None) -> None:
        """Raise ValueError unless the haystack holds ``length`` tokens unrepeated, and the model as well."""
        with_start = len(self._encoder.start) + length
        if max_positions is not None and with_start > max_positions:
            raise ValueError(
                f"expected a model of at least {with_start} positions, got one of {max_positions}"
            )
        num_tokens = self._num_haystack_tokens(length)
        if num_tokens < length:
            raise ValueError(f"expected a haystack of at least {length} tokens, got one of {num_tokens}")

    def _num_haystack_tokens(self, enough: int) -> int:
        """Count the tokens of the haystack's text, up to ``enough`` of them."""
        total = 0
        for piece in islice(self._haystack.pieces(random.Random(0)), self._haystack.num_pieces):
            total += len(self._encoder.encode(" " + piece))
            if total >= enough:
                break
        return total

    def _num_fixed(self, draft: _Draft) -> int:
        needles = sum(len(one.needle) for one in draft.passkeys)
        return len(self._opening) + len(self._closing) + needles

    def _num_asked(self, draft: _Draft) -> int:
        return sum(len(one.question) + len(one.answer) + len(self._separator) for one in draft.passkeys)

    def _too_short(self, draft: _Draft) -> str:
        return (
            f"a document of {draft.length} tokens cannot hold {self.settings.num_passkeys} passkeys of "
            f"{self.settings.passkey_words} words: expected a length of at least {self._num_fixed(draft)}"
        )

    def _draft(self, index: int) -> _Draft:
        rng = random.Random((self.settings.seed << 32) + index)
        length = self._length(rng)
        passkeys = self._passkeys(rng)
        return _Draft(length, tuple(passkeys), tuple(self._depths(rng)), rng)

    def fingerprint(self) -> dict[str, str]:
        """Digests of the inputs that the documents depend on, besides the settings."""
        words = self.settings.form.texts.words
        return {"haystack": self._haystack.fingerprint, "tokenizer": self._encoder.fingerprint(words)}

    def filler(self, index: int, length: int) -> NDArray[np.int64]:
        """Text number ``index`` without passkeys, ``length`` tokens and the special ones before them."""
        rng = random.Random((self.settings.seed << 32) + index)
        pieces = self._haystack.pieces(rng)
        ids: list[int] = []
        while len(ids) < length:
            ids += self._encoder.encode(" " + next(pieces))
        return np.array([*self._encoder.start, *ids[:length]], dtype=np.int64)

    def _length(self, rng: random.Random) -> int:
        settings = self.settings
        last = settings.num_lengths - 1
        step = int(rng.random() * settings.num_lengths)
        spread = settings.max_length - settings.min_length
        return settings.max_length if last == 0 else settings.min_length + spread * step // last

    def _depths(self, rng: random.Random) -> list[float]:
        settings = self.settings
        steps = sorted(sample(rng, range(settings.num_depths), settings.num_passkeys))
        spread = settings.max_depth - settings.min_depth
        return [settings.min_depth + spread * step / max(settings.num_depths - 1, 1) for step in steps]

    def _passkeys(self, rng: random.Random) -> list[_Passkey]:
        settings, form, encode = self.settings, self.settings.form.texts, self._encoder.encode
        num, length = settings.num_passkeys, settings.passkey_words
        labels = sample(rng, form.labels, num) if form.shuffles else form.labels[:num]
        if form.repeats:
            words = [choice(rng, form.words) for _ in range(num * length)]
        else:
            words = sample(rng, form.words, num * length)
        passkeys = []
        for index, label in enumerate(labels):
            fields = {"label": label, "words": " ".join(words[index * length : (index + 1) * length])}
            needle = encode(" " + form.needle.format(**fields))
            answer = encode(form.answer.format(**fields))
            end = self._encoder.end if form.ends else ()
            passkeys.append(_Passkey(needle, encode(form.question.format(**fields)), answer + end))
        return passkeys

    def _filler(self, rng: random.Random, budget: int) -> list[tuple[int, ...]]:
        filler: list[tuple[int, ...]] = []
        pieces = self._haystack.pieces(rng)
        while True:
            ids = self._encoder.encode(" " + next(pieces))
            if len(ids) > budget:
                return filler
            filler.append(ids)
            budget -= len(ids)


def _smaller_passkeys(num: int, words: int) -> Iterator[tuple[int, int]]:
    """Numbers and words of passkeys, the given ones first: fewer down to one, then shorter ones."""
    while num > 1:
        yield num, words
        num //= 2
    while words >= 1:
        yield num, words
        words //= 2
