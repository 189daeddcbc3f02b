"""Base of the responses of completions and chats: choices, usage, log-probabilities, body and events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from hpu_duo.engine.outputs import RequestOutput, TokenLogprob
from hpu_duo.request import FinishReason
from hpu_duo.server.prompts import TokenTexts
from hpu_duo.server.running import ChoiceOutput


@dataclass
class Choice:
    """Accumulated outputs.

    Attributes:
        text: so far.
        token_ids, logprobs: of the tokens sampled so far.
        finish_reason, stop_reason: why it ended; None while it has not.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> Choice:
        """Create a choice from one output."""
        tokens, logprobs = list(output.token_ids), list(output.logprobs)
        return cls(output.text, tokens, logprobs, output.finish_reason, output.stop_reason)

    def add(self, output: RequestOutput) -> None:
        """Append the output of a step."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason

    @property
    def is_empty(self) -> bool:
        """Whether it has no content: a token may complete no text."""
        return not (self.text or self.logprobs or self.finish_reason is not None)


KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore, so that proxies do not close an idle connection."""

DONE = b"data: [DONE]\n\n"


def as_json(value: Any) -> bytes:
    """Encode plain values; pydantic's encoder needs a fifth of the time of the standard library's."""
    return to_json(value)


def event(data: Any) -> bytes:
    """Return an event with a JSON value."""
    return b"data: %b\n\n" % as_json(data)


class EventFrame:
    """Events of one object each, with constant first members, which are encoded once.

    Args:
        first: these members; at least one.
    """

    def __init__(self, first: Mapping[str, Any]) -> None:
        self._beginning = b"data: %b," % as_json(first)[:-1]

    def event(self, rest: Mapping[str, Any]) -> bytes:
        """Return an event with the other members; at least one."""
        return b"%b%b\n\n" % (self._beginning, as_json(rest)[1:])


@dataclass
class Usage:
    """Numbers of tokens of all prompts and of all answers of a call.

    Attributes:
        prompt_tokens: each prompt counts once, however many choices it has.
        completion_tokens: sampled tokens, stop tokens included.
        has_prediction: whether the call has a predicted output.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    has_prediction: bool = False
    _cached: dict[str, int] = field(default_factory=dict)
    _predicted: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def count(self, output: RequestOutput) -> None:
        """Count the tokens of an output, and the cached tokens of its prompt."""
        self.completion_tokens += len(output.token_ids)
        if output.sample_index == 0 and output.token_ids:
            self._cached[output.request_id] = output.num_cached_tokens
        if self.has_prediction:
            self._predicted[output.request_id, output.sample_index] = output.num_predicted

    def fields(self) -> dict[str, Any]:
        """The JSON object."""
        found: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
        if self.has_prediction:
            accepted, rejected = (sum(each) for each in zip((0, 0), *self._predicted.values()))
            found["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            }
        return found


_SHORT = 512
"""Tokens of an answer, and characters of echoed prompts."""
ID_CHARACTERS = 2
"""Number of characters of about the memory of a token id in JSON."""


@dataclass(frozen=True)
class AnswerHead:
    """The common members of the body and of all events of an answer.

    Attributes:
        answer_id: its ``id``.
        model: name of the model in the request.
        created: seconds since 1970.
    """

    answer_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        """The members as a JSON object."""
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}


class Answer(ABC):
    """Collects outputs, and encodes them as a body or as events.

    Args:
        head: common members.
        usage: counts the tokens.
        num_choices: number of choices.
        tells_usage: whether a stream ends with the usage.
        tells_usage_always: whether each of its events has it.
        returned_prompts: token ids of each prompt, to be returned with those of choices; None for neither.
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
        """Collect outputs, for the body."""
        for choice, output in batch:
            self.usage.count(output)
            self.choices[choice].add(output)

    @property
    def is_short(self) -> bool:
        """Whether encoding the body is too fast to be worth a thread."""
        return self.usage.completion_tokens + self.num_echoed < _SHORT

    @property
    def num_echoed(self) -> int:
        """Number of characters of echoed prompts."""
        return 0

    def body(self) -> bytes:
        """The body as JSON, encoded choice by choice, since objects need more memory than text."""
        choices = (as_json(self._choice(index, choice)) for index, choice in enumerate(self.choices))
        head = as_json({**self.head.fields(self.kind), **self._own_fields()})
        usage = as_json(self.usage.fields())
        return b'%b,"choices":[%b],"usage":%b}' % (head[:-1], b",".join(choices), usage)

    def _own_fields(self) -> dict[str, Any]:
        """Additional members of the body."""
        return {}

    def beginning(self) -> bytes:
        """Events before the first output."""
        return b""

    def events(self, batch: Sequence[ChoiceOutput]) -> bytes:
        """Outputs as events: one for each choice, with all of its outputs."""
        fresh: dict[int, Choice] = {}
        for index, output in batch:
            self.usage.count(output)
            if index in fresh:
                fresh[index].add(output)
            else:
                fresh[index] = Choice.of(output)
        events = []
        for index, choice in fresh.items():
            self.choices[index].finish_reason = choice.finish_reason
            if not choice.is_empty or self._returns_token_ids:
                events += [self._event([part]) for part in self._parts(index, choice)]
        return b"".join(events)

    def ending(self) -> bytes:
        """Events after the last output, except ``[DONE]``."""
        if not self._tells_usage:
            return b""
        return self._frame.event({"choices": [], "usage": self.usage.fields()})

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """Finish reasons of the choices that have ended."""
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


