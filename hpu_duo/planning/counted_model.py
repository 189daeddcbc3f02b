"""Parameters of a model created without storage, apart from other sizes, which need no transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hpu_duo.modeling.attention import LayerKind
from hpu_duo.modeling.experts import EXPERTS_PER_TOKEN, NUM_EXPERTS
from hpu_duo.modeling.loading import build_without_weights
from hpu_duo.modeling.probe import read_layers
from hpu_duo.modeling.recurrent import recurrent_layers
from hpu_duo.planning.model import AttentionSize, Experts, ModelSize
from kernels_ref import Recurrence

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LayerSizes(NamedTuple):
    """Sizes of layers.

    Attributes:
        attention: of each layer that attends.
        states: kinds of states, in bfloat16, of each layer that has these instead.
        numbers: of the layers that attend, among all; empty if all do.
        num_all: number of all layers.
    """

    attention: tuple[AttentionSize, ...]
    states: tuple[tuple[Recurrence, ...], ...]
    numbers: tuple[int, ...]
    num_all: int


def layer_sizes(file: Path, config: Any) -> LayerSizes:
    """Read the sizes of each layer from calls of a model without storage.

    For families whose configurations do not say them alike: values of another size than keys, layers that
    attend to the keys and values of earlier ones, and layers with states.

    Args:
        file: of the configuration, for messages.
        config: of the text part.

    Raises:
        ValueError: the model cannot be served.
    """
    model = build_without_weights(file, config, torch.float32)
    layers = read_layers(model)
    numbers, num_all = tuple(layer.number for layer in layers), layers[0].num_layers
    states = tuple(each.states_in(torch.bfloat16) for each in recurrent_layers(model))
    attention = tuple(
        AttentionSize(
            *(call.num_heads, call.num_kv_heads, call.head_dim, call.sliding_window),
            value_head_dim=None if call.value_head_dim == call.head_dim else call.value_head_dim,
            source=call.source,
            latent=call.latent,
        )
        for call in (layer.call for layer in layers)
    )
    return LayerSizes(attention, states, numbers if num_all > len(layers) else (), num_all)


def counted_model(name: str, config: Any, layers: tuple[AttentionSize, ...], max_positions: int) -> ModelSize:
    """Create the model of a configuration without storage, and count its parameters.

    Args:
        config: transformers', of a model without an encoder.
        layers: sizes of the attention of each layer.

    Raises:
        ValueError: there is no output head, or experts without their number in the configuration.
        RuntimeError, or another error of transformers: it cannot create the model.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return _count(name, model, config, layers, max_positions)


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
    # One tensor, even if the weights of a model without storage are not tied.
    tied = getattr(config, "tie_word_embeddings", False) or head.weight is table.weight
    num_matrix = num_outputs = num_experts = num_other = 0
    for path, parameter in model.named_parameters():
        if parameter is head.weight or (tied and parameter is table.weight):
            continue
        if ".experts." in path:
            num_experts += parameter.numel()
        elif parameter.dim() > 1 and id(parameter) not in looked_up:
            num_matrix += parameter.numel()
            num_outputs += parameter.shape[0]
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
        matrix_outputs=num_outputs,
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


def _structures(model: PreTrainedModel, num_layers: int) -> tuple[int, ...]:
    """A number for each decoder layer, equal for layers with the same modules; empty if all have."""
    stacks = (list(each) for each in model.modules() if isinstance(each, nn.ModuleList))
    layers = next((stack for stack in stacks if len(stack) == num_layers), [])
    numbers: dict[LayerKind, int] = {}
    found = tuple(numbers.setdefault(LayerKind(layer, None), len(numbers)) for layer in layers)
    return found if len(numbers) > 1 else ()
