"""Scales that Intel Neural Compressor has measured: the file of ``QUANT_CONFIG``, and those that it names.

JSON files are read only: the ``.npz`` files beside them are pickles, which may run code. Imports no torch.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hpu_duo.modeling.config_checks import read_object

VARIABLE = "QUANT_CONFIG"
"""Variable of the environment with the path of the configuration, as for vllm-gaudi."""
METHOD = "inc"
"""The value of ``quantization`` that reads the files."""

_LARGEST = {2: 240.0, 3: 448.0}
"""Largest fp8 number by the generation of a Gaudi."""
_EXPONENTS = {2: (-8, 4, 4), 3: (-55, 7, 1)}
"""Smallest and largest exponent of the scales that a generation multiplies with for free, and their step."""
_BACKOFFS = {"input_backoff": 0.25, "weight_backoff": 0.5}
_METHODS: dict[str, tuple[str, str]] = {
    "UNIT_SCALE": ("unit", "unit"),
    "MAXABS_HW": ("hw", "hw"),
    "MAXABS_POW2": ("pow2", "pow2"),
    "MAXABS_ARBITRARY": ("exact", "exact"),
    "ACT_MAXABS_HW_WEIGHTS_PCS_MAXABS_POW2": ("hw", "outputs"),
    "ACT_MAXABS_POW2_WEIGHTS_PCS_MAXABS_POW2": ("pow2", "outputs"),
}
"""Rounding of scales of inputs and weights by ``scale_method``; "outputs" = a power of 2 for each output."""
_MODES = {
    "MEASURE": "prompts are measured by: hpu-duo calibrate --kv-scales DIR",
    "SHAPE": "prompts are measured by: hpu-duo calibrate --kv-scales DIR",
    "LOAD": "weights that it has saved are not read: name the plain checkpoint and a file of mode QUANTIZE",
    "NONE": "leave quantization out",
}
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules of vLLM that are several layers of a checkpoint."""
_TYPES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "QKVParallelLinear"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "MergedColumnParallelLinear"),
    **dict.fromkeys(("o_proj", "down_proj"), "RowParallelLinear"),
    "lm_head": "ParallelLMHead",
    "gate": "ReplicatedLinear",
}
"""Types of vLLM by the last part of a name."""
_CACHE = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?([kv])_cache$")
_CACHE_TYPES = ("VLLMKVCache", "KVCache")


class LinearScales(NamedTuple):
    """Scales of a linear layer: a number is about its fp8 code times the scale.

    Attributes:
        inputs: of all inputs.
        weight: of the weight; None = each output has its own, see ``of_output``.
        largest: fp8 number.
        weight_backoff: share of the numbers that weights take.
    """

    inputs: float
    weight: float | None
    largest: float
    weight_backoff: float

    def of_output(self, largest: float) -> float:
        """Return the scale of an output, a power of 2, by the largest magnitude of its weights."""
        return _pow2(largest / (self.largest * self.weight_backoff)) if largest else 1.0


class _Node(NamedTuple):
    """The largest input and weight of a module, or their scales, in a file; None where it has none."""

    inputs: float | None
    weight: float | None


@dataclass(frozen=True)
class _Names:
    """A list of names and types of modules, to quantise or not."""

    names: tuple[str, ...] = ()
    types: tuple[str, ...] = ()

    def has(self, names: Iterable[str], types: Iterable[str]) -> bool:
        """Whether one of the names, by a part or a regular expression, or one of the types is listed."""
        return any(_matches(each, name) for each in self.names for name in names) or any(
            each in self.types for each in types
        )


def _matches(pattern: str, name: str) -> bool:
    return pattern in name or re.search(pattern, name) is not None


