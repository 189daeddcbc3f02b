"""Passkey accuracy: documents that hide sequences of words, and one passkey at each depth of each length."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hpu_duo.lab.eval.interval import interval_fields
from hpu_duo.lab.eval.kv_bytes import KVBytes
from hpu_duo.lab.eval.model_under_test import ModelUnderTest, Subject, num_shared
from hpu_duo.lab.eval.result_file import ResultFile
from hpu_duo.lab.tasks.haystack import BuiltinHaystack, Haystack
from hpu_duo.lab.tasks.passkeys import NEEDLE, QUESTION, PasskeyDocument, document, question
from hpu_duo.lab.tasks.rehearsed import Rehearsals, rehearsed_document
from hpu_duo.lab.tasks.words import NAMES, PASSKEY_WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.engine.outputs import ContinuationScore


_BUILTIN = BuiltinHaystack()
_MOST_WORDS = 2000
"""Most words taken from a tokenizer: tokens of low ids are the frequent ones."""
_WORD = re.compile(r"[^a-z]?([a-z]{4,12})")
"""A token with its mark of a word's beginning: one character, whichever it is."""


class WordSource(str, Enum):
    """Source of the words of passkeys."""

    BUILTIN = "builtin"
    """The list that the built-in model was trained on."""
    TOKENIZER = "tokenizer"
    """Frequent whole words among the tokens of the model, so that any model has seen them often."""
    VOCABULARY = "vocabulary"
    """All whole words among the tokens of the model, each as likely as any other (order zero)."""


