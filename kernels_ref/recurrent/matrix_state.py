"""States of a matrix for each head: decodes token by token, prompts in chunks of one row each.

With slack, a row's matrices are those before the last decode, beside the inputs of its tokens: the next step
applies what was accepted first.

Shapes: Q query tokens, N rows, C chunks of T tokens, H heads; a matrix is ``[A, B]``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from kernels_ref.chunks import even_size, num_parts
from kernels_ref.recurrent.kind import OPERATIONS_PER_ELEMENT, Recurrence, RecurrenceCounts
from kernels_ref.rows import RowTensor
from kernels_ref.step import PlanKey, Step, StepParts, StepTensors
from kernels_ref.units import gather, index_dtype

_CHUNKS = (64, 32, 16)
_DECODE_LAUNCHES, _REPLAY_LAUNCHES = 32.0, 12.0
"""Operators of a layer: of a decode, and of each token that is applied again."""
_PASSES = 3.0
"""Passes over the matrices of a chunk: they are made, joined in groups, and joined with earlier groups."""

_GROUP = 8
"""Most states that are computed one after the other; more of them are in groups, side by side."""

_FLOAT32 = 4
_INPUT_COPIES = 3
"""Copies of the inputs of tokens behind those in chunks: in float32, and in the module, before and after its
convolution."""

Inputs = TypeVar("Inputs", bound=tuple[torch.Tensor, ...])
"""A named tuple of tensors ``[Q, ...]``."""


class ChunkStep(NamedTuple):
    """Places of tokens and rows in a step.

    Attributes:
        rows: of the step, -1 for one without new tokens, ``[N]``.
        token: of each chunk, Q where it has no more, ``[C * T]``.
        row: of each chunk, -1 for padding, ``[C]``.
        is_first: whether a row's chunk is its first in the step, or is padding, ``[C]``.
        last: number of each row's last chunk, 0 for a row without new tokens, ``[N]``.
        place: of each token in the results of chunks, behind them for padding, ``[Q]``.
        chunk_len: T; 0, with empty tensors of chunks, in steps of decodes.
    """

    rows: torch.Tensor
    token: torch.Tensor
    row: torch.Tensor
    is_first: torch.Tensor
    last: torch.Tensor
    place: torch.Tensor
    chunk_len: int


class ChunkElements(NamedTuple):
    """Numbers that chunks have at the peak.

    Attributes:
        factor: of a chunk's factor.
        of_token: of a token's inputs.
        in_chunk: of a token of a chunk: its inputs there, what follows from them, and products of tokens.
    """

    factor: int
    of_token: int
    in_chunk: int


class Join(NamedTuple):
    """Products by which a map applies to a state, or to a map before it.

    Attributes:
        product: of two factors ``[B, ...]``, the later one first.
        add: to what is added, the product of a factor and a state.
    """

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _chunks_of(num_tokens: int, num_rows: int) -> tuple[int, int]:
    """Return the length of chunks in a step with prompts (T), and their number (C)."""
    size = next((each for each in _CHUNKS if each * num_rows <= num_tokens), _CHUNKS[-1])
    return size, num_tokens // size + min(num_rows, num_tokens)


def states_of(factor: torch.Tensor, added: torch.Tensor, is_first: torch.Tensor, join: Join) -> torch.Tensor:
    """Return the state behind each map, the factor times the state behind the map before it, plus a matrix.

    Operators grow with the logarithm of the number of maps. A row's NaN reaches no other row.

    Args:
        factor: ``[C, H, ...]``.
        added: ``[C, H, A, B]``.
        is_first: whether a map is a row's first, behind which the state is what it adds, ``[C]``; the first
            of all is one.
    Returns:
        States ``[C, H, A, B]``.
    """
    total = len(added)
    size = even_size(total, _GROUP)
    groups, shape = num_parts(total, size), added.shape[1:]
    if missing := groups * size - total:
        parts = factor, added, is_first
        factor, added, is_first = (torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) for x in parts)
    # The places in a group, each of all groups: [groups * H, ...].
    factors, adds = (
        x.unflatten(0, (groups, size)).transpose(0, 1).flatten(1, 2).unbind() for x in (factor, added)
    )
    by_group = is_first.unflatten(0, (groups, size))
    firsts = by_group.t()[:, :, None].expand(-1, -1, shape[0]).reshape(size, -1, 1, 1).unbind()

    def behind(place: int, before: torch.Tensor) -> torch.Tensor:
        return torch.where(firsts[place], adds[place], join.add(adds[place], factors[place], before))

    if groups == 1:
        before, later = adds[0], 1
    else:
        whole, before, later = factors[0], adds[0], 0
        for place in range(1, size):
            whole, before = join.product(factors[place], whole), behind(place, before)
        maps = whole.unflatten(0, (groups, -1)), before.unflatten(0, (groups, -1))
        ends = states_of(*maps, by_group.any(dim=1), join)
        before = torch.cat([ends[:1], ends[:-1]]).flatten(0, 1)
    states = [before][:later]
    for place in range(later, size):
        before = behind(place, before)
        states.append(before)
    return torch.stack(states).unflatten(1, (groups, -1)).transpose(0, 1).reshape(-1, *shape)[:total]


@dataclass(frozen=True)
class MatrixState(Recurrence, Generic[Inputs]):
    """A matrix of each head, in float32.

    Attributes:
        num_heads: matrices of a row (H).
    """

    num_heads: int

    join: ClassVar[Join]
    chunk_launches: ClassVar[float]
    """Operators that compute chunks, at 4,096 tokens."""

    @property
    @abstractmethod
    def matrix(self) -> tuple[int, int]:
        """Sizes of a matrix (A, B)."""

    @property
    @abstractmethod
    def kept(self) -> tuple[int, ...]:
        """Shape of what is kept of a token that can be taken back."""

    @property
    def tensors(self) -> tuple[RowTensor, ...]:
        """The matrices; with slack the tokens in them, and what is kept of ``num_kept`` tokens."""
        memory = RowTensor("memory", (self.num_heads, *self.matrix), torch.float32)
        if not self.slack:
            return (memory,)
        inputs = RowTensor("inputs", (self.num_kept, *self.kept), torch.float32)
        return memory, RowTensor("length", (), torch.int32), inputs

    @property
    def chain_products(self) -> float:
        """Operations of matrix products that join a chunk with those before it."""
        return 0.0

    @abstractmethod
    def elements(self, chunk_len: int) -> ChunkElements:
        """Return the numbers of chunks of this length (T)."""

    @property
    def num_kept(self) -> int:
        """Tokens of a row behind its matrices: those of a decode, and drafts of the next one."""
        return self.slack + 1 + (self.slack if self.drafts else 0)

    @property
    def key(self) -> PlanKey:
        """The same for all sizes."""
        return (self.name,)

    @abstractmethod
    def keep(self, inputs: Inputs) -> torch.Tensor:
        """Return what changes a state, of some tokens of each row: ``[N, M, *kept]``."""

    @abstractmethod
    def apply(self, memory: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return the matrices ``[N, H, A, B]`` behind one token of each row, of what was kept of it."""

    @abstractmethod
    def read(self, memory: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Return what one token of each row reads, ``[N, H, ...]``."""

    @abstractmethod
    def attend_in_chunks(
        self, inputs: Inputs, state: tuple[torch.Tensor, ...], step: Step, found: ChunkStep
    ) -> torch.Tensor:
        """Return what all tokens read, ``[C * T, H, ...]``, and update the matrices of rows."""

    def count(self, num_tokens: Any, num_rows: Any, *, has_prompts: bool) -> RecurrenceCounts:
        """Count chunks as they are joined on an HPU, in steps with prompts.

        With slack the tokens of the last decode are applied again.
        """
        elements = self.num_heads * math.prod(self.matrix)
        again = self.slack + 1 if self.slack else 0
        of_token, replayed = OPERATIONS_PER_ELEMENT * elements, _REPLAY_LAUNCHES * again
        if not has_prompts:
            operations = of_token * (num_tokens + again * num_rows)
            return RecurrenceCounts(num_rows, operations, launches=_DECODE_LAUNCHES + replayed)
        num_chunks = num_tokens / _CHUNKS[0] + num_rows
        # A state is read twice, and changed.
        products = 2.0 * 3 * elements * num_tokens + self.chain_products * num_chunks
        return RecurrenceCounts(
            _PASSES * num_chunks,
            of_token * again * num_rows,
            products,
            self.chunk_launches + replayed,
        )

    def transient_bytes(self, num_tokens: int, num_rows: int, *, has_prompts: bool) -> int:
        """Count all maps of chunks where they are joined in groups; a CPU, which joins none, needs less.

        A matrix is there eight times: of a map, of the row before it, with both selected, at the end of its
        group, in the order of places, as a state, among all states, and in the order of chunks. A factor is
        there four times, up to the order of places.
        """
        matrix = self.num_heads * math.prod(self.matrix)
        size, num_chunks = _chunks_of(num_tokens, num_rows)
        found = self.elements(size)
        inputs = _INPUT_COPIES * found.of_token * num_tokens
        if not has_prompts:
            # Before a token, with its decay, what it adds, and behind it; with slack those of the store too.
            # Inputs are there by row as well, and what is kept of them.
            return _FLOAT32 * ((5 if self.slack else 4) * matrix * num_rows + 2 * inputs)
        group = even_size(max(1, num_chunks), _GROUP)
        groups = num_parts(num_chunks, group)
        maps = num_chunks * (3 * matrix + 2 * found.factor)
        maps += groups * group * (5 * matrix + 2 * found.factor) + groups * (matrix + found.factor)
        of_rows = num_rows * (4 * matrix + found.factor) + matrix
        return _FLOAT32 * (maps + of_rows + inputs + num_chunks * size * found.in_chunk)

    def prepare(self, parts: StepParts, tensors: StepTensors) -> ChunkStep:
        """Derive places of tokens; see ``ChunkStep``."""
        t, num_tokens, num_rows = tensors, len(tensors.row), len(tensors.row_start)
        number = torch.arange(num_rows, dtype=torch.int32, device=t.row.device)
        none = torch.full_like(number, -1)
        rows = torch.where(t.row_num_new > 0, number, none)
        if not parts.causal:
            no_ints, no_flags = number[:0], number[:0] > 0
            return ChunkStep(rows, no_ints, no_ints, no_flags, no_ints, no_ints, 0)
        size, num_chunks = _chunks_of(num_tokens, num_rows)
        counts = torch.div(t.row_num_new + (size - 1), size, rounding_mode="floor")
        # A sum over rows before each, by a mask: exact, and no scan.
        first = torch.where(number[None] < number[:, None], counts[None], 0).sum(dim=1, dtype=torch.int32)
        chunk = torch.arange(num_chunks, dtype=torch.int32, device=t.row.device)
        row = ((first + counts)[None] <= chunk[:, None]).sum(dim=1, dtype=torch.int32)
        zero = t.row_start.new_zeros(1)
        firsts, news, begins, starts = (
            torch.cat([x, zero]) for x in (first, t.row_num_new, t.row_query_start, t.row_start)
        )
        last = torch.where(counts > 0, first + counts - 1, 0)
        within = chunk - gather(firsts, row)
        local = within[:, None] * size + torch.arange(size, dtype=torch.int32, device=t.row.device)
        is_used = local < gather(news, row)[:, None]
        token = torch.where(is_used, gather(begins, row)[:, None] + local, num_tokens).flatten()
        is_first = torch.logical_or(within == 0, row >= num_rows)
        place = gather(firsts, t.row) * size + t.positions - gather(starts, t.row)
        place = torch.where(t.row < num_rows, place, num_chunks * size)
        row = torch.where(row < num_rows, row, -1)
        return ChunkStep(rows, token, row, is_first, last, place, size)

    def attend(self, inputs: Inputs, state: tuple[torch.Tensor, ...], step: Step) -> torch.Tensor:
        """Return what each token reads, float32 ``[Q, H, ...]``, and update the state.

        Args:
            inputs: of the new tokens, ``[Q, ...]``.
            state: ``tensors`` of all rows, ``[R + 1, ...]``, written in place.
        """
        found: ChunkStep = step.plans[self.key]
        if found.chunk_len:
            output, place = self.attend_in_chunks(inputs, state, step, found), found.place
            if self.slack:
                end = step.tensors.row_start + step.tensors.row_num_new
                self._write(end, state[1], found.rows)
        else:
            output, place = self._decodes(inputs, state, step, found.rows), step.decode_slot
        return gather(torch.cat([output, output.new_zeros(1, *output.shape[1:])]), place)

    @staticmethod
    def _targets(rows: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows that are written, the null row for -1."""
        return torch.where(rows < 0, len(tensor) - 1, rows).to(index_dtype(tensor.device))

    def _write(self, data: torch.Tensor, tensor: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows, -1 for the null row."""
        tensor.index_copy_(0, self._targets(rows, tensor), data)

    def _accepted(self, state: tuple[torch.Tensor, ...], step: Step) -> torch.Tensor:
        """The matrices of rows before the step: with slack, those in the store and the inputs behind them."""
        start = step.tensors.row_start
        num_rows = len(start)
        memory = torch.where(start[:, None, None, None] > 0, state[0][:num_rows], 0.0)
        if self.slack:
            length, kept = state[1][:num_rows], state[2][:num_rows]
            count = torch.where(start > 0, start - length, 0)
            for number in range(self.num_kept if step.is_draft else self.slack + 1):
                after = self.apply(memory, kept[:, number])
                memory = torch.where(count[:, None, None, None] > number, after, memory)
        return memory

    def _by_row(self, accepted: torch.Tensor) -> torch.Tensor:
        """Append zeros for padding, whose row is the last one: ``[N + 1, H, A, B]``."""
        return torch.cat([accepted, accepted.new_zeros(1, *accepted.shape[1:])])

    def _chained(
        self, factor: torch.Tensor, added: torch.Tensor, accepted: torch.Tensor, found: ChunkStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return matrices before each chunk, ``[C, H, A, B]``, and of rows behind the step, ``[N, H, A, B]``.

        Args:
            factor, added: of each chunk, see ``states_of``.
            accepted: matrices of rows before the step, ``[N, H, A, B]``.
        """
        by_row = self._by_row(accepted)
        begin = gather(by_row, self._targets(found.row, by_row))
        # Before the chain, so that nothing else of the maps is needed behind it.
        of_last, last = (gather(x, found.last).flatten(0, 1) for x in (added, factor))
        factor, added = (torch.cat([x[:1], x[:-1]]) for x in (factor, added))
        added = torch.where(found.is_first[:, None, None, None], begin, added)
        before = states_of(factor, added, found.is_first, self.join)
        after = self.join.add(of_last, last, gather(before, found.last).flatten(0, 1))
        return before, after.view(accepted.shape)

    def _decodes(
        self, inputs: Inputs, state: tuple[torch.Tensor, ...], step: Step, rows: torch.Tensor
    ) -> torch.Tensor:
        """Some tokens of each row (M): ``[N * M, H, ...]``."""
        tokens = (gather(x, step.row_token).unflatten(0, (-1, step.decode_len)) for x in inputs)
        given = self._made(inputs, tokens)
        kept = self.keep(given)
        before = memory = self._accepted(state, step)
        outputs = []
        for number in range(step.decode_len):
            memory = self.apply(memory, kept[:, number])
            outputs.append(self.read(memory, self._made(given, (x[:, number] for x in given))))
        if step.is_draft:
            self._keep_draft(kept, state, step, rows)
        elif not self.slack:
            self._write(memory, state[0], rows)
        else:
            self._write(before, state[0], rows)
            self._write(step.tensors.row_start, state[1], rows)
            missing = self.num_kept - step.decode_len
            kept = torch.cat([kept, kept.new_zeros(len(kept), missing, *kept.shape[2:])], dim=1)
            self._write(kept, state[2], rows)
        return torch.stack(outputs, dim=1).flatten(0, 1)

    def _keep_draft(
        self, kept: torch.Tensor, state: tuple[torch.Tensor, ...], step: Step, rows: torch.Tensor
    ) -> None:
        """Keep one token of each row behind those that its matrices lack; the matrices stay."""
        num_rows = len(rows)
        place = step.tensors.row_start - state[1][:num_rows]
        number = torch.arange(self.num_kept, dtype=place.dtype, device=place.device)
        is_here = (number == place[:, None]).view(num_rows, -1, *(1,) * len(self.kept))
        self._write(torch.where(is_here, kept, state[2][:num_rows]), state[2], rows)

    def _in_chunks(self, inputs: Inputs, found: ChunkStep) -> Inputs:
        """Inputs in chunks, ``[C, T, ...]``; zeros where a chunk has no token."""
        padded = (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in inputs)
        return self._made(
            inputs, (gather(x, found.token).unflatten(0, (-1, found.chunk_len)) for x in padded)
        )

    @staticmethod
    def _made(like: Inputs, tensors: Iterable[torch.Tensor]) -> Inputs:
        return type(like)(*tensors)
