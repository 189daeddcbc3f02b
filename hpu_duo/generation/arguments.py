"""transformers' generation arguments in terms of ours."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin

from hpu_duo.modeling.transformers_internals import FROM_MODEL_CONFIG
from hpu_duo.sampling import SamplingParams

SIGNATURE = frozenset(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
"""Arguments that are no fields of ``GenerationConfig``. Those not named in our ``generate`` may be None."""

SAMPLED = frozenset(
    {
        "do_sample",
        "eos_token_id",
        "max_length",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "min_p",
        "num_return_sequences",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "repetition_penalty",
        "return_dict_in_generate",
        "stop_strings",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Fields that the device's sampler and the engine implement."""

PROCESSED = frozenset(
    {
        "bad_words_ids",
        "begin_suppress_tokens",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "no_repeat_ngram_size",
        "remove_invalid_values",
        "renormalize_logits",
        "sequence_bias",
        "suppress_tokens",
        "watermarking_config",
    }
)
"""Fields that transformers' own processors implement, on the host."""

WARPED = frozenset({"epsilon_cutoff", "eta_cutoff", "top_h", "typical_p"})
"""The same for fields that have an effect only where tokens are drawn."""

WITHOUT_EFFECT = frozenset(
    {
        # Nothing about the tokens, or of caches, encoders and texts that are not there.
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "continuous_batching_config",
        "decoder_start_token_id",
        "disable_compile",
        "generation_kwargs",
        "max_cache_len",
        "prefill_chunk_size",
        "return_legacy_cache",
        # transformers needs a tokenizer for stop strings; here it is the checkpoint's.
        "tokenizer",
        "transformers_version",
        "use_cache",
        FROM_MODEL_CONFIG,
        # Options of beam search or contrastive search, which are unsupported.
        "diversity_penalty",
        "early_stopping",
        "length_penalty",
        "low_memory",
    }
)
"""Fields that change nothing for transformers either, in what is served here."""

OURS = frozenset(
    {"seed", "logit_bias", "presence_penalty", "frequency_penalty", "ignore_eos", "stop_token_ids"}
)
"""Arguments that transformers does not have."""

DRAFTED = frozenset({"num_assistant_tokens", "prompt_lookup_num_tokens", "use_mtp"})
"""Fields of whether and how much to draft, which change no token; the last one from transformers 5.24 on."""

ASSISTED = frozenset(
    {
        "assistant_confidence_threshold",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "max_matching_ngram_size",
        "num_assistant_tokens_schedule",
        "target_lookbehind",
    }
)
"""Further fields of how drafts are made, which are refused where a call asks for drafts."""

ACCEPTED = (
    SAMPLED
    | WITHOUT_EFFECT
    | ASSISTED
    | ((DRAFTED | PROCESSED | WARPED) & frozenset(vars(GenerationConfig())))
)
"""All accepted fields; those of processors and drafts only if the installed transformers has them."""

_NEUTRAL: dict[str, Any] = {
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "prompt_lookup_num_tokens": 0,
    "typical_p": 1.0,
}


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a value of a field has no effect."""
    if value is None or value is False or (isinstance(value, list | tuple | dict) and not value):
        return True
    # True equals 1, but enables something.
    return value is not True and name in _NEUTRAL and bool(value == _NEUTRAL[name])


_STOPPING = {"ignore_eos", "stop_token_ids"}

DEFAULT_NEW_TOKENS = 20
"""transformers' default number of new tokens."""

DEFAULT_TOP_K = 50
"""transformers' default when it samples."""


@dataclass(frozen=True)
class GenerationRequest:
    """The arguments of a call of ``generate``.

    Attributes:
        config: the fields that have an effect; None for those that were not set.
        ours: arguments that transformers does not have.
        pad_token_id: fills the right of shorter rows.
        eos_token_ids: tokens that end a row.
        guesses_padding: whether pad ids in front of a prompt are padding when there is no mask.
    """

    config: GenerationConfig
    ours: Mapping[str, Any]
    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    guesses_padding: bool

    @property
    def num_samples(self) -> int:
        """Rows returned for each prompt."""
        return _check_count("num_return_sequences", _or(self.config.num_return_sequences, 1), 1)

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn, not chosen."""
        return bool(self.config.do_sample)

    @property
    def returns_dict(self) -> bool:
        """Whether a ``GenerateDecoderOnlyOutput`` is wanted instead of the sequences alone."""
        return bool(self.config.return_dict_in_generate)

    @property
    def returns_scores(self) -> bool:
        """Whether the scores of all tokens are wanted, as processors leave them."""
        return self.returns_dict and bool(self.config.output_scores)

    @property
    def returns_logits(self) -> bool:
        """Whether raw scores of all tokens are requested."""
        return self.returns_dict and bool(self.config.output_logits)

    @property
    def needs_processors(self) -> bool:
        """Whether some field is not the device sampler's, so that transformers' processors are needed."""
        names = PROCESSED | WARPED if self.draws else PROCESSED
        return any(not asks_for_nothing(name, getattr(self.config, name, None)) for name in names)

    @property
    def drafts_itself(self) -> bool:
        """Whether drafts of the model's own layer of multi-token prediction are wanted."""
        return bool(getattr(self.config, "use_mtp", None))

    def speculate(self, *, is_assisted: bool) -> bool | int:
        """Return ``SamplingParams.speculate``: the most drafts of a step; True = as the engine is set up.

        Args:
            is_assisted: whether the call has an assistant.

        Raises:
            ValueError: a number of drafts is none, there are two ways to draft, or a field that
                ``speculative_config`` takes the place of.
        """
        lookup = self.config.prompt_lookup_num_tokens
        is_own = self.drafts_itself
        if lookup or is_assisted or is_own:
            for name in sorted(ASSISTED):
                if (value := getattr(self.config, name)) is not None:
                    raise ValueError(
                        f"{name}: expected None, got {value!r:.80}; how drafts are made is set by "
                        "speculative_config of from_pretrained"
                    )
        if lookup:
            if is_assisted or is_own:
                other = "assistant_model" if is_assisted else "use_mtp"
                raise ValueError(f"expected {other} or prompt_lookup_num_tokens, got both")
            return _check_count("prompt_lookup_num_tokens", lookup, 1)
        most = self.config.num_assistant_tokens
        if not (is_assisted or is_own) or most is None:
            return True
        return _check_count("num_assistant_tokens", most, 1)

    def params_for(self, input_len: int) -> SamplingParams:
        """Sampling parameters of a prompt of ``input_len`` tokens, left padding included.

        Raises:
            ValueError: a value is out of range, or the prompt already fills ``max_length``.
        """
        c = self.config
        if c.do_sample and c.temperature == 0:
            raise ValueError("temperature: expected a value above 0 with do_sample=True, got 0")
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
            stop_like_transformers=True,
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
        max_length = _check_count("max_length", c.max_length, 1)
        if max_length <= input_len:
            raise ValueError(
                f"max_length: expected more than the {input_len} prompt tokens, got {max_length}"
            )
        return max_length - input_len


