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

from kernels_ref.groups.budget_chunks import Turn as Rotation
from kernels_ref.groups.budget_chunks import turned_by_rank
from kernels_ref.groups.budget_slots import FirstToGo, scores_of
from kernels_ref.groups.column_sums import ChunkStep
from kernels_ref.groups.kv_policy import KVPolicy, SlotView
from kernels_ref.partial import FLOOR, Partial, soften
from kernels_ref.step import DecodeRows, PartInputs, StepTensors
from kernels_ref.units import SlotState, gather, index_dtype

FREE = -1
"""Position of a free slot."""


class Turn(NamedTuple):
    """One token of each decode row.

    Attributes:
        end: position after it, 0 for rows without one, int32 ``[N, 1, 1]``.
        position: of the token, int32 ``[N, 1, 1]``.
        evicts: whether the store of the row is full before it, bool ``[N, 1, 1]``.
        token_class: int32 ``[N, 1, 1]``; anything where no policy marks tokens.
    """

    end: torch.Tensor
    position: torch.Tensor
    evicts: torch.Tensor
    token_class: torch.Tensor


class VersionStep(NamedTuple):
    """Places of versions of the state, as numbers of all ``X * m`` ones, and tokens of the rows of a step.

    Attributes:
        before: of each decode row before the step, ``[N]``.
        after: behind each token of the decode rows, one of the null unit without a token, ``[N * M]``.
        chunk_before, chunk_after: of the prompt rows, ``[P]``.
        turns: the M tokens of each decode row.
    """

    before: torch.Tensor
    after: torch.Tensor
    chunk_before: torch.Tensor
    chunk_after: torch.Tensor
    turns: tuple[Turn, ...]

    @classmethod
    def of(
        cls,
        policy: KVPolicy,
        sizes: tuple[int, int, int],
        t: StepTensors,
        rows: DecodeRows,
        chunk: ChunkStep,
    ) -> VersionStep:
        """Derive them once per step.

        Args:
            sizes: tokens that a head stores (C), versions (m), and number of the null unit.
        """
        num_stored, num_versions, null_unit = sizes
        dtype, end = index_dtype(rows.end.device), rows.end
        number = torch.arange(end.shape[0], dtype=end.dtype, device=end.device)
        unit = torch.where(end > 0, number[:, None], null_unit)

        def version(unit: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
            last = torch.clamp(num_tokens - 1, min=0)
            return (unit * num_versions + last % num_versions).to(dtype).view(-1)

        token_class = end
        if policy.marks_tokens:
            token_class = gather(t.token_class, rows.token).view(end.shape)
        # Copies: a layer gets no views of one tensor.
        each = [
            [x.contiguous().clone()[:, None, None] for x in own.unbind(1)]
            for own in (end, end - 1, end > num_stored, token_class)
        ]
        return cls(
            version(unit[:, 0], end[:, 0] - 1),
            version(unit, end),
            version(chunk.row, chunk.start),
            version(chunk.row, chunk.start + chunk.num_new),
            tuple(Turn(*of_turn) for of_turn in zip(*each)),
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
        state: after the first eviction, without new tokens, ``[N, K, S]`` each.
        slots: of the new tokens of each turn, int32 ``[N, K, 1]``.
        num_stored: tokens that a head may store (C).
    """

    state: SlotState
    slots: tuple[torch.Tensor, ...]
    num_stored: int

    @property
    def written(self) -> torch.Tensor:
        """Slot of each new token in each head, int32 ``[N, K, M]``."""
        return torch.cat(self.slots, dim=-1)


def decode_turns(
    policy: KVPolicy,
    before: SlotState,
    turns: tuple[Turn, ...],
    num_stored: int,
    victims: FirstToGo,
) -> DecodeTurns:
    """Allocate a slot to each new token of the decode rows.

    Args:
        before: positions and scores before the step, ``[N, K, S]``; anything for rows without tokens.
        num_stored: tokens that a head may store (C).
        victims: finds the slot to evict.
    """
    first = turns[0]
    has_tokens, number = first.position > 0, _numbers(before.position)
    # A row without tokens has what another request has left.
    position = torch.where(has_tokens, before.position, FREE)
    score = torch.where(has_tokens, before.score, 0.0)
    victim = _victim(policy, position, score, first, num_stored, victims)
    position = torch.where((number == victim) & first.evicts, FREE, position)
    nowhere = len(number)
    free = torch.where(position < 0, number, nowhere)
    # The first token is there to stay, so it may have the slot of its victim.
    slots = [torch.where(first.evicts, victim, free.amin(dim=-1, keepdim=True))]
    for _ in turns[1:]:
        free = torch.where(number == slots[-1], nowhere, free)
        slots.append(free.amin(dim=-1, keepdim=True))
    return DecodeTurns(SlotState(position, score), tuple(slots), num_stored)


def _numbers(position: torch.Tensor) -> torch.Tensor:
    return torch.arange(position.shape[-1], dtype=position.dtype, device=position.device)


def _victim(
    policy: KVPolicy,
    position: torch.Tensor,
    score: torch.Tensor,
    turn: Turn,
    num_stored: int,
    victims: FirstToGo,
) -> torch.Tensor:
    """Slot to evict from full stores, int32 ``[N, K, 1]``; any slot of other ones."""
    passed_over, valid = position < 0, position >= 0
    is_protected = policy.protects(SlotView(score, position, valid, turn.end, num_stored))
    if is_protected is not None:
        passed_over = torch.logical_or(passed_over, is_protected)
    return victims(score if policy.has_scores else None, position, passed_over)[..., None]


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
    taken: DecodeTurns,
    turns: tuple[Turn, ...],
    inputs: PartInputs,
    ranks: Rotation,
    victims: FirstToGo,
) -> Decoded:
    """Evict, attend and observe for one token of each row after the other, all of which are in the store.

    Products with keys and values are those of all tokens together, but for keys that are rotated to their
    ranks, which each eviction changes. Every token sees itself; results of missing tokens are any numbers.

    Args:
        inputs: of decode rows, ``[N, K, M * G, D]``.
        ranks: rotations to ranks, for policies with positions in the cache.
        victims: finds the slot to evict.
    """
    position, score = taken.state
    k_NKSD, v_NKSD = inputs.units.tile(slice(0, len(position)))
    number, queries = _numbers(position), inputs.q.chunk(len(turns), dim=2)
    scores = [] if policy.positions_in_cache else _scores_of_turns(inputs, k_NKSD, len(turns))
    states, weights = [], []
    for place, (turn, slot) in enumerate(zip(turns, taken.slots)):
        if place:
            victim = _victim(policy, position, score, turn, taken.num_stored, victims)
            position = torch.where((number == victim) & turn.evicts, FREE, position)
        is_new = number == slot
        position = torch.where(is_new, turn.position, position)
        if policy.has_scores:
            first = policy.first_score(turn.token_class) if policy.marks_tokens else 0.0
            score = torch.where(is_new, first, score)
        slots = SlotView(score, position, position >= 0, turn.end, taken.num_stored)
        if policy.positions_in_cache:
            k = turned_by_rank(k_NKSD, position, slots.valid, ranks)
            scores.append(soften(scores_of(queries[place], k), inputs.scoring).float())
        if policy.weighs_decodes:
            weights.append(_Weights.of(scores[place], slots.valid[:, :, None]))
            score = policy.observe(slots, weights[-1].summed(inputs.sinks))
        elif policy.num_observed != 0:
            score = policy.observe(slots, torch.zeros_like(score))
        states.append(SlotState(position, score))
    state = SlotState(*(torch.stack(each, dim=1) for each in zip(*states)))
    partial = _attended(_together(weights, scores, state.position), v_NKSD, state.position)
    return Decoded(partial, SlotState(*(each.flatten(0, 1) for each in state)))


def read_in_turn(
    policy: KVPolicy,
    position: torch.Tensor,
    turns: tuple[Turn, ...],
    inputs: PartInputs,
    ranks: Rotation,
) -> Partial:
    """Attend as ``decode_in_turn`` after another layer has decoded, for policies that weigh no decodes.

    Args:
        position: of the slots after each token, ``[N * M, K, S]``; anything for missing tokens.
    """
    exists = torch.stack([turn.end > 0 for turn in turns], dim=1)
    position_NMKS = torch.where(exists, position.unflatten(0, (-1, len(turns))), FREE)
    k_NKSD, v_NKSD = inputs.units.tile(slice(0, len(position_NMKS)))
    if policy.positions_in_cache:
        scores = []
        for q, own in zip(inputs.q.chunk(len(turns), dim=2), position_NMKS.unbind(1)):
            k = turned_by_rank(k_NKSD, own, own >= 0, ranks)
            scores.append(soften(scores_of(q, k), inputs.scoring).float())
    else:
        scores = _scores_of_turns(inputs, k_NKSD, len(turns))
    return _attended(_together([], scores, position_NMKS), v_NKSD, position_NMKS)


def _scores_of_turns(inputs: PartInputs, k_NKSD: torch.Tensor, num_turns: int) -> list[torch.Tensor]:
    """Scores of the slots for each turn, ``[N, K, G, S]``."""
    products = soften(scores_of(inputs.q, k_NKSD), inputs.scoring).float()
    return list(products.chunk(num_turns, dim=2))


def _attended(together: _Weights, v_NKSD: torch.Tensor, position_NMKS: torch.Tensor) -> Partial:
    # Free slots have undefined content.
    seen = (position_NMKS.amax(dim=1) >= 0)[..., None]
    attn = torch.matmul(together.weights.to(v_NKSD.dtype), torch.where(seen, v_NKSD, 0)).float()
    return Partial(attn, together.largest[..., 0], together.total[..., 0])


class _Weights(NamedTuple):
    """Weights of slots, not divided by their sum, ``[N, K, G, S]``, and per query ``[N, K, G, 1]``."""

    weights: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, scores: torch.Tensor, valid: torch.Tensor) -> _Weights:
        """Weights of the slots that are valid, bool ``[N, K, G, S]``, G may be 1."""
        scores = torch.where(valid, scores, FLOOR)
        largest = scores.amax(dim=-1, keepdim=True)
        weights = torch.exp(scores - largest)
        return cls(weights, largest, weights.sum(dim=-1, keepdim=True))

    def summed(self, sinks_KG: torch.Tensor | None) -> torch.Tensor:
        """Shares of slots summed over the query heads, ``[N, K, S]``; sink logits count in them."""
        whole = self.total
        if sinks_KG is not None:
            whole = whole + torch.exp(sinks_KG.float()[..., None] - self.largest)
        return (self.weights / whole).sum(dim=2)


def _together(weights: list[_Weights], scores: list[torch.Tensor], position_NMKS: torch.Tensor) -> _Weights:
    """Weights of all tokens of the rows: those of turns, or all at once where no policy needs them."""
    if weights:
        return _Weights(*(torch.cat(each, dim=2) for each in zip(*weights)))
    valid = (position_NMKS >= 0).transpose(1, 2)[:, :, :, None]
    valid = valid.expand(-1, -1, -1, scores[0].shape[2], -1).flatten(2, 3)
    return _Weights.of(torch.cat(scores, dim=2), valid)
