"""The device's half of sampling: logits and row values become token ids.

Only static shapes, no boolean indexing, no host reads: the whole of ``sample_tokens`` can be captured once
per ``SamplingRoute``.

A row's token depends on its logits and its draw, not on its batch mates. The batch decides which operations
run, but for each row they compute the same kept set (a threshold on its scaled logits, exact whichever
selection found it) and then draw from it in the same way. The cumulative distribution is summed in integers
of 2**-30, so the order in which a device adds up a row cannot change it.

Ties: a token whose logit equals that of the last token kept by top-k or top-p is kept too. Greedy rows choose
the lowest token id among equals.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpu_duo.sampling.batch import RowTensors, SamplingBatch, SamplingRoute
from hpu_duo.sampling.rows import FORBIDDEN, forbid
from kernels_ref.x86 import library as x86


def take_column(matrix_NK: Tensor, column_N: Tensor) -> Tensor:
    """``matrix[i, column[i]]`` for every row i.

    By a flat index, because ``torch.gather`` insists on int64.

    Args:
        matrix_NK: [N, K], with N * K < 2**31.
        column_N: int32 [N], each in [0, K).
    """
    num_rows, width = matrix_NK.shape
    starts_N = torch.arange(num_rows, dtype=torch.int32, device=matrix_NK.device) * width
    return matrix_NK.reshape(-1).index_select(0, starts_N + column_N)


# N logit rows, V vocabulary, K reported tokens

#: Up to this many, rounds of argmax are cheaper than a full sort.
MAX_ARGMAX_ROUNDS = 32


class TokenLogprobs(NamedTuple):
    """Log-probabilities under the model's own distribution: before bias, penalties, temperature and filters.

    This is what vLLM calls ``raw_logprobs``. Values are finite: a probability of zero is reported as -1e30.

    Attributes:
        sampled: float32 [N], of the sampled token.
        rank: int32 [N], how many tokens are at least as likely as the sampled one; 1 for the likeliest.
        top_ids: int32 [N, K], the likeliest tokens, best first, the lowest id first among equals. K is the
            padded width of the batch (``route.num_logprobs``): a row with fewer uses its first
            ``params.logprobs`` columns, which do not depend on K.
        top: float32 [N, K], their log-probabilities.
    """

    sampled: Tensor
    rank: Tensor
    top_ids: Tensor
    top: Tensor


def gather_logprobs(logits_NV: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Score the sampled tokens and find the ``num_top`` likeliest.

    Args:
        logits_NV: float [N, V], raw.
        token_ids: int32 [N], the sampled tokens.
    """
    logprobs_NV = torch.log_softmax(logits_NV.float(), dim=-1).clamp(min=FORBIDDEN)
    sampled_N = take_column(logprobs_NV, token_ids)
    rank_N = (logprobs_NV >= sampled_N[:, None]).sum(dim=-1, dtype=torch.int32)
    top_ids, top = _find_top(logprobs_NV, num_top)
    return TokenLogprobs(sampled_N, rank_N, top_ids, top)


