"""Settings of a user, checked and frozen."""

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
from hpu_duo.config.limits import CacheConfig, SchedulerConfig, check_at_least, check_bool
from kernels_ref import Implementation
from kernels_ref.chunks import ChunkBounds

if TYPE_CHECKING:
    from hpu_duo.heads import HeadPattern

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "GraphConfig",
    "HeadConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Settings of the checkpoint, its device and its kernels.

    Attributes:
        path: directory of a transformers checkpoint.
        device: "auto", "cpu", "cuda", "hpu" or "hpu-sim" (see ``hpu_duo.lab.sim``).
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16", or a short name such as "bf16".
        attention: "auto", "reference", "sdpa", "triton" or "hpu"; "auto" is "sdpa" on CPU where the model
            allows it, "triton" on CUDA where Triton is installed, and "hpu" on HPU where one of its fused
            operators passes a trial.
        softmax: "exact", scores and exponentials in float32; or "fast", in bfloat16 for models in bfloat16,
            for attention "reference" and "hpu".
        pack_weights: lay linear weights out once (bfloat16 on CPU): in panels for our own kernel where the
            CPU has AVX512-BF16, elsewhere for oneDNN; None = where possible.
        score_bytes: most bytes of the scores, or of the mask where none are made, of one chunk of context;
            with more memory for it, chunks are larger and fewer.
    """

    path: str | Path
    device: str | torch.device = "auto"
    dtype: str | torch.dtype = "auto"
    attention: str = "auto"
    softmax: str = "exact"
    pack_weights: bool | None = None
    score_bytes: int = ChunkBounds().score_bytes

    def __post_init__(self) -> None:
        _one_of("attention", self.attention, ("auto", *(each.value for each in Implementation)))
        check_at_least("score_bytes", self.score_bytes, 1)
        _one_of("softmax", self.softmax, ("exact", "fast"))
        if not isinstance(self.path, str | PathLike):
            raise ValueError(f"expected path to be a directory, got {type(self.path).__name__}")
        if self.pack_weights is not None and not isinstance(self.pack_weights, bool):
            raise ValueError(f"expected pack_weights to be True, False or None, got {self.pack_weights!r}")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Settings of the head pattern.

    Attributes:
        pattern: scores (or a directory that holds them), or None: every head is a retrieval head.
        sparsity: share of key/value heads that stream; or
        threshold: heads with a score above it are retrieval heads.
        sink, recent: window of the streaming heads; None = the pattern's own.
        max_layer_kinds: most kinds of layers, each of which is compiled for every bucket. Where a pattern has
            more, the fewest streaming heads become retrieval heads with which it has not (see
            ``hpu_duo.heads.binarise``), so that ``sparsity`` is a lower bound on retrieval heads. None = 4 on
            HPU, or one for each structure that layers have anyway where that is more; no bound elsewhere.
        attention_rule: which earlier tokens a token sees, of those that its head keeps: a rule of
            ``hpu_duo.config.attention_rules``, such as "sink_band:sink=4,band=1024", or one for each KV head,
            with ";" between. It holds for the heads that stream under a pattern, which keep all tokens then,
            or for all heads without one; layers with a sliding window keep that. None = all of them.
        max_ring_window: tokens of the longest sliding window that a layer keeps in rings, 0 or more. Layers
            with a longer one keep all tokens, in blocks, and see as many: their prefix snapshots take
            nothing, and a request takes more. None = any window is kept in rings.
        tie_break, balance: see ``HeadPattern.binarise``. Not "per_rank": ranks do not hold slices of
            neighbouring heads, see ``hpu_duo.parallel``.
    """

    pattern: HeadPattern | str | Path | None = None
    sparsity: float | None = None
    threshold: float | None = None
    sink: int | None = None
    recent: int | None = None
    max_layer_kinds: int | None = None
    attention_rule: str | None = None
    max_ring_window: int | None = None
    tie_break: Literal["stable", "reference"] = "stable"
    balance: Literal["global", "per_layer"] = "global"

    def __post_init__(self) -> None:
        is_path = isinstance(self.pattern, str | PathLike)
        if self.pattern is not None and not is_path and not hasattr(self.pattern, "binarise"):
            raise ValueError(
                f"expected pattern to be a HeadPattern or a directory, got {type(self.pattern).__name__}"
            )
        self._check_cut()
        if self.max_layer_kinds is not None:
            check_at_least("max_layer_kinds", self.max_layer_kinds, 1)
        if self.max_ring_window is not None:
            check_at_least("max_ring_window", self.max_ring_window, 0)
        if self.pattern is None:
            given = [n for n in ("sparsity", "threshold", "sink", "recent") if getattr(self, n) is not None]
            if given:
                verb = "need" if len(given) > 1 else "needs"
                raise ValueError(f"{' and '.join(given)} {verb} a head pattern, got pattern=None")

    def _check_cut(self) -> None:
        _one_of("tie_break", self.tie_break, ("stable", "reference"))
        if self.balance == "per_rank":
            raise ValueError(
                "balance 'per_rank' cuts a layer into slices of neighbouring heads, which ranks do not "
                "hold: expected global, per_layer, or a pattern that HeadPattern.binarise has cut"
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


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Settings of the capture of steps.

    Attributes:
        backend: "eager", "replay", "compile", "cuda", "hpu-compile", "hpu-graph", "auto" or "default" (see
            ``graphs.backends.chosen_name``), or a capture backend of your own.
        table: buckets; None = the exponential default, or with "eager" the exact shape of each step.
        on_miss: policy for a step that no bucket holds.
        max_captured_tokens: buckets with more query tokens run as they are written; None = none do.
        memory_bytes: device memory that is set aside for graphs before the KV cache is sized; None = as
            estimated, see ``hpu_duo.startup.tables``.
        fail_on_recompile: a step that compiles or captures anything raises ``RecompileError``.
        own_cost: rank the buckets of ``table`` by the table's own cost function; False = by the cost of a
            step of this model, as in the default table. Buckets from a file have no cost function.
    """

    backend: str | CaptureBackend = "default"
    table: BucketTable | None = None
    on_miss: MissPolicy = MissPolicy.ERROR
    max_captured_tokens: int | None = None
    memory_bytes: int | None = None
    fail_on_recompile: bool = False
    own_cost: bool = True

    def __post_init__(self) -> None:
        members = ("name", "num_first_runs", "problem", "capture", "region")
        missing = [name for name in members if not hasattr(self.backend, name)]
        if missing and not isinstance(self.backend, str):
            raise ValueError(
                f"expected graphs to be default, auto, {', '.join(BACKEND_NAMES)} or a capture backend, "
                f"got {self.backend!r}, which lacks {', '.join(missing)}"
            )
        if self.table is not None and not isinstance(self.table, BucketTable):
            raise ValueError(f"expected buckets to be a BucketTable, got {type(self.table).__name__}")
        if self.max_captured_tokens is not None:
            check_at_least("max_captured_tokens", self.max_captured_tokens, 1)
        if self.memory_bytes is not None:
            check_at_least("graph_memory_bytes", self.memory_bytes, 0)
        check_bool("fail_on_recompile", self.fail_on_recompile)
        check_bool("own_cost", self.own_cost)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Settings of the ranks that share a model, each a process with a device of its own.

    Attributes:
        tensor_parallel_size: number of ranks; heads, widths and vocabulary are cut evenly among them.
        expert_parallel: give each rank some of the routed experts of a mixture whole, instead of a part of
            the width of each: for families that transformers has a plan of that for.
        retrieval_parallel: what ranks share of retrieval heads. "heads": each rank keeps all tokens of
            equally many of them. "context": each keeps a part of the tokens of all of them, so that no layer
            waits for the rank that has one, at four exchanges a layer instead of two. "auto": as decodes are
            predicted to be faster (``hpu_duo.startup.sharding``).
        retrieval_parallel_context: tokens of a request that "auto" predicts for; None = ``max_model_len``.
        timeout_s: most seconds of a rank that gives no sign of life before all ranks end, of a step, what it
            compiles included, and, with 5 more, of an exchange inside a step.
        launcher: who starts the ranks. "own": rank 0, all on its machine. "torchrun": torchrun, on one
            machine or several; this process is then one of them, as torchrun's variables say.
    """

    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    retrieval_parallel: str = "heads"
    retrieval_parallel_context: int | None = None
    timeout_s: float = 300.0
    launcher: str = "own"

    def __post_init__(self) -> None:
        check_at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        check_bool("expert_parallel", self.expert_parallel)
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError("expected tensor_parallel_size above 1 for expert_parallel, got 1")
        _one_of("retrieval_parallel", self.retrieval_parallel, ("heads", "context", "auto"))
        _one_of("rank_launcher", self.launcher, ("own", "torchrun"))
        self._check_context()
        _finite("timeout_s", self.timeout_s)
        if self.timeout_s <= 0:
            raise ValueError(f"expected timeout_s above 0, got {self.timeout_s}")

    def _check_context(self) -> None:
        length = self.retrieval_parallel_context
        if length is None:
            return
        check_at_least("retrieval_parallel_context", length, 1)
        if self.retrieval_parallel != "auto":
            raise ValueError(
                f"retrieval_parallel_context={length} needs retrieval_parallel='auto', "
                f"got {self.retrieval_parallel!r}"
            )

    @property
    def deals_blocks(self) -> bool:
        """Whether a block of tokens lies on several ranks, a part on each; known once that is no "auto"."""
        return self.retrieval_parallel == "context" and self.tensor_parallel_size > 1


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of a user."""

    model: ModelConfig
    heads: HeadConfig = field(default_factory=HeadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if self.scheduler.decode_len > self.cache.block_size:
            raise ValueError(
                f"expected decode_len of at most block_size={self.cache.block_size}, "
                f"got {self.scheduler.decode_len}"
            )

    @property
    def block_size(self) -> int:
        """Tokens of a block of the engine: of a block on each rank, where blocks are dealt over ranks."""
        num_parts = self.parallel.tensor_parallel_size if self.parallel.deals_blocks else 1
        return self.cache.block_size * num_parts


def _finite(name: str, value: float | None) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (is_number and math.isfinite(value)):
        raise ValueError(f"expected {name} to be a finite number, got {value!r}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"expected {name} to be one of {', '.join(known)}, got {value!r}")
