"""Contexts of versions 1 and 2 in files: safetensors with tokens and units of the stores."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from hpu_duo.context.saved import (
    VERSIONS,
    Document,
    SavedContext,
    check_fingerprint,
    check_kind,
    check_tensors,
    saved_context,
)

if TYPE_CHECKING:
    from hpu_duo.generation import GenerativeModel


def has_tensors(start: bytes) -> bool:
    """Whether the first nine bytes of a file are those of one of tensors."""
    return len(start) == 9 and start[8:] == b"{" and struct.unpack("<Q", start[:8])[0] < 1 << 27


def open_tensors(path: Path, model: GenerativeModel) -> SavedContext:
    """Read all of a file but keys and values.

    Raises:
        ValueError: see ``open_context``.
    """
    try:
        file: Any = safe_open(path, framework="pt")
        metadata = file.metadata() or {}
        check_kind(path, metadata, VERSIONS[:2])
        check_fingerprint(path, _json(path, metadata, "fingerprint"), model)
        slices = {name: file.get_slice(name) for name in list(file.keys())}
        tokens = _list(path, file, slices, "token_ids", torch.int32)
        text = bytes(_list(path, file, slices, "text", torch.uint8)).decode() if "text" in slices else None
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"cannot read the context {path}: {reason}") from error
    document = Document(tuple(tokens), text, bool(_json(path, metadata, "add_special_tokens")))
    found = {name: [each.get_dtype(), list(each.get_shape())] for name, each in slices.items()}
    saved = saved_context(
        path,
        model,
        document,
        _json(path, metadata, "cache_salt"),
        lambda name, begin, end: file.get_slice(name)[begin:end],
    )
    check_tensors(path, found, model, saved.num_blocks)
    return saved


def _json(path: Path, metadata: dict[str, str], name: str) -> Any:
    try:
        return json.loads(metadata[name])
    except (KeyError, ValueError):
        raise ValueError(f"{path}: expected {name} in the metadata, as JSON") from None


def _list(path: Path, file: Any, names: Any, name: str, dtype: torch.dtype) -> list[int]:
    if name not in names:
        raise ValueError(f"{path}: expected a tensor {name}, found none")
    array: torch.Tensor = file.get_tensor(name)
    if array.ndim != 1 or array.dtype != dtype or not math.prod(array.shape):
        raise ValueError(
            f"{path}: expected {name} to be a list of {dtype}, got {array.dtype} {[*array.shape]}"
        )
    found: list[int] = array.tolist()
    return found
