"""Budgets of the heads of a layer, out of one for all of them: heads that spread their attention get more.

Legend: K KV heads, T tokens.

Source: Ada-KV (Feng et al. 2024, arXiv:2407.11550), with budgets found once on prompts in place of one
allocation for each prompt, since heads of a served model have fixed shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpu_duo.config.kv_plan import Keep, KVPlan


def head_budgets(weights: Sequence[Tensor], total: int, safeguard: float = 0.2) -> tuple[int, ...]:
    """Share ``total`` tokens of a layer among its KV heads.

    The ``total`` largest weights of all heads together are counted by head. A head gets its count, averaged
    over prompts, times ``1 - safeguard``, and an equal share of the rest.

    Args:
        weights: of each prompt, attention on each token by KV head ``[K, T]``; averaged over queries and the
            query heads of a KV head, and pooled over neighbours if so wanted.
        total: tokens of all heads of the layer, at least one for each.
        safeguard: share that is dealt out equally.

    Returns:
        K budgets of at least 1, whose sum is ``total``.

    Raises:
        ValueError: no prompt, shapes that differ in heads, prompts with fewer weights than ``total``, or a
            number out of range.
    """
    num_heads = {each.shape[0] for each in weights if each.ndim == 2}
    if len(num_heads) != 1 or any(each.ndim != 2 for each in weights):
        raise ValueError(
            f"expected weights [K, T] of equally many heads, got {[list(each.shape) for each in weights]}"
        )
    count = num_heads.pop()
    fewest = min(each.numel() for each in weights)
    if not count <= total <= fewest:
        raise ValueError(
            f"expected a total from {count}, the heads, to {fewest}, the weights of the shortest prompt, "
            f"got {total}"
        )
    return budgets_of_counts([head_counts(each, total) for each in weights], safeguard)


def head_counts(weights: Tensor, total: int) -> Tensor:
    """Count by head the ``total`` largest weights ``[K, T]`` of a prompt: int64 ``[K]``, on the CPU."""
    # Stable, so that of equal weights those of the first head count.
    largest = weights.flatten().sort(descending=True, stable=True).indices[:total]
    return torch.bincount(largest.cpu() // weights.shape[1], minlength=weights.shape[0])


def budgets_of_counts(counts: Sequence[Tensor], safeguard: float = 0.2, fewest: int = 1) -> tuple[int, ...]:
    """Share as many tokens as were counted among the KV heads of a layer.

    Args:
        counts: of each prompt, see ``head_counts``; of equal sums.
        safeguard: share that is dealt out equally.
        fewest: tokens of a head.

    Returns:
        K budgets of at least ``fewest``, whose sum is that of the counts.

    Raises:
        ValueError: sums that differ, or too small for so many tokens of each head, or a safeguard out of
            range.
    """
    total = {int(each.sum()) for each in counts}
    num_heads = len(counts[0]) if counts else 0
    if len(total) != 1 or min(total) < fewest * num_heads or not 0 <= safeguard <= 1:
        raise ValueError(
            f"expected counts of one sum, {fewest} or more for each of {num_heads} heads, and a safeguard "
            f"from 0 to 1, got {sorted(total)} and {safeguard}"
        )
    mean = torch.stack(list(counts)).double().mean(dim=0)
    (tokens,) = total
    wanted = (1 - safeguard) * mean + safeguard * tokens / num_heads
    return _whole(wanted.tolist(), tokens, fewest)


def plan_of_budgets(budgets: Sequence[Sequence[int]], policy: str) -> KVPlan:
    """Return the plan in which a policy has these budgets by layer and head."""
    return KVPlan(tuple(tuple(_keep(policy, each) for each in heads) for heads in budgets))


def _keep(policy: str, budget: int) -> Keep:
    if budget < 2:
        raise ValueError(f"expected budgets of 2 tokens or more, since 1 is the whole text, got {budget}")
    return Keep(policy, budget)


def _whole(wanted: Sequence[float], total: int, fewest: int) -> tuple[int, ...]:
    """Whole numbers of this sum, at least ``fewest``: rounded down, then largest remainders get one more."""
    found = [max(fewest, int(each)) for each in wanted]
    while sum(found) > total:
        # Only where a head got more tokens than it is due.
        found[max(range(len(found)), key=lambda head: found[head])] -= 1
    order = sorted(range(len(found)), key=lambda head: (found[head] - wanted[head], head))
    for head in order[: total - sum(found)]:
        found[head] += 1
    return tuple(found)
