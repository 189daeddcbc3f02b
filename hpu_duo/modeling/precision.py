"""Dtypes of weights, of keys and values, and of arithmetic."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hpu_duo.modeling.experts import PanelExperts
from hpu_duo.modeling.loading import resolve_dtype
from hpu_duo.modeling.packed_linear import PanelLinear, StoredEmbedding, can_pack, is_native
from hpu_duo.modeling.quantised.panels import Int8PanelLinear, PanelQuantisedLinear
from kernels_ref.x86 import library


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
        instructions for products of that dtype, arithmetic is in float32; weights, keys and values stay as in
        the checkpoint where our kernels read them. Without them the dtype is the one whose operators torch
        runs fastest.

        Args:
            asked: the setting ``dtype``.
            config: transformers' configuration of the checkpoint.

        Raises:
            ValueError: see ``resolve_dtype``.
        """
        dtype = resolve_dtype(asked, config, device_type)
        if asked != "auto" or device_type != "cpu" or _is_multiplied(dtype):
            return cls.of(dtype)
        if library.serves(dtype, torch.float32) and library.origin() is not None:
            return cls(dtype, dtype, torch.float32)
        return cls.of(dtype if can_pack(dtype) else torch.float32)

    @property
    def is_mixed(self) -> bool:
        """Whether linear weights are stored in another dtype than that of their inputs."""
        return self.weights != self.arithmetic

    def notes(self, asked: str | torch.dtype, config: Any) -> tuple[str, ...]:
        """Sentences for the user if "auto" has become another dtype than the checkpoint's."""
        if asked != "auto":
            return ()
        own = name_of(resolve_dtype("auto", config))
        if own in (name_of(self.arithmetic), name_of(self.weights)):
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
    is_restricted = library.switch() not in ("0", "1")
    return is_native(dtype) and not is_restricted


_PACKED = (PanelLinear, PanelQuantisedLinear, Int8PanelLinear, PanelExperts)


def widen(model: PreTrainedModel, arithmetic: torch.dtype) -> None:
    """Convert the weights of a model with packed linear layers, in place, except for the embedding table.

    Args:
        arithmetic: dtype of activations.
    """
    outer = model.get_input_embeddings()
    table = getattr(outer, "inner", outer)  # of a rank's part of the vocabulary
    stored = None  # for a family that computes with its table
    if type(table) is nn.Embedding:
        stored = StoredEmbedding(table, arithmetic)
        if table is outer:
            model.set_input_embeddings(stored)
        else:
            outer.inner = stored
    for module in model.modules():
        if module is stored or isinstance(module, _PACKED):
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point() and tensor.dtype.itemsize == 2:
                tensor.data = tensor.data.to(arithmetic)
