"""Configurations of quantised weights: producer, encodings and layers. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hpu_duo.modeling.quantised.format import Activations, LinearFormat
from hpu_duo.modeling.quantised.fp8 import Fp8
from hpu_duo.modeling.quantised.int4 import BITS, AWQInt, GPTQInt, PackedInt
from hpu_duo.modeling.quantised.int8 import Int8
from hpu_duo.modeling.quantised.mxfp4 import MXFP4

OF_CONFIG = ("quantization_config", "compression_config")
"""Fields of config.json; the second one is what older files of compressed-tensors have."""

BESIDE = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files of producers beside a config.json, in place of its field, and the method if they name none."""

_PLAIN = "load the checkpoint that they were made from"
_REFUSED = {
    "bitsandbytes": "its codes are those of its CUDA kernels: " + _PLAIN,
    "gguf": "save plain weights once with transformers: AutoModelForCausalLM.from_pretrained(DIRECTORY, "
    "gguf_file=FILE).save_pretrained(NEW_DIRECTORY)",
    "torchao": "its tensors are subclasses of its own: " + _PLAIN,
    "hqq": _PLAIN,
    "aqlm": _PLAIN,
    "marlin": "its weights are in the order of a CUDA kernel: " + _PLAIN,
}
"""Methods that are not read, and what to do."""

_FORMATS_REFUSED = {
    "nvfp4-pack-quantized": "nvfp4",
    "marlin-24": "2:4 sparsity in the order of a CUDA kernel",
    "sparse-bitmask": "sparse weights",
    "sparse-24-bitmask": "sparse weights",
}


@dataclass(frozen=True)
class Group:
    """Layers with weights in one encoding.

    Attributes:
        targets: names, patterns after "re:", or classes of layers.
        format: the encoding.
        activations: rounding of the inputs; None = they are not rounded.
    """

    targets: tuple[str, ...]
    format: LinearFormat
    activations: Activations | None = None


@dataclass(frozen=True)
class Quantisation:
    """A producer's description of the weights of a checkpoint.

    Attributes:
        method: the producer, as in ``METHODS``.
        where: the field and its file, for messages.
        groups: the encodings.
        ignored: names or patterns of layers with plain weights.
    """

    method: str
    where: str
    groups: tuple[Group, ...]
    ignored: tuple[str, ...] = ()

    def is_ignored(self, layer: str) -> bool:
        """Whether the configuration says that a layer has plain weights."""
        return any(_matches(pattern, layer) for pattern in self.ignored)

    def group_of(self, layer: str) -> Group | None:
        """Return the group of a layer; None where the configuration names none.

        Names and patterns come before classes.
        """
        for group in self.groups:
            if any(_is_named(target, layer) for target in group.targets):
                return group
        return next((group for group in self.groups if "Linear" in group.targets), None)


def _is_named(target: str, layer: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], layer) is not None
    return target == layer


def _matches(pattern: str, layer: str) -> bool:
    """Whether a name, a pattern after "re:" or one with "*" is that of a layer or of a module around it."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], layer) is not None
    parts = layer.split(".")
    if "*" in pattern:
        return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))
    return f".{pattern}." in f".{layer}."


def find_quantisation(file: Path, fields: Mapping[str, Any]) -> Quantisation | None:
    """Return what a config.json, or a file of a producer beside it, says of quantised weights.

    Args:
        file: the config.json.
        fields: of the file.

    Returns:
        None if weights are plain.

    Raises:
        ValueError: the producer, or what it has written, is not served.
    """
    found = _found(file, fields)
    if found is None:
        return None
    given, method, where = found
    if not isinstance(given, dict):
        raise ValueError(f"expected the {where} to be an object, got {type(given).__name__}")
    asked = _Fields(given, where)
    method = str(given.get("quant_method") or method or "a method that it does not name").lower()
    method = method.replace("_", "-") if method == "compressed_tensors" else method
    read = _PRODUCERS.get(method)
    if read is None:
        kind = next((name for name in _REFUSED if name in method), "")
        raise ValueError(
            f"expected weights quantised by {', '.join(METHODS)}, got {method} ({where}): "
            f"{_REFUSED.get(kind, _PLAIN)}"
        )
    return read(asked)


def without_quantisation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json without those about quantised weights."""
    rest = {name: value for name, value in fields.items() if name not in OF_CONFIG}
    if isinstance(text := rest.get("text_config"), dict):
        rest["text_config"] = without_quantisation(text)
    return rest


def _found(file: Path, fields: Mapping[str, Any]) -> tuple[object, str, str] | None:
    text = fields.get("text_config")
    for part in (fields, text if isinstance(text, dict) else {}):
        for name in OF_CONFIG:
            if part.get(name) is not None:
                unnamed = "compressed-tensors" if name == "compression_config" else ""
                return part[name], unnamed, f"{name} in {file}"
    for name, method in BESIDE.items():
        beside = file.parent / name
        if beside.is_file():
            return _read(beside), method, f"file {beside}"
    return None


