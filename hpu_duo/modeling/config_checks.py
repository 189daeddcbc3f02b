"""Read and check a config.json without transformers: ranges, adapters, remote code.

Frequencies of some rotary embeddings depend on a text's length: which lengths are allowed is checked here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


_LENGTH_DEPENDENT = {"dynamic", "longrope"}
_LONGEST = 2**31 - 1
"""Largest position: positions are int32 on the device."""


def rope_types(config: Any) -> set[str]:
    """The rotary embedding types in a configuration, in its old form or its new one."""
    return {_type(entry) for entry in _entries(config)}


class NoPositionsError(ValueError):
    """A configuration without the number of positions of the model."""


def positions_served(config: Any) -> int:
    """Return the length that a model is served up to by default, from its configuration.

    Raises:
        NoPositionsError: the configuration has no number of positions.
    """
    limit = getattr(config, "max_position_embeddings", None)
    # Some have -1 for no limit.
    if not isinstance(limit, int) or limit < 1:
        raise NoPositionsError(
            "expected max_model_len, since the configuration has no number of positions of the model "
            f"(max_position_embeddings: {limit!r})"
        )
    # PhiMoE scales queries and keys by the longest text of a batch in every step; it serves short ones only.
    bounds = [_original(config, entry) for entry in _entries(config) if "short_mscale" in entry]
    return min(limit, *bounds) if bounds else limit


def longest_served(config: Any) -> int:
    """Return the largest length that may be set: ``dynamic`` stretches the positions by its factor.

    Raises:
        ValueError: see ``positions_served``.
    """
    served = positions_served(config)
    factors = [entry.get("factor") or 1.0 for entry in _entries(config) if _type(entry) == "dynamic"]
    return min(_LONGEST, int(served * max(1.0, min(factors, default=1.0))))


def served_len(config: Any, wanted: int | None) -> int:
    """Return the longest request that a model is to serve.

    Args:
        wanted: ``max_model_len``, or None for ``positions_served``.

    Raises:
        NoPositionsError: see ``positions_served``; ``max_model_len`` is not set.
        ValueError: it is more than ``longest_served``.
    """
    if wanted is None:
        return positions_served(config)
    try:
        longest = longest_served(config)
    except NoPositionsError:
        longest = _LONGEST
    if wanted > longest:
        raise ValueError(
            f"expected max_model_len of at most {longest}, the positions this model serves, got {wanted}"
        )
    return wanted


def short_len(config: Any) -> int | None:
    """Return the longest ``max_model_len`` with which a model uses the frequencies of short texts.

    Returns:
        None when its frequencies do not depend on the length.
    """
    bounds = [_original(config, entry) for entry in _entries(config) if _type(entry) in _LENGTH_DEPENDENT]
    return min(bounds) if bounds else None


def frequencies_note(config: Any, max_len: int) -> tuple[str, ...]:
    """Return a note for the user if ``fix_frequencies`` changes the frequencies of short texts."""
    short = short_len(config)
    if short is None or max_len <= short:
        return ()
    return (
        f"rotary frequencies are those of texts of {max_len} tokens, for shorter texts too; "
        f"a max_model_len of at most {short} keeps those of short texts",
    )


def fix_frequencies(model: nn.Module, max_len: int) -> None:
    """Fix the frequencies of rotary embeddings, in place, to those of transformers for ``max_len`` tokens.

    Otherwise embeddings that depend on a sequence's length compare it in every step: transformers reads the
    largest position on the host, or copies frequencies.
    """
    for module in model.modules():
        kept = getattr(module, "rope_type", None)
        if isinstance(kept, str) and kept in _LENGTH_DEPENDENT:
            _choose(module, kept, None, max_len)
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kept, dict) and _LENGTH_DEPENDENT & set(kept.values()):
            changing = {layer_type: kind for layer_type, kind in kept.items() if kind in _LENGTH_DEPENDENT}
            for layer_type, kind in changing.items():
                _choose(module, kind, layer_type, max_len)
            module.rope_type = {**kept, **dict.fromkeys(changing, "default")}  # type: ignore[assignment]


def _choose(module: Any, kind: str, layer_type: str | None, max_len: int) -> None:
    """Set the frequencies of one kind of layer; a model may have seen a text of another length before."""
    # Slow to import, and not needed for lengths.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = "" if layer_type is None else f"{layer_type}_"
    name = f"{prefix}inv_freq"
    current: torch.Tensor = getattr(module, name)
    # What the module has computed itself, which is more than the common rule in some families.
    chosen: torch.Tensor = getattr(module, f"{prefix}original_inv_freq", current)
    entry = next(e for e in _entries(module.config, layer_type) if _type(e) == kind)
    if max_len > _original(module.config, entry):
        of_layer = {} if layer_type is None else {"layer_type": layer_type}
        chosen, _ = ROPE_INIT_FUNCTIONS[kind](module.config, current.device, seq_len=max_len, **of_layer)
    setattr(module, name, chosen.to(current.device))


def _original(config: Any, entry: dict[str, Any]) -> int:
    """The longest text that has the frequencies of short ones."""
    if _type(entry) == "dynamic":
        limit: int = config.max_position_embeddings
        return limit
    # Older versions of transformers have it in the configuration itself, and look nowhere else.
    own = getattr(config, "original_max_position_embeddings", None)
    original = entry.get("original_max_position_embeddings") or own or config.max_position_embeddings
    return int(original)


def _type(entry: dict[str, Any]) -> str:
    return str(entry.get("rope_type", entry.get("type", "default")))


def _entries(config: Any, layer_type: str | None = None) -> list[dict[str, Any]]:
    """The parameters of all layers, or of one kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"expected rotary embedding parameters to be an object, got {parameters!r}")
    if layer_type is not None:
        return [parameters[layer_type]]
    return [parameters, *(entry for entry in parameters.values() if isinstance(entry, dict))]


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
            "it was made from, or save plain weights once with transformers, which reads such files with the "
            f"package gguf: AutoModelForCausalLM.from_pretrained({str(directory)!r}, "
            f"gguf_file={gguf[0].name!r}).save_pretrained(NEW_DIRECTORY), and the same with AutoTokenizer"
        )


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


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that has an object.

    Raises:
        ValueError: it cannot be read, or has something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"cannot read {file}: expected a JSON object, got {type(found).__name__}")
    return found
