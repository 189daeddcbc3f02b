"""Settings of a user, checked and frozen. Imports no torch, so that commands can show them at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from hpu_duo.config.limits import (
    HPU_LAYER_KINDS,
    CacheConfig,
    SchedulerConfig,
    check_at_least,
    check_bool,
)
from hpu_duo.config.option import (
    ENGINE,
    HEADS,
    NAME_AND_OPTIONS,
    Setting,
    check_choices,
    option,
    settings_of,
)

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from graphs import BucketTable, CaptureBackend, MissPolicy
    from hpu_duo.config.overrides import EngineOverrides
    from hpu_duo.heads import HeadPattern

__all__ = [
    "SETTINGS",
    "CacheConfig",
    "EngineConfig",
    "GraphConfig",
    "HeadConfig",
    "ModelConfig",
    "ParallelConfig",
    "RunConfig",
    "SchedulerConfig",
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Settings of the checkpoint, its device and its kernels.

    Attributes:
        path: directory of a transformers checkpoint.
        device: "hpu-sim" is a simulated HPU, see ``hpu_duo.lab.sim``.
        dtype: a ``torch.dtype``, its name, or a short name such as "bf16".
        attention: "auto" is "sdpa" on CPU where the model allows it, "triton" on CUDA where Triton is
            installed, and "hpu" on HPU where one of its fused operators passes a trial.
        softmax: "fast" is for models in bfloat16, and for attention "reference" and "hpu".
    """

    path: str | Path
    device: str | torch.device = option("auto", "auto, cpu, cuda, hpu or hpu-sim.", ENGINE)
    dtype: str | torch.dtype = option(
        "auto", "auto (the checkpoint's), float32, bfloat16 or float16.", ENGINE
    )
    quantization: str = option(
        "auto",
        "Producer of quantised weights: auto (as the checkpoint says), compressed-tensors, fp8, gptq, awq, "
        "modelopt or mxfp4; another one than the checkpoint's is an error. int8, int4 and fp8 quantise the "
        "linear layers of a plain checkpoint while it loads (round to nearest); inc does so to fp8, by the "
        "files of Intel Neural Compressor that the environment's QUANT_CONFIG names.",
        ENGINE,
        choices=(
            *("auto", "compressed-tensors", "fp8", "gptq", "awq", "modelopt", "mxfp4", "int8", "int4"),
            "inc",
        ),
    )
    quantization_execution: str = option(
        "auto",
        "How quantised weights are served: stored (from their codes), dequantise (as plain weights in dtype, "
        "made at load), or auto: from codes where the device has a kernel for their format.",
        ENGINE,
        choices=("auto", "stored", "dequantise"),
    )
    activations: str = option(
        "as published",
        "Inputs of quantised linear layers: as published (rounded to int8 or fp8 where the checkpoint states "
        "it), or weights (in dtype: only weights are quantised).",
        ENGINE,
        choices=("as published", "weights"),
    )
    cpu_offload_gb: float = option(
        0.0,
        "GiB of weights that lie on the host, and are copied to the device before their layer runs.",
        ENGINE,
        metavar="GIB",
    )
    offload_policy: str | None = option(
        None,
        "Where weights, keys and values lie, in place of cpu_offload_gb: auto (the search of plan-offload "
        "places weights if the model does not fit), or w_dev,w_host,kv_dev,kv_host,act_dev,act_host, "
        "percentages of layers on device and host, the rest on the disk, of KV blocks on the device and in "
        "cpu_attention, and of groups of rows whose activations wait on the device and the host.",
        ENGINE,
        metavar="POLICY",
        unset="all on the device",
    )
    offload_disk: str | Path | None = option(
        None,
        "Folder for the weights that offload_policy leaves to the disk; its files go with the process.",
        ENGINE,
        metavar="DIR",
        unset="no disk",
    )
    offload_prefetch_step: int = option(
        1,
        "How many offloaded layers ahead weights are copied; each takes one more buffer on the device.",
        ENGINE,
    )
    offload_num_batches: int = option(
        1,
        "Groups of rows that a step is cut into; all pass through a layer before the next layer begins, so "
        "its weights are loaded once, and a group needs the memory of a small step.",
        ENGINE,
    )
    attention: str = option("auto", "Attention kernels: auto, reference, sdpa, triton or hpu.", ENGINE)
    softmax: str = option(
        "exact",
        "Scores and exponentials: exact (float32) or fast (bfloat16).",
        ENGINE,
        choices=("exact", "fast"),
    )
    pack_weights: bool | None = option(
        None,
        "Lay linear weights out once on a CPU: in panels for our kernels, bfloat16 with AVX512-BF16 and "
        "16 bits with AVX2 and dtype auto; bfloat16 for oneDNN without these. Float32 weights are laid out "
        "if it is True.",
        unset="where possible, but for float32",
    )
    score_bytes: int = option(
        64 << 20,
        (
            "Most bytes of the scores, or of the mask in fused attention, of one chunk of context; "
            "with more memory, chunks are larger and fewer."
        ),
    )

    @property
    def offloads_weights(self) -> bool:
        """Whether weights of some layers leave the device."""
        return bool(self.cpu_offload_gb) or self.offload_policy is not None

    def __post_init__(self) -> None:
        if self.attention != "auto":
            from kernels_ref.impl import Implementation

            _one_of("attention", self.attention, ("auto", *(each.value for each in Implementation)))
        check_at_least("score_bytes", self.score_bytes, 1)
        check_at_least("offload_prefetch_step", self.offload_prefetch_step, 1)
        check_at_least("offload_num_batches", self.offload_num_batches, 1)
        if isinstance(self.cpu_offload_gb, bool) or not 0 <= self.cpu_offload_gb < float("inf"):
            raise ValueError(f"expected cpu_offload_gb of 0 or more GiB, got {self.cpu_offload_gb!r}")
        if not isinstance(self.offload_policy, str | None):
            raise ValueError(f"expected offload_policy as text, got {self.offload_policy!r}")
        if not isinstance(self.offload_disk, str | PathLike | None):
            raise ValueError(f"expected offload_disk to be a folder, got {self.offload_disk!r}")
        if self.cpu_offload_gb and self.offload_policy is not None:
            raise ValueError("expected cpu_offload_gb or offload_policy, got both")
        check_choices(self)
        if not isinstance(self.path, str | PathLike):
            raise ValueError(f"expected path to be a directory, got {type(self.path).__name__}")
        if self.pack_weights is not None and not isinstance(self.pack_weights, bool):
            raise ValueError(f"expected pack_weights to be True, False or None, got {self.pack_weights!r}")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Settings of the head pattern.

    Attributes:
        pattern: a ``HeadPattern``, or its directory.
        sparsity, threshold: cut of the pattern's scores; one of the two.
        max_layer_kinds: where a pattern has more, see ``hpu_duo.heads.binarise``; ``sparsity`` is then a
            lower bound on retrieval heads. None = 4 on HPU, or one for each structure that layers have anyway
            where that is more; no bound elsewhere.
        attention_rule: a rule of ``hpu_duo.config.attention_rules``, such as "sink_band:sink=4,band=1024", or
            one for each KV head, with ";" between: which earlier tokens a token sees, of those that its head
            stores. It applies to the streaming heads of a pattern, which store all tokens then ("quest": to
            its retrieval heads), or to all heads without one; layers with a sliding window are not affected.
            None = all of them.
        max_ring_window: layers with a longer window store all tokens, in blocks, and see as many: their
            prefix snapshots need nothing, and a request needs more.
        tie_break, balance: see ``HeadPattern.binarise``. Not "per_rank": ranks do not have slices of
            neighbouring heads, see ``hpu_duo.parallel``.
    """

    pattern: HeadPattern | str | Path | None = option(
        None,
        "Directory of a head pattern in DuoAttention's published format.",
        HEADS,
        unset="all heads retrieve",
    )
    sparsity: float | None = option(None, "Share of KV heads that stream, 0 to 1.", HEADS)
    threshold: float | None = option(None, "KV heads with a higher score retrieve.", HEADS)
    sink: int | None = option(None, "First tokens that streaming heads store.", HEADS, unset="the pattern's")
    recent: int | None = option(
        None, "Newest tokens that streaming heads store.", HEADS, unset="the pattern's"
    )
    max_layer_kinds: int | None = option(
        None,
        (
            "Most kinds of layers, each compiled for every bucket; the fewest streaming heads become "
            "retrieval heads for it."
        ),
        HEADS,
        unset=f"{HPU_LAYER_KINDS} on HPU, else no bound",
    )
    attention_rule: str | None = option(
        None,
        "Sparse attention of the same heads: sink_band, strided, ...; see docs/attention-rules.md.",
        HEADS,
        metavar=NAME_AND_OPTIONS,
        unset="all",
    )
    max_ring_window: int | None = option(
        None,
        "Longest sliding window of a layer that is stored in rings; longer ones are stored in blocks.",
        HEADS,
        unset="any",
    )
    tie_break: Literal["stable", "reference"] = option(
        "stable", "Order of heads with equal scores.", choices=("stable", "reference")
    )
    balance: Literal["global", "per_layer"] = option(
        "global", "Distribution of retrieval heads over layers.", choices=("global", "per_layer")
    )

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
        if self.balance == "per_rank":
            raise ValueError(
                "balance 'per_rank' cuts a layer into slices of neighbouring heads, which ranks do not "
                "hold: expected global, per_layer, or a pattern that HeadPattern.binarise has cut"
            )
        check_choices(self)
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
        backend: a name (see ``graphs.backends.chosen_name``), or a capture backend of your own. None of them
            falls back to another one.
        table: buckets, or a file with them, such as ``hpu-duo plan`` writes; None = the exponential default,
            or with "eager" the exact shape of each step. A manifest of ``hpu-duo warmup`` is accepted too, if
            it was written for this configuration; ``max_model_len`` and the number of blocks are then the
            manifest's if they are not given.
        memory_bytes: set aside before the KV cache is sized; see ``hpu_duo.startup.tables``.
        fail_on_recompile: raises ``RecompileError``, which names what was compiled.
        replan: see ``Engine.replan``.
        own_cost: rank the buckets of ``table`` by the table's own cost function; False = by the cost of a
            step of this model, as in the default table. Buckets from a file have no cost function.
    """

    backend: str | CaptureBackend = option(
        "default",
        "How steps are captured: auto, eager, replay, compile, cuda, hpu-compile, hpu-graph, or default: "
        "auto on HPU, eager elsewhere.",
        ENGINE,
        name="graphs",
    )
    table: BucketTable | str | Path | None = option(
        None,
        "File with the shapes to capture, as hpu-duo plan writes it.",
        ENGINE,
        name="buckets",
        unset="made from the limits",
    )
    on_miss: MissPolicy = option(
        cast("MissPolicy", "error"), ("error, capture or eager: what happens to a step that fits no bucket.")
    )
    max_captured_tokens: int | None = option(
        None,
        "Steps of more tokens, long prefills, run uncaptured.",
        ENGINE,
        unset="all are captured",
    )
    memory_bytes: int | None = option(
        None,
        "Device memory to leave free for captured steps, such as 2GiB.",
        ENGINE,
        name="graph_memory_bytes",
        metavar="SIZE",
        unset="as estimated",
        is_size=True,
    )
    fail_on_recompile: bool = option(
        False,
        "A step that compiles anything after the warm-up is an error; commands warm up first.",
        ENGINE,
        flags=("--fail-on-recompile",),
    )
    replan: float | None = option(
        None,
        "Plan shapes for the traffic again while serving, and capture them for so many seconds.",
        ENGINE,
        metavar="SECONDS",
        unset="the table stays as it is",
    )
    own_cost: bool = True

    def __post_init__(self) -> None:
        from graphs import BucketTable, MissPolicy

        if not isinstance(self.on_miss, MissPolicy):
            object.__setattr__(self, "on_miss", MissPolicy.parse(self.on_miss))
        members = ("name", "num_first_runs", "problem", "capture", "region")
        missing = [name for name in members if not hasattr(self.backend, name)]
        if missing and not isinstance(self.backend, str):
            from graphs.backends import BACKEND_NAMES

            raise ValueError(
                f"expected graphs to be default, auto, {', '.join(BACKEND_NAMES)} or a capture backend, "
                f"got {self.backend!r}, which lacks {', '.join(missing)}"
            )
        if self.table is not None and not isinstance(self.table, BucketTable | str | Path):
            raise ValueError(
                f"expected buckets to be a BucketTable or its file, got {type(self.table).__name__}"
            )
        if self.max_captured_tokens is not None:
            check_at_least("max_captured_tokens", self.max_captured_tokens, 1)
        if self.memory_bytes is not None:
            check_at_least("graph_memory_bytes", self.memory_bytes, 0)
        check_bool("fail_on_recompile", self.fail_on_recompile)
        if self.replan is not None:
            _finite("replan", self.replan)
            if not self.replan > 0:
                raise ValueError(f"expected replan to be seconds above 0 or None, got {self.replan!r}")
        check_bool("own_cost", self.own_cost)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Settings of the ranks that share a model, each a process with a device of its own.

    Attributes:
        tensor_parallel_size: heads, widths and vocabulary are cut evenly among the ranks. A program that
            asks for more than one has its main part under ``if __name__ == "__main__"``.
        expert_parallel: for families that transformers has a plan of that for.
        retrieval_parallel: "heads": each rank stores all tokens of equally many heads. "context": each stores
            a part of the tokens of all of them, so that ranks are balanced in every layer, at four exchanges
            a layer instead of two. "auto": by context where heads would be promoted otherwise, else the one
            with faster predicted decodes on HPU, and "heads" on other devices
            (``hpu_duo.planning.retrieval_choice``).
        timeout_s: of a rank that sends no heartbeat before all ranks end, of a step, what it compiles
            included, and, with 5 more, of an exchange inside a step.
        launcher: "own": rank 0, all on its machine. "torchrun": torchrun, on one machine or several; this
            process is then one of them, by torchrun's variables.
    """

    tensor_parallel_size: int = option(
        1, "Devices that share the model, each driven by a process of its own.", ENGINE
    )
    expert_parallel: bool = option(
        False,
        "Place whole experts of a mixture on each device, not a part of the width of each.",
        ENGINE,
    )
    retrieval_parallel: str = option(
        "auto",
        "What devices share of retrieval heads: heads, or the tokens of each of them (context); auto is "
        "context where heads would have to be promoted, else what is predicted to be faster.",
        ENGINE,
        metavar="heads|context|auto",
        choices=("heads", "context", "auto"),
    )
    retrieval_parallel_context: int | None = option(
        None,
        "Tokens of a request for which auto predicts the faster of both, as on a Gaudi.",
        ENGINE,
        unset="the longest request on HPU, no prediction elsewhere",
    )
    timeout_s: float = option(
        300.0,
        "Seconds of a step, or without a heartbeat of a device's process, before all end.",
        ENGINE,
        name="rank_timeout_s",
        flags=("--rank-timeout-seconds",),
    )
    launcher: str = option(
        "own",
        "Who starts the processes of the devices: this command, or torchrun, on several machines.",
        ENGINE,
        name="rank_launcher",
        metavar="own|torchrun",
        choices=("own", "torchrun"),
    )

    def __post_init__(self) -> None:
        check_at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        check_bool("expert_parallel", self.expert_parallel)
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError("expected tensor_parallel_size above 1 for expert_parallel, got 1")
        check_choices(self)
        self._check_context()
        _finite("rank_timeout_s", self.timeout_s)
        if self.timeout_s <= 0:
            raise ValueError(f"expected rank_timeout_s above 0, got {self.timeout_s}")

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
        """Whether blocks are context-parallel; known once it is not "auto"."""
        return self.retrieval_parallel == "context" and self.tensor_parallel_size > 1


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of what is recorded of an engine's steps, and of its random numbers."""

    record_shapes: str | Path | None = option(
        None,
        "Append the exact shape of every step to this file, to plan from.",
        ENGINE,
        metavar="FILE",
        unset="not recorded",
    )
    record_steps: str | Path | None = option(
        None,
        "Write every step to this file, for hpu-duo replay: a debugging tool.",
        ENGINE,
        metavar="FILE",
        unset="not recorded",
    )
    seed: int = option(0, "Base of the seeds of requests without one.")

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"expected seed to be an integer, got {self.seed!r}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of a user, by section. ``of`` creates one from flat names, as in ``from_pretrained``."""

    model: ModelConfig
    heads: HeadConfig = field(default_factory=HeadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @classmethod
    def of(cls, path: str | Path = ".", **overrides: Unpack[EngineOverrides]) -> EngineConfig:
        """Return the defaults, with some of them replaced.

        Args:
            path: of the model; ``from_pretrained`` replaces it by its own.
            overrides: settings by name, see ``SETTINGS``.

        Raises:
            ValueError: a value is out of range or does not fit the others.
            TypeError: there is no such setting.
        """
        sections = _by_section(overrides)
        model = ModelConfig(path=path, **sections.pop("model", {}))
        return cls(model=model, **{name: _SECTIONS[name](**values) for name, values in sections.items()})

    def override(self, **overrides: Unpack[EngineOverrides]) -> EngineConfig:
        """Return this configuration with some settings replaced.

        Raises:
            ValueError, TypeError: see ``of``.
        """
        sections = _by_section(overrides)
        before = self.scheduler.speculation
        follows = before is not None and self.scheduler.decode_len == before.lens[-1]
        if follows and "speculative_config" in overrides:
            # It was for the drafts that are replaced.
            sections["scheduler"].setdefault("decode_len", 1)
        return replace(self, **{name: replace(getattr(self, name), **new) for name, new in sections.items()})

    def __post_init__(self) -> None:
        for name, kind in _SECTIONS.items():
            if not isinstance(section := getattr(self, name), kind):
                raise TypeError(f"expected {name} to be a {kind.__name__}, got {type(section).__name__}")
        if self.scheduler.decode_len > self.cache.block_size:
            raise ValueError(
                f"expected decode_len of at most block_size={self.cache.block_size}, "
                f"got {self.scheduler.row_text.removeprefix('decode_len=')}"
            )

    @property
    def block_size(self) -> int:
        """Tokens of a block of the engine: of a block on each rank, where blocks are dealt over ranks."""
        num_parts = self.parallel.tensor_parallel_size if self.parallel.deals_blocks else 1
        return self.cache.block_size * num_parts


_SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "heads": HeadConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "graph": GraphConfig,
    "parallel": ParallelConfig,
    "run": RunConfig,
}
_PLACES = {
    setting.name: (section, setting) for section, kind in _SECTIONS.items() for setting in settings_of(kind)
}
SETTINGS: Mapping[str, Setting] = {name: setting for name, (_, setting) in _PLACES.items()}
"""Every setting by its name in ``from_pretrained``, ``EngineConfig.of`` and, with dashes, of commands."""


def _by_section(overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return values by section and field; TypeError for a name that is no setting."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in overrides.items():
        if name not in _PLACES:
            raise TypeError(f"EngineConfig has no setting {name!r}{nearest(name, SETTINGS)}")
        section, setting = _PLACES[name]
        sections.setdefault(section, {})[setting.field.name] = value
    return sections


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion of the most similar known name; "" if there is none."""
    found = get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _finite(name: str, value: float | None) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (is_number and math.isfinite(value)):
        raise ValueError(f"expected {name} to be a finite number, got {value!r}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"expected {name} to be one of {', '.join(known)}, got {value!r}")
