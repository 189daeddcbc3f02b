"""Pages of keys that decode rows read: blocks, chosen by the minima and maxima of their keys (Quest).

A block of a store has one more slot, which holds the minima of its keys in place of a key, and their maxima
in place of a value. If a choice serves several steps there is another slot, for the numbers that a head has
chosen, in the block of the token that chose. So copies of a block have both.

Shapes: N rows of a step, K key/value heads, G query heads of each, L blocks of the longest text, P pages
besides that of the token itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bias_builders import Leading, Quest
from kernels_ref.partial import Partial
from kernels_ref.step import BlockStep, DecodeRows, PartInputs, StepParts, StepTensors
from kernels_ref.units import KVUnits, UnitLayout, gather, index_dtype

_INTEGERS = {2: torch.int16, 4: torch.int32}
"""Types of numbers of blocks, by the bytes of an element of a store."""


class PageStep(NamedTuple):
    """Blocks of the rows of a step; those that are not there are the null block.

    Attributes:
        written: blocks with new tokens, int32 ``[T]``.
        begun: those of them with tokens of prompts, int32 ``[T]``; empty in steps of decodes.
        own: block of the token of each decode row, int32 ``[N]``.
        own_visible: its slots up to the token, int32 ``[N]``.
        number: of that block in its text, int32 ``[N]``.
        turn: number within the block, from 1, of the choice that the token uses, int32 ``[N]``.
        begins: whether the token is the first one to use it, bool ``[N]``.
        table: blocks of the text by number, int32 ``[N, L]``.
        prompt_reads: who reads which shared block, without decode rows, int32 ``[N + 1, S]``.
    """

    written: torch.Tensor
    begun: torch.Tensor
    own: torch.Tensor
    own_visible: torch.Tensor
    number: torch.Tensor
    turn: torch.Tensor
    begins: torch.Tensor
    table: torch.Tensor
    prompt_reads: torch.Tensor


def page_step(
    parts: StepParts, t: StepTensors, rows: DecodeRows, block_size: int, null: int, every: int
) -> PageStep:
    """Find the blocks of a step whose decode rows have a token each.

    Args:
        null: id of the null block.
        every: tokens that use a choice, a divisor of ``block_size``.
    """
    end, count = rows.end[:, 0], rows.end.shape[0]
    is_row = end > 0
    position = torch.clamp(end - 1, min=0)
    own = torch.where(is_row, gather(t.write_block, rows.token), null)
    offset = position % block_size
    number = torch.where(is_row, position // block_size, 0)
    if parts.causal:
        written, begun = _written(t, block_size, null)
    else:
        written, begun = t.write_block, t.write_block[:0]
    reads = t.shared_reads
    is_decode = torch.cat([is_row, is_row.new_zeros(1)])[:, None]
    return PageStep(
        written,
        begun,
        own,
        torch.where(is_row, offset + 1, 0),
        number,
        offset // every + 1,
        offset % every == 0,
        _table(t, is_row, count, block_size, null),
        torch.where(is_decode, 0, reads),
    )


def _written(t: StepTensors, block_size: int, null: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks with new tokens, each once; as many as the tokens of so many rows can be in."""
    no_row, num_queries = t.row_start.shape[0], t.row.shape[0]
    most = num_queries // block_size + 2 * min(num_queries, no_row)
    following = torch.cat([t.row[1:], torch.full_like(t.row[:1], -1)])
    is_last = (t.row < no_row) & ((t.write_offset == block_size - 1) | (following != t.row))
    place = torch.cumsum(is_last.to(torch.int32), dim=0, dtype=torch.int32) - 1
    place = torch.where(is_last, place, most).to(index_dtype(t.row.device))
    found = torch.full((most + 1,), null, dtype=torch.int32, device=t.row.device)
    begun = torch.where(t.causal_row < no_row, t.write_block, null)
    written, begun = (found.index_copy(0, place, block)[:most] for block in (t.write_block, begun))
    return written, begun


