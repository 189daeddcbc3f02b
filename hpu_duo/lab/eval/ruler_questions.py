"""Sources of RULER-style tasks: sentences and words, random draws by name, and questions with documents.

RULER's construction is in ``ruler_tasks.py``. Its texts are not shipped: what is here was written for this
project, in the same slots. ``ruler_checkout.py`` reads RULER's own. Files of questions (tasks qa_1 and qa_2)
are the user's: SQuAD 2.0's ``dev-v2.0.json`` and HotpotQA's ``hotpot_dev_distractor_v1.json``.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from hpu_duo.lab.tasks.draws import choice, sample
from hpu_duo.lab.tasks.haystack import BuiltinHaystack, Haystack
from hpu_duo.lab.tasks.words import ADJECTIVES, NOUNS, PASSKEY_WORDS


class QuestionFormat(str, Enum):
    """Format of a file with questions."""

    SQUAD = "squad"
    HOTPOTQA = "hotpotqa"


@dataclass(frozen=True)
class DocumentQuestion:
    """A question about some of the documents.

    Attributes:
        query: the question.
        outputs: answers, any of which will do.
        documents: numbers of the documents that belong to it, all of which a prompt holds.
        related: numbers of documents of the same article, which a prompt takes before others.
    """

    query: str
    outputs: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class DocumentQuestions:
    """Questions of one file and all its documents, the latter in the order of their texts.

    Attributes:
        fingerprint: digest of the file.
    """

    questions: tuple[DocumentQuestion, ...]
    documents: tuple[str, ...]
    fingerprint: str


def read_questions(path: Path, kind: QuestionFormat) -> DocumentQuestions:
    """Read a file of questions that can be answered.

    Raises:
        ValueError: it cannot be read, or is of another form.
    """
    try:
        data = path.read_bytes()
        found = json.loads(data)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the questions in {path}: {error}") from error
    read: Callable[[Any], tuple[list[DocumentQuestion], list[str]]]
    match kind:
        case QuestionFormat.SQUAD:
            read = _squad
        case QuestionFormat.HOTPOTQA:
            read = _hotpotqa
    try:
        questions, documents = read(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"expected a file in {kind.value}'s format in {path}, got {error!r}") from None
    if not questions:
        raise ValueError(f"expected questions in {path}, got none")
    return DocumentQuestions(tuple(questions), tuple(documents), hashlib.sha256(data).hexdigest())


def _squad(found: Any) -> tuple[list[DocumentQuestion], list[str]]:
    articles = [article["paragraphs"] for article in found["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    number = {text: at for at, text in enumerate(documents)}
    questions = []
    for article in articles:
        of_article = [number[paragraph["context"]] for paragraph in article]
        for paragraph, own in zip(article, of_article, strict=True):
            related = tuple(at for at in of_article if at != own)
            questions += [
                DocumentQuestion(asked["question"], _texts(asked["answers"]), (own,), related)
                for asked in paragraph["qas"]
                # SQuAD 1.1 has no such field, and no such questions.
                if not asked.get("is_impossible", False)
            ]
    return questions, documents


def _hotpotqa(found: Any) -> tuple[list[DocumentQuestion], list[str]]:
    texts = [[f"{title}\n{''.join(parts)}" for title, parts in asked["context"]] for asked in found]
    documents = sorted({text for each in texts for text in each})
    number = {text: at for at, text in enumerate(documents)}
    questions = [
        DocumentQuestion(asked["question"], (asked["answer"],), tuple(number[text] for text in each))
        for asked, each in zip(found, texts, strict=True)
    ]
    return questions, documents


def _texts(answers: Any) -> tuple[str, ...]:
    found = tuple(str(answer["text"]) for answer in answers)
    if not found:
        raise ValueError("a question without answers")
    return found


T = TypeVar("T")


class Draw:
    """A stream of choices, given by a seed and a name.

    Args:
        seed: any integer.
        name: streams of other names are independent of this one.
    """

    def __init__(self, seed: int, name: str = "") -> None:
        # Strings are seeded by their SHA-512, which is the same everywhere.
        self._rng = random.Random(f"{name}/{seed}")

    def below(self, bound: int) -> int:
        """An integer in ``[0, bound)``."""
        return int(self._rng.random() * bound)

    def fraction(self) -> float:
        """A number in ``[0, 1)``."""
        return self._rng.random()

    def choice(self, options: Sequence[T]) -> T:
        """One of the options."""
        return choice(self._rng, options)

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """Choose ``count`` of the options, each at most once.

        Raises:
            ValueError: there are fewer.
        """
        return sample(self._rng, options, count)

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """All options in another order."""
        return self.sample(options, len(options))

    def digits(self, count: int) -> str:
        """A number of ``count`` digits, the first of them not zero."""
        return str(1 + self.below(9)) + "".join(str(self.below(10)) for _ in range(count - 1))

    def uuid(self) -> str:
        """32 hexadecimal digits in the groups of a UUID."""
        groups = (
            "".join("0123456789abcdef"[self.below(16)] for _ in range(size)) for size in (8, 4, 4, 4, 12)
        )
        return "-".join(groups)


_SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))
"""Replacements, in order, that let a needle template ask for one value."""


@dataclass(frozen=True)
class TaskTemplate:
    """A prompt with slots in braces, and the beginning of its answer with the same slots.

    Attributes:
        text: of the prompt; ``{context}`` and, by task, ``{query}``, ``{num_v}`` and ``{type_needle_v}``.
        prefix: of the answer.
    """

    text: str
    prefix: str

    @property
    def singular(self) -> TaskTemplate:
        """The template for one value, by RULER's replacements of words."""
        text, prefix = self.text, self.prefix
        for many, one in _SINGULAR:
            text, prefix = text.replace(many, one), prefix.replace(many, one)
        return TaskTemplate(text, prefix)

    def fill(self, **slots: object) -> tuple[str, str]:
        """Prompt and beginning of the answer.

        Raises:
            ValueError: the template has a slot of another name.
        """
        try:
            return self.text.format(**slots), self.prefix.format(**slots)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"expected a template with the slots {', '.join(slots)}, got {self.text[:60]!r}: {error!r}"
            ) from None


