"""Device expansions: from compact int32 plans to boolean masks of static shape.

Masks are booleans and the kernels turn a hidden score into a finite floor, so no infinity and
no NaN can arise from them. Nothing larger than ``[queries of a slice, keys of a slice]`` or
``[Q, blocks of a chunk, B]`` exists at any time.

A ring of a streaming head has ``sink + recent + slack`` slots. Slots ``[0, sink)`` store the first tokens for
ever; the rest is a ring buffer. Slots therefore fill in order, and once ``n`` tokens are stored, the leading
``min(n, size)`` slots are in use. The position in a slot is a function of ``n``, so no table of positions is
stored or copied to the device.

With slack a ring stores more tokens than a window shows, so the last ``slack`` tokens can be rolled back by a
smaller number of stored tokens. Slots written since then count as their previous tokens, which no later token
sees.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from bias_builders.rules import Rule, Window, sees_causal, sees_streaming


class Leading(NamedTuple):
    """Visibility of units with positions in order, for the tokens of decode rows.

    The tokens of a row see positions ``[0, own]``, hence leading slots of such a unit.

    Attributes:
        visible: leading slots of each of the T units of a row that each of its M tokens sees, 0 = none,
            int32 ``[N, T, M]``.
    """

    visible: torch.Tensor


class Held(NamedTuple):
    """Visibility of units with positions in any order, a unit for each decode row.

    Token ``m`` of row ``n`` sees the positions in ``[begin[n, m], end[n, m])``, and those below ``sink`` and
    ``end[n, m]``.

    Attributes:
        position: position in each slot, -1 = none, int32 ``[N, K, S]``; K may be 1 for all heads.
        begin, end: int32 ``[N, M]``; ``end`` is 0 for padding.
        sink: leading positions that every token sees.
    """

    position: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    sink: int


Seen: TypeAlias = Leading | Held
"""Visibility in the units of decode rows: an interval of positions for each token."""


def leading_visible(start: torch.Tensor, end: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Slots before position ``end``, of units with positions ``start``, ``start + 1``, ..."""
    return torch.clamp(end - start, min=0, max=num_slots)


def seen_mask(seen: Seen, num_slots: int) -> torch.Tensor:
    """Expand the visibility of decode rows to a mask of slots.

    Args:
        num_slots: slots of a unit (S).
    Returns:
        bool ``[N, K, M, T * S]``, where K may be 1 for all heads; the units of a row concatenated.
    """
    if isinstance(seen, Leading):
        return leading_slots(seen.visible.transpose(1, 2), num_slots).flatten(2)[:, None]
    position, begin, end = seen.position[:, :, None], seen.begin[:, None, :, None], seen.end[:, None, :, None]
    return (position >= 0) & (position < end) & ((position >= begin) | (position < seen.sink))


def causal_mask(
    query_row: torch.Tensor,
    query_position: torch.Tensor,
    key_row: torch.Tensor,
    key_position: torch.Tensor,
    no_row: int,
    rule: Rule | None = None,
) -> torch.Tensor:
    """Mask of the new keys that each new query sees.

    Args:
        query_row, key_row: row of each token, int32 ``[..., q]`` and ``[..., k]``; ``no_row`` marks padding
            and decode rows, which are excluded.
        query_position, key_position: int32 ``[..., q]`` and ``[..., k]``.
        rule: which earlier tokens a token sees; None = all.
    Returns:
        bool ``[..., q, k]``.
    """
    same_row = (query_row[..., None] == key_row[..., None, :]) & (query_row[..., None] < no_row)
    q, k = query_position[..., None], key_position[..., None, :]
    return same_row & (sees_causal(q, k) if rule is None else rule.sees(q, k))


def leading_slots(visible: torch.Tensor, num_slots: int) -> torch.Tensor:
    """``[..., num_slots]`` booleans, true for the first ``visible`` slots."""
    slot = torch.arange(num_slots, dtype=visible.dtype, device=visible.device)
    return slot < visible[..., None]


def ring_mask(
    query_row: torch.Tensor,
    query_position: torch.Tensor,
    ring_row: torch.Tensor,
    slot_positions: torch.Tensor,
    window: Window,
) -> torch.Tensor:
    """Return the mask of the gathered rings' slots that each query of a prompt row sees.

    Args:
        query_row, query_position: int32 ``[q]``.
        ring_row: row of each gathered ring, int32 ``[C]``.
        slot_positions: positions in the slots, -1 = empty, int32 ``[C, W]``.
    Returns:
        bool ``[q, C, W]``.
    """
    own = query_row[:, None, None] == ring_row[None, :, None]
    held = slot_positions[None] >= 0
    return own & held & sees_streaming(query_position[:, None, None], slot_positions[None], window)


class Ring(NamedTuple):
    """The slots in which a streaming head stores its tokens.

    Attributes:
        window: the window of a token.
        slack: further slots, hence tokens that can be rolled back.
    """

    window: Window
    slack: int = 0

    @property
    def size(self) -> int:
        """Number of slots."""
        return self.window.sink + self.turning

    @property
    def turning(self) -> int:
        """Slots of the ring buffer, without sinks."""
        return self.window.recent + self.slack


def ring_slot(position: torch.Tensor, ring: Ring) -> torch.Tensor:
    """Slot that stores a token, same shape and integer type as ``position``."""
    sink = ring.window.sink
    return torch.where(position < sink, position, sink + torch.remainder(position - sink, ring.turning))


def stays_in_ring(position: torch.Tensor, end: torch.Tensor, ring: Ring) -> torch.Tensor:
    """Whether a token is still stored after all tokens before position ``end`` are."""
    return (position < ring.window.sink) | (position >= end - ring.turning)


def slot_position(num_stored: torch.Tensor, ring: Ring) -> torch.Tensor:
    """Position of the token in each slot, -1 where the slot is empty.

    Args:
        num_stored: tokens stored so far, integer ``[R]``.
    Returns:
        integer ``[R, size]``. For comparison only, never an index.
    """
    slot = torch.arange(ring.size, dtype=num_stored.dtype, device=num_stored.device)
    last = num_stored[:, None] - 1
    turns_back = torch.remainder(last - slot[None, :], ring.turning)
    position = torch.where(slot[None, :] < ring.window.sink, slot[None, :], last - turns_back)
    # An empty slot of the ring buffer would get a position inside the sinks or before 0.
    is_used = slot[None, :] < torch.clamp(num_stored, max=ring.size)[:, None]
    return torch.where(is_used, position, -1)
