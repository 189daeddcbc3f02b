"""Answers of ``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpu_duo.engine.outputs import TokenLogprob
from hpu_duo.request import FinishReason
from hpu_duo.server.answers.answer import (
    ID_CHARACTERS,
    Answer,
    AnswerHead,
    Choice,
    CompletionLogprobs,
    TokenNames,
    Usage,
    chat_logprobs,
)
from hpu_duo.server.tools import CallArguments, CallBegun, Content, Piece, ToolParser


@dataclass
class _Call:
    """A tool call of a choice."""

    name: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    arguments: str = ""

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class _Reader:
    """Splits the text of one choice into content and tool calls.

    Args:
        parser: None = all text is content.
        only_first: drop all calls but the first.
        only_calls: drop content, which is the markup of a truncated call.
    """

    def __init__(self, parser: ToolParser | None, only_first: bool, only_calls: bool) -> None:
        self._parser, self._only_first, self._only_calls = parser, only_first, only_calls
        self.calls: list[_Call] = []
        self.has_begun = False

    def read(self, choice: Choice) -> list[Piece]:
        """Parse more text, and return the completed pieces."""
        if self._parser is None:
            return [Content(choice.text)] if choice.text else []
        pieces = self._parser.push(choice.text)
        if choice.finish_reason is not None:
            pieces += self._parser.finish()
        return [piece for piece in pieces if self._keep(piece)]

    def _keep(self, piece: Piece) -> bool:
        if isinstance(piece, Content):
            return not self._only_calls
        if self._only_first and piece.number > 0:
            return False
        if isinstance(piece, CallBegun):
            self.calls.append(_Call(piece.name))
        else:
            self.calls[piece.number].arguments += piece.text
        return True

    def reason(self, choice: Choice) -> str | None:
        """The finish reason of the API."""
        if choice.finish_reason is None:
            return None
        if choice.finish_reason is FinishReason.STOP and self.calls:
            return "tool_calls"
        return choice.finish_reason.value


class ChatAnswer(Answer):
    """Messages, with the style of log-probabilities that chats have.

    Args:
        names: of tokens, if log-probabilities are requested.
        make_parser: for the tool calls of each choice; None if none are expected.
        only_first_call: drop all tool calls but the first.
        only_calls: answers consist of tool calls, possibly truncated.
        echo: prefix of each message.
        options: see ``Answer``.
    """

    kind, part_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        head: AnswerHead,
        usage: Usage,
        num_choices: int,
        *,
        names: TokenNames | None = None,
        make_parser: Callable[[], ToolParser] | None = None,
        only_first_call: bool = False,
        only_calls: bool = False,
        echo: str = "",
        **options: Any,
    ) -> None:
        super().__init__(head, usage, num_choices, **options)
        self._names, self._echo = names, echo
        self._has_sent_prompt = False
        self._readers = [
            _Reader(None if make_parser is None else make_parser(), only_first_call, only_calls)
            for _ in range(num_choices)
        ]

    @property
    def num_echoed(self) -> int:
        """Number of characters of echoed prompts."""
        num_ids = 0 if self._returned_prompts is None else len(self._returned_prompts[0])
        return ID_CHARACTERS * num_ids + len(self._echo) * len(self.choices)

    def beginning(self) -> bytes:
        """The beginnings of messages that echo another one."""
        if not self._echo:
            return b""
        delta = {"role": "assistant", "content": self._echo}
        for reader in self._readers:
            reader.has_begun = True
        return b"".join(self._event([_part(index, delta)]) for index in range(len(self._readers)))

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        first = {} if self._has_sent_prompt else self._own_fields()
        self._has_sent_prompt = True
        return super()._event(choices, **first, **more)

    def _own_fields(self) -> dict[str, Any]:
        return {} if self._returned_prompts is None else {"prompt_token_ids": self._returned_prompts[0]}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        reader = self._readers[index]
        pieces = reader.read(choice)
        content = self._echo + "".join(piece.text for piece in pieces if isinstance(piece, Content))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reader.calls:
            message["content"] = content or None
            message["tool_calls"] = [call.fields() for call in reader.calls]
        fields = {
            "index": index,
            "message": message,
            "logprobs": None if self._names is None else chat_logprobs(choice.logprobs, self._names),
            "finish_reason": reader.reason(choice),
            "stop_reason": choice.stop_reason,
        }
        return self._with_token_ids(fields, choice)

    def _parts(self, index: int, fresh: Choice) -> list[dict[str, Any]]:
        reader = self._readers[index]
        deltas = [self._delta(reader, piece) for piece in reader.read(fresh)]
        if not deltas:
            # Text may be buffered, token ids and log-probabilities must not be.
            if not (fresh.logprobs or fresh.finish_reason is not None or self._returns_token_ids):
                return []
            deltas = [{}]
        if not reader.has_begun:
            reader.has_begun = True
            content = None if "tool_calls" in deltas[0] else ""
            deltas[0] = {"role": "assistant", "content": content, **deltas[0]}
        parts = [_part(index, delta) for delta in deltas]
        if self._names is not None and fresh.logprobs:
            parts[0]["logprobs"] = chat_logprobs(fresh.logprobs, self._names)
        parts[0] = self._with_token_ids(parts[0], fresh)
        if fresh.finish_reason is not None:
            parts[-1]["finish_reason"] = reader.reason(fresh)
            parts[-1]["stop_reason"] = fresh.stop_reason
        return parts

    @staticmethod
    def _delta(reader: _Reader, piece: Piece) -> dict[str, Any]:
        match piece:
            case Content(text):
                return {"content": text}
            case CallBegun(number, _):
                call = reader.calls[number]
                function = {"name": call.name, "arguments": ""}
                head = {"index": number, "id": call.call_id, "type": "function", "function": function}
                return {"tool_calls": [head]}
            case CallArguments(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}


def _part(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt that is echoed before its answers.

    Attributes:
        text: of the prompt.
        entries: of its tokens, the first of which has no log-probability; empty if none are requested.
        has_special: whether special tokens are part of the text.
    """

    text: str
    entries: Sequence[TokenLogprob | int] = ()
    has_special: bool = False


