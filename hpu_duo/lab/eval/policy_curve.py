"""Accuracy against bytes held for policies of the KV cache: which tokens are kept, at equal budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from hpu_duo.heads import HeadPattern
from hpu_duo.heads.eviction import make_kv_policy
from hpu_duo.lab.eval.answering import Question, answered
from hpu_duo.lab.eval.curve import binarised
from hpu_duo.lab.eval.interval import interval_fields
from hpu_duo.lab.eval.kv_bytes import KVBytes
from hpu_duo.lab.eval.model_under_test import ModelUnderTest
from hpu_duo.lab.eval.passkey import (
    BUILTIN_TEXT,
    PasskeyQuestions,
    PasskeyTask,
    PasskeyText,
    passkey_accuracy,
)
from hpu_duo.lab.eval.perplexity import PerplexityResult, check_stream, stream_perplexity
from hpu_duo.lab.eval.result_file import ResultFile
from hpu_duo.lab.eval.ruler import QUESTION_TASKS, RULER_TASKS, RulerTask
from hpu_duo.lab.tasks.passkeys import document
from hpu_duo.lab.tasks.rehearsed import Rehearsals

FULL, DUO, STREAMING = "full", "duo", "streaming"
"""Policies that are head patterns; all other names are those of ``kv_policy``."""
PASSKEY, REHEARSED, PERPLEXITY, RULER = "passkey", "rehearsed", "perplexity", "ruler"
TASKS = (PASSKEY, REHEARSED, PERPLEXITY, RULER)
"""Passkeys, passkeys that were asked for before, a text's perplexity, RULER's tasks with our own texts."""
REHEARSALS = Rehearsals(4)
"""Repetitions of each question, by default."""
OWN_TEXTS_TASKS = tuple(name for name in RULER_TASKS if name not in QUESTION_TASKS)
"""RULER's tasks that need no file of questions."""
_SINK = 4
_WINDOW = 64


@dataclass(frozen=True)
class PolicyPoint:
    """One policy with its budget.

    Attributes:
        policy: ``FULL``, ``DUO``, ``STREAMING``, or a ``kv_policy`` with options behind it.
        budget: share of the tokens of a text that are kept, in (0, 1]; 1 for full attention.
    """

    policy: str
    budget: float

    def __post_init__(self) -> None:
        if not 0.0 < self.budget <= 1.0:
            raise ValueError(f"expected budgets above 0 and up to 1, got {self.budget}")

    def loading(self, pattern: HeadPattern, num_tokens: int) -> dict[str, Any]:
        """Options of ``HPUDuoModel.from_pretrained`` that make the engine keep this much of a text.

        Args:
            pattern: scores of heads, for ``DUO``, and their number.
            num_tokens: of the text.

        Raises:
            ValueError: there is no such policy, or the budget is too small: for it, or for the windows of
                streaming heads alone.
        """
        kept = int(self.budget * num_tokens)
        match self.policy:
            case "full":
                return {}
            case "duo":
                return {"pattern": binarised(pattern, self._retrieval_share(pattern, num_tokens))}
            case "streaming":
                if kept <= _SINK:
                    raise ValueError(f"expected a budget of more than {_SINK} tokens, got {kept}")
                shape = (pattern.num_layers, pattern.num_kv_heads)
                return {"pattern": HeadPattern.all_streaming(*shape, sink=_SINK, recent=kept - _SINK)}
            case _:
                make_kv_policy(self.policy).check(self.num_kept(num_tokens))
                return {"kv_policy": self.policy, "kv_budget": float(self.num_kept(num_tokens))}

    def num_kept(self, num_tokens: int) -> int:
        """Tokens of a text that a head with a budget keeps."""
        return max(2, int(self.budget * num_tokens))

    def _retrieval_share(self, pattern: HeadPattern, num_tokens: int) -> float:
        """The most heads that keep everything, in whole heads, so that all keep the budget together."""
        window = (pattern.sink + pattern.recent) / num_tokens
        if window > self.budget:
            raise ValueError(
                f"expected a budget of at least {window:.1%}, which the windows of streaming heads take of "
                f"{num_tokens} tokens, got {self.budget:.1%}"
            )
        num_heads = pattern.num_layers * pattern.num_kv_heads
        share = (self.budget - window) / (1.0 - window) if window < 1.0 else 1.0
        # Rounding must not lose a head.
        return math.floor(num_heads * share + 1e-9) / num_heads