def read_generation(
    default: GenerationConfig, given: GenerationConfig | None, kwargs: Mapping[str, Any], vocab_size: int
) -> GenerationRequest:
    """Merge the model's defaults, a ``GenerationConfig`` and keyword arguments, the last one first.

    Raises:
        ValueError: an argument that is unknown, known to transformers and not supported here, or of a
            wrong type; an eos id that is not in the vocabulary.
    """
    if given is not None and not isinstance(given, GenerationConfig):
        raise ValueError(f"generation_config: expected a GenerationConfig, got {type(given).__name__}")
    fields = set(GenerationConfig().to_dict())
    unknown = sorted(
        name
        for name, value in kwargs.items()
        if name not in fields | ACCEPTED | OURS and not (name in SIGNATURE and asks_for_nothing(name, value))
    )
    if unknown:
        raise ValueError(f"unknown or unsupported generation arguments: {', '.join(unknown)}")
    # Configurations may have unknown fields, which transformers ignores too.
    asked = {name: value for name, value in _set_fields(default).items() if name in fields}
    if "eos_token_id" in asked:  # tokens that the model does not have are never sampled
        asked["eos_token_id"] = [t for t in as_eos_ids(asked["eos_token_id"]) if t < vocab_size]
    asked |= {name: value for name, value in _set_fields(given).items() if name in fields | OURS}
    asked |= {name: value for name, value in kwargs.items() if name not in OURS}
    unsupported = sorted(
        name for name, value in asked.items() if name not in ACCEPTED and not asks_for_nothing(name, value)
    )
    if unsupported:
        raise ValueError(f"generation arguments that are not supported: {', '.join(unsupported)}")
    _check_cache(asked.get("cache_implementation"))
    config = GenerationConfig()
    for name in ACCEPTED:
        setattr(config, name, asked.get(name))
    ours = {name: value for name, value in kwargs.items() if name in OURS}
    _check_ours(ours)
    eos = as_eos_ids(config.eos_token_id)
    if any(token >= vocab_size for token in eos):
        raise ValueError(f"eos_token_id: expected token ids below {vocab_size}, got {config.eos_token_id!r}")
    pad = None if config.pad_token_id is None else _as_token_id("pad_token_id", config.pad_token_id)
    guesses_padding = pad is not None and pad not in eos
    if pad is None:
        pad = eos[0] if eos else 0
    return GenerationRequest(config, ours, pad, () if ours.get("ignore_eos") else eos, guesses_padding)


def _check_cache(name: Any) -> None:
    """Raise ValueError for caches unknown to transformers; known ones are ignored here."""
    try:
        GenerationConfig(cache_implementation=name)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"cache_implementation: expected a cache of transformers, got {name!r}: {error}"
        ) from error


def as_eos_ids(value: Any) -> tuple[int, ...]:
    """Read ``eos_token_id``: none, one or several token ids; negative ones are left out.

    Raises:
        ValueError: ``value`` is anything else.
    """
    return tuple(token for token in _as_integers("eos_token_id", value) if token >= 0)


def as_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Read the field ``name``: none, one or several token ids.

    Raises:
        ValueError: ``value`` is anything else.
    """
    tokens = _as_integers(name, value)
    return tuple(_as_token_id(name, token) for token in tokens)


def _as_integers(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.tolist()
    several = value if isinstance(value, list | tuple) else (value,)
    return tuple(_as_integer(name, token) for token in several)


def _as_integer(name: str, value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name}: expected a token id, an integer >= 0, got {value!r}")


def _as_token_id(name: str, value: Any) -> int:
    token = _as_integer(name, value)
    if token < 0:
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
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(
            f"stop_strings: expected a non-empty string or a list of such strings, got {value!r}"
        )
    return tuple(texts)


def _set_fields(config: GenerationConfig | None) -> dict[str, Any]:
    """Return the fields of a configuration that differ from an empty one's."""
    if config is None:
        return {}
    neutral = GenerationConfig().to_dict()
    return {
        name: getattr(config, name, value)
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name != "transformers_version" and value != neutral.get(name)
    }


def _check_count(name: str, value: Any, minimum: int) -> int:
    try:
        count = minimum - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = minimum - 1
    if count < minimum:
        raise ValueError(f"{name}: expected an integer >= {minimum}, got {value!r}")
    return count


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
