"""Serialization of values between processes as JSON and arrays; reading runs no code.

A value is None, a number, a text, bytes, a path, an array, a tensor, a list, tuple, set or dictionary of such
values, a member of an enumeration, or a dataclass or named tuple of such values. Classes are stored by name,
and must be imported where the value is read; an object of a dataclass is created from its fields without its
constructor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

_AS_IT_IS = frozenset({type(None), bool, int, float, str})
_COLLECTIONS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozen": frozenset,
}
_COLLECTION_OF = {list: "list", tuple: "tuple", set: "set", frozenset: "frozen"}
_HEADER_BYTES = 8
_ALIGNMENT = 64


def encode(value: Any) -> bytearray:
    """Write a value.

    Raises:
        TypeError: it contains something that is not plain; the message names its type.
    """
    parts: list[memoryview] = []
    head = json.dumps(_written(value, parts)).encode()
    data = bytearray(len(head).to_bytes(_HEADER_BYTES, "little")) + head
    for part in parts:
        data += bytes(-len(data) % _ALIGNMENT)
        data += part
    return data


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Read what ``encode`` wrote.

    Raises:
        ValueError: it is invalid, or has a class that is not imported here or is not plain.
    """
    end = _HEADER_BYTES + int.from_bytes(data[:_HEADER_BYTES], "little")
    try:
        return _Reader(memoryview(data), end).read(json.loads(bytes(data[_HEADER_BYTES:end])))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected a value of another process, got {type(error).__name__}: {error}"
        ) from error


def _written(value: Any, parts: list[memoryview]) -> Any:
    kind: Any = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind in _COLLECTION_OF:
        return [_COLLECTION_OF[kind], *[_written(each, parts) for each in value]]
    if isinstance(value, Enum):
        return ["enum", _name_of(kind), _written(value.value, parts)]
    if isinstance(value, tuple):
        return ["named", _name_of(kind), *[_written(each, parts) for each in value]]
    if is_dataclass(value):
        return ["object", _name_of(kind), *[_written(each, parts) for each in _values_of(kind)(value)]]
    if kind is dict:
        return ["dict", *[[_written(name, parts), _written(each, parts)] for name, each in value.items()]]
    if isinstance(value, np.generic):
        return _written(value.item(), parts)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        parts.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return ["array", value.dtype.str, list(value.shape)]
    if isinstance(value, torch.Tensor):
        bare = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        parts.append(bare.data)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if kind is bytes:
        parts.append(memoryview(value))
        return ["bytes", len(value)]
    if isinstance(value, Path):
        return ["path", str(value)]
    if isinstance(value, str):  # such as torch's version
        return str(value)
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    raise TypeError(f"expected plain data for another process, got {kind.__module__}.{kind.__qualname__}")


class _Reader:
    """Decodes the JSON part, with arrays in the order of writing."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at = data, at

    def read(self, given: Any) -> Any:
        if not isinstance(given, list):
            return given
        kind, rest = given[0], given[1:]
        if kind in _COLLECTIONS:
            return _COLLECTIONS[kind](map(self.read, rest))
        if kind == "dict":
            return {self.read(name): self.read(value) for name, value in rest}
        if kind in ("array", "tensor", "bytes"):
            return self._part(kind, rest)
        if kind == "path":
            return Path(rest[0])
        if kind == "dtype":
            return _dtype(rest[0])
        found = _class_of(rest[0])
        values = [self.read(each) for each in rest[1:]]
        if kind == "enum" and issubclass(found, Enum):
            return found(values[0])
        if kind == "named" and issubclass(found, tuple) and hasattr(found, "_fields"):
            return tuple.__new__(found, values)
        if kind == "object" and is_dataclass(found):
            made = object.__new__(found)
            for name, value in zip(_field_names(found), values, strict=True):
                object.__setattr__(made, name, value)
            return made
        raise ValueError(f"expected a plain value of another process, got {kind} {rest[0]}")

    def _part(self, kind: str, rest: list[Any]) -> Any:
        if kind == "bytes":
            return self._take(rest[0]).tobytes()
        dtype = np.dtype(rest[0]) if kind == "array" else _dtype(rest[0])
        if isinstance(dtype, np.dtype) and dtype.hasobject:
            raise ValueError(f"expected an array of numbers of another process, got {dtype}")
        size = int(np.prod(rest[1], dtype=np.int64)) * dtype.itemsize
        if not size and isinstance(dtype, torch.dtype):
            return torch.empty(rest[1], dtype=dtype)
        bare = np.frombuffer(self._take(size), np.uint8).copy()
        if isinstance(dtype, np.dtype):
            return bare.view(dtype).reshape(rest[1])
        return torch.from_numpy(bare).view(dtype).reshape(rest[1])

    def _take(self, num_bytes: int) -> memoryview:
        begin = self._at + -self._at % _ALIGNMENT
        self._at = begin + num_bytes
        if num_bytes < 0 or self._at > len(self._data):
            raise ValueError(f"expected {num_bytes} bytes more of another process, got fewer")
        return self._data[begin : self._at]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"expected a type of torch, got {name}")
    return found


@cache
def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


@lru_cache(maxsize=1024)
def _class_of(name: str) -> type[Any]:
    module, _, path = name.partition(":")
    found = attrgetter(path)(sys.modules[module])
    if not isinstance(found, type):
        raise ValueError(f"expected the name of a class, got {name}")
    return found


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


@cache
def _values_of(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    names = _field_names(kind)
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)
