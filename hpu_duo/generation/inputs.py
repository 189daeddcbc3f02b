"""The prompts of one call of ``generate``, without left padding."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from hpu_duo.generation.arguments import GenerationRequest

TokenLists: TypeAlias = Sequence[Sequence[int]]


def read_inputs(
    inputs: Any, attention_mask: torch.Tensor | None, asked: GenerationRequest
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the rows as given, and their prompts without left padding.

    Args:
        inputs: integer tensor ``[B, L]`` or lists of token ids.
        attention_mask: ``[B, L]``, zeros before ones; guessed from the pad id when left out.

    Raises:
        ValueError: inputs or mask are anything else, or there is no row.
    """
    if isinstance(inputs, torch.Tensor):
        if inputs.ndim != 2 or inputs.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                "expected an integer tensor [B, L] or a list of lists of token ids, "
                f"got {inputs.dtype} {list(inputs.shape)}"
            )
        rows = inputs.tolist()
        prompts = [
            row[len(row) - length :]
            for row, length in zip(rows, _prompt_lengths(inputs, attention_mask, asked))
        ]
    else:
        if attention_mask is not None:
            raise ValueError("attention_mask goes with a tensor; lists of token ids need no padding")
        rows = prompts = _as_lists(inputs)
    if not rows:
        raise ValueError("expected at least one prompt, got none")
    return rows, prompts


def _as_lists(inputs: Any) -> list[list[int]]:
    try:
        return [[operator.index(token) for token in row] for row in inputs]
    except TypeError as error:
        raise ValueError(
            f"expected an integer tensor [B, L] or a list of lists of token ids, got {reprlib.repr(inputs)}"
        ) from error


def _prompt_lengths(
    inputs: torch.Tensor, attention_mask: torch.Tensor | None, asked: GenerationRequest
) -> list[int]:
    if attention_mask is not None:
        if not isinstance(attention_mask, torch.Tensor):
            raise ValueError(f"attention_mask: expected a tensor, got {type(attention_mask).__name__}")
        if attention_mask.shape != inputs.shape:
            raise ValueError(
                f"expected attention_mask of shape {list(inputs.shape)}, got {list(attention_mask.shape)}"
            )
        mask = attention_mask.bool()
    elif asked.guesses_padding:
        mask = (inputs != asked.pad_token_id).cumsum(dim=1) > 0
    else:
        mask = torch.ones_like(inputs, dtype=torch.bool)
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("expected left padding: attention_mask of zeros then ones, got a zero after a one")
    lengths: list[int] = mask.sum(dim=1).tolist()
    return lengths
