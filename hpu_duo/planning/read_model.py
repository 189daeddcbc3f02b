"""The sizes of a model from its config.json, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpu_duo.modeling.config_checks import refusal, refuse_adapter
from hpu_duo.modeling.rope import positions_served
from hpu_duo.planning.model import PLAIN_FAMILIES, AttentionSize, ModelSize, plain_model
from hpu_duo.planning.plain_file import read_plain

CONFIG_FILE = "config.json"


def read_model(path: str | Path) -> ModelSize:
    """Read the sizes of the model that a config.json describes.

    Parameters of families that are built like Llama follow from their sizes; most of their files are read
    without transformers. Others are counted on a model of transformers without storage, whose code takes
    seconds to import.

    Args:
        path: the file, or a directory that holds it. No weights are read.

    Raises:
        ValueError: the file is missing, cannot be read, is that of quantised weights or of an adapter,
            or describes a model whose cache is not keys and values of decoder layers.
    """
    given = Path(path)
    file = given / CONFIG_FILE if given.is_dir() else given
    if str(path) and given.is_dir():
        refuse_adapter(given)
    if not str(path) or not file.is_file():
        raise ValueError(f"expected config.json or a directory with it, got {str(path)!r}")
    name = (given if given.is_dir() else given.parent).resolve().name
    text = read_plain(file)
    if text is None:
        return _by_transformers(name, file)
    plain = plain_model(name, text, _layers(text), positions_served(text))
    assert plain is not None, "its layers are alike"
    return plain


def _by_transformers(name: str, file: Path) -> ModelSize:
    from hpu_duo.modeling.config_file import FILE_ERRORS, read_config_file

    text = read_config_file(file).get_text_config()
    if text.model_type not in PLAIN_FAMILIES:
        from hpu_duo.planning.counted_model import check_causal

        check_causal(text)
    try:
        layers, max_positions = _layers(text), positions_served(text)
        if (plain := plain_model(name, text, layers, max_positions)) is not None:
            return plain
        from hpu_duo.planning.counted_model import counted_model

        return counted_model(name, text, layers, max_positions)
    except (*FILE_ERRORS, RuntimeError) as error:
        raise refusal(f"cannot size the model of {file}", error) from error


def _layers(config: Any) -> tuple[AttentionSize, ...]:
    for unknown in ("kv_lora_rank", "num_kv_shared_layers", "attention_chunk_size"):
        if getattr(config, unknown, None):
            raise ValueError(f"{config.model_type!r} has {unknown}, which the cost model does not cover")
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
