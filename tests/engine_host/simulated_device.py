"""A device that holds, in every slot, which prefix of which tokens was written there.

The key and value of a token depend on all tokens up to it and on its position, so a slot holds exactly
that: ``(position, checksum of the tokens up to it)``. A step reads what attention would read and fails
if a slot holds anything else.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from hpu_duo.engine.step_plan import ScheduledRow, StepPlan
from hpu_duo.kv.pool import BlockCopy, BlockSwap, Copy, RowCopy
from hpu_duo.request import Request, TokenLimits
from hpu_duo.sampling.params import SamplingParams

EOS = 0
VOCAB_SIZE = 13
SINK, RECENT = 2, 3

Slot = tuple[int, int] | None


def make_request(
    request_id: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    max_tokens: int | None = 4,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    max_model_len: int = 64,
    seed: int = 0,
    decoded_prompt_tokens: int = 0,
    cache_salt: str | None = None,
    priority: int = 0,
    user: str | None = None,
    expected_tokens: int | None = None,
) -> Request:
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids,
        decoded_prompt_tokens=decoded_prompt_tokens,
        cache_salt=cache_salt,
        priority=priority,
        user=user,
        expected_tokens=expected_tokens,
    )
    limits = TokenLimits(max_model_len, frozenset({EOS}), VOCAB_SIZE)
    return Request(request_id, prompt, params, limits, sampling_seed=seed)


def next_token(tokens: Sequence[int], seed: int) -> int:
    """The token that the model samples after these."""
    return zlib.crc32(bytes(int(token) for token in tokens) + seed.to_bytes(2, "little")) % VOCAB_SIZE


def outputs_alone(request: Request) -> list[int]:
    """All outputs of the request if nothing else ran, from the rules alone."""
    prompt, params = request.prompt_token_ids.tolist(), request.params
    most = request.limits.max_model_len - len(prompt)
    if params.max_tokens is not None:
        most = min(most, params.max_tokens)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    outputs: list[int] = []
    while len(outputs) < most:
        outputs.append(next_token(prompt + outputs, request.sampling_seed))
        if outputs[-1] in stops and len(outputs) >= params.min_tokens:
            break
    return outputs


class SimulatedDevice:
    """Both stores of one imaginary layer with one retrieval and one streaming head."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        *,
        uses_blocks: bool,
        uses_rows: bool = True,
        slack: int = 0,
    ) -> None:
        self.uses_blocks, self.uses_rows = uses_blocks, uses_rows
        self.turning = RECENT + slack
        self.block_size = block_size
        self.blocks: list[list[Slot]] = [[None] * block_size for _ in range(num_blocks)]
        self.rings: list[list[Slot]] = [[None] * (SINK + self.turning) for _ in range(num_rows)]

    def run(self, plan: StepPlan) -> list[int]:
        """Carry out the moves and the rows; return a token per row that wants one."""
        self.carry_out(plan.moves)
        for row in plan.rows:
            if row.num_new_tokens > 1 and row.start > 0:
                self._read_ring(row, query=row.start, end=row.start)
        for row in plan.rows:
            self._write(row)
        for row in plan.rows:
            self._read_blocks(row)
            if row.num_new_tokens == 1:
                self._read_ring(row, query=row.start, end=row.end)
        return [
            next_token(row.request.tokens[: row.end].tolist(), row.request.sampling_seed)
            for row in plan.sampled_rows
        ]

    def carry_out(self, copies: Sequence[Copy]) -> None:
        """Copy blocks and rings, one copy after the other."""
        for move in copies:
            match move:
                case BlockCopy(src, dst):
                    self.blocks[dst] = list(self.blocks[src])
                case BlockSwap(one, other):
                    self.blocks[one], self.blocks[other] = self.blocks[other], self.blocks[one]
                case RowCopy(src, dst):
                    self.rings[dst] = list(self.rings[src])

    def fill(self, tokens: Sequence[int], first: int, blocks: Sequence[int], row: int | None) -> None:
        """Write what a request with these tokens has written, from block ``first`` on, and its ring."""
        text = np.array(tokens, np.int32)
        slots: list[Slot] = [(n, zlib.crc32(text[: n + 1].tobytes())) for n in range(len(text))]
        for ordinal, block in enumerate(blocks, start=first):
            self.blocks[block] = slots[ordinal * self.block_size : (ordinal + 1) * self.block_size]
        for position, slot in enumerate(slots if row is not None else ()):
            assert row is not None, "there is a ring to write"
            self.rings[row][self._ring_index(position)] = slot

    def _slot(self, request: Request, position: int) -> Slot:
        return position, zlib.crc32(request.tokens[: position + 1].astype(np.int32).tobytes())

    def _write(self, row: ScheduledRow) -> None:
        for position in range(row.start, row.end):
            slot = self._slot(row.request, position)
            self.rings[row.ring_row][self._ring_index(position)] = slot
            if self.uses_blocks:
                block = int(row.request.block_table[position // self.block_size])
                self.blocks[block][position % self.block_size] = slot

    def _read_blocks(self, row: ScheduledRow) -> None:
        if not self.uses_blocks:
            assert row.request.num_blocks == 0
            return
        assert row.request.num_blocks * self.block_size >= row.end
        for position in range(row.end):
            block = int(row.request.block_table[position // self.block_size])
            found = self.blocks[block][position % self.block_size]
            assert found == self._slot(row.request, position), f"{row} reads {found} at {position}"

    def _read_ring(self, row: ScheduledRow, query: int, end: int) -> None:
        if not self.uses_rows:
            return
        for position in range(end):
            if position < SINK or position > query - RECENT:
                found = self.rings[row.ring_row][self._ring_index(position)]
                assert found == self._slot(row.request, position), f"{row} reads {found} at {position}"

    def _ring_index(self, position: int) -> int:
        return position if position < SINK else SINK + (position - SINK) % self.turning
