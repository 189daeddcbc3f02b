"""Limits of steps, cache and device memory, as a user sets them, with the only definition of each default.

Imports no torch, so that the command line can show the defaults at once. An engine resolves these settings to
one ``graphs.StepLimits``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpu_duo.config.option import ENGINE, HEADS, LIMITS, NAME_AND_OPTIONS, check_choices, option
from hpu_duo.config.speculation import SpeculativeConfig

if TYPE_CHECKING:
    from hpu_duo.config.kv_plan import KVPlan


DEVICE_MEMORY_UTILIZATION = 0.9
"""Share of a device's memory that one engine may fill by default, as in vLLM."""

GRAPH_MEMORY_SHARE = 0.1
"""Default of the largest share of the memory besides weights for graphs, as in vllm-gaudi."""


def check_utilization(share: float) -> None:
    """Raise ValueError unless ``share`` is a share of a device's memory, above 0 and at most 1."""
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if not is_number or not 0.0 < share <= 1.0:
        raise ValueError(f"expected device_memory_utilization in (0, 1], got {share!r}")


def check_cpu_offload(num_bytes: float, most: float) -> None:
    """Raise ValueError for a ``cpu_offload_gb`` above the weights of all layers; both in bytes."""
    if num_bytes > most:
        gib = 1 << 30
        raise ValueError(
            f"expected cpu_offload_gb of at most {most / gib:.3g}, the GiB of all layers, got "
            f"{num_bytes / gib:.3g}"
        )


@dataclass(frozen=True)
class DeviceBudget:
    """The memory of a device, or of several together, and the share of it that one engine may use.

    The share is vLLM's ``gpu_memory_utilization``: of all memory of the device, weights, graphs and KV cache
    together. On a shared device, graphs and cache use at most that share of the free memory.

    Attributes:
        total_bytes: memory of the device.
        held_bytes: memory of the engine's process before graphs and cache are allocated, weights included.
        free_bytes: memory that is free then.
        utilization: the share, above 0 and at most 1.
    """

    total_bytes: int
    held_bytes: int
    free_bytes: int
    utilization: float = DEVICE_MEMORY_UTILIZATION

    def __post_init__(self) -> None:
        check_utilization(self.utilization)

    @classmethod
    def of_own_device(
        cls, total_bytes: int, weight_bytes: int, utilization: float = DEVICE_MEMORY_UTILIZATION
    ) -> DeviceBudget:
        """Return the budget of a device with nothing but the weights."""
        return cls(total_bytes, weight_bytes, total_bytes - weight_bytes, utilization)

    @property
    def left_bytes(self) -> int:
        """Bytes available to graphs and KV cache together, 0 or more."""
        own = int(self.utilization * self.total_bytes) - self.held_bytes
        return max(0, min(own, int(self.utilization * self.free_bytes)))

    def graph_bytes(self, share: float = GRAPH_MEMORY_SHARE) -> int:
        """Return the bytes for graphs, a share of ``left_bytes``."""
        return int(share * self.left_bytes)

    def kv_bytes(self, graph_bytes: int) -> int:
        """Return the bytes left for the KV cache after ``graph_bytes``, 0 or more."""
        return max(0, self.left_bytes - graph_bytes)


