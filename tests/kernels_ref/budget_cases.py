"""Decode rows and prompt rows of heads with a budget, and their attention in float64, head by head.

Keys, values and numbers that nobody may see hold NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from bias_builders import Leading
from kernels_ref import KVUnits, NewKV, Partial, UnitLayout, as_units
from kernels_ref.groups import RingStep
from kernels_ref.groups.column_sums import ChunkStep
from kernels_ref.impl import Kernels
from tests.kernels_ref.parts import inputs_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Decodes(NamedTuple):
    """Decode rows of a budget: queries, stores with NaN behind the visible slots, and how many those are."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    visible: list[int]
    sinks: torch.Tensor | None
    slack: int = 0

    @property
    def ring(self) -> RingStep:
        """Return what the rows see."""
        nothing = torch.zeros(0, dtype=torch.int32, device=DEVICE)
        seen = torch.tensor(self.visible, dtype=torch.int32, device=DEVICE)[:, None, None]
        return RingStep(nothing, Leading(seen), nothing)

    @property
    def units(self) -> KVUnits:
        """The stores, with ``slack`` vectors of NaN behind each head."""
        num_units, num_heads, num_slots, dim = self.k.shape
        stride = num_slots + self.slack
        layout = UnitLayout(num_units, num_heads, num_slots, stride, num_heads * stride)
        wide = (torch.nn.functional.pad(x, (0, 0, 0, self.slack), value=math.nan) for x in (self.k, self.v))
        return as_units(*(x.reshape(-1, dim) for x in wide), layout)

    def attend(self, run: Kernels, softcap: float | None = None) -> tuple[Partial, torch.Tensor]:
        """Run an implementation on them."""
        return run.unique_with_weights(
            inputs_of(self.q, units=self.units, softcap=softcap, sinks=self.sinks), self.ring
        )


def some_decodes(
    visible: list[int],
    num_slots: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int = 0,
    has_sinks: bool = False,
) -> Decodes:
    """Rows of ``heads`` key/value heads, query heads of each, and their size."""
    (num_heads, group, dim), generator = heads, torch.Generator().manual_seed(seed)
    # Queries are a part of more heads, as those of a group of a layer are.
    q = torch.randn(len(visible), num_heads + 1, group, dim, generator=generator)[:, 1:].to(dtype)
    shape = (len(visible) + 1, num_heads, num_slots, dim)
    k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    for row, seen in enumerate(visible):
        k[row, :, seen:] = v[row, :, seen:] = math.nan
    k[-1] = v[-1] = math.nan
    sinks = torch.randn(num_heads, group, generator=generator).mul(3).to(DEVICE) if has_sinks else None
    return Decodes(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), visible, sinks)


def softened(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Scores below the cap."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def exact_scores(d: Decodes, softcap: float | None) -> list[torch.Tensor]:
    """Scores of each row against the slots that it sees, ``[K, G, seen]``."""
    q, k = d.q.cpu().double(), d.k.cpu().double()
    return [
        softened(q[row] @ k[row, :, :seen].transpose(1, 2), softcap) for row, seen in enumerate(d.visible)
    ]


def exact_decodes(d: Decodes, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs without sinks and column sums with them, head by head."""
    outputs = torch.zeros(d.q.shape, dtype=torch.float64)
    mass = torch.zeros(*d.q.shape[:2], d.k.shape[2], dtype=torch.float64)
    scores_of_rows, v = exact_scores(d, softcap), d.v.cpu().double()
    for row, seen in enumerate(d.visible):
        for head in range(mass.shape[1]):
            for member in range(outputs.shape[2]) if seen else ():
                scores = scores_of_rows[row][head, member]
                outputs[row, head, member] = torch.softmax(scores, dim=0) @ v[row, head, :seen]
                whole = torch.logsumexp(scores, dim=0)
                if d.sinks is not None:
                    whole = torch.logaddexp(whole, d.sinks[head, member].cpu().double())
                mass[row, head, :seen] += torch.exp(scores - whole)
    return outputs, mass


class Chunks(NamedTuple):
    """Prompt rows of a budget: those that exist, and one that does not."""

    q: torch.Tensor
    lse: torch.Tensor
    k: torch.Tensor
    slots: torch.Tensor | None
    chunk: ChunkStep

    def sums(self, run: Kernels, num_observed: int | None, softcap: float | None = None) -> torch.Tensor:
        """Run an implementation on them."""
        inputs = inputs_of(self.q, new=NewKV(self.k, self.k), softcap=softcap)
        return run.column_sums(inputs, self.lse, self.slots, self.chunk, num_observed)


def some_chunks(
    texts: list[tuple[int, int]],
    num_slots: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    softcap: float | None = None,
    seed: int = 0,
) -> tuple[Chunks, Callable[[int | None], torch.Tensor]]:
    """Rows of tokens that came before and new ones, and the sums of weights by key in float64.

    Args:
        num_slots: of each row; 0 for rows without context.
    """
    (num_heads, group, dim), generator = heads, torch.Generator().manual_seed(seed)
    most_new, num_queries = max(new for _, new in texts) + 2, sum(new for _, new in texts) + 3
    q = torch.randn(num_queries, num_heads + 1, group, dim, generator=generator)[:, 1:].to(dtype)
    k = torch.randn(num_queries, num_heads + 2, dim, generator=generator)[:, 2:].to(dtype)
    slots = torch.randn(len(texts) + 1, num_heads, num_slots, dim, generator=generator).to(dtype)
    begins = [1 + sum(new for _, new in texts[:row]) for row in range(len(texts))]
    start, num_new, begin = (
        torch.tensor(x, dtype=torch.int32)
        for x in zip(*((s, n, b) for (s, n), b in zip(texts, begins)), (0, 0, 0))
    )
    token = torch.clamp(begin[:, None] + torch.arange(most_new, dtype=torch.int32), max=num_queries - 1)
    lse = torch.full((num_queries, num_heads, group), math.nan)
    weights: dict[tuple[int, int], list[torch.Tensor]] = {}
    for row, (before, new) in enumerate(texts):
        stored = min(before, num_slots)
        slots[row, :, stored:] = math.nan
        for head in range(num_heads):
            keys = torch.cat([slots[row, head, :stored], k[begins[row] : begins[row] + new, head]]).double()
            for query in range(new):
                mine = q[begins[row] + query, head].double()
                scores = softened(mine @ keys[: stored + query + 1].T, softcap)
                # As if each had seen something more, which takes a share: sink logits, for instance.
                whole = torch.logaddexp(torch.logsumexp(scores, dim=-1), torch.tensor(0.5).double())
                lse[begins[row] + query, head] = whole.float()
                columns = torch.zeros(num_slots + most_new, dtype=torch.float64)
                share = torch.exp(scores - whole[:, None]).sum(dim=0)
                columns[:stored] = share[:stored]
                columns[num_slots : num_slots + query + 1] = share[stored:]
                weights.setdefault((row, head), []).append(columns)
    slots[-1] = math.nan

    def exact(num_observed: int | None) -> torch.Tensor:
        total = torch.zeros(len(texts) + 1, num_heads, num_slots + most_new, dtype=torch.float64)
        for (row, head), each in weights.items():
            counted = each if num_observed is None else each[-num_observed:]
            total[row, head] = torch.stack(counted).sum(dim=0)
        return total

    number = torch.arange(len(texts) + 1, dtype=torch.int32)
    chunk = ChunkStep(*(x.to(DEVICE) for x in (number, start, num_new, token)))
    held = slots.to(DEVICE) if num_slots else None
    return Chunks(q.to(DEVICE), lse.to(DEVICE), k.to(DEVICE), held, chunk), exact