class CompletionAnswer(Answer):
    """Texts, with the style of log-probabilities that completions have.

    Args:
        names: of tokens, if log-probabilities are requested.
        echoes: the echoed prompt of each choice, or none.
        has_special: whether special tokens are part of the answers' texts.
        generates: whether anything is generated; otherwise choices end by length.
        options: see ``Answer``.
    """

    kind = part_kind = "text_completion"

    def __init__(
        self,
        head: AnswerHead,
        usage: Usage,
        num_choices: int,
        *,
        names: TokenNames | None = None,
        echoes: Sequence[EchoedPrompt] = (),
        has_special: bool = False,
        generates: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(head, usage, num_choices, **options)
        self._echoes, self._generates, self._has_special = echoes, generates, has_special
        self._unsent_prompts = set(range(num_choices)) if self._returns_token_ids else set()
        self._logprobs = None if names is None else [CompletionLogprobs(names) for _ in range(num_choices)]
        if not generates:
            for choice in self.choices:
                choice.finish_reason = FinishReason.LENGTH

    def score(self, entries: Sequence[Sequence[TokenLogprob | int]]) -> None:
        """Set the log-probabilities of the echoed prompts.

        Args:
            entries: for each prompt one per token: its first token alone, which nothing precedes, then
                log-probabilities.
        """
        num_each = len(self._echoes) // len(entries)
        self._echoes = [
            replace(echo, entries=entries[index // num_each]) for index, echo in enumerate(self._echoes)
        ]

    @property
    def num_echoed(self) -> int:
        """Number of characters of echoed prompts."""
        prompts = self._returned_prompts or ()
        num_ids = sum(map(len, prompts)) * len(self.choices) // max(1, len(prompts))
        return ID_CHARACTERS * num_ids + sum(len(echo.text) for echo in self._echoes)

    def beginning(self) -> bytes:
        """The echoed prompts, and the ends of choices without generation."""
        events = bytearray()
        has_nothing = self._generates and (self._returned_prompts is None or self.is_short)
        nothing = () if has_nothing else (EchoedPrompt(""),) * len(self.choices)
        for index, echo in enumerate(self._echoes or nothing):
            logprobs = self._fields(index, echo.entries, echo.has_special)
            part = self._with_prompt(index, _text_part(index, echo.text, logprobs, self.choices[index]))
            events += self._event([self._with_token_ids(part, Choice())])
        return bytes(events)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        echo = self._echoes[index] if self._echoes else EchoedPrompt("")
        text = echo.text + choice.text
        logprobs = self._fields(index, echo.entries, echo.has_special)
        if logprobs is not None:
            rest = self._fields(index, choice.logprobs, self._has_special) or {}
            logprobs = {name: [*values, *rest[name]] for name, values in logprobs.items()}
        part = self._with_prompt(index, _text_part(index, text, logprobs, choice))
        return self._with_token_ids(part, choice)

    def _parts(self, index: int, fresh: Choice) -> list[dict[str, Any]]:
        logprobs = self._fields(index, fresh.logprobs, self._has_special)
        part = self._with_prompt(index, _text_part(index, fresh.text, logprobs, fresh))
        return [self._with_token_ids(part, fresh)]

    def _with_prompt(self, index: int, part: dict[str, Any]) -> dict[str, Any]:
        """The first part of a choice with the token ids of its prompt."""
        if self._returned_prompts is None or index not in self._unsent_prompts:
            return part
        self._unsent_prompts.discard(index)
        prompt = self._returned_prompts[index * len(self._returned_prompts) // len(self.choices)]
        return {**part, "prompt_token_ids": prompt}

    def _fields(
        self, index: int, entries: Sequence[TokenLogprob | int], has_special: bool
    ) -> dict[str, list[Any]] | None:
        if self._logprobs is None:
            return None
        return self._logprobs[index].fields(entries, has_special=has_special)


def _text_part(index: int, text: str, logprobs: dict[str, Any] | None, choice: Choice) -> dict[str, Any]:
    reason = None if choice.finish_reason is None else choice.finish_reason.value
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": choice.stop_reason,
    }
