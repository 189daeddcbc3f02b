"""Results of one call of ``generate``, in transformers' form."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

    from hpu_duo.engine.outputs import Completion, RequestOutput


def feed(streamer: BaseStreamer, prompt: list[int]) -> Callable[[RequestOutput], None]:
    """Return a callback that passes tokens to a streamer, and the prompt before the first token.

    A prompt is accepted only once it has a token.
    """
    unread = [prompt]

    def on_output(output: RequestOutput) -> None:
        if unread:
            streamer.put(torch.tensor([unread.pop()]))
        if output.token_ids:
            streamer.put(torch.tensor(output.token_ids))

    return on_output


def assemble_rows(rows: list[list[int]], done: list[list[Completion]], pad_token_id: int) -> torch.Tensor:
    """Join rows with the new tokens of each of their samples, padded on the right: int64 ``[B, L]``."""
    filled = [row + sample.token_ids for row, samples in zip(rows, done) for sample in samples]
    new = max(len(sample.token_ids) for samples in done for sample in samples)
    width = max(len(row) for row in rows) + new
    return torch.tensor([row + [pad_token_id] * (width - len(row)) for row in filled])


def assemble_scores(samples: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Return the scores of each step, float32 ``[B, V]``; zeros for rows that have ended.

    Args:
        samples: for each row its scores, ``[1, V]`` each.
    """
    ended = torch.zeros_like(samples[0][0])
    num_steps = max(map(len, samples))
    return tuple(
        torch.cat([scores[step] if step < len(scores) else ended for scores in samples])
        for step in range(num_steps)
    )
