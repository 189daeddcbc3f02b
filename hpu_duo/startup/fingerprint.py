"""Fingerprint of a model, by which stored keys and values are known to be its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpu_duo.kv.store import block_tensors
from hpu_duo.kv.tiers.host_link import RECORD_ORDER
from hpu_duo.modeling.config_checks import served_len, short_len
from hpu_duo.modeling.hub import model_fingerprint
from hpu_duo.modeling.quantised.execution import inc_scales, rounding_of
from hpu_duo.modeling.quantised.inc import METHOD
from hpu_duo.startup.kv_budget import read_kv_plan
from kernels_ref import LayerSpec
from kernels_ref.formats import INC
from kernels_ref.formats.fp8 import LARGEST, Fp8, ScaledFp8
from kernels_ref.unified import format_names

if TYPE_CHECKING:
    from hpu_duo.config.engine import EngineConfig
    from hpu_duo.engine.engine import Engine

KV_FORMAT = "kv_cache_dtype"
"""Name of the format of keys and values in a fingerprint."""


def fingerprint(engine: Engine, config: EngineConfig) -> dict[str, str]:
    """Collect weights, heads, dtype, sizes of units, softmax and rotary frequencies, as texts by name.

    Device, kernels and versions of software are left out: they change numbers by rounding only.
    """
    text, pattern = engine.hf_config.get_text_config(), engine.pattern
    longest, short = served_len(text, config.scheduler.max_model_len), short_len(text)
    found = {
        "model": model_fingerprint(Path(config.model.path)),
        "head pattern": "none",
        "dtype": str(engine.runner.model.model.dtype).removeprefix("torch."),
        "block_size": str(engine.scheduler.limits.block_size),
        "softmax": ", ".join(sorted({spec.softmax.value for spec in engine.runner.model.specs})),
        "rotary frequencies of texts of": "any length" if short is None else f"{max(longest, short)} tokens",
    }
    if (rounding := rounding_of(config.model.path, config.model.quantization)) is not None:
        found["weights"] = f"rounded to {rounding}"
        if rounding == METHOD:
            found["weights"] += f" {inc_scales('quantization inc', engine.runner.device).fingerprint}"
    if config.cache.kv_scales is not None or INC in (config.cache.kv_cache_dtype, config.cache.ring_dtype):
        found["scales of keys and values"] = str(engine.runner.model.kv_scales)
    if limits := {most for spec in engine.runner.model.specs for most in _fp8_limits(spec)}:
        found["fp8 numbers"] = ", ".join(f"up to {most:g}" for most in sorted(limits))
    if pattern is not None:
        heads = [pattern.sink, pattern.recent, pattern.mask.astype(int).tolist()]
        found["head pattern"] = json.dumps(heads)
        speculation = config.scheduler.speculation
        if speculation is not None and speculation.draft_sparsity is not None:
            # Stores have the heads in another order.
            scores = hashlib.sha256(pattern.scores.tobytes()).hexdigest()
            how = f"{config.heads.tie_break} {config.heads.balance} {config.heads.max_layer_kinds}"
            found["heads of drafts"] = f"{speculation.draft_sparsity} of {scores}, {how}"
    if (plan := read_kv_plan(config)) is not None:
        found["KV plan"] = json.dumps(plan.as_dict(), sort_keys=True)
    found[KV_FORMAT] = ", ".join(format_names(engine.runner.model.specs))
    for each in block_tensors(engine.runner.store):
        kind = f"{each.kind.name} {each.kind.describe()}".strip()
        found[each.name] = f"{kind} x {list(each.unit_shape)}"
    for state in engine.runner.store.row_states:
        for name, tensor in state.saved.items():
            found[name] = f"{state.kind} x {list(tensor.shape)}"
    return found


def _fp8_limits(spec: LayerSpec) -> Iterator[float]:
    """Largest fp8 numbers of the formats of a layer, but those of most devices."""
    for group in spec.groups:
        for vectors in (group.format.keys, group.format.values):
            if isinstance(vectors, Fp8 | ScaledFp8) and vectors.largest != LARGEST:
                yield vectors.largest


def records_digest(engine: Engine, config: EngineConfig) -> bytes:
    """Return the SHA-256 of all that records of blocks and snapshots depend on, eviction included."""
    cache, plan = config.cache, engine.runner.store.plan
    layers = [
        [
            *(f"{each.num_heads} {each.kind.name} {each.kind.describe()}" for each in layer.own_groups),
            *(kind.name for kind in layer.rows),
        ]
        for of_rank in (plan.layers, *plan.others)
        for layer in of_rank
    ]
    found = {
        **fingerprint(engine, config),
        "eviction": f"{cache.kv_policy} {cache.kv_budget} {cache.kv_prompt}",
        "grid": str(engine.scheduler.limits.prefix_grid),
        "records": f"{plan.block_bytes} {plan.row_bytes}, {RECORD_ORDER}",
        "layers": json.dumps(layers),
    }
    if (size := config.parallel.tensor_parallel_size) > 1:
        found["ranks"] = f"{size}, blocks dealt: {config.parallel.deals_blocks}"
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).digest()
