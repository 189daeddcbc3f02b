"""Limits of steps and of the cache, as a user sets them, with the only definition of each default.

Imports no torch, so that the command line can show the defaults at once. An engine resolves these settings to
one ``graphs.StepLimits``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpu_duo.config.device_budget import DEVICE_MEMORY_UTILIZATION, check_utilization

if TYPE_CHECKING:
    from hpu_duo.config.kv_plan import KVPlan


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Limits of the KV cache.

    Attributes:
        block_size: tokens of a block.
        num_blocks: blocks to hold; or
        kv_cache_bytes: bytes that all stores may take. Without either, as much as ``max_num_seqs``
            requests of ``max_model_len`` tokens need, within ``device_memory_utilization``.
        enable_prefix_caching: keep the blocks of requests that have ended, for later ones that begin with the
            same tokens; see ``hpu_duo.kv.prefix``.
        num_prefix_snapshots: states of rings to keep with them; None = as many as requests run, as long as
            they take at most an eighth of the bytes of all else (``hpu_duo.kv.snapshots``). A model whose
            heads all keep blocks needs none.
        kv_policy: which tokens heads keep that have a budget: one of ``hpu_duo.heads.eviction.KV_POLICIES``,
            with options behind it: ``h2o:recent=0.25``. These are the heads that stream under a head pattern,
            or all heads without one; layers with a sliding window keep it. None = no head has a budget.
        kv_budget: tokens that each of them keeps of a request, or, up to 1, their share of ``max_model_len``.
        kv_plan: instead, what each head keeps: a plan, or its file (``hpu_duo.config.kv_plan``). Layers with
            a sliding window keep it whatever the plan says.
        kv_prompt: ``"chunks"``: they choose what stays at the end of each chunk of a prompt, so they never
            hold more than their budget and a chunk. ``"whole"``: a prompt is read with full attention, and
            they choose once, at its end; in chunks, or in one step without ``kv_chunk`` and where
            ``max_num_batched_tokens`` holds the longest text.
        kv_chunk: tokens of a prompt that a step reads, between the places at which they choose what stays of
            it; None = 512 or what ``max_num_batched_tokens`` has room for.
        device_memory_utilization: share of the device's memory that weights, graphs and stores may take
            together, vLLM's ``gpu_memory_utilization``; see ``hpu_duo.config.device_budget``.
    """

    block_size: int = 128
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    num_prefix_snapshots: int | None = None
    device_memory_utilization: float = DEVICE_MEMORY_UTILIZATION
    kv_policy: str | None = None
    kv_budget: float | None = None
    kv_plan: KVPlan | str | Path | None = None
    kv_prompt: str = "chunks"
    kv_chunk: int | None = None

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
        self._check_budget()

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
        if self.kv_prompt not in ("chunks", "whole"):
            raise ValueError(f"expected kv_prompt to be 'chunks' or 'whole', got {self.kv_prompt!r}")
        if self.kv_prompt == "whole" and not has_budgets:
            raise ValueError("kv_prompt='whole' needs a kv_policy, got none")
        if self.kv_chunk is not None:
            check_at_least("kv_chunk", self.kv_chunk, 2)
            if not has_budgets:
                raise ValueError(f"kv_chunk={self.kv_chunk} needs a kv_policy, got none")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step.

    Attributes:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: query tokens of a step; longer prompts are cut into chunks.
        max_model_len: tokens of prompt and output together; None = what the model and the cache hold.
        max_chunk_rows: prompts that may continue with several tokens in the same step. Those that read the
            same blocks count once where no head has a ring.
        decode_len: most tokens that a request decodes in a step. It decodes more than 1 if they are known
            beforehand, as those of a score are, and verifies them together. Rings have ``decode_len - 1``
            slots of slack.
        trim_chunks: leave the end of a prompt to the next step where that pads less; needs a table of
            buckets. See ``hpu_duo.engine.scheduler``.
        scheduling_policy: order of admission and preemption, a name of ``hpu_duo.scheduling.POLICIES``, with
            options behind it: ``priority:patience=100``.
        ranker: directory of a ranker of ``hpu-duo train-ranker``, for policies that need one.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    max_chunk_rows: int = 1
    trim_chunks: bool = False
    decode_len: int = 1
    scheduling_policy: str = "fcfs"
    ranker: str | Path | None = None

    def __post_init__(self) -> None:
        check_at_least("max_num_seqs", self.max_num_seqs, 1)
        check_at_least("decode_len", self.decode_len, 1)
        decoded = self.max_num_seqs * self.decode_len
        check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, decoded)
        check_at_least("max_chunk_rows", self.max_chunk_rows, 1)
        if self.max_model_len is not None:
            check_at_least("max_model_len", self.max_model_len, 2)
        check_bool("trim_chunks", self.trim_chunks)


def check_at_least(name: str, value: int, minimum: int) -> None:
    """Raise ValueError unless ``value`` is an integer, and no bool, of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"expected {name} to be an integer >= {minimum}, got {value!r}")


def check_bool(name: str, value: bool) -> None:
    """Raise ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"expected {name} to be True or False, got {value!r}")


HPU_LAYER_KINDS = 4
"""Kinds of layers that a head pattern may make on an HPU, unless more are asked for: each is compiled for
every bucket. A published pattern cut at 50 % has 7 to 16 numbers of retrieval heads per layer."""

CARD_LIMITS = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192)
"""Limits that the cost model assumes for a server with a Gaudi of its own."""
