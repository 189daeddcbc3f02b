"""Eviction by the attention that tokens receive: H2O, TOVA and SnapKV, or may expect: Expected Attention."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from hpu_duo.heads.eviction.by_position import PolicyWithPositions
from kernels_ref import FutureQueries, KVPolicy, SlotView
from kernels_ref.groups.budget_slots import look_up, text_order


@dataclass(frozen=True)
class HeavyHitters(PolicyWithPositions):
    """Keeps heavy hitters, by accumulated attention, and recent tokens.

    The score of a token is the sum of the attention weights of later queries, and its own, on it, over the
    query heads that share its key. A score is removed with its token.

    Source: arXiv:2306.14048, algorithm 1, for one key/value head at a time. There a token is evicted after an
    attention, here before the next one, which needs no additional slot.

    Attributes:
        recent: share of the slots for the newest tokens, the newest one included; the paper's is 0.5.
    """

    recent: float = 0.5
    name: ClassVar[str] = "h2o"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.recent < 1.0:
            raise ValueError(f"expected recent in [0, 1) for kv_policy {self.name!r}, got {self.recent}")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and options."""
        return self.key_of(self.recent)

    @property
    def num_observed(self) -> int | None:
        """All queries."""
        return None

    def num_recent(self, num_slots: int) -> int:
        """Slots for the newest tokens."""
        return math.floor(self.recent * num_slots)

    def observe(self, slots: SlotView, mass: torch.Tensor) -> torch.Tensor:
        """Add what each token has received."""
        return slots.score + mass

    def protects(self, slots: SlotView) -> torch.Tensor:
        """The newest tokens."""
        return slots.position >= slots.end - self.num_recent(slots.num_slots)


@dataclass(frozen=True)
class TOVA(PolicyWithPositions):
    """Keeps the tokens with the largest weights of the newest query, the same ones in all heads of a layer.

    The score of a token is the newest query's weight on it, averaged over the heads of the layer that have
    this budget: all of them, or those that stream under a head pattern. Nothing is protected by default for:
    even the newest token may go next.

    Source: arXiv:2401.06104.

    Attributes:
        protect: newest tokens that stay whatever their weights.
    """

    protect: int = 0
    name: ClassVar[str] = "tova"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protect < 0:
            raise ValueError(f"expected protect >= 0 for kv_policy {self.name!r}, got {self.protect}")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and options."""
        return self.key_of(self.protect)

    @property
    def num_observed(self) -> int | None:
        """The newest query only."""
        return 1

    @property
    def pools_heads(self) -> bool:
        """All heads of a layer that have the budget."""
        return True

    def check(self, num_slots: int) -> None:
        """Raise ValueError for a budget that protected tokens fill."""
        if self.protect > num_slots:
            raise ValueError(
                f"kv_policy {self.name!r} with protect={self.protect} needs a budget of at least "
                f"{self.protect} slots, got {num_slots}"
            )

    def observe(self, slots: SlotView, mass: torch.Tensor) -> torch.Tensor:
        """Replace scores by weights, averaged over heads."""
        return mass.mean(dim=1, keepdim=True).expand_as(mass)

    def protects(self, slots: SlotView) -> torch.Tensor | None:
        """The newest tokens, if configured."""
        return slots.position >= slots.end - self.protect if self.protect else None


@dataclass(frozen=True)
class SnapKV(PolicyWithPositions):
    """Keeps the tokens that the last queries attend to, smoothed over neighbours, and the newest tokens.

    The score of a token of a prompt is the mean weight of the last ``window`` queries of the chunk on it,
    over the query heads that share its key, averaged over ``kernel`` stored neighbours in the order of the
    text. The published method ends with the prompt and keeps all generated tokens. Here a decode moves the
    mean, as one query of ``window``, without smoothing.

    Source: arXiv:2404.14469; average pooling over 5, as in its code.

    Attributes:
        window: queries that are observed, and newest tokens that stay.
        kernel: neighbours that are averaged, itself included, an odd number.
    """

    window: int = 32
    kernel: int = 5
    name: ClassVar[str] = "snapkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                f"expected window >= 1 and an odd kernel for kv_policy {self.name!r}, "
                f"got window={self.window} kernel={self.kernel}"
            )

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and options."""
        return self.key_of(self.window, self.kernel)

    @property
    def num_observed(self) -> int | None:
        """The window."""
        return self.window

    def check(self, num_slots: int) -> None:
        """Raise ValueError for a budget that the window fills."""
        if self.window > num_slots:
            raise ValueError(
                f"kv_policy {self.name!r} with window={self.window} needs a budget of at least {self.window} "
                f"slots, got {num_slots}"
            )

    def observe(self, slots: SlotView, mass: torch.Tensor) -> torch.Tensor:
        """Replace scores by smoothed means after a chunk, and update a moving mean after a decode."""
        tiny = torch.finfo(torch.float32).tiny
        mean = mass / torch.clamp(mass.sum(dim=-1, keepdim=True), min=tiny)
        if not slots.is_chunk:
            return slots.score + (mean - slots.score) / self.window
        return self._smooth(slots, mean)

    def _smooth(self, slots: SlotView, mean: torch.Tensor) -> torch.Tensor:
        if self.kernel == 1:
            return mean
        order, place = text_order(slots.position.expand(mean.shape), slots.valid)
        side = self.kernel // 2
        padded = torch.nn.functional.pad(look_up(mean, order), (side, side))
        length = mean.shape[-1]
        total = padded[..., :length]
        for shift in range(1, self.kernel):
            total = total + padded[..., shift : shift + length]
        return look_up(total / self.kernel, place)

    def protects(self, slots: SlotView) -> torch.Tensor:
        """The newest tokens."""
        return slots.position >= slots.end - self.window


