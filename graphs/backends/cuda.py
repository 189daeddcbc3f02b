"""CUDA graphs: a step is launched by one call instead of one per kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphs.backends.base import MOST_OPERATORS, Outputs, Recorder, Recording, WholeStepBackend, tensors_of


class CudaRecorder:
    """Records with ``torch.cuda.graph``; all graphs share one private pool of memory.

    A step first runs unrecorded on a side stream: libraries allocate their workspaces and choose their
    kernels then, which is forbidden during a recording. Recording launches nothing, so this first run is
    also the one whose results count. Anything that waits for the device ends the recording with an error.

    Sharing the pool is safe because steps run one after the other and a result is read before the next
    step starts; recorded from the largest to the smallest, graphs find all the memory they need in what the
    first one took.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def problem(self, device: torch.device) -> str | None:
        """Why the device has no CUDA graphs, or None."""
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
        # The allocator may not give the memory away before the main stream is done with it.
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
