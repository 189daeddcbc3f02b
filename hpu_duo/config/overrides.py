"""Types of the keyword arguments that are settings, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import TypedDict

if TYPE_CHECKING:
    import torch

    from graphs import BucketTable, CaptureBackend
    from hpu_duo.config.kv_plan import KVPlan
    from hpu_duo.heads import HeadPattern


class EngineOverrides(TypedDict, total=False):
    """Settings by name, as the fields of ``hpu_duo.config`` have them; a test compares both."""

    device: str | torch.device
    dtype: str | torch.dtype
    quantization: str
    quantization_execution: str
    activations: str
    cpu_offload_gb: float
    offload_policy: str | None
    offload_disk: str | Path | None
    offload_prefetch_step: int
    offload_num_batches: int
    attention: str
    softmax: str
    pack_weights: bool | None
    score_bytes: int
    pattern: HeadPattern | str | Path | None
    sparsity: float | None
    threshold: float | None
    sink: int | None
    recent: int | None
    max_layer_kinds: int | None
    attention_rule: str | None
    max_ring_window: int | None
    tie_break: Literal["stable", "reference"]
    balance: Literal["global", "per_layer"]
    block_size: int
    num_blocks: int | None
    kv_cache_bytes: int | None
    device_memory_utilization: float
    enable_prefix_caching: bool
    num_prefix_snapshots: int | None
    kv_policy: str | None
    kv_budget: float | None
    kv_plan: KVPlan | str | Path | None
    kv_prompt: str
    kv_chunk: int | None
    kv_cache_dtype: str
    kv_cache_dtype_skip_layers: tuple[str | int, ...]
    calculate_kv_scales: bool
    kv_scales: str | Path | None
    ring_dtype: str
    kv_offloading_size: float | None
    kv_offloading_backend: str
    kv_offloading_write_policy: str
    kv_offloading_min_tokens: int
    kv_offloading_eviction_policy: str
    context_idle_seconds: float | None
    preemption_mode: str
    swap_space: float | None
    kv_offloading_disk: str | Path | None
    kv_offloading_disk_size: float | None
    kv_offloading_blocks_per_step: int | None
    cpu_attention: float | None
    cpu_attention_mode: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_rows: int
    decode_len: int
    speculative_config: Mapping[str, Any] | str | None
    trim_chunks: bool
    scheduling_policy: str
    ranker: str | Path | None
    graphs: str | CaptureBackend
    buckets: BucketTable | str | Path | None
    on_miss: str
    max_captured_tokens: int | None
    graph_memory_bytes: int | None
    fail_on_recompile: bool
    replan: float | None
    tensor_parallel_size: int
    expert_parallel: bool
    retrieval_parallel: str
    retrieval_parallel_context: int | None
    rank_timeout_s: float
    rank_launcher: str
    record_shapes: str | Path | None
    record_steps: str | Path | None
    seed: int


class LoadOverrides(EngineOverrides, total=False):
    """Arguments of ``from_pretrained``: settings, and the source of a model."""

    torch_dtype: str | torch.dtype | None
    revision: str | None
    trust_remote_code: bool
    device_map: Any
    cache_dir: str | Path | None
    token: str | bool | None
    local_files_only: bool
