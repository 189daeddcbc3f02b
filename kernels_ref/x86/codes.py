"""Keys and values of few bits: attention that reads codes where they lie, and blocks of them widened.

The score of a key of codes c, scale s and zero z is ``s * (q @ c) + z * sum(q)``, and a value of weight p
adds ``p * s * c + p * z``: each code is widened once for a few query heads, and nothing else is computed for
it. Sums are float32, and so are queries; keys and values are not rounded to the dtype of the model, where
decoded ones are. With queries of 16-bit floats, integers are multiplied as 16-bit words, with
queries in parts of 1 / 32,767 of their largest element, and weights of that of 128 neighbours.

Shapes: as in ``kernels_ref.x86.library``.
"""

from __future__ import annotations

import torch

from kernels_ref.formats import KVFormat
from kernels_ref.formats.fp8 import Fp8, ScaledFp8
from kernels_ref.formats.int4 import Int4
from kernels_ref.formats.int8 import Int8
from kernels_ref.partial import Partial
from kernels_ref.units import KVUnits
from kernels_ref.x86.library import is_available

_SERVED = (Int8, Int4, Fp8, ScaledFp8)
_STEP, _MAX_DIM = 32, 256
_WIDENED = (torch.float32, torch.bfloat16)


def fits(q_NKHD: torch.Tensor, units: KVUnits) -> bool:
    """Whether ``attend_blocks`` reads these units on this machine; a constant for compiled code."""
    encoding = units.encoding
    is_possible = q_NKHD.device.type == "cpu" and q_NKHD.dtype.itemsize <= 4
    return is_possible and encoding.dim == encoding.value_dim and _reads(units)


def attend_blocks(
    q_NKHD: torch.Tensor,
    units: KVUnits,
    owner: torch.Tensor,
    tail_block: torch.Tensor,
    tail_visible: torch.Tensor,
) -> Partial:
    """Scaled queries over whole units that their rows own, and the leading slots of a few more.

    Args:
        owner, tail_block, tail_visible: as for ``library.attend_blocks``.

    Raises:
        ValueError: tensors that do not go together.
    """
    operator = torch.ops.hpu_duo_x86_v3.attend_coded_blocks.default
    return Partial(*operator(q_NKHD, *_pairs(units), owner, tail_block, tail_visible))


def attend_rings(q_NKHD: torch.Tensor, units: KVUnits, visible: torch.Tensor) -> Partial:
    """Scaled queries over the leading slots of a unit each.

    Args:
        visible: slots of unit ``n`` that each token of row ``n`` sees, int32 ``[N, 1, M]``.

    Raises:
        ValueError: tensors that do not go together.
    """
    number = torch.arange(len(visible), dtype=torch.int32, device=visible.device)
    return attend_blocks(q_NKHD, units, number[:0], number[:, None], visible)


def tile(units: KVUnits, index: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
    """``units.tile(index)``, bit for bit: by one pass over the codes, where this machine has the kernel."""
    _, dim, value_dim, dtype = units.encoding
    if isinstance(index, slice) or dtype not in _WIDENED or index.device.type != "cpu" or not _reads(units):
        return units.tile(index)
    operator = torch.ops.hpu_duo_x86_v3.widen_codes.default
    k_codes, k_meta, v_codes, v_meta = _pairs(units)
    return operator(k_codes, k_meta, index, dim, dtype), operator(v_codes, v_meta, index, value_dim, dtype)


def serves(kv_format: KVFormat) -> bool:
    """Whether there are kernels for a format of keys and values."""
    return isinstance(kv_format.keys, _SERVED) and isinstance(kv_format.values, _SERVED)


def _reads(units: KVUnits) -> bool:
    dims = units.encoding.dim, units.encoding.value_dim
    is_served = serves(units.encoding.format) and all(dim % _STEP == 0 and dim <= _MAX_DIM for dim in dims)
    return is_served and is_available(torch.float32)


def _pairs(units: KVUnits) -> tuple[torch.Tensor | None, ...]:
    """Codes and scales of keys, and of values; None for a format without scales."""
    num, views = units.encoding.format.keys.num_parts, units.views
    keys, values = views[:num], views[num:]
    return keys[0], keys[1] if num > 1 else None, values[0], values[1] if len(values) > 1 else None
