"""Queries that are expected behind a chunk, from the statistics of those in it.

Shapes: Q query tokens, P prompt rows, T new tokens of each, K key/value heads, G query heads of each, D head
size.
"""

from __future__ import annotations

import torch

from kernels_ref.groups.column_sums import ChunkStep
from kernels_ref.groups.kv_policy import FutureQueries
from kernels_ref.index import gather
from kernels_ref.rotary import Turn, turned


def future_queries(
    q_QKGD: torch.Tensor, chunk: ChunkStep, first: int, back: Turn, ahead: Turn
) -> FutureQueries:
    """Mean and covariance of the queries of each row, turned from their positions to those ahead.

    Without any query, as where all of them stand before ``first``, both are 0.

    Args:
        first: position of the first query that counts.
        back: turns each query to position 0, ``[Q, F]``.
        ahead: mean of the rotations to positions behind the chunk, ``[P, F]``.
    """
    token = chunk.token.view(-1)
    own_XKGD = turned(gather(q_QKGD, token), back.at(token).of_heads(2))
    counts_PT = chunk.is_new & (chunk.start[:, None] + chunk.number >= first)
    number = torch.clamp(counts_PT.sum(dim=1, dtype=torch.int32), min=1)[:, None, None, None]
    counts_PT111 = counts_PT[:, :, None, None, None]
    # Entries behind the new tokens may be any query.
    own_PTKGD = torch.where(counts_PT111, own_XKGD.unflatten(0, chunk.token.shape), 0.0)
    mean_PKGD = own_PTKGD.sum(dim=1) / number
    apart_PKGTD = torch.where(counts_PT111, own_PTKGD - mean_PKGD[:, None], 0.0).permute(0, 2, 3, 1, 4)
    covariance_PKGDD = torch.matmul(apart_PKGTD.transpose(3, 4), apart_PKGTD) / number[..., None]
    ahead = ahead.of_heads(2)
    columns = turned(covariance_PKGDD, ahead.of_heads(1)).transpose(3, 4)
    return FutureQueries(turned(mean_PKGD, ahead), turned(columns, ahead.of_heads(1)))