@dataclass(frozen=True)
class PolicyTask:
    """Measurements at each point.

    Attributes:
        names: of ``TASKS``.
        num_tokens: of a text.
        num_documents, num_passkeys, passkey_words, seed: see ``PasskeyTask``.
        rehearsals: of each passkey in the task ``REHEARSED``.
        num_samples: of each of RULER's tasks.
        text: of documents with passkeys.
        ruler_tasks: those of RULER's tasks that ``RULER`` is the mean of.

    Raises:
        ValueError: a task is unknown, or needs a file of questions; or there are no samples.
    """

    names: tuple[str, ...]
    num_tokens: int = 2000
    num_documents: int = 4
    num_passkeys: int = 4
    passkey_words: int = 8
    seed: int = 0
    rehearsals: Rehearsals = REHEARSALS
    num_samples: int = 10
    text: PasskeyText = BUILTIN_TEXT
    ruler_tasks: tuple[str, ...] = OWN_TEXTS_TASKS

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in TASKS:
                raise ValueError(f"expected tasks among {', '.join(TASKS)}, got {name!r}")
        for name in self.ruler_tasks:
            if name not in OWN_TEXTS_TASKS:
                raise ValueError(f"expected tasks of RULER among {', '.join(OWN_TEXTS_TASKS)}, got {name!r}")
        if self.num_samples < 1:
            raise ValueError(f"expected at least 1 sample of each of RULER's tasks, got {self.num_samples}")

    def check(self, subject: ModelUnderTest) -> None:
        """Refuse tasks that do not fit a model, before any of them is measured.

        Raises:
            ValueError: there is one.
        """
        # First by the length alone: a text that is far too long takes minutes to write.
        subject.check_lengths([self.num_tokens], "texts", "--num-tokens")
        for name in self.names:
            match name:
                case "perplexity":
                    check_stream(subject, *self._stream(subject), _WINDOW)
                case "ruler":
                    for task in self._ruler_tasks(subject):
                        task.sample(0)
                case _:
                    PasskeyQuestions.write(subject, self._passkey_task(name))

    def measure(self, name: str, subject: ModelUnderTest) -> dict[str, Any]:
        """Value with its 95 % interval, number of answers, bytes held, and the time that it took.

        Raises:
            ValueError: the task does not fit the model.
        """
        before = subject.spent
        found = self._measure(name, subject)
        spent = subject.spent - before
        return {**found, "time_s": spent.time_s, "cpu_s": spent.cpu_s}

    def _measure(self, name: str, subject: ModelUnderTest) -> dict[str, Any]:
        match name:
            case "perplexity":
                return self._perplexity(subject)
            case "ruler":
                return self._ruler(subject)
            case _:
                return self._passkeys(subject, name)

    def _passkey_task(self, name: str) -> PasskeyTask:
        return PasskeyTask(
            self.num_tokens,
            self.num_documents,
            self.num_passkeys,
            self.passkey_words,
            self.seed,
            text=self.text,
            rehearsals=self.rehearsals if name == REHEARSED else None,
        )

    def _passkeys(self, subject: ModelUnderTest, name: str) -> dict[str, Any]:
        found = passkey_accuracy(subject, self._passkey_task(name))
        return {
            **interval_fields("value", found.accuracy, found.num_answers),
            "num_answers": found.num_answers,
            **found.kv.record_fields,
        }

    def _perplexity(self, subject: ModelUnderTest) -> dict[str, Any]:
        """The last quarter of a text, decoded; the interval is that of the mean over windows of 64 tokens."""
        found = stream_perplexity(subject, *self._stream(subject), _WINDOW)
        low, high = perplexity_interval(found)
        return {
            "value": found.perplexity,
            "value_low": low,
            "value_high": high,
            "num_answers": found.num_tokens,
            **found.kv[-1].record_fields,
        }

    def _stream(self, subject: ModelUnderTest) -> tuple[list[int], int]:
        """A text, and its tokens that are not scored."""
        text = document(subject.count, self.num_tokens, 0, 1, self.seed).text
        ids = subject.encode(text, is_start=True)
        return ids, 3 * len(ids) // 4

    def _ruler_tasks(self, subject: ModelUnderTest) -> list[RulerTask]:
        return [RulerTask(name, subject.count, self.num_tokens, seed=self.seed) for name in self.ruler_tasks]

    def _ruler(self, subject: ModelUnderTest) -> dict[str, Any]:
        """The mean over all samples of its tasks."""
        tasks = self._ruler_tasks(subject)

        def question(at: int) -> Question:
            sample = tasks[at // self.num_samples].sample(at % self.num_samples)
            ids = subject.encode(sample.prompt, is_start=True)
            return Question(tuple(ids), sample.max_new_tokens, {}, sample.score)

        records = list(answered(subject, len(tasks) * self.num_samples, question))
        return {
            **interval_fields("value", fmean(one["score"] for one in records), len(records)),
            "num_answers": len(records),
            **KVBytes.total(map(KVBytes.of_record, records)).record_fields,
        }


def perplexity_interval(found: PerplexityResult) -> tuple[float, float]:
    """The 95 % interval of a perplexity, windows of its text taken for independent."""
    means = [-logprob / size for _, size, logprob in found.windows]
    reach = 1.96 * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
    middle = math.log(found.perplexity)
    return math.exp(middle - reach), math.exp(middle + reach) if reach < 700 else math.inf


def policy_points(policies: Sequence[str], budgets: Sequence[float]) -> list[PolicyPoint]:
    """Every policy at every budget; full attention once.

    Raises:
        ValueError: there are no policies, one is there twice, or a budget is out of its range.
    """
    if not policies or len(set(policies)) < len(policies):
        raise ValueError(f"expected policies, each once, got {list(policies)}")
    return [
        PolicyPoint(policy, budget)
        for policy in policies
        for budget in ([1.0] if policy == FULL else sorted(budgets))
    ]


def measured_points(
    points: Sequence[PolicyPoint],
    task: PolicyTask,
    load: Callable[[PolicyPoint], ModelUnderTest],
    results: ResultFile,
    fields: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Measure the points that ``results`` does not have yet, one model at a time; yields every record.

    Args:
        load: loads the model with a policy.
        fields: further fields of the records, by which they are found.

    Raises:
        ValueError: a policy is unknown, or a task does not fit the model.
    """
    for point in points:
        key = {**(fields or {}), "policy": point.policy, "budget": point.budget}
        missing = [name for name in task.names if results.find(**key, task=name) is None]
        if missing:
            subject = load(point)
            for name in missing:
                results.append({**key, "task": name, **task.measure(name, subject)})
            del subject
        for name in task.names:
            found = results.find(**key, task=name)
            assert found is not None, "it has just been measured"
            yield found


def policy_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the report, by task: value with its interval, bytes held and their share of the full cache."""
    names = ("task", "policy", "budget", "num_answers", "value", "value_low", "value_high")
    order = {name: at for at, name in enumerate(TASKS)}
    return [
        {**{name: record[name] for name in names}, **KVBytes.of_record(record).report_fields}
        for record in sorted(records, key=lambda one: order[one["task"]])
    ]
