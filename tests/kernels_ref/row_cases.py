"""Fused elementwise programs of one instruction, and rows of random items, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_ref.rowwise import Builder, Code, Rows


def rows_of(x: Tensor) -> Rows:
    *strides, step = x.stride()
    return Rows(x.dtype, 0, x.shape[-1], 0 if x.shape[-1] == 1 else step, tuple(strides))


def run(sizes: tuple[int, ...], tensors: list[Tensor], code: Code, width: int, dtype: torch.dtype) -> Tensor:
    """One instruction on rows of tensors, as a new contiguous tensor."""
    builder = Builder(sizes)
    sources = [builder.load(place, rows_of(x)) for place, x in enumerate(tensors)]
    result = builder.compute(code, sources, width, dtype)
    like = torch.empty(*sizes, width, dtype=dtype, device="meta")
    builder.store(result, like.shape, like.stride(), rows_of(like))
    return builder.build()(tensors)[0]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 2).to(dtype)