def _table(t: StepTensors, is_row: torch.Tensor, count: int, block_size: int, null: int) -> torch.Tensor:
    """Whole blocks before the token of each decode row, by their numbers."""
    num_shared, num_unique, device = t.shared_block.shape[0], t.owner.shape[0], t.owner.device
    most = num_shared + num_unique
    # One more row and one more column, for blocks of nobody.
    table = torch.full((count + 1, most + 1), null, dtype=torch.int32, device=device)
    column = torch.clamp(t.owner_start[:num_unique] // block_size, max=most)
    block = torch.arange(num_unique, dtype=torch.int32, device=device)
    table[t.owner.long(), column.long()] = block
    if num_shared:
        each = torch.arange(count, dtype=torch.int32, device=device)[:, None]
        row = torch.where((t.shared_reads[:count] > 0) & is_row[:, None], each, count)
        column = torch.clamp(t.shared_start // block_size, max=most).expand(row.shape)
        table[row.long(), column.long()] = t.shared_block.expand(row.shape)
    return table[:count, :most]


def keys_only(units: KVUnits, block_size: int) -> KVUnits:
    """The same units without the slots behind their keys."""
    layout = units.layout._replace(num_slots=block_size)
    return units._replace(layout=layout, views=layout.views(units.tensors))


def write_bounds(units: KVUnits, plan: PageStep, block_size: int) -> None:
    """Write the minima and maxima of all blocks with new tokens; undefined for blocks that are not full.

    They are those of all keys of the block, so a rolled-back token that was replaced leaves no trace.
    """
    keys = gather(units.views[0][:, :, :block_size], plan.written)
    place = _places(plan.written, units.layout, block_size)
    for flat, bound in zip(units.tensors, (keys.amin(dim=2), keys.amax(dim=2))):
        flat.index_copy_(0, place, bound.flatten(0, 1))


def clear_choices(units: KVUnits, plan: PageStep, block_size: int) -> None:
    """Mark that no choice lies in the blocks of the new tokens of prompts."""
    _write_integers(units, plan.begun, block_size, torch.zeros((), dtype=torch.int32).expand(1, 1, 1))


def stored_choices(
    units: KVUnits, plan: PageStep, block_size: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages that rows have chosen before, int32 ``[N, K, P]``, and whether one chooses anew, bool ``[N]``."""
    slot = block_size + 1
    stored = torch.cat([_integers(x)[:, :, slot].index_select(0, plan.own) for x in units.views], dim=2)
    is_due = plan.begins | (stored[:, 0, 0] != plan.turn)
    return stored[:, :, 1 : most + 1].to(torch.int32), is_due


def store_choices(units: KVUnits, plan: PageStep, block_size: int, number_NKP: torch.Tensor) -> None:
    """Store the choices of decode rows."""
    turn = plan.turn[:, None, None].expand(-1, number_NKP.shape[1], 1)
    _write_integers(units, plan.own, block_size, torch.cat([turn, number_NKP], dim=2))


def _write_integers(units: KVUnits, block: torch.Tensor, block_size: int, number: torch.Tensor) -> None:
    """Fill the second slot behind the keys of some blocks; what is left of it becomes 0."""
    (k, v), (num_heads, dim) = units.tensors, (units.layout.num_heads, units.tensors[0].shape[-1])
    full = torch.zeros((len(block), num_heads, 2 * dim), dtype=_INTEGERS[k.itemsize], device=k.device)
    full[:, :, : number.shape[2]] = number
    place = _places(block, units.layout, block_size + 1)
    for flat, part in ((k, full[:, :, :dim]), (v, full[:, :, dim:])):
        _integers(flat).index_copy_(0, place, part.flatten(0, 1))


def _integers(x: torch.Tensor) -> torch.Tensor:
    return x.view(_INTEGERS[x.itemsize])


def _places(block: torch.Tensor, layout: UnitLayout, slot: int) -> torch.Tensor:
    """Places of one slot of all heads of some blocks."""
    head = torch.arange(layout.num_heads, dtype=torch.int32, device=block.device) * layout.head_stride
    place = block[:, None] * layout.unit_stride + (layout.offset + slot) + head
    return place.view(-1).to(index_dtype(block.device))


def best_pages(
    q_NKGD: torch.Tensor,
    low_XKD: torch.Tensor,
    high_XKD: torch.Tensor,
    table_NL: torch.Tensor,
    number_N: torch.Tensor,
    most: int,
) -> torch.Tensor:
    """Numbers of the pages before each row's own that its heads read, int32 ``[N, K, P]``, -1 behind them.

    The first page and the one before the row's own are among them. The others are those of the highest score:
    the most that any query head of the key/value head can give a key between the bounds of the page.

    Args:
        low_XKD, high_XKD: bounds of the keys of all blocks, undefined for those that are not full.
        table_NL, number_N: see ``PageStep``.
        most: P.
    """
    num_kv, longest = q_NKGD.shape[1], table_NL.shape[1]
    order = torch.arange(longest, dtype=torch.int32, device=q_NKGD.device)
    may_NL = order < number_N[:, None]
    if longest <= most:
        found = torch.where(may_NL, order, -1)[:, None].expand(-1, num_kv, -1)
        return torch.nn.functional.pad(found, (0, most - longest), value=-1)
    block = table_NL.reshape(-1)
    low, high = (gather(x, block).unflatten(0, table_NL.shape) for x in (low_XKD, high_XKD))
    q = q_NKGD.float()
    score = torch.matmul(q.clamp(min=0), high.float().permute(0, 2, 3, 1))
    score = score + torch.matmul(q.clamp(max=0), low.float().permute(0, 2, 3, 1))
    is_always = (order == 0) | (order == number_N[:, None] - 1)
    rank = torch.where(is_always[:, None], torch.inf, score.amax(dim=2))
    top = torch.topk(torch.where(may_NL[:, None], rank, -torch.inf), most, dim=-1)
    return torch.where(top.values > -torch.inf, top.indices.to(torch.int32), -1)


def chosen_pages(
    q_NKGD: torch.Tensor,
    low_XKD: torch.Tensor,
    high_XKD: torch.Tensor,
    plan: PageStep,
    stored: tuple[torch.Tensor, torch.Tensor] | None,
    most: int,
) -> torch.Tensor:
    """Pages of all rows, int32 ``[N, K, P]``: computed, or those of ``stored``.

    Args:
        stored: see ``stored_choices``; None = all rows choose.
    """
    found = best_pages(q_NKGD, low_XKD, high_XKD, plan.table, plan.number, most)
    return found if stored is None else torch.where(stored[1][:, None, None], found, stored[0])


def as_rows(
    inputs: PartInputs, plan: PageStep, number_NKP: torch.Tensor, blocks: BlockStep
) -> tuple[PartInputs, BlockStep]:
    """Each head of a decode row as a row of its own, whose tails are its pages, in units of one head.

    Args:
        inputs: of decode rows, with units of keys only.
        number_NKP: pages, see ``best_pages``.
    """
    units, t, q_NKGD = inputs.units, inputs.tensors, inputs.q
    layout, (num_rows, num_kv) = units.layout, q_NKGD.shape[:2]
    number_NKP = number_NKP[:, :, : plan.table.shape[1]]
    table = plan.table[:, None].expand(-1, num_kv, -1)
    page = torch.gather(table, 2, number_NKP.clamp(min=0).long())
    own = plan.own[:, None, None].expand(-1, num_kv, 1)
    head = torch.arange(num_kv, dtype=torch.int32, device=page.device)[:, None]
    unit = torch.cat([page, own], dim=2) * num_kv + head
    full = torch.where(number_NKP >= 0, layout.num_slots, 0)
    last = plan.own_visible[:, None, None].expand(-1, num_kv, 1)
    visible = torch.cat([full, last], dim=2).to(torch.int32).flatten(0, 1)[..., None]
    of_heads = UnitLayout(
        layout.num_units * num_kv, 1, layout.num_slots, layout.head_stride, layout.head_stride
    )
    units = units._replace(layout=of_heads, views=of_heads.views(units.tensors))
    t = t._replace(owner=t.owner[:0], owner_start=t.owner_start[:0], tail_block=unit.flatten(0, 1))
    rows = inputs._replace(q=q_NKGD.reshape(num_rows * num_kv, 1, *q_NKGD.shape[2:]), units=units, tensors=t)
    return rows, blocks._replace(tails=Leading(visible), masks=None)


def of_heads(partial: Partial, num_kv: int) -> Partial:
    """Partials of such rows as those of decode rows, ``[N, K, G, ...]``."""
    return Partial(*(x.squeeze(1).unflatten(0, (-1, num_kv)) for x in partial))


def num_further_slots(choice: Quest) -> int:
    """Slots of a block behind those of its keys: one for bounds, and one for a choice that is stored."""
    return 1 + (choice.every > 1)