def _read(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error


def weight_files(path: Path) -> list[Path]:
    """Return the files of weights that transformers reads; all, where it would find none.

    Args:
        path: directory of the checkpoint.

    Raises:
        ValueError: its index cannot be read.
    """
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return sorted(path.glob("*.safetensors"))
    try:
        names = {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        return [path / name for name in sorted(names)]
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"expected a weight_map of names of files in {index}, got: {error}") from error


def stored_weight_bytes(path: Path) -> int:
    """Return the bytes of all tensors in the files of a checkpoint, by their headers; 0 without files.

    Scales, zero points and indices of groups are counted.

    Args:
        path: directory of the checkpoint.

    Raises:
        ValueError: a file cannot be read.
    """
    total = 0
    for file in weight_files(path):
        try:
            with file.open("rb") as opened:
                size, most = int.from_bytes(opened.read(8), "little"), file.stat().st_size
                if size > most:
                    raise ValueError(f"a header of {size} bytes in a file of {most}")
                header = json.loads(opened.read(size))
            parts = (each["data_offsets"] for name, each in header.items() if name != "__metadata__")
            total += sum(end - begin for begin, end in parts)
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"expected a safetensors file, got {file}: {error}") from error
    return total


@dataclass(frozen=True)
class _Fields:
    """Fields of a configuration, with checks of their types."""

    values: Mapping[str, Any]
    where: str

    def refused(self, name: str, expected: str, value: object) -> ValueError:
        return ValueError(f"expected {name} to be {expected} in the {self.where}, got {value!r}")

    def get(self, name: str, *others: str) -> Any:
        """The value by the first of several names that has one."""
        found = (self.values.get(each) for each in (name, *others))
        return next((value for value in found if value is not None), None)

    def one_of(self, name: str, known: tuple[Any, ...], default: Any = None, *others: str) -> Any:
        value = self.get(name, *others)
        value = default if value is None else value
        # True is 1, and 4.0 is 4.
        if not any(type(value) is type(each) and value == each for each in known):
            raise self.refused(name, " or ".join(str(each) for each in known), value)
        return value

    def size(self, name: str, *others: str) -> int | None:
        """A number of at least 1; None for -1, all of them."""
        value = self.get(name, *others)
        if type(value) is not int or (value < 1 and value != -1):
            raise self.refused(name, "at least 1, or -1", value)
        return None if value == -1 else value

    def flag(self, name: str, default: bool | None = None) -> bool:
        return bool(self.one_of(name, (True, False), default))

    def texts(self, name: str, *others: str) -> tuple[str, ...]:
        value = self.get(name, *others)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.refused(name, "a list of names", value)
        for each in value:
            _check_pattern(self, name, each)
        return tuple(value)

    def part(self, name: str) -> _Fields:
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.refused(name, "an object", value)
        return _Fields(value, f"{name} of {self.where}")

    def parts(self) -> Iterator[_Fields]:
        for name in self.values:
            yield self.part(name)


