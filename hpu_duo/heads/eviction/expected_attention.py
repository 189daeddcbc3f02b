"""Expected Attention: the tokens that future queries are expected to attend to."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels_ref import FutureQueries, KVPolicy, SlotView

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
