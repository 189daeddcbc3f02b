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

from kernels_ref.recurrent.matrix_state import ChunkStep, MatrixState
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
    device_chunk: ClassVar[int] = 16

    @property
    def matrix(self) -> tuple[int, int]:
        """Sizes of a key and of a value."""
        return self.key_dim, self.value_dim

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
        if self.slack:
            self._write(self._accepted(state, step), state[0], found.rows)
        size, rows, memory = found.chunk_len, self._targets(found.row, state[0]), state[0]
        # [C, H, T, ...]
        q, k, v, g, beta = (x.transpose(1, 2).contiguous() for x in self._in_chunks(inputs, found))
        total = g.cumsum(dim=-1)
        place = torch.arange(size, dtype=torch.int32, device=q.device)
        is_past = place[:, None] >= place
        decay = torch.where(is_past, total[..., None] - total[..., None, :], float("-inf")).exp()
        k_beta, reached = k * beta[..., None], total.exp()[..., None]
        system = torch.matmul(k_beta, k.transpose(-1, -2)) * decay
        solved = _solve(system, torch.cat([v * beta[..., None], k_beta * reached], dim=-1), place)
        new, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        seen = torch.matmul(q, k.transpose(-1, -2)) * decay
        q, last = q * reached, total[..., -1:]
        kept = (k * (last - total).exp()[..., None]).transpose(-1, -2)
        whole = last.exp()[..., None]
        outputs = []
        for number, row in enumerate(rows.split(1)):
            before = torch.where(found.goes_on[number], memory.index_select(0, row)[0], 0.0)
            change = new[number] - torch.matmul(read[number], before)
            outputs.append(torch.matmul(q[number], before) + torch.matmul(seen[number], change))
            after = before * whole[number] + torch.matmul(kept[number], change)
            memory.index_copy_(0, row, after[None])
        return torch.stack(outputs).transpose(1, 2).flatten(0, 1)


def _solve(system: torch.Tensor, right: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Solve for what tokens of a chunk write: the system's strictly lower part, with ones on the diagonal.

    Args:
        system: ``[C, H, T, T]``.
        right: ``[C, H, T, X]``.
        place: of each token in a chunk, ``[T]``.
    """
    if system.device.type == "cpu":
        return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    system = torch.where(place[:, None] > place, system, 0.0)
    rows = right[..., :1, :]
    for number in range(1, len(place)):
        known = torch.matmul(system[..., number : number + 1, :number], rows)
        rows = torch.cat([rows, right[..., number : number + 1, :] - known], dim=-2)
    return rows
