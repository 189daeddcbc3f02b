"""transformers' generation arguments in terms of ours."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig, GenerationMixin

from hpu_duo.sampling import SamplingParams

DEFAULT_NEW_TOKENS = 20
"""What transformers generates when nobody says how much."""

DEFAULT_TOP_K = 50
"""transformers' default when it samples."""

_TRANSFORMERS_ARGUMENTS = frozenset(inspect.signature(GenerationMixin.generate).parameters)
_HONOURED = {
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "min_p",
    "num_return_sequences",
    "pad_token_id",
    "repetition_penalty",
    "stop_strings",
    "temperature",
    "top_k",
    "top_p",
}
# Fields that say nothing about the tokens, or only of encoder-decoder models and caches of their own.
# transformers wants a tokenizer beside stop strings; here it is the checkpoint's.
_WITHOUT_EFFECT = {
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "decoder_start_token_id",
    "disable_compile",
    "generation_kwargs",
    "max_matching_ngram_size",
    "tokenizer",
    "transformers_version",
    "use_cache",
    "_from_model_config",
}
# Arguments of ours beside transformers' own.
_OURS = {"seed", "logit_bias", "presence_penalty", "frequency_penalty", "ignore_eos", "stop_token_ids"}
_STOPPING = {"ignore_eos", "stop_token_ids"}
# Values that ask for nothing, in fields that are not supported otherwise; None and False always do.
_NEUTRAL: dict[str, Any] = {
    "bad_words_ids": [],
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "suppress_tokens": [],
    "typical_p": 1.0,
}


@dataclass(frozen=True)
class GenerationRequest:
    """What one call of ``generate`` asks for.

    Attributes:
        config: the fields that are honoured.
        ours: arguments that transformers does not have.
        pad_token_id: fills the right of shorter rows.
        eos_token_ids: tokens that end a row.
        guesses_padding: whether pad ids in front of a prompt are padding when no mask says so.
    """

    config: GenerationConfig
    ours: Mapping[str, Any]
    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    guesses_padding: bool

    @property
    def num_samples(self) -> int:
        """Rows returned for each prompt."""
        num_samples: int = _or(self.config.num_return_sequences, 1)
        return num_samples

    def params_for(self, input_len: int) -> SamplingParams:
        """Sampling parameters of a prompt of ``input_len`` tokens, left padding included.

        Raises:
            ValueError: a value is out of range, or the prompt already fills ``max_length``.
        """
        c = self.config
        if c.do_sample and c.temperature == 0:
            raise ValueError("temperature: expected a value above 0 with do_sample=True, got 0")
        _check_count("num_return_sequences", self.num_samples, 1)
        max_new = self._max_new_tokens(input_len)
        min_length = _check_count("min_length", _or(c.min_length, 0), 0)
        min_new = _check_count("min_new_tokens", _or(c.min_new_tokens, max(min_length - input_len, 0)), 0)
        params = SamplingParams(
            n=self.num_samples,
            temperature=_or(c.temperature, 1.0),
            top_k=_or(c.top_k, DEFAULT_TOP_K),
            top_p=_or(c.top_p, 1.0),
            min_p=_or(c.min_p, 0.0),
            max_tokens=max_new,
            min_tokens=min(min_new, max_new),
            repetition_penalty=_or(c.repetition_penalty, 1.0),
            stop=_read_stop_strings(c.stop_strings),
            stop_token_ids=(
                *self.eos_token_ids,
                *as_token_ids("stop_token_ids", self.ours.get("stop_token_ids")),
            ),
            include_stop_str_in_output=True,
            stop_begins_in_prompt=True,
            ignore_eos=True,
            **{k: v for k, v in self.ours.items() if v is not None and k not in _STOPPING},
        )
        # Out of range is out of range even where nothing is drawn.
        return params if c.do_sample else replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)

    def _max_new_tokens(self, input_len: int) -> int:
        c = self.config
        if c.max_new_tokens is None and c.max_length is None:
            return DEFAULT_NEW_TOKENS
        if c.max_new_tokens is not None:
            return _check_count("max_new_tokens", c.max_new_tokens, 1)
        if _check_count("max_length", c.max_length, 1) <= input_len:
            raise ValueError(
                f"max_length: expected more than the {input_len} prompt tokens, got {c.max_length}"
            )
        return c.max_length - input_len