_LEAST = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class TokenNames:
    """Names of tokens in log-probabilities.

    Args:
        texts: of the vocabulary.
        by_id: name tokens by their ids, as ``token_id:17``, since texts may be ambiguous.
    """

    def __init__(self, texts: TokenTexts, *, by_id: bool = False) -> None:
        self._texts = texts
        self.name: Callable[[int], str] = _by_id if by_id else texts.text

    def bytes(self, token_id: int) -> list[int]:
        """The bytes of a token."""
        return list(self._texts.bytes(token_id))

    def num_characters(self, token_id: int, *, has_special: bool) -> int:
        """Number of characters of a text that begin with a token; see ``TokenTexts``."""
        return self._texts.num_characters(token_id, has_special=has_special)


def _by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


class CompletionLogprobs:
    """The style of completions: parallel lists.

    Args:
        names: of tokens.
        offset: characters of the answer before the first of these tokens.
    """

    def __init__(self, names: TokenNames, offset: int = 0) -> None:
        self._names, self._offset = names, offset

    def fields(
        self, entries: Sequence[TokenLogprob | int], *, has_special: bool = False
    ) -> dict[str, list[Any]]:
        """The JSON object for the next tokens.

        Args:
            entries: a bare token id has no log-probability, such as the first of a prompt.
            has_special: whether special tokens among them are part of the text.
        """
        found: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for entry in entries:
            token_id = entry if isinstance(entry, int) else entry.token_id
            found["text_offset"].append(self._offset)
            found["tokens"].append(self._names.name(token_id))
            found["token_logprobs"].append(None if isinstance(entry, int) else _finite(entry.logprob))
            found["top_logprobs"].append(None if isinstance(entry, int) else self._top(entry))
            self._offset += self._names.num_characters(token_id, has_special=has_special)
        return found

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        top = {self._names.name(token_id): _finite(logprob) for token_id, logprob in entry.top.items()}
        return top | {self._names.name(entry.token_id): _finite(entry.logprob)}


def chat_logprobs(entries: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """The style of chats: a list of objects."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": names.name(token_id), "logprob": _finite(logprob), "bytes": names.bytes(token_id)}

    content = [
        {
            **one(entry.token_id, entry.logprob),
            "top_logprobs": [one(token_id, logprob) for token_id, logprob in entry.top.items()],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
