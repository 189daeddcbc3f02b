"""Who may attend to whom: token rules, host plans (numpy) and device expansions (torch)."""

from bias_builders.expand import causal_mask, leading_slots, ring_mask
from bias_builders.ring import ring_slot, slot_position, stays_in_ring
from bias_builders.rows import StepRows, ranges
from bias_builders.rules import Window, sees_causal, sees_streaming
from bias_builders.split import SharedPart, UniquePart, split_context

__all__ = [
    "SharedPart",
    "StepRows",
    "UniquePart",
    "Window",
    "causal_mask",
    "leading_slots",
    "ranges",
    "ring_mask",
    "ring_slot",
    "sees_causal",
    "sees_streaming",
    "slot_position",
    "split_context",
    "stays_in_ring",
]
