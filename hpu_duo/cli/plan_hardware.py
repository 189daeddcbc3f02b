"""Planning for a Gaudi: what fits, how fast it would be, and the limits that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpu_duo.cli.capacity_choices import DEFAULT_KV_FORMATS, DEFAULT_SPARSITIES, default_contexts

if TYPE_CHECKING:
    from graphs import BatchShape
    from hpu_duo.cost import Capacity, Deployment, ModelSize, Serving
    from hpu_duo.kv.plan import LayerKV


@dataclass(frozen=True)
class HardwareOptions:
    """What a model is served on, and what to compare; see ``hpu-duo capacity``.

    Attributes:
        name: of the hardware.
        contexts, sparsities, kv_formats: to compare; the first sparsity and format are planned for.
    """

    name: str
    devices: int
    dtype: str
    contexts: list[int] | None
    sparsities: list[float] | None
    kv_formats: list[str] | None
    sink: int
    recent: int
    memory_utilization: float
    graph_memory: float

    def serving(self, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> Serving:
        """The same with the limits of a scheduler.

        Raises:
            ValueError: an unknown name, or a value out of range.
        """
        from hpu_duo.cost import Format, Serving, find_hardware

        return Serving(
            find_hardware(self.name),
            num_devices=self.devices,
            weights=Format.parse(self.dtype),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            memory_utilization=self.memory_utilization,
            graph_memory=self.graph_memory,
            sink=self.sink,
            recent=self.recent,
        )

    def compare(self, size: ModelSize, serving: Serving, num_graphs: int) -> list[Capacity]:
        """What every choice gives.

        Raises:
            ValueError: see ``hpu_duo.cost.capacity``.
        """
        from hpu_duo.cost import Format, capacity

        contexts = self.contexts or default_contexts(size.max_positions)
        formats = [Format.parse(text) for text in self.kv_formats or DEFAULT_KV_FORMATS]
        return [
            capacity(size, serving, share, one, contexts, num_graphs=num_graphs)
            for share in self.sparsities or DEFAULT_SPARSITIES
            for one in formats
        ]

    def deployment(self, size: ModelSize, serving: Serving, max_len: int) -> Deployment:
        """The first choice, for requests of up to ``max_len`` tokens.

        Raises:
            ValueError: see ``hpu_duo.cost.Deployment``.
        """
        from hpu_duo.cost import Deployment, Format

        return Deployment(
            size,
            serving,
            (self.sparsities or DEFAULT_SPARSITIES)[0],
            Format.parse((self.kv_formats or DEFAULT_KV_FORMATS)[0]),
            max_len,
        )


def graph_bytes(
    model: Path, size: ModelSize, kv_layers: tuple[LayerKV, ...], block_size: int
) -> Callable[[BatchShape], float]:
    """What the graph of a bucket keeps on HPU at worst: its results and intermediates of its own.

    Args:
        kv_layers: the heads that keep blocks and rings, of each layer.
    """
    from bias_builders import Window
    from hpu_duo.engine.graph_memory import KEPT, GraphMemory
    from hpu_duo.engine.step_sizes import StepSizes
    from hpu_duo.modeling.loading import read_config
    from kernels_ref import Implementation, LayerSpec

    specs = [
        LayerSpec(
            num_retrieval=kv.num_retrieval_heads,
            num_streaming=kv.num_streaming_heads,
            group_size=layer.num_heads // layer.num_kv_heads,
            head_dim=layer.head_dim,
            scale=layer.head_dim**-0.5,
            window=Window(0, kv.ring_size) if kv.num_streaming_heads else None,
            softcap=None,
            impl=Implementation.REFERENCE,
        )
        for layer, kv in zip(size.layers, kv_layers)
    ]
    directory = model if model.is_dir() else model.parent
    config = read_config(directory, needs_weights=False).get_text_config()
    sizes = StepSizes.of(specs, config, block_size, dtype_bytes=2)
    return GraphMemory(KEPT["hpu-compile"], 1, sizes).kept_bytes
