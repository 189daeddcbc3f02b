"""Resolution of a user's attention rules, and of the windows that are served as one."""

from __future__ import annotations

from typing import TypeAlias

import torch

from bias_builders import BlockTable, Rule, RuleIntersection, RuleUnion, TopBlocks
from hpu_duo.attention_rules import chooses_blocks, make_attention_rules
from hpu_duo.config import EngineConfig
from hpu_duo.startup.kv_budget import longest_chunk
from kernels_ref import Blocks, ChosenBlocks, GroupKind

HeadRules: TypeAlias = tuple[GroupKind, ...]
"""The kind of all KV heads of a layer, or of each of them."""

_UNCOMPILED = ("default", "eager", "replay")
"""Backends that compile nothing on a CPU."""


def resolve_attention_rules(config: EngineConfig, device: torch.device) -> HeadRules | None:
    """Return the kinds of the heads that would stream under a pattern, or of all; None without a rule.

    Raises:
        ValueError: a rule is unknown, or the engine is asked for something that rules do not go with.
    """
    text = config.heads.attention_rule
    if text is None:
        return None
    rules = make_attention_rules(text)
    chooses = chooses_blocks(text)
    is_portable = chooses or any(_has_table(rule) for rule in rules)
    attention = config.model.attention
    is_eager = attention in ("auto", "reference") and config.graph.backend in _UNCOMPILED
    is_served = device.type == "cpu" and (attention == "sdpa" or is_eager)
    refused = {
        "tensor_parallel_size of 1": config.parallel.tensor_parallel_size > 1,
        "kv_policy=None": config.cache.kv_policy is not None,
        "attention 'sdpa', or without a compiler 'reference', on a CPU": is_portable and not is_served,
        "decode_len=1": chooses and config.scheduler.decode_len > 1,
        "trim_chunks=False": chooses and config.scheduler.trim_chunks,
    }
    for expected, is_asked in refused.items():
        if is_asked:
            raise ValueError(f"attention_rule={text!r} is served with {expected} only")
    return tuple(_kind(config, rule) for rule in rules)


def _kind(config: EngineConfig, rule: Rule | TopBlocks | None) -> GroupKind:
    if not isinstance(rule, TopBlocks):
        return Blocks(rule)
    most, block_size, scheduler = longest_chunk(config), config.block_size, config.scheduler
    if not 2 <= block_size <= most:
        raise ValueError(
            f"chunks end at borders of blocks under attention_rule={rule.describe()!r}: expected block_size "
            f"of 2 to {most}, so that a step of max_num_batched_tokens={scheduler.max_num_batched_tokens} "
            f"holds a block of max_chunk_rows={scheduler.max_chunk_rows} prompts and a token of each other "
            f"request, got {block_size}"
        )
    return ChosenBlocks(rule, most - most % block_size)


def resolve_max_ring_window(config: EngineConfig) -> int | None:
    """Return the longest window of a layer that is kept in rings; None = any.

    Raises:
        ValueError: several ranks would share the layers.
    """
    longest = config.heads.max_ring_window
    if longest is not None and config.parallel.tensor_parallel_size > 1:
        raise ValueError(f"max_ring_window={longest} is served with tensor_parallel_size of 1 only")
    return longest


def rules_by_head(rules: HeadRules, num_kv_heads: int) -> HeadRules:
    """Return a rule for each KV head of a layer.

    Raises:
        ValueError: there are neither one nor as many.
    """
    if len(rules) not in (1, num_kv_heads):
        raise ValueError(
            f"expected an attention_rule for all KV heads of a layer or for each of {num_kv_heads}, "
            f"got {len(rules)}"
        )
    return rules * num_kv_heads if len(rules) == 1 else rules


def _has_table(rule: Rule | TopBlocks | None) -> bool:
    if isinstance(rule, RuleUnion | RuleIntersection):
        return any(_has_table(each) for each in rule.rules)
    return isinstance(rule, BlockTable)
