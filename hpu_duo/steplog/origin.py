"""Origin of recorded steps: model, heads and stores of their engine, and options to load another like it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphs import BatchShape, BucketTable, StepCost
from graphs.backends import BACKEND_NAMES
from hpu_duo.config import EngineConfig
from hpu_duo.engine.engine import Engine
from hpu_duo.heads import HeadPattern
from hpu_duo.kv_plan import KVPlan
from hpu_duo.modeling.model_files import model_fingerprint
from hpu_duo.warmup import configuration_of
from hpu_duo.warmup.configuration import versions_of

_MOST_SHOWN = 3


def origin_of(engine: Engine, config: EngineConfig) -> dict[str, Any]:
    """Describe an engine, as JSON has it.

    Args:
        config: what it was loaded from.

    Returns:
        A mapping with: ``fingerprint``, all that must be equal, flat; ``versions`` of software, with which
        numbers may differ; ``options``, arguments of ``from_pretrained`` besides model, buckets and heads;
        ``buckets``, the table, None without one; ``heads``, the head pattern, None if all retrieve.
    """
    runner = engine.runner
    resolved, graphs = engine.stats().resolved, runner.graphs
    limits = resolved.limits
    return {
        "fingerprint": fingerprint_of(engine, config.model.path),
        "versions": versions_of(runner.runtime),
        "options": {
            "device": runner.runtime.name,
            "dtype": resolved.dtype,
            "attention": resolved.attention,
            "softmax": resolved.softmax,
            "pack_weights": config.model.pack_weights,
            "graphs": graphs.backend.name if graphs.backend.name in BACKEND_NAMES else "auto",
            "on_miss": resolved.on_miss,
            "max_captured_tokens": resolved.max_captured_tokens,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_model_len": limits.max_model_len,
            "max_chunk_rows": limits.max_chunk_rows,
            "decode_len": limits.decode_len,
            "block_size": limits.block_size,
            "num_blocks": limits.num_blocks or None,
            "enable_prefix_caching": limits.caches_prefixes,
            "num_prefix_snapshots": limits.num_snapshots if limits.caches_prefixes else None,
            "kv_policy": config.cache.kv_policy,
            "kv_budget": config.cache.kv_budget,
            "kv_plan": _plan(config.cache.kv_plan),
            "kv_prompt": config.cache.kv_prompt,
            "kv_chunk": config.cache.kv_chunk,
            "attention_rule": config.heads.attention_rule,
            "max_ring_window": config.heads.max_ring_window,
        },
        "buckets": [str(bucket) for bucket in graphs.table] if runner.executor.uses_table else None,
        "heads": _heads(engine.pattern),
    }


def fingerprint_of(engine: Engine, model: str | Path) -> dict[str, Any]:
    """Collect all that a message relies on: weights, heads, dtype, kernels, capture, layout of the stores."""
    runner = engine.runner
    layouts = {
        f"layout.layer_{number}": ", ".join(
            f"{group.kind.name} {list(units.layout)}" for group, units in zip(layer.groups, cache)
        )
        for number, (layer, cache) in enumerate(zip(runner.store.plan.layers, runner.store.layers))
    }
    return {
        "checkpoint": model_fingerprint(Path(model)),
        "heads": _heads(engine.pattern),
        **configuration_of(engine),
        **layouts,
    }


def options_of(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``HPUDuoModel.from_pretrained``, besides the model, for an engine of this origin.

    Raises:
        ValueError: the description lacks them.
    """
    try:
        options, buckets, heads = dict(origin["options"]), origin["buckets"], origin["heads"]
        if buckets is not None:
            shapes = tuple(map(BatchShape.parse, buckets))
            options["buckets"] = BucketTable(shapes, StepCost(block_size=options["block_size"]))
        if heads is not None:
            mask = np.array(heads["retrieval"], np.bool_)
            options["pattern"] = HeadPattern(
                mask.astype(np.float32), heads["sink"], heads["recent"], "recorded steps", mask
            )
            # These are the heads that the engine had in the end.
            options["max_layer_kinds"] = len(mask)
        if options.get("kv_plan") is not None:
            options["kv_plan"] = KVPlan.from_dict(options["kv_plan"])
        return options
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected recorded steps to say how they are replayed, got {error}") from error


def check_origin(origin: Mapping[str, Any], engine: Engine, model: str | Path) -> None:
    """Raise ValueError unless steps of this origin can be carried out by an engine."""
    # As JSON has it: tuples are lists there.
    expected, got = origin.get("fingerprint", {}), json.loads(json.dumps(fingerprint_of(engine, model)))
    differing = [
        f"{name}: {_text(expected.get(name))}, not {_text(got.get(name))}"
        for name in {**expected, **got}
        if expected.get(name) != got.get(name)
    ]
    if differing:
        shown = "; ".join(differing[:_MOST_SHOWN])
        more = f"; and {len(differing) - _MOST_SHOWN} more" if len(differing) > _MOST_SHOWN else ""
        raise ValueError(f"expected an engine like the one whose steps were recorded, {shown}{more}")


def differing_versions(origin: Mapping[str, Any], engine: Engine) -> list[str]:
    """List software whose version is not the recorded one, with which tokens may differ."""
    before, now = origin.get("versions", {}), versions_of(engine.runner.runtime)
    return [f"{name} {before[name]}, now {now.get(name)}" for name in before if before[name] != now.get(name)]


def _heads(pattern: HeadPattern | None) -> dict[str, Any] | None:
    if pattern is None:
        return None
    return {"sink": pattern.sink, "recent": pattern.recent, "retrieval": pattern.mask.astype(int).tolist()}


def _plan(plan: KVPlan | str | Path | None) -> dict[str, Any] | None:
    """Return the plan, and not the file, which may have changed when steps are replayed."""
    if plan is None:
        return None
    return (plan if isinstance(plan, KVPlan) else KVPlan.load(plan)).as_dict()


def _text(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:56]} ..."