_FLOOR = -1e30


@dataclass(frozen=True)
class ExpectedAttention(KVPolicy):
    """Keeps the tokens with most expected attention of future queries, weighted by the norm of their values.

    Queries before rotary embedding are assumed to be normally distributed, with the mean ``m`` and the
    covariance ``V`` of the queries of the chunk after the sinks. Rotated by the mean rotation of the next
    ``future`` positions they have the expected weight ``exp(m . k + k V k / 2)`` on a key. The score of a
    token is its share of that among the kept tokens after the sinks, averaged over the query heads that share
    its key, plus ``epsilon``, times the norm of its value.

    The published method ends with the prompt and keeps all generated tokens. Here a decoded token gets the
    highest score of its head. So tokens of the prompt go before it, and of decoded ones the oldest.

    Source: arXiv:2510.00636, and the defaults of its code; soft caps and sink logits are not looked at.

    Attributes:
        sink: leading tokens that are kept, with queries that do not count.
        future: positions that are looked ahead.
        epsilon: added to expected weights.
    """

    sink: int = 4
    future: int = 512
    epsilon: float = 0.0
    name: ClassVar[str] = "expected-attention"

    def __post_init__(self) -> None:
        if self.sink < 0 or self.future < 1 or not 0 <= self.epsilon < 1e6:
            raise ValueError(
                f"expected sink >= 0, future >= 1 and epsilon >= 0 for kv_policy {self.name!r}, "
                f"got sink={self.sink} future={self.future} epsilon={self.epsilon}"
            )

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and options."""
        return self.name, self.sink, self.future, self.epsilon

    @property
    def num_observed(self) -> int | None:
        """One, so that a decoded token gets a score."""
        return 1

    @property
    def weighs_decodes(self) -> bool:
        """False: the score of a decoded token does not depend on its attention."""
        return False

    @property
    def num_ahead(self) -> int:
        """Positions after a chunk."""
        return self.future

    @property
    def first_query(self) -> int:
        """Position after the sinks."""
        return self.sink

    def check(self, num_slots: int) -> None:
        """Raise ValueError for a budget that sinks fill."""
        if self.sink >= num_slots:
            raise ValueError(
                f"kv_policy {self.name!r} with sink={self.sink} needs a budget above {self.sink} slots, "
                f"got {num_slots}"
            )

    def expect(
        self, slots: SlotView, queries: FutureQueries, k_PKSD: torch.Tensor, v_PKSD: torch.Tensor
    ) -> torch.Tensor:
        """Replace scores by expected weights times norms."""
        keys = k_PKSD.float()
        counts = slots.valid & (slots.position >= self.sink)
        total = torch.zeros_like(slots.score)
        group = queries.mean.shape[2]
        for member in range(group):
            mean, covariance = queries.mean[:, :, member], queries.covariance[:, :, member]
            spread = (torch.matmul(keys, covariance) * keys).sum(dim=-1)
            score = torch.matmul(keys, mean[..., None])[..., 0] + spread / 2
            total = total + torch.softmax(torch.where(counts, score, _FLOOR), dim=-1)
        return (total / group + self.epsilon) * v_PKSD.float().norm(dim=-1)

    def observe(self, slots: SlotView, mass: torch.Tensor) -> torch.Tensor:
        """Set the score of the newest token to the highest one."""
        highest = torch.where(slots.valid, slots.score, 0.0).amax(dim=-1, keepdim=True)
        return torch.where(slots.position == slots.end - 1, highest, slots.score)

    def protects(self, slots: SlotView) -> torch.Tensor:
        """Sinks."""
        return slots.position < self.sink
