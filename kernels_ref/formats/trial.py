"""Trial of a format on its device, against results on the host."""

from __future__ import annotations

import torch

from kernels_ref.formats.base import KVFormat, VectorFormat

_STEPS = 1.5
"""Most steps of a code by which a device may differ: of rounding, and of a scale."""


def format_problem(
    kv_format: KVFormat, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why a device cannot store keys and values in a format; None if it can.

    Vectors are encoded and decoded on both. Devices lack types, or read some codes differently.

    Args:
        key_dim, value_dim: elements of a key and of a value.
        dtype: of the model.
    """
    if kv_format.is_plain or device.type == "cpu":
        return None
    for vectors, dim in dict.fromkeys(((kv_format.keys, key_dim), (kv_format.values, value_dim))):
        problem = _problem(vectors, dim, dtype, device)
        if problem is not None:
            return problem
    return None


def _problem(vectors: VectorFormat, dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    x = _unequal(dim).to(dtype)
    stored = vectors.encode(x)
    expected = vectors.decode(stored, dtype).float()
    try:
        read = vectors.decode([part.to(device) for part in stored], dtype).float().cpu()
        written = [part.cpu() for part in vectors.encode(x.to(device))]
    except (RuntimeError, TypeError) as error:
        return f"it does not run there: {str(error).splitlines()[0]}"
    if not torch.allclose(read, expected, rtol=2**-7, atol=0.0):
        return "it decodes other numbers there"
    off = (vectors.decode(written, dtype).float() - expected).abs()
    step = (expected - x.float()).abs().amax(dim=-1, keepdim=True)
    if not bool((off <= _STEPS * 2 * step + 2**-7 * expected.abs()).all()):
        return "it encodes other numbers there"
    return None


def _unequal(dim: int) -> torch.Tensor:
    """Vectors whose elements all differ, with small and large ones, up to the largest of 8-bit floats."""
    ramp = torch.linspace(-1.0, 1.0, dim)
    return torch.stack([ramp, ramp * 448, 3.0 + ramp.sin(), ramp * 2.0**-5, torch.zeros(dim)])
