"""Queries and keys of one text at other positions, with complex numbers, for the definition of budgets."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Vectors:
    """Queries ``[H, L, D]``, keys and values ``[K, L, D]`` of a layer after rotary embedding, in float64."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    rotary_share: float = 1.0
    theta: float = 10_000.0

    def moved(self, x: torch.Tensor, by: int) -> torch.Tensor:
        """Vectors ``[..., D]`` as if their positions were ``by`` larger."""
        half = round(x.shape[-1] * self.rotary_share) // 2
        angle = by * self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        z = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag, x[..., 2 * half :]], dim=-1)

    def scores_by_place(self, head: int, places: list[int], queries: int) -> dict[tuple[int, int], float]:
        """Scores of query head and key, when each position stands at its place in the list.

        Args:
            head: query head.
            places: positions that exist, of which the last ``queries`` are queries.
        """
        own = head * len(self.k) // len(self.q)
        keys = [self.moved(self.k[own, p], place - p) for place, p in enumerate(places)]
        found = {}
        for place in range(len(places) - queries, len(places)):
            query = self.moved(self.q[head, places[place]], place - places[place])
            for other in range(place + 1):
                found[places[place], places[other]] = float(query @ keys[other]) * self.scale
        return found

    def expected(
        self, head: int, held: list[int], start: int, end: int, sink: int, ahead: int
    ) -> list[float]:
        """Expected attention of each position that a key/value head holds, times the norm of its value."""
        group, dim = len(self.q) // len(self.k), self.q.shape[-1]
        average = (
            sum(self.moved(torch.eye(dim, dtype=torch.float64), t) for t in range(end, end + ahead)) / ahead
        )
        free = [p for p in held if p >= sink]
        total = torch.zeros(len(free), dtype=torch.float64)
        for query_head in range(head * group, (head + 1) * group):
            counted = [self.moved(self.q[query_head, p], -p) for p in range(max(start, sink), end)]
            own = torch.stack(counted) * self.scale if counted else torch.zeros(1, dim, dtype=torch.float64)
            future = own @ average
            apart = future - future.mean(dim=0)
            exponents = []
            for p in free:
                spread = (apart @ self.k[head, p]).square().mean()
                exponents.append(future.mean(dim=0) @ self.k[head, p] + spread / 2)
            total += torch.softmax(torch.stack(exponents), dim=0) if free else 0
        found = dict(zip(free, (total / group).tolist()))
        return [found.get(p, 0.0) * float(self.v[head, p].norm()) for p in held]
