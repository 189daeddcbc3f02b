"""Perplexity of a text through the decode path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpu_duo.lab.eval.kv_bytes import KVBytes
from hpu_duo.lab.eval.model_under_test import ModelUnderTest


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity of a stream and of its parts.

    Attributes:
        num_prefix: tokens that were prefilled and not scored.
        windows: ``(first position, tokens, sum of natural log-probabilities)`` of each part, in order.
        kv: bytes that are kept at the end of each part; the last part ends with the stream.
    """

    num_prefix: int
    windows: tuple[tuple[int, int, float], ...]
    kv: tuple[KVBytes, ...]

    @property
    def num_tokens(self) -> int:
        """Scored tokens."""
        return sum(size for _, size, _ in self.windows)

    @property
    def perplexity(self) -> float:
        """Perplexity of all scored tokens."""
        return math.exp(-sum(logprob for _, _, logprob in self.windows) / self.num_tokens)

    @property
    def by_position(self) -> tuple[tuple[int, float], ...]:
        """First position of each part and its perplexity: a flat curve means that nothing is lost."""
        return tuple((first, math.exp(-logprob / size)) for first, size, logprob in self.windows)


def check_stream(
    subject: ModelUnderTest, token_ids: Sequence[int], num_prefix: int = 1, window: int = 256
) -> None:
    """Refuse what ``stream_perplexity`` cannot score, before anything runs.

    Raises:
        ValueError: nothing is left to score, or the stream does not fit the model.
    """
    if num_prefix < 1 or window < 1:
        raise ValueError(f"expected a prefix and a window of at least 1 token, got {num_prefix} and {window}")
    if len(token_ids) <= num_prefix:
        raise ValueError(
            f"expected a text of more than {num_prefix} tokens, the prefix, got {len(token_ids)}"
        )
    subject.check_lengths([len(token_ids)], "a text")


def stream_perplexity(
    subject: ModelUnderTest, token_ids: Sequence[int], num_prefix: int = 1, window: int = 256
) -> PerplexityResult:
    """Prefill the first tokens, then decode and score all others.

    Args:
        token_ids: the stream.
        num_prefix: how many tokens to prefill, at least one.
        window: scored tokens of one part of the report.

    Raises:
        ValueError: see ``check_stream``.
    """
    check_stream(subject, token_ids, num_prefix, window)
    ((score,),), ((end,),) = subject.score([token_ids[:num_prefix]], [[token_ids[num_prefix:]]])
    logprobs = score.logprobs
    windows = tuple(
        (num_prefix + at, len(logprobs[at : at + window]), math.fsum(logprobs[at : at + window]))
        for at in range(0, len(logprobs), window)
    )
    kv = tuple(subject.kv_before(end, first + size - 1) for first, size, _ in windows)
    return PerplexityResult(num_prefix, windows, kv)
