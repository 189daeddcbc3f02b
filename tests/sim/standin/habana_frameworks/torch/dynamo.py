"""Stand-in of the compiler: traced code as it is, and a count of what was compiled.

It takes static shapes only, as it is asked to by ``dynamic=False``.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch._dynamo import list_backends, register_backend


def register() -> None:
    """Once in a process, however often the stand-in is imported anew."""
    if "hpu_backend" not in list_backends(exclude_tags=None):
        register_backend(compiler_fn=hpu_backend, name="hpu_backend")


def hpu_backend(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """Compile one graph."""
    if not all(isinstance(example, torch.Tensor) for example in examples):
        raise ValueError("expected static shapes, got an input that is no tensor")
    import_module("habana_frameworks.torch.hpu.metrics").compiled()
    return module.forward
