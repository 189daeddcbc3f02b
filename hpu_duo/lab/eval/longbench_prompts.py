"""Prompts of LongBench: cut where they are too long, in a chat template where the data set wants one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpu_duo.lab.eval.answering import Question
from hpu_duo.lab.eval.longbench import LongBenchItem, MetricSource, cut_middle, prompt_text
from hpu_duo.lab.eval.model_under_test import ModelUnderTest


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
