"""transformers' generation arguments in terms of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from hpu_duo.sampling import SamplingParams

DEFAULT_NEW_TOKENS = 20
"""What transformers generates when nobody says how much."""

DEFAULT_TOP_K = 50
"""transformers' default when it samples."""

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
_WITHOUT_EFFECT = {
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "decoder_start_token_id",
    "disable_compile",
    "generation_kwargs",
    "max_matching_ngram_size",
    "transformers_version",
    "use_cache",
    "_from_model_config",
}
# Arguments of ours beside transformers' own.
_OURS = {"seed", "logit_bias", "presence_penalty", "frequency_penalty", "ignore_eos", "stop_token_ids"}


@dataclass(frozen=True)
class GenerationRequest:
    """What one call of ``generate`` asks for.

    Attributes:
        pad_token_id: fills the right of shorter rows.
        eos_token_ids: tokens that end a row.
    """

    config: GenerationConfig
    ours: Mapping[str, Any]
    pad_token_id: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        """Rows returned for each prompt."""
        return self.config.num_return_sequences or 1

    def params_for(self, prompt_len: int) -> SamplingParams:
        """Sampling parameters of a prompt of ``prompt_len`` tokens.

        Raises:
            ValueError: a value is out of range, or the prompt already fills ``max_length``.
        """
        c = self.config
        sampled: dict[str, Any] = {"temperature": 0.0}
        if c.do_sample:
            sampled = {
                "temperature": _or(c.temperature, 1.0),
                "top_k": _or(c.top_k, DEFAULT_TOP_K),
                "top_p": _or(c.top_p, 1.0),
                "min_p": _or(c.min_p, 0.0),
            }
            if sampled["temperature"] == 0:
                raise ValueError("temperature: expected a value above 0 with do_sample=True, got 0")
        max_new = self._max_new_tokens(prompt_len)
        min_new = max(_or(c.min_new_tokens, 0), _or(c.min_length, 0) - prompt_len, 0)
        return SamplingParams(
            n=self.num_samples,
            max_tokens=max_new,
            min_tokens=min(min_new, max_new),
            repetition_penalty=_or(c.repetition_penalty, 1.0),
            stop=_or(c.stop_strings, ()),
            stop_token_ids=(*self.eos_token_ids, *self.ours.get("stop_token_ids", ())),
            include_stop_str_in_output=True,
            ignore_eos=True,
            **{k: v for k, v in self.ours.items() if k not in ("ignore_eos", "stop_token_ids")},
            **sampled,
        )

    def _max_new_tokens(self, prompt_len: int) -> int:
        c = self.config
        if c.max_new_tokens is not None:
            return c.max_new_tokens
        # 20 is also transformers' default of max_length, which then means 20 new tokens.
        if c.max_length is None or c.max_length == DEFAULT_NEW_TOKENS:
            return DEFAULT_NEW_TOKENS
        if c.max_length <= prompt_len:
            raise ValueError(
                f"max_length: expected more than the {prompt_len} prompt tokens, got {c.max_length}"
            )
        return c.max_length - prompt_len


def read_generation(
    default: GenerationConfig, given: GenerationConfig | None, kwargs: Mapping[str, Any]
) -> GenerationRequest:
    """Merge the model's defaults, a ``GenerationConfig`` and keyword arguments.

    Raises:
        ValueError: an argument that is unknown, or known to transformers and not supported here.
    """
    merged = GenerationConfig(**{**_set_fields(default), **_set_fields(given)})
    neutral = GenerationConfig().to_dict()
    unknown = sorted(set(kwargs) - set(neutral) - _HONOURED - _WITHOUT_EFFECT - _OURS)
    if unknown:
        raise ValueError(f"unknown generation arguments: {', '.join(unknown)}")
    for name, value in kwargs.items():
        if name not in _OURS:
            setattr(merged, name, value)
    unsupported = sorted(
        name
        for name, value in merged.to_dict().items()
        if name not in _HONOURED | _WITHOUT_EFFECT and not _is_neutral(value, neutral.get(name))
    )
    if unsupported:
        raise ValueError(f"generation arguments that are not supported: {', '.join(unsupported)}")
    ours = {name: value for name, value in kwargs.items() if name in _OURS}
    eos = () if ours.get("ignore_eos") else _as_tuple(merged.eos_token_id)
    pad = merged.pad_token_id
    if pad is None:
        all_eos = _as_tuple(merged.eos_token_id)
        pad = all_eos[0] if all_eos else 0
    return GenerationRequest(merged, ours, int(pad), eos)


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


def _is_neutral(value: Any, neutral: Any) -> bool:
    return value is None or value == neutral or value is False or (value == 1 and neutral is None)


def _as_tuple(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
