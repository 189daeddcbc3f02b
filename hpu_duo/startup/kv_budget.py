"""Resolution of a user's KV policy and budget to the kind of head group that keeps it."""

from __future__ import annotations

import math

from hpu_duo.config import EngineConfig
from hpu_duo.kv_policies import make_kv_policy
from kernels_ref import Budget, KVPolicy, WholePrompts

_CHUNK = 512
"""Tokens of a chunk unless told: scores of a chunk are computed twice, and decodes wait for it."""


def resolve_kv_budget(config: EngineConfig, max_len: int) -> Budget | None:
    """Return the kind of the heads that have a budget; None where no head has one.

    Args:
        max_len: most tokens of a request, of which a budget may be a share.

    Raises:
        ValueError: the policy is unknown, the budget too small for it, chunks do not fit a step, or the
            engine is asked for something that budgets do not serve.
    """
    cache = config.cache
    if cache.kv_policy is None or cache.kv_budget is None:
        return None
    return make_budget(config, max_len, cache.kv_policy, cache.kv_budget)


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
    if cache.kv_prompt != "whole":
        return Budget(policy, num_slots, _chunk(config), scheduler.max_chunk_rows)
    if cache.enable_prefix_caching:
        raise ValueError("kv_prompt='whole' takes up no cached prefix: expected enable_prefix_caching=False")
    holds_whole = scheduler.max_num_batched_tokens >= _needed_for_one_step(config, max_len)
    chunk = max_len if cache.kv_chunk is None and holds_whole else _chunk(config)
    if chunk >= max_len:
        return Budget(policy, num_slots, max_len, scheduler.max_chunk_rows)
    _check_whole_in_chunks(config, policy, max_len, chunk)
    return WholePrompts(
        policy,
        num_slots,
        chunk,
        scheduler.max_chunk_rows,
        prompt_len=max_len,
        block_size=config.block_size,
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
    """Return the most tokens of a chunk for a step to hold all chunks and a token of each other request."""
    scheduler = config.scheduler
    spare = scheduler.max_num_batched_tokens - scheduler.max_num_seqs
    return spare // _chunk_rows(config) + 1


def _chunk_rows(config: EngineConfig) -> int:
    return min(config.scheduler.max_chunk_rows, config.scheduler.max_num_seqs)


def _needed_for_one_step(config: EngineConfig, max_len: int) -> int:
    """Tokens of a step that holds the longest prompt, and a token of each other request."""
    return max_len + config.scheduler.max_num_seqs - 1


def _check_whole_in_chunks(config: EngineConfig, policy: KVPolicy, max_len: int, chunk: int) -> None:
    """Refuse policies that have to see more queries at the end of a prompt than a chunk has."""
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
    """Refuse what heads with a budget do not serve."""
    refused = {
        "retrieval_parallel='heads'": config.parallel.deals_blocks and policy.pools_heads,
        "decode_len=1": config.scheduler.decode_len > 1,
        "trim_chunks=False": config.scheduler.trim_chunks,
    }
    for expected, is_asked in refused.items():
        if is_asked:
            raise ValueError(f"kv_policy={name!r} is served with {expected} only")
