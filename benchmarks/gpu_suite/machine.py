"""Limits of the device: the copy bandwidth and the matrix rate that figures are shares of."""

from __future__ import annotations

import torch

from benchmarks.gpu_suite.clock import Clock
from benchmarks.gpu_suite.results import Key, Point, Results
from benchmarks.gpu_suite.shapes import Sizes

COPY = Key("machine", "copy", "torch")
PRODUCT = Key("machine", "matrix product", "torch")


def measure_machine(clock: Clock, sizes: Sizes, dtype: torch.dtype, results: Results) -> None:
    """Bytes a second of a large copy, read and written ones, and operations a second of a square product."""
    if not results.is_measured(COPY):
        source = torch.ones(sizes.copy_bytes, dtype=torch.int8, device=clock.device)
        target = torch.empty_like(source)
        timing = clock.time(lambda: target.copy_(source))
        moved = 2 * sizes.copy_bytes
        results.add(Point(COPY, {**timing.values(), "bytes": moved, "bytes_per_s": moved / timing.median_s}))
        del source, target
    if not results.is_measured(PRODUCT):
        n = sizes.matrix
        left, right = torch.randn(2, n, n, device=clock.device).to(dtype)
        timing = clock.time(lambda: left @ right)
        flops = 2 * n**3
        results.add(
            Point(PRODUCT, {**timing.values(), "flops": flops, "flops_per_s": flops / timing.median_s})
        )


def bandwidth(results: Results) -> float | None:
    """Measured bytes a second of a copy, None before it has been measured."""
    point = results.get(COPY)
    return None if point is None else point.values["bytes_per_s"]


def matrix_rate(results: Results) -> float | None:
    """Measured operations a second of a product, None before it has been measured."""
    point = results.get(PRODUCT)
    return None if point is None else point.values["flops_per_s"]
