"""Texts that hide a passkey in a document and ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hpu_duo.lab.tasks.passkeys import NEEDLE, QUESTION
from hpu_duo.lab.tasks.words import NAMES, PASSKEY_WORDS

_ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)
_SPELLING = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa "
    "quebec romeo sierra tango uniform victor whiskey xray yankee zulu"
)


@dataclass(frozen=True)
class PasskeyForm:
    """The texts around passkeys; ``{label}`` names the passkey, ``{words}`` is its value.

    Attributes:
        opening, closing: around the document, before the first question.
        needle: the sentence that hides a passkey.
        question, answer: the question for it, and the right answer, whose tokens are the passkey's tokens.
        separator: after each answer.
        labels: names that tell the passkeys of a document apart, in the order in which they are used.
        words: vocabulary of the passkeys.
        repeats: whether a word may occur twice in a document; without, no answer is ambiguous.
        shuffles: whether a document takes any of the labels, or the first ones in order.
        ends: whether an answer ends with the end-of-text token.
    """

    opening: str
    closing: str
    needle: str
    question: str
    answer: str
    separator: str
    labels: tuple[str, ...]
    words: tuple[str, ...]
    repeats: bool
    shuffles: bool
    ends: bool

    def check(self, num_passkeys: int, passkey_words: int) -> None:
        """Raise ValueError unless a document can hold that many passkeys of that many words."""
        if num_passkeys < 1 or passkey_words < 1:
            raise ValueError(
                f"expected at least one passkey of at least one word, got {num_passkeys} of {passkey_words}"
            )
        if num_passkeys > len(self.labels):
            raise ValueError(f"expected at most {len(self.labels)} passkeys, got {num_passkeys}")
        if not self.repeats and num_passkeys * passkey_words > len(self.words):
            raise ValueError(
                f"expected num_passkeys * passkey_words <= {len(self.words)}, since no word may occur twice, "
                f"got {num_passkeys} * {passkey_words}"
            )


class Form(str, Enum):
    """The forms by name."""

    ORDINALS = "ordinals"
    """For models in general: "the third passkey", words of the spelling alphabet."""
    NAMES = "names"
    """For the built-in model, which was trained on it: "the passkey for Ada", words that never repeat."""

    @property
    def texts(self) -> PasskeyForm:
        """The form itself."""
        return _FORMS[self]


_FORMS = {
    Form.ORDINALS: PasskeyForm(
        opening="Here is a long text. Some passkeys are hidden in it and will be asked for at the end.\n\n",
        closing="\n\nThe text ends here.\n\n",
        needle="Keep this in mind: the {label} passkey is {words}.",
        question="What is the {label} passkey? The {label} passkey is",
        answer=" {words}.",
        separator="\n\n",
        labels=tuple(_ORDINALS.split()),
        words=tuple(_SPELLING.split()),
        repeats=True,
        shuffles=False,
        ends=False,
    ),
    Form.NAMES: PasskeyForm(
        opening="",
        closing="",
        needle=NEEDLE.replace("{name}", "{label}"),
        question=QUESTION.replace("{name}", "{label}"),
        answer=" {words}.",
        separator="",
        labels=NAMES,
        words=PASSKEY_WORDS,
        repeats=False,
        shuffles=True,
        ends=True,
    ),
}