@dataclass(frozen=True)
class PasskeyText:
    """Text and words of passkey documents.

    Attributes:
        haystack: the text around passkeys.
        source: of the words.
    """

    haystack: Haystack = _BUILTIN
    source: WordSource = WordSource.BUILTIN

    def words(self, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
        """The words, no two of them alike and, if they are the tokenizer's, none in the haystack."""
        if self.source is WordSource.BUILTIN:
            return PASSKEY_WORDS
        most = _MOST_WORDS if self.source is WordSource.TOKENIZER else None
        return whole_words(tokenizer, self.haystack.words, most)

    def check(self, words: Sequence[str], num_needed: int) -> None:
        """Refuse words of a tokenizer that are too few for a document.

        Raises:
            ValueError: there are fewer than needed.
        """
        if self.source is not WordSource.BUILTIN and len(words) < num_needed:
            raise ValueError(
                f"expected at least {num_needed} whole words among the model's tokens, got {len(words)}; "
                "give --words builtin, or fewer or shorter passkeys (--num-passkeys, --passkey-words)"
            )


BUILTIN_TEXT = PasskeyText()
"""Text and words that the built-in model was trained on."""


@lru_cache(maxsize=1)  # Looking through a vocabulary takes a while, and each cell of a grid asks for it.
def whole_words(
    tokenizer: PreTrainedTokenizerBase, avoided: frozenset[str], most: int | None = _MOST_WORDS
) -> tuple[str, ...]:
    """Words of 4 to 12 small letters that are single tokens between a word and a full stop, by token id.

    Args:
        avoided: words to leave out, beside those around passkeys.
        most: number of words after which to stop, None for all.
    """
    around = _words_around()
    before = tokenizer.encode("is", add_special_tokens=False)
    words: dict[str, None] = {}
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        match = _WORD.fullmatch(token)
        word = match[1] if match else ""
        if not word or word in avoided or word in around or word in words:
            continue
        ids = tokenizer.encode(f"is {word}.", add_special_tokens=False)
        # One more token at least: the full stop is none of the word's.
        if ids[: len(before) + 1] == [*before, token_id] and len(ids) > len(before) + 1:
            words[word] = None
            if len(words) == most:
                break
    return tuple(words)


def _words_around() -> frozenset[str]:
    text = " ".join((NEEDLE, QUESTION, *NAMES)).replace("{", " ").replace("}", " ")
    return frozenset(re.findall(r"[a-z]+", text.lower()))


# Seeds from here on are documents for evaluation; the built-in model was trained on those of other seeds.
_FIRST_SEED = 2**41


@dataclass(frozen=True)
class PasskeyTask:
    """Documents to write, and the passkeys to hide in them.

    Attributes:
        num_tokens: length of a document, without its questions.
        num_documents: documents.
        num_passkeys: passkeys of each document; each is asked for once.
        passkey_words: words of each passkey.
        seed: of the documents.
        depths: where the passkeys of each document lie, fractions in [0, 1]; None draws them.
        text: source of the documents' text and of the passkeys' words.
        rehearsals: repetitions of the questions within the documents; None for documents without any, whose
            passkeys lie anywhere.
        num_decoded: last tokens of a document with its question that are decoded, at least; the question and
            the token before it always are.
    """

    num_tokens: int
    num_documents: int = 8
    num_passkeys: int = 8
    passkey_words: int = 16
    seed: int = 0
    depths: tuple[float, ...] | None = None
    text: PasskeyText = BUILTIN_TEXT
    rehearsals: Rehearsals | None = None
    num_decoded: int = 1

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_documents", "num_passkeys", "passkey_words", "num_decoded"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.rehearsals is not None and self.depths is not None:
            raise ValueError("expected depths or rehearsals, got both")

    def documents(self, subject: ModelUnderTest) -> list[PasskeyDocument]:
        """The documents, the same for equal tasks and equal tokenizers.

        Raises:
            ValueError: they cannot hold the passkeys, or there are too few words for them.
        """
        words = self.text.words(subject.tokenizer)
        self.text.check(words, self.num_passkeys * self.passkey_words)
        first = _FIRST_SEED + self.seed * 2**20
        sizes = (subject.count, self.num_tokens, self.num_passkeys, self.passkey_words)
        filler = self.text.haystack.pieces
        seeds = range(first, first + self.num_documents)
        if self.rehearsals is None:
            return [document(*sizes, seed, self.depths, words=words, filler=filler) for seed in seeds]
        return [
            rehearsed_document(*sizes, seed, self.rehearsals, words=words, filler=filler) for seed in seeds
        ]


_COUNTS = ("num_answers", "num_exact", "num_answer_tokens", "num_right", "logprob")


@dataclass(frozen=True)
class PasskeyResult:
    """Counts over all answers.

    Attributes:
        num_answers, num_exact: all answers, and those whose every token is the likeliest one; greedy
            decoding would give just these.
        num_answer_tokens, num_right: the same for single tokens of the answers.
        logprob: mean natural log-probability of an answer token.
        kv: bytes that are kept of the documents at the end of each answer.
    """

    num_answers: int
    num_exact: int
    num_answer_tokens: int
    num_right: int
    logprob: float
    kv: KVBytes

    @property
    def accuracy(self) -> float:
        """Share of exact answers."""
        return self.num_exact / self.num_answers

    @property
    def token_accuracy(self) -> float:
        """Share of right tokens."""
        return self.num_right / self.num_answer_tokens

    @property
    def record_fields(self) -> dict[str, Any]:
        """All counts, for a line of results."""
        return {**{name: getattr(self, name) for name in _COUNTS}, **self.kv.record_fields}

    @property
    def report_fields(self) -> dict[str, Any]:
        """Counts, shares with their 95 % intervals, and bytes, for a row of a report.

        Tokens of one answer depend on each other, so the number of answers decides the interval of their
        share as well.
        """
        return {
            "num_answers": self.num_answers,
            "num_exact": self.num_exact,
            **interval_fields("accuracy", self.accuracy, self.num_answers),
            "num_answer_tokens": self.num_answer_tokens,
            **interval_fields("token_accuracy", self.token_accuracy, self.num_answers),
            "logprob": self.logprob,
            **self.kv.report_fields,
        }

    @classmethod
    def total(cls, parts: Iterable[PasskeyResult]) -> PasskeyResult:
        """Add up several results."""
        found = list(parts)
        num_tokens = sum(one.num_answer_tokens for one in found)
        return cls(
            num_answers=sum(one.num_answers for one in found),
            num_exact=sum(one.num_exact for one in found),
            num_answer_tokens=num_tokens,
            num_right=sum(one.num_right for one in found),
            logprob=sum(one.logprob * one.num_answer_tokens for one in found) / num_tokens,
            kv=KVBytes.total(one.kv for one in found),
        )

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> PasskeyResult:
        """Read the counts from a line of results, as ``record_fields`` has written them."""
        return cls(**{name: record[name] for name in _COUNTS}, kv=KVBytes.of_record(record))


@dataclass(frozen=True)
class PasskeyQuestions:
    """Documents with their questions and answers, as token ids that a model can hold.

    Attributes:
        prompts: each document.
        continuations: of each document, every question with its answer.
        answer_lengths: tokens of these answers.
    """

    prompts: tuple[tuple[int, ...], ...]
    continuations: tuple[tuple[tuple[int, ...], ...], ...]
    answer_lengths: tuple[tuple[int, ...], ...]

    @classmethod
    def write(cls, subject: ModelUnderTest, task: PasskeyTask) -> PasskeyQuestions:
        """The questions of a task.

        Raises:
            ValueError: the documents do not fit the model, or the tokenizer cannot encode them.
        """
        # First by the length alone: a text that is far too long takes minutes to write.
        subject.check_lengths([task.num_tokens], "passkey documents", "--num-tokens")
        asked = [_asked(subject, one, task.num_decoded) for one in task.documents(subject)]
        subject.check_lengths(
            [len(one.prompt) + max(map(len, one.continuations)) for one in asked],
            "passkey documents",
            "--num-tokens",
        )
        return cls(
            tuple(one.prompt for one in asked),
            tuple(one.continuations for one in asked),
            tuple(one.answer_lengths for one in asked),
        )

    def ask(self, subject: ModelUnderTest) -> PasskeyResult:
        """Ask for every passkey of every document.

        A document is prefilled once. Each question and its answer are then decoded behind a copy of its
        cache, so a streaming head has to answer from what it kept of the document.
        """
        scores, kv = subject.score(self.prompts, self.continuations)
        pairs = [
            pair
            for each_score, each_length in zip(scores, self.answer_lengths, strict=True)
            for pair in zip(each_score, each_length, strict=True)
        ]
        return count_answers(pairs, KVBytes.total(one for each in kv for one in each))


@dataclass(frozen=True)
class _AskedDocument:
    prompt: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    answer_lengths: tuple[int, ...]


def _asked(subject: ModelUnderTest, written: PasskeyDocument, num_decoded: int) -> _AskedDocument:
    """A document with its questions and answers, each tokenised as one text.

    If a question changes the last tokens of the document (a full stop and a new line, say, that become one
    token), these belong to the question; so do those that are to be decoded.
    """
    ids = subject.encode(written.text, is_start=True)
    told = [subject.behind(written.text, question(one) + one.answer) for one in written.passkeys]
    asked = [subject.behind(written.text, question(one))[1] for one in written.passkeys]
    # The last token of a prompt is decoded anyway.
    num_before = num_decoded - 1 - min(map(len, asked))
    num_changed = min(max(num_before, *(changed for changed, _ in told)), len(ids) - 1)
    return _AskedDocument(
        tuple(ids[: len(ids) - num_changed]),
        tuple((*ids[len(ids) - num_changed : len(ids) - changed], *added) for changed, added in told),
        tuple(len(added) - num_shared(before, added) for before, (_, added) in zip(asked, told, strict=True)),
    )


def passkey_accuracy(subject: ModelUnderTest, task: PasskeyTask) -> PasskeyResult:
    """Write the questions of a task and ask them; see ``PasskeyQuestions``.

    Raises:
        ValueError: the documents do not fit the model, or the tokenizer cannot encode them.
    """
    return PasskeyQuestions.write(subject, task).ask(subject)


def count_answers(scored: Sequence[tuple[ContinuationScore, int]], kv: KVBytes) -> PasskeyResult:
    """Count the answers in scores, each given with the number of its last tokens that are the answer."""
    right = [score.is_likeliest[-size:] for score, size in scored]
    logprob = sum(sum(score.logprobs[-size:]) for score, size in scored)
    num_tokens = sum(size for _, size in scored)
    return PasskeyResult(
        num_answers=len(scored),
        num_exact=sum(map(all, right)),
        num_answer_tokens=num_tokens,
        num_right=sum(map(sum, right)),
        logprob=logprob / num_tokens,
        kv=kv,
    )


@dataclass(frozen=True)
class NeedleGrid:
    """A grid of tasks, one per depth and length.

    Attributes:
        lengths: tokens of the documents, one column each.
        depths: where the needle lies, fractions in [0, 1], one row each.
        num_documents: documents per cell.
        passkey_words: words of the needle.
        seed: of the documents; those of one length share their filler text across depths.
        text: source of the documents' text and of the needles' words.
        num_decoded: see ``PasskeyTask``.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    num_documents: int = 4
    passkey_words: int = 16
    seed: int = 0
    text: PasskeyText = BUILTIN_TEXT
    num_decoded: int = 1

    def __post_init__(self) -> None:
        if not self.lengths or not self.depths:
            raise ValueError("expected at least one length and one depth, got none")
        if len(set(self.lengths)) < len(self.lengths) or len(set(self.depths)) < len(self.depths):
            raise ValueError(f"expected each length and depth once, got {self.lengths} and {self.depths}")
        for length in self.lengths:
            self.cell(length, self.depths[0])
        if not all(0.0 <= depth <= 1.0 for depth in self.depths):
            raise ValueError(f"expected depths in [0, 1], got {self.depths}")

    def cell(self, length: int, depth: float) -> PasskeyTask:
        """The task of one cell."""
        return PasskeyTask(
            length,
            self.num_documents,
            1,
            self.passkey_words,
            self.seed,
            (depth,),
            self.text,
            num_decoded=self.num_decoded,
        )

    @property
    def tasks(self) -> dict[int, list[PasskeyTask]]:
        """The tasks of each length."""
        return {length: [self.cell(length, depth) for depth in self.depths] for length in self.lengths}

    def by_length(self, cells: Sequence[Mapping[str, Any]]) -> dict[int, PasskeyResult]:
        """All answers of each length, from the records of ``fill``."""
        return {
            length: PasskeyResult.total(
                PasskeyResult.of_record(cell) for cell in cells if cell["num_tokens"] == length
            )
            for length in self.lengths
        }

    def check(self, subject: ModelUnderTest) -> None:
        """Refuse what the model cannot hold or its tokenizer cannot encode, before the first cell.

        Raises:
            ValueError: a document with its question and answer is too long, or too short for its needle; or a
                text cannot be encoded.
        """
        # First by the lengths alone: a text that is far too long takes minutes to write.
        subject.check_lengths(self.lengths, "haystacks")
        written = self.cell(max(self.lengths), self.depths[0]).documents(subject)[0]
        (needle,) = written.passkeys
        extra = subject.count(needle.needle) + subject.count(needle.answer) + 2
        subject.check_lengths([max(self.lengths) + extra], "haystacks")
        # Needles are the same at every length, so the shortest is the one that may not hold them.
        PasskeyQuestions.write(subject, self.cell(min(self.lengths), self.depths[0]))

    def fill(self, subject: ModelUnderTest, results: ResultFile) -> Iterator[dict[str, Any]]:
        """Compute the cells that ``results`` does not have yet, the shortest first; yields every cell."""
        for length in sorted(self.lengths):
            for depth in self.depths:
                found = results.find(num_tokens=length, depth=depth)
                if found is None:
                    result = passkey_accuracy(subject, self.cell(length, depth))
                    results.append({"num_tokens": length, "depth": depth, **result.record_fields})
                    found = results.records[-1]
                yield found


FAILS_BELOW = 0.5
"""Share of exact answers. Below it the model itself may be unable to do the task, whatever its heads keep."""


def full_attention(
    measured: Mapping[int, PasskeyResult],
    tasks: Mapping[int, Sequence[PasskeyTask]],
    load: Callable[[], Subject] | None,
) -> dict[int, PasskeyResult]:
    """Answers of full attention at the lengths where fewer than half of the answers were exact.

    One document of each task is answered with full attention, which shows whether the model or the head
    pattern fails.

    Args:
        measured: result by length in tokens.
        tasks: the tasks of each length.
        load: loads the same model with full attention, called if it is needed; None if that was measured.

    Raises:
        ValueError: the model cannot be loaded with full attention.
    """
    doubtful = {length: one for length, one in measured.items() if one.accuracy < FAILS_BELOW}
    if load is None or not doubtful:
        return doubtful
    subject = load()
    return {
        length: PasskeyResult.total(
            passkey_accuracy(subject, replace(task, num_documents=1)) for task in tasks[length]
        )
        for length in doubtful
    }
