"""Devices: what is there, and what a name means here."""

from __future__ import annotations

import importlib.util

import torch

NAMES = ("cpu", "cuda", "hpu")


def hpu_problem() -> str | None:
    """Why HPU cannot be used, or None when it can.

    Designed from public sources; no Gaudi has run this.
    """
    if importlib.util.find_spec("habana_frameworks") is None:
        return "the package habana_frameworks is not installed"
    import habana_frameworks.torch.hpu as hpu

    return None if hpu.is_available() else "habana_frameworks is installed, but finds no device"


def cuda_problem() -> str | None:
    """Why CUDA cannot be used, or None when it can."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def problem(name: str) -> str | None:
    """Why a device cannot be used, or None when it can."""
    return {"cpu": lambda: None, "cuda": cuda_problem, "hpu": hpu_problem}[name]()


def resolve_device(name: str | torch.device) -> torch.device:
    """The device for a name; "auto" takes the first of HPU, CUDA and CPU that is usable.

    Raises:
        ValueError: an unknown name, or a device that is not usable here: nothing falls back.
    """
    text = str(name)
    if text == "auto":
        text = next(candidate for candidate in ("hpu", "cuda", "cpu") if problem(candidate) is None)
    kind = text.partition(":")[0]
    if kind not in NAMES:
        raise ValueError(f"expected device 'auto' or one of {', '.join(NAMES)}, got {text!r}")
    reason = problem(kind)
    if reason is not None:
        raise ValueError(f"device {text!r} was asked for, but {reason}")
    return torch.device(text)