def _find_top(logprobs_NV: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens in an order that is fixed even among equals.

    In ``torch.topk`` the order of equal values is undefined and depends on k, that is, on other rows.
    """
    if num_top > MAX_ARGMAX_ROUNDS:
        ordered = torch.sort(logprobs_NV, dim=-1, descending=True, stable=True)
        return ordered.indices[:, :num_top].to(torch.int32), ordered.values[:, :num_top]
    num_rows, vocab_size = logprobs_NV.shape
    if num_top == 0:
        empty = torch.empty(num_rows, 0, device=logprobs_NV.device)
        return empty.to(torch.int32), empty
    vocabulary = torch.arange(vocab_size, dtype=torch.int32, device=logprobs_NV.device)
    remaining_NV = logprobs_NV
    ids, values = [], []
    for _ in range(num_top):
        best_N = remaining_NV.argmax(dim=-1).to(torch.int32)
        ids.append(best_N)
        values.append(take_column(logprobs_NV, best_N))
        remaining_NV = torch.where(vocabulary == best_N[:, None], float("-inf"), remaining_NV)
    return torch.stack(ids, dim=1), torch.stack(values, dim=1)


# N logit rows, V vocabulary, K columns of a top-k selection, E edits or seen tokens

# Probability 1 in the integer cumulative distribution. Rounding V of them moves the sum by V / 2 at most, so
# it stays below 2**31.
_ONE = float(2**30)

_ARGMAX_WIDTH = 256


class SampledTokens(NamedTuple):
    """The result of one sampling step, on the device of the logits.

    Attributes:
        token_ids: int32 [N]. A row without a request has some id of the vocabulary.
        logprobs: only if some row has logprobs.
    """

    token_ids: Tensor
    logprobs: TokenLogprobs | None


def sample(logits: Tensor, batch: SamplingBatch, floats: Tensor | None = None) -> SampledTokens:
    """Sample one token per row; at most one small host-to-device copy and one of masks, no read.

    Args:
        logits: float32, bfloat16 or float16 [N, V], raw. Not modified.
        batch: built from the rows of the same order, with the same N and V.
        floats: those of the batch, if they are on the device already.

    Raises:
        ValueError: the shape of the logits is not that of the batch.
    """
    expected = (batch.route.num_rows, batch.route.vocab_size)
    if tuple(logits.shape) != expected:
        raise ValueError(f"logits: expected shape {expected}, got {tuple(logits.shape)}")
    if floats is None:
        # The array of a cached batch is read-only, which torch cannot represent, and empty.
        floats = torch.from_numpy(batch.floats) if batch.floats.size else torch.empty(0)
    masks = None if batch.masks is None else torch.from_numpy(batch.masks).to(logits.device)
    return sample_tokens(logits, floats.to(logits.device), batch.route, masks)


def sample_tokens(
    logits_NV: Tensor, floats: Tensor, route: SamplingRoute, masks_NW: Tensor | None = None
) -> SampledTokens:
    """The capturable part of ``sample``: tensors in, tensors out, with shapes determined by ``route``.

    Args:
        logits_NV: float [N, V].
        floats, masks_NW: the arrays of ``SamplingBatch`` on the device of the logits.

    Source: top-k, Fan et al. 2018 (arXiv:1805.04833); top-p, Holtzman et al. 2020 (arXiv:1904.09751);
        min-p, Nguyen et al. 2024 (arXiv:2407.01082); repetition penalty, Keskar et al. 2019
        (arXiv:1909.05858).
    """
    scores_NV = logits_NV
    if route.num_edits or route.has_row_values or route.has_masks:
        scores_NV = logits_NV.float()
    # Values, rows and tokens: those of the edits, then those of the seen tokens.
    lists, at = floats[route.num_row_floats :], 3 * route.num_edits
    if route.num_edits:
        scores_NV = scores_NV + _scatter(lists[:at], route)
    rows = None
    if route.has_row_values:
        values = floats[: route.num_row_floats].view(len(RowTensors._fields), route.num_rows)
        rows = RowTensors(*values.unbind(0))
        if route.num_seen:
            scores_NV = penalize(scores_NV, _scatter(lists[at:], route), rows)
    if masks_NW is not None:
        scores_NV = forbid(scores_NV, masks_NW, FORBIDDEN)
    token_ids = most_likely(scores_NV)
    if rows is not None and route.has_random:
        kept_NV = scores_NV / rows.temperature[:, None]
        if route.has_sort or route.topk_width or route.has_min_p:
            kept_NV = filter_scores(kept_NV, rows, route)
        token_ids = torch.where(rows.is_greedy > 0, token_ids, draw(kept_NV, rows.uniform))
    if route.num_logprobs < 0:
        return SampledTokens(token_ids, None)
    return SampledTokens(token_ids, gather_logprobs(logits_NV, token_ids, route.num_logprobs))


def most_likely(scores_NV: Tensor) -> Tensor:
    """The lowest id among the largest scores of each row, int32 [N]."""
    if x86.fits_logits(scores_NV):
        # ``x86.place_of_largest`` without its check, which precedes it.
        place_N: Tensor = torch.ops.hpu_duo_x86_v3.place_of_largest.default(scores_NV)
        return place_N
    width = _ARGMAX_WIDTH
    vocab_size = scores_NV.shape[1]
    if scores_NV.device.type != "cpu" or vocab_size < 2 * width:
        return scores_NV.argmax(dim=-1).to(torch.int32)
    # On a CPU, torch's amax is vectorized and its argmax is not.
    end = vocab_size // width * width
    groups_NGW = scores_NV[:, :end].unflatten(1, (-1, width))
    group_N1 = groups_NGW.amax(dim=-1).argmax(dim=-1, keepdim=True)
    group_N1W = groups_NGW.take_along_dim(group_N1[..., None], dim=1)
    largest_N, place_N = group_N1W[:, 0].max(dim=-1)
    token_ids = group_N1[:, 0] * width + place_N
    if end < vocab_size:
        rest_N, place_N = scores_NV[:, end:].max(dim=-1)
        token_ids = torch.where(rest_N > largest_N, end + place_N, token_ids)
    return token_ids.to(torch.int32)


def penalize(scores_NV: Tensor, codes_NV: Tensor, rows: RowTensors) -> Tensor:
    """Apply the three penalties; rows with neutral values are unchanged, bit for bit.

    Args:
        scores_NV: float32 [N, V].
        codes_NV: float32 [N, V]: ``2 * occurrences in the output + 1`` for seen tokens, else 0.
    """
    repetition = rows.repetition_penalty[:, None]
    repeated_NV = torch.where(scores_NV > 0, scores_NV / repetition, scores_NV * repetition)
    scores_NV = torch.where(codes_NV > 0, repeated_NV, scores_NV)
    counts_NV = torch.floor(codes_NV * 0.5)
    scores_NV = scores_NV - rows.frequency_penalty[:, None] * counts_NV
    return scores_NV - rows.presence_penalty[:, None] * (counts_NV > 0).to(scores_NV.dtype)


def filter_scores(scaled_NV: Tensor, rows: RowTensors, route: SamplingRoute) -> Tensor:
    """Set tokens outside top-k, top-p or min-p to ``FORBIDDEN``; the most likely token always stays.

    Args:
        scaled_NV: float32 [N, V], after temperature.
    """
    threshold_N = None
    if route.has_sort:
        threshold_N = _threshold_from_sort(scaled_NV, rows)
    elif route.topk_width:
        top_NK = torch.topk(scaled_NV, route.topk_width, dim=-1, sorted=True).values
        threshold_N = _kth_largest(top_NK, rows.top_k)
    if route.has_min_p:
        min_p_N = scaled_NV.amax(dim=-1) + rows.log_min_p
        threshold_N = min_p_N if threshold_N is None else torch.maximum(threshold_N, min_p_N)
    if threshold_N is None:
        return scaled_NV
    return torch.where(scaled_NV >= threshold_N[:, None], scaled_NV, FORBIDDEN)


def draw(scores_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Invert each row's cumulative distribution, in vocabulary order, at the row's uniform number.

    Args:
        scores_NV: float32 [N, V], unnormalised log probabilities.
        uniform_N: float32 [N] in (0, 1).

    Returns:
        int32 [N]; never a token of probability below 2**-31.
    """
    cumulative_NV = _cumulative(torch.softmax(scores_NV, dim=-1))
    total_N = cumulative_NV[:, -1]
    target_N = torch.minimum((uniform_N * total_N.float()).to(torch.int32), total_N - 1)
    token_ids = (cumulative_NV <= target_N[:, None]).sum(dim=-1, dtype=torch.int32)
    # Only NaN logits get past the end; their id must not index past an embedding table.
    return token_ids.clamp(max=scores_NV.shape[-1] - 1)


def _threshold_from_sort(scaled_NV: Tensor, rows: RowTensors) -> Tensor:
    """The smallest scaled logit kept by both top-k and top-p, float32 [N]."""
    sorted_NV = torch.sort(scaled_NV, dim=-1, descending=True).values
    threshold_N = _kth_largest(sorted_NV, rows.top_k)
    sorted_NV = torch.where(sorted_NV >= threshold_N[:, None], sorted_NV, FORBIDDEN)
    cumulative_NV = _cumulative(torch.softmax(sorted_NV, dim=-1))
    wanted_N = (rows.top_p * cumulative_NV[:, -1].float()).to(torch.int32)
    num_before_N = (cumulative_NV < wanted_N[:, None]).sum(dim=-1, dtype=torch.int32)
    nucleus_N = take_column(sorted_NV, num_before_N.clamp(max=scaled_NV.shape[-1] - 1))
    return torch.maximum(threshold_N, torch.where(rows.top_p < 1, nucleus_N, FORBIDDEN))


def _kth_largest(descending_NK: Tensor, top_k_N: Tensor) -> Tensor:
    """The k-th value of each row, or ``FORBIDDEN`` where top-k is off (k = 0)."""
    kth_N = take_column(descending_NK, (top_k_N - 1).clamp(min=0).to(torch.int32))
    return torch.where(top_k_N > 0, kth_N, FORBIDDEN)


def _cumulative(probs_NV: Tensor) -> Tensor:
    """Running sum of probabilities in units of 2**-30, int32 [N, V]: exact in any order of summation."""
    units_NV = (probs_NV * _ONE + 0.5).to(torch.int32)
    return torch.cumsum(units_NV, dim=-1, dtype=torch.int32)


def _scatter(list_3E: Tensor, route: SamplingRoute) -> Tensor:
    """A [N, V] matrix that is zero except for a list of values, then their rows, then their tokens."""
    values_E, rows_E, tokens_E = list_3E.view(3, -1).unbind(0)
    positions_E = rows_E.to(torch.int32) * route.vocab_size + tokens_E.to(torch.int32)
    flat = torch.zeros(route.num_rows * route.vocab_size, dtype=torch.float32, device=values_E.device)
    return flat.index_add(0, positions_E, values_E).view(route.num_rows, route.vocab_size)


def packed(token_ids: torch.Tensor, logprobs: TokenLogprobs) -> torch.Tensor:
    """Bring sampled tokens and log-probabilities into one tensor, to be read in one copy.

    Returns:
        float32 ``[N * M, 3 + 2 * L]`` for L likeliest tokens.
    """
    sampled, rank, top_ids, top = logprobs
    # Token ids and ranks are exact in float32: both are at most the vocabulary's size.
    columns = (token_ids[:, None], rank[:, None], sampled[:, None], top_ids, top)
    return torch.cat([column.float() for column in columns], dim=1)


def unpacked(table: torch.Tensor, rows: npt.NDArray[np.int32]) -> tuple[torch.Tensor, TokenLogprobs]:
    """Return the tokens that ``packed`` has brought together, ``[N * M]``, and log-probabilities of rows."""
    num_top = (table.shape[1] - 3) // 2
    ids, rank, top_ids = (
        part.to(torch.int32) for part in (table[:, 0], table[:, 1], table[:, 3 : 3 + num_top])
    )
    logprobs = (table[:, 2], rank, top_ids, table[:, 3 + num_top :])
    return ids, TokenLogprobs(*(each[rows] for each in logprobs))
