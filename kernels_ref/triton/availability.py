"""Availability of Triton on a device; there is no fallback to other kernels."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

MAX_HEAD_DIM = 256
"""Largest head size in the tables of tiles."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def is_installed() -> bool:
    """Whether Triton could be imported."""
    return importlib.util.find_spec("triton") is not None


@cache
def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: ``TRITON_INTERPRET=1`` when Triton was imported."""
    from triton import JITFunction

    from kernels_ref.triton.softmax import soften

    return not isinstance(soften, JITFunction)


def problem(device: torch.device) -> str | None:
    """Return why kernels cannot run on a device; None if they can."""
    if device.type not in ("cuda", "cpu"):
        return f"Triton kernels run on CUDA devices, not on {str(device)!r}"
    if not is_installed():
        return "the package triton is not installed"
    if device.type == "cpu" and not is_interpreting():
        return "without a GPU they need Triton's interpreter (TRITON_INTERPRET=1 before the start)"
    if device.type == "cuda" and is_interpreting():
        return "Triton's interpreter is on, which is for CPU (unset TRITON_INTERPRET)"
    return None


def require(device: torch.device) -> None:
    """Raise ``ValueError`` when kernels cannot run on a device."""
    reason = problem(device)
    if reason is not None:
        raise ValueError(f"attention 'triton' is not available: {reason}")
