"""LongBench files: questions over long contexts, with the metric of each data set.

Source: Bai et al. 2024, arXiv:2308.14508; data sets, answer lengths and metrics are LongBench's, prompts are
ours unless its ``dataset2prompt.json`` is given. Each metric is there twice: as textbooks define it, and as
LongBench's own scripts compute it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hpu_duo.lab.eval import metrics, official_metrics
from hpu_duo.lab.eval.answering import Question
from hpu_duo.lab.eval.metrics import Metric
from hpu_duo.lab.eval.model_under_test import ModelUnderTest


class MetricSource(str, Enum):
    """Choice of whose numbers a metric gives."""

    OURS = "ours"
    """Those of the textbooks, without packages and dictionaries."""
    OFFICIAL = "official"
    """Those of LongBench's scripts, to compare with published scores."""


@dataclass(frozen=True)
class MetricPair:
    """One metric from both sources."""

    ours: Metric
    official: Metric

    def of(self, source: MetricSource) -> Metric:
        """The metric from this source."""
        match source:
            case MetricSource.OURS:
                return self.ours
            case MetricSource.OFFICIAL:
                return self.official


@dataclass(frozen=True)
class DatasetKind:
    """Metric and prompt of one data set, as LongBench defines them.

    Attributes:
        metric: compares an answer with one reference.
        max_new_tokens: of an answer.
        form: name of the prompt, one of ours.
        is_first_line: only the first line of the answer counts.
        is_chat: models that chat are asked in their chat template; without it where the prompt ends with the
            beginning of one more example, or of a line of code.
        ends_at_newline: generation ends at a line's end, but not before its first token.
    """

    metric: MetricPair
    max_new_tokens: int
    form: str
    is_first_line: bool = False
    is_chat: bool = True
    ends_at_newline: bool = False


_F1 = MetricPair(metrics.qa_f1, metrics.qa_f1)
_F1_ZH = MetricPair(metrics.qa_f1_zh, official_metrics.qa_f1_zh)
_ROUGE = MetricPair(metrics.rouge_l, official_metrics.rouge_l)
_ROUGE_ZH = MetricPair(metrics.rouge_l_zh, official_metrics.rouge_l_zh)
_CLASS = MetricPair(metrics.classification, official_metrics.classification)
_COUNT = MetricPair(metrics.count, official_metrics.count)
_RETRIEVAL = MetricPair(metrics.retrieval, metrics.retrieval)
_CODE = MetricPair(metrics.code_similarity, official_metrics.code_similarity)
DATASETS: dict[str, DatasetKind] = {
    "narrativeqa": DatasetKind(_F1, 128, "question"),
    "qasper": DatasetKind(_F1, 128, "question"),
    "multifieldqa_en": DatasetKind(_F1, 64, "question"),
    "multifieldqa_zh": DatasetKind(_F1_ZH, 64, "question"),
    "hotpotqa": DatasetKind(_F1, 32, "question"),
    "2wikimqa": DatasetKind(_F1, 32, "question"),
    "musique": DatasetKind(_F1, 32, "question"),
    "dureader": DatasetKind(_ROUGE_ZH, 128, "question"),
    "gov_report": DatasetKind(_ROUGE, 512, "summary"),
    "qmsum": DatasetKind(_ROUGE, 512, "question"),
    "multi_news": DatasetKind(_ROUGE, 512, "summary"),
    "vcsum": DatasetKind(_ROUGE_ZH, 512, "summary"),
    "trec": DatasetKind(_CLASS, 64, "examples", is_first_line=True, is_chat=False),
    "triviaqa": DatasetKind(_F1, 32, "examples", is_first_line=True, is_chat=False),
    "samsum": DatasetKind(_ROUGE, 128, "examples", is_first_line=True, is_chat=False, ends_at_newline=True),
    "lsht": DatasetKind(_CLASS, 64, "examples", is_first_line=True, is_chat=False),
    "passage_count": DatasetKind(_COUNT, 32, "count"),
    "passage_retrieval_en": DatasetKind(_RETRIEVAL, 32, "paragraph"),
    "passage_retrieval_zh": DatasetKind(_RETRIEVAL, 32, "paragraph"),
    "lcc": DatasetKind(_CODE, 64, "code", is_chat=False),
    "repobench-p": DatasetKind(_CODE, 64, "code", is_chat=False),
}
PROMPTS: dict[str, str] = {
    "question": "{context}\n\nQuestion: {input}\nAnswer in a few words:",
    "summary": "{context}\n\n{input}\nA summary of this text:",
    "examples": "{context}\n{input}",
    "count": "{context}\n\nHow many different paragraphs are there? Number:",
    "paragraph": "{context}\n\nWhich paragraph is this about? {input}\nNumber of the paragraph:",
    "code": "{context}{input}",
}
LENGTH_BUCKETS = {"0-4k": 4000, "4-8k": 8000, "8k+": float("inf")}
"""Ranges of lengths of LongBench-E and where they end, in words or characters as files count them."""
_FIELDS = {"input": str, "context": str, "answers": list}


