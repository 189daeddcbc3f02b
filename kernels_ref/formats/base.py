"""Interface of the formats of keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch


class VectorPart(NamedTuple):
    """One of the tensors that a store of vectors consists of.

    Attributes:
        name: distinct within the format; empty if it is the only one.
        width: elements of one vector in it.
        dtype: of the elements; None = that of the model.
    """

    name: str
    width: int
    dtype: torch.dtype | None = None


class VectorFormat(ABC):
    """The way in which one vector, of a key or of a value, is stored; a frozen dataclass of plain numbers.

    What a vector is stored as depends on nothing but its own numbers, so units may be copied, shared and
    computed again. ``decode`` returns finite numbers for whatever ``encode`` returned for finite ones, and
    zeros for tensors of zeros. Infinities are stored as the largest number that a format has; of a NaN at
    least that element is NaN.

    Attributes:
        num_parts: tensors that a store consists of.
        takes_scale: whether vectors are stored divided by a constant of the layer, if there is one.
    """

    num_parts: ClassVar[int] = 1
    takes_scale: ClassVar[bool] = False

    @abstractmethod
    def parts(self, dim: int) -> tuple[VectorPart, ...]:
        """Tensors that a store of vectors of ``dim`` elements consists of."""

    @abstractmethod
    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Encode vectors ``[..., D]``: one ``[..., width]`` for each part."""

    @abstractmethod
    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Decode what ``encode`` returned, or some of its vectors: ``[..., D]`` of ``dtype``."""

    def num_bytes(self, dim: int, dtype_bytes: int) -> int:
        """Bytes of one vector.

        Args:
            dim: elements of the vector.
            dtype_bytes: of an element of the model's dtype.
        """
        sizes = (dtype_bytes if part.dtype is None else part.dtype.itemsize for part in self.parts(dim))
        return sum(part.width * size for part, size in zip(self.parts(dim), sizes))


@dataclass(frozen=True)
class Floats(VectorFormat):
    """Vectors as they are, in the model's dtype."""

    def parts(self, dim: int) -> tuple[VectorPart, ...]:
        """Return the one tensor of the vectors."""
        return (VectorPart("", dim),)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the vectors."""
        return (x,)

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the vectors."""
        return parts[0]


@dataclass(frozen=True)
class LeadingOfKeys(VectorFormat):
    """Values that are the leading elements of their keys, so that a store has no tensor of them."""

    num_parts: ClassVar[int] = 0

    def parts(self, dim: int) -> tuple[VectorPart, ...]:
        """Return no tensor."""
        return ()

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return nothing: the keys are stored."""
        return ()

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Raise TypeError: ``Encoding.decoded`` returns a view of keys."""
        raise TypeError("values that are elements of keys have no tensors to decode")


@dataclass(frozen=True)
class Rounded(VectorFormat):
    """Vectors in another dtype of floats than the model's; numbers beyond its range are cut.

    Attributes:
        dtype: of the stored numbers.
    """

    dtype: torch.dtype

    def parts(self, dim: int) -> tuple[VectorPart, ...]:
        """Return the one tensor of the vectors."""
        return (VectorPart("", dim, self.dtype),)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Round the vectors."""
        largest = min(torch.finfo(self.dtype).max, torch.finfo(x.dtype).max)
        return (x.clamp(-largest, largest).to(self.dtype),)

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the rounded vectors."""
        return parts[0].to(dtype)


@dataclass(frozen=True)
class KVFormat:
    """A format of keys and one of values.

    Attributes:
        name: by which users choose it.
        keys, values: the formats.
        is_plain: whether both are in the model's dtype, as they are.
        is_floats: whether they are plain, or 16-bit floats, which kernels of a CPU read by pointer.
    """

    name: str
    keys: VectorFormat
    values: VectorFormat
    is_plain: bool = False
    is_floats: bool = field(init=False)

    def __post_init__(self) -> None:
        stored = (self.keys, self.values)
        is_narrow = all(isinstance(x, Rounded) and x.dtype.itemsize == 2 for x in stored)
        object.__setattr__(self, "is_floats", self.is_plain or is_narrow)

    @property
    def takes_scales(self) -> bool:
        """Whether keys or values are stored divided by a constant of the layer, if there is one."""
        return self.keys.takes_scale or self.values.takes_scale

    @property
    def num_tensors(self) -> int:
        """Tensors of a store."""
        return self.keys.num_parts + self.values.num_parts

    def tensor_names(self, key_dim: int, value_dim: int) -> tuple[str, ...]:
        """Names of the tensors of a store, those of keys first.

        Args:
            key_dim, value_dim: elements of a key and of a value.
        """
        both = (("keys", self.keys, key_dim), ("values", self.values, value_dim))
        return tuple(
            f"{name}.{part.name}" if part.name else name
            for name, vectors, dim in both
            for part in vectors.parts(dim)
        )

    def token_bytes(self, key_dim: int, value_dim: int, dtype_bytes: int) -> int:
        """Bytes of the key and the value of one token in one head.

        Args:
            key_dim, value_dim: elements of a key and of a value.
            dtype_bytes: of an element of the model's dtype.
        """
        return self.keys.num_bytes(key_dim, dtype_bytes) + self.values.num_bytes(value_dim, dtype_bytes)