SLIDING_WINDOW = "sliding_window"
"""Names all layers with a sliding window, among layers whose keys and values keep the model's dtype."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Limits of the KV cache. Fields have their own descriptions; this adds details.

    Attributes:
        num_blocks, kv_cache_bytes: one of them. Without either, as much as ``max_num_seqs`` requests of
            ``max_model_len`` tokens need, within ``device_memory_utilization``.
        enable_prefix_caching: see ``hpu_duo.kv.prefix``.
        num_prefix_snapshots: snapshots of rings for cached prefixes; None = as many as requests run, in at
            most an eighth of the bytes of all other stores (``hpu_duo.kv.row_state``). A model whose heads
            all store blocks needs none.
        kv_policy: eviction policy of heads with a budget: one of ``hpu_duo.heads.eviction.KV_POLICIES``, with
            options: ``h2o:recent=0.25``. These are the streaming heads of a head pattern, or all heads
            without one; layers with a sliding window are not affected. None = no head has a budget.
        kv_budget: tokens that each of them stores of a request, or, up to 1, their share of
            ``max_model_len``.
        kv_plan: a plan, or its file (``hpu_duo.config.kv_plan``). Layers with a sliding window are not
            affected by the plan.
        kv_prompt: ``"chunks"``: they evict tokens at the end of each chunk of a prompt, so they never store
            more than their budget and a chunk. ``"whole"``: a prompt is read with full attention, and they
            evict tokens once, at its end; in chunks, or in one step without ``kv_chunk`` and where
            ``max_num_batched_tokens`` holds the longest text.
        kv_chunk: None = 512, or less to fit ``max_num_batched_tokens``.
        kv_cache_dtype: format in which heads that store blocks keep keys and values: "auto", the model's
            dtype, or another one of ``kernels_ref.formats``, or one for keys and one for values, with ":"
            between.
        kv_cache_dtype_skip_layers: numbers of layers that keep the model's dtype, or "sliding_window", all
            layers with one.
        calculate_kv_scales: vLLM's name of what is refused.
        kv_scales: directory with constants that keys and values are divided by before they are rounded to
            fp8; None = those of the checkpoint, else 1. Those of fp8_inc are in files of ``QUANT_CONFIG``.
        kv_offloading_size: GiB of all ranks together, as in vLLM; see ``hpu_duo.kv.tiers``.
        kv_offloading_backend: vLLM's name; "native" is the only one.
        kv_offloading_write_policy: a ``hpu_duo.kv.tiers.policy.WritePolicy``.
        kv_offloading_min_tokens: of a text that "write_through_cost" copies.
        kv_offloading_eviction_policy: name in ``hpu_duo.kv.tiers.eviction.ORDERS``.
        context_idle_seconds: that a ``PrefixContext`` stays pinned without a question; None = until it is
            closed.
        preemption_mode: a ``hpu_duo.kv.tiers.swap.PreemptionMode``.
        swap_space: GiB of all ranks together for swapped requests, beside ``kv_offloading_size``.
        kv_offloading_disk: folder; what has reached host memory is written there too.
        kv_offloading_disk_size: GiB of its files.
        cpu_attention: GiB of host memory for KV blocks of running requests; see ``hpu_duo.kv.host_blocks``.
        cpu_attention_mode: a ``hpu_duo.engine.on_host.choice.HostDecodes``.
        ring_dtype: format in which rings, and heads with a budget, keep keys and values: a name like that of
            ``kv_cache_dtype``.
        device_memory_utilization: vLLM's ``gpu_memory_utilization``; see ``hpu_duo.config.limits``.
    """

    block_size: int = option(128, "Tokens of one KV block.", LIMITS)
    num_blocks: int | None = option(
        None, "KV blocks of the cache.", LIMITS, unset="what the requests need and memory holds"
    )
    kv_cache_bytes: int | None = option(
        None,
        "Memory of the KV cache instead of a number of blocks, such as 4GiB.",
        LIMITS,
        flags=("--kv-cache-bytes", "--kv-cache-memory-bytes"),
        metavar="SIZE",
        is_size=True,
    )
    device_memory_utilization: float = option(
        DEVICE_MEMORY_UTILIZATION,
        "Share of the device's memory for weights, graphs and KV cache together.",
        LIMITS,
        flags=("--device-memory-utilization", "--gpu-memory-utilization"),
    )
    enable_prefix_caching: bool = option(
        True, "Cache the KV blocks of ended requests for later ones with the same prefix.", LIMITS
    )
    num_prefix_snapshots: int | None = option(
        None,
        "Snapshots of streaming heads for cached prefixes.",
        LIMITS,
        unset="as many as requests run, in an eighth of the memory",
    )
    kv_policy: str | None = option(
        None,
        (
            "Eviction policy of heads with a budget (those that stream under --pattern, else all): "
            "h2o, tova, snapkv, expected-attention, fastgen, streaming-llm, local, fixed or strided. "
            "See docs/kv-budget.md."
        ),
        HEADS,
        metavar=NAME_AND_OPTIONS,
        unset="all tokens",
    )
    kv_budget: float | None = option(
        None,
        "Tokens of a request that each head with a budget stores; up to 1, a share of --max-model-len.",
        HEADS,
        unset="none",
    )
    kv_plan: KVPlan | str | Path | None = option(
        None,
        "What each head stores, instead of --pattern and --kv-policy; see docs/kv-budget.md.",
        HEADS,
        metavar="FILE",
        unset="none",
    )
    kv_prompt: str = option(
        "chunks",
        "When heads with a budget evict tokens of a prompt: at the end of each chunk (chunks), or at its "
        "end, after it was read with full attention (whole).",
        HEADS,
        choices=("chunks", "whole"),
    )
    kv_chunk: int | None = option(
        None,
        "Tokens of a prompt between two evictions, which one step reads.",
        HEADS,
        unset="512, or what a step holds; whole: all that a step holds",
    )
    kv_cache_dtype: str = option(
        "auto",
        "How keys and values are stored: auto (as --dtype), bfloat16, float16, float32, int8_per_token_head, "
        "int4_per_token_head, fp8, fp8_inc (scales of QUANT_CONFIG), fp8_per_token_head or k8v4; see "
        "docs/quantisation.md.",
        LIMITS,
        metavar="FORMAT",
    )
    kv_cache_dtype_skip_layers: tuple[str | int, ...] = option(
        (),
        "Layers whose keys and values stay as --dtype: their numbers, or sliding_window.",
        LIMITS,
        metavar="LAYER",
        unset="none",
    )
    calculate_kv_scales: bool = option(
        False,
        "Refused: formats have constant scales, or one for each vector.",
        LIMITS,
        flags=("--calculate-kv-scales",),
    )
    kv_scales: str | Path | None = option(
        None,
        "Directory with scales of keys and values for fp8, as hpu-duo calibrate --kv-scales writes.",
        LIMITS,
        metavar="DIR",
        unset="the checkpoint's, else 1",
    )
    ring_dtype: str = option(
        "auto",
        "How rings and heads with a budget store keys and values: auto (as --dtype) or a format of "
        "--kv-cache-dtype.",
        LIMITS,
        metavar="FORMAT",
    )

    kv_offloading_size: float | None = option(
        None,
        "GiB of host memory for what the prefix cache evicts; see docs/offload.md.",
        LIMITS,
        metavar="GIB",
        unset="none",
    )
    kv_offloading_backend: str = option("native", "What offloads: native.", LIMITS)
    kv_offloading_write_policy: str = option(
        "write_back",
        "When a block is copied to the host: as it is evicted (write_back), cached (write_through), used a "
        "second time (write_through_selective), or cached in a long text (write_through_cost).",
        LIMITS,
        choices=("write_back", "write_through", "write_through_selective", "write_through_cost"),
    )
    kv_offloading_min_tokens: int = option(
        1024, "Tokens from which on write_through_cost copies a text; of shorter ones, nothing.", LIMITS
    )
    kv_offloading_eviction_policy: str = option(
        "lru",
        "Record of host memory that is evicted first: the least recently used (lru), lru but sparing what "
        "was used again (arc), or what saves the fewest tokens for its size and age (value).",
        LIMITS,
        choices=("lru", "arc", "value"),
    )
    context_idle_seconds: float | None = option(
        None,
        "Seconds without a question after which a context need not stay on the device: requests may evict it "
        "to the host, and its next question brings it back.",
        LIMITS,
        metavar="S",
        unset="it stays",
    )
    preemption_mode: str = option(
        "recompute",
        "What brings a preempted request back: computing it again (recompute), host memory (swap), or "
        "whichever is predicted to be faster (auto).",
        LIMITS,
        choices=("recompute", "swap", "auto"),
    )
    swap_space: float | None = option(
        None, "GiB of host memory for preempted requests.", LIMITS, metavar="GIB", unset="none"
    )
    kv_offloading_disk: str | Path | None = option(
        None,
        "Folder for what has reached host memory, which later runs and other processes load from.",
        LIMITS,
        metavar="PATH",
        unset="none",
    )
    kv_offloading_disk_size: float | None = option(
        None, "GiB of files in --kv-offloading-disk.", LIMITS, metavar="GIB", unset="none"
    )
    cpu_attention: float | None = option(
        None,
        "GiB of host memory for KV blocks that do not fit on the device; see cpu_attention_mode "
        "and docs/offload.md.",
        LIMITS,
        metavar="GIB",
        unset="none",
    )
    cpu_attention_mode: str = option(
        "attend",
        "How decodes attend to the blocks of cpu_attention: on the host (attend), by copying them to the "
        "device in each step (move), or whichever is predicted to be faster (auto).",
        LIMITS,
        choices=("attend", "move", "auto"),
    )
    kv_offloading_blocks_per_step: int | None = option(
        None,
        "Most blocks that a step copies to the host, and as many from there.",
        LIMITS,
        unset="as many as a step fills",
    )

    def __post_init__(self) -> None:
        check_at_least("block_size", self.block_size, 1)
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError(
                f"expected num_blocks or kv_cache_bytes, got both: num_blocks={self.num_blocks} "
                f"kv_cache_bytes={self.kv_cache_bytes}"
            )
        for name in ("num_blocks", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        if self.num_prefix_snapshots is not None:
            check_at_least("num_prefix_snapshots", self.num_prefix_snapshots, 0)
            if not self.enable_prefix_caching:
                raise ValueError(
                    f"num_prefix_snapshots={self.num_prefix_snapshots} needs enable_prefix_caching=True"
                )
        check_utilization(self.device_memory_utilization)
        self._check_formats()
        self._check_budget()
        self._check_offloading()

    def _check_formats(self) -> None:
        check_bool("calculate_kv_scales", self.calculate_kv_scales)
        if not isinstance(self.kv_scales, str | PathLike | None):
            raise ValueError(f"expected kv_scales to be a directory, got {self.kv_scales!r}")
        if self.calculate_kv_scales:
            raise ValueError(
                "calculate_kv_scales is not served: scales of the first request would be those of all "
                "others, so that answers depend on their order: expected kv_cache_dtype 'fp8_per_token_head'"
            )
        for setting in ("kv_cache_dtype", "ring_dtype"):
            name = getattr(self, setting)
            if name == "auto":
                continue
            # It imports torch.
            from kernels_ref.formats import format_of, names_of_formats

            if not isinstance(name, str):
                names = ", ".join(names_of_formats())
                raise ValueError(f"expected {setting} to be a name, one of {names}, got {name!r}")
            if setting == "ring_dtype" and "kivi_" in name:
                raise ValueError(
                    f"expected ring_dtype to be a format whose scales are those of one vector, got {name!r}: "
                    "a slot of a ring that is overwritten would share its scales with tokens that remain"
                )
            format_of(name, setting)
        layers = self.kv_cache_dtype_skip_layers
        named = tuple(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else (layers,)
        for layer in named:
            is_number = str(layer).isdecimal() and not isinstance(layer, bool)
            if not is_number and layer != SLIDING_WINDOW:
                raise ValueError(
                    "expected kv_cache_dtype_skip_layers to be numbers of layers or "
                    f"{SLIDING_WINDOW!r}, got {layer!r}"
                )
        if named and self.kv_cache_dtype == self.ring_dtype == "auto":
            raise ValueError(
                f"kv_cache_dtype_skip_layers={list(named)} needs a kv_cache_dtype or ring_dtype, got 'auto'"
            )
        object.__setattr__(self, "kv_cache_dtype_skip_layers", tuple(map(str, named)))

    def _check_offloading(self) -> None:
        size = self.cpu_attention
        if size is not None and (isinstance(size, bool) or not 0 < size < math.inf):
            raise ValueError(f"expected cpu_attention to be GiB above 0 or None, got {size!r}")
        if size is None and self.cpu_attention_mode != "attend":
            raise ValueError(f"cpu_attention_mode={self.cpu_attention_mode!r} needs cpu_attention, got None")
        if size is not None and self.enable_prefix_caching:
            raise ValueError(
                f"cpu_attention={size} needs enable_prefix_caching=False: blocks on the host belong to one "
                "request"
            )
        if self.kv_offloading_backend != "native":
            is_lmcache = self.kv_offloading_backend == "lmcache"
            reason = ": LMCache stores no rings of streaming heads" if is_lmcache else ""
            raise ValueError(
                f"expected kv_offloading_backend 'native', got {self.kv_offloading_backend!r}{reason}"
            )
        if self.kv_offloading_blocks_per_step is not None:
            check_at_least("kv_offloading_blocks_per_step", self.kv_offloading_blocks_per_step, 1)
        if self.kv_offloading_size is None:
            default = type(self).__dataclass_fields__
            for name in (
                "kv_offloading_write_policy",
                "kv_offloading_min_tokens",
                "kv_offloading_eviction_policy",
                "context_idle_seconds",
                "kv_offloading_blocks_per_step",
                "kv_offloading_disk",
                "kv_offloading_disk_size",
                "preemption_mode",
                "swap_space",
            ):
                if getattr(self, name) != default[name].default:
                    raise ValueError(f"{name}={getattr(self, name)!r} needs kv_offloading_size, got None")
            return
        check_at_least("kv_offloading_min_tokens", self.kv_offloading_min_tokens, 1)
        if isinstance(self.kv_offloading_size, bool) or not 0 < self.kv_offloading_size < math.inf:
            raise ValueError(
                f"expected kv_offloading_size to be GiB above 0 or None, got {self.kv_offloading_size!r}"
            )
        if (self.kv_offloading_disk is None) is not (self.kv_offloading_disk_size is None):
            raise ValueError(
                "expected kv_offloading_disk and kv_offloading_disk_size or neither, got "
                f"kv_offloading_disk={self.kv_offloading_disk!r} "
                f"kv_offloading_disk_size={self.kv_offloading_disk_size!r}"
            )
        if (self.preemption_mode == "recompute") is not (self.swap_space is None):
            raise ValueError(
                "expected swap_space with preemption_mode 'swap' or 'auto', and only then, got "
                f"preemption_mode={self.preemption_mode!r} swap_space={self.swap_space!r}"
            )
        for name in ("kv_offloading_disk_size", "swap_space"):
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or not 0 < size < math.inf):
                raise ValueError(f"expected {name} to be GiB above 0 or None, got {size!r}")
        idle = self.context_idle_seconds
        if idle is not None and (isinstance(idle, bool) or not 0 <= idle < math.inf):
            raise ValueError(f"expected context_idle_seconds to be 0 or more or None, got {idle!r}")
        if not self.enable_prefix_caching:
            raise ValueError(
                f"kv_offloading_size={self.kv_offloading_size} needs enable_prefix_caching=True: what the "
                "prefix cache evicts is offloaded"
            )

    def _check_budget(self) -> None:
        if (self.kv_policy is None) is not (self.kv_budget is None):
            raise ValueError(
                f"expected kv_policy and kv_budget or neither, got kv_policy={self.kv_policy!r} "
                f"kv_budget={self.kv_budget!r}"
            )
        has_budgets = self.kv_policy is not None or self.kv_plan is not None
        if self.kv_policy is not None and self.kv_plan is not None:
            raise ValueError(f"expected kv_policy or kv_plan, got kv_policy={self.kv_policy!r} and a plan")
        budget = self.kv_budget
        if budget is not None:
            is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
            if not is_number or not (0 < budget <= 1 or (budget > 1 and float(budget).is_integer())):
                raise ValueError(
                    f"expected kv_budget to be a share above 0 and up to 1, or a whole number of tokens, "
                    f"got {budget!r}"
                )
        check_choices(self)
        if self.kv_prompt == "whole" and not has_budgets:
            raise ValueError("kv_prompt='whole' needs a kv_policy, got none")
        if self.kv_chunk is not None:
            check_at_least("kv_chunk", self.kv_chunk, 2)
            if not has_budgets:
                raise ValueError(f"kv_chunk={self.kv_chunk} needs a kv_policy, got none")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step. Fields have their own descriptions; this adds details.

    Attributes:
        max_model_len: None = limit of the model and the cache. Rotary frequencies that depend on a text's
            length are those of this length.
        max_chunk_rows: prompts that read the same blocks count once where no head has a ring.
        decode_len: most tokens that a request decodes in a step. It decodes more than 1 if they are known
            beforehand, as those of a score are, and verifies them together. Rings have ``decode_len - 1``
            slots of slack. With ``speculative_config`` it is at least ``num_speculative_tokens + 1``.
        speculative_config: fields of ``SpeculativeConfig``, as a mapping or JSON; stored as JSON.
        trim_chunks: needs a table of buckets; see ``hpu_duo.engine.scheduler``.
        scheduling_policy: order of admission and preemption, a name of ``hpu_duo.scheduling.POLICIES``, with
            options: ``priority:patience=100``.
    """

    max_model_len: int | None = option(
        None, "Tokens of prompt and output together.", LIMITS, unset="what the model serves"
    )
    max_num_seqs: int = option(
        32, "Requests that run at the same time.", LIMITS, unset="as many as there are, at most 32"
    )
    max_num_batched_tokens: int = option(
        2048, "Tokens of one step; longer prompts are cut into chunks.", LIMITS
    )
    max_chunk_rows: int = option(1, "Prompts that may continue in the same step.", LIMITS)
    decode_len: int = option(
        1,
        "Tokens of a request that are decoded together where they are known beforehand.",
        ENGINE,
    )
    speculative_config: Mapping[str, Any] | str | None = option(
        None,
        'Verify drafts of the next tokens, such as {"num_speculative_tokens": 8}; see docs/speculation.md.',
        ENGINE,
        metavar="JSON",
        unset="no drafts",
    )
    trim_chunks: bool = option(
        False,
        "End a chunk at the border of a bucket, and continue in the next step, if that pads less.",
        ENGINE,
        flags=("--trim-chunks",),
    )
    scheduling_policy: str = option(
        "fcfs",
        "Which requests run first if not all can; see docs/scheduling.md.",
        ENGINE,
        metavar=NAME_AND_OPTIONS,
    )
    ranker: str | Path | None = option(
        None,
        "What hpu-duo train-ranker wrote, for --scheduling-policy ltr.",
        ENGINE,
        metavar="DIR",
        unset="none",
    )

    def __post_init__(self) -> None:
        check_at_least("max_num_seqs", self.max_num_seqs, 1)
        check_at_least("decode_len", self.decode_len, 1)
        if (speculation := self.speculation) is not None:
            object.__setattr__(self, "speculative_config", speculation.text)
            object.__setattr__(self, "decode_len", max(self.decode_len, speculation.lens[-1]))
        decoded = self.max_num_seqs * self.decode_len
        why = f": max_num_seqs={self.max_num_seqs} times {self.row_text}" if self.decode_len > 1 else ""
        check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, decoded, why)
        check_at_least("max_chunk_rows", self.max_chunk_rows, 1)
        if self.max_model_len is not None:
            check_at_least("max_model_len", self.max_model_len, 2)
        check_bool("trim_chunks", self.trim_chunks)

    @property
    def draft_lens(self) -> tuple[int, ...]:
        """Tokens of a row that steps without prompts may have, see ``StepLimits``; () = ``decode_len``."""
        speculation = self.speculation
        return () if speculation is None else tuple(sorted({*speculation.lens, self.decode_len}))

    @property
    def row_text(self) -> str:
        """Most tokens of a row that decodes, by the setting that they follow from, for errors."""
        if (speculation := self.speculation) is None or speculation.lens[-1] < self.decode_len:
            return f"decode_len={self.decode_len}"
        return f"num_speculative_tokens + 1 = {self.decode_len} of speculative_config"

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Settings of the drafter; None without one."""
        return None if self.speculative_config is None else SpeculativeConfig.of(self.speculative_config)


def check_at_least(name: str, value: int, minimum: int, why: str = "") -> None:
    """Raise ValueError, which ends with ``why``, unless an integer, and no bool, is at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"expected {name} to be an integer >= {minimum}, got {value!r}{why}")


def check_bool(name: str, value: bool) -> None:
    """Raise ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"expected {name} to be True or False, got {value!r}")


HPU_LAYER_KINDS = 4
"""Default of the most kinds of layers of a head pattern on an HPU: each is compiled for every bucket. A
published pattern cut at 50 % has 7 to 16 numbers of retrieval heads per layer."""

CARD_LIMITS = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192)
"""Limits that the cost model assumes for a server with a Gaudi of its own."""
