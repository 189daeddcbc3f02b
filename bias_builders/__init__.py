"""Visibility of attention: token rules, host plans (numpy) and device expansions (torch)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bias_builders.rules import (
    Behind,
    Dilated,
    Fixed,
    Rule,
    RuleIntersection,
    RuleUnion,
    Strided,
    Tile,
    Window,
    sees_causal,
    sees_streaming,
)
from bias_builders.split import (
    NOWHERE,
    SharedPart,
    StepRows,
    UniquePart,
    count_context,
    ranges,
    split_context,
    tails_per_row,
)

if TYPE_CHECKING:
    from bias_builders.block_tables import BlockTable, sees_by_head
    from bias_builders.encoded_rules import decode_rule, encode_rule, rule_terms
    from bias_builders.expand import (
        Held,
        Leading,
        Ring,
        Seen,
        causal_mask,
        leading_slots,
        leading_visible,
        ring_mask,
        ring_slot,
        seen_mask,
        slot_position,
        stays_in_ring,
    )
    from bias_builders.rule_texts import describe_rule
    from bias_builders.top_blocks import Quest, TopBlocks, highest

__all__ = [
    "NOWHERE",
    "Behind",
    "BlockTable",
    "Dilated",
    "Fixed",
    "Held",
    "Leading",
    "Quest",
    "Ring",
    "Rule",
    "RuleIntersection",
    "RuleUnion",
    "Seen",
    "SharedPart",
    "StepRows",
    "Strided",
    "Tile",
    "TopBlocks",
    "UniquePart",
    "Window",
    "causal_mask",
    "count_context",
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

_HOMES = {
    "describe_rule": "bias_builders.rule_texts",
    "decode_rule": "bias_builders.encoded_rules",
    "encode_rule": "bias_builders.encoded_rules",
    "rule_terms": "bias_builders.encoded_rules",
    "BlockTable": "bias_builders.block_tables",
    "sees_by_head": "bias_builders.block_tables",
    "Held": "bias_builders.expand",
    "Leading": "bias_builders.expand",
    "Seen": "bias_builders.expand",
    "causal_mask": "bias_builders.expand",
    "leading_slots": "bias_builders.expand",
    "leading_visible": "bias_builders.expand",
    "ring_mask": "bias_builders.expand",
    "seen_mask": "bias_builders.expand",
    "Ring": "bias_builders.expand",
    "ring_slot": "bias_builders.expand",
    "slot_position": "bias_builders.expand",
    "stays_in_ring": "bias_builders.expand",
    "Quest": "bias_builders.top_blocks",
    "TopBlocks": "bias_builders.top_blocks",
    "highest": "bias_builders.top_blocks",
}


def __getattr__(name: str) -> Any:
    # Their modules import torch, which planning and simulation do not need.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
