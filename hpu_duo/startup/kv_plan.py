"""Resolution of a user's KV plan to kinds of heads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from bias_builders import Window
from hpu_duo.config import EngineConfig, ParallelConfig
from hpu_duo.kv_plan import ALL, RING, Keep, KVPlan
from hpu_duo.limit_config import HPU_LAYER_KINDS
from hpu_duo.named import call_with_options
from hpu_duo.startup.kv_budget import make_budget
from kernels_ref import Blocks, Budget, GroupKind, HeadGroup, Rings

_log = logging.getLogger(__name__)
_ORDER = (Blocks.name, Rings.name, Budget.name)


def resolve_kv_plan(
    config: EngineConfig, num_kv_heads: Sequence[int], max_len: int, slack: int, device: torch.device
) -> tuple[tuple[GroupKind, ...], ...] | None:
    """Return the kind of each KV head of each layer; None where there is no plan.

    Args:
        num_kv_heads: KV heads of each layer.
        max_len: most tokens of a request.
        slack: slots of a ring beside those of its window.
        device: where layers will run; kinds of layers are counted on HPU.

    Raises:
        ValueError: the plan does not fit the model, names no policy, or the engine is asked for something
            that plans do not go with.
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
    """Refuse groups under a plan that ranks cannot deal out: those whose scores they sum have to be even.

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
        _log.warning("the kv_plan makes %d kinds of layers, each compiled for every bucket", num_kinds)