@dataclass(frozen=True)
class IncScales:
    """Scales of a model for one kind of Gaudi.

    Attributes:
        file: the configuration.
        generation: 2 or 3, of the Gaudi.
        is_chosen: whether the configuration names the generation of scales, which a newer one can serve.
        method: of scales, in capitals.
        backoffs: shares of fp8 numbers that inputs and weights take.
        blocked, allowed: modules that are not quantised, and, if there are any, the only ones that are.
        measured: largest magnitudes by module.
        scaled: scales by module, which come before measured magnitudes.
        files: of both, for messages.
    """

    file: Path
    generation: int
    is_chosen: bool
    method: str
    backoffs: Mapping[str, float]
    blocked: _Names
    allowed: _Names
    measured: Mapping[str, _Node] = field(repr=False)
    scaled: Mapping[str, _Node] = field(repr=False)
    files: str

    @property
    def largest(self) -> float:
        """The largest fp8 number."""
        return _LARGEST[self.generation]

    @property
    def fingerprint(self) -> str:
        """Text that two sets of scales have in common only if they are the same."""
        lists = (self.blocked, self.allowed, sorted(self.measured.items()), sorted(self.scaled.items()))
        parts = repr((self.generation, self.method, sorted(self.backoffs.items()), *lists))
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    def check_device(self, generation: int) -> None:
        """Raise ValueError for scales of another generation than the device's."""
        if generation != self.generation and not (self.is_chosen and self.generation < generation):
            raise ValueError(
                f"{self.file}: expected scales of a Gaudi {generation}, this device, got those of a Gaudi "
                f"{self.generation}: fp8 ends at {_LARGEST[generation]:g} and {self.largest:g}"
            )

    def linear(self, name: str) -> LinearScales | None:
        """Return the scales of a linear layer; None if it is not quantised.

        Args:
            name: of the module in the checkpoint.

        Raises:
            ValueError: it was not measured.
        """
        parent, _, leaf = name.rpartition(".")
        fused = next((each for each, leaves in _FUSED.items() if leaf in leaves), None)
        names = [name] if fused is None else [name, f"{parent}.{fused}" if parent else fused]
        if not self._takes(names, ("Linear", _TYPES.get(leaf, "Linear"))):
            return None
        of_inputs, of_weights = _METHODS[self.method]
        values = []
        for what, place, rounding in (("inputs", 0, of_inputs), ("params.weight", 1, of_weights)):
            values.append(None if rounding == "outputs" else self._scale(names, place, what, rounding))
        inputs, weight = values
        assert inputs is not None, "inputs have one scale"
        return LinearScales(inputs, weight, self.largest, self.backoffs["weight_backoff"])

    def kv(self, layers: Iterable[int]) -> dict[int, tuple[float, float]]:
        """Return the scales of keys and of values of some layers.

        Raises:
            ValueError: the keys or values of a layer were not measured, or are not to be quantised.
        """
        known: dict[tuple[int, str], list[str]] = {}
        for name in (*self.scaled, *self.measured):
            if match := _CACHE.search(name):
                known.setdefault((int(match[1]), match[2]), []).append(name)
        found = {}
        for number in layers:
            pair = []
            for letter in "kv":
                names = known.get(
                    (number, letter), [f"model.layers.{number}.self_attn.attn.impl.{letter}_cache"]
                )
                if not self._takes(names, _CACHE_TYPES):
                    raise ValueError(
                        f"{self.file} leaves {names[0]} of layer {number} unquantised: expected "
                        "kv_cache_dtype_skip_layers to name the layer, or another kv_cache_dtype"
                    )
                pair.append(self._scale(names, 0, "inputs", _METHODS[self.method][0]))
            found[number] = pair[0], pair[1]
        return found

    def _takes(self, names: Iterable[str], types: Iterable[str]) -> bool:
        is_allowed = self.allowed == _Names() or self.allowed.has(names, types)
        return is_allowed and not self.blocked.has(names, types)

    def _scale(self, names: list[str], place: int, what: str, rounding: str) -> float:
        if rounding == "unit":
            return 1.0
        for nodes, is_scale in ((self.scaled, True), (self.measured, False)):
            values = [node[place] for name in names if (node := nodes.get(name)) is not None]
            value = next((each for each in values if each is not None), None)
            if value is not None:
                return value if is_scale else self._rounded(value, place, rounding)
        raise ValueError(
            f"expected measured {what} of {' or '.join(names)} in {self.files}, found none: measure it, or "
            f"list it in blocklist of {self.file}"
        )

    def _rounded(self, largest: float, place: int, rounding: str) -> float:
        scale = largest / (self.largest * self.backoffs[tuple(_BACKOFFS)[place]])
        if rounding == "exact":
            return scale
        if rounding == "pow2":
            return _pow2(scale)
        least, most, step = _EXPONENTS[self.generation]
        exponent = math.ceil(_exponent(scale) / step) * step
        return 2.0 ** min(max(exponent, least), most)


def _exponent(scale: float) -> int:
    """The smallest power of 2 that is not below a number."""
    mantissa, exponent = math.frexp(scale)
    return exponent - 1 if mantissa == 0.5 else exponent


def _pow2(scale: float) -> float:
    return 2.0 ** _exponent(scale)


