"""Needle in a haystack: one passkey at every depth of every length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpu_duo.lab.eval.model_under_test import ModelUnderTest
from hpu_duo.lab.eval.passkey import PasskeyQuestions, PasskeyResult, PasskeyTask, passkey_accuracy
from hpu_duo.lab.eval.passkey_text import BUILTIN_TEXT, PasskeyText
from hpu_duo.lab.eval.result_file import ResultFile


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
