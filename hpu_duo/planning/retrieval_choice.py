"""The choice of ``retrieval_parallel="auto"``: ranks share retrieval heads by heads, or by context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphs import BatchShape, Phase
from hpu_duo.kv.plan import LayerKV, MemoryPlan
from hpu_duo.planning.engine_work import EngineWork
from hpu_duo.planning.model import Format, Hardware, ModelSize
from hpu_duo.planning.roofline import FITTED, predict_seconds
from hpu_duo.planning.work import Formats, kernels_of
from kernels_ref.chunks import ChunkBounds


@dataclass(frozen=True)
class SharedHeads:
    """Heads of a model under one value of ``retrieval_parallel``.

    Attributes:
        kv_layers: keys and values of each layer, all ranks together.
        num_promoted: streaming heads that are served as retrieval heads.
    """

    kv_layers: tuple[LayerKV, ...]
    num_promoted: int


@dataclass(frozen=True)
class RetrievalChoice:
    """The chosen value, and why.

    Attributes:
        chosen: ``"heads"`` or ``"context"``.
        num_ranks, num_kv_heads: ranks, and the fewest key/value heads of a layer.
        num_promoted: streaming heads that are served as retrieval heads under this choice.
        reason: why, in words.
    """

    chosen: str
    num_ranks: int
    num_kv_heads: int
    num_promoted: int
    reason: str

    def __str__(self) -> str:
        way = "by context" if self.chosen == "context" else "by heads"
        return (
            f"{self.num_ranks} ranks, {self.num_kv_heads} KV heads: retrieval heads are shared {way}, "
            f"{self.num_promoted} promoted ({self.reason})"
        )


def choose_retrieval(
    num_ranks: int,
    num_kv_heads: int,
    shared: Callable[[str], SharedHeads],
    faster: Callable[[SharedHeads, SharedHeads], tuple[str, str]],
    obstacle: str | None,
) -> RetrievalChoice:
    """Choose context where sharing by heads would promote heads, else the faster way.

    Args:
        num_kv_heads: the fewest of a layer.
        shared: heads under ``"heads"`` or ``"context"``.
        faster: the faster of both, by heads and by context, with the reason.
        obstacle: why blocks cannot be context-parallel; None where they can.

    Raises:
        ValueError: the heads do not fit the model.
    """
    ways = {"heads": shared("heads")}
    if obstacle is not None:
        chosen, reason = "heads", obstacle
    else:
        ways["context"] = shared("context")
        num_promoted = ways["heads"].num_promoted
        if num_promoted > ways["context"].num_promoted:
            chosen, reason = "context", f"by heads {num_promoted} would be promoted"
        else:
            chosen, reason = faster(ways["heads"], ways["context"])
    return RetrievalChoice(chosen, num_ranks, num_kv_heads, ways[chosen].num_promoted, reason)


@dataclass(frozen=True)
class ChoiceCosts:
    """Predicts decodes of a model on several devices, to choose what they share.

    Attributes:
        size, hardware, num_devices: the model and its devices.
        kv_bytes: of the KV cache on all devices together; 0 where weights alone do not fit.
        block_size: tokens of a block on one device.
        max_num_seqs, max_chunk_rows: limits of steps.
        context: tokens of each request of the predicted decodes.
    """

    size: ModelSize
    hardware: Hardware
    num_devices: int
    kv_bytes: int
    block_size: int
    max_num_seqs: int
    max_chunk_rows: int
    context: int

    def faster(self, by_heads: SharedHeads, by_context: SharedHeads) -> tuple[str, str]:
        """Return ``"heads"`` or ``"context"``, and the reason."""
        num_requests = self._count_requests(by_heads.kv_layers)
        heads_s = self._decode_s(by_heads.kv_layers, False, num_requests)
        context_s = self._decode_s(by_context.kv_layers, True, num_requests)
        return "heads" if heads_s <= context_s else "context", (
            f"a decode of {num_requests} requests of {self.context:,} tokens is predicted to take "
            f"{1e3 * heads_s:.1f} ms by heads and {1e3 * context_s:.1f} ms by context on "
            f"{self.hardware.title}, not measured"
        )

    def _count_requests(self, kv_layers: tuple[LayerKV, ...]) -> int:
        """Requests that run at a time: 1 or more, as many as fit on the devices."""
        plan = MemoryPlan(kv_layers, int(Format.BF16.num_bytes), self.block_size, 1, 1)
        # By heads each device has all latents.
        copies = self.num_devices if any(each.stores_latents for each in kv_layers) else 1
        each = copies * plan.bytes_per_request(self.context)
        return max(1, min(self.max_num_seqs, self.kv_bytes // max(1, each)))

    def _decode_s(self, kv_layers: tuple[LayerKV, ...], deals_blocks: bool, num_requests: int) -> float:
        """Predicted seconds of a decode."""
        work = EngineWork(
            self.size,
            kv_layers,
            Formats(),
            kernels_of("hpu"),
            self.block_size,
            self.max_chunk_rows,
            num_devices=self.num_devices,
            deals_blocks=deals_blocks,
            chunks=ChunkBounds.of_hpu(self.hardware.memory_bytes),
            on_chip_bytes=self.hardware.on_chip_bytes,
        )
        block_size = self.block_size * (self.num_devices if deals_blocks else 1)
        num_blocks = num_requests * (self.context // block_size)
        bucket = BatchShape(Phase(unique=True), num_requests, 0, num_blocks, num_requests)
        return predict_seconds(work.of(bucket).fused, self.hardware, self.num_devices, FITTED).total


def obstacle_to_context(*, is_uneven: bool, pools_heads: bool, captures_exchanges: bool = True) -> str | None:
    """Return why retrieval heads cannot be shared by context; None where they can.

    Args:
        is_uneven: a layer has a number of key/value heads that is no multiple of the ranks.
        pools_heads: a KV policy averages over the heads of a layer.
        captures_exchanges: the capture backend supports exchanges between the kernels of a layer.
    """
    if is_uneven:
        return "by context each layer needs a multiple of as many KV heads as ranks"
    if pools_heads:
        return "a KV policy averages over all heads of a layer, which is served by heads only"
    if not captures_exchanges:
        return "torch's compiler for CPUs supports no gathers, which sharing by context needs"
    return None
