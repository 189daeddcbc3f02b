"""A format of keys and values that the package does not have: 8-bit integers, a scale per token and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hpu_duo.modeling import attention
from kernels_ref import KVFormat
from kernels_ref.formats import VectorFormat, VectorPart, register_format

MOST = 127


@dataclass(frozen=True)
class Int8(VectorFormat):
    """Codes from -127 to 127, and the float32 that the largest of a vector is 127 times."""

    num_parts: ClassVar[int] = 2

    def parts(self, dim: int) -> tuple[VectorPart, ...]:
        return VectorPart("codes", dim, torch.int8), VectorPart("scale", 1, torch.float32)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = x.float().abs().amax(dim=-1, keepdim=True) / MOST
        codes = torch.round(x.float() / torch.where(scale > 0, scale, 1.0))
        return codes.to(torch.int8), scale

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scale = parts
        return (codes.float() * scale).to(dtype)


INT8 = KVFormat("int8 of tests", Int8(), Int8())
register_format(INT8)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return what a store of this format gives back of vectors, one after the other in numpy."""
    vectors = x.detach().numpy().reshape(-1, x.shape[-1])
    found = np.zeros_like(vectors)
    for vector, out in zip(vectors, found):
        if scale := np.max(np.abs(vector)) / np.float32(MOST):
            out[:] = np.rint(vector / scale) * scale
    return torch.from_numpy(found).view(x.shape)


@contextmanager
def rounded_ahead(patch: Any, rounded: Callable[[torch.Tensor], torch.Tensor] = rounded) -> Iterator[None]:
    """Let layers get keys and values that have been rounded so, whatever their stores hold.

    Args:
        patch: pytest's monkeypatch.
    """
    inner = attention.unified_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        return inner(q, rounded(k), rounded(v), *rest)

    with patch.context() as patched:
        patched.setattr(attention, "unified_attention", attend)
        yield
