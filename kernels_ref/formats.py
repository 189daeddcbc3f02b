"""Formats in which keys and values are stored, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
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
    computed again. ``decode`` returns finite numbers for whatever ``encode`` returned for finite ones.

    Attributes:
        num_parts: tensors that a store consists of.
    """

    num_parts: ClassVar[int] = 1

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
class Rounded(VectorFormat):
    """Vectors in a narrower dtype than the model's: bfloat16, or float16, in which large numbers are cut.

    Attributes:
        dtype: of the stored numbers.
    """

    dtype: torch.dtype

    def parts(self, dim: int) -> tuple[VectorPart, ...]:
        """Return the one tensor of the vectors."""
        return (VectorPart("", dim, self.dtype),)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Round the vectors."""
        if self.dtype == torch.float16:
            largest = torch.finfo(torch.float16).max
            x = x.clamp(-largest, largest)
        return (x.to(self.dtype),)

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the rounded vectors."""
        return parts[0].to(dtype)


@dataclass(frozen=True)
class KVFormat:
    """A format of keys and one of values.

    Attributes:
        name: by which users choose it.
        keys, values: the formats.
        is_plain: whether both are ``Floats``.
    """

    name: str
    keys: VectorFormat
    values: VectorFormat
    is_plain: bool = False

    @property
    def is_floats(self) -> bool:
        """Whether keys and values are a tensor of floats each, which kernels can read by pointer."""
        return self.is_plain or (isinstance(self.keys, Rounded) and isinstance(self.values, Rounded))

    @property
    def num_tensors(self) -> int:
        """Tensors of a store."""
        return self.keys.num_parts + self.values.num_parts

    def tensor_names(self, dim: int) -> tuple[str, ...]:
        """Names of the tensors of a store, those of keys first."""
        both = (("keys", self.keys), ("values", self.values))
        return tuple(
            f"{name}.{part.name}" if part.name else name
            for name, vectors in both
            for part in vectors.parts(dim)
        )

    def token_bytes(self, key_dim: int, value_dim: int, dtype_bytes: int) -> int:
        """Bytes of the key and the value of one token in one head.

        Args:
            key_dim, value_dim: elements of a key and of a value.
            dtype_bytes: of an element of the model's dtype.
        """
        return self.keys.num_bytes(key_dim, dtype_bytes) + self.values.num_bytes(value_dim, dtype_bytes)


PLAIN = KVFormat("auto", Floats(), Floats(), is_plain=True)
"""Keys and values in the model's dtype."""

ROUNDED = {
    dtype: KVFormat(str(dtype).removeprefix("torch."), Rounded(dtype), Rounded(dtype))
    for dtype in (torch.bfloat16, torch.float16)
}
"""Keys and values of a float32 model in a 16-bit dtype, by that dtype."""

_formats = {each.name: each for each in (PLAIN, *ROUNDED.values())}


def register_format(added: KVFormat) -> None:
    """Add a format under its name.

    Raises:
        ValueError: another format has that name.
    """
    if _formats.setdefault(added.name, added) != added:
        raise ValueError(f"expected a name that no format of keys and values has, got {added.name!r}")


def format_of(name: str) -> KVFormat:
    """Return the format of that name.

    Raises:
        ValueError: there is none; the message lists all names.
    """
    if name not in _formats:
        raise ValueError(f"expected kv_format to be one of {', '.join(_formats)}, got {name!r}")
    return _formats[name]
