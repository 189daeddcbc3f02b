"""Read and check a config.json without transformers: ranges, quantised weights, adapters, remote code."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hpu_duo.modeling.rope import rope_types

_MAY_BE_INFINITE = {"time_step_limit"}

_INT32 = 2**31 - 1
"""Largest token id or position: they are int32 on the device."""


@dataclass(frozen=True)
class Range:
    """Numbers that a field may have.

    Attributes:
        lowest, highest: bounds, both included unless ``is_open``.
        is_whole: integers only.
        is_open: the lowest is excluded.
    """

    lowest: float
    highest: float = math.inf
    is_whole: bool = False
    is_open: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else (int, float)):
            return False
        return self.lowest <= value <= self.highest and not (self.is_open and value == self.lowest)

    def __str__(self) -> str:
        kind = "an integer" if self.is_whole else "a number"
        above = f"{'>' if self.is_open else '>='} {self.lowest:g}"
        return f"{kind} {above}" + ("" if math.isinf(self.highest) else f" and <= {self.highest:g}")


_LAYERS = Range(1, 10_000, is_whole=True)
_HEADS = Range(1, 65_536, is_whole=True)
_WIDTH = Range(1, 2**24, is_whole=True)
_TOKENS = Range(1, _INT32, is_whole=True)
_NUM_EXPERTS = Range(0, 65_536, is_whole=True)  # Dense models of a family with experts have 0.
_POSITIVE = Range(0, is_open=True)
_SHARE = Range(0, 1, is_open=True)

RANGES: dict[str, Range] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), _HEADS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim", "global_head_dim"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"), _WIDTH),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), _TOKENS),
    "original_max_position_embeddings": _TOKENS,
    "sliding_window": Range(0, _INT32, is_whole=True),
    **dict.fromkeys(
        (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "num_experts_per_tok",
            "num_experts_per_token",
        ),
        _NUM_EXPERTS,
    ),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), _POSITIVE),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "factor", "attention_factor"), _POSITIVE),
    **dict.fromkeys(("short_factor", "long_factor", "short_mscale", "long_mscale"), _POSITIVE),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _POSITIVE),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), _SHARE),
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), _POSITIVE
    ),
    **dict.fromkeys(("logits_scaling", "attention_multiplier"), _POSITIVE),
}
"""Ranges by the name of the field, at any depth; lists have such a number for each layer or channel."""


def check_numbers(file: Path, fields: dict[str, Any]) -> None:
    """Check every number of a parsed config.json, those of nested objects included.

    Null fields count as absent.

    Raises:
        ValueError: a number is out of its range, infinite or NaN, or is no number.
    """
    for name, value in _leaves(fields):
        expected = RANGES.get(name)
        if expected is not None and value not in expected:
            raise ValueError(f"expected {name} in {file} to be {expected}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value) and name not in _MAY_BE_INFINITE:
            raise ValueError(f"expected {name} in {file} to be finite, got {value!r}")


def _leaves(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of an object and of all objects in it, the elements of lists one by one."""
    pending = [fields]
    while pending:
        for name, value in pending.pop().items():
            if isinstance(value, dict) and name not in RANGES:
                pending.append(value)
            elif isinstance(value, (list, tuple)):
                yield from ((name, one) for one in value)
            elif value is not None:
                yield name, value


ADAPTER_FILE = "adapter_config.json"

_OF_CONFIG = ("quantization_config", "compression_config")
"""Fields of config.json; the second one is what older files of compressed-tensors have."""

_BESIDE = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files of quantisation tools beside a config.json, or in place of its field, and the method if they name
none."""

_DEQUANTISED = {
    "compressed-tensors": "CompressedTensorsConfig",
    "fp8": "FineGrainedFP8Config",
    "mxfp4": "Mxfp4Config",
}
"""Methods that transformers can dequantize at load, and the class that enables it."""


def refuse_quantised(file: Path, fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint with quantised weights.

    Args:
        file: its config.json.
        fields: of the file.

    Raises:
        ValueError: the weights are quantised; it names the method, and what can be served instead.
    """
    found = _quantisation(file, fields)
    if found is None:
        return
    method, bits, where = found
    said = f"expected plain weights, got weights quantised by {method}{bits} ({where})"
    asked = "load the checkpoint that they were made from"
    if (maker := _DEQUANTISED.get(method)) is not None:
        asked += (
            ", or write plain ones once: transformers.AutoModelForCausalLM.from_pretrained("
            f"{str(file.parent)!r}, dtype='bfloat16', quantization_config=transformers.{maker}"
            "(dequantize=True)).save_pretrained(NEW_DIRECTORY), and the same with AutoTokenizer"
        )
    raise ValueError(f"{said}: {asked}; for sizes alone, use a copy of config.json without it")


