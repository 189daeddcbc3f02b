"""Log-probabilities to report with the sampled tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpu_duo.sampling.gather import take_column
from hpu_duo.sampling.rows import FORBIDDEN

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
            padded width of the batch (``route.num_logprobs``): a row that asked for fewer takes its first
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

    ``torch.topk`` leaves the order of equals open and lets it depend on k, that is, on what other rows ask.
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
