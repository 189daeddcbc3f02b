"""The tensors that describe one step to the attention of every layer.

Q padded query tokens, N ring rows of the bucket, M most tokens of a decode row, T its tails, C rings gathered
for prompt rows, NS/NU shared/unique blocks, R rows of the ring stores (row R is the null row).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from bias_builders import Leading, Rule, Seen, Window, seen_mask
from kernels_ref.partial import Scoring, fold, hiding
from kernels_ref.units import KVUnits, NewKV, Scratch, gather

PlanKey: TypeAlias = Hashable
"""Key of tensors that a step derives: key of a kind of heads and layout of a store, or of a recurrence."""


class StepTensors(NamedTuple):
    """Host plan of one step on the device; everything int32.

    Attributes:
        positions: ``[Q]``.
        row: ring row of each token, ``N`` for padding, ``[Q]``.
        causal_row: the same for tokens of prompt rows, ``N`` for all others, ``[Q]``.
        write_block, write_offset: place of each token's keys; the null block for padding, ``[Q]``.
        row_start: tokens stored before the step, ``[N]``.
        row_num_new: new tokens of the row, 0 when the row is not in this step, ``[N]``.
        row_query_start: flat index of the row's first new token, any valid index without one, ``[N]``.
        tail_block: unique blocks that not all tokens of the row see whole, else the null block, ``[N, T]``.
        tail_start: position of their first slots, ``NOWHERE`` where there is none, ``[N, T]``.
        window_block, window_start: as the two before, of the blocks that heads read in a draft if it reads a
            window of theirs, and all blocks of other heads, ``[N, W]``; W is 0 in other steps.
        chunk_row: prompt rows with context, then others while there is room, else ``R``, ``[C]``.
        shared_block: ``[NS]``; padding is the null block.
        shared_start: position of their first slots, ``[NS]``.
        shared_reads: 1 where tokens of a row read a shared block, the last row for padding, ``[N + 1, NS]``.
            They see the positions stored before the step; the part derives them for some blocks at a time.
        owner: row that reads block ``b`` of the contiguous slice whole, ``N`` = none, ``[NU]``.
        owner_start: position of the first slot of each of these blocks in use, ``[NU]``; empty if no kind of
            head group needs it (``GroupKind.needs_block_positions``).
        token_class: ``TokenClass`` of each token, 0 for padding, ``[Q]``; empty if no kind needs it
            (``GroupKind.needs_token_classes``).
    """

    positions: torch.Tensor
    row: torch.Tensor
    causal_row: torch.Tensor
    write_block: torch.Tensor
    write_offset: torch.Tensor
    row_start: torch.Tensor
    row_num_new: torch.Tensor
    row_query_start: torch.Tensor
    tail_block: torch.Tensor
    tail_start: torch.Tensor
    window_block: torch.Tensor
    window_start: torch.Tensor
    chunk_row: torch.Tensor
    shared_block: torch.Tensor
    shared_start: torch.Tensor
    shared_reads: torch.Tensor
    owner: torch.Tensor
    owner_start: torch.Tensor
    token_class: torch.Tensor


@dataclass(frozen=True)
class StepParts:
    """The parts that run; fixed for a captured step.

    ``shared`` covers shared blocks and the rows of prompts, ``unique`` unique blocks and the rows of decodes.
    """

    causal: bool
    shared: bool
    unique: bool

    @property
    def has_decodes_only(self) -> bool:
        """Whether decode rows read their own blocks and rings, and nothing else runs."""
        return self.unique and not (self.causal or self.shared)


class WantedTokens(NamedTuple):
    """The tokens that layers behind the last store compute: the newest of each row, L = N * M.

    Attributes:
        token: flat index of each, any valid index where there is none, ``[L]``.
        place: place of each token of the step among them, L for a token that is not there, ``[Q]``.
        tensors: the plan with these tokens in place of all.
        row_token, decode_slot: see ``Step``; places among these tokens, and ``[L]``.
        end: position after each token, 0 where there is none, ``[N, M]``.
    """

    token: torch.Tensor
    place: torch.Tensor
    tensors: StepTensors
    row_token: torch.Tensor
    decode_slot: torch.Tensor
    end: torch.Tensor

    @classmethod
    def of(cls, step: Step, index: torch.Tensor) -> WantedTokens:
        """Derive these tensors from flat indices of tokens, those of a row one after the other."""
        t, no_row = step.tensors, step.tensors.row_start.shape[0]
        number, token, row = (
            torch.arange(size, dtype=index.dtype, device=index.device)
            for size in (len(index), len(t.positions), no_row)
        )
        row_len = len(index) // no_row
        row_L = row[:, None].expand(-1, row_len).flatten()
        # Padding has a token of any row, whose result in its place is another one.
        is_own = gather(t.row, index) == row_L
        is_there = is_own[:, None] & (index[:, None] == token[None])
        place = torch.where(is_there, number[:, None], len(index)).amin(dim=0)
        positions = gather(t.positions, index)
        tensors = t._replace(
            positions=positions,
            row=row_L,
            causal_row=torch.where(is_own, gather(t.causal_row, index), no_row),
            row_query_start=row * row_len,
            row_num_new=torch.clamp(t.row_num_new, max=1) * row_len,
        )
        row_token = torch.clamp(gather(place, step.row_token), max=len(index) - 1)
        end = torch.where(is_own, positions + 1, 0).view(no_row, row_len)
        return cls(index, place, tensors, row_token, gather(step.decode_slot, index), end)


class Step(NamedTuple):
    """A step ready for the layers.

    Attributes:
        parts: the parts that run.
        tensors: the plan.
        decode_len: M.
        row_token: flat index of each token of the N rows, any valid index where there is none, ``[N * M]``.
        decode_slot: place of each token among those, ``N * M`` for tokens of other rows, ``[Q]``.
        plans: tensors derived for each kind of head group, by kind and layout of the store, and for each kind
            of recurrence, by its key.
        keeps_rows: whether groups return the results of decode rows in the order of their tokens,
            ``[N * M, K, G, D]``, in a step that has no others; the layer places them once. Only where kernels
            read masks.
        is_draft: whether the tokens of rows are drafts, which change no state that a later step begins with.
        wanted: tokens that layers behind the last store compute; None = all tokens.
        keys: the plan of all tokens, where the queries of a layer, and ``tensors``, are those of ``wanted``;
            None in other layers.
    """

    parts: StepParts
    tensors: StepTensors
    decode_len: int
    row_token: torch.Tensor
    decode_slot: torch.Tensor
    plans: dict[PlanKey, Any]
    keeps_rows: bool = False
    wanted: WantedTokens | None = None
    keys: StepTensors | None = None
    is_draft: bool = False

    @property
    def of_wanted(self) -> Step:
        """The same step for a layer whose queries are those of ``wanted``."""
        assert self.wanted is not None, "some tokens are wanted"
        _, _, tensors, token, slot, _ = self.wanted
        return self._replace(tensors=tensors, keys=self.tensors, row_token=token, decode_slot=slot)


SEES_ALL = Window(0, 1 << 30)
"""A window that is as wide as any text."""


class PartInputs(NamedTuple):
    """Inputs of attention for the heads of one group in one layer, the same for every part.

    Attributes:
        q: scaled queries after rotary embedding: ``[Q, K, G, D]`` of all tokens, or ``[N, K, M * G, D]`` of
            decode rows for the unique parts.
        new: keys and values of the new tokens, ``[Q, K, D]``, after rotary embedding.
        units: stores of the group in this layer.
        tensors: the plan of the step.
        scoring: the rule from scores to weights.
        rule: which earlier tokens a token sees, by position; None = all of them.
        sinks: attention-sink logit of each query head, ``[K, G]``, or None.
    """

    q: torch.Tensor
    new: NewKV
    units: KVUnits
    tensors: StepTensors
    scoring: Scoring
    rule: Rule | None = None
    sinks: torch.Tensor | None = None

    @property
    def window(self) -> Window:
        """The rule of heads that see a window."""
        assert self.rule is None or isinstance(self.rule, Window), "heads in rings see a window"
        return self.rule or SEES_ALL

    @property
    def scratch(self) -> Scratch:
        """Units as they were before the step, which prompts with context read."""
        return self.units.before

    @property
    def of_window(self) -> PartInputs:
        """The same inputs for heads of which a draft reads a window."""
        t = self.tensors
        tensors = t._replace(
            tail_block=t.window_block,
            tail_start=t.window_start,
            shared_block=t.shared_block[:0],
            owner=t.owner[:0],
            owner_start=t.owner_start[:0],
        )
        return self._replace(tensors=tensors)

    def of_rows(self, step: Step) -> PartInputs:
        """The same inputs with the queries of decode rows, all tokens of a row in its heads."""
        is_alone = self.q.shape[0] == step.row_token.shape[0] == 1
        q_LKGD = self.q if is_alone else self.q.index_select(0, step.row_token)
        return self._replace(q=q_LKGD if step.decode_len == 1 else fold(q_LKGD, step.decode_len))


class DecodeRows(NamedTuple):
    """Decode rows of a step.

    Attributes:
        row: row of each token of a decode row, ``N`` for all others, ``[Q]``.
        slot, token: see ``Step``.
        end: position after each token of the rows, 0 where there is none, ``[N, M]``.
    """

    row: torch.Tensor
    slot: torch.Tensor
    token: torch.Tensor
    end: torch.Tensor

    @classmethod
    def of(cls, parts: StepParts, t: StepTensors, decode_len: int) -> DecodeRows:
        """Find the decode rows of a step, which has other rows too if the causal part runs."""
        no_row = t.row_start.shape[0]
        row = torch.where(t.causal_row < no_row, no_row, t.row) if parts.causal else t.row
        if decode_len == 1:
            end = torch.where(t.row_num_new == 1, t.row_start + 1, 0)[:, None]
            return cls(row, row, t.row_query_start, end)
        number = torch.arange(decode_len, dtype=t.row.dtype, device=t.row.device)
        start, num_new = t.row_start[:, None], t.row_num_new[:, None]
        end = torch.where((num_new <= decode_len) & (number < num_new), start + number + 1, 0)
        token = torch.clamp(t.row_query_start[:, None] + number, max=t.row.shape[0] - 1).view(-1)
        begins = torch.cat([t.row_start, t.row_start.new_zeros(1)])
        place = row * decode_len + t.positions - gather(begins, row)
        return cls(row, torch.where(row < no_row, place, no_row * decode_len), token, end)


class SlotMasks(NamedTuple):
    """Visibility of slots to decode rows as masks, for kernels that read masks from memory.

    Attributes:
        visible: slots that each token sees, bool ``[N, K, M, S]``; K may be 1 for all heads.
        unused: slots that no token of the row sees, bool ``[N, K, S, 1]``.
        bias: 0 where a token sees a slot, else a number that hides it when it is added to its score,
            ``[N, K, M, S]`` in the type of the queries; None where no kernel adds one.
    """

    visible: torch.Tensor
    unused: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def of(cls, seen: Seen, num_slots: int, bias_dtype: torch.dtype | None = None) -> SlotMasks:
        """Expand the visibility of units with ``num_slots`` slots.

        Args:
            bias_dtype: type of the bias; None = without.
        """
        visible = seen_mask(seen, num_slots)
        used = visible if visible.shape[2] == 1 else visible.any(dim=2, keepdim=True)
        bias = None
        if bias_dtype is not None:
            hidden = torch.logical_not(visible)
            bias = torch.zeros(visible.shape, dtype=bias_dtype, device=visible.device)
            bias = bias.masked_fill(hidden, hiding(bias_dtype))
        return cls(visible, torch.logical_not(used.transpose(2, 3)), bias)


class BlockStep(NamedTuple):
    """Tensors that a step derives once for all stores of blocks of one layout.

    Tensors of a part that does not run are empty.

    Attributes:
        write_index: places of the new tokens, ``[Q * K]``.
        tails: visibility of a row's tails to its tokens, ``[N, T, M]``.
        end: position after each token of the decode rows, 0 where there is none, ``[N, M]``.
        masks: those of ``tails``; None where kernels derive them.
    """

    write_index: torch.Tensor
    tails: Leading
    end: torch.Tensor
    masks: SlotMasks | None = None


class RingStep(NamedTuple):
    """Tensors that a step derives once for all stores of rings of one window and one layout.

    Tensors of a part that does not run are empty.

    Attributes:
        write_index: places of the new tokens, in the null row for those of prompts that the ring does not
            store, ``[Q * K]``.
        seen: visibility of the rings of decode rows to their tokens.
        chunk_position: positions in the rings of the scratch, -1 = empty, ``[C, W]``.
        masks: those of ``seen``; None where kernels derive them.
    """

    write_index: torch.Tensor
    seen: Seen
    chunk_position: torch.Tensor
    masks: SlotMasks | None = None
