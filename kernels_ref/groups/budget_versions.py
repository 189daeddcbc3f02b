"""Decode rows of a budget that verify several tokens in a step, of which later ones may be taken back.

A row has C + m - 1 slots for steps of up to m tokens, C of which are occupied. The first token of a step
is there to stay, so it overwrites the slot of its eviction victim. Later ones are written to free slots, and
the slots of their victims are only marked as free. Positions and scores of the slots have m versions: the one
after the token at position ``p`` is number ``p % m``. So a step overwrites the versions of its own tokens
only, and a row with ``n`` tokens in the cache has the version of token ``n - 1``, whatever was taken back.

Shapes: N decode rows, M most tokens of each, P prompt rows, K key/value heads, G query heads of each, D head
size, C tokens that a head stores, S = C + m - 1 slots, X units.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels_ref.groups.budget_chunks import Turn, turned_by_rank
from kernels_ref.groups.budget_slots import FirstToGo, SlotWeights, products
from kernels_ref.groups.column_sums import ChunkStep
from kernels_ref.groups.kv_policy import KVPolicy, SlotView
from kernels_ref.partial import Partial, soften
from kernels_ref.step import DecodeRows, PartInputs, StepTensors
from kernels_ref.units import SlotState, gather, index_dtype

FREE = -1
"""Position of a free slot."""


class VersionStep(NamedTuple):
    """Places of versions of the state, as numbers of all ``X * m`` ones, and tokens of the rows of a step.

    Attributes:
        before: of each decode row before the step, ``[N]``.
        after: behind each token of the decode rows, one of the null unit without a token, ``[N * M]``.
        chunk_before, chunk_after: of the prompt rows, ``[P]``.
        end: position after each token of the decode rows, 0 without a token, int32 ``[N, M]``.
        token_class: of these tokens, int32 ``[N, M]``; empty where no policy marks tokens.
    """

    before: torch.Tensor
    after: torch.Tensor
    chunk_before: torch.Tensor
    chunk_after: torch.Tensor
    end: torch.Tensor
    token_class: torch.Tensor

    @classmethod
    def of(
        cls,
        policy: KVPolicy,
        num_versions: int,
        null_unit: int,
        t: StepTensors,
        rows: DecodeRows,
        chunk: ChunkStep,
    ) -> VersionStep:
        """Derive them once per step.

        Args:
            num_versions: m.
        """
        dtype, end = index_dtype(rows.end.device), rows.end
        number = torch.arange(end.shape[0], dtype=end.dtype, device=end.device)
        unit = torch.where(end > 0, number[:, None], null_unit)

        def version(unit: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
            last = torch.clamp(num_tokens - 1, min=0)
            return (unit * num_versions + last % num_versions).to(dtype).view(-1)

        token_class = end[:0]
        if policy.marks_tokens:
            token_class = gather(t.token_class, rows.token).view(end.shape)
        return cls(
            version(unit[:, 0], end[:, 0] - 1),
            version(unit, end),
            version(chunk.row, chunk.start),
            version(chunk.row, chunk.start + chunk.num_new),
            end,
            token_class,
        )


def read_versions(state: SlotState, place: torch.Tensor, num_heads: int, num_slots: int) -> SlotState:
    """Return versions of positions and scores, ``[len(place), K, S]`` each."""
    position, score = (
        gather(each.view(-1, num_heads * num_slots), place).view(-1, num_heads, num_slots) for each in state
    )
    return SlotState(position, score)


def write_versions(state: SlotState, place: torch.Tensor, new: SlotState) -> None:
    """Write versions ``[len(place), K, S]`` in place."""
    for each, values in zip(state, new):
        lines = values.flatten(1)
        each.view(-1, lines.shape[1]).index_copy_(0, place, lines)


def behind_chunk(kept: SlotState, chunk: ChunkStep, num_slots: int) -> SlotState:
    """Return the state of prompt rows after a chunk, whose tokens have the leading slots, ``[P, K, S]``."""
    position, score = kept
    further = num_slots - position.shape[-1]
    number = torch.arange(num_slots, dtype=position.dtype, device=position.device)
    num_stored = torch.clamp(chunk.start + chunk.num_new, max=position.shape[-1])[:, None, None]
    position, score = (torch.nn.functional.pad(each, (0, further)) for each in (position, score))
    return SlotState(torch.where(number < num_stored, position, FREE), score)


class DecodeTurns(NamedTuple):
    """Decode rows before the tokens of a step attend, one after the other.

    Attributes:
        state: with the first eviction, but without new tokens, ``[N, K, S]`` each.
        written: slot of each new token in each head, int32 ``[N, K, M]``.
        num_stored: tokens that a head may store (C).
    """

    state: SlotState
    written: torch.Tensor
    num_stored: int


def decode_turns(
    policy: KVPolicy, before: SlotState, plan: VersionStep, num_stored: int, victims: FirstToGo
) -> DecodeTurns:
    """Allocate a slot to each new token of the decode rows.

    Args:
        before: positions and scores before the step, ``[N, K, S]``; anything for rows without tokens.
        num_stored: tokens that a head may store (C).
        victims: finds the slot to evict.
    """
    end = plan.end[:, 0, None, None]
    has_tokens = end > 1
    # A row without tokens has what another request has left.
    position = torch.where(has_tokens, before.position, FREE)
    state = SlotState(position, torch.where(has_tokens, before.score, 0.0))
    victim = _victim(policy, state, end, num_stored, victims)
    is_full, number = end > num_stored, _numbers(position)
    state = SlotState(torch.where((number == victim) & is_full, FREE, position), state.score)
    nowhere = len(number)
    free = torch.where(state.position < 0, number, nowhere)
    # The first token is there to stay, so it may have the slot of its victim.
    slot = torch.where(is_full, victim, free.amin(dim=-1, keepdim=True))
    written = [slot]
    for _ in range(plan.end.shape[1] - 1):
        free = torch.where(number == slot, nowhere, free)
        slot = free.amin(dim=-1, keepdim=True)
        written.append(slot)
    return DecodeTurns(state, torch.cat(written, dim=-1), num_stored)


def _numbers(position: torch.Tensor) -> torch.Tensor:
    return torch.arange(position.shape[-1], dtype=position.dtype, device=position.device)


def _victim(
    policy: KVPolicy, state: SlotState, end: torch.Tensor, num_stored: int, victims: FirstToGo
) -> torch.Tensor:
    """Slot to evict from full stores, int32 ``[N, K, 1]``; any slot of other ones."""
    valid = state.position >= 0
    passed_over = torch.logical_not(valid)
    is_protected = policy.protects(SlotView(state.score, state.position, valid, end, num_stored))
    if is_protected is not None:
        passed_over = torch.logical_or(passed_over, is_protected)
    return victims(state.score if policy.has_scores else None, state.position, passed_over)[..., None]


class Decoded(NamedTuple):
    """Results of decode rows.

    Attributes:
        partial: of their tokens, ``[N, K, M * G, ...]``.
        state: after each token, ``[N * M, K, S]`` each.
    """

    partial: Partial
    state: SlotState


def decode_in_turn(
    policy: KVPolicy,
    turns: DecodeTurns,
    plan: VersionStep,
    inputs: PartInputs,
    ranks: Turn,
    victims: FirstToGo,
) -> Decoded:
    """Evict, attend and observe for one token of each row after the other, all of which are in the store.

    Products with keys and values are those of all tokens together, but for keys that are rotated to their
    ranks, which each eviction changes.

    Args:
        inputs: of decode rows, ``[N, K, M * G, D]``.
        ranks: rotations to ranks, for policies with positions in the cache.
        victims: finds the slot to evict.
    """
    (num_rows, most_new), (position, score) = plan.end.shape, turns.state
    k_NKSD, v_NKSD = inputs.units.tile(slice(0, num_rows))
    queries = inputs.q.chunk(most_new, dim=2)
    if not policy.positions_in_cache:
        scores = soften(products(inputs.q, k_NKSD), inputs.scoring).float().chunk(most_new, dim=2)
    number, seen = _numbers(position), torch.zeros_like(position, dtype=torch.bool)
    of_tokens, states = [], []
    for turn in range(most_new):
        end = plan.end[:, turn, None, None]
        if turn:
            victim = _victim(policy, SlotState(position, score), end, turns.num_stored, victims)
            position = torch.where((number == victim) & (end > turns.num_stored), FREE, position)
        slots = _with_token(policy, turns, plan, turn, SlotState(position, score))
        if policy.positions_in_cache:
            k = turned_by_rank(k_NKSD, slots.position, slots.valid, ranks)
            own = soften(products(queries[turn], k), inputs.scoring).float()
        else:
            own = scores[turn]
        weights = SlotWeights.of(own, slots.valid)
        position, score = slots.position, slots.score
        if policy.weighs_decodes:
            score = policy.observe(slots, weights.summed(inputs.sinks))
        elif policy.num_observed != 0:
            score = policy.observe(slots, torch.zeros_like(score))
        seen = torch.logical_or(seen, slots.valid)
        of_tokens.append(weights)
        states.append(SlotState(position, score))
    together = SlotWeights(*(torch.cat(each, dim=2) for each in zip(*of_tokens)))
    state = SlotState(*(torch.stack(each, dim=1).flatten(0, 1) for each in zip(*states)))
    # Free slots have undefined content.
    return Decoded(together.of_values(torch.where(seen[..., None], v_NKSD, 0)), state)


def _with_token(
    policy: KVPolicy, turns: DecodeTurns, plan: VersionStep, turn: int, state: SlotState
) -> SlotView:
    """Slots with a token of each row, and its first score."""
    (position, score), end = state, plan.end[:, turn, None, None]
    is_new = _numbers(position) == turns.written[..., turn, None]
    position = torch.where(is_new, end - 1, position)
    if policy.has_scores:
        first = policy.first_score(plan.token_class[:, turn, None, None]) if policy.marks_tokens else 0.0
        score = torch.where(is_new, first, score)
    return SlotView(score, position, position >= 0, end, turns.num_stored)
