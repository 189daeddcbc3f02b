"""The kernels of this folder as operators ``torch.ops.hpu_duo_x86``, built at their first use."""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Literal

import torch

from kernels_ref.native import BuildError, build

Instructions = Literal["best", "vectors", "tiles", "model"]
"""Instructions for products: the best for the work, AVX512-BF16, AMX, or a slow model of AMX for tests."""

SWITCH = "HPU_DUO_X86_KERNELS"
"""Environment variable: 0 = compute as on a CPU without AVX512-BF16."""

_VECTORS = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16")
_TILES = ("amx-tile", "amx-bf16")
_Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_lock = Lock()


def is_switched_off() -> bool:
    """Whether ``HPU_DUO_X86_KERNELS=0`` selects torch's operators instead of these kernels.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    found = os.environ.get(SWITCH) or "1"
    if found not in ("0", "1"):
        raise ValueError(f"{SWITCH}: expected 0 or 1, got {found!r}")
    return found == "0"


def is_supported() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 in vectors, and ``is_switched_off`` is False."""
    return torch.cpu._is_avx512_bf16_supported() and not is_switched_off()


@cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets of the first CPU as Linux names them; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def has_tiles() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 in tiles as well, and the system permits it."""
    return is_supported() and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def variants() -> tuple[Instructions, ...]:
    """All instructions for products of this machine, if the operators can be built."""
    return ("vectors", "tiles", "model") if has_tiles() else ("vectors", "model")


def description() -> str:
    """Description of the kernels and their instructions, on a CPU that ``is_supported``."""
    return f"our kernels ({'AVX512-BF16 and AMX' if has_tiles() else 'AVX512-BF16'})"


def is_available() -> bool:
    """Whether the operators are available; a constant for compiled code.

    False, with one warning, where they cannot be built; without one where the CPU is another one.
    """
    with _lock:
        return _load()


# torch.compiler.assume_constant_result does this, and imports all of Dynamo first.
is_available._dynamo_marked_constant = True  # type: ignore[attr-defined]


def require() -> None:
    """Load the operators.

    Raises:
        ValueError: they are not available.
    """
    if not is_available():
        raise ValueError("expected a CPU and a compiler that this kernel can use; call fits() first")


@cache
def _load() -> bool:
    if not is_supported():
        return False
    tiles = _TILES if has_tiles() else ()
    bytes_in_tables = ("avx512vbmi",) if "avx512_vbmi" in cpu_flags() else ()
    options = ("-O3", "-fopenmp", *(f"-m{name}" for name in (*_VECTORS, *bytes_in_tables, *tiles)))
    try:
        torch.ops.load_library(build("x86", sorted(Path(__file__).parent.glob("*.cpp")), options))
    except (BuildError, OSError) as error:
        warnings.warn(f"bfloat16 runs slower than it could on this CPU: {error}", stacklevel=2)
        return False
    attention = (("attend_blocks", _triple), ("attend_rings", _triple), ("attend_held", _triple))
    for name, shapes in (("linear", _linear), ("linears", _linears), *attention):
        torch.library.register_fake(f"hpu_duo_x86::{name}", shapes)
    torch.library.register_fake("hpu_duo_x86::attend_with_weights", _with_mass)
    torch.library.register_fake("hpu_duo_x86::eviction_victims", _one_of_each)
    torch.library.register_fake("hpu_duo_x86::column_sums", _sums)
    torch.library.register_fake("hpu_duo_x86::place_of_largest", _places)
    return True


def _sums(q: torch.Tensor, k: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(k.shape[1], k.shape[0], dtype=torch.float32)


def _places(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[:1], dtype=torch.int32)


def _one_of_each(_: object, position: torch.Tensor, is_protected: object) -> torch.Tensor:
    return position.new_empty(position.shape[:2])


def _with_mass(q: torch.Tensor, k: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    return *_triple(q), q.new_empty(*q.shape[:2], k.shape[2], dtype=torch.float32)


def _linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: object,
    out_features: int,
    live: object,
    instructions: str = "",
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _linears(
    x: torch.Tensor, packed: object, biases: object, out_features: list[int], *_: object
) -> list[torch.Tensor]:
    return [x.new_empty(*x.shape[:-1], number) for number in out_features]


def _triple(q: torch.Tensor, *_: object) -> _Triple:
    attn = q.new_empty(q.shape, dtype=torch.float32)
    return attn, attn.new_empty(attn.shape[:-1]), attn.new_empty(attn.shape[:-1])
