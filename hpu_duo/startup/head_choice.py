"""Choice of retrieval heads from a head pattern: those of steps, and those that read all blocks in drafts."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hpu_duo.config.engine import EngineConfig, HeadConfig
from hpu_duo.config.limits import HPU_LAYER_KINDS
from hpu_duo.heads import CountRule, HeadPattern, fewest_promotions
from hpu_duo.heads.pattern import FINGERPRINT_KEY, check_origin
from hpu_duo.modeling.attention import LayerKind
from hpu_duo.modeling.hub import has_weights, model_fingerprint, model_name
from hpu_duo.modeling.probe import DecoderLayer, pattern_rows

_log = logging.getLogger(__name__)


def resolve_pattern(
    heads: HeadConfig,
    layers: tuple[DecoderLayer, ...],
    max_len: int,
    device: torch.device,
    num_ranks: int = 1,
) -> HeadPattern | None:
    """Return the binarised head pattern, checked against the model, with at most ``max_layer_kinds``.

    Args:
        max_len: tokens of a request.
        device: where layers will run; decides ``max_layer_kinds`` where that is open.
        num_ranks: ranks with equally many of the retrieval heads of each layer.

    Returns:
        The pattern with a row for each layer; None when every head is a retrieval head.

    Raises:
        ValueError: the pattern does not fit the model or is not cut, or the layers have more structures than
            ``max_layer_kinds``.
    """
    pattern = _binarised(heads, layers)
    if pattern is None:
        return None
    rule = _count_rule(heads, layers, num_ranks)
    chosen = _of_few_kinds(pattern, rule, _stored(layers), max_len, device)
    return chosen.of_layers(pattern_rows(layers))


def _stored(layers: Sequence[DecoderLayer]) -> tuple[DecoderLayer, ...]:
    return tuple(layer for layer in layers if layer.call.source is None)


def _count_rule(heads: HeadConfig, layers: Sequence[DecoderLayer], num_ranks: int) -> CountRule:
    # With fewer key/value heads than ranks, each rank has one, and a layer has all or none that retrieve.
    return CountRule(heads.max_layer_kinds, min(num_ranks, layers[0].call.num_kv_heads))


def drafting_heads(
    config: EngineConfig,
    pattern: HeadPattern | None,
    layers: tuple[DecoderLayer, ...],
    max_len: int,
    device: torch.device,
) -> np.ndarray | None:
    """Return the retrieval heads that read all blocks in drafts; see ``Kinds.drafting``.

    Layers of one kind have equally many, unless there is room for more kinds of them.

    Args:
        pattern: what ``resolve_pattern`` returned.

    Raises:
        ValueError: the engine cannot tell heads apart in drafts.
    """
    speculation = config.scheduler.speculation
    if speculation is None or speculation.draft_sparsity is None:
        return None
    _check_drafting(config, speculation.draft_sparsity, layers)
    assert pattern is not None, "checked above"
    stored = _stored(layers)
    served = pattern.of_layers([place for place, layer in enumerate(layers) if layer.call.source is None])
    asked = _binarised(replace(config.heads, sparsity=speculation.draft_sparsity, threshold=None), layers)
    assert asked is not None, "there is a pattern"
    retrieve = served.mask & ~np.array([[has_window(layer, max_len)] for layer in stored])
    kept = asked.mask & retrieve
    structures = [(_structure(layer, max_len), int(row.sum())) for layer, row in zip(stored, retrieve)]
    rule = _count_rule(config.heads, layers, config.parallel.tensor_parallel_size)
    if rule.max_kinds is not None or device.type == "hpu":
        rule = replace(rule, max_kinds=max(rule.max_kinds or HPU_LAYER_KINDS, len(set(structures))))
    counts = fewest_promotions(kept.sum(axis=1).tolist(), rule, structures)
    # Heads that stream come last: they are not promoted.
    scores = np.where(retrieve, asked.scores, asked.scores.min() - 1)
    chosen = replace(asked, scores=scores, retrieval=kept, promoted=None).promote(counts)
    return chosen.of_layers(pattern_rows(layers)).mask


def _check_drafting(config: EngineConfig, draft_sparsity: float, layers: Sequence[DecoderLayer]) -> None:
    others = config.cache.kv_policy, config.cache.kv_plan, config.heads.attention_rule
    sparsity = config.heads.sparsity
    needed = {
        "a head pattern": config.heads.pattern is None,
        "heads without a KV budget, a KV plan or an attention_rule": any(others),
        "retrieval_parallel='heads'": config.parallel.deals_blocks,
        "heads with keys and values of their own, not latents": any(layer.call.latent for layer in layers),
        f"sparsity of at most that, got {sparsity}": sparsity is not None and sparsity > draft_sparsity,
    }
    for what, is_missing in needed.items():
        if is_missing:
            raise ValueError(f"speculative_config: draft_sparsity={draft_sparsity} needs {what}")


def _of_few_kinds(
    pattern: HeadPattern,
    rule: CountRule,
    layers: tuple[DecoderLayer, ...],
    max_len: int,
    device: torch.device,
) -> HeadPattern:
    """Return the pattern with the fewest promoted heads that satisfies the rule."""
    structures = [_structure(layer, max_len) for layer in layers]
    if rule.max_kinds is None and device.type == "hpu":
        rule = replace(rule, max_kinds=max(HPU_LAYER_KINDS, len(set(structures))))
    kept = [count for count, _ in pattern.head_counts]
    # The pattern is ignored for layers with a sliding window.
    are_windowed = [has_window(layer, max_len) for layer in layers]
    needed = [0 if windowed else count for windowed, count in zip(are_windowed, kept)]
    chosen = fewest_promotions(needed, rule, structures)
    promoted = pattern.promote(
        [old if windowed else new for windowed, old, new in zip(are_windowed, kept, chosen)]
    )
    if promoted.num_promoted:
        _log.info(
            "%d of %d streaming heads retrieve, so that layers are of at most %s kinds (max_layer_kinds) and "
            "%d ranks have equally many",
            promoted.num_promoted,
            pattern.mask.size - int(pattern.mask.sum()),
            rule.max_kinds,
            rule.num_ranks,
        )
    return promoted


def _binarised(heads: HeadConfig, all_layers: Sequence[DecoderLayer]) -> HeadPattern | None:
    """Return the binarised pattern of layers that store keys; one of all of the model's has more rows."""
    if heads.pattern is None:
        return None
    pattern, layers = _read(heads.pattern), _stored(all_layers)
    num_layers = all_layers[0].num_layers
    if num_layers <= len(all_layers):
        num_layers = len(layers)
    if pattern.num_layers == num_layers != len(layers):
        # Rows of layers with states only say nothing.
        pattern = pattern.of_layers([layer.number for layer in layers])
    kv_heads = {layer.call.num_kv_heads for layer in layers}
    if len(kv_heads) > 1:
        raise ValueError(f"a head pattern needs equally many key/value heads in every layer, got {kv_heads}")
    pattern.check_shape(len(layers), kv_heads.pop())
    if heads.sink is not None or heads.recent is not None:
        pattern = replace(
            pattern,
            sink=pattern.sink if heads.sink is None else heads.sink,
            recent=pattern.recent if heads.recent is None else heads.recent,
        )
    if heads.sparsity is None and heads.threshold is None:
        if pattern.is_binarised:
            return pattern
        raise ValueError("a head pattern with scores only needs sparsity or threshold, got neither")
    return pattern.binarise(
        sparsity=heads.sparsity, threshold=heads.threshold, tie_break=heads.tie_break, balance=heads.balance
    )


