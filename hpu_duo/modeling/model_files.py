"""Telling models apart by their files, without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

_NUM_SLICES = 64
_SLICE_BYTES = 4096


def model_fingerprint(directory: Path) -> str:
    """Equal for equal checkpoints; sees config.json, and sizes and evenly spread slices of the weights."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for index in range(_NUM_SLICES):
                file.seek(size * index // _NUM_SLICES)
                digest.update(file.read(_SLICE_BYTES))
    return digest.hexdigest()
