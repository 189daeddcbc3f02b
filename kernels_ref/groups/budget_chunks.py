"""Prompt rows of a budget: which tokens remain of the slots and of a chunk of new tokens.

Shapes: Q query tokens, P prompt rows, T new tokens of each, C slots, S = C + T candidates, K key/value heads,
G query heads of each, D head size.

Rotary embeddings are in the layout of rotated halves; elements behind the first 2 * F of F frequencies stay
as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernels_ref.groups.budget_slots import assign_slots, kept_tokens, look_up, text_order
from kernels_ref.groups.column_sums import ChunkStep, candidates, log_sum_exp
from kernels_ref.groups.kv_policy import FutureQueries, KVPolicy, SlotView
from kernels_ref.partial import Partial
from kernels_ref.step import PartInputs, StepTensors
from kernels_ref.units import NewKV, Scratch, SlotState, gather

if TYPE_CHECKING:
    from kernels_ref.impl import Kernels


class Turn(NamedTuple):
    """Rotations, or means of rotations.

    Attributes:
        cos, sin: of each frequency, float32 ``[..., F]``.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, index: torch.Tensor) -> Turn:
        """Return entries of dimension 0."""
        return Turn(self.cos.index_select(0, index), self.sin.index_select(0, index))

    def of_heads(self, num_dims: int) -> Turn:
        """Return the same for vectors with ``num_dims`` more dimensions before the last one."""
        for _ in range(num_dims):
            self = Turn(self.cos[..., None, :], self.sin[..., None, :])
        return self


def turns(position: torch.Tensor, frequencies: Sequence[float]) -> Turn:
    """Rotations to positions, which may be negative.

    Args:
        position: int32 ``[...]``.
        frequencies: radians for each position.
    """
    # Created by an operator, since a captured step copies nothing from the host.
    numbers = [position.new_full((1,), each, dtype=torch.float32) for each in frequencies]
    angle = position.float()[..., None] * torch.cat(numbers)
    return Turn(torch.cos(angle), torch.sin(angle))


def composed(first: Turn, second: Turn) -> Turn:
    """Compose two rotations."""
    return Turn(
        first.cos * second.cos - first.sin * second.sin, first.sin * second.cos + first.cos * second.sin
    )


