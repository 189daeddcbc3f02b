"""The gated delta rule: a row's state is a matrix for each head, from keys to values.

A token with key k, value v, decay exp(g) and strength b turns the state S into S' = exp(g) S, then into
S' + k b (v - S' k), and reads it with its query. Prompts are computed in chunks, each of one row: what new
tokens of a chunk write for each other is solved at once, so that states are read and written once a chunk.

Shapes: Q query tokens, N rows, C chunks of T tokens, H heads, D size of keys, V size of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from kernels_ref.recurrent.matrix_state import ChunkElements, ChunkStep, Join, MatrixState
from kernels_ref.step import Step


class DeltaInputs(NamedTuple):
    """Inputs of the rule for some tokens, float32.

    Attributes:
        q, k: ``[..., H, D]``, q scaled.
        v: ``[..., H, V]``.
        g, beta: decay in logarithms, and strength, ``[..., H]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        normalises: bool,
    ) -> DeltaInputs:
        """Widen the inputs of a module: keys may have fewer heads, for neighbouring heads of values each."""
        q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
        if normalises:
            q, k = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (q, k))
        repeats = v.shape[-2] // k.shape[-2]
        if repeats > 1:
            shape = (-1, -1, repeats, -1)
            q, k = (x[:, :, None].expand(shape).flatten(1, 2) for x in (q, k))
        return cls(q * q.shape[-1] ** -0.5, k, v, g, beta)


