"""Heads that store a fixed number of tokens of a request, chosen by an eviction policy.

Shapes: Q query tokens, N decode rows, P prompt rows of up to T new tokens, K key/value heads, C slots.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from bias_builders import Leading, leading_slots
from kernels_ref.chunks import QUERY_SLICE
from kernels_ref.groups.budget_chunks import (
    BudgetTurns,
    Held,
    Kept,
    budget_turns,
    keep_chunk,
    scored_tokens,
    turned_as,
    turned_by_rank,
    turning_bytes,
)
from kernels_ref.groups.budget_slots import FirstToGo, slot_to_write
from kernels_ref.groups.column_sums import ChunkStep, summed_queries
from kernels_ref.groups.kind import (
    FLOAT32,
    SCORE_COPIES,
    GroupKind,
    HeadSizes,
    Owner,
    PartSizes,
    causal_bytes,
)
from kernels_ref.groups.kv_policy import KVPolicy, SlotView
from kernels_ref.partial import Partial
from kernels_ref.step import DecodeRows, PartInputs, RingStep, Step, StepParts, StepTensors
from kernels_ref.units import (
    KVRecord,
    KVUnits,
    NewKV,
    Scratch,
    SlotState,
    UnitLayout,
    gather,
    index_dtype,
    of_stores,
)

if TYPE_CHECKING:
    from kernels_ref.impl import Kernels


class DecodeSlots(NamedTuple):
    """The slots of decode rows after their new tokens are inserted.

    Attributes:
        slots: of all rows; positions and scores are those of the store.
        written: slot of the new token in each head, int32 ``[N, K, 1]``.
    """

    slots: SlotView
    written: torch.Tensor


def take_in(
    policy: KVPolicy,
    state: SlotState,
    layout: UnitLayout,
    end: torch.Tensor,
    unit: torch.Tensor,
    eviction_victims: FirstToGo,
    token_class: torch.Tensor,
) -> DecodeSlots:
    """Allocate a slot to the new token of each decode row, and write its position and first score.

    Args:
        state: of all units, those of decode rows first; written in place.
        end: position after the new token, 0 for rows without one, int32 ``[N]``.
        unit: unit of each row, the null unit for rows without a token, int32 ``[N]``.
        eviction_victims: of the implementation.
        token_class: of each row's new token, int32 ``[N]``, for policies that mark tokens; any, for others.
    """
    num_heads, num_slots = layout.num_heads, layout.num_slots
    shape = (num_heads, num_slots)
    num_stored = torch.clamp(end - 1, min=0, max=num_slots)
    valid = leading_slots(num_stored, num_slots)[:, None]
    before = _view(state, shape, valid, end)
    written = slot_to_write(policy, before, num_stored, eviction_victims)
    dtype = index_dtype(end.device)
    head = torch.arange(0, num_heads * num_slots, num_slots, dtype=dtype, device=end.device)
    place = (unit.to(dtype)[:, None] * (num_heads * num_slots) + head + written).view(-1)
    state.position.view(-1).index_copy_(0, place, (end - 1).repeat_interleave(num_heads))
    if policy.has_scores:
        first = policy.first_score(token_class).repeat_interleave(num_heads)
        state.score.view(-1).index_copy_(0, place, first)
    valid = leading_slots(torch.clamp(end, max=num_slots), num_slots)[:, None]
    return DecodeSlots(_view(state, shape, valid, end), written[..., None])


def _view(state: SlotState, shape: tuple[int, int], valid: torch.Tensor, end: torch.Tensor) -> SlotView:
    position, score = (x[: len(end)].unflatten(1, shape) for x in state)
    return SlotView(score, position, valid, end[:, None, None], shape[1])


_STATE_BYTES = 8
_CANDIDATE_COPIES = 16
"""Ranks, positions and scores of slots, as they are sorted, compared and numbered."""


class BudgetStep(NamedTuple):
    """Tensors that a step derives once for all stores of one budget and one layout.

    Attributes:
        ring: input of the kernels of rings: occupied slots come first, for decode rows and in the scratch.
        end: position after the token of a decode row, 0 for other rows, int32 ``[N]``.
        place: index of each token in a table of the P * T entries of prompt rows, of N rows and of the null
            unit, int32 ``[Q]``.
        decode_row: units of decode rows, the null unit for others, int32 ``[N]``.
        token_class: of the first new token of each row, 0 where no policy marks tokens, int32 ``[N]``.
        chunk: the prompt rows.
        turns: rotations of queries.
    """

    ring: RingStep
    end: torch.Tensor
    place: torch.Tensor
    decode_row: torch.Tensor
    token_class: torch.Tensor
    chunk: ChunkStep
    turns: BudgetTurns


@dataclass(frozen=True)
class Budget(GroupKind):
    """Heads that store ``budget`` tokens each, in slots that are overwritten in place.

    A decoded token overwrites the slot of the eviction victim, and then attends to all slots, its own
    included. A chunk of a prompt attends to all slots and to itself, then the policy retains ``budget``
    tokens of both. So the stored tokens depend on where chunks end, and on nothing else: the scheduler ends
    them on a grid of ``chunk`` positions and at the end of the prompt. Occupied slots come first, since none
    is evicted while one is free.

    Attributes:
        policy: chooses the tokens to evict.
        budget: slots of a head (C).
        chunk: most new tokens of a prompt row in a step (T).
        max_chunk_rows: most prompt rows of a step (P).
        frequencies: of the rotary embedding, for policies that need them.
    """

    policy: KVPolicy
    budget: int
    chunk: int
    max_chunk_rows: int = 1
    frequencies: tuple[float, ...] = ()
    name: ClassVar[str] = "budget"
    owner: ClassVar[Owner] = Owner.ROW

    def __post_init__(self) -> None:
        for name in ("budget", "chunk", "max_chunk_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        self.policy.check(self.budget)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Numbers of the kind and of its policy."""
        return self.name, self.budget, self.chunk, self.policy.key, self.frequencies

    @property
    def reach(self) -> int | None:
        """The slots: a chunk sees its own tokens in addition."""
        return self.budget

    def describe(self) -> str:
        """Describe the policy and its slots."""
        numbers = "".join(f" {number}" for number in self.policy.key[1:])
        return f"{self.policy.name}{numbers}, {self.budget} slots, chunks of {self.chunk}"

    def num_slots(self, block_size: int) -> int:
        """Return the budget."""
        return self.budget

    def num_read(self, num_shared_blocks: int) -> int:
        """Return the tokens of its row that a prompt may read, in a bucket with so many shared blocks."""
        return self.budget

    @property
    def keeps_scratch(self) -> bool:
        """Return True: the new tokens of a prompt overwrite what it still has to read."""
        return True

    @property
    def reads_text(self) -> bool:
        """Whether prompts use positions of the text even if decodes use positions in the cache."""
        return False

    @property
    def chunk_grid(self) -> int:
        """Return the chunk: the stored tokens depend on where it ends."""
        return self.chunk

    @property
    def shares_blocks(self) -> bool:
        """Return False: what is stored is decided at the end of a chunk."""
        return False

    @property
    def takes_any_format(self) -> bool:
        """Whether keys are stored with their rotation: one that is taken off and on is no stored key."""
        return not self.policy.positions_in_cache

    @property
    def needs_token_classes(self) -> bool:
        """Whether the policy marks tokens."""
        return self.policy.marks_tokens

    @property
    def state_bytes(self) -> int:
        """A position and a score."""
        return _STATE_BYTES

    def seen_slots(self, num_tokens: int, num_slots: int) -> torch.Tensor:
        """Occupied slots."""
        return torch.arange(num_slots) < num_tokens

    def prepare(
        self, parts: StepParts, tensors: StepTensors, rows: DecodeRows, layouts: Collection[UnitLayout]
    ) -> dict[UnitLayout, BudgetStep]:
        """See ``BudgetStep``."""
        t, no_row = tensors, tensors.row_start.shape[0]
        end, nothing = rows.end[:, 0], t.row_start[:0]
        place, decode_row = rows.row, nothing
        chunk_position = t.row_start.new_empty(0, self.num_read(t.shared_block.shape[0]))
        chunk = ChunkStep(nothing, nothing, nothing, nothing[None])
        if parts.unique:
            number = torch.arange(no_row, dtype=end.dtype, device=end.device)
            decode_row = torch.where(end > 0, number, next(iter(layouts)).num_units - 1)
        else:
            # The table has no decode rows, only the null unit.
            place = torch.zeros_like(place)
        if parts.causal:
            chunk, place = self._chunk(t, place)
            slot = torch.arange(
                self.num_read(t.shared_block.shape[0]), dtype=place.dtype, device=place.device
            )
            chunk_position = torch.where(slot < chunk.start[:, None], slot, -1)
        seen = Leading(torch.clamp(end, max=self.budget)[:, None, None])
        turns = budget_turns(self.policy, self.frequencies, self.budget, t, chunk)
        ring, token_class = RingStep(nothing, seen, chunk_position), torch.zeros_like(end)
        if self.policy.marks_tokens:
            token_class = gather(t.token_class, t.row_query_start)
        plan = BudgetStep(ring, end, place, decode_row, token_class, chunk, turns)
        return dict.fromkeys(layouts, plan)

    def _chunk(self, t: StepTensors, place: torch.Tensor) -> tuple[ChunkStep, torch.Tensor]:
        """The prompt rows, and the place of each token in the table of ``BudgetStep``."""
        no_row, num_queries = t.row_start.shape[0], t.row.shape[0]
        size = min(self.chunk, num_queries)
        # One more entry, for rows that are no prompts.
        rows = (torch.cat([x, x.new_zeros(1)]) for x in (t.row_start, t.row_num_new, t.row_query_start))
        start, num_new, begin = (gather(x, torch.clamp(t.chunk_row, max=no_row)) for x in rows)
        number = torch.arange(size, dtype=start.dtype, device=start.device)
        token = torch.clamp(begin[:, None] + number, max=num_queries - 1)
        chunk = ChunkStep(t.chunk_row, start, num_new, token)
        if self.policy.marks_tokens:
            token_class = gather(t.token_class, token.view(-1)).view(token.shape)
            chunk = chunk._replace(token_class=token_class)
        is_own = (t.chunk_row[:, None] == t.causal_row) & (t.causal_row < no_row)
        first = torch.arange(0, len(start) * size, size, dtype=start.dtype, device=start.device) - start
        entry = torch.where(is_own, first[:, None] + t.positions, -1).amax(dim=0)
        return chunk, torch.where(entry >= 0, entry, len(start) * size + place)

    def attend(self, run: Kernels, inputs: PartInputs, step: Step) -> torch.Tensor:
        """Allocates slots, writes, then decodes; prompts read the scratch."""
        parts, units = step.parts, inputs.units
        layout = units.layout
        plan: BudgetStep = step.plans[self.key, layout]
        assert units.state is not None, "expected units with a state"
        of_tokens: list[Partial] = []
        stored = units.encode(self._stored(inputs.new, plan))
        if self.takes_any_format:
            inputs = inputs._replace(new=stored.values)
        taken, kept, decoded, seen = None, None, None, self._seen(inputs, plan)
        if parts.causal:
            prompts = inputs if self.reads_text else seen
            of_tokens, kept = self._read_prompts(run, prompts, step)
        if parts.unique:
            rows = plan.end, plan.decode_row, run.eviction_victims, plan.token_class
            taken = take_in(self.policy, units.state, layout, *rows)
        run.write_kv(units, *self._written(units, plan, kept, taken, stored))
        # New views: older ones would be further inputs of this graph if it was cut in between.
        units = units.seen_anew()
        seen = seen._replace(units=units)
        assert units.state is not None, "expected units with positions and scores"
        dtype = index_dtype(plan.end.device)
        if taken is not None:
            decoded, score = self._decode(run, seen, step, taken)
            if self.policy.num_observed != 0:
                units.state.score.index_copy_(0, plan.decode_row.to(dtype), score.flatten(1))
        if kept is not None:
            row = plan.chunk.row.to(dtype)
            for store, new in zip(units.state, kept.state):
                store.index_copy_(0, row, new.flatten(1))
        return run.finish(inputs.q, of_tokens, decoded, step.decode_slot, inputs.sinks)

    def _seen(self, inputs: PartInputs, plan: BudgetStep) -> PartInputs:
        """Queries and keys for attention, rotated to positions in the cache if the policy uses them."""
        if not self.policy.positions_in_cache:
            return inputs
        turn = plan.turns.places
        new = NewKV(turned_as(inputs.new.k, turn), inputs.new.v)
        return inputs._replace(q=turned_as(inputs.q, turn), new=new)

    def _stored(self, new: NewKV, plan: BudgetStep) -> NewKV:
        """Return keys and values to store, without rotation if positions are those in the cache."""
        if not self.policy.positions_in_cache:
            return new
        return NewKV(turned_as(new.k, plan.turns.back), new.v)

    def _read_prompts(self, run: Kernels, inputs: PartInputs, step: Step) -> tuple[list[Partial], Kept]:
        """Attention of prompt rows, and the tokens that remain of them."""
        units = inputs.units
        plan: BudgetStep = step.plans[self.key, units.layout]
        chunk, scratch = plan.chunk, None
        shape = (len(chunk.row), units.layout.num_heads, self.budget)
        state = SlotState(*(gather(x, chunk.row).view(shape) for x in units.state or ()))
        of_tokens = [run.causal(inputs)]
        if step.parts.shared:
            scratch = inputs.scratch
            if self.policy.positions_in_cache:
                valid = chunk.is_stored(self.budget)[:, None]
                k = turned_by_rank(scratch.k, state.position, valid, plan.turns.ranks)
                scratch = Scratch(k, scratch.v)
                inputs = inputs._replace(units=units._replace(scratch=scratch))
            of_tokens.append(run.shared_rings(inputs, plan.ring))
        held = Held(state, scratch)
        slots = scored_tokens(run, self.policy, self.budget, held, chunk, inputs, of_tokens, plan.turns)
        return of_tokens, keep_chunk(self.policy, held, slots, chunk)

    def _decode(
        self, run: Kernels, inputs: PartInputs, step: Step, taken: DecodeSlots
    ) -> tuple[Partial, torch.Tensor]:
        """Attention of decode rows, and their new scores."""
        inputs, slots = inputs.of_rows(step), taken.slots
        units = inputs.units
        plan: BudgetStep = step.plans[self.key, units.layout]
        if self.policy.positions_in_cache:
            k, v = units.tile(slice(0, len(plan.end)))
            k = turned_by_rank(k, slots.position, slots.valid, plan.turns.ranks)
            inputs = inputs._replace(units=of_stores(k, v.contiguous()))
        if self.policy.weighs_decodes:
            partial, mass = run.unique_with_weights(inputs, plan.ring)
            return partial, self.policy.observe(slots, mass)
        partial = run.unique_rings(inputs, plan.ring)
        if self.policy.num_observed == 0:
            return partial, slots.score
        return partial, self.policy.observe(slots, torch.zeros_like(slots.score))

    def _written(
        self,
        units: KVUnits,
        plan: BudgetStep,
        kept: Kept | None,
        taken: DecodeSlots | None,
        stored: KVRecord,
    ) -> tuple[torch.Tensor, KVRecord]:
        """Return what to write, and its places ``[Q * K]``: the null unit for evicted tokens."""
        layout = units.layout
        tables = self._decode_places(layout, plan, taken)
        if kept is not None:
            tables.insert(0, self._places(layout, plan.chunk.row[:, None, None], kept.slot))
        return gather(torch.cat(tables), plan.place).view(-1), stored

    def _decode_places(
        self, layout: UnitLayout, plan: BudgetStep, taken: DecodeSlots | None
    ) -> list[torch.Tensor]:
        """Return places of the new tokens of the N rows, if any, followed by one in the null unit."""
        nowhere = torch.full((1, layout.num_heads, 1), self.budget, dtype=torch.int32, device=plan.end.device)
        tables = [self._places(layout, nowhere, nowhere)]
        if taken is not None:
            row = torch.arange(len(plan.end), dtype=torch.int32, device=plan.end.device)
            tables.insert(0, self._places(layout, row[:, None, None], taken.written))
        return tables

    def _places(self, layout: UnitLayout, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Places in the store of slots ``[X, K, n]``, ``[X * n, K]``; the null unit for slots beyond it."""
        dtype, is_kept = index_dtype(slot.device), slot < self.budget
        unit = torch.where(is_kept, row, layout.num_units - 1).to(dtype)
        head = torch.arange(layout.num_heads, dtype=dtype, device=slot.device)[:, None]
        place = unit * layout.unit_stride + head * layout.head_stride + torch.where(is_kept, slot, 0)
        return (place + layout.offset).transpose(1, 2).flatten(0, 1)

    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        """Scores of a slice of prompts or of all decode rows, and the sort keys of candidates for slots."""
        sizes = sizes._replace(is_fused=False)  # weights of tokens need scores
        per_slot, chunk = heads.num_query_heads * FLOAT32, min(self.chunk, sizes.query_len)
        num_rows = sizes.parts.causal * self.max_chunk_rows
        num_read = self.num_read(sizes.num_shared_blocks)
        num_candidates = num_rows * (num_read + chunk)
        num_decoding = sizes.parts.unique * sizes.num_rows * self.budget
        num_queries = sizes.parts.shared * min(QUERY_SLICE, sizes.query_len)
        num_summed = min(summed_queries(num_read + chunk), chunk)
        num_met = min(num_read, self._most_met(sizes))
        num_scores = max(num_queries * num_rows * num_met, num_summed * num_candidates)
        scores = max(causal_bytes(heads, sizes), SCORE_COPIES * max(num_scores, num_decoding) * per_slot)
        keys = 4 * heads.unit_bytes(num_candidates + num_decoding)
        if self.policy.positions_in_cache:
            num_turned = num_rows * num_read + num_decoding
            keys += heads.unit_bytes(num_turned)
            keys += turning_bytes(num_turned * heads.num_heads * heads.head_dim)
        candidates = _CANDIDATE_COPIES * (num_candidates + num_decoding) * heads.num_heads * FLOAT32
        return scores + keys + candidates + self._future_bytes(heads, num_rows * chunk, num_rows)

    def _most_met(self, sizes: PartSizes) -> int:
        """Tokens of its row that a prompt attends to at a time."""
        return self.budget

    def _future_bytes(self, heads: HeadSizes, num_tokens: int, num_rows: int) -> int:
        """Rotated queries, centred, and covariances."""
        if not self.policy.needs_rotary:
            return 0
        per_head = 3 * num_tokens + 4 * num_rows * heads.head_dim * (self.policy.num_ahead > 0)
        return per_head * heads.num_query_heads * heads.head_dim * FLOAT32