def refuse_adapter(directory: Path) -> None:
    """Raise ValueError for a directory with a PEFT adapter, or with GGUF files only.

    Raises:
        ValueError: it does; it names the base model, and how the two become one checkpoint.
    """
    file = directory / ADAPTER_FILE
    if file.is_file():
        fields = _read(file)
        kind, base = fields.get("peft_type") or "PEFT", fields.get("base_model_name_or_path")
        raise ValueError(
            f"expected a whole model, got a {kind} adapter of {base or 'an unnamed base model'} ({file}): "
            f"merge them once: peft.AutoPeftModelForCausalLM.from_pretrained({str(directory)!r}, "
            "dtype='auto').merge_and_unload().save_pretrained(NEW_DIRECTORY), and the same with "
            "AutoTokenizer; to serve the base model alone, load it from a directory without the adapter"
        )
    gguf = sorted(directory.glob("*.gguf"))
    if gguf and not (directory / "config.json").is_file():
        raise ValueError(
            f"expected config.json and *.safetensors, got the GGUF file {gguf[0]}: load the checkpoint that "
            "it was made from"
        )


def _quantisation(file: Path, fields: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return method, bits and place of what quantised the weights; None for plain ones."""
    text = fields.get("text_config")
    for part in (fields, text if isinstance(text, dict) else {}):
        for name in _OF_CONFIG:
            if part.get(name) is not None:
                return *_method(part[name], "a method that it does not name"), f"{name} in {file}"
    for name, method in _BESIDE.items():
        beside = file.parent / name
        if beside.is_file():
            return *_method(_read(beside), method), str(beside)
    return None


def _method(found: object, unnamed: str) -> tuple[str, str]:
    fields = found if isinstance(found, dict) else {}
    bits = fields.get("bits", fields.get("w_bit", 4 if fields.get("load_in_4bit") else None))
    return str(fields.get("quant_method") or unnamed), "" if bits is None else f" to {bits} bits"


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


NO_REMOTE_CODE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of each ``from_pretrained`` of transformers, without which it may prompt, and go online."""


def refuse_remote_code(trust_remote_code: bool) -> None:
    """Accept the value by which transformers runs no code of a checkpoint; ValueError for any other."""
    if trust_remote_code is not False:
        raise ValueError(
            f"expected trust_remote_code=False, got {trust_remote_code!r}: code of a checkpoint is never run"
        )


def refusal(what: str, error: Exception) -> ValueError:
    """Return an error with a sentence about one of transformers: ``what`` failed, and why."""
    if "trust_remote_code=True" in str(error):
        return ValueError(
            f"{what}: it needs Python code that the checkpoint brings (auto_map), and such code is "
            "never run; expected a model and a tokenizer that the installed transformers has itself"
        )
    # A KeyError is nothing but its key.
    reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
    return ValueError(f"{what}: {reason or type(error).__name__}")


CONFIG_FILE = "config.json"

FILE_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OSError,
    ArithmeticError,
    AssertionError,
    RecursionError,
    StrictDataclassError,
)
"""Errors of transformers about a file, or values in it, that it cannot use."""

_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def read_config_file(file: Path) -> Any:
    """Return transformers' configuration of the model that a config.json describes.

    Raises:
        ValueError: the file cannot be read, a number in it is out of range, its activation or its rotary
            embedding is unknown, its weights are quantised, its model type needs code of the checkpoint, or
            it has an encoder.
    """
    fields = _parse(file)
    refuse_quantised(file, fields)
    check_numbers(file, fields)
    try:
        config = AutoConfig.from_pretrained(file, **NO_REMOTE_CODE)
    except FILE_ERRORS as error:
        raise refusal(f"cannot read {file}", error) from error
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"expected a decoder-only model, got the encoder-decoder {config.model_type!r}")
    text = config.get_text_config()
    for name in _ACTIVATIONS:
        _check_known(file, name, getattr(text, name, None), ACT2FN)
    for kind in rope_types(text):
        _check_known(file, "rope_type", kind, ("default", *ROPE_INIT_FUNCTIONS))
    return config


def _parse(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"cannot read {file}: expected a JSON object, got {type(found).__name__}")
    return found


def _check_known(file: Path, name: str, value: object, known: Any) -> None:
    if value is not None and (not isinstance(value, str) or value not in known):
        raise ValueError(
            f"expected {name} in {file} to be one that transformers has ({', '.join(sorted(known))}), "
            f"got {value!r}"
        )
