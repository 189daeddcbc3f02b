"""Frequencies of rotary embeddings, for policies that need them, and texts beyond the trained length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from hpu_duo.config import EngineConfig
from hpu_duo.kv_policies import make_kv_policy
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.modeling.rope import positions_served, served_len, short_len
from hpu_duo.modeling.rotation import rotary_frequencies
from hpu_duo.startup.heads import HeadAssignment
from hpu_duo.startup.kv_budget import resolve_kv_budget
from kernels_ref import Budget, HeadGroup


def with_frequencies(
    model: PreTrainedModel, layers: Sequence[DecoderLayer], heads: Sequence[HeadAssignment]
) -> tuple[HeadAssignment, ...]:
    """Give heads with a budget the frequencies of their layer, where their policy needs them.

    Raises:
        ValueError: the model has no plain rotary embedding in such a layer, or has no weights to try it with.
    """
    if not any(_needs_rotary(group) for each in heads for group in each.groups):
        return tuple(heads)
    name = type(model).__name__
    # Fake tensors name a device, but their storage is on none.
    if any(parameter.untyped_storage().device.type == "meta" for parameter in model.parameters()):
        raise ValueError(f"the rotary embedding of {name} is read from its weights, which are not there")
    found = rotary_frequencies(model, layers)
    served = []
    for index, (each, frequencies) in enumerate(zip(heads, found)):
        groups = tuple(_with(group, frequencies, f"{name}, layer {index}") for group in each.groups)
        served.append(each._replace(groups=groups))
    return tuple(served)


def _needs_rotary(group: HeadGroup) -> bool:
    return isinstance(group.kind, Budget) and group.kind.policy.needs_rotary


def _with(group: HeadGroup, frequencies: tuple[float, ...] | None, where: str) -> HeadGroup:
    if not _needs_rotary(group):
        return group
    assert isinstance(group.kind, Budget)
    if frequencies is None:
        raise ValueError(
            f"{where} is not served with kv_policy {group.kind.policy.name!r}, which turns queries: expected "
            "a plain rotary embedding, of the halves of a head against each other by fixed frequencies"
        )
    return replace(group, kind=replace(group.kind, frequencies=frequencies))


def request_len(config: EngineConfig, text_config: Any) -> int:
    """Return the longest request that an engine serves; see ``served_len``.

    Where all heads have positions in the cache, texts may be longer than those that the model was trained
    with: no distance is. Prompts that are read whole have the distances of the text.

    Raises:
        ValueError: see ``served_len``; or kept tokens and a chunk are more than the model's positions.
    """
    wanted = config.scheduler.max_model_len
    policy = None if config.cache.kv_policy is None else make_kv_policy(config.cache.kv_policy)
    is_bounded = policy is None or not policy.positions_in_cache
    is_whole, has_others = config.cache.kv_prompt == "whole", config.heads.pattern is not None
    sees_more = is_whole or has_others or short_len(text_config) is not None
    if wanted is None or is_bounded or sees_more or wanted <= positions_served(text_config):
        return served_len(text_config, wanted)
    budget, most = resolve_kv_budget(config, wanted), positions_served(text_config)
    assert budget is not None
    if budget.budget + budget.chunk > most:
        raise ValueError(
            f"expected kv_budget and kv_chunk of at most {most} tokens together, the positions that this "
            f"model serves, for max_model_len={wanted}, got {budget.budget} and {budget.chunk}"
        )
    return wanted
