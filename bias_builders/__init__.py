"""Visibility of attention: token rules, host plans (numpy) and device expansions (torch)."""

from bias_builders.block_tables import BlockTable, sees_by_head
from bias_builders.encoded_rules import decode_rule, encode_rule, rule_terms
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
from bias_builders.rule_texts import describe_rule
from bias_builders.rules import Rule, Tile, TileClass, Window, classify, sees_causal, sees_streaming
from bias_builders.sparse_rules import Dilated, Fixed, RuleIntersection, RuleUnion, Strided
from bias_builders.split import NOWHERE, SharedPart, UniquePart, split_context, tails_per_row
from bias_builders.top_blocks import TopBlocks, highest

__all__ = [
    "NOWHERE",
    "BlockTable",
    "Dilated",
    "Fixed",
    "Held",
    "Leading",
    "Ring",
    "Rule",
    "RuleIntersection",
    "RuleUnion",
    "Seen",
    "SharedPart",
    "StepRows",
    "Strided",
    "Tile",
    "TileClass",
    "TopBlocks",
    "UniquePart",
    "Window",
    "causal_mask",
    "classify",
    "decode_rule",
    "describe_rule",
    "encode_rule",
    "highest",
    "leading_slots",
    "leading_visible",
    "ranges",
    "ring_mask",
    "ring_slot",
    "rule_terms",
    "seen_mask",
    "sees_by_head",
    "sees_causal",
    "sees_streaming",
    "slot_position",
    "split_context",
    "stays_in_ring",
    "tails_per_row",
]
