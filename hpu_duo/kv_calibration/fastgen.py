"""Choice of the cheapest thing that a head can keep and still see most of what it looks at.

Legend: K KV heads, Q measured queries, T tokens.

Source: FastGen (Ge et al. 2023, arXiv:2310.01801), whose choice is made for each prompt; here once, on
calibration prompts, since heads of a served model have fixed shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from hpu_duo.kv_calibration.sizes import Quantised, quantised
from hpu_duo.kv_plan import Keep, KVPlan


class Kind(IntEnum):
    """Sets of tokens that a head may keep, from cheap to dear; each kind keeps what those before it keep."""

    SPECIAL = 0
    PUNCTUATION = 1
    WINDOW = 2
    HEAVY = 3
    FULL = 4


@dataclass(frozen=True)
class TokenClasses:
    """Classes of the tokens of a prompt.

    Attributes:
        special, punctuation: bool ``[T]``.
    """

    special: Tensor
    punctuation: Tensor


@dataclass(frozen=True)
class FastGenChoice:
    """The choice of one head.

    Attributes:
        kind: the cheapest that recovers enough.
        recovered: mean share of the attention on what it keeps.
        budget: most tokens that it keeps at the end of a prompt; of all prompts for ``FULL``.
        num_recent: of them, those of the window.
    """

    kind: Kind
    recovered: float
    budget: int
    num_recent: int


def choose_kinds(
    weights: Sequence[Tensor],
    queries: Sequence[Tensor],
    classes: Sequence[TokenClasses],
    threshold: float,
    window: float = 0.3,
    heavy: float = 0.3,
) -> tuple[FastGenChoice, ...]:
    """Choose for each KV head of a layer.

    The window is the last ``window`` of a prompt's tokens before a query, itself included. Heavy hitters are
    the ``heavy`` of its tokens with the largest weights, summed over the queries.

    Args:
        weights: of each prompt ``[K, Q, T]``, averaged over the query heads of a KV head; what a query does
            not see is 0.
        queries: positions of the queries of each prompt, int64 ``[Q]``.
        classes: of each prompt's tokens.
        threshold: share of the attention to be recovered, in (0, 1].
        window, heavy: shares of a prompt's tokens, in (0, 1].

    Raises:
        ValueError: no prompt, not equally many of everything, or a number out of range.
    """
    if not weights or not len(weights) == len(queries) == len(classes):
        raise ValueError(
            f"expected weights, queries and classes of as many prompts, got {len(weights)}, {len(queries)} "
            f"and {len(classes)}"
        )
    for name, value in (("threshold", threshold), ("window", window), ("heavy", heavy)):
        if not 0 < value <= 1:
            raise ValueError(f"expected {name} above 0 and up to 1, got {value}")
    num_heads = weights[0].shape[0]
    recovered = torch.zeros(len(Kind), num_heads, dtype=torch.float64)
    kept = torch.zeros(len(Kind), num_heads, dtype=torch.int64)
    num_recent = 0
    for each, at, tokens in zip(weights, queries, classes):
        share, count = _of_prompt(each.double().cpu(), at.cpu(), tokens, window, heavy)
        recovered += share / len(weights)
        kept = torch.maximum(kept, count)
        num_recent = max(num_recent, math.ceil(window * each.shape[2]))
    # A sum of all weights may differ from 1 by rounding.
    recovered[Kind.FULL] = 1.0
    chosen = (recovered >= threshold).int().argmax(dim=0).tolist()
    return tuple(
        FastGenChoice(
            Kind(kind),
            float(recovered[kind, head]),
            int(kept[kind, head]),
            num_recent if kind >= Kind.WINDOW else 0,
        )
        for head, kind in enumerate(chosen)
    )


def _of_prompt(
    weights: Tensor, queries: Tensor, classes: TokenClasses, window: float, heavy: float
) -> tuple[Tensor, Tensor]:
    """Recovered shares, float64, and kept tokens at the end, int64, by kind and head."""
    num_heads, _, num_tokens = weights.shape
    key, last = torch.arange(num_tokens), torch.tensor([num_tokens - 1])
    at = torch.cat([queries, last]).unsqueeze(1)
    largest = weights.sum(dim=1).sort(dim=1, descending=True, stable=True).indices
    hit = torch.zeros(num_heads, num_tokens, dtype=torch.bool)
    hit.scatter_(1, largest[:, : math.ceil(heavy * num_tokens)], True)
    is_seen = (key <= at).expand(num_heads, -1, -1)
    near = key > at - math.ceil(window * num_tokens)
    special = classes.special.cpu().expand(num_heads, len(at), -1)
    marks = special | classes.punctuation.cpu()
    masks = [special, marks, marks | near, marks | near | hit.unsqueeze(1), torch.ones_like(special)]
    total = weights.sum(dim=2).clamp_min(torch.finfo(torch.float64).tiny)
    shares, counts = [], []
    for mask in (each & is_seen for each in masks):
        shares.append(((weights * mask[:, :-1]).sum(dim=2) / total).mean(dim=1))
        counts.append(mask[:, -1].sum(dim=1))
    return torch.stack(shares), torch.stack(counts)


def fastgen_plan(
    choices: Sequence[Sequence[FastGenChoice]], num_sizes: int = 3
) -> tuple[KVPlan, Quantised | None]:
    """Return a plan of what the engine can keep in place of each choice, and its budgets of few sizes.

    A running head knows positions and scores, and no classes of tokens. So heads that need everything keep
    all tokens, and others have as many tokens as their choice needs under ``h2o``: without a window, heavy
    hitters only (``recent=0``); with one, half of the budget for the newest (``recent=0.5``).

    Args:
        choices: by layer and KV head.
        num_sizes: most different budgets.

    Returns:
        None for the budgets if all heads keep everything.
    """
    asked = [max(2, each.budget) for heads in choices for each in heads if each.kind is not Kind.FULL]
    rounded = quantised([asked], num_sizes) if asked else None
    sizes = iter(rounded.budgets[0] if rounded is not None else ())
    layers = tuple(
        tuple(Keep() if each.kind is Kind.FULL else _keep(each, next(sizes)) for each in heads)
        for heads in choices
    )
    return KVPlan(layers), rounded


def _keep(choice: FastGenChoice, budget: int) -> Keep:
    return Keep(f"h2o:recent={0.5 if choice.kind >= Kind.WINDOW else 0.0}", budget)
