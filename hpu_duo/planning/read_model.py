"""The sizes of a model from its config.json, without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpu_duo.modeling.config_checks import (
    check_numbers,
    positions_served,
    refusal,
    refuse_adapter,
)
from hpu_duo.modeling.quantised.config import (
    find_quantisation,
    stored_weight_bytes,
    without_quantisation,
)
from hpu_duo.planning.model import PLAIN_FAMILIES, AttentionSize, ModelSize, plain_model

_NUMBER = (int, float)
_TOKEN = (int, type(None))
_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_SIZES, (int,)),
    **dict.fromkeys(("model_type", "hidden_act", "dtype", "torch_dtype", "transformers_version"), (str,)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_cache"), (bool,)),
    **dict.fromkeys(("bos_token_id", "pad_token_id", "head_dim"), _TOKEN),
    "eos_token_id": (*_TOKEN, list),
    "architectures": (list,),
    "attention_dropout": _NUMBER,
    "initializer_range": (float,),
    "layer_types": (list, type(None)),
    "max_window_layers": (int,),
    "pretraining_tp": (int,),
    "rms_norm_eps": (float,),
    "rope_parameters": (dict, type(None)),
    "rope_scaling": (dict, type(None)),
    "rope_theta": _NUMBER,
    "sliding_window": _TOKEN,
    "use_sliding_window": (bool,),
}
"""Fields by their types."""

_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_DTYPES = ("bfloat16", "float16", "float32", None)


def read_plain(file: Path) -> SimpleNamespace | None:
    """Read the configuration of a model of equal layers without sliding windows.

    Returns:
        The fields that sizes follow from, as transformers would have them; None if transformers has to read
        the file, if only to raise its error.

    Raises:
        ValueError: a number in it is out of range, or its weights are quantised in a way that is not read.
    """
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("model_type") not in PLAIN_FAMILIES:
        return None
    find_quantisation(file, fields)
    fields = without_quantisation(fields)
    check_numbers(file, fields)
    if not (_is_known(fields) and _has_full_attention(fields)):
        return None
    absent = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
    return SimpleNamespace(**{**absent, **fields, "sliding_window": None, "layer_types": None})


def _is_known(fields: Mapping[str, Any]) -> bool:
    return (
        all(type(value) in _TYPES.get(name, ()) for name, value in fields.items())
        and all(name in fields for name in _SIZES)
        and fields["hidden_size"] % fields["num_attention_heads"] == 0
        and (fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]) % 2 == 0
        and fields["num_attention_heads"] % fields["num_key_value_heads"] == 0
        and fields.get("hidden_act", "silu") == "silu"
        and 0 <= fields.get("initializer_range", 0.0) <= 1
        and all(type(token) is int for token in _listed(fields.get("eos_token_id")))
        and all(fields.get(name) in _DTYPES for name in ("dtype", "torch_dtype"))
        and all(_is_known_rope(fields.get(name)) for name in ("rope_scaling", "rope_parameters"))
    )


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _is_known_rope(rope: Mapping[str, Any] | None) -> bool:
    if rope is None:
        return True
    numbers = {name: value for name, value in rope.items() if name != "rope_type"}
    needed = {"default": set(), "llama3": _LLAMA3}.get(str(rope.get("rope_type")))
    return needed is not None and needed == {*numbers} - {"rope_theta"}


def _has_full_attention(fields: Mapping[str, Any]) -> bool:
    """Whether every token of every layer sees all earlier ones; the families have defaults of their own."""
    family = fields["model_type"]
    types = fields.get("layer_types")
    alike = ["full_attention"] * fields["num_hidden_layers"]
    if "layer_types" in fields and (family == "mistral" or types not in (None, alike)):
        return False
    if family.startswith("qwen"):
        has_size = family != "qwen3" or fields.get("head_dim") is not None
        return has_size and not fields.get("use_sliding_window", False)
    is_asked = "sliding_window" in fields or family != "mistral"
    return is_asked and fields.get("sliding_window") is None and "use_sliding_window" not in fields


CONFIG_FILE = "config.json"


def read_model(path: str | Path) -> ModelSize:
    """Read the sizes of the model that a config.json describes.

    Parameters of families that are built like Llama follow from their sizes; most of their files are read
    without transformers. Others are counted on a model of transformers without storage, which needs seconds
    to import.

    Args:
        path: the file, or its directory. Of weights, only headers of quantised ones are read.

    Raises:
        ValueError: the file is missing, cannot be read, is that of weights quantised in a way that is not
            read or of an adapter, or is of a model with another cache than keys and values of decoder layers.
    """
    given = Path(path)
    file = given / CONFIG_FILE if given.is_dir() else given
    if str(path) and given.is_dir():
        refuse_adapter(given)
    if not str(path) or not file.is_file():
        raise ValueError(f"expected config.json or a directory with it, got {str(path)!r}")
    name = (given if given.is_dir() else given.parent).resolve().name
    text = read_plain(file)
    size = (
        _by_transformers(name, file)
        if text is None
        else plain_model(name, text, _layers(text), positions_served(text))
    )
    assert size is not None, "its layers are alike"
    return replace(size, stored_bytes=stored_bytes(file))


def read_mtp_layers(path: str | Path, most: int) -> ModelSize:
    """Read the sizes of a model's layers of multi-token prediction, which share embedding and head with it.

    Args:
        path: of the model, as for ``read_model``.
        most: drafts of a row in a step.

    Raises:
        ValueError: see ``read_model`` and ``mtp_config``.
    """
    from hpu_duo.modeling.config_file import read_config_file
    from hpu_duo.modeling.mtp import mtp_config

    file = Path(path) / CONFIG_FILE if Path(path).is_dir() else Path(path)
    whole = read_config_file(file).get_text_config()
    config = mtp_config(whole, file, most)
    size, number = _sized(f"layers of {whole.model_type}", file, config), config.num_hidden_layers
    # Without the table of embeddings; two norms and a matrix bring states and embeddings together.
    is_tied = bool(getattr(whole, "tie_word_embeddings", False))
    matrix = size.matrix_params + 2 * number * size.hidden_size**2
    other = size.other_params + 2 * number * size.hidden_size
    other -= 0 if is_tied else size.head_params
    own = 2 * (matrix + other + size.experts.num_params)
    return replace(size, matrix_params=matrix, other_params=other, stored_bytes=own)


def stored_bytes(file: Path) -> int | None:
    """Return the bytes of a quantised checkpoint's weights as they are stored.

    Args:
        file: its config.json, which can be read.

    Returns:
        None for plain weights, or without files of weights.

    Raises:
        ValueError: a file of weights cannot be read.
    """
    fields = json.loads(file.read_text(encoding="utf-8"))
    if find_quantisation(file, fields) is None:
        return None
    return stored_weight_bytes(file.parent) or None


def _by_transformers(name: str, file: Path) -> ModelSize:
    from hpu_duo.modeling.config_file import read_config_file

    text = read_config_file(file).get_text_config()
    if text.model_type not in PLAIN_FAMILIES:
        from hpu_duo.modeling.config_file import check_causal

        check_causal(type(text))
    return _sized(name, file, text)


def _sized(name: str, file: Path, text: Any) -> ModelSize:
    """The sizes of a text model of transformers' configuration."""
    from hpu_duo.modeling.config_file import FILE_ERRORS

    try:
        more: dict[str, Any] = {}
        if _needs_calls(text):
            from hpu_duo.planning.counted_model import layer_sizes

            sizes = layer_sizes(file, text)
            layers = sizes.attention
            more = {"states": sizes.states, "numbers": sizes.numbers, "num_all": sizes.num_all}
        else:
            layers = _layers(text)
        max_positions = positions_served(text)
        if (plain := plain_model(name, text, layers, max_positions)) is not None:
            return plain
        from hpu_duo.planning.counted_model import counted_model

        return replace(counted_model(name, text, layers, max_positions), **more)
    except (*FILE_ERRORS, RuntimeError) as error:
        raise refusal(f"cannot size the model of {file}", error) from error