@dataclass(frozen=True)
class DeltaRule(MatrixState[DeltaInputs]):
    """The matrices of a gated delta rule, ``[D, V]`` for each head of values.

    Attributes:
        key_dim, value_dim: sizes of a key and of a value.
    """

    key_dim: int
    value_dim: int
    name: ClassVar[str] = "delta_rule"
    join: ClassVar[Join] = Join(torch.bmm, torch.baddbmm)
    chunk_launches: ClassVar[float] = 170.0

    @property
    def matrix(self) -> tuple[int, int]:
        """Sizes of a key and of a value."""
        return self.key_dim, self.value_dim

    @property
    def chain_products(self) -> float:
        """Products of two factors, and of factors with states, first in groups."""
        return 2.0 * self.num_heads * self.key_dim**2 * (self.key_dim + 2 * self.value_dim)

    def elements(self, chunk_len: int) -> ChunkElements:
        """Return the numbers of chunks: five keys, three values and six products for each token.

        Products are those of ``_solve``: decays, the system, the inverse before and after, and two between.
        """
        key, value = self.key_dim, self.value_dim
        in_chunk = 5 * key + 3 * value + 6 * chunk_len
        counts = key**2, 2 * key + value + 2, in_chunk
        return ChunkElements(*(self.num_heads * each for each in counts))

    @property
    def kept(self) -> tuple[int, ...]:
        """For each head a key, a value, decay and strength."""
        return self.num_heads, self.key_dim + self.value_dim + 2

    def keep(self, inputs: DeltaInputs) -> torch.Tensor:
        """Return all but queries, ``[N, M, H, D + V + 2]``."""
        return torch.cat([inputs.k, inputs.v, inputs.g[..., None], inputs.beta[..., None]], dim=-1)

    def apply(self, memory: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return the matrices ``[N, H, D, V]`` behind one token of each row."""
        k, v, beside = kept.split([self.key_dim, self.value_dim, 2], dim=-1)
        g, beta = beside.unbind(-1)
        memory, k_NHD1 = memory * g.exp()[..., None, None], k[..., None]
        change = (v - (memory * k_NHD1).sum(dim=-2)) * beta[..., None]
        return memory + k_NHD1 * change[:, :, None]

    def read(self, memory: torch.Tensor, inputs: DeltaInputs) -> torch.Tensor:
        """Return what queries find, ``[N, H, V]``."""
        return (memory * inputs.q[..., None]).sum(dim=-2)

    def attend_in_chunks(
        self, inputs: DeltaInputs, state: tuple[torch.Tensor, ...], step: Step, found: ChunkStep
    ) -> torch.Tensor:
        """Return what all tokens read, ``[C * T, H, V]``, and update the matrices of rows."""
        # Chunks of each head: [C * H, T, ...].
        q, k, v, g, beta = (
            x.transpose(1, 2).contiguous().flatten(0, 1) for x in self._in_chunks(inputs, found)
        )
        total = g.cumsum(dim=-1)
        place = torch.arange(found.chunk_len, dtype=torch.int32, device=q.device)
        is_past = place[:, None] >= place
        decay = torch.where(is_past, total[..., None] - total[:, None], float("-inf")).exp()
        k_beta, reached, turned = k * beta[..., None], total.exp()[..., None], k.transpose(-1, -2)
        system = torch.bmm(k_beta, turned) * decay
        solved = _solve(system, torch.cat([v * beta[..., None], k_beta * reached], dim=-1), place)
        new, read = solved.split([self.value_dim, self.key_dim], dim=-1)
        seen = torch.bmm(q, turned) * decay
        q, last = q * reached, total[..., -1:]
        kept, whole = (k * (last - total).exp()[..., None]).transpose(-1, -2), last.exp()[..., None]
        accepted = self._accepted(state, step)
        if q.device.type == "cpu":
            output, after = self._one_by_one((q, seen, new, read, kept, whole), accepted, found)
        else:
            dim = torch.arange(self.key_dim, dtype=torch.int32, device=q.device)
            factor = torch.where(dim[:, None] == dim, whole, 0.0) - torch.bmm(kept, read)
            maps = self._by_chunk(factor), self._by_chunk(torch.bmm(kept, new))
            before, after = self._chained(*maps, accepted, found)
            begin = before.flatten(0, 1)
            change = new - torch.bmm(read, begin)
            output = self._by_chunk(torch.bmm(q, begin) + torch.bmm(seen, change))
        self._write(after, state[0], found.rows)
        return output.transpose(1, 2).flatten(0, 1)

    def _one_by_one(
        self, parts: tuple[torch.Tensor, ...], accepted: torch.Tensor, found: ChunkStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks in order, whose matrices stay in the cache: outputs of each, and matrices of rows behind."""
        memory, outputs = self._by_row(accepted), []
        rows = self._targets(found.row, memory).split(1)
        for row, q, seen, new, read, kept, whole in zip(rows, *map(self._by_chunk, parts)):
            before = memory.index_select(0, row)[0]
            change = new - torch.matmul(read, before)
            outputs.append(torch.matmul(q, before) + torch.matmul(seen, change))
            after = before * whole + torch.matmul(kept, change)
            memory.index_copy_(0, row, after[None])
        return torch.stack(outputs), memory[:-1]

    def _by_chunk(self, x: torch.Tensor) -> torch.Tensor:
        """``[C * H, ...]`` as ``[C, H, ...]``."""
        return x.unflatten(0, (-1, self.num_heads))


def _solve(system: torch.Tensor, right: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Solve for what tokens of a chunk write: the system's strictly lower part, with ones on the diagonal.

    Args:
        system: ``[C * H, T, T]``.
        right: ``[C * H, T, X]``.
        place: of each token in a chunk, ``[T]``; T is a power of 2.
    """
    if system.device.type == "cpu":
        return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    # Inverses of blocks on the diagonal, twice as large each time: beside those of two blocks, only what is
    # below the first and left of the second is missing.
    inverse = torch.where(place[:, None] == place, 1.0, torch.zeros_like(system))
    width = 1
    while width < len(place):
        block, both = (torch.div(place, each, rounding_mode="floor") for each in (width, 2 * width))
        is_beside = torch.logical_and(both[:, None] == both, block[:, None] > block)
        beside = torch.where(is_beside, system, 0.0)
        inverse = torch.baddbmm(inverse, torch.bmm(inverse, beside), inverse, alpha=-1.0)
        width *= 2
    return torch.bmm(inverse, right)
