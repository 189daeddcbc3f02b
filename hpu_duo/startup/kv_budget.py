"""Resolution of a user's KV policy, budget, plan and attention rules to kinds of head groups."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from bias_builders import BlockTable, Quest, Rule, RuleIntersection, RuleUnion, TopBlocks, Window
from hpu_duo.config.attention_rules import Choice, chooses_blocks, make_attention_rules
from hpu_duo.config.engine import EngineConfig, ParallelConfig
from hpu_duo.config.kv_plan import ALL, RING, Keep, KVPlan
from hpu_duo.config.limits import HPU_LAYER_KINDS
from hpu_duo.heads.eviction import make_kv_policy
from hpu_duo.option_spec import call_with_options
from kernels_ref import (
    Blocks,
    Budget,
    ChosenBlocks,
    GroupKind,
    HeadGroup,
    KVPolicy,
    QuestBlocks,
    Rings,
    WholePrompts,
)

_CHUNK = 512
"""Default tokens of a chunk: scores of a chunk are computed twice, and decodes wait for it."""


def resolve_kv_budget(config: EngineConfig, max_len: int) -> Budget | None:
    """Return the kind of the heads that have a budget; None where no head has one.

    Args:
        max_len: most tokens of a request, of which a budget may be a share.

    Raises:
        ValueError: the policy is unknown, the budget too small for it, chunks do not fit a step, or another
            setting does not support budgets.
    """
    cache = config.cache
    if cache.kv_policy is None or cache.kv_budget is None:
        return None
    return make_budget(config, max_len, cache.kv_policy, cache.kv_budget)


def pools_heads(config: EngineConfig) -> bool:
    """Whether a policy of the configuration averages over the heads of a layer, which ranks do by heads only.

    Raises:
        ValueError: a policy is unknown, or the KV plan cannot be read.
    """
    plan = read_kv_plan(config)
    keeps = [] if plan is None else [keep.what for heads in plan.layers for keep in heads if keep.has_policy]
    names = keeps if config.cache.kv_policy is None else [config.cache.kv_policy]
    return any(make_kv_policy(name).pools_heads for name in dict.fromkeys(names))


def make_budget(config: EngineConfig, max_len: int, name: str, budget: float) -> Budget:
    """Return the kind of heads with a policy and a budget.

    Args:
        name: of the policy, with options.
        budget: tokens, or, up to 1, a share of ``max_len``.

    Raises:
        ValueError: see ``resolve_kv_budget``.
    """
    cache, scheduler = config.cache, config.scheduler
    policy = make_kv_policy(name)
    _check_supported(config, name, policy)
    num_slots = math.ceil(budget * max_len) if budget <= 1 else int(budget)
    if num_slots < (needed := policy.num_needed(max_len)):
        raise ValueError(
            f"kv_policy={name!r} keeps up to {needed} tokens of max_model_len={max_len}: expected "
            f"a kv_budget of at least {needed} tokens, got {num_slots}"
        )
    num_slots = min(num_slots, max_len)
    num_rows, versions = scheduler.max_chunk_rows, scheduler.decode_len
    if cache.kv_prompt != "whole":
        return Budget(policy, num_slots, _chunk(config), num_rows, versions=versions)
    if cache.enable_prefix_caching:
        raise ValueError(
            "kv_prompt='whole' does not support the prefix cache: expected enable_prefix_caching=False"
        )
    holds_whole = scheduler.max_num_batched_tokens >= _needed_for_one_step(config, max_len)
    chunk = max_len if cache.kv_chunk is None and holds_whole else _chunk(config)
    if chunk >= max_len:
        return Budget(policy, num_slots, max_len, num_rows, versions=versions)
    _check_whole_in_chunks(config, policy, max_len, chunk)
    return WholePrompts(
        policy,
        num_slots,
        chunk,
        prompt_len=max_len,
        block_size=config.block_size,
        max_chunk_rows=num_rows,
        versions=versions,
    )


def _chunk(config: EngineConfig) -> int:
    """Tokens of a prompt between the places at which heads choose."""
    cache, most = config.cache, longest_chunk(config)
    chunk = cache.kv_chunk
    if chunk is None:
        # Blocks that ranks deal out may be longer than that.
        chunk = min(max(_CHUNK, cache.enable_prefix_caching * config.block_size), most)
        if chunk > config.block_size:
            chunk -= chunk % config.block_size
    if not 2 <= chunk <= most:
        raise ValueError(
            f"expected a kv_chunk of 2 to {most} tokens, so that a step of max_num_batched_tokens="
            f"{config.scheduler.max_num_batched_tokens} holds max_chunk_rows={_chunk_rows(config)} chunks "
            f"and a token of each other request, got {chunk}"
        )
    if cache.enable_prefix_caching and chunk % config.block_size:
        raise ValueError(
            f"prefixes are taken up where a chunk and a block end: expected kv_chunk to be a multiple of "
            f"block_size={config.block_size}, or enable_prefix_caching=False, got {chunk}"
        )
    return chunk


def longest_chunk(config: EngineConfig) -> int:
    """Return the most tokens of a chunk, for a step with all chunks and a token of each other request."""
    scheduler = config.scheduler
    spare = scheduler.max_num_batched_tokens - scheduler.max_num_seqs
    return spare // _chunk_rows(config) + 1


def _chunk_rows(config: EngineConfig) -> int:
    return min(config.scheduler.max_chunk_rows, config.scheduler.max_num_seqs)


def _needed_for_one_step(config: EngineConfig, max_len: int) -> int:
    """Return the tokens of a step with the longest prompt, and a token of each other request."""
    return max_len + config.scheduler.max_num_seqs - 1


def _check_whole_in_chunks(config: EngineConfig, policy: KVPolicy, max_len: int, chunk: int) -> None:
    """Raise ValueError for policies that observe more queries at the end of a prompt than a chunk has."""
    if policy.num_ahead:
        raise ValueError(
            f"kv_policy={policy.name!r} counts all queries of a whole prompt: expected kv_chunk=None and "
            f"max_num_batched_tokens of at least {_needed_for_one_step(config, max_len)}, so that it is read "
            f"in one step, got kv_chunk={config.cache.kv_chunk} and {config.scheduler.max_num_batched_tokens}"
        )
    fewest = max(2, policy.num_observed or 0) + 1
    if chunk < fewest:
        raise ValueError(
            f"kv_policy={policy.name!r} observes queries of the last chunk of a whole prompt: expected "
            f"chunks of at least {fewest} tokens, got {chunk}"
        )


def _check_supported(config: EngineConfig, name: str, policy: KVPolicy) -> None:
    """Raise ValueError for settings that heads with a budget do not support."""
    refused = {
        "retrieval_parallel='heads'": config.parallel.deals_blocks and policy.pools_heads,
        "trim_chunks=False": config.scheduler.trim_chunks,
    }
    for expected, is_asked in refused.items():
        if is_asked:
            raise ValueError(f"kv_policy={name!r} is served with {expected} only")


_log = logging.getLogger(__name__)
_ORDER = (Blocks.name, Rings.name, Budget.name)


def resolve_kv_plan(
    config: EngineConfig, num_kv_heads: Sequence[int], max_len: int, slack: int, device: torch.device
) -> tuple[tuple[GroupKind, ...], ...] | None:
    """Return the kind of each KV head of each layer; None where there is no plan.

    Args:
        num_kv_heads: KV heads of each layer.
        max_len: most tokens of a request.
        slack: slots of a ring beyond its window.
        device: where layers will run; kinds of layers are counted on HPU.

    Raises:
        ValueError: the plan does not fit the model, names an unknown policy, or another setting does not
            support plans.
    """
    plan = read_kv_plan(config)
    if plan is None:
        return None
    refused = {
        "no head pattern, which a plan replaces": config.heads.pattern is not None,
        "attention_rule=None": config.heads.attention_rule is not None,
        "kv_chunk=None and kv_prompt='chunks', without a budget": not plan.has_budgets
        and (config.cache.kv_chunk is not None or config.cache.kv_prompt != "chunks"),
    }
    for expected, is_asked in refused.items():
        if is_asked:
            raise ValueError(f"kv_plan is served with {expected} only")
    expected_shape = (len(num_kv_heads), *set(num_kv_heads))
    if (len(plan.layers), plan.num_kv_heads) != expected_shape:
        raise ValueError(
            f"expected a kv_plan of {expected_shape[0]} layers with {expected_shape[1:]} KV heads, got "
            f"{len(plan.layers)} layers with {plan.num_kv_heads}"
        )

    def ring(sink: int = 4, recent: int = 252) -> GroupKind:
        return Rings(Window(sink, recent).validate().clipped(max_len), slack)

    kinds: dict[Keep, GroupKind] = {}
    for keep in dict.fromkeys(keep for heads in plan.layers for keep in heads):
        kinds[keep] = _kind(config, max_len, keep, ring)
    found = tuple(tuple(kinds[keep] for keep in heads) for heads in plan.layers)
    _check_num_kinds(config, found, device)
    return found


def read_kv_plan(config: EngineConfig) -> KVPlan | None:
    """Return the user's KV plan, read from its file if need be; None where there is none.

    Raises:
        ValueError: see ``KVPlan.load``.
    """
    given = config.cache.kv_plan
    return given if given is None or isinstance(given, KVPlan) else KVPlan.load(given)


def planned_groups(kinds: Sequence[GroupKind]) -> tuple[np.ndarray, tuple[HeadGroup, ...]]:
    """Return the number of each head's group, and the groups of a layer: blocks, rings, budgets."""
    distinct = sorted(dict.fromkeys(kinds), key=lambda kind: (_ORDER.index(kind.name), str(kind.key)))
    numbers = [distinct.index(kind) for kind in kinds]
    groups = tuple(HeadGroup(numbers.count(number), kind) for number, kind in enumerate(distinct))
    return np.array(numbers, np.int32), groups


