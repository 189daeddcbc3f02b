"""Checkpoints whose weights are not a whole plain model: quantised ones, adapters, GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ADAPTER_FILE = "adapter_config.json"

_OF_CONFIG = ("quantization_config", "compression_config")
"""Fields of config.json; the second one is what older files of compressed-tensors have."""

_BESIDE = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files that tools write beside a config.json, or in place of its field, and the method if they name none."""

_DEQUANTISED = {
    "compressed-tensors": "CompressedTensorsConfig",
    "fp8": "FineGrainedFP8Config",
    "mxfp4": "Mxfp4Config",
}
"""Methods whose weights transformers makes plain while it loads them, and the class that asks it to."""


def refuse_quantised(file: Path, fields: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with quantised weights.

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
    raise ValueError(f"{said}: {asked}; for sizes alone, take a copy of config.json without it")


def refuse_adapter(directory: Path) -> None:
    """Refuse a directory that holds an adapter of PEFT, alone or beside a base model, or GGUF files alone.

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
