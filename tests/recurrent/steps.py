"""Steps of rows in chunks, for recurrences without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hpu_duo.modeling.recurrent import Cut, step_of
from kernels_ref import Recurrence, Step


def run_in_chunks(
    kinds: Sequence[Recurrence],
    texts: Sequence[torch.Tensor],
    chunks: Sequence[Sequence[int]],
    run: Callable[[Step, torch.Tensor], torch.Tensor],
    num_padding: int = 3,
) -> list[torch.Tensor]:
    """Run rows step by step, with padding behind their tokens; returns the outputs of each row.

    Args:
        texts: inputs of each row, ``[T, ...]``.
        chunks: new tokens of each row in each step.
    """
    starts, found = [0] * len(texts), [list[torch.Tensor]() for _ in texts]
    for counts in chunks:
        if not any(counts):
            continue
        step = step_of([Cut(*cut) for cut in zip(starts, counts)], kinds, torch.device("cpu"), num_padding)
        pieces = [text[start : start + count] for text, start, count in zip(texts, starts, counts)]
        padding = torch.full((num_padding, *texts[0].shape[1:]), float("nan"))
        outputs = run(step, torch.cat([*pieces, padding])).split([*counts, num_padding])
        for of_row, output in zip(found, outputs):
            of_row.append(output)
        starts = [start + count for start, count in zip(starts, counts)]
    return [torch.cat(each) if each else text for each, text in zip(found, texts)]
