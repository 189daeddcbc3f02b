"""The kernels of this folder as operators ``torch.ops.hpu_duo_x86``, built at their first use."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import torch

from kernels_ref.native import BuildError, build

_INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16")
_OPTIONS = ("-O3", "-fopenmp", *(f"-m{name}" for name in _INSTRUCTIONS))
_Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def is_supported() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 in vectors."""
    return torch.cpu._is_avx512_bf16_supported()


@torch.compiler.assume_constant_result
def is_available() -> bool:
    """Whether the operators are there. Compiled code takes the answer as fixed.

    False, with one warning, where they cannot be built; without one where the CPU is another one.
    """
    return _load()


def require() -> None:
    """Load the operators.

    Raises:
        ValueError: there are none here.
    """
    if not is_available():
        raise ValueError("expected a CPU and a compiler that this kernel can use; ask fits() first")


@cache
def _load() -> bool:
    if not is_supported():
        return False
    try:
        torch.ops.load_library(build("x86", sorted(Path(__file__).parent.glob("*.cpp")), _OPTIONS))
    except (BuildError, OSError) as error:
        warnings.warn(f"bfloat16 runs slower than it could on this CPU: {error}", stacklevel=2)
        return False
    for name, shapes in (("linear", _linear), ("attend_blocks", _triple), ("attend_rings", _triple)):
        torch.library.register_fake(f"hpu_duo_x86::{name}", shapes)
    return True


def _linear(
    x: torch.Tensor, packed: torch.Tensor, bias: object, out_features: int, live: object
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _triple(q: torch.Tensor, *_: object) -> _Triple:
    attn = q.new_empty(q.shape, dtype=torch.float32)
    return attn, attn.new_empty(attn.shape[:-1]), attn.new_empty(attn.shape[:-1])
