"""CUDA graphs: a step is launched by one call instead of one per kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphs.backends.base import MOST_OPERATORS, Outputs, Recorder, Recording, WholeStepBackend, tensors_of


class CudaRecorder:
    """Records with ``torch.cuda.graph``; all graphs share one private pool of memory.

    A step first runs unrecorded on a side stream: libraries allocate their workspaces and choose their
    kernels then, which is forbidden during a recording. Recording launches nothing, so the results are those
    of this first run. A synchronization with the device ends the recording with an error.

    Sharing the pool is safe because steps run one after the other and a result is read before the next step
    starts; recorded from the largest to the smallest, all graphs fit into the memory of the first one.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def problem(self, device: torch.device) -> str | None:
        """Return why the device has no CUDA graphs; None if it has."""
        if device.type != "cuda":
            return f"CUDA graphs record steps on device 'cuda', got {str(device)!r}"
        return None if torch.cuda.is_available() else "torch finds no CUDA device"

    def record(self, run: Callable[[], Outputs]) -> Recording[Outputs]:
        """See ``Recorder``."""
        first = _on_side_stream(run)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            static = run()
        self._pool = graph.pool()
        return Recording(first, static, graph.replay)


def _on_side_stream(run: Callable[[], Outputs]) -> Outputs:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        outputs = run()
    main.wait_stream(side)
    for tensor in tensors_of(outputs):
        # The allocator must not reuse the memory before the main stream has finished with it.
        tensor.record_stream(main)
    return outputs


class CudaBackend(WholeStepBackend):
    """See ``WholeStepBackend`` and ``CudaRecorder``.

    Args:
        recorder: for tests on machines without a GPU.
        max_operators: see ``WholeStepBackend``.
    """

    def __init__(self, recorder: Recorder | None = None, max_operators: int = MOST_OPERATORS) -> None:
        super().__init__("cuda", CudaRecorder() if recorder is None else recorder, max_operators)