@dataclass(frozen=True)
class LongBenchItem:
    """One line of a file.

    Attributes:
        dataset: names metric and prompt.
        context, input: the long text, and the question about it.
        answers: references, any of which will do.
        classes: names of the classes, for classification.
        length: words or characters of the context, as the file says; 0 if it does not.
    """

    dataset: str
    context: str
    input: str
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()
    length: int = 0

    @property
    def kind(self) -> DatasetKind:
        """Metric and limits of the data set."""
        return DATASETS[self.dataset]

    @property
    def length_bucket(self) -> str:
        """Range of lengths in which LongBench-E reports the item."""
        return next(name for name, end in LENGTH_BUCKETS.items() if self.length < end)

    def score(self, prediction: str, source: MetricSource = MetricSource.OURS) -> float:
        """The best match with any reference, in [0, 1].

        Raises:
            ValueError: the metric needs a package that is not there.
        """
        text = prediction.lstrip("\n").split("\n")[0] if self.kind.is_first_line else prediction
        metric = self.kind.metric.of(source)
        return max(metric(text, answer, self.classes) for answer in self.answers)


def read_longbench(
    path: Path, dataset: str | None = None, source: MetricSource = MetricSource.OURS
) -> list[LongBenchItem]:
    """Read a JSON-lines file in LongBench's format.

    Args:
        dataset: for lines that do not name theirs.
        source: of the metrics that the answers must be fit for.

    Raises:
        ValueError: the file cannot be read, a line lacks a field, or a data set is unknown.
    """
    try:
        # Not splitlines: texts hold line separators of Unicode, which JSON does not escape.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the data set {path}: {error}") from error
    items = [_item(path, at, line, dataset, source) for at, line in enumerate(lines, start=1) if line.strip()]
    if not items:
        raise ValueError(f"expected questions in {path}, got an empty file")
    return items


