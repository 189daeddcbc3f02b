"""State spaces with one decay for each head (Mamba 2): a row's state is a matrix for each head.

A token with input x, step d, decay exp(d a) and vectors b and c turns the state S into exp(d a) S + d x b',
and reads S c. Inside a chunk tokens meet as in causal attention, with the decay between two tokens as a
factor; what is before it comes by the state, which is written once a step.

Shapes: Q query tokens, N rows, C chunks of T tokens, H heads, G groups of heads that share b and c,
P size of a head's input, S size of its b and c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch.nn.functional import softplus

from kernels_ref.recurrent.matrix_state import ChunkElements, ChunkStep, Join, MatrixState
from kernels_ref.step import Step


class ScanInputs(NamedTuple):
    """Inputs of a scan for some tokens, float32.

    Attributes:
        x: times their steps, ``[..., H, P]``.
        b, c: ``[..., G, S]``.
        g: decay in logarithms, ``[..., H]``.
    """

    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    g: torch.Tensor


@dataclass(frozen=True)
class StateSpace(MatrixState[ScanInputs]):
    """The matrices of a state space, ``[P, S]`` for each head.

    Attributes:
        num_groups: of heads that share b and c (G).
        head_dim: size of a head's input (P).
        state_dim: size of its b and c (S).
        limits: least and largest step of a token.
    """

    num_groups: int
    head_dim: int
    state_dim: int
    limits: tuple[float, float] = (0.0, float("inf"))
    name: ClassVar[str] = "state_space"
    join: ClassVar[Join] = Join(torch.mul, torch.addcmul)
    chunk_launches: ClassVar[float] = 100.0

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_heads % self.num_groups:
            raise ValueError(
                "expected heads in groups of one size, got "
                f"{self.num_heads} heads in {self.num_groups} groups"
            )

    @property
    def matrix(self) -> tuple[int, int]:
        """Sizes of an input and of b."""
        return self.head_dim, self.state_dim

    def elements(self, chunk_len: int) -> ChunkElements:
        """Return the numbers of chunks: three inputs and products of each head, b, c and their products."""
        of_groups = 2 * self.num_groups * self.state_dim
        heads, inputs = self.num_heads, self.num_heads * self.head_dim
        in_chunk = 3 * (inputs + heads * chunk_len) + of_groups + self.num_groups * chunk_len
        return ChunkElements(heads, inputs + of_groups + heads, in_chunk)

    @property
    def _sizes(self) -> list[int]:
        """Numbers of x, b and g of a token."""
        return [self.num_heads * self.head_dim, self.num_groups * self.state_dim, self.num_heads]

    @property
    def kept(self) -> tuple[int, ...]:
        """x, b and g."""
        return (sum(self._sizes),)

    def inputs(
        self,
        x: torch.Tensor,
        step: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> ScanInputs:
        """Return the inputs of tokens from those of a module.

        Args:
            x: ``[Q, H, P]``.
            step: before softplus, ``[Q, H]``.
            a: negative, ``[H]``.
            b, c: ``[Q, G, S]``.
            bias: of steps, ``[H]``.
        """
        step = step.float() if bias is None else step.float() + bias.float()
        low, high = self.limits
        size = softplus(step).clamp(low, None if high == float("inf") else high)
        return ScanInputs(x.float() * size[..., None], b.float(), c.float(), size * a.float())

    def keep(self, inputs: ScanInputs) -> torch.Tensor:
        """Return all but c, ``[N, M, H * P + G * S + H]``."""
        return torch.cat([inputs.x.flatten(2), inputs.b.flatten(2), inputs.g], dim=-1)

    def apply(self, memory: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return the matrices ``[N, H, P, S]`` behind one token of each row."""
        x, b, g = kept.split(self._sizes, dim=-1)
        x_NGKP1 = x.unflatten(-1, (self.num_groups, -1, self.head_dim))[..., None]
        b_NG11S = b.unflatten(-1, (self.num_groups, 1, 1, -1))
        decay_NGK11 = g.exp().unflatten(-1, (self.num_groups, -1))[..., None, None]
        return torch.addcmul(
            memory.unflatten(1, (self.num_groups, -1)) * decay_NGK11, x_NGKP1, b_NG11S
        ).flatten(1, 2)

    def read(self, memory: torch.Tensor, inputs: ScanInputs) -> torch.Tensor:
        """Return what c finds, ``[N, H, P]``."""
        of_groups = memory.unflatten(1, (self.num_groups, -1)).flatten(2, 3)
        return torch.matmul(of_groups, inputs.c[..., None]).view(*memory.shape[:-1])

    def attend_in_chunks(
        self, inputs: ScanInputs, state: tuple[torch.Tensor, ...], step: Step, found: ChunkStep
    ) -> torch.Tensor:
        """Return what all tokens read, ``[C * T, H, P]``, and update the matrices of rows."""
        # K heads of a group: [C, H, T, P], [C, G, T, S], [C, G, T, S], [C, H, T]
        x, b, c, g = (each.transpose(1, 2).contiguous() for each in self._in_chunks(inputs, found))
        total = g.cumsum(dim=-1)
        place = torch.arange(found.chunk_len, dtype=torch.int32, device=g.device)
        is_past = place[:, None] >= place
        decay = torch.where(is_past, total[..., None] - total[..., None, :], float("-inf")).exp()
        scores_CGTT = torch.matmul(c, b.transpose(-1, -2))
        weights = decay.unflatten(1, (self.num_groups, -1)) * scores_CGTT[:, :, None]
        output = torch.matmul(weights.flatten(1, 2), x)
        last = total[..., -1:]
        # [C, G, K * P, T]
        kept = self._by_group((x * (last - total).exp()[..., None]).transpose(-1, -2))
        whole, reached = last.exp()[..., None], total.exp()[..., None]
        accepted, turned = self._accepted(state, step), c.transpose(-1, -2)
        if g.device.type == "cpu":
            # A chunk's matrices stay in the cache.
            memory, reads = self._by_row(accepted), []
            for number, row in enumerate(self._targets(found.row, memory).split(1)):
                before = memory.index_select(0, row)
                reads.append(torch.matmul(self._by_group(before)[0], turned[number]))
                added = torch.matmul(kept[number], b[number]).view_as(before)
                memory.index_copy_(0, row, torch.addcmul(added, before, whole[number]))
            read, after = torch.stack(reads), memory[:-1]
        else:
            added = torch.matmul(kept, b).view(len(x), self.num_heads, *self.matrix)
            before, after = self._chained(whole, added, accepted, found)
            read = torch.matmul(self._by_group(before), turned)
        self._write(after, state[0], found.rows)
        read_CHTP = read.view(*x.shape[:2], x.shape[3], -1).transpose(-1, -2)
        return torch.addcmul(output, read_CHTP, reached).transpose(1, 2).flatten(0, 1)

    def _by_group(self, x: torch.Tensor) -> torch.Tensor:
        """``[C, H, P, ...]`` as ``[C, G, K * P, ...]``."""
        return x.unflatten(1, (self.num_groups, -1)).flatten(2, 3)
