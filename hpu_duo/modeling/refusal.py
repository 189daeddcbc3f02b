"""Turn a model's own failure at load into a clear refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# What a model's forward raises when it is handed arguments, or a mask, that it was not written for.
_FORWARD_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError)


@contextmanager
def refusing(model: nn.Module) -> Iterator[None]:
    """Turn errors of the model's forward into a ``ValueError`` that says it cannot be served."""
    try:
        yield
    except _FORWARD_ERRORS as error:
        name = type(model).__name__
        raise ValueError(f"{name} cannot be served: it fails on flattened tokens: {error}") from error