def check_shared(parallel: ParallelConfig, layers: Iterable[Sequence[HeadGroup]]) -> None:
    """Raise ValueError for groups of a plan that cannot be sharded: those with summed scores have to be even.

    Raises:
        ValueError: there is one; the message names its layer.
    """
    size = parallel.tensor_parallel_size
    for index, groups in enumerate(layers):
        num_kv_heads = sum(group.num_heads for group in groups)
        least = min(size, num_kv_heads)
        for group in groups:
            kind = group.kind
            is_pooled = isinstance(kind, Budget) and kind.policy.pools_heads
            if (is_pooled or num_kv_heads < size) and group.num_heads % least:
                raise ValueError(
                    f"expected a kv_plan whose heads {size} ranks share: a multiple of {least} of those in "
                    f"layer {index} that keep {kind.describe() or 'all tokens'}, got {group.num_heads}"
                )


def _kind(config: EngineConfig, max_len: int, keep: Keep, ring: Callable[..., GroupKind]) -> GroupKind:
    if keep.budget is not None:
        return make_budget(config, max_len, keep.what, keep.budget)
    return call_with_options("what a head keeps", keep.what, {ALL: Blocks, RING: ring})


def _check_num_kinds(
    config: EngineConfig, kinds: tuple[tuple[GroupKind, ...], ...], device: torch.device
) -> None:
    """Compare the kinds of layers, each of which is compiled for every bucket, with the most there may be."""
    num_kinds = len({planned_groups(heads)[1] for heads in kinds})
    most = config.heads.max_layer_kinds
    if most is not None and num_kinds > most:
        raise ValueError(
            f"expected a kv_plan of at most max_layer_kinds={most} kinds of layers, got {num_kinds}"
        )
    if device.type == "hpu" and num_kinds > HPU_LAYER_KINDS:
        _log.warning("the kv_plan has %d kinds of layers, each compiled for every bucket", num_kinds)


