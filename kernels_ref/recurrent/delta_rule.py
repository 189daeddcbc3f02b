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

from kernels_ref.recurrent.kind import Recurrence
from kernels_ref.rows import RowTensor
from kernels_ref.step import PlanKey, Step, StepParts, StepTensors
from kernels_ref.units import gather, index_dtype

_CHUNKS = (64, 32, 16)


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

    def at(self, index: torch.Tensor) -> DeltaInputs:
        """Return those of some tokens."""
        return DeltaInputs(*(gather(x, index) for x in self))


class DeltaStep(NamedTuple):
    """Places of tokens and rows in a step.

    Attributes:
        rows: of the step, -1 for one without new tokens, ``[N]``.
        token: of each chunk, Q where it has no more, ``[C * T]``.
        row: of each chunk, -1 for padding, ``[C]``.
        goes_on: whether a row has a state before the chunk, ``[C]``.
        place: of each token in the results of chunks, behind them for padding, ``[Q]``.
        chunk_len: T; 0, with empty tensors of chunks, in steps of decodes.
    """

    rows: torch.Tensor
    token: torch.Tensor
    row: torch.Tensor
    goes_on: torch.Tensor
    place: torch.Tensor
    chunk_len: int


@dataclass(frozen=True)
class DeltaRule(Recurrence):
    """The matrices of a gated delta rule, in float32.

    With slack, a row's matrices are those before the last decode, beside the inputs of its tokens: the next
    step applies what was accepted first.

    Attributes:
        num_heads: heads of values.
        key_dim, value_dim: sizes of a key and of a value.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    name: ClassVar[str] = "delta_rule"

    @property
    def tensors(self) -> tuple[RowTensor, ...]:
        """The matrices, ``[H, D, V]``; with slack the tokens in them, and inputs of ``slack + 1`` tokens."""
        memory = RowTensor("memory", (self.num_heads, self.key_dim, self.value_dim), torch.float32)
        if not self.slack:
            return (memory,)
        size = self.key_dim + self.value_dim + 2
        inputs = RowTensor("inputs", (self.slack + 1, self.num_heads, size), torch.float32)
        return memory, RowTensor("length", (), torch.int32), inputs

    @property
    def key(self) -> PlanKey:
        """The same for all sizes."""
        return (self.name,)

    def prepare(self, parts: StepParts, tensors: StepTensors) -> DeltaStep:
        """Derive places of tokens; see ``DeltaStep``."""
        t, num_tokens, num_rows = tensors, len(tensors.row), len(tensors.row_start)
        number = torch.arange(num_rows, dtype=torch.int32, device=t.row.device)
        none = torch.full_like(number, -1)
        rows = torch.where(t.row_num_new > 0, number, none)
        if not parts.causal:
            return DeltaStep(rows, number[:0], number[:0], number[:0] > 0, number[:0], 0)
        sizes = _CHUNKS if t.row.device.type == "cpu" else _CHUNKS[-1:]
        size = next((each for each in sizes if each * num_rows <= num_tokens), sizes[-1])
        num_chunks = num_tokens // size + min(num_rows, num_tokens)
        counts = torch.div(t.row_num_new + (size - 1), size, rounding_mode="floor")
        # A sum over rows before each, by a mask: exact, and no scan.
        first = torch.where(number[None] < number[:, None], counts[None], 0).sum(dim=1, dtype=torch.int32)
        chunk = torch.arange(num_chunks, dtype=torch.int32, device=t.row.device)
        row = ((first + counts)[None] <= chunk[:, None]).sum(dim=1, dtype=torch.int32)
        zero = t.row_start.new_zeros(1)
        firsts, news, begins, starts = (
            torch.cat([x, zero]) for x in (first, t.row_num_new, t.row_query_start, t.row_start)
        )
        within = chunk - gather(firsts, row)
        local = within[:, None] * size + torch.arange(size, dtype=torch.int32, device=t.row.device)
        is_used = local < gather(news, row)[:, None]
        token = torch.where(is_used, gather(begins, row)[:, None] + local, num_tokens).flatten()
        goes_on = torch.logical_and((gather(starts, row) > 0) | (within > 0), row < num_rows)
        place = gather(firsts, t.row) * size + t.positions - gather(starts, t.row)
        place = torch.where(t.row < num_rows, place, num_chunks * size)
        return DeltaStep(rows, token, torch.where(row < num_rows, row, -1), goes_on, place, size)

    def attend(self, inputs: DeltaInputs, state: tuple[torch.Tensor, ...], step: Step) -> torch.Tensor:
        """Return what each token reads, float32 ``[Q, H, V]``, and update the state.

        Args:
            inputs: of the new tokens, ``[Q, ...]``.
            state: ``tensors`` of all rows, ``[R + 1, ...]``, written in place.
        """
        found: DeltaStep = step.plans[self.key]
        rows = self._targets(found.rows, state[0])
        if found.chunk_len:
            if self.slack:
                self._write(self._accepted(state, step), state[0], rows)
                end = step.tensors.row_start + step.tensors.row_num_new
                self._write(end, state[1], rows)
            output, place = self._chunks(inputs, state[0], found), found.place
        else:
            output, place = self._decodes(inputs, state, step, rows), step.decode_slot
        return gather(torch.cat([output, output.new_zeros(1, *output.shape[1:])]), place)

    @staticmethod
    def _targets(rows: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows that are written, the null row for -1."""
        return torch.where(rows < 0, len(tensor) - 1, rows).to(index_dtype(tensor.device))

    @staticmethod
    def _write(data: torch.Tensor, tensor: torch.Tensor, rows: torch.Tensor) -> None:
        tensor.index_copy_(0, rows, data)

    def _accepted(self, state: tuple[torch.Tensor, ...], step: Step) -> torch.Tensor:
        """The matrices of rows before the step: with slack, those in the store and the inputs behind them."""
        start = step.tensors.row_start
        num_rows = len(start)
        memory = torch.where(start[:, None, None, None] > 0, state[0][:num_rows], 0.0)
        if self.slack:
            length, (k, v, beside) = state[1][:num_rows], self._split(state[2][:num_rows])
            count = torch.where(start > 0, start - length, 0)
            for number in range(self.slack + 1):
                after = _advance(memory, k[:, number], v[:, number], *beside[:, number].unbind(-1))
                memory = torch.where(count[:, None, None, None] > number, after, memory)
        return memory

    def _split(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values, and decay beside strength."""
        k, v, beside = inputs.split([self.key_dim, self.value_dim, 2], dim=-1)
        return k, v, beside

    def _decodes(
        self, inputs: DeltaInputs, state: tuple[torch.Tensor, ...], step: Step, rows: torch.Tensor
    ) -> torch.Tensor:
        """Some tokens of each row (M): ``[N * M, H, V]``."""
        q, k, v, g, beta = (x.unflatten(0, (-1, step.decode_len)) for x in inputs.at(step.row_token))
        before = memory = self._accepted(state, step)
        outputs = []
        for number in range(step.decode_len):
            memory = _advance(memory, *(x[:, number] for x in (k, v, g, beta)))
            outputs.append((memory * q[:, number, ..., None]).sum(dim=-2))
        if not self.slack:
            self._write(memory, state[0], rows)
        else:
            self._write(before, state[0], rows)
            self._write(step.tensors.row_start, state[1], rows)
            new = torch.cat([k, v, g[..., None], beta[..., None]], dim=-1)
            missing = self.slack + 1 - step.decode_len
            new = torch.cat([new, new.new_zeros(len(new), missing, *new.shape[2:])], dim=1)
            self._write(new, state[2], rows)
        return torch.stack(outputs, dim=1).flatten(0, 1)

    def _chunks(self, inputs: DeltaInputs, state: torch.Tensor, found: DeltaStep) -> torch.Tensor:
        """All tokens, chunk after chunk: ``[C * T, H, V]``."""
        size, rows = found.chunk_len, self._targets(found.row, state)
        padded = DeltaInputs(*(torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in inputs))
        # [C, H, T, ...]
        q, k, v, g, beta = (
            x.unflatten(0, (-1, size)).transpose(1, 2).contiguous() for x in padded.at(found.token)
        )
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
            before = torch.where(found.goes_on[number], state.index_select(0, row)[0], 0.0)
            change = new[number] - torch.matmul(read[number], before)
            outputs.append(torch.matmul(q[number], before) + torch.matmul(seen[number], change))
            after = before * whole[number] + torch.matmul(kept[number], change)
            state.index_copy_(0, row, after[None])
        return torch.stack(outputs).transpose(1, 2).flatten(0, 1)


def _advance(
    memory: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The matrices ``[N, H, D, V]`` behind one token of each row."""
    memory, k_NHD1 = memory * g.exp()[..., None, None], k[..., None]
    change = (v - (memory * k_NHD1).sum(dim=-2)) * beta[..., None]
    return memory + k_NHD1 * change[:, :, None]


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
