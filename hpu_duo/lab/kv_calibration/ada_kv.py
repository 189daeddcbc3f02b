"""Calibration in the manner of Ada-KV: one policy for all heads, each layer's budget shared by its heads.

Legend: K KV heads, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_duo.heads.eviction import TOVA, ExpectedAttention, SnapKV, make_kv_policy
from hpu_duo.heads.eviction.fastgen import TokenClasses
from hpu_duo.lab.kv_calibration.calibrated import PlannedHead
from hpu_duo.lab.kv_calibration.collect import LayerAttention
from hpu_duo.lab.kv_calibration.head_budgets import budgets_of_counts, head_counts, plan_of_budgets
from hpu_duo.lab.kv_calibration.methods import CalibrationMethod, Measurement, PlannedLayers
from hpu_duo.lab.kv_calibration.sizes import quantised
from kernels_ref import KVPolicy

_QUERIES = 32
"""Last queries, as published. Over all queries a head that sees its neighbours only would look broad."""


@dataclass(frozen=True)
class AdaKV(CalibrationMethod):
    """Settings.

    Attributes:
        budget: tokens of a head on average, or, up to 1, their share of the longest prompt, rounded up.
        policy: KV policy of all heads, with options.
        safeguard: share of each layer's budget that its heads share equally.
        queries: last tokens whose attention is measured; None for the window of snapkv, or 32.

    Raises:
        ValueError: a number out of range, or a policy that does not choose by attention.
    """

    budget: float = 0.2
    policy: str = "snapkv"
    safeguard: float = 0.2
    queries: int | None = None
    needs_classes = False

    def __post_init__(self) -> None:
        if not self.budget > 0 or (self.budget > 1 and not float(self.budget).is_integer()):
            raise ValueError(
                "expected a budget to be a share above 0 and up to 1, or a whole number of tokens, "
                f"got {self.budget}"
            )
        if not 0 <= self.safeguard <= 1:
            raise ValueError(f"expected a safeguard from 0 to 1, got {self.safeguard}")
        if self.queries is not None and self.queries < 1:
            raise ValueError(f"expected 1 query or more to measure, got {self.queries}")
        policy = self._policy
        if policy.num_observed == 0 and not policy.num_ahead:
            raise ValueError(
                "expected a kv_policy that chooses by attention, such as snapkv, h2o, tova or "
                f"expected-attention, got {self.policy!r}, which keeps tokens by position"
            )

    @property
    def num_queries(self) -> int | None:
        """The window of snapkv, or 32, by default."""
        if self.queries is not None:
            return self.queries
        policy = self._policy
        match policy:
            case SnapKV():
                return policy.window
            case _:
                return _QUERIES

    def budget_of(self, lengths: Sequence[int]) -> int:
        """Tokens of a head on average."""
        return math.ceil(self.budget * max(lengths)) if self.budget <= 1 else int(self.budget)

    def shortest(self, lengths: Sequence[int]) -> int:
        """As many tokens as a head keeps on average, one for each that its layer counts."""
        budget = self.budget_of(lengths)
        if budget < (fewest := self._num_newest + self._num_free):
            raise ValueError(
                f"expected a budget of at least {fewest} tokens for kv_policy {self.policy!r}, got {budget}"
            )
        return budget

    def measurement(self, num_layers: int, lengths: Sequence[int]) -> Measurement:
        """Begin to count."""
        return _Counting(self, num_layers, self.budget_of(lengths))

    @property
    def _policy(self) -> KVPolicy:
        return make_kv_policy(self.policy)

    @property
    def _num_newest(self) -> int:
        """Newest tokens that every head keeps, whatever its budget."""
        policy = self._policy
        match policy:
            case SnapKV():
                return policy.window
            case TOVA():
                return policy.protect
            case _:
                return 0

    @property
    def _num_free(self) -> int:
        """Fewest tokens of a head beside them; a budget of one token would be the whole text."""
        policy = self._policy
        match policy:
            case ExpectedAttention():
                return max(2, policy.sink + 1)
            case _:
                return 1 if self._num_newest else 2

    def _pooled(self, weights: Tensor) -> Tensor:
        """Weights ``[K, T]`` as the policy compares them."""
        policy = self._policy
        match policy:
            case SnapKV():
                return F.avg_pool1d(weights, policy.kernel, stride=1, padding=policy.kernel // 2)
            case _:
                return weights


class _Counting(Measurement):
    """Counts by prompt, layer and head, and the attention that each number of tokens recovers."""

    def __init__(self, method: AdaKV, num_layers: int, budget: int) -> None:
        self._method, self._budget = method, budget
        self._counts: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self._curves: dict[int, Tensor] = {}

    def take(self, layer: int, attention: LayerAttention, classes: TokenClasses | None) -> None:
        weights = attention.received()
        num_heads, num_tokens = weights.shape
        newest = self._method._num_newest
        scores = self._method._pooled(weights)[:, : num_tokens - newest]
        self._counts[layer].append(head_counts(scores, num_heads * (self._budget - newest)))
        order = scores.sort(dim=1, descending=True, stable=True).indices
        free = weights.gather(1, order).cumsum(dim=1)
        kept = weights[:, num_tokens - newest :].sum(dim=1, keepdim=True)
        curve = F.pad(free, (1, 0)) + kept
        self._add(layer, curve / curve[:, -1:].clamp_min(torch.finfo(torch.float64).tiny))

    def _add(self, layer: int, curve: Tensor) -> None:
        """Add the shares that each number of tokens behind the newest recovers; all tokens recover all."""
        if (have := self._curves.get(layer)) is None:
            self._curves[layer] = curve
            return
        width = max(have.shape[1], curve.shape[1])
        sides = ((have, len(self._counts[layer]) - 1), (curve, 1))
        padded = [F.pad(side, (0, width - side.shape[1]), value=all_of_it) for side, all_of_it in sides]
        self._curves[layer] = padded[0] + padded[1]

    def planned(self, num_sizes: int) -> PlannedLayers:
        method = self._method
        newest = method._num_newest
        asked = [
            [newest + each for each in budgets_of_counts(counts, method.safeguard, method._num_free)]
            for counts in self._counts
        ]
        plan = plan_of_budgets(quantised(asked, num_sizes).budgets, method.policy)
        found = []
        for layer, (heads, keeps) in enumerate(zip(asked, plan.layers)):
            shares = self._curves[layer] / len(self._counts[layer])
            found.append(
                tuple(
                    PlannedHead(keep.name, keep, tokens, self._share(shares[head], keep.budget))
                    for head, (tokens, keep) in enumerate(zip(heads, keeps))
                )
            )
        return tuple(found)

    def _share(self, shares: Tensor, budget: float | None) -> float:
        assert budget is not None, "every head has one"
        return float(shares[min(int(budget) - self._method._num_newest, len(shares) - 1)])
