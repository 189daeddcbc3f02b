"""Sentences and words of RULER-style tasks: our own, or those of a user's copy of RULER.

RULER's construction is in ``ruler_tasks.py``. Its texts are not shipped: what is here was written for this
project, in the same slots. ``ruler_checkout.py`` reads RULER's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hpu_duo.lab.tasks.haystack import BuiltinHaystack, Haystack
from hpu_duo.lab.tasks.words import ADJECTIVES, NOUNS, PASSKEY_WORDS

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