def read_prompts(path: Path) -> dict[str, str]:
    """Templates by data set from a file like LongBench's ``dataset2prompt.json``.

    Raises:
        ValueError: it is no JSON object of texts with ``{context}``.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the prompts {path}: {error}") from error
    if not isinstance(found, dict) or not all(
        isinstance(v, str) and "{context}" in v for v in found.values()
    ):
        raise ValueError(f"expected {path} to map data sets to texts with {{context}}, got something else")
    return found


def prompt_text(item: LongBenchItem, prompts: Mapping[str, str] | None = None) -> str:
    """The prompt of an item.

    Raises:
        ValueError: ``prompts`` are given and lack the data set.
    """
    if prompts is None:
        template = PROMPTS[item.kind.form]
    elif item.dataset in prompts:
        template = prompts[item.dataset]
    else:
        raise ValueError(f"expected a prompt for {item.dataset!r}, got {', '.join(sorted(prompts))}")
    # Not str.format: templates and contexts may hold braces of their own.
    before, _, after = template.partition("{context}")
    return before.replace("{input}", item.input) + item.context + after.replace("{input}", item.input)


def cut_middle(token_ids: Sequence[int], most: int) -> list[int]:
    """The first and last halves of a prompt that is longer than ``most`` tokens; others as they are."""
    if most < 1:
        raise ValueError(f"expected room for at least 1 token of the prompt, got {most}")
    if len(token_ids) <= most:
        return list(token_ids)
    first = most // 2
    return [*token_ids[:first], *token_ids[len(token_ids) - (most - first) :]]


def _item(path: Path, at: int, line: str, dataset: str | None, source: MetricSource) -> LongBenchItem:
    where = f"line {at} of {path}"
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"expected a JSON object in {where}, got {line[:40]!r}") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object in {where}, got {line[:40]!r}")
    for name, kind in _FIELDS.items():
        if not isinstance(found.get(name), kind):
            raise ValueError(f"expected {name!r} of type {kind.__name__} in {where}, got {found.get(name)!r}")
    if not found["answers"]:
        raise ValueError(f"expected at least one answer in {where}, got none")
    classes, length = found.get("all_classes") or [], found.get("length") or 0
    if not isinstance(classes, list) or not isinstance(length, int):
        raise ValueError(
            f"expected all_classes to be a list and length a number in {where}, got {classes!r} and "
            f"{length!r}"
        )
    # LongBench-E names its data sets with this ending.
    name = str(found.get("dataset") or dataset or "").removesuffix("_e")
    if name not in DATASETS:
        raise ValueError(f"expected one of the data sets {', '.join(DATASETS)} in {where}, got {name!r}")
    item = LongBenchItem(
        dataset=name,
        context=found["context"],
        input=found["input"],
        answers=tuple(map(str, found["answers"])),
        classes=tuple(map(str, classes)),
        length=length,
    )
    try:
        # What no answer could be compared with is found now, and not when there is one.
        item.score("", source)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return item


@dataclass(frozen=True)
class LongBenchProtocol:
    """Prompts, cutting and scoring of LongBench items.

    Attributes:
        source: of the metrics. ``OFFICIAL`` also cuts and ends answers as LongBench's scripts do.
        templates: prompts by data set; None = ours.
        max_length: tokens of a prompt beyond which its middle is cut out; None cuts nothing.
        is_chat: put prompts into the model's chat template, but for data sets that go without.
    """

    source: MetricSource = MetricSource.OURS
    templates: Mapping[str, str] | None = None
    max_length: int | None = None
    is_chat: bool = False

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"expected max_length of at least 2 tokens, got {self.max_length}")

    def question(self, subject: ModelUnderTest, item: LongBenchItem, index: int) -> Question:
        """The question of an item.

        Raises:
            ValueError: the templates lack its data set, or the tokenizer cannot encode it or has no chat
                template.
        """
        ends_line = item.kind.ends_at_newline and self.source is MetricSource.OFFICIAL
        return Question(
            tuple(self.prompt(subject, prompt_text(item, self.templates), item.kind.is_chat)),
            item.kind.max_new_tokens,
            _record(item, index),
            lambda pred: item.score(pred, self.source),
            # Of a newline that the tokenizer spells with several tokens, the last one.
            (subject.encode("\n")[-1],) if ends_line else (),
        )

    def prompt(self, subject: ModelUnderTest, text: str, is_chat: bool = True) -> list[int]:
        """Token ids of a prompt.

        LongBench cuts by text: halves of ``max_length // 2`` tokens are decoded, joined and encoded again, so
        a prompt may get a token more or less; and the chat template comes after the cut. Otherwise the ids
        themselves are cut.

        Args:
            is_chat: the prompt may be put into the chat template.
        """
        in_chat = self.is_chat and is_chat
        ids = subject.encode(text, is_start=True)
        is_long = self.max_length is not None and len(ids) > self.max_length
        if not in_chat and self.source is MetricSource.OURS:
            return ids if self.max_length is None else cut_middle(ids, self.max_length)
        if is_long and self.max_length is not None:
            half = self.max_length // 2
            halves = (ids[:half], ids[-half:])
            text = "".join(str(subject.tokenizer.decode(one, skip_special_tokens=True)) for one in halves)
            ids = subject.encode(text, is_start=True)
        return subject.encode_chat(text) if in_chat else ids


def _record(item: LongBenchItem, index: int) -> dict[str, Any]:
    return {
        "index": index,
        "dataset": item.dataset,
        "answers": list(item.answers),
        "all_classes": list(item.classes),
        "length": item.length,
        "length_bucket": item.length_bucket,
    }
