"""Budgets of the heads of a layer, out of one for all of them: heads that spread their attention get more.

Legend: K KV heads, T tokens.

Source: Ada-KV (Feng et al. 2024, arXiv:2407.11550), with budgets found once on prompts in place of one
allocation for each prompt, since heads of a served model have fixed shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpu_duo.kv_plan import Keep, KVPlan


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
    if not count <= total <= fewest or not 0 <= safeguard <= 1:
        raise ValueError(
            f"expected a total from {count}, the heads, to {fewest}, the weights of the shortest prompt, and "
            f"a safeguard from 0 to 1, got {total} and {safeguard}"
        )
    counts = torch.zeros(count, dtype=torch.float64)
    for each in weights:
        # Stable, so that of equal weights those of the first head count.
        largest = each.double().flatten().sort(descending=True, stable=True).indices[:total]
        counts += torch.bincount(largest.cpu() // each.shape[1], minlength=count).double()
    wanted = (1 - safeguard) * counts / len(weights) + safeguard * total / count
    return _whole(wanted.tolist(), total)


def plan_of_budgets(budgets: Sequence[Sequence[int]], policy: str) -> KVPlan:
    """Return the plan in which a policy has these budgets by layer and head."""
    return KVPlan(tuple(tuple(_keep(policy, each) for each in heads) for heads in budgets))


def _keep(policy: str, budget: int) -> Keep:
    if budget < 2:
        raise ValueError(f"expected budgets of 2 tokens or more, since 1 is the whole text, got {budget}")
    return Keep(policy, budget)


def _whole(wanted: Sequence[float], total: int) -> tuple[int, ...]:
    """Whole numbers of this sum, at least 1: rounded down, then the largest remainders get one more."""
    found = [max(1, int(each)) for each in wanted]
    while sum(found) > total:
        # Only where a head got one token for none.
        found[max(range(len(found)), key=lambda head: found[head])] -= 1
    order = sorted(range(len(found)), key=lambda head: (found[head] - wanted[head], head))
    for head in order[: total - sum(found)]:
        found[head] += 1
    return tuple(found)
