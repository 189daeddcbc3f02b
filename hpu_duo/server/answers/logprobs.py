"""Log-probabilities in the two styles of the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpu_duo.engine.outputs import TokenLogprob
from hpu_duo.server.prompts.token_texts import TokenTexts

_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenNames:
    """Names of tokens in log-probabilities.

    Args:
        texts: of the vocabulary.
        by_id: call tokens by their ids, as ``token_id:17``, for callers to whom texts are ambiguous.
    """

    def __init__(self, texts: TokenTexts, *, by_id: bool = False) -> None:
        self._texts = texts
        self.name: Callable[[int], str] = _by_id if by_id else texts.text

    def bytes(self, token_id: int) -> list[int]:
        """The bytes of a token."""
        return list(self._texts.bytes(token_id))

    def num_characters(self, token_id: int, *, has_special: bool) -> int:
        """Characters of a text that begin with a token; see ``TokenTexts``."""
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
            entries: a token id alone is one whose log-probability is not known, as a prompt's first.
            has_special: whether special tokens among them are a part of the text.
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
