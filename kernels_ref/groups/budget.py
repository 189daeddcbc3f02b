"""Heads that store a fixed number of tokens of a request, chosen by an eviction policy.

Shapes: Q query tokens, N decode rows, P prompt rows of up to T new tokens, K key/value heads, C slots.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
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
from kernels_ref.groups.budget_versions import (
    DecodeTurns,
    VersionStep,
    behind_chunk,
    decode_in_turn,
    decode_turns,
    read_in_turn,
    read_versions,
    write_versions,
)
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
from kernels_ref.partial import Partial, unfold
from kernels_ref.step import DecodeRows, PartInputs, RingStep, Step, StepParts, StepTensors
from kernels_ref.units import (
    KVRecord,
    KVUnits,
    NewKV,
    Scratch,
    SlotState,
    StoreTurn,
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
        written: slot of the new token in each head, int32 ``[N, K, 1]``; None where another layer wrote it.
    """

    slots: SlotView
    written: torch.Tensor | None


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
    return taken_in(state, layout, end)._replace(written=written[..., None])


def taken_in(state: SlotState, layout: UnitLayout, end: torch.Tensor) -> DecodeSlots:
    """Return the slots of decode rows after an earlier layer has run ``take_in``."""
    num_slots = layout.num_slots
    valid = leading_slots(torch.clamp(end, max=num_slots), num_slots)[:, None]
    return DecodeSlots(_view(state, (layout.num_heads, num_slots), valid, end), None)


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
        place: index of each token in a table of the P * T entries of prompt rows, of the N * M tokens of rows
            and of the null unit, int32 ``[Q]``.
        decode_row: units of decode rows, the null unit for others, int32 ``[N]``.
        token_class: of the first new token of each row, 0 where no policy marks tokens, int32 ``[N]``.
        chunk: the prompt rows.
        turns: rotations of queries.
        versions: places of versions of the state; None where there is one version.
    """

    ring: RingStep
    end: torch.Tensor
    place: torch.Tensor
    decode_row: torch.Tensor
    token_class: torch.Tensor
    chunk: ChunkStep
    turns: BudgetTurns
    versions: VersionStep | None = None


@dataclass(frozen=True)
class Budget(GroupKind):
    """Heads that store ``budget`` tokens each, in slots that are overwritten in place.

    A decoded token overwrites the slot of the eviction victim, and then attends to all slots, its own
    included. A chunk of a prompt attends to all slots and to itself, then the policy retains ``budget``
    tokens of both. So the stored tokens depend on where chunks end, and on nothing else: the scheduler ends
    them on a grid of ``chunk`` positions and at the end of the prompt. Occupied slots come first, since none
    is evicted while one is free. With several versions of the state that holds for prompts only, see
    ``kernels_ref.groups.budget_versions``.

    Layers that share a store observe together. The first one evicts for the new tokens of decode rows, and
    writes them; all attend to the same slots; the last one adds up the weights of all, scores the tokens, and
    stores what remains of prompts, which are read from the scratch until then.

    Attributes:
        policy: chooses the tokens to evict.
        budget: slots of a head (C).
        chunk: most new tokens of a prompt row in a step (T).
        max_chunk_rows: most prompt rows of a step (P).
        frequencies: of the rotary embedding, for policies that need them.
        versions: most tokens of a decode row in a step (m): versions of positions and scores.
    """

    policy: KVPolicy
    budget: int
    chunk: int
    max_chunk_rows: int = 1
    frequencies: tuple[float, ...] = ()
    versions: int = 1
    name: ClassVar[str] = "budget"
    owner: ClassVar[Owner] = Owner.ROW

    def __post_init__(self) -> None:
        for name in ("budget", "chunk", "max_chunk_rows", "versions"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        self.policy.check(self.budget)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Numbers of the kind and of its policy."""
        return self.name, self.budget, self.chunk, self.policy.key, self.frequencies, self.versions

    @property
    def reach(self) -> int | None:
        """The slots: a chunk sees its own tokens in addition."""
        return self.budget

    def describe(self) -> str:
        """Describe the policy and its slots."""
        numbers = "".join(f" {number}" for number in self.policy.key[1:])
        return f"{self.policy.name}{numbers}, {self.budget} slots, chunks of {self.chunk}"

    def num_slots(self, block_size: int) -> int:
        """Return the budget, and slots of tokens that may be taken back."""
        return self.budget + self.versions - 1

    @property
    def without_slack(self) -> GroupKind:
        """Return the kind for steps of one token."""
        return replace(self, versions=1)

    def num_read(self, num_shared_blocks: int) -> int:
        """Return the tokens of its row that a prompt may read, in a bucket with so many shared blocks."""
        return self.budget

    @property
    def keeps_scratch(self) -> bool:
        """Return True: the new tokens of a prompt overwrite what it still has to read."""
        return True

    @property
    def shares_units(self) -> bool:
        """Return True: layers with the same keys and values observe together."""
        return True

    @property
    def chooses_last(self) -> bool:
        """Return True: a token is scored by the weights of all layers."""
        return True

    @property
    def num_summed(self) -> int:
        """Slots and new tokens, if a policy observes queries."""
        observes = self.policy.num_observed != 0 or self.policy.num_ahead > 0
        return (self._most_read + self.chunk) * observes

    @property
    def _most_read(self) -> int:
        """Most tokens of its row that a prompt reads."""
        return self.budget

    @property
    def problem_of_sharing(self) -> str | None:
        """A token of a step would evict by weights that later layers have not observed yet."""
        if self.versions == 1 or not self.policy.weighs_decodes:
            return None
        return (
            f"kv_policy={self.policy.name!r} scores keys by the weights of all layers that share them: "
            f"expected decode_len=1 and no speculative_config, got {self.versions} tokens of a decode"
        )

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
        """A position and a score in each version."""
        return _STATE_BYTES * self.versions

    @property
    def state_versions(self) -> int:
        """Versions of the state."""
        return self.versions

    def seen_slots(self, num_tokens: int, num_slots: int) -> torch.Tensor:
        """Slots that prompts occupy."""
        return torch.arange(num_slots) < min(num_tokens, self.budget)

    def prepare(
        self, parts: StepParts, tensors: StepTensors, rows: DecodeRows, layouts: Collection[UnitLayout]
    ) -> dict[UnitLayout, BudgetStep]:
        """See ``BudgetStep``."""
        t, no_row = tensors, tensors.row_start.shape[0]
        end, nothing = rows.end[:, 0], t.row_start[:0]
        place, decode_row = rows.slot, nothing
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
        versions = None
        if self.versions > 1:
            null_unit = next(iter(layouts)).num_units - 1
            sizes = self.budget, self.versions, null_unit
            versions = VersionStep.of(self.policy, sizes, t, rows, chunk)
        plan = BudgetStep(ring, end, place, decode_row, token_class, chunk, turns, versions)
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
        if parts.unique and units.turn.is_first:
            taken = self._take_in(run, units, plan)
        if units.turn is StoreTurn.ONLY or not (kept is None and taken is None):
            run.write_kv(units, *self._written(units, plan, kept, taken, stored))
        # New views: older ones would be further inputs of this graph if it was cut in between.
        units = units.seen_anew()
        if parts.unique:
            decoded = self._decode(run, seen._replace(units=units), step, taken)
        if kept is not None:
            self._write_kept(units, plan, kept)
        return run.finish(inputs.q, of_tokens, decoded, step.decode_slot, inputs.sinks)

    def _take_in(self, run: Kernels, units: KVUnits, plan: BudgetStep) -> DecodeSlots | DecodeTurns:
        """Allocate slots to the new tokens of decode rows."""
        layout, versions = units.layout, plan.versions
        assert units.state is not None, "expected units with positions and scores"
        if versions is None:
            rows = plan.end, plan.decode_row, run.eviction_victims, plan.token_class
            return take_in(self.policy, units.state, layout, *rows)
        before = read_versions(units.state, versions.before, layout.num_heads, layout.num_slots)
        return decode_turns(self.policy, before, versions.turns, self.budget, run.eviction_victims)

    def _write_kept(self, units: KVUnits, plan: BudgetStep, kept: Kept) -> None:
        """Write positions and scores of prompt rows after a chunk."""
        assert units.state is not None, "expected units with positions and scores"
        if (versions := plan.versions) is not None:
            state = behind_chunk(kept.state, plan.chunk, units.layout.num_slots)
            write_versions(units.state, versions.chunk_after, state)
            return
        row = plan.chunk.row.to(index_dtype(plan.end.device))
        for store, new in zip(units.state, kept.state):
            store.index_copy_(0, row, new.flatten(1))

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

    def _read_prompts(
        self, run: Kernels, inputs: PartInputs, step: Step
    ) -> tuple[list[Partial], Kept | None]:
        """Attention of prompt rows, and the tokens that remain of them, which the last layer knows."""
        units = inputs.units
        plan: BudgetStep = step.plans[self.key, units.layout]
        chunk, scratch = plan.chunk, None
        state = self._before_chunk(units, plan)
        of_tokens = [run.causal(inputs)]
        if step.parts.shared:
            if self.versions > 1 and units.scratch is not None:
                leading = tuple([each[:, :, : self.budget].contiguous() for each in units.scratch])
                inputs = inputs._replace(units=units._replace(scratch=leading))
            scratch = inputs.scratch
            if self.policy.positions_in_cache:
                valid = chunk.is_stored(self.budget)[:, None]
                k = turned_by_rank(scratch.k, state.position, valid, plan.turns.ranks)
                scratch = Scratch(k, scratch.v)
                inputs = inputs._replace(units=units._replace(scratch=scratch))
            of_tokens.append(run.shared_rings(inputs, plan.ring))
        held = Held(state, scratch)
        slots = scored_tokens(run, self.policy, self.budget, held, chunk, inputs, of_tokens, plan.turns)
        return of_tokens, None if slots is None else keep_chunk(self.policy, held, slots, chunk)

    def _before_chunk(self, units: KVUnits, plan: BudgetStep) -> SlotState:
        """Positions and scores of prompt rows, ``[P, K, C]``."""
        assert units.state is not None, "expected units with positions and scores"
        layout, versions = units.layout, plan.versions
        if versions is None:
            shape = (len(plan.chunk.row), layout.num_heads, self.budget)
            return SlotState(*(gather(x, plan.chunk.row).view(shape) for x in units.state))
        state = read_versions(units.state, versions.chunk_before, layout.num_heads, layout.num_slots)
        return SlotState(*(each[..., : self.budget] for each in state))

    def _decode(
        self, run: Kernels, inputs: PartInputs, step: Step, taken: DecodeSlots | DecodeTurns | None
    ) -> Partial:
        """Attention of decode rows, after which their new scores are written."""
        inputs, units = inputs.of_rows(step), inputs.units
        layout = units.layout
        plan: BudgetStep = step.plans[self.key, layout]
        assert units.state is not None, "expected units with positions and scores"
        if taken is None and plan.versions is None:
            taken = taken_in(units.state, layout, plan.end)
        if not isinstance(taken, DecodeSlots):
            assert plan.versions is not None, "expected places of versions"
            if taken is None:
                after = read_versions(units.state, plan.versions.after, layout.num_heads, layout.num_slots)
                rest = plan.versions.turns, inputs, plan.turns.ranks
                return unfold(read_in_turn(self.policy, after.position, *rest), step.decode_len)
            decoded = decode_in_turn(
                self.policy, taken, plan.versions.turns, inputs, plan.turns.ranks, run.eviction_victims
            )
            write_versions(units.state, plan.versions.after, decoded.state)
            return unfold(decoded.partial, step.decode_len)
        partial, score = self._decode_one(run, inputs, plan, taken.slots)
        if score is not None:
            row = plan.decode_row.to(index_dtype(plan.end.device))
            units.state.score.index_copy_(0, row, score.flatten(1))
        return partial

    def _decode_one(
        self, run: Kernels, inputs: PartInputs, plan: BudgetStep, slots: SlotView
    ) -> tuple[Partial, torch.Tensor | None]:
        """Attention of decode rows of one token, and their new scores; None where a later layer scores."""
        units = inputs.units
        if self.policy.positions_in_cache:
            k, v = inputs.units.tile(slice(0, len(plan.end)))
            k = turned_by_rank(k, slots.position, slots.valid, plan.turns.ranks)
            inputs = inputs._replace(units=of_stores(k, v.contiguous()))
        if self.policy.weighs_decodes:
            partial, mass = run.unique_with_weights(inputs, plan.ring)
            if units.sums is None:
                return partial, self.policy.observe(slots, mass)
            total = units.sums.add_decode(units.turn, plan.decode_row, mass)
            return partial, None if total is None else self.policy.observe(slots, total)
        partial = run.unique_rings(inputs, plan.ring)
        if self.policy.num_observed == 0 or not units.turn.is_first:
            return partial, None
        return partial, self.policy.observe(slots, torch.zeros_like(slots.score))

    def _written(
        self,
        units: KVUnits,
        plan: BudgetStep,
        kept: Kept | None,
        taken: DecodeSlots | DecodeTurns | None,
        stored: KVRecord,
    ) -> tuple[torch.Tensor, KVRecord]:
        """Return what to write, and its places ``[Q * K]``: the null unit for evicted tokens."""
        layout = units.layout
        tables = self._decode_places(layout, plan, taken)
        if kept is not None:
            tables.insert(0, self._kept_places(layout, plan.chunk.row, kept.slot))
        elif plan.chunk.token.numel() and not self.region_len:
            tables.insert(0, _nowhere(layout, plan.chunk.token.numel(), plan.end.device))
        return gather(torch.cat(tables), plan.place).view(-1), stored

    def _decode_places(
        self, layout: UnitLayout, plan: BudgetStep, taken: DecodeSlots | DecodeTurns | None
    ) -> list[torch.Tensor]:
        """Return places of the new tokens of the N rows, if any, followed by one in the null unit."""
        if taken is None:
            num_turns = 1 if plan.versions is None else len(plan.versions.turns)
            return [_nowhere(layout, len(plan.end) * num_turns + 1, plan.end.device)]
        assert taken.written is not None, "expected slots of new tokens"
        row = torch.arange(len(plan.end), dtype=torch.int32, device=plan.end.device)
        places = _places(layout, row[:, None, None], taken.written)
        return [places, _nowhere(layout, 1, plan.end.device)]

    def _kept_places(self, layout: UnitLayout, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Places of slots ``[P, K, n]``, ``[P * n, K]``; the null unit for slots beyond the budget."""
        is_kept = slot < self.budget
        unit = torch.where(is_kept, row[:, None, None], layout.num_units - 1)
        return _places(layout, unit, torch.where(is_kept, slot, 0))

    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        """Scores of a slice of prompts or of all decode rows, and the sort keys of candidates for slots."""
        sizes = sizes._replace(is_fused=False)  # weights of tokens need scores
        per_slot, chunk = heads.num_query_heads * FLOAT32, min(self.chunk, sizes.query_len)
        num_rows = sizes.parts.causal * self.max_chunk_rows
        num_read = self.num_read(sizes.num_shared_blocks)
        num_candidates = num_rows * (num_read + chunk)
        num_decoding = sizes.parts.unique * sizes.num_rows * self.num_slots(sizes.block_size)
        num_decoding *= sizes.decode_len
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


def _nowhere(layout: UnitLayout, count: int, device: torch.device) -> torch.Tensor:
    """Places in the null unit of this many tokens, ``[count, K]``."""
    slot = torch.zeros((count, layout.num_heads, 1), dtype=torch.int32, device=device)
    return _places(layout, layout.num_units - 1 - slot, slot)


def _places(layout: UnitLayout, unit: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Places in the store of slots ``[X, K, n]`` of units, which broadcast to that: ``[X * n, K]``."""
    dtype = index_dtype(slot.device)
    head = torch.arange(layout.num_heads, dtype=dtype, device=slot.device)[:, None]
    place = unit.to(dtype) * layout.unit_stride + head * layout.head_stride + slot
    return (place + layout.offset).transpose(1, 2).flatten(0, 1)
