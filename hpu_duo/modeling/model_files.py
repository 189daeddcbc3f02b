"""Identify models by their files, without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hpu_duo.builtin import MODEL_DIR

_NUM_SLICES = 64
_SLICE_BYTES = 4096


def model_fingerprint(directory: Path) -> str:
    """Return a digest of config.json, and of sizes and evenly spread slices of the weights."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for index in range(_NUM_SLICES):
                file.seek(size * index // _NUM_SLICES)
                digest.update(file.read(_SLICE_BYTES))
    return digest.hexdigest()


def has_weights(directory: Path) -> bool:
    """Whether a directory holds the files that ``model_fingerprint`` reads."""
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def model_name(directory: Path) -> str:
    """Return a model's name: its hub id in the hub's cache, elsewhere the directory's name."""
    path = directory.resolve()
    if path == MODEL_DIR.resolve():
        return "builtin"
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return "/".join(path.parent.parent.name.split("--")[1:])
    return path.name