def _needs_calls(config: Any) -> bool:
    """Whether sizes of layers are read from calls of a model."""
    names = ("kv_lora_rank", "num_kv_shared_layers", "v_head_dim")
    has_states = {"conv", "hybrid", "linear_attention"} & set(getattr(config, "layer_types", None) or ())
    return bool(has_states) or any(getattr(config, name, None) for name in names)


def _layers(config: Any) -> tuple[AttentionSize, ...]:
    if getattr(config, "attention_chunk_size", None):
        raise ValueError(
            f"{config.model_type!r} has attention_chunk_size, which the cost model does not cover"
        )
    num_layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * num_layers
    unserved = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unserved or len(types) != num_layers:
        raise ValueError(
            f"expected {num_layers} layers of full_attention or sliding_attention, got {len(types)} layers"
            + (f" with {', '.join(unserved)}" if unserved else "")
        )
    return tuple(
        AttentionSize(*_heads(config, index), window if kind == "sliding_attention" else None)
        for index, kind in enumerate(types)
    )


def _heads(config: Any, index: int) -> tuple[int, int, int]:
    """Query heads, key/value heads and head size of one layer."""
    of_layer = getattr(config, "per_layer_config", None)
    if of_layer is not None:
        config = of_layer[index]
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    for value in (num_heads, num_kv_heads, head_dim):
        if not isinstance(value, int):
            raise ValueError(f"expected one number of heads and one head size in a layer, got {value!r}")
    other = getattr(config, "global_head_dim", None)
    if of_layer is None and other is not None and other != head_dim:
        raise ValueError(
            f"{config.model_type!r} has heads of size {head_dim} and {other}, and the installed transformers "
            "does not say in which layers"
        )
    return num_heads, num_kv_heads, head_dim
