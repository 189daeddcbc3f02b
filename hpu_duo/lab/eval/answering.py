"""Questions that are answered freely, one after the other, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hpu_duo.lab.eval.interval import interval_fields
from hpu_duo.lab.eval.kv_bytes import KVBytes
from hpu_duo.lab.eval.model_under_test import ModelUnderTest
from hpu_duo.lab.eval.result_file import ResultFile


@dataclass(frozen=True)
class Question:
    """One prompt and how to judge its answer.

    Attributes:
        prompt: token ids.
        max_new_tokens: of the answer.
        record: fields of its line of results.
        score: what an answer is worth, in [0, 1].
        ends: token ids that end the answer, but not before its first token.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    record: Mapping[str, Any]
    score: Callable[[str], float]
    ends: tuple[int, ...] = ()


def answered(
    subject: ModelUnderTest,
    num_questions: int,
    question: Callable[[int], Question],
    results: ResultFile | None = None,
    num_decoded: int = 1,
) -> Iterator[dict[str, Any]]:
    """Ask the questions that ``results`` does not have yet, in batches as large as the engine runs at once.

    Args:
        question: writes the question of a number, when its turn comes: all of them at once may be gigabytes.
        results: takes a line for each; those that it has are not asked again.
        num_decoded: last tokens of each prompt that are decoded; DuoAttention's LongBench runs take 50.

    Yields:
        Every record in order, with ``pred``, ``score`` and bytes kept.

    Raises:
        ValueError: a prompt with its answer is longer than the model can hold.
    """
    done = [] if results is None else list(results.records)
    yield from done
    width = subject.num_at_once
    for first in range(len(done), num_questions, width):
        batch = [question(at) for at in range(first, min(first + width, num_questions))]
        check_questions(subject, batch)
        answers, kv = subject.answer(
            [one.prompt for one in batch],
            [one.max_new_tokens for one in batch],
            ends=[one.ends for one in batch],
            num_decoded=num_decoded,
        )
        for one, pred, kept in zip(batch, answers, kv, strict=True):
            record = {**one.record, "pred": pred, "score": one.score(pred), **kept.record_fields}
            if results is not None:
                results.append(record)
            yield record


def check_questions(subject: ModelUnderTest, questions: Sequence[Question]) -> None:
    """Refuse prompts that do not fit the model with their answers.

    Raises:
        ValueError: one is too long.
    """
    subject.check_lengths([len(one.prompt) + one.max_new_tokens for one in questions], "prompts")


def means(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each combination of values of the fields: mean score with its interval, and bytes kept."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    return [
        {
            **dict(zip(names, key, strict=True)),
            "num_samples": len(group),
            **interval_fields("score", fmean(record["score"] for record in group), len(group)),
            **KVBytes.total(map(KVBytes.of_record, group)).report_fields,
        }
        for key, group in groups.items()
    ]
