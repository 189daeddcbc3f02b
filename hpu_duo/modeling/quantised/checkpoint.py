"""The tensors of a checkpoint by name: plain ones as in the files, others dequantised when read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hpu_duo.modeling.quantised.config import Group, Quantisation, find_quantisation, weight_files
from hpu_duo.modeling.quantised.format import FLOATS, Activations, Header, LinearFormat, Weight
from hpu_duo.modeling.quantised.int4 import AWQInt, GPTQInt
from hpu_duo.modeling.quantised.mxfp4 import ExpertsByPart, MXFP4Experts

_UNUSED = (
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
    "activation_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "k_zero_point",
    "v_zero_point",
    "kv_scale",
    "prob_scale",
)
"""Ends of tensors about activations, keys and values, which stay in the model's dtype."""

_WRITERS = {
    "qweight": "gptq or awq",
    "weight_packed": "compressed-tensors",
    "weight_scale_2": "modelopt in nvfp4",
    "_blocks": "mxfp4",
    "absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
    "W_q": "hqq",
    "codebooks": "aqlm",
    "bitmask": "compressed-tensors of sparse weights",
    "qzeros": "gptq or awq",
    "scales": "gptq or awq",
    "weight_zero_point": "compressed-tensors",
    "weight_scale_inv": "fp8",
    "weight_scale": "compressed-tensors, fp8 or modelopt",
    "weight_shape": "compressed-tensors",
    "weight_g_idx": "compressed-tensors",
    "g_idx": "gptq",
}
"""Ends of tensors of quantised weights, and who writes them."""

_E4M3 = "F8_E4M3"
_CODES = ("I8", _E4M3, "F8_E5M2")
"""Data types that no plain tensor has."""

_LINES = 256
"""Outputs whose codes are checked at a time."""

_PLAIN = ("F64", *FLOATS)
"""Data types of a plain ``weight``."""


