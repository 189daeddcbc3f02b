"""The memory budget of an engine on a device: one rule for engine, audit and cost model."""

from __future__ import annotations

from dataclasses import dataclass

DEVICE_MEMORY_UTILIZATION = 0.9
"""Share of a device's memory that one engine may fill by default, as in vLLM."""

GRAPH_MEMORY_SHARE = 0.1
"""Default of the largest share of the memory besides weights for graphs, as in vllm-gaudi."""


def check_utilization(share: float) -> None:
    """Raise ValueError unless ``share`` is a share of a device's memory, above 0 and at most 1."""
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if not is_number or not 0.0 < share <= 1.0:
        raise ValueError(f"expected device_memory_utilization in (0, 1], got {share!r}")


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
