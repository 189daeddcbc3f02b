"""The sizes of a model from its config.json, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpu_duo.cost.model import AttentionSize, Experts, ModelSize
from hpu_duo.cost.plain_counts import PLAIN_FAMILIES, plain_model
from hpu_duo.modeling.config_file import CONFIG_FILE, FILE_ERRORS, read_config_file
from hpu_duo.modeling.experts import EXPERTS_PER_TOKEN, NUM_EXPERTS
from hpu_duo.modeling.layer_kind import LayerKind
from hpu_duo.modeling.plain_weights import refuse_adapter
from hpu_duo.modeling.rope import positions_served
from hpu_duo.modeling.transformers_internals import causal_model_class
from hpu_duo.remote_code import refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read_model(path: str | Path) -> ModelSize:
    """Read the sizes of the model that a config.json describes.

    Parameters of families that are built like Llama follow from their sizes. Others are counted on a model of
    transformers without storage, whose code takes seconds to import.

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
    config = read_config_file(file)
    text = config.get_text_config()
    name = (given if given.is_dir() else given.parent).resolve().name
    if text.model_type not in PLAIN_FAMILIES:
        _check_causal(text)
    try:
        layers, max_positions = _layers(text), positions_served(text)
        if (plain := plain_model(name, text, layers, max_positions)) is not None:
            return plain
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text, trust_remote_code=False)
    except (*FILE_ERRORS, RuntimeError) as error:
        raise refusal(f"cannot size the model of {file}", error) from error
    return _count(name, model, text, layers, max_positions)


def _check_causal(config: Any) -> None:
    import transformers

    if causal_model_class(config) is None:
        raise ValueError(
            f"model_type {config.model_type!r} has no causal language model in transformers "
            f"{transformers.__version__}"
        )


def _structures(model: PreTrainedModel, num_layers: int) -> tuple[int, ...]:
    """A number for each decoder layer, equal for layers with the same modules; empty if all have."""
    stacks = (list(each) for each in model.modules() if isinstance(each, nn.ModuleList))
    layers = next((stack for stack in stacks if len(stack) == num_layers), [])
    numbers: dict[LayerKind, int] = {}
    found = tuple(numbers.setdefault(LayerKind(layer, None), len(numbers)) for layer in layers)
    return found if len(numbers) > 1 else ()


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


def _count(
    name: str, model: PreTrainedModel, config: Any, layers: tuple[AttentionSize, ...], max_positions: int
) -> ModelSize:
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"expected {type(model).__name__} to have an output head, found none")
    looked_up = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    # One tensor, even where a model without storage has not been told so.
    tied = getattr(config, "tie_word_embeddings", False) or head.weight is table.weight
    num_matrix = num_experts = num_other = 0
    for path, parameter in model.named_parameters():
        if parameter is head.weight or (tied and parameter is table.weight):
            continue
        if ".experts." in path:
            num_experts += parameter.numel()
        elif parameter.dim() > 1 and id(parameter) not in looked_up:
            num_matrix += parameter.numel()
        else:
            num_other += parameter.numel()
    vocab_size, hidden_size = head.weight.shape
    return ModelSize(
        name=name,
        layers=layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        matrix_params=num_matrix,
        other_params=num_other,
        max_positions=max_positions,
        experts=_experts(config, num_experts),
        structures=_structures(model, len(layers)),
    )


def _experts(config: Any, num_params: int) -> Experts:
    if not num_params:
        return Experts()
    found = [
        next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
        for names in (NUM_EXPERTS, EXPERTS_PER_TOKEN)
    ]
    if found[0] is None or found[1] is None:
        raise ValueError(
            f"{config.model_type!r} has experts, but its configuration does not say how many, and how many "
            "a token uses"
        )
    return Experts(num_params, found[0], found[1])