@dataclass(frozen=True)
class RulerTexts:
    """All that RULER-style tasks are written with.

    Attributes:
        source: tells results of other texts apart.
        templates: by RULER's names of kinds of tasks.
        needle: sentence with the slots ``{type_needle_v}``, ``{key}`` and ``{value}``.
        noise: a remark that is repeated.
        adjectives, nouns: keys of needles are pairs of them.
        words: for lists of words.
        more_words: for lists that need more than ``words`` has; None makes them by numbering ``words``.
        haystack: text around needles; None if there is none.
    """

    source: str
    templates: Mapping[str, TaskTemplate]
    needle: str
    noise: str
    adjectives: Sequence[str]
    nouns: Sequence[str]
    words: Sequence[str]
    more_words: Sequence[str] | None
    haystack: Haystack | None

    @cached_property
    def fingerprint(self) -> str:
        """Name of these texts in the settings of results."""
        return f"{self.source}/{'none' if self.haystack is None else self.haystack.fingerprint}"

    def with_haystack(self, haystack: Haystack) -> RulerTexts:
        """The same texts around other needles."""
        return replace(self, haystack=haystack)

    def words_for(self, num_words: int) -> Sequence[str]:
        """At least ``num_words`` different words.

        Raises:
            ValueError: there are not so many.
        """
        if num_words <= len(self.words):
            return self.words
        if self.more_words is None:
            rounds = -(-num_words // len(self.words))
            return [word + str(at or "") for at in range(rounds) for word in self.words]
        if num_words <= len(self.more_words):
            return self.more_words
        raise ValueError(f"expected a list of at least {num_words} words, got {len(self.more_words)}")


OWN_TEXTS = RulerTexts(
    source="own",
    templates={
        "niah": TaskTemplate(
            "Some secret {type_needle_v} are hidden in the text below. Read it with attention; a question "
            "follows.\n{context}\nWhat are all the secret {type_needle_v} of {query} in the text above?",
            " The secret {type_needle_v} of {query} in the text above are",
        ),
        "variable_tracking": TaskTemplate(
            "Below, variables take values, some of them the value of another one. Keep track of them.\n\n"
            "{context}\nQuestion: Which variables have the value {query} in the text above?",
            " Answer: By the assignments in the text above, {num_v} variables have the value {query}: ",
        ),
        "common_words_extraction": TaskTemplate(
            "Below is a list of words with numbers. A few words come up more often than others. Take note of "
            "them.\n{context}\nQuestion: Which 10 words of the list come up most often?",
            " Answer: The 10 words that come up most often are:",
        ),
        "freq_words_extraction": TaskTemplate(
            "Below is a text in code words. Count how often each of them comes up. {context}\nQuestion: "
            "Which three code words come up most often? Pass over the dots '....' and do not explain.",
            " Answer: The three code words that come up most often are:",
        ),
        "qa": TaskTemplate(
            "Some documents follow, and then a question. Give the answer alone, without other words.\n\n"
            "{context}\n\nAnswer the question from these documents, with the answer alone and no other words."
            "\n\nQuestion: {query}",
            " Answer:",
        ),
    },
    needle="One of the secret {type_needle_v} of {key} is: {value}.",
    noise="The grass is green and the sky is blue. The sun is warm. We go there and come back again.",
    adjectives=ADJECTIVES,
    nouns=NOUNS,
    words=PASSKEY_WORDS,
    more_words=None,
    haystack=BuiltinHaystack(),
)
"""Texts of this project: scores with them are not comparable to published ones."""
