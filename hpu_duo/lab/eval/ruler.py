"""RULER: synthetic long-context tasks, over any tokenizer.

Source: Hsieh et al. 2024, arXiv:2404.06654. A sample is as long as the model's own tokens allow, and a pure
function of its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

from hpu_duo.lab.eval.answering import means
from hpu_duo.lab.eval.interval import interval_fields
from hpu_duo.lab.eval.kv_bytes import KVBytes
from hpu_duo.lab.eval.metrics import found_any, found_share
from hpu_duo.lab.eval.ruler_questions import OWN_TEXTS, DocumentQuestions, Draw, RulerTexts
from hpu_duo.lab.eval.ruler_tasks import (
    Needles,
    Task,
    TokenCounter,
    Written,
    common_words_task,
    frequent_words_task,
    most_filler,
    needle_task,
    question_task,
    variable_task,
)

_NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value_kind="uuids"),
    "niah_multikey_1": Needles("essay", num_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": Needles("essay", num_values=4),
    "niah_multiquery": Needles("essay", num_keys=4, num_asked=4),
}
QUESTION_TASKS = ("qa_1", "qa_2")
"""Tasks that need a file of questions: SQuAD's, and HotpotQA's."""
_ANSWER_TOKENS = {
    **dict.fromkeys(_NEEDLES, 128),
    "vt": 30,
    "cwe": 120,
    "fwe": 50,
    **dict.fromkeys(QUESTION_TASKS, 32),
}
RULER_TASKS: tuple[str, ...] = tuple(_ANSWER_TOKENS)
"""The thirteen tasks, by RULER's names."""
_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True)
class RulerSample:
    """One prompt, and the texts that its answer must hold.

    Attributes:
        task: one of ``RULER_TASKS``.
        index: number of the sample.
        input: the prompt, without ``answer_prefix``.
        answer_prefix: beginning of the answer; it follows the prompt.
        outputs: texts that the answer must hold; for questions, any of them.
        length: tokens of the prompt, its prefix and the longest answer.
        length_w_model_temp: the same with special tokens or the chat template around the prompt.
        max_new_tokens: of an answer.
        token_position_answer: tokens of the prompt before the first of the outputs; None but for needles.
    """

    task: str
    index: int
    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int
    length_w_model_temp: int
    max_new_tokens: int
    token_position_answer: int | None = None

    @property
    def prompt(self) -> str:
        """All the text before the answer."""
        return self.input + self.answer_prefix

    def score(self, prediction: str) -> float:
        """Share of the outputs that the answer holds; for questions, 1 if it holds any."""
        said = _CONTROL.sub("\n", prediction.strip()).strip()
        return (
            found_any(said, self.outputs) if self.task in QUESTION_TASKS else found_share(said, self.outputs)
        )

    def as_record(self) -> dict[str, Any]:
        """The fields of RULER's JSON lines, and the task."""
        fields = {**asdict(self), "outputs": list(self.outputs)}
        if self.token_position_answer is None:
            del fields["token_position_answer"]
        return fields


@dataclass(frozen=True)
class RulerTask:
    """One task at one length.

    Attributes:
        name: one of ``RULER_TASKS``.
        count_tokens: length measure without special tokens.
        num_tokens: of prompt, beginning of the answer and longest answer.
        texts: sentences and words.
        questions: for tasks of questions, by name of the task.
        seed: equal tasks give equal samples.
        num_around: tokens around the prompt, special ones or a chat template's; they count as well.

    Raises:
        ValueError: the task is unknown, or its questions are missing.
    """

    name: str
    count_tokens: TokenCounter
    num_tokens: int
    texts: RulerTexts = OWN_TEXTS
    questions: Mapping[str, DocumentQuestions] = field(default_factory=dict)
    seed: int = 0
    num_around: int = 0

    def __post_init__(self) -> None:
        if self.name not in _ANSWER_TOKENS:
            raise ValueError(f"expected a task among {', '.join(RULER_TASKS)}, got {self.name!r}")
        if self.name in QUESTION_TASKS and self.name not in self.questions:
            raise ValueError(f"expected a file of questions for {self.name}, got none")

    def sample(self, index: int) -> RulerSample:
        """The sample of a number.

        The size that fits the first sample is taken for all, and lowered by steps of 1 % where one is too
        long. RULER does the same in larger steps.

        Raises:
            ValueError: the tokens do not suffice for the task, or a needed text or question is missing.
        """
        task = self._task(index)
        size = max(task.least, self._num_filler)
        while self._length(written := task.write(size)) > self._budget:
            if size == task.least:
                missing = self._length(written) - self._budget
                raise ValueError(
                    f"expected num_tokens of at least {self.num_tokens + missing} for {self.name}, got "
                    f"{self.num_tokens}"
                )
            size = max(task.least, size - max(1, size // 100))
        return self._sample(index, written)

    @property
    def _budget(self) -> int:
        return self.num_tokens - _ANSWER_TOKENS[self.name] - self.num_around

    @cached_property
    def _num_filler(self) -> int:
        task = self._task(0)
        # What does not fit at all is reported by ``sample``, with the tokens that are missing.
        if self._length(task.write(task.least)) > self._budget:
            return task.least
        return most_filler(lambda n: self._length(task.write(n)), task.least, self._budget, self.name)

    def _length(self, written: Written) -> int:
        return self.count_tokens(written.input + written.prefix)

    def _task(self, index: int) -> Task:
        draw = Draw(self.seed, f"{self.name}/{index}")
        match self.name:
            case "vt":
                return variable_task(self.texts, draw, self.count_tokens)
            case "cwe":
                return common_words_task(self.texts, draw, self.num_tokens)
            case "fwe":
                return frequent_words_task(self.texts, draw, self._budget)
            case "qa_1" | "qa_2":
                return question_task(self.questions[self.name], index, self.texts, draw)
            case _:
                return needle_task(_NEEDLES[self.name], self.texts, draw)

    def _sample(self, index: int, written: Written) -> RulerSample:
        most = _ANSWER_TOKENS[self.name]
        length = self._length(written) + most
        before = None
        if self.name in _NEEDLES:
            before = self.count_tokens(written.input[: written.input.find(written.outputs[0])])
        return RulerSample(
            self.name,
            index,
            written.input,
            written.prefix,
            written.outputs,
            length,
            length + self.num_around,
            most,
            before,
        )


def ruler_sample(
    task: str, count_tokens: TokenCounter, num_tokens: int, index: int = 0, seed: int = 0
) -> RulerSample:
    """Write one sample with our own texts; see ``RulerTask``.

    Raises:
        ValueError: the task is unknown or needs a file of questions, or the tokens do not suffice for it.
    """
    return RulerTask(task, count_tokens, num_tokens, seed=seed).sample(index)


def ruler_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each task and length, and for each length the average over its tasks, as RULER reports it.

    The interval of an average is that of as many answers as all its tasks have together.
    """
    rows = means(records, ("task", "num_tokens"))
    found = []
    for length in dict.fromkeys(row["num_tokens"] for row in rows):
        of_length = [row for row in rows if row["num_tokens"] == length]
        found += of_length
        if len(of_length) > 1:
            answers = [record for record in records if record["num_tokens"] == length]
            found.append(
                {
                    "task": f"average of {len(of_length)}",
                    "num_tokens": length,
                    "num_samples": len(answers),
                    **interval_fields("score", fmean(row["score"] for row in of_length), len(answers)),
                    **KVBytes.total(map(KVBytes.of_record, answers)).report_fields,
                }
            )
    return found
