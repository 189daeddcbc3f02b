"""Load the model that the options of a command describe."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.cli.arguments.options import EngineOptions, HeadOptions
from hpu_duo.cli.terminal.sizes import parse_bytes
from hpu_duo.config.limits import SchedulerConfig
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.heads import HeadPattern
    from hpu_duo.llm import HPUDuoModel


def load_model(
    path: Path | None,
    heads: HeadOptions | HeadPattern,
    options: EngineOptions,
    num_requests: int,
    seed: int = 0,
) -> HPUDuoModel:
    """Load the model that the options describe, and warm it up if nothing may be compiled afterwards.

    Args:
        path, heads, options, num_requests, seed: see ``load_cold``.

    Raises:
        ValueError: see ``load_cold``.
    """
    loaded = load_cold(path, heads, options, num_requests, seed)
    if options.fail_on_recompile:
        loaded.warmup()
    return loaded


def load_cold(
    path: Path | None,
    heads: HeadOptions | HeadPattern,
    options: EngineOptions,
    num_requests: int,
    seed: int = 0,
) -> HPUDuoModel:
    """Load the model that the options describe.

    Args:
        path: None is the built-in model, whose own pattern is used when sparsity or threshold are given
            without a pattern.
        heads: options, or a pattern to take as it is.
        options: of the engine.
        num_requests: expected requests, the default of ``max_num_seqs`` unless the buckets are a manifest,
            which has its own.
        seed: for requests without a seed.

    Raises:
        ValueError: the files or the options do not fit together; see ``HPUDuoModel.from_pretrained``.
    """
    kv_cache_bytes, graph_memory_bytes = (
        None if size is None else parse_bytes(size)
        for size in (options.kv_cache_bytes, options.graph_memory_bytes)
    )
    for name, file in (
        ("--record-shapes", options.record_shapes),
        ("--record-steps", options.record_steps),
    ):
        if file is not None:
            check_file(name, file)
    return load_with(
        path,
        **head_arguments(path, heads),
        device=options.device,
        dtype=options.dtype,
        attention=options.attention,
        softmax=options.softmax,
        max_model_len=options.max_model_len,
        max_num_seqs=_max_num_seqs(options, num_requests),
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_chunk_rows=options.max_chunk_rows,
        decode_len=options.decode_len,
        scheduling_policy=options.scheduling_policy,
        ranker=options.ranker,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        kv_cache_bytes=kv_cache_bytes,
        device_memory_utilization=options.device_memory_utilization,
        enable_prefix_caching=options.enable_prefix_caching,
        num_prefix_snapshots=options.num_prefix_snapshots,
        kv_policy=options.kv_policy,
        kv_budget=options.kv_budget,
        kv_plan=options.kv_plan,
        kv_prompt=options.kv_prompt,
        kv_chunk=options.kv_chunk,
        attention_rule=options.attention_rule,
        max_ring_window=options.max_ring_window,
        tensor_parallel_size=options.tensor_parallel_size,
        expert_parallel=options.expert_parallel,
        retrieval_parallel=options.retrieval_parallel,
        retrieval_parallel_context=options.retrieval_parallel_context,
        rank_timeout_s=options.rank_timeout_s,
        rank_launcher=options.rank_launcher,
        graphs=options.graphs,
        buckets=options.buckets,
        max_captured_tokens=options.max_captured_tokens,
        graph_memory_bytes=graph_memory_bytes,
        fail_on_recompile=options.fail_on_recompile,
        trim_chunks=options.trim_chunks,
        record_shapes=options.record_shapes,
        record_steps=options.record_steps,
        seed=seed,
    )


def load_with(path: Path | None, **arguments: Any) -> HPUDuoModel:
    """Load with arguments of ``HPUDuoModel.from_pretrained``, and keep other libraries from the terminal.

    Args:
        path: None is the built-in model.

    Raises:
        ValueError: see ``HPUDuoModel.from_pretrained``.
    """
    # Everything that needs torch comes after what can be refused without it.
    from transformers.utils import logging

    from hpu_duo.llm import HPUDuoModel

    # torch's notes to developers would stand between the user's text and the table.
    warnings.filterwarnings("ignore", message=".* is in beta and the API may change", category=UserWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return HPUDuoModel.from_pretrained(MODEL_DIR if path is None else path, **arguments)


def head_arguments(path: Path | None, heads: HeadOptions | HeadPattern) -> dict[str, Any]:
    """Arguments of ``HPUDuoModel.from_pretrained`` that say which heads stream.

    Args:
        path, heads: see ``load_model``.
    """
    if not isinstance(heads, HeadOptions):
        return {"pattern": heads, "max_layer_kinds": heads.num_layers}
    own = PATTERN_DIR if path is None and heads.is_cut else None
    return {**vars(heads), "pattern": own if heads.pattern is None else heads.pattern}


def _max_num_seqs(options: EngineOptions, num_requests: int) -> int:
    if options.max_num_seqs is not None:
        return options.max_num_seqs
    from graphs.manifest import is_manifest, read_manifest

    if options.buckets is not None and is_manifest(options.buckets):
        limit = read_manifest(options.buckets).configuration.get("limits.max_num_seqs")
        if isinstance(limit, int):
            return limit
    return min(num_requests, SchedulerConfig.max_num_seqs)
