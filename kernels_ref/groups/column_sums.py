"""Sums of attention weights by key, for a prompt's new tokens, without materialising all weights.

Attention has computed the log-sum-exp of each query. A second product of queries and keys, some queries at a
time, adds ``exp(score - lse)`` into the keys: exact, in memory linear in the keys.

Shapes: Q query tokens, P prompt rows, T new tokens of a row, C slots, S = C + T keys, K key/value heads, G
query heads of each, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bias_builders import leading_slots
from kernels_ref.partial import FLOOR, Partial, Scoring, soften
from kernels_ref.step import PartInputs
from kernels_ref.units import gather

_SUMMED_QUERIES, _SUMMED_SCORES = 128, 1 << 21
"""Most queries of a row, and most scores of a row and query head, at a time."""


def summed_queries(num_keys: int) -> int:
    """Return the queries of a row that are processed at a time, for a number of keys."""
    return max(8, min(_SUMMED_QUERIES, _SUMMED_SCORES // max(1, num_keys)))


class ChunkStep(NamedTuple):
    """The prompt rows of a step; tensors of a step without them are empty.

    Attributes:
        row: unit of each, the null unit where there is none, int32 ``[P]``.
        start, num_new: tokens before the chunk, and new ones, 0 where there is none, int32 ``[P]``.
        token: flat index of each new token, any valid one beyond them, int32 ``[P, T]``.
        token_class: of each of these, for policies that mark tokens, int32 ``[P, T]``; else None.
    """

    row: torch.Tensor
    start: torch.Tensor
    num_new: torch.Tensor
    token: torch.Tensor
    token_class: torch.Tensor | None = None

    @property
    def is_new(self) -> torch.Tensor:
        """Entries of ``token`` that are tokens, bool ``[P, T]``."""
        return self.number < self.num_new[:, None]

    @property
    def number(self) -> torch.Tensor:
        """Numbers of the new tokens of a row, int32 ``[1, T]``."""
        return torch.arange(self.token.shape[1], dtype=self.start.dtype, device=self.start.device)[None]

    def is_stored(self, num_slots: int) -> torch.Tensor:
        """Slots of each row that are occupied before the chunk, the leading ones, bool ``[P, C]``."""
        return leading_slots(self.start, num_slots)


def log_sum_exp(partials: list[Partial], sinks_KG: torch.Tensor | None) -> torch.Tensor:
    """The log-sum-exp of the scores of each query over all its keys, float32 ``[Q, K, G]``."""
    largest, total = partials[0].max, partials[0].sum
    for partial in partials[1:]:
        new_largest = torch.maximum(largest, partial.max)
        weight, other_weight = torch.exp(largest - new_largest), torch.exp(partial.max - new_largest)
        largest, total = new_largest, total * weight + partial.sum * other_weight
    tiny = torch.finfo(torch.float32).tiny
    lse = largest + torch.log(torch.clamp(total, min=tiny))
    return lse if sinks_KG is None else torch.logaddexp(lse, sinks_KG.float())


def candidates(x_QKD: torch.Tensor, slots_PKCD: torch.Tensor | None, chunk: ChunkStep) -> torch.Tensor:
    """Keys, or values, of slots followed by new tokens, ``[P, K, S, D]``, finite.

    Args:
        x_QKD: of all new tokens.
        slots_PKCD: of the slots, undefined in free ones; None where no row has any.
    """
    new_PTKD = gather(x_QKD, chunk.token.view(-1)).unflatten(0, chunk.token.shape)
    new_PKTD = new_PTKD.transpose(1, 2)
    if slots_PKCD is None:
        return new_PKTD
    is_stored = chunk.is_stored(slots_PKCD.shape[2])[:, None, :, None]
    return torch.cat([torch.where(is_stored, slots_PKCD, 0), new_PKTD], dim=2)


def column_sums(
    inputs: PartInputs,
    lse_QKG: torch.Tensor,
    slots_PKCD: torch.Tensor | None,
    chunk: ChunkStep,
    num_observed: int | None,
) -> torch.Tensor:
    """Attention weights of the last queries of each row on each slot and each new key, float32 ``[P, K, S]``.

    Summed over these queries and over the query heads of a key/value head; 0 for keys that none of them sees.

    Args:
        lse_QKG: log-sum-exp of the scores of each query over all that it sees.
        slots_PKCD: keys of the slots, undefined in free ones; None where no row has any, then C = 0.
        num_observed: queries that count, the last ones of each row; None = all.
    """
    q_QKGD, new, _, _, scoring, _, _ = inputs
    k_PKSD = candidates(new.k, slots_PKCD, chunk)
    num_new, device = chunk.token.shape[1], q_QKGD.device
    is_stored = chunk.is_stored(k_PKSD.shape[2] - num_new)
    num_queries = num_new if num_observed is None else min(num_observed, num_new)
    total = torch.zeros(k_PKSD.shape[:3], dtype=torch.float32, device=device)
    most = summed_queries(k_PKSD.shape[2])
    for begin in range(0, num_queries, most):
        size = min(most, num_queries - begin)
        number = torch.arange(begin, begin + size, dtype=torch.int32, device=device)[None]
        num_seen = num_new
        if num_observed is not None:
            # The last ones of each row; negative where it has fewer.
            number = number + chunk.num_new[:, None] - num_queries
        else:
            num_seen = begin + size
        num_unseen = num_new - num_seen
        seen_PKSD = k_PKSD[:, :, : k_PKSD.shape[2] - num_unseen]
        share = _of_queries(q_QKGD, lse_QKG, seen_PKSD, is_stored, chunk, number, scoring)
        total = total + torch.nn.functional.pad(share, (0, num_unseen))
    return total


def _of_queries(
    q_QKGD: torch.Tensor,
    lse_QKG: torch.Tensor,
    k_PKSD: torch.Tensor,
    is_stored: torch.Tensor,
    chunk: ChunkStep,
    number: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """The share of some queries, by their numbers in the row, int32 ``[P, q]`` or ``[1, q]``."""
    num_rows, num_queries, group = len(chunk.row), number.shape[1], q_QKGD.shape[2]
    exists = (number >= 0) & (number < chunk.num_new[:, None])
    token = chunk.token[:, :1] + torch.where(exists, number, 0)
    # Rows that do not exist have any valid token.
    token = torch.clamp(token, max=q_QKGD.shape[0] - 1).view(-1)
    q_PqKGD = gather(q_QKGD, token).unflatten(0, (num_rows, num_queries))
    lse_PqKG = gather(lse_QKG, token).unflatten(0, (num_rows, num_queries))
    q_PKXD, lse_PKX = q_PqKGD.transpose(1, 2).flatten(2, 3), lse_PqKG.transpose(1, 2).flatten(2, 3)
    number_new = chunk.number[:, : k_PKSD.shape[2] - is_stored.shape[1]]
    sees_new = (number_new[:, None] <= number[..., None]) & exists[..., None]
    sees = torch.cat([is_stored[:, None] & exists[..., None], sees_new], dim=-1)
    scores = soften(torch.matmul(q_PKXD, k_PKSD.transpose(2, 3)), scoring).float()
    sees = sees.repeat_interleave(group, dim=1)[:, None]
    weights = torch.exp(torch.where(sees, scores - lse_PKX[..., None], FLOOR))
    return weights.sum(dim=2)
