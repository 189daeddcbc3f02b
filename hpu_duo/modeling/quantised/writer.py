"""Write a checkpoint with quantised weights from a plain one, in the files of compressed-tensors."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hpu_duo.modeling.loading import build_without_weights, read_config, resolve_dtype, stored_codes
from hpu_duo.modeling.quantised.checkpoint import StoredTensor, quantisation_of, stored_tensors
from hpu_duo.modeling.quantised.linear import WeightExecution
from hpu_duo.modeling.quantised.rounding import FORMATS
from hpu_duo.modeling.quantised.state import StoredCodes
from hpu_duo.modeling.quantised.weight import NIBBLE, QuantisedWeight

FILE_BYTES = 5 << 30
"""Bytes of the weights of a file, before it is written."""
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Written:
    """Result of writing a checkpoint.

    Attributes:
        num_quantised: linear layers of codes.
        plain: names of other weights with two dimensions.
        num_bytes: of all tensors.
    """

    num_quantised: int
    plain: tuple[str, ...]
    num_bytes: int


def quantise_checkpoint(source: Path, target: Path, name: str) -> Written:
    """Round the linear layers of a plain checkpoint to codes, as ``quantization`` does when it loads.

    Scales have the dtype of the checkpoint.

    Args:
        source: directory of the plain checkpoint.
        target: a directory that does not exist, or is empty.
        name: of ``FORMATS``.

    Raises:
        ValueError: an unknown format, or the checkpoint cannot be read, or is quantised already; or see
            ``write_quantised``.
    """
    if name not in FORMATS:
        raise ValueError(f"expected a format of {', '.join(FORMATS)}, got {name!r}")
    config = read_config(source)
    if (found := quantisation_of(source)) is not None:
        raise ValueError(f"expected plain weights, got {found.method} ({found.where}) in {source}")
    dtype = resolve_dtype("auto", config)
    tensors, whole = stored_tensors(source, dtype), build_without_weights(source, config, dtype)
    codes = stored_codes(tensors, whole, WeightExecution(rounding=name), dtype)
    if not codes:
        raise ValueError(f"expected linear layers that {name} can have, got none in {source}")
    return write_quantised(source, target, tensors, codes, name)


def write_quantised(
    source: Path,
    target: Path,
    tensors: Mapping[str, StoredTensor],
    codes: Mapping[str, StoredCodes],
    name: str,
    file_bytes: int = FILE_BYTES,
) -> Written:
    """Write a checkpoint; weights are read and quantised one after the other.

    Args:
        source: directory of the plain checkpoint, whose other files are copied.
        target: a directory that does not exist, or is empty.
        tensors: of the plain checkpoint, by name.
        codes: those that are quantised.
        name: of ``FORMATS``.
        file_bytes: of a file, about.

    Raises:
        ValueError: ``target`` has files, or a weight is not finite.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"expected a new or empty directory, got {target}")
    target.mkdir(parents=True, exist_ok=True)
    groups: Counter[int] = Counter()
    group_of: dict[str, int] = {}
    files = _Files(target, file_bytes)
    for key, stored in tensors.items():
        if key in codes:
            weight = codes[key].read()
            group_of[key] = weight.block[1]
            groups[weight.block[1]] += 1
            layer = key.removesuffix(".weight")
            for end, part in _tensors_of(weight):
                files.add(f"{layer}.{end}", part)
        else:
            files.add(key, stored[...].clone())
    files.finish()
    plain = tuple(key for key, each in tensors.items() if key not in codes and len(each.shape) == 2)
    _copy_others(source, target)
    fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    fields["quantization_config"] = _config(name, group_of, plain)
    (target / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return Written(len(codes), plain, files.num_bytes)


def _tensors_of(weight: QuantisedWeight) -> Iterator[tuple[str, torch.Tensor]]:
    if weight.bits == NIBBLE:
        # Two codes in a byte, the lower half first, are eight in a word of 32 bits on every machine served.
        packed = torch.nn.functional.pad(weight.codes, (0, -weight.codes.shape[1] % 4))
        yield "weight_packed", packed.view(torch.int32)
        yield "weight_shape", torch.tensor(weight.shape)
    else:
        yield "weight", weight.codes
    yield "weight_scale", weight.scales


def _config(name: str, group_of: Mapping[str, int], plain: tuple[str, ...]) -> dict[str, Any]:
    """The ``quantization_config`` of compressed-tensors."""
    is_fp8, is_grouped = name == "fp8", FORMATS[name].is_grouped
    kind = "float-quantized" if is_fp8 else "pack-quantized" if is_grouped else "int-quantized"
    sizes = Counter(group_of.values()) if is_grouped else Counter([0])
    most = sizes.most_common(1)[0][0] if sizes else 0
    groups = {}
    # Layers with other groups are named; names come before classes.
    for number, size in enumerate(sorted(sizes, key=lambda size: (size == most, size))):
        named = [key.removesuffix(".weight") for key, each in group_of.items() if each == size]
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if size == most else named,
            "weights": {
                "num_bits": NIBBLE if is_grouped else 8,
                "type": "float" if is_fp8 else "int",
                "strategy": "group" if is_grouped else "channel",
                "group_size": size if is_grouped else None,
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [key.removesuffix(".weight") for key in plain],
    }


def _copy_others(source: Path, target: Path) -> None:
    for file in sorted(source.iterdir()):
        is_weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name.endswith(
            ".index.json"
        )
        if file.is_file() and not is_weights and file.name != "config.json":
            shutil.copyfile(file, target / file.name)


class _Files:
    """Tensors in files of about equal size."""

    def __init__(self, target: Path, file_bytes: int) -> None:
        self._target, self._file_bytes = target, file_bytes
        self._open: dict[str, torch.Tensor] = {}
        self._names: list[tuple[Path, tuple[str, ...]]] = []
        self._size = self.num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._open[name] = tensor.contiguous()
        self._size += tensor.nbytes
        self.num_bytes += tensor.nbytes
        if self._size >= self._file_bytes:
            self._write()

    def _write(self) -> None:
        file = self._target / f"part-{len(self._names)}.safetensors"
        save_file(self._open, file, {"format": "pt"})
        self._names.append((file, tuple(self._open)))
        self._open, self._size = {}, 0

    def finish(self) -> None:
        if self._open or not self._names:
            self._write()
        if len(self._names) == 1:
            self._names[0][0].rename(self._target / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, (file, names) in enumerate(self._names, 1):
            name = f"model-{number:05d}-of-{len(self._names):05d}.safetensors"
            file.rename(self._target / name)
            weight_map |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        (self._target / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
