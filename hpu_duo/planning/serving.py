"""The devices that serve a model, as predictions take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from hpu_duo.config.attention_rules import chooses_blocks
from hpu_duo.config.engine import ParallelConfig
from hpu_duo.config.limits import (
    CARD_LIMITS,
    GRAPH_MEMORY_SHARE,
    HPU_LAYER_KINDS,
    CacheConfig,
    DeviceBudget,
    SchedulerConfig,
)
from hpu_duo.heads import HeadPattern
from hpu_duo.kv.plan import ring_slack
from hpu_duo.modeling.weight_stream import buffer_numbers, copied_layers
from hpu_duo.planning.kept import KeptByHeads
from hpu_duo.planning.model import Format, Hardware, ModelSize
from hpu_duo.planning.work import kernels_of
from kernels_ref import Implementation
from kernels_ref.chunks import ChunkBounds

_GIB = 1 << 30


class OffloadedLayers(NamedTuple):
    """Layers whose weights lie on the host or on a disk, and pass through buffers of each device.

    Attributes:
        homes: of each layer, in order: 1 = the host, 2 = a disk.
        num_ahead: layers that are copied ahead of the one in use; see ``buffer_numbers``.
        link: bytes a second from the host to each device.
        disk_rate: bytes a second from the disk, for all devices together.
    """

    homes: tuple[int, ...]
    num_ahead: int
    link: float
    disk_rate: float

    @property
    def number(self) -> int:
        """Layers that lie elsewhere."""
        return len(self.homes)

    @property
    def num_buffers(self) -> int:
        """Layers that each device has room for."""
        return max(buffer_numbers(self.number, self.num_ahead), default=-1) + 1

    def seconds(self, layer_bytes: float, num_devices: int) -> float:
        """Seconds of the copies of a step, ``num_devices`` parts of each layer beside each other."""
        copied = [
            home for home, moves in zip(self.homes, copied_layers(self.number, self.num_ahead)) if moves
        ]
        on_link = len(copied) * layer_bytes / num_devices / self.link
        return max(on_link, copied.count(2) * layer_bytes / self.disk_rate)


@dataclass(frozen=True)
class Serving:
    """The devices that serve a model, and the division of their memory.

    Attributes:
        hardware: of each device.
        num_devices: devices that share weights, heads and work evenly (tensor parallel).
        retrieval_parallel: what they share of retrieval heads, see ``ParallelConfig``; a ``Deployment``
            resolves "auto".
        weights: format of the weights of layers.
        block_size: tokens of a KV block, on one device.
        max_num_seqs: most running requests, even if more fit.
        max_num_batched_tokens: of one step; longer prompts are cut into chunks.
        device_memory_utilization: share of the devices' memory for weights, graphs and KV cache together; see
            ``hpu_duo.config.limits``.
        graph_memory: share of that without weights, for graphs instead of the KV cache.
        enable_prefix_caching, num_prefix_snapshots: see ``CacheConfig``.
        sink, recent: tokens that streaming heads store.
        pattern: scores by which heads stream; None spreads them evenly over the layers.
        max_layer_kinds: see ``HeadConfig``; None is no bound.
        attention: kernels, ``hpu`` on the fused operators of Gaudi's software or ``reference``.
        decode_len: most tokens of a request that are decoded together.
        draft_lens: see ``StepLimits``; speeds are those of the first.
        max_chunk_rows: prompts that may continue with several tokens in the same step.
        kept: what streaming heads store instead of rings, or, with a plan or a rule, all heads.
        draft: a model that drafts, or a layer that does, all of it on each device; None without.
        offloaded: layers whose weights lie elsewhere; None = all are on the devices.
    """

    hardware: Hardware
    num_devices: int = 1
    retrieval_parallel: str = ParallelConfig.retrieval_parallel
    weights: Format = Format.BF16
    block_size: int = CacheConfig.block_size
    max_num_seqs: int = CARD_LIMITS.max_num_seqs
    max_num_batched_tokens: int = CARD_LIMITS.max_num_batched_tokens
    device_memory_utilization: float = CacheConfig.device_memory_utilization
    graph_memory: float = GRAPH_MEMORY_SHARE
    enable_prefix_caching: bool = CacheConfig.enable_prefix_caching
    num_prefix_snapshots: int | None = None
    sink: int = 128
    recent: int = 256
    pattern: HeadPattern | None = None
    max_layer_kinds: int | None = HPU_LAYER_KINDS
    attention: str = Implementation.HPU.value
    decode_len: int = SchedulerConfig.decode_len
    draft_lens: tuple[int, ...] = ()
    max_chunk_rows: int = SchedulerConfig.max_chunk_rows
    kept: KeptByHeads | None = None
    draft: ModelSize | None = None
    offloaded: OffloadedLayers | None = None

    def __post_init__(self) -> None:
        self.hardware.check_devices(self.num_devices)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "decode_len", "max_chunk_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        # Validated like an engine.
        CacheConfig(
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            num_prefix_snapshots=self.num_prefix_snapshots,
            device_memory_utilization=self.device_memory_utilization,
        )
        if not 0.0 <= self.graph_memory < 1.0:
            raise ValueError(f"expected graph_memory in [0, 1), got {self.graph_memory}")
        kernels_of(self.attention)
        ParallelConfig(tensor_parallel_size=self.num_devices, retrieval_parallel=self.retrieval_parallel)

    @property
    def deals_blocks(self) -> bool:
        """Whether blocks are context-parallel; known once it is not "auto"."""
        return self.retrieval_parallel == "context" and self.num_devices > 1

    @property
    def engine_block_size(self) -> int:
        """Tokens of a block of the engine: on each device, where blocks are dealt over them."""
        return self.block_size * (self.num_devices if self.deals_blocks else 1)

    def shared_by(self, retrieval_parallel: str) -> Serving:
        """The same where devices share retrieval heads by ``"heads"`` or by ``"context"``."""
        kept = None if self.kept is None else self.kept.shared_by(retrieval_parallel)
        return replace(self, retrieval_parallel=retrieval_parallel, kept=kept)

    @property
    def chunks(self) -> ChunkBounds:
        """Bounds of chunks of context."""
        return ChunkBounds.of_hpu(self.hardware.memory_bytes)

    @property
    def ring_slack(self) -> int:
        """Slots of a ring beyond its window."""
        return ring_slack(self.decode_len)

    @property
    def not_served(self) -> tuple[str, ...]:
        """Names of what is priced and cannot be run by the engine of this version."""
        # A Gaudi multiplies no int8: the engine makes such weights bf16 when they load.
        found = ["int8 weights"] if self.weights is Format.INT8 else []
        rule = None if self.kept is None else self.kept.rule
        if rule is not None and chooses_blocks(rule):
            found.append(f"attention_rule {rule!r} on HPU")
        if self.offloaded is not None:
            found.append("weights on the host or a disk on HPU")
        return tuple(found)

    def weight_bytes(self, model: ModelSize) -> int:
        """Bytes of weights on all devices together, of what drafts and buffers of offloaded layers too."""
        return self.weights_by_place(model)["device"]

    def weights_by_place(self, model: ModelSize) -> dict[str, int]:
        """Bytes of weights on all devices together, on the host and on a disk; see ``weight_bytes``."""
        own = 0 if self.draft is None else self.draft.weight_bytes(Format.BF16)
        device = model.weight_bytes(self.weights) + self.num_devices * own
        if (away := self.offloaded) is None:
            return {"device": device, "host": 0, "disk": 0}
        layer = model.layer_bytes(self.weights)
        return {
            "device": device - round((away.number - away.num_buffers) * layer),
            "host": round(away.homes.count(1) * layer),
            "disk": round(away.homes.count(2) * layer),
        }

    def streaming_s(self, model: ModelSize) -> float:
        """Seconds of a step's copies of offloaded layers, which no step is faster than."""
        if self.offloaded is None:
            return 0.0
        return self.offloaded.seconds(model.layer_bytes(self.weights), self.num_devices)

    @property
    def of_draft(self) -> Serving:
        """Serving of the model that drafts, all of it on each device."""
        assert self.draft is not None, "something drafts"
        return replace(
            self,
            num_devices=1,
            retrieval_parallel="heads",
            block_size=self.engine_block_size,
            weights=Format.BF16,
            pattern=None,
            kept=None,
            draft=None,
            offloaded=None,
        )

    def kv_budget_bytes(self, model: ModelSize) -> int:
        """Bytes for the KV cache on all devices together.

        Raises:
            ValueError: the weights alone do not fit, or KV heads do not divide among the devices.
        """
        model.check_split(self.num_devices)
        memory = self.num_devices * self.hardware.memory_bytes
        weight_bytes = self.weight_bytes(model)
        if weight_bytes >= memory:
            beside = "" if self.draft is None else f" with those of {self.draft.name}"
            raise ValueError(
                f"the {self.weights.value} weights of {model.name}{beside} take "
                f"{weight_bytes / _GIB:.1f} GiB, "
                f"{self.num_devices} x {self.hardware.title} have {memory / _GIB:.1f} GiB"
            )
        budget = DeviceBudget.of_own_device(memory, weight_bytes, self.device_memory_utilization)
        return budget.kv_bytes(budget.graph_bytes(self.graph_memory))
