"""Tensors without data, and what becomes of them: torch's private names for that, all of them here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["DispatchMode", "FakeTensorMode", "aot_backend", "memory_key", "tree_leaves", "tree_map_only"]


def aot_backend(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A backend of ``torch.compile`` that functionalises as the vendor's does, and keeps writes to inputs."""
    # Importing the compiler takes a second.
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=compiler, inference_compiler=compiler, keep_inference_input_mutations=True
    )
    return cast(Callable[..., Any], backend)


def memory_key(tensor: torch.Tensor) -> int:
    """A number that all views of the same memory share, as long as one of them is alive."""
    return tensor.untyped_storage()._cdata