def read_generation(
    default: GenerationConfig, given: GenerationConfig | None, kwargs: Mapping[str, Any]
) -> GenerationRequest:
    """Merge the model's defaults, a ``GenerationConfig`` and keyword arguments, the last one first.

    Raises:
        ValueError: an argument that is unknown, known to transformers and not supported here, or of a
            type that says nothing about tokens.
    """
    if given is not None and not isinstance(given, GenerationConfig):
        raise ValueError(f"generation_config: expected a GenerationConfig, got {type(given).__name__}")
    fields = set(GenerationConfig().to_dict())
    unknown = sorted(
        name
        for name, value in kwargs.items()
        if name not in fields | _HONOURED | _WITHOUT_EFFECT | _OURS
        and not (value is None and name in _TRANSFORMERS_ARGUMENTS)
    )
    if unknown:
        raise ValueError(f"unknown or unsupported generation arguments: {', '.join(unknown)}")
    # A checkpoint may say things that transformers has no field for either, and ignores.
    asked = {name: value for name, value in _set_fields(default).items() if name in fields}
    asked |= _set_fields(given)
    asked |= {name: value for name, value in kwargs.items() if name not in _OURS}
    unsupported = sorted(
        name
        for name, value in asked.items()
        if name not in _HONOURED | _WITHOUT_EFFECT and not _is_neutral(name, value)
    )
    if unsupported:
        raise ValueError(f"generation arguments that are not supported: {', '.join(unsupported)}")
    config = GenerationConfig()
    for name in _HONOURED:
        setattr(config, name, asked.get(name))
    ours = {name: value for name, value in kwargs.items() if name in _OURS}
    _check_ours(ours)
    eos = as_token_ids("eos_token_id", config.eos_token_id)
    pad = None if config.pad_token_id is None else _as_token_id("pad_token_id", config.pad_token_id)
    guesses_padding = pad is not None and pad not in eos
    if pad is None:
        pad = eos[0] if eos else 0
    return GenerationRequest(config, ours, pad, () if ours.get("ignore_eos") else eos, guesses_padding)


def as_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The field ``name`` that holds no token id, one, or several.

    Raises:
        ValueError: anything else.
    """
    if value is None:
        return ()
    several = value if isinstance(value, list | tuple) else (value,)
    return tuple(_as_token_id(name, token) for token in several)


def _as_token_id(name: str, value: Any) -> int:
    try:
        token = operator.index(value)
    except TypeError:
        token = -1
    if token < 0 or isinstance(value, bool):
        raise ValueError(f"{name}: expected a token id, an integer >= 0, got {value!r}")
    return token


def _check_ours(ours: Mapping[str, Any]) -> None:
    bias, ignores = ours.get("logit_bias"), ours.get("ignore_eos")
    if bias is not None and not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias: expected a mapping from token ids to numbers, got {bias!r}")
    if ignores is not None and not isinstance(ignores, bool):
        raise ValueError(f"ignore_eos: expected True or False, got {ignores!r}")


def _read_stop_strings(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _or(value, ())
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"stop_strings: expected a string or a list of strings, got {value!r}")
    return tuple(texts)


def _set_fields(config: GenerationConfig | None) -> dict[str, Any]:
    """Fields that differ from what an empty configuration holds."""
    if config is None:
        return {}
    neutral = GenerationConfig().to_dict()
    return {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name != "transformers_version" and value != neutral.get(name)
    }


def _is_neutral(name: str, value: Any) -> bool:
    if value is None or value is False:
        return True
    # True equals 1, and asks for something.
    return value is not True and name in _NEUTRAL and value == _NEUTRAL[name]


def _check_count(name: str, value: Any, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name}: expected an integer >= {minimum}, got {value!r}")
    return value


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
