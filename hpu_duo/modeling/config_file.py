"""Reading a config.json by transformers, apart from its checks, which plans do without importing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hpu_duo.modeling.config_checks import (
    NO_REMOTE_CODE,
    check_numbers,
    read_object,
    refusal,
    rope_types,
)
from hpu_duo.modeling.quantised.config import OF_CONFIG, find_quantisation, without_quantisation
from hpu_duo.modeling.transformers_internals import causal_model_class

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

    It has no quantization_config: quantised weights are dequantised at load.

    Raises:
        ValueError: the file cannot be read, a number in it is out of range, its activation or its rotary
            embedding is unknown, its weights are quantised in a way that is not read, its model type needs
            code of the checkpoint, or it has an encoder.
    """
    fields = read_object(file)
    find_quantisation(file, fields)
    try:
        check_numbers(file, without_quantisation(fields))
    except ValueError:
        # A family that is refused may have other ranges: glm5_next has keys without a rotary part.
        model_type = fields.get("model_type")
        if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
            check_causal(CONFIG_MAPPING[model_type])
        raise
    try:
        config = AutoConfig.from_pretrained(file, **NO_REMOTE_CODE)
    except FILE_ERRORS as error:
        raise refusal(f"cannot read {file}", error) from error
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"expected a decoder-only model, got the encoder-decoder {config.model_type!r}")
    text = config.get_text_config()
    for part in (config, text):
        for name in OF_CONFIG:
            # transformers would load the weights by classes of its own.
            vars(part).pop(name, None)
    for name in _ACTIVATIONS:
        _check_known(file, name, getattr(text, name, None), ACT2FN)
    for kind in rope_types(text):
        _check_known(file, "rope_type", kind, ("default", *ROPE_INIT_FUNCTIONS))
    return config


def check_causal(of_config: type[PretrainedConfig]) -> None:
    """Raise ValueError unless transformers has a causal language model of a configuration's class."""
    if causal_model_class(of_config) is None:
        raise ValueError(
            f"model_type {of_config.model_type!r} has no causal language model in transformers "
            f"{transformers.__version__}"
        )


def _check_known(file: Path, name: str, value: object, known: Any) -> None:
    if value is not None and (not isinstance(value, str) or value not in known):
        raise ValueError(
            f"expected {name} in {file} to be one that transformers has ({', '.join(sorted(known))}), "
            f"got {value!r}"
        )