def _structure(layer: DecoderLayer, max_len: int) -> Hashable:
    """Return the key of a layer's structure, besides its numbers of heads."""
    call = layer.call
    window = call.sliding_window if has_window(layer, max_len) else None
    attention = (call.num_heads, call.num_kv_heads, call.head_dim, call.scale, call.softcap, window)
    return LayerKind(layer.module, attention)


def has_window(layer: DecoderLayer, max_len: int) -> bool:
    """Return whether all heads of a layer stream: a window no shorter than any request is full attention."""
    window = layer.call.sliding_window
    return window is not None and window < max_len


def check_pattern(heads: HeadConfig, model: str | Path) -> tuple[str, ...]:
    """Compare the head pattern's model with a checkpoint, or with a directory that has no weights.

    Returns:
        Notes for the user where there is nothing to compare.

    Raises:
        ValueError: the pattern is of another model, or it cannot be read.
    """
    if heads.pattern is None:
        return ()
    pattern, directory = _read(heads.pattern), Path(model)
    is_named = FINGERPRINT_KEY in pattern.config
    fingerprint = model_fingerprint(directory) if is_named and has_weights(directory) else None
    note = check_origin(pattern, model_name(directory), fingerprint)
    return () if note is None else (note,)


def _read(pattern: HeadPattern | str | Path) -> HeadPattern:
    return pattern if isinstance(pattern, HeadPattern) else HeadPattern.load(pattern)