def quant_config(setting: str) -> Path:
    """Return the path in the environment's ``QUANT_CONFIG``.

    Args:
        setting: that needs it, for messages.

    Raises:
        ValueError: it is not set.
    """
    path = os.environ.get(VARIABLE, "")
    if not path:
        raise ValueError(
            f"expected the environment variable {VARIABLE} to name a JSON file of Intel Neural Compressor, "
            f"which {setting} needs, got none"
        )
    return Path(path)


def read_inc(file: Path) -> IncScales:
    """Read a configuration and the measurements or scales that it names.

    Raises:
        ValueError: a file cannot be read, or has what is not served.
    """
    fields = read_object(file)
    mode = _text(file, fields, "mode", "QUANTIZE").upper()
    if mode != "QUANTIZE":
        raise ValueError(
            f"{file}: expected mode QUANTIZE, got {mode}: {_MODES.get(mode, 'no such mode is known')}"
        )
    method = _text(file, fields, "scale_method", "maxabs_hw").upper()
    if method not in _METHODS:
        served = ", ".join(each.lower() for each in _METHODS)
        raise ValueError(f"{file}: expected scale_method to be one of {served}, got {method.lower()}")
    if _text(file, fields, "fp8_config", "e4m3").lower() != "e4m3":
        raise ValueError(f"{file}: expected fp8_config to be E4M3, got {fields['fp8_config']!r}")
    if _is_true(fields.get("dynamic_quantization")):
        raise ValueError(f"{file}: expected constant scales of inputs, got dynamic_quantization")
    observer = _text(file, fields, "observer", "maxabs")
    if observer not in ("maxabs", "maxabs_per_channel"):
        raise ValueError(f"{file}: expected observer to be maxabs or maxabs_per_channel, got {observer!r}")
    stats = _text(file, fields, "dump_stats_path", "stats")
    generation, is_chosen = _generation(file, fields, stats)
    measured, scaled, base = dict[str, _Node](), dict[str, _Node](), ""
    try:
        base = f"{_placed(file, stats)}_hooks_{observer}"
        if method != "UNIT_SCALE":
            again = _is_true(fields.get("recalc_scales"))
            scaled = {} if again else _nodes(f"{base}_{method}", "Scale")
            measured = _nodes(base, "DynamicRange")
            if not (measured or scaled):
                raise ValueError(f"{file}: expected measurements in {base}*.json, found {_pickles(base)}")
    except OSError as error:
        raise ValueError(f"{file}: expected files of measurements at dump_stats_path, got {error}") from error
    backoffs = {**_BACKOFFS, **_backoffs(file, fields)}
    blocked = _listed(file, fields, "blocklist", "blacklist")
    allowed = _listed(file, fields, "allowlist", "whitelist")
    chosen = (file, generation, is_chosen, method, backoffs, blocked, allowed)
    return IncScales(*chosen, measured, scaled, f"{base}*.json")


def _text(file: Path, fields: Mapping[str, Any], name: str, default: str) -> str:
    value = fields.get(name, default)
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{file}: expected {name} to be a text, got {value!r}")
    return value


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _generation(file: Path, fields: Mapping[str, Any], stats: str) -> tuple[int, bool]:
    """The generation of a Gaudi that scales are for, and whether the configuration names it."""
    given = fields.get("device_for_scales")
    if given is not None:
        match = re.fullmatch(r"gaudi([23])", str(given).lower())
        if match is None:
            raise ValueError(f"{file}: expected device_for_scales to be GAUDI2 or GAUDI3, got {given!r}")
        return int(match[1]), True
    for part in (Path(stats).parent.name, file.stem):
        if match := re.search(r"(?:^|[^a-z0-9])g(?:audi)?([23])$", part.lower()):
            return int(match[1]), False
    raise ValueError(
        f"{file}: expected the kind of Gaudi that its scales are for, in device_for_scales (GAUDI2, GAUDI3) "
        f"or at the end of its own name or of the folder of dump_stats_path (g2 or g3), got {stats!r}"
    )


def _placed(file: Path, stats: str) -> Path:
    """The place of files of measurements: as the configuration says, or beside it if they were moved."""
    given = Path(stats)
    beside = (file.parent / given.parent.name / given.name, file.parent / given.name)
    for place in (given, *beside):
        if place.parent.is_dir() and any(place.parent.glob(f"{_escaped(place.name)}_hooks_*")):
            return place
    return given


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _backoffs(file: Path, fields: Mapping[str, Any]) -> dict[str, float]:
    given = fields.get("scale_params", {})
    if not isinstance(given, dict):
        raise ValueError(f"{file}: expected scale_params to be an object, got {given!r}")
    found = {}
    for name in _BACKOFFS:
        if name in given:
            found[name] = _number(given[name])
            if not 0 < found[name] <= 1:
                raise ValueError(f"{file}: expected {name} above 0 and at most 1, got {given[name]!r}")
    return found


