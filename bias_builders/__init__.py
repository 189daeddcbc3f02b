"""Visibility of attention: token rules, host plans (numpy) and device expansions (torch)."""

from bias_builders.expand import (
    Held,
    Leading,
    Seen,
    causal_mask,
    leading_slots,
    leading_visible,
    ring_mask,
    seen_mask,
)
from bias_builders.ring import Ring, ring_slot, slot_position, stays_in_ring
from bias_builders.rows import StepRows, ranges
from bias_builders.rules import Window, sees_causal, sees_streaming
from bias_builders.split import NOWHERE, SharedPart, UniquePart, split_context, tails_per_row

__all__ = [
    "NOWHERE",
    "Held",
    "Leading",
    "Ring",
    "Seen",
    "SharedPart",
    "StepRows",
    "UniquePart",
    "Window",
    "causal_mask",
    "leading_slots",
    "leading_visible",
    "ranges",
    "ring_mask",
    "ring_slot",
    "seen_mask",
    "sees_causal",
    "sees_streaming",
    "slot_position",
    "split_context",
    "stays_in_ring",
    "tails_per_row",
]
