"""Tensors without data, and what becomes of them: torch's private names for that, all of them here."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["DispatchMode", "FakeTensorMode", "memory_key", "tree_leaves", "tree_map_only"]


def memory_key(tensor: torch.Tensor) -> int:
    """A number that all views of the same memory share, as long as one of them is alive."""
    return tensor.untyped_storage()._cdata
