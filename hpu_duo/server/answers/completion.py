"""Answers of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
)


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
        self._untold_prompts = set(range(num_choices)) if self._returns_token_ids else set()
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
        told = bytearray()
        has_nothing = self._generates and (self._returned_prompts is None or self.is_short)
        nothing = () if has_nothing else (EchoedPrompt(""),) * len(self.choices)
        for index, echo in enumerate(self._echoes or nothing):
            logprobs = self._fields(index, echo.entries, echo.has_special)
            part = self._with_prompt(index, _part(index, echo.text, logprobs, self.choices[index]))
            told += self._event([self._with_token_ids(part, Choice())])
        return bytes(told)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        echo = self._echoes[index] if self._echoes else EchoedPrompt("")
        text = echo.text + choice.text
        logprobs = self._fields(index, echo.entries, echo.has_special)
        if logprobs is not None:
            rest = self._fields(index, choice.logprobs, self._has_special) or {}
            logprobs = {name: [*values, *rest[name]] for name, values in logprobs.items()}
        part = self._with_prompt(index, _part(index, text, logprobs, choice))
        return self._with_token_ids(part, choice)

    def _parts(self, index: int, fresh: Choice) -> list[dict[str, Any]]:
        logprobs = self._fields(index, fresh.logprobs, self._has_special)
        part = self._with_prompt(index, _part(index, fresh.text, logprobs, fresh))
        return [self._with_token_ids(part, fresh)]

    def _with_prompt(self, index: int, part: dict[str, Any]) -> dict[str, Any]:
        """The first part of a choice with the token ids of its prompt."""
        if self._returned_prompts is None or index not in self._untold_prompts:
            return part
        self._untold_prompts.discard(index)
        prompt = self._returned_prompts[index * len(self._returned_prompts) // len(self.choices)]
        return {**part, "prompt_token_ids": prompt}

    def _fields(
        self, index: int, entries: Sequence[TokenLogprob | int], has_special: bool
    ) -> dict[str, list[Any]] | None:
        if self._logprobs is None:
            return None
        return self._logprobs[index].fields(entries, has_special=has_special)


def _part(index: int, text: str, logprobs: dict[str, Any] | None, choice: Choice) -> dict[str, Any]:
    reason = None if choice.finish_reason is None else choice.finish_reason.value
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": choice.stop_reason,
    }
