"""Tensors that report ``hpu:0`` and keep their data in host memory.

Torch has no public names for a device that Python brings along; those used here are all in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from hpu_duo.lab.rules import StoreOperand

HPU = torch.device("hpu", 0)

Signature = tuple[Any, ...]
_dispatch: list[Callable[..., Any]] = []


class SimTensor(torch.Tensor):
    """A tensor of the simulated device.

    Attributes:
        host: the data, a CPU tensor of the same shape, strides and dtype. For the simulation only.
        signature: shape, strides, offset and dtype: what a recipe depends on.
        is_own_index: indices that the device computed itself, as ``topk`` does: each is below the size of a
            dimension, so it is the same number in 32 bits and in 64.
        weight_dtype: float type of the model's weight that it holds the numbers of, None for other tensors.
        null: elements ``[begin, end)`` of its memory that may be written twice, None = none.
        is_store: whether it is itself a store of keys or values, which ``mark_null`` tells.
        is_state: whether it has null units and is no such store: a graph may read it and then write it.
    """

    host: torch.Tensor
    signature: Signature
    is_own_index: bool
    weight_dtype: torch.dtype | None
    null: tuple[int, int] | None
    is_store: bool
    is_state: bool

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> SimTensor:
        # A view that is an inference tensor may not be taken of one that is none, so none ever is.
        if torch.is_inference_mode_enabled():
            with torch._C._InferenceMode(False):
                return _wrapper(cls, host)
        return _wrapper(cls, host)

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host
        self.signature = (host.size(), host.stride(), host.storage_offset(), host.dtype)
        self.is_own_index = self.is_store = self.is_state = False
        self.weight_dtype = self.null = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch[0](func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SimTensor({tuple(self.shape)}, dtype={self.dtype}, device='hpu:0')"

    def tolist(self) -> Any:
        """The values as Python numbers: a device-to-host read."""
        return self.cpu().tolist()

    def mark_null(self, begin: int, end: int, is_state: bool = False) -> None:
        """Let entries ``[begin, end)`` of dimension 0 be written twice."""
        stride, offset = int(self.host.stride(0)), int(self.host.storage_offset())
        self.null = offset + begin * stride, offset + end * stride
        self.is_store, self.is_state = not is_state, is_state

    @property
    def store(self) -> StoreOperand | None:
        """The store that it is or shows, or None: stores and their views know their null units."""
        if self.null is None or self.is_state:
            return None
        return StoreOperand(self.host.untyped_storage().data_ptr(), is_view=not self.is_store)

    @property
    def is_partial_view(self) -> bool:
        """Whether it covers only a part of the memory of the tensor that it is a view of."""
        return self.host.untyped_storage().nbytes() != self.host.nbytes


def _wrapper(cls: type[SimTensor], host: torch.Tensor) -> SimTensor:
    return torch.Tensor._make_wrapper_subclass(
        cls,
        host.size(),
        strides=host.stride(),
        storage_offset=host.storage_offset(),
        dtype=host.dtype,
        device=HPU,
        requires_grad=False,
    )


def connect(dispatch: Callable[..., Any], module: ModuleType) -> None:
    """Set the function that runs operators of these tensors; called once, when the device is installed.

    Args:
        module: ``torch.hpu`` from now on.
    """
    _dispatch[:] = [dispatch]
    torch._register_device_module(HPU.type, module)
