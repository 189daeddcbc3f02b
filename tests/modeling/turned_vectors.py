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

    def moved(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Vectors ``[..., D]`` as if their positions were larger by as much, ``[...]``; both broadcast."""
        half = round(x.shape[-1] * self.rotary_share) // 2
        angle = by[..., None] * self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        z = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag, x[..., 2 * half :].expand(*z.shape[:-1], -1)], dim=-1)

    def scores_by_place(self, head: int, places: list[int], queries: int) -> torch.Tensor:
        """Scores ``[queries, len(places)]`` of a query head, when each position stands at its place.

        Args:
            head: query head.
            places: positions that exist, of which the last ``queries`` are queries.
        """
        own = head * len(self.k) // len(self.q)
        by = torch.arange(len(places)) - torch.tensor(places)
        asked = self.moved(self.q[head, places[-queries:]], by[-queries:])
        return asked @ self.moved(self.k[own, places], by).T * self.scale

    def expected(
        self, head: int, held: list[int], start: int, end: int, sink: int, ahead: int
    ) -> list[float]:
        """Expected attention of each position that a key/value head holds, times the norm of its value."""
        group, dim = len(self.q) // len(self.k), self.q.shape[-1]
        times = torch.arange(end, end + ahead)[:, None]
        average = self.moved(torch.eye(dim, dtype=torch.float64), times).mean(dim=0)
        free = [p for p in held if p >= sink]
        total = torch.zeros(len(free), dtype=torch.float64)
        for query_head in range(head * group, (head + 1) * group):
            counted = torch.arange(max(start, sink), end)
            own = self.moved(self.q[query_head, counted], -counted) * self.scale
            future = own @ average if len(counted) else torch.zeros(1, dim, dtype=torch.float64)
            apart = future - future.mean(dim=0)
            keys = self.k[head, free].T
            total += torch.softmax(future.mean(dim=0) @ keys + (apart @ keys).square().mean(dim=0) / 2, dim=0)
        found = dict(zip(free, (total / group).tolist()))
        return [found.get(p, 0.0) * float(self.v[head, p].norm()) for p in held]