@dataclass(frozen=True)
class QuantisedTensor:
    """A weight of codes; ``[...]`` reads and dequantises it.

    Attributes:
        format: its encoding.
        headers: of its tensors, by their ends.
        shape: of the weight.
        dtype: of the weight.
        activations: rounding of the inputs of its layer.
        input_scale: their scale in the checkpoint.
    """

    format: LinearFormat
    headers: Mapping[str, Header]
    shape: tuple[int, ...]
    dtype: torch.dtype
    activations: Activations | None = None
    input_scale: Header | None = None

    def read(self) -> Weight:
        """Return the whole weight as it is stored.

        Raises:
            ValueError: scales that are not finite, or values that the encoding does not have.
        """
        tensors = {end: header.read() for end, header in self.headers.items()}
        for end, header in self.headers.items():
            if header.dtype in FLOATS and not tensors[end].isfinite().all():
                raise header.refused("of finite numbers", "infinity or NaN")
            # A kernel may take such a code for 480.
            if header.dtype == _E4M3 and _has_nan(tensors[end]):
                raise header.refused("of finite numbers", "codes of NaN")
        return self.format.read(tensors, self.headers)

    def read_input_scale(self) -> float | None:
        """Return the scale of all inputs; None where each token has its own.

        Raises:
            ValueError: the rounding of inputs is not served, or its scale is missing or no positive number.
        """
        codes, activations = next(iter(self.headers.values())), self.activations
        keep = "activations='weights' keeps inputs in the model's dtype"
        if activations is None:
            return None
        if activations.refused is not None:
            raise codes.refused(
                "with inputs in int8 or fp8, symmetric, with a scale of each token or of the tensor",
                f"{activations.refused} ({keep})",
            )
        if activations.group is not None and self.shape[-1] % activations.group:
            raise codes.refused(
                f"with inputs in whole groups of {activations.group}", f"{self.shape} ({keep})"
            )
        if not activations.is_static:
            return None
        if self.input_scale is None:
            raise codes.refused("with input_scale beside it, as inputs are rounded with it", f"none ({keep})")
        self.input_scale.need_dtype(*FLOATS)
        self.input_scale.need_shape((), (1,), (1, 1))
        scale = float(self.input_scale.read())
        if not 0 < scale < float("inf"):
            raise self.input_scale.refused("above 0", scale)
        return scale

    def source(self) -> torch.Tensor | ExpertsByPart:
        """Return the whole weight, dequantised; experts in mxfp4 are, where they are read."""
        weight = self.read()
        if isinstance(weight, MXFP4Experts):
            return ExpertsByPart(weight, self.dtype)
        return weight.dequantised(self.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.source()[index]


def _has_nan(codes: torch.Tensor) -> bool:
    """Whether one of the codes of e4m3 is NaN."""
    return any(int((some & 0x7F).max()) == 0x7F for some in codes.view(torch.uint8).split(_LINES))


StoredTensor = Header | QuantisedTensor


def quantisation_of(path: str | Path) -> Quantisation | None:
    """Return what a checkpoint says of quantised weights; None for plain ones, or without a config.json.

    Raises:
        ValueError: they are of a producer or an encoding that is not served.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        return None
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    return find_quantisation(file, fields if isinstance(fields, dict) else {})


def stored_tensors(path: str | Path, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name; none is read yet.

    Args:
        path: directory of the checkpoint.
        dtype: of weights that are dequantised.

    Raises:
        ValueError: a file is damaged, or its tensors are not what the configuration says of their encoding,
            or are codes of which it says nothing.
    """
    headers = headers_of(Path(path))
    found = quantisation_of(path)
    if found is not None:
        return dequantised(headers, found, dtype)
    for header in headers.values():
        if _is_code(header):
            raise header.refused(
                f"to be plain, since no quantization_config in {Path(path) / 'config.json'} and no file "
                "beside it says how it is quantised",
                f"{header.dtype} {list(header.shape)}",
            )
    return dict(headers)


def headers_of(path: Path) -> dict[str, Header]:
    """Read the headers of all tensors of a checkpoint, by name; none where the directory has no weights.

    Raises:
        ValueError: a file cannot be read, or a tensor is in several.
    """
    headers: dict[str, Header] = {}
    for file in weight_files(path):
        try:
            tensors = safe_open(file, framework="pt")
            for name in list(tensors.keys()):
                part = tensors.get_slice(name)
                header = Header(name, file, part.get_dtype(), tuple(part.get_shape()), tensors)
                if name in headers:
                    raise header.refused("to be in one file", f"another in {headers[name].file}")
                headers[name] = header
        except SafetensorError as error:
            raise ValueError(f"expected whole *.safetensors files in {path}, got: {error}") from error
        except OSError as error:
            raise ValueError(f"expected to read {file}, got: {error}") from error
    return headers


def _is_code(header: Header) -> bool:
    """Whether a tensor cannot be a plain one."""
    is_weight = _end_of(header.name, ("weight",)) is not None
    return header.dtype in _CODES or (is_weight and header.dtype not in _PLAIN)


def dequantised(
    headers: Mapping[str, Header], found: Quantisation, dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """Return the tensors of a model with quantised weights, after a check of all of them.

    Args:
        headers: of the files.
        found: what the configuration says.
        dtype: of weights that are dequantised.

    Raises:
        ValueError: tensors are not what the configuration says, or do not fit each other.
    """
    ends = {next(iter(group.format.leaves)) for group in found.groups}
    left, state = dict(headers), dict[str, StoredTensor]()
    for name, header in headers.items():
        end = _end_of(name, ends)
        if end is None or (end == "weight" and header.dtype in _PLAIN):
            continue
        layer = _without(name, end)
        group = _group(found, layer, header, end)
        encoding = group.format
        parts = _parts(encoding, layer, left, header, found)
        shape = _shape(encoding, parts, header, found)
        weight = layer if end.startswith("_") else f"{layer}.weight"
        if weight != name and weight in headers:
            raise header.refused(f"without {weight} beside it", "both")
        scale = left.get(f"{layer}.input_scale")
        state[weight] = QuantisedTensor(encoding, parts, shape, dtype, group.activations, scale)
    wanted = " or ".join(f"*{_joined('', end)}" for end in sorted(ends))
    _check_rest(left, found, wanted)
    _check_beside(left, state)
    if not state:
        raise ValueError(
            f"expected tensors of {found.method} such as {wanted}, as the {found.where} says, got none in "
            f"{', '.join(sorted({str(header.file) for header in headers.values()}))}"
        )
    state |= {name: header for name, header in left.items() if _end_of(name, _UNUSED) is None}
    return state


def _joined(layer: str, end: str) -> str:
    return f"{layer}{end}" if end.startswith("_") else f"{layer}.{end}"


def _without(name: str, end: str) -> str:
    return name[: len(name) - len(_joined("", end))]


def _end_of(name: str, ends: Iterable[str]) -> str | None:
    return next((end for end in ends if name.endswith(_joined("", end))), None)


def _group(found: Quantisation, layer: str, header: Header, end: str) -> Group:
    if found.is_ignored(layer):
        raise header.refused(f"to be a plain weight, as the {found.where} says", f"{header.dtype} codes")
    group = found.group_of(layer)
    if group is None:
        raise header.refused(f"to be of a group in the {found.where}", "a layer that no target names")
    codes = next(iter(group.format.leaves))
    if codes != end:
        raise header.refused(f"to be {_joined(layer, codes)}, as the {found.where} says", header.name)
    return group


def _parts(
    encoding: LinearFormat, layer: str, left: dict[str, Header], codes: Header, found: Quantisation
) -> dict[str, Header]:
    parts = {}
    for end, is_needed in encoding.leaves.items():
        name = _joined(layer, end)
        if name in left:
            parts[end] = left.pop(name)
        elif is_needed:
            raise codes.refused(f"with {name} beside it, as the {found.where} says", "none")
    return parts


def _shape(
    encoding: LinearFormat, parts: Mapping[str, Header], codes: Header, found: Quantisation
) -> tuple[int, ...]:
    try:
        return encoding.shape(parts)
    except ValueError as error:
        other = _other(encoding)
        try:
            fits = other is not None and bool(other.shape(parts))
        except ValueError:
            fits = False
        if not fits or other is None:
            raise
        laid_out = f"in the layout of {found.method}, as the {found.where} says"
        raise codes.refused(laid_out, f"that of {other.name}") from error


def _other(encoding: LinearFormat) -> LinearFormat | None:
    """The encoding whose tensors have the same names."""
    match encoding:
        case GPTQInt():
            return AWQInt(encoding.group)
        case AWQInt():
            return GPTQInt(4, encoding.group, is_symmetric=False, is_sorted=True, is_less_one=True)
    return None


def _check_beside(left: Mapping[str, Header], state: Mapping[str, StoredTensor]) -> None:
    """Refuse what a layer with a quantised weight has besides: its outputs might depend on it."""
    for name, header in left.items():
        parts = name.split(".")
        if parts[-1] == "bias" or _end_of(name, _UNUSED) is not None:
            continue
        for end in range(1, len(parts)):
            layer = ".".join(parts[:end])
            if f"{layer}.weight" in state:
                raise header.refused("to be absent", f"it beside the quantised weight of {layer}")


def _check_rest(left: Mapping[str, Header], found: Quantisation, wanted: str) -> None:
    for name, header in left.items():
        end = _end_of(name, _WRITERS)
        if end is None and not _is_code(header):
            continue
        writer = "a quantised weight" if end is None else f"what {_WRITERS[end]} writes"
        raise header.refused(
            f"to be of {found.method}, with {wanted}, as the {found.where} says",
            f"{writer} ({header.dtype} {list(header.shape)})",
        )