def _number(value: Any) -> float:
    """A number as it is; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of many digits
        return math.inf


def _listed(file: Path, fields: Mapping[str, Any], *keys: str) -> _Names:
    """Names and types of a list of modules, which had another key in older versions."""
    for key in keys:
        if key not in fields:
            continue
        given = fields[key]
        parts = [given.get(name, []) if isinstance(given, dict) else None for name in ("names", "types")]
        if not all(isinstance(part, list) and all(isinstance(x, str) for x in part) for part in parts):
            raise ValueError(f"{file}: expected {key} to have lists of names and types, got {given!r}")
        names, types = (tuple(part or ()) for part in parts)
        for name in names:
            try:
                re.compile(name)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{file}: expected names in {key}, got {name!r}: {error}") from error
        return _Names(names, types)
    return _Names()


def _nodes(base: str, mode: str) -> dict[str, _Node]:
    """Read the files of all ranks, and return the largest value of each module."""
    found: dict[str, _Node] = {}
    for file in _ranks(Path(base)):
        fields = read_object(file)
        if fields.get("Mode") != mode or not isinstance(fields.get("Nodes"), dict):
            raise ValueError(f"{file}: expected Mode {mode} and Nodes, got {fields.get('Mode')!r}")
        for name, given in fields["Nodes"].items():
            node = _node(file, name, given)
            other = found.get(name, _Node(None, None))
            found[name] = _Node(*(_max(pair) for pair in zip(node, other, strict=True)))
    return found


def _max(values: Iterable[float | None]) -> float | None:
    return max((each for each in values if each is not None), default=None)


def _ranks(base: Path) -> list[Path]:
    """Files of one run: that without a rank, else those of the fewest ranks of which all are there.

    Raises:
        ValueError: files of some ranks are missing.
    """
    alone = base.with_name(f"{base.name}.json")
    if alone.is_file():
        return [alone]
    runs: dict[int, dict[int, Path]] = {}
    for file in base.parent.glob(f"{_escaped(base.name)}_*.json"):
        if match := re.fullmatch(r"_(\d{1,6})_(\d{1,6})", file.stem[len(base.name) :]):
            runs.setdefault(int(match[2]), {})[int(match[1])] = file
    whole = [world for world, files in sorted(runs.items()) if set(files) == set(range(world))]
    if whole:
        return list(runs[whole[0]].values())
    for world, files in sorted(runs.items()):
        missing = next(rank for rank in range(world + 1) if rank not in files)
        raise ValueError(f"expected files of all {world} ranks, found no {base}_{missing}_{world}.json")
    return []


def _node(file: Path, name: str, given: Any) -> _Node:
    if not isinstance(given, dict):
        raise ValueError(f"{file}: expected {name} to be an object, got {type(given).__name__}")
    inputs = given.get("inputs")
    first = inputs[0] if isinstance(inputs, list) and inputs else inputs
    params = given.get("params")
    weight = params.get("weight") if isinstance(params, dict) else None
    return _Node(
        _largest(file, f"inputs of {name}", first), _largest(file, f"params.weight of {name}", weight)
    )


def _largest(file: Path, what: str, given: Any) -> float | None:
    """The largest of nested lists of numbers; None for none.

    Raises:
        ValueError: a number is not above 0 and finite, such as that of a module that saw no token.
    """
    left, found = [given], []
    while left:
        each = left.pop()
        if isinstance(each, list):
            left.extend(each)
        elif isinstance(each, dict):
            left.extend(each.values())
        elif each is not None:
            found.append(_number(each))
    if not found:
        return None
    largest = max(found)
    if not all(math.isfinite(each) and each >= 0 for each in found) or largest == 0:
        raise ValueError(f"{file}: expected {what} to be finite and above 0, got {str(given)[:60]}")
    return largest


def _pickles(base: str) -> str:
    place = Path(base)
    names = sorted(file.name for file in place.parent.glob(f"{_escaped(place.name)}*.npz"))
    if not names:
        return "none"
    return f"{names[0]}, a pickle, which may run code and is not read: keep the .json file written with it"