HeadRules: TypeAlias = tuple[GroupKind, ...]
"""The kind of all KV heads of a layer, or of each of them."""

_UNCOMPILED = ("default", "eager", "replay")
"""Backends that compile nothing on a CPU."""


def resolve_attention_rules(config: EngineConfig, device: torch.device, max_len: int) -> HeadRules | None:
    """Return the kinds of the heads with a rule, of all or of each; None without a rule.

    Raises:
        ValueError: a rule is unknown, or another setting does not support rules.
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
        "trim_chunks=False": chooses and config.scheduler.trim_chunks,
        **(_refused_by_quest(config) if any(isinstance(rule, Quest) for rule in rules) else {}),
    }
    for expected, is_asked in refused.items():
        if is_asked:
            raise ValueError(f"attention_rule={text!r} is served with {expected} only")
    kinds = tuple(_rule_kind(config, rule) for rule in rules)
    for kind in kinds:
        if isinstance(kind, QuestBlocks):
            kind.check_length(max_len, config.block_size)
    return kinds


def _refused_by_quest(config: EngineConfig) -> dict[str, bool]:
    """Settings that Quest requires, by their text in errors; True where the config has another value."""
    cache = config.cache
    return {
        "graphs 'eager' or 'replay', which compile nothing": config.graph.backend not in _UNCOMPILED,
        "decode_len=1 and without speculative_config": config.scheduler.decode_len > 1,
        "kv_cache_dtype='auto'": cache.kv_cache_dtype != "auto",
        "cpu_attention=None": cache.cpu_attention is not None,
    }


def _rule_kind(config: EngineConfig, rule: Rule | Choice | None) -> GroupKind:
    if not isinstance(rule, TopBlocks | Quest):
        return Blocks(rule)
    most, block_size, scheduler = longest_chunk(config), config.block_size, config.scheduler
    if not 2 <= block_size <= most:
        raise ValueError(
            f"chunks end at borders of blocks under attention_rule={rule.describe()!r}: expected block_size "
            f"of 2 to {most}, so that a step of max_num_batched_tokens={scheduler.max_num_batched_tokens} "
            f"holds a block of max_chunk_rows={scheduler.max_chunk_rows} prompts and a token of each other "
            f"request, got {block_size}"
        )
    chunk = most - most % block_size
    if isinstance(rule, TopBlocks):
        return ChosenBlocks(rule, chunk)
    if block_size % rule.every:
        raise ValueError(
            f"expected block_size to be a multiple of every in attention_rule={rule.describe()!r}, "
            f"got {block_size}"
        )
    return QuestBlocks(rule, chunk)


def resolve_max_ring_window(config: EngineConfig) -> int | None:
    """Return the longest window of a layer that is stored in rings; None = any.

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


def _has_table(rule: Rule | Choice | None) -> bool:
    if isinstance(rule, RuleUnion | RuleIntersection):
        return any(_has_table(each) for each in rule.rules)
    return isinstance(rule, BlockTable)
