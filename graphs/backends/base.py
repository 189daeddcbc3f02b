"""The contract of a capture backend."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from graphs.shape import BatchShape

Inputs: TypeAlias = Mapping[str, torch.Tensor]
"""Device inputs of a step by field name, at addresses that are fixed for a bucket."""

Outputs = TypeVar("Outputs")
Region = TypeVar("Region", bound=Callable[..., Any])


class CaptureBackend(Protocol):
    """Turns steps, or the repeated parts of steps, into executables for one shape.

    A backend captures at either of two grains. Whole-step backends (device graphs) do their work in
    ``capture`` and return regions unchanged. Regional backends (compilers, for which a model of equal
    layers is one layer repeated) return the step unchanged and do their work in ``region``. The runner
    asks for both and need not know which one answers.
    """

    @property
    def name(self) -> str:
        """The name that ``make_backend`` knows this backend by."""
        ...

    @property
    def num_first_runs(self) -> int:
        """Runs of a bucket until later ones only repeat: warm-up makes them all."""
        ...

    def problem(self, device: torch.device) -> str | None:
        """Why steps on ``device`` cannot be captured here, what was expected and what was got; or None.

        Asked once, before anything is captured: nothing falls back to another backend later.
        """
        ...

    def capture(self, fn: Callable[[Inputs], Outputs], shape: BatchShape) -> Callable[[Inputs], Outputs]:
        """Return an executable for a whole step at one shape.

        The graph may be recorded here or at the executable's first call, and never again. ``fn`` takes
        nothing that varies from step to step but the tensors of its inputs. Tensors that the executable
        returns may be overwritten by its next call.

        Args:
            fn: the step, written for padded inputs of ``shape``.
            shape: the bucket.
        """
        ...

    def region(self, shape: BatchShape, key: Hashable, fn: Region) -> Region:
        """Return what to call in place of ``fn`` at one shape.

        A backend may answer a call with the callable it built for an earlier ``fn`` of equal ``shape`` and
        ``key``, so two functions that compute differently need different keys.

        Args:
            shape: the bucket that the region is private to.
            key: which region, for example ``("layer", num_retrieval_heads, num_streaming_heads)``.
            fn: the region, for example one decoder layer.
        """
        ...