def _check_pattern(fields: _Fields, name: str, pattern: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except (re.error, RecursionError, OverflowError) as error:
            raise fields.refused(name, "regular expressions after 're:'", pattern) from error


def _alone(
    fields: _Fields,
    method: str,
    encoding: LinearFormat,
    *ignored: str,
    activations: Activations | None = None,
) -> Quantisation:
    group = Group(("Linear",), encoding, activations)
    return Quantisation(method, fields.where, (group,), fields.texts(*ignored))


def _read_fp8(fields: _Fields) -> Quantisation:
    fields.one_of("fmt", ("e4m3",), "e4m3")
    block = _block(fields, "weight_block_size")
    encoding = Fp8("tensor" if block is None else None, block)
    activations = None
    if fields.get("activation_scheme") is not None:
        is_static = fields.one_of("activation_scheme", ("static", "dynamic")) == "static"
        activations = Activations("fp8", is_static, None if block is None or is_static else block[1])
    ignored = "modules_to_not_convert", "ignored_layers"
    return _alone(fields, "fp8", encoding, *ignored, activations=activations)


def _block(fields: _Fields, name: str) -> tuple[int, int] | None:
    value = fields.get(name)
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", value):
        value = [int(size) for size in value.split("x")]
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise fields.refused(name, "two sizes", value)
    return value[0], value[1]


def _read_gptq(fields: _Fields) -> Quantisation:
    # One field has had two names; files may have both.
    layout = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq", "format")
    fields.one_of("format", (layout,), layout)
    fields.one_of("is_marlin_format", (False,), False)
    if fields.get("dynamic"):
        raise fields.refused("dynamic", "absent: layers have one encoding", fields.get("dynamic"))
    encoding = GPTQInt(
        bits=_bits(fields, "bits"),
        group=fields.size("group_size"),
        is_symmetric=fields.flag("sym", True),
        is_sorted=not fields.flag("desc_act", False),
        is_less_one=layout == "gptq",
    )
    return _alone(fields, "gptq", encoding, "modules_to_not_convert")


def _bits(fields: _Fields, name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value not in BITS:
        raise fields.refused(name, f"{', '.join(map(str, BITS))} (codes that do not straddle words)", value)
    return value


def _read_awq(fields: _Fields) -> Quantisation:
    version = fields.get("version")
    if str(version or "gemm").lower() != "gemm":
        raise fields.refused("version", "gemm", version)
    fields.one_of("format", ("gemm",), "gemm")
    fields.one_of("bits", (4,), None, "w_bit")
    fields.one_of("zero_point", (True,), True)
    return _alone(fields, "awq", AWQInt(fields.size("group_size", "q_group_size")), "modules_to_not_convert")


def _read_modelopt(fields: _Fields) -> Quantisation:
    if fields.get("quantization") is not None:
        fields = fields.part("quantization")
    fields.one_of("quant_algo", ("FP8",))
    activations = Activations("fp8", is_static=True)
    return _alone(fields, "modelopt", Fp8("tensor"), "exclude_modules", "ignore", activations=activations)


def _read_mxfp4(fields: _Fields) -> Quantisation:
    return _alone(fields, "mxfp4", MXFP4(), "modules_to_not_convert")


def _read_compressed(fields: _Fields) -> Quantisation:
    for name, what in (("sparsity_config", "dense weights"), ("transform_config", "no rotations")):
        value = fields.get(name)
        is_none = isinstance(value, dict) and (value.get("format") == "dense" or not any(value.values()))
        if value is not None and not is_none:
            raise fields.refused(name, f"absent ({what})", value)
    groups = tuple(_compressed_group(fields, each) for each in fields.part("config_groups").parts())
    if not groups:
        raise fields.refused("config_groups", "groups of layers", {})
    return Quantisation("compressed-tensors", fields.where, groups, fields.texts("ignore"))


def _compressed_group(fields: _Fields, group: _Fields) -> Group:
    targets = group.texts("targets")
    kind = group.get("format") or fields.get("format")
    if isinstance(kind, str) and kind in _FORMATS_REFUSED:
        raise group.refused("format", ", ".join(_COMPRESSED), f"{kind}: {_FORMATS_REFUSED[kind]}")
    if not isinstance(kind, str) or kind not in _COMPRESSED:
        raise group.refused("format", ", ".join(_COMPRESSED), kind)
    return Group(targets, _compressed_format(group.part("weights"), kind), _compressed_activations(group))


def _compressed_activations(group: _Fields) -> Activations | None:
    if group.get("input_activations") is None:
        return None
    inputs = group.part("input_activations")
    number, strategy, dynamic = inputs.get("type"), inputs.get("strategy"), inputs.get("dynamic")
    size, is_dynamic = inputs.get("group_size"), dynamic is True
    is_grouped = strategy == "group" and is_dynamic and type(size) is int and size > 0
    is_known = inputs.get("num_bits") == 8 and number in ("int", "float") and dynamic in (True, False, None)
    is_plain = strategy == ("token" if is_dynamic else "tensor")
    is_served = is_known and inputs.get("symmetric") is not False and (is_plain or is_grouped)
    words = None if is_served else ", ".join(f"{name}: {value}" for name, value in inputs.values.items())
    return Activations(
        "int8" if number == "int" else "fp8", not is_dynamic, size if is_grouped else None, words
    )


def _compressed_format(weights: _Fields, kind: str) -> LinearFormat:
    number = weights.one_of("type", _COMPRESSED[kind])
    strategy = weights.get("strategy")
    is_symmetric = weights.flag("symmetric", True)
    if kind == "pack-quantized":
        weights.one_of("strategy", ("group", "channel"))
        size = weights.size("group_size") if strategy == "group" else None
        order = weights.one_of("actorder", (*_SORTED, *_MIXED), False)
        is_sorted = strategy != "group" or order in _SORTED
        return PackedInt(_bits(weights, "num_bits"), size, is_symmetric, is_sorted)
    weights.one_of("num_bits", (8,))
    if number == "int":
        return Int8(weights.one_of("strategy", ("tensor", "channel")), is_symmetric)
    weights.one_of("symmetric", (True,), True)
    weights.one_of("strategy", ("tensor", "channel", "block"))
    if strategy != "block":
        return Fp8(strategy)
    block = _block(weights, "block_structure")
    if block is None:
        raise weights.refused("block_structure", "two sizes, since strategy is block", None)
    return Fp8(None, block)


_SORTED, _MIXED = (False, "weight", "static"), (True, "group", "dynamic")
"""Values of actorder: inputs of a group are neighbours, or an index has the group of each."""

_COMPRESSED: dict[str, tuple[str, ...]] = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
"""Formats of compressed-tensors, and the types of their numbers."""

_PRODUCERS: dict[str, Callable[[_Fields], Quantisation]] = {
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}
METHODS = tuple(_PRODUCERS)
"""Producers whose checkpoints are read, by their ``quant_method``."""
