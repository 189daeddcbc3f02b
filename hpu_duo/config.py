"""What a user may set, checked and frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from graphs import BucketTable, CaptureBackend, MissPolicy
from graphs.backends import BACKEND_NAMES
from hpu_duo.budget import DEVICE_MEMORY_UTILIZATION, check_utilization

if TYPE_CHECKING:
    from hpu_duo.heads import HeadPattern


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoint, and how it is held.

    Attributes:
        path: directory of a transformers checkpoint.
        device: "auto", "cpu", "cuda", "hpu" or "hpu-sim" (see ``hpu_duo.sim``).
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        attention: "auto", "reference", "sdpa" or "triton"; "auto" is "sdpa" on CPU where the model allows
            it, and "triton" on CUDA where Triton is installed.
        pack_weights: lay linear weights out once (bfloat16 on CPU): in panels for our own kernel where the
            CPU has AVX512-BF16, elsewhere for oneDNN; None = where possible.
    """

    path: str | Path
    device: str | torch.device = "auto"
    dtype: str | torch.dtype = "auto"
    attention: str = "auto"
    pack_weights: bool | None = None

    def __post_init__(self) -> None:
        _one_of("attention", self.attention, ("auto", "reference", "sdpa", "triton"))
        if not isinstance(self.path, str | PathLike):
            raise ValueError(f"expected path to be a directory, got {type(self.path).__name__}")
        if self.pack_weights is not None and not isinstance(self.pack_weights, bool):
            raise ValueError(f"expected pack_weights to be True, False or None, got {self.pack_weights!r}")


@dataclass(frozen=True)
class HeadConfig:
    """Which heads stream.

    Attributes:
        pattern: scores (or a directory that holds them), or None: every head is a retrieval head.
        sparsity: share of key/value heads that stream; or
        threshold: heads with a score above it are retrieval heads.
        sink, recent: window of the streaming heads; None = the pattern's own.
        tie_break, balance: see ``HeadPattern.binarise``. Not "per_rank": one engine drives one device,
            and its heads are not cut into slices.
    """

    pattern: HeadPattern | str | Path | None = None
    sparsity: float | None = None
    threshold: float | None = None
    sink: int | None = None
    recent: int | None = None
    tie_break: Literal["stable", "reference"] = "stable"
    balance: Literal["global", "per_layer"] = "global"

    def __post_init__(self) -> None:
        is_path = isinstance(self.pattern, str | PathLike)
        if self.pattern is not None and not is_path and not hasattr(self.pattern, "binarise"):
            raise ValueError(
                f"expected pattern to be a HeadPattern or a directory, got {type(self.pattern).__name__}"
            )
        self._check_cut()
        if self.pattern is None:
            given = [n for n in ("sparsity", "threshold", "sink", "recent") if getattr(self, n) is not None]
            if given:
                verb = "need" if len(given) > 1 else "needs"
                raise ValueError(f"{' and '.join(given)} {verb} a head pattern, got pattern=None")

    def _check_cut(self) -> None:
        _one_of("tie_break", self.tie_break, ("stable", "reference"))
        if self.balance == "per_rank":
            raise ValueError(
                "balance 'per_rank' is for tensor-parallel ranks, and an engine serves on one device: "
                "expected global, per_layer, or a pattern that HeadPattern.binarise has cut"
            )
        _one_of("balance", self.balance, ("global", "per_layer"))
        for name in ("sparsity", "threshold"):
            _finite(name, getattr(self, name))
        if self.sparsity is not None and self.threshold is not None:
            raise ValueError(
                f"expected sparsity or threshold, got both: sparsity={self.sparsity} "
                f"threshold={self.threshold}"
            )
        if self.sparsity is not None and not 0.0 <= self.sparsity <= 1.0:
            raise ValueError(f"expected sparsity in [0, 1], got {self.sparsity}")


