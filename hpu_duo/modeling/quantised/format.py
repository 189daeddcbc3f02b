"""The interface of encodings of weights, and the headers of tensors that they check.

Encodings import no torch: plans read configurations without it. Shapes: N outputs, K inputs, G groups of
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

FLOATS = ("F32", "BF16", "F16")
"""Data types of scales, by their names in safetensors files."""

_SLAB = 1 << 18
"""Elements that are computed in float32 at a time."""


@dataclass(frozen=True)
class Header:
    """A tensor in a safetensors file, which is not read yet.

    Attributes:
        name: in the file.
        file: it is in.
        dtype: by its name in safetensors files.
        shape: of the stored tensor.
        tensors: the open file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    tensors: Any = field(repr=False, compare=False)

    def read(self) -> torch.Tensor:
        """Return a copy."""
        tensor: torch.Tensor = self.tensors.get_tensor(self.name)
        return tensor

    def source(self) -> Any:
        """Return what parts are read from by a subscript."""
        # A slice of a tensor without dimensions cannot be read by one.
        return self.tensors.get_slice(self.name) if self.shape else self.read()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.read()[index]

    def need_dtype(self, *dtypes: str) -> None:
        """Raise ValueError for another data type."""
        if self.dtype not in dtypes:
            raise self.refused(f"of dtype {' or '.join(dtypes)}", self.dtype)

    def need_shape(self, *shapes: tuple[int, ...], why: str = "") -> None:
        """Raise ValueError for another shape.

        Args:
            shapes: that are accepted.
            why: the reason, as a clause.
        """
        if self.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.refused(f"of shape {wanted}{why and f' ({why})'}", list(self.shape))

    def need_dims(self, num_dims: int) -> None:
        """Raise ValueError unless it has so many dimensions, none of them empty."""
        if len(self.shape) != num_dims or not all(self.shape):
            raise self.refused(f"with {num_dims} dimensions of at least 1", list(self.shape))

    def refused(self, expected: str, got: object) -> ValueError:
        """Return an error with the tensor and its file."""
        return ValueError(f"expected {self.name} {expected}, got {got} in {self.file}")


@dataclass(frozen=True)
class Activations:
    """Rounding of the inputs of a linear layer, as a checkpoint states it.

    Attributes:
        kind: "int8" or "fp8" (e4m3), symmetric.
        is_static: whether one scale of all inputs is in the checkpoint, as ``input_scale``; otherwise each
            token has its own.
        group: inputs of a token that share a scale; None = all of them.
        refused: the rounding in the words of the checkpoint, if it is not served.
    """

    kind: str
    is_static: bool = False
    group: int | None = None
    refused: str | None = None


class Weight(Protocol):
    """A weight of codes in memory."""

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """Return plain values, computed in float32 and rounded once."""
        ...


class LinearFormat(Protocol):
    """An encoding of the weight of a linear layer, or of all experts of a layer."""

    @property
    def name(self) -> str:
        """Name in messages."""
        ...

    @property
    def leaves(self) -> Mapping[str, bool]:
        """Ends of the names of the tensors of a weight, codes first, and whether they must be there."""
        ...

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        """Return the shape of the weight.

        Args:
            headers: of its tensors, by their ends; all that must be there are.

        Raises:
            ValueError: their shapes or data types do not fit the encoding, or each other.
        """
        ...

    def read(self, tensors: Mapping[str, torch.Tensor], headers: Mapping[str, Header]) -> Weight:
        """Return the weight with its codes; of a linear layer, a ``QuantisedWeight``.

        Args:
            tensors: of the weight, by their ends.
            headers: the same before they were read, for messages.

        Raises:
            ValueError: values that the encoding does not have.
        """
        ...


def in_slabs(
    like: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rows: Callable[[slice], torch.Tensor],
) -> torch.Tensor:
    """Return a tensor that is computed some rows at a time, so that float32 is there for those only.

    Args:
        like: a tensor on the device of the result.
        shape: of the result.
        dtype: of the result.
        rows: some of them, in float32.
    """
    whole = like.new_empty(shape, dtype=dtype)
    step = max(1, _SLAB // prod(shape[1:]))
    for begin in range(0, shape[0], step):
        some = slice(begin, begin + step)
        whole[some] = rows(some)
    return whole