def turned(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Rotate vectors ``[..., D]``, float32; dimensions before the last are broadcast."""
    half = turn.cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    # The rest has the same shape before the last dimension, whatever is broadcast.
    return torch.cat(
        [first * turn.cos - second * turn.sin, second * turn.cos + first * turn.sin, rest], dim=-1
    )


_TURNED_NUMBERS, _TURNED_ON_CPU = 1 << 22, 1 << 17
"""Elements of stored keys that are rotated at a time: on a CPU as many as fit into a cache."""


class BudgetTurns(NamedTuple):
    """Rotations of a step; without entries where the policy needs none.

    Attributes:
        back: of each token, from its position back to position 0, ``[Q, F]``.
        places: of each token, from its position to its rank among stored tokens, ``[Q, F]``.
        ranks: to each rank among stored tokens, ``[C, F]``.
        ahead: mean of those to the positions after each prompt row, ``[P, F]``.
    """

    back: Turn
    places: Turn
    ranks: Turn
    ahead: Turn


def budget_turns(
    policy: KVPolicy, frequencies: Sequence[float], num_slots: int, t: StepTensors, chunk: ChunkStep
) -> BudgetTurns:
    """Rotations that a policy needs."""
    nothing = turns(t.positions[:0], frequencies[:1] or (0.0,))
    if not policy.needs_rotary:
        return BudgetTurns(nothing, nothing, nothing, nothing)
    # The angles are rounded as in the model, so they cancel out however large they are.
    back = turns(-t.positions, frequencies)
    if policy.positions_in_cache:
        rank = torch.arange(num_slots, dtype=t.positions.dtype, device=t.positions.device)
        place = turns(t.positions + _shift(num_slots, t), frequencies)
        return BudgetTurns(back, composed(back, place), turns(rank, frequencies), nothing)
    number = torch.arange(policy.num_ahead, dtype=t.positions.dtype, device=t.positions.device)
    ahead = turns((chunk.start + chunk.num_new)[:, None] + number, frequencies)
    mean = Turn(ahead.cos.mean(dim=1), ahead.sin.mean(dim=1))
    return BudgetTurns(back, nothing, nothing, mean)


def _shift(num_slots: int, t: StepTensors) -> torch.Tensor:
    """Rank of each token among the stored ones minus its position, 0 or less, int32 ``[Q]``.

    A decoded token has the last rank. A chunk follows the stored tokens of its row.
    """
    no_row = t.row_start.shape[0]
    start = gather(t.row_start, torch.clamp(t.row, max=no_row - 1))
    by_decode = torch.clamp(num_slots - 1 - t.positions, max=0)
    return torch.where(t.causal_row >= no_row, by_decode, torch.clamp(num_slots - start, max=0))


def turned_as(x_QKsD: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Rotate vectors of tokens, ``[Q, ..., D]``, all heads alike; the dtype is preserved.

    Args:
        turn: ``[Q, F]``.
    """
    return turned(x_QKsD, turn.of_heads(x_QKsD.dim() - 2)).to(x_QKsD.dtype)


def turned_by_rank(
    k_XKCD: torch.Tensor, position_XKC: torch.Tensor, valid: torch.Tensor, ranks: Turn
) -> torch.Tensor:
    """Rotate stored keys to their ranks among the stored ones of their head, some heads at a time.

    Args:
        k_XKCD: without rotation; anything where ``valid`` is not set.
        valid: whether there is a token, bool ``[X, K, C]``, K may be 1.
        ranks: ``[C, F]``; with fewer entries than slots, as many slots at least have no token.

    Returns:
        Dense ``[X, K, C, D]``, of the keys' type.
    """
    rank, keys = text_order(position_XKC, valid)[1].flatten(0, 1), k_XKCD.flatten(0, 1)
    if (num_ranks := len(ranks.cos)) < k_XKCD.shape[2]:
        rank = torch.clamp(rank, max=num_ranks - 1)
    most = _TURNED_ON_CPU if keys.device.type == "cpu" else _TURNED_NUMBERS
    size = max(1, most // keys[0].numel())
    some = []
    for begin in range(0, len(keys), size):
        k, own = keys[begin : begin + size], rank[begin : begin + size]
        turn = Turn(*(each.view(*own.shape, -1) for each in ranks.at(own.reshape(-1))))
        some.append(turned(k, turn).to(k.dtype))
    return torch.cat(some).view(k_XKCD.shape)


def turning_bytes(num_numbers: int) -> int:
    """Bytes of intermediates while this many elements of stored keys are rotated, in float32."""
    return 6 * 4 * min(num_numbers, _TURNED_NUMBERS)


def future_queries(
    q_QKGD: torch.Tensor, chunk: ChunkStep, first: int, back: Turn, ahead: Turn
) -> FutureQueries:
    """Mean and covariance of the queries of each row, rotated from their positions to those ahead.

    Without any query, as if all are before ``first``, both are 0.

    Args:
        first: position of the first query that counts.
        back: rotates each query to position 0, ``[Q, F]``.
        ahead: mean of the rotations to positions after the chunk, ``[P, F]``.
    """
    token = chunk.token.view(-1)
    own_XKGD = turned(gather(q_QKGD, token), back.at(token).of_heads(2))
    counts_PT = chunk.is_new & (chunk.start[:, None] + chunk.number >= first)
    number = torch.clamp(counts_PT.sum(dim=1, dtype=torch.int32), min=1)[:, None, None, None]
    counts_PT111 = counts_PT[:, :, None, None, None]
    # Entries beyond the new tokens are any query.
    own_PTKGD = torch.where(counts_PT111, own_XKGD.unflatten(0, chunk.token.shape), 0.0)
    mean_PKGD = own_PTKGD.sum(dim=1) / number
    apart_PKGTD = torch.where(counts_PT111, own_PTKGD - mean_PKGD[:, None], 0.0).permute(0, 2, 3, 1, 4)
    covariance_PKGDD = torch.matmul(apart_PKGTD.transpose(3, 4), apart_PKGTD) / number[..., None]
    ahead = ahead.of_heads(2)
    columns = turned(covariance_PKGDD, ahead.of_heads(1)).transpose(3, 4)
    return FutureQueries(turned(mean_PKGD, ahead), turned(columns, ahead.of_heads(1)))


class Kept(NamedTuple):
    """Slots and state after a chunk.

    Attributes:
        slot: of each new token, or of each of ``text``, ``C`` for evicted ones, int32 ``[P, K, T]``.
        state: of the rows after the chunk, ``[P, K, C]`` each.
        text: keys and values of the remaining tokens, if the step's new tokens are not all of them, ``[P * T,
            K, D]``.
    """

    slot: torch.Tensor
    state: SlotState
    text: NewKV | None = None


class Held(NamedTuple):
    """Slots of prompt rows before the chunk, or tokens of their text.

    Attributes:
        state: positions and scores, ``[P, K, C]`` each.
        kv: keys and values, ``[P, K, C, D]`` each; None if no row has any.
    """

    state: SlotState
    kv: Scratch | None

    @property
    def num_slots(self) -> int:
        """Number of candidate slots: rows without context have none."""
        return 0 if self.kv is None else self.state.score.shape[-1]

    def new_position(self, chunk: ChunkStep) -> torch.Tensor:
        """Positions of the new tokens, int32 ``[P, K, T]``."""
        position = (chunk.start[:, None] + chunk.number)[:, None]
        return position.expand(-1, self.state.score.shape[1], -1)


def scored_tokens(
    run: Kernels,
    policy: KVPolicy,
    num_slots: int,
    held: Held,
    chunk: ChunkStep,
    inputs: PartInputs,
    partials: list[Partial],
    turns: BudgetTurns,
) -> SlotView | None:
    """Return the stored tokens followed by the new ones, with their scores after the chunk.

    Layers that read one store score them together, in the last one; None in those before.

    Args:
        run: the kernels of the parts.
        num_slots: number of tokens to retain (C).
        inputs: of the step; the new tokens of the rows are among them.
        partials: attention of all tokens over new and stored keys.
        turns: rotations of queries.
    """
    old, num_held = held.state, held.num_slots
    new_position = held.new_position(chunk)
    if chunk.token_class is None:
        new_score = torch.zeros(new_position.shape, dtype=torch.float32, device=new_position.device)
    else:
        new_score = policy.first_score(chunk.token_class)[:, None].expand(new_position.shape)
    slots = SlotView(
        torch.cat([old.score[..., :num_held], new_score], dim=-1),
        torch.cat([old.position[..., :num_held], new_position], dim=-1),
        torch.cat([chunk.is_stored(num_held), chunk.is_new], dim=-1)[:, None],
        (chunk.start + chunk.num_new)[:, None, None],
        num_slots,
        is_chunk=True,
    )
    if policy.num_ahead:
        queries = future_queries(inputs.q, chunk, policy.first_query, turns.back, turns.ahead)
        both = zip(inputs.new, held.kv or (None, None))
        own = policy.expect(slots, queries, *(candidates(*each, chunk) for each in both))
    elif policy.num_observed != 0:
        lse, stored = log_sum_exp(partials, inputs.sinks), None if held.kv is None else held.kv.k
        own = run.column_sums(inputs, lse, stored, chunk, policy.num_observed)
    else:
        return slots if inputs.units.turn.is_last else None
    units, total = inputs.units, own
    if units.sums is not None:
        summed = units.sums.add_chunk(units.turn, own)
        if summed is None:
            return None
        total = summed
    return slots._replace(score=total if policy.num_ahead else policy.observe(slots, total))


def chosen(policy: KVPolicy, slots: SlotView) -> torch.Tensor:
    """Mark the tokens to retain, no more than there are slots: bool ``[P, K, S]``."""
    if slots.score.shape[-1] > slots.num_slots:
        return kept_tokens(policy, slots)
    return slots.valid.expand(slots.score.shape)


def keep_chunk(policy: KVPolicy, held: Held, slots: SlotView, chunk: ChunkStep) -> Kept:
    """Choose the tokens to retain of slots and new tokens, and the slots of the latter.

    Args:
        slots: of ``scored_tokens``.
    """
    old, num_held = held.state, held.num_slots
    new_position, keeps = held.new_position(chunk), chosen(policy, slots)
    keeps_old = keeps[..., :num_held] if num_held else torch.zeros_like(old.score, dtype=torch.bool)
    slot, source = assign_slots(keeps_old, keeps[..., num_held:])
    is_new = source < new_position.shape[-1]
    old_score = slots.score[..., :num_held] if num_held else old.score
    state = SlotState(
        torch.where(is_new, look_up(new_position, source), old.position),
        torch.where(is_new, look_up(slots.score[..., num_held:], source), old_score),
    )
    return Kept(slot, state)
