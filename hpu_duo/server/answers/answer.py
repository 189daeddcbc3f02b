"""Common to completions and chats: who answers, and how outputs become a body or events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hpu_duo.request import FinishReason
from hpu_duo.server.answers.choice import Choice
from hpu_duo.server.answers.events import EventFrame, as_json
from hpu_duo.server.answers.usage import Usage
from hpu_duo.server.running import ChoiceOutput

_SHORT = 512
"""Tokens of an answer, and characters of echoed prompts."""
ID_CHARACTERS = 2
"""Characters that take about as much memory as a token id in JSON."""


@dataclass(frozen=True)
class AnswerHead:
    """The beginning of every part of an answer.

    Attributes:
        answer_id: its ``id``.
        model: name of the model, as the caller has it.
        created: seconds since 1970.
    """

    answer_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        """The JSON object, so far."""
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}


class Answer(ABC):
    """Takes outputs in, and writes them as a body or as events.

    Args:
        head: who answers.
        usage: counts the tokens.
        num_choices: how many choices there will be.
        tells_usage: whether a stream ends with the usage.
        tells_usage_always: whether each of its events has it.
        returned_prompts: token ids of each prompt, to be told with those of choices; None for neither.
    """

    kind: str
    """``object`` of the body."""
    part_kind: str
    """``object`` of events."""

    def __init__(
        self,
        head: AnswerHead,
        usage: Usage,
        num_choices: int,
        *,
        tells_usage: bool = False,
        tells_usage_always: bool = False,
        returned_prompts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.head, self.usage = head, usage
        self.choices = [Choice() for _ in range(num_choices)]
        self._tells_usage, self._tells_usage_always = tells_usage, tells_usage_always
        self._returned_prompts = returned_prompts
        self._frame = EventFrame(head.fields(self.part_kind))

    def add(self, batch: Sequence[ChoiceOutput]) -> None:
        """Take outputs in, for the body."""
        for choice, output in batch:
            self.usage.count(output)
            self.choices[choice].add(output)

    @property
    def is_short(self) -> bool:
        """Whether what is written at once is not worth a thread."""
        return self.usage.completion_tokens + self.num_echoed < _SHORT

    @property
    def num_echoed(self) -> int:
        """Characters of prompts that stand before choices."""
        return 0

    def body(self) -> bytes:
        """The whole answer, as JSON: choice by choice, since its objects take more memory than its text."""
        choices = (as_json(self._choice(index, choice)) for index, choice in enumerate(self.choices))
        head = as_json({**self.head.fields(self.kind), **self._own_fields()})
        usage = as_json(self.usage.fields())
        return b'%b,"choices":[%b],"usage":%b}' % (head[:-1], b",".join(choices), usage)

    def _own_fields(self) -> dict[str, Any]:
        """Fields of a whole answer that not every kind has."""
        return {}

    def beginning(self) -> bytes:
        """Events before the first output."""
        return b""

    def events(self, batch: Sequence[ChoiceOutput]) -> bytes:
        """Outputs as events: one for each choice, however many outputs of it have come."""
        fresh: dict[int, Choice] = {}
        for index, output in batch:
            self.usage.count(output)
            if index in fresh:
                fresh[index].add(output)
            else:
                fresh[index] = Choice.of(output)
        told = []
        for index, choice in fresh.items():
            self.choices[index].finish_reason = choice.finish_reason
            if not choice.is_empty or self._returns_token_ids:
                told += [self._event([part]) for part in self._parts(index, choice)]
        return b"".join(told)

    def ending(self) -> bytes:
        """Events behind the last output, but for ``[DONE]``."""
        if not self._tells_usage:
            return b""
        return self._frame.event({"choices": [], "usage": self.usage.fields()})

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """Why choices have ended, as far as they have."""
        return [one.finish_reason for one in self.choices if one.finish_reason is not None]

    @abstractmethod
    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """A choice of the body."""

    @abstractmethod
    def _parts(self, index: int, fresh: Choice) -> list[dict[str, Any]]:
        """Choices of events."""

    @property
    def _returns_token_ids(self) -> bool:
        return self._returned_prompts is not None

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        data: dict[str, Any] = {"choices": choices, **more}
        if self._tells_usage_always:
            data["usage"] = self.usage.fields()
        elif self._tells_usage:
            data["usage"] = None
        return self._frame.event(data)

    def _with_token_ids(self, fields: dict[str, Any], choice: Choice) -> dict[str, Any]:
        return {**fields, "token_ids": choice.token_ids} if self._returns_token_ids else fields