@dataclass(frozen=True)
class CacheConfig:
    """How much is cached.

    Attributes:
        block_size: tokens of a block.
        num_blocks: blocks to hold; or
        kv_cache_bytes: bytes that all stores may take. With neither, as much as ``max_num_seqs``
            requests of ``max_model_len`` tokens need, but at most what the next one leaves.
        device_memory_utilization: share of the device's memory that weights, graphs and stores may take
            together, vLLM's ``gpu_memory_utilization``; see ``hpu_duo.budget``.
    """

    block_size: int = 128
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    device_memory_utilization: float = DEVICE_MEMORY_UTILIZATION

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError(
                f"expected num_blocks or kv_cache_bytes, got both: num_blocks={self.num_blocks} "
                f"kv_cache_bytes={self.kv_cache_bytes}"
            )
        for name in ("num_blocks", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        check_utilization(self.device_memory_utilization)


@dataclass(frozen=True)
class SchedulerConfig:
    """How much runs in one step.

    Attributes:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: query tokens of a step; longer prompts are cut into chunks.
        max_model_len: tokens of prompt and output together; None = what the model and the cache hold.
        max_chunk_rows: prompts that may continue with several tokens in the same step.
        trim_chunks: leave the end of a prompt to the next step where that pads less; needs a table of
            buckets. See ``hpu_duo.engine.trimming``.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    max_chunk_rows: int = 1
    trim_chunks: bool = False

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs)
        _at_least("max_chunk_rows", self.max_chunk_rows, 1)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        _is_bool("trim_chunks", self.trim_chunks)


@dataclass(frozen=True)
class GraphConfig:
    """How steps are captured.

    Attributes:
        backend: "eager", "replay", "compile", "cuda", "hpu-compile", "hpu-graph", "auto" (see
            ``graphs.backends.best_name``), or a capture backend of your own.
        table: buckets; None = the exponential default, or with "eager" the exact shape of each step.
        on_miss: what happens to a step that no bucket holds.
        max_captured_tokens: buckets with more query tokens run as they are written; None = none do.
        memory_bytes: device memory that is set aside for graphs before the KV cache is sized; None = as
            estimated, see ``hpu_duo.engine.graph_memory``.
        fail_on_recompile: a step that compiles or captures anything raises ``RecompileError``.
        own_cost: rank the buckets of ``table`` by the cost that the table itself has; False = by what a step
            of this model costs, as in the default table. Buckets from a file come without a cost.
    """

    backend: str | CaptureBackend = "eager"
    table: BucketTable | None = None
    on_miss: MissPolicy = MissPolicy.ERROR
    max_captured_tokens: int | None = None
    memory_bytes: int | None = None
    fail_on_recompile: bool = False
    own_cost: bool = True

    def __post_init__(self) -> None:
        members = ("name", "problem", "capture", "region")
        if not isinstance(self.backend, str) and not all(hasattr(self.backend, name) for name in members):
            raise ValueError(
                f"expected graphs to be auto, {', '.join(BACKEND_NAMES)} or a capture backend, "
                f"got {self.backend!r}"
            )
        if self.table is not None and not isinstance(self.table, BucketTable):
            raise ValueError(f"expected buckets to be a BucketTable, got {type(self.table).__name__}")
        if self.max_captured_tokens is not None:
            _at_least("max_captured_tokens", self.max_captured_tokens, 1)
        if self.memory_bytes is not None:
            _at_least("graph_memory_bytes", self.memory_bytes, 0)
        _is_bool("fail_on_recompile", self.fail_on_recompile)
        _is_bool("own_cost", self.own_cost)


@dataclass(frozen=True)
class EngineConfig:
    """Everything a user may set."""

    model: ModelConfig
    heads: HeadConfig = field(default_factory=HeadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)


def _at_least(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"expected {name} to be an integer >= {minimum}, got {value!r}")


def _is_bool(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"expected {name} to be True or False, got {value!r}")


def _finite(name: str, value: float | None) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (is_number and math.isfinite(value)):
        raise ValueError(f"expected {name} to be a finite number, got {value!r}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"expected {name} to be one of {', '.join(known)}, got {value!r}")
