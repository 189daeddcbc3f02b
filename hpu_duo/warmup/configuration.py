"""Everything that shapes a graph, by name, and the versions of the software that made it."""

from __future__ import annotations

import json
import platform
from typing import Any

import torch
import transformers

from graphs.backends import CHOSEN_LATER
from graphs.manifest import Configuration
from hpu_duo.config import EngineConfig
from hpu_duo.device import PLUGGED, DeviceRuntime
from hpu_duo.engine.engine import Engine
from hpu_duo.modeling.loading import read_config, resolve_dtype
from hpu_duo.modeling.transformers_internals import NAME_OR_PATH
from hpu_duo.sharded.config import NARROWED
from hpu_duo.version import __version__
from kernels_ref import Blocks, LayerSpec, Softmax

_SHAPE_NO_GRAPH = frozenset(
    {NAME_OR_PATH, "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"}
    | {"initializer_range", "id2label", "label2id", "attention_dropout", "return_dict", "is_decoder"}
    | {"output_attentions", "output_hidden_states", "problem_type", "chunk_size_feed_forward"}
)


def configuration_of(engine: Engine) -> Configuration:
    """Collect the settings of an engine that shape a graph, as a flat mapping of JSON values.

    Where ranks share a model, sizes are those of one share.
    """
    runner = engine.runner
    model = runner.model.model
    limits = engine.scheduler.limits
    found = {
        **_model_entries(model.config),
        "dtype": _dtype_name(model.dtype),
        "device": runner.device.type,
        "backend": runner.graphs.backend.name,
        "limits.max_num_seqs": limits.max_num_seqs,
        "limits.max_num_batched_tokens": limits.max_num_batched_tokens,
        "limits.max_model_len": limits.max_model_len,
        "limits.max_chunk_rows": limits.max_chunk_rows,
        "limits.decode_len": limits.decode_len,
        "limits.block_size": limits.block_size,
        "limits.num_blocks": limits.num_blocks,
        "limits.num_snapshots": limits.num_snapshots,
        "limits.max_block_moves": limits.max_block_moves,
        "limits.max_captured_tokens": runner.graphs.max_captured_tokens,
        "linear_layers": sorted({type(m).__name__ for m in model.modules() if "Linear" in type(m).__name__}),
    }
    if runner.executor.spread is not None:
        found["parallel.tensor_parallel_size"] = runner.executor.spread.num_ranks
    for number, spec in enumerate(runner.model.specs):
        found[f"attention.layer_{number}"] = _attention_text(spec)
    return found


def known_before_loading(config: EngineConfig) -> Configuration:
    """Return the part of ``configuration_of`` that is known before weights are read.

    Raises:
        ValueError: the checkpoint's configuration cannot be read.
    """
    hf_config = read_config(config.model.path)
    scheduler, cache = config.scheduler, config.cache
    known: dict[str, Any] = {
        **_model_entries(hf_config),
        "limits.max_num_seqs": scheduler.max_num_seqs,
        "limits.max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "limits.max_chunk_rows": scheduler.max_chunk_rows,
        "limits.decode_len": scheduler.decode_len,
        "limits.block_size": config.block_size,
    }
    num_ranks = config.parallel.tensor_parallel_size
    if num_ranks > 1:
        known = {name: value for name, value in known.items() if not _is_narrowed(name)}
        known["parallel.tensor_parallel_size"] = num_ranks
    device = str(config.model.device)
    if config.model.dtype != "auto" or device != "auto":
        kind = device.partition(":")[0].partition("-")[0]
        known["dtype"] = _dtype_name(resolve_dtype(config.model.dtype, hf_config, kind))
    backend = config.graph.backend
    if isinstance(backend, str) and backend not in CHOSEN_LATER and device not in PLUGGED:
        known["backend"] = backend
    if scheduler.max_model_len is not None:
        known["limits.max_model_len"] = scheduler.max_model_len
    if cache.num_blocks is not None:
        known["limits.num_blocks"] = cache.num_blocks
    return known


def _is_narrowed(entry: str) -> bool:
    """Whether ranks have another value of an entry than the whole model."""
    return entry.removeprefix("model.").partition(".")[0] in NARROWED


def versions_of(runtime: DeviceRuntime) -> dict[str, str]:
    """The software that costs depend on, and the device."""
    return {
        "hpu_duo": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "device": runtime.version(),
    }


def _model_entries(config: Any) -> dict[str, Any]:
    """The configuration of the decoder, flat; lists become JSON text, so that any two compare."""
    text = config.get_text_config()
    entries: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                add(f"{name}.{key}", value[key])
        elif value is None or isinstance(value, bool | int | float | str):
            entries[name] = value if value is None or isinstance(value, bool | str) else _plain(value)
        else:
            entries[name] = json.dumps(value, default=str)

    for key, value in text.to_dict().items():
        if key not in _SHAPE_NO_GRAPH and not key.startswith("_"):
            add(f"model.{key}", value)
    return entries


def _plain(value: float) -> float | str:
    # JSON has no infinity, and 1.0 and 1 are the same number to a reader.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if value == value and abs(value) != float("inf") else str(value)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _attention_text(spec: LayerSpec) -> str:
    softmax = "" if spec.softmax is Softmax.EXACT else f", {spec.softmax.value} softmax"
    softcap = "" if spec.softcap is None else f", softcap {spec.softcap:g}"
    streaming = [group for group in spec.groups if group.kind.reach is not None]
    counts = "+".join(str(group.num_heads) for group in streaming) or "0"
    kept = {group.kind.name for group in spec.groups if group.kind.reach is None} - {Blocks.name}
    dealt = "".join(f" in {name}" for name in sorted(kept))
    seen = "".join(f", {text}" for group in spec.groups if (text := group.kind.describe()))
    return (
        f"{spec.impl.value}: {spec.num_retrieval} retrieval{dealt} and {counts} streaming heads x "
        f"{spec.group_size} queries x {spec.head_dim}, scale {spec.scale:.6g}{seen}{softcap}{softmax}"
    )
