"""Dtypes of weights, of keys and values, and of arithmetic."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import torch

from hpu_duo.modeling.loading import resolve_dtype
from hpu_duo.modeling.packed_linear import can_pack


@dataclass(frozen=True)
class Precision:
    """The dtypes of a served model.

    Attributes:
        weights: of linear layers and of the embedding table, in memory.
        kv: of stored keys and values, in a plain store.
        arithmetic: of activations and of all other weights.
    """

    weights: torch.dtype
    kv: torch.dtype
    arithmetic: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype) -> Precision:
        """One dtype for all three."""
        return cls(dtype, dtype, dtype)

    @classmethod
    def choose(cls, asked: str | torch.dtype, config: Any, device_type: str) -> Precision:
        """The dtypes of a checkpoint on a device.

        A named dtype is all three. "auto" is the checkpoint's, and on an HPU bfloat16. On an x86 CPU without
        instructions for products of that dtype, arithmetic is in float32.

        Args:
            asked: the setting ``dtype``.
            config: transformers' configuration of the checkpoint.

        Raises:
            ValueError: see ``resolve_dtype``.
        """
        dtype = resolve_dtype(asked, config, device_type)
        if asked != "auto" or device_type != "cpu" or _is_multiplied(dtype):
            return cls.of(dtype)
        return cls.of(torch.float32)

    def notes(self, asked: str | torch.dtype, config: Any) -> tuple[str, ...]:
        """Sentences for the user if "auto" has become another dtype than the checkpoint's."""
        own = name_of(resolve_dtype("auto", config))
        if asked != "auto" or name_of(self.arithmetic) == own:
            return ()
        if self.arithmetic == torch.float32:
            return (
                f"the checkpoint is in {own}, which this CPU cannot multiply fast, and is served in "
                f"float32, several times faster: dtype={own!r} keeps it, in half the memory",
            )
        return (
            f"the checkpoint is in {own} and is served in {name_of(self.arithmetic)}, as an HPU computes: "
            f"dtype={own!r} keeps it",
        )


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in settings, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _is_multiplied(dtype: torch.dtype) -> bool:
    """Whether an x86 CPU has instructions for products of ``dtype``; True on other processors."""
    if dtype == torch.float32 or platform.machine() not in ("x86_64", "AMD64"):
        return True
    return can_pack(dtype) and torch.cpu._is_avx512_bf16_supported()
