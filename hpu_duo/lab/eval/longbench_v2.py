"""LongBench v2: four choices over long contexts, answered in words from which the letter is read.

Source: Bai et al. 2024, arXiv:2412.15204; fields, answer lengths and the reading of answers are those of its
public scripts, the prompt is ours unless its file is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpu_duo.lab.eval.answering import means

LETTERS = ("A", "B", "C", "D")
MAX_NEW_TOKENS = 128
PROMPT = (
    "Here is a text, and after it a question about it.\n\n$DOC$\n\nQuestion: $Q$\n"
    "(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n(D) $C_D$\n\n"
    'Which choice is right? Answer with one sentence: "The correct answer is (letter)".'
)
"""Prompt with the marks of LongBench v2's own files: ``$DOC$``, ``$Q$``, and ``$C_A$`` to ``$C_D$``."""
_MARKS = ("$DOC$", "$Q$", *(f"$C_{letter}$" for letter in LETTERS))
_TEXTS = ("_id", "question", "context", *(f"choice_{letter}" for letter in LETTERS))
_GROUPS = {"answer": LETTERS, "difficulty": ("easy", "hard"), "length": ("short", "medium", "long")}
_ANSWERS = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))


@dataclass(frozen=True)
class ChoiceItem:
    """One question with four choices.

    Attributes:
        item_id: of the data set.
        context, question: the long text, and what is asked about it.
        choices: four.
        answer: letter of the right one.
        difficulty: easy or hard.
        length: short, medium or long.
    """

    item_id: str
    context: str
    question: str
    choices: tuple[str, ...]
    answer: str
    difficulty: str
    length: str

    def prompt(self, template: str = PROMPT) -> str:
        """The prompt, with marks replaced by texts without their outer spaces."""
        texts = (self.context, self.question, *self.choices)
        found = dict(zip(_MARKS, (text.strip() for text in texts), strict=True))
        # In one pass: a text may hold a mark of its own.
        return re.sub("|".join(map(re.escape, _MARKS)), lambda mark: found[mark[0]], template)

    def score(self, prediction: str) -> float:
        """1 if the letter that the answer names is the right one, else 0."""
        return float(chosen_letter(prediction) == self.answer)

    @property
    def record(self) -> dict[str, Any]:
        """Fields of its line of results; the text itself is left out."""
        return {
            "_id": self.item_id,
            "answer": self.answer,
            "difficulty": self.difficulty,
            "length": self.length,
        }


def chosen_letter(prediction: str) -> str | None:
    """The letter that an answer names in the words asked for, asterisks aside; None if it names none."""
    text = prediction.strip().replace("*", "")
    found = [match for match in (pattern.search(text) for pattern in _ANSWERS) if match]
    return found[0][1] if found else None


def read_longbench_v2(path: Path) -> list[ChoiceItem]:
    """Read a file of LongBench v2: one JSON array, or JSON lines.

    Raises:
        ValueError: the file cannot be read, or a question lacks a field or has another value in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        # Not splitlines: texts hold line separators of Unicode, which JSON does not escape.
        found = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.split("\n") if line.strip()]
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the questions in {path}: {error}") from error
    if not found:
        raise ValueError(f"expected questions in {path}, got none")
    return [_item(path, number, one) for number, one in enumerate(found, start=1)]


def read_prompt(path: Path) -> str:
    """A prompt with marks, such as LongBench v2's ``0shot.txt``.

    Raises:
        ValueError: it cannot be read, or lacks the marks of the question or of a choice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompt {path}: {error}") from error
    missing = [mark for mark in _MARKS[1:] if mark not in text]
    if missing:
        raise ValueError(f"expected {path} to hold the marks {' '.join(_MARKS[1:])}, got none of {missing}")
    return text


def choice_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the report as LongBench v2 has them: overall, then by difficulty, then by length."""
    rows = [{"group": "overall", **row} for row in means(records, ())]
    for name in ("difficulty", "length"):
        by_value = {row.pop(name): row for row in means(records, (name,))}
        rows += [{"group": value, **by_value[value]} for value in _GROUPS[name] if value in by_value]
    return rows


def _item(path: Path, number: int, found: Any) -> ChoiceItem:
    where = f"question {number} of {path}"
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object as {where}, got {str(found)[:40]!r}")
    for name in _TEXTS:
        if not isinstance(found.get(name), str):
            raise ValueError(f"expected {name!r} to be a text in {where}, got {found.get(name)!r}")
    for name, values in _GROUPS.items():
        if found.get(name) not in values:
            raise ValueError(
                f"expected {name!r} to be one of {', '.join(values)} in {where}, got {found.get(name)!r}"
            )
    return ChoiceItem(
        found["_id"],
        found["context"],
        found["question"],
        tuple(found[f"choice_{letter}"] for letter in LETTERS),
        found["answer"],
        found["difficulty"],
        found["length"],
    )
