"""Arguments of transformers' ``generate`` by their treatment; ``docs/compatibility.md`` lists them."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationConfig, GenerationMixin

from hpu_duo.modeling.transformers_internals import FROM_MODEL_CONFIG

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
        # transformers wants a tokenizer beside stop strings; here it is the checkpoint's.
        "tokenizer",
        "transformers_version",
        "use_cache",
        FROM_MODEL_CONFIG,
        # Of beams, an assistant or contrastive search, which are refused where they are asked for.
        "assistant_confidence_threshold",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "diversity_penalty",
        "early_stopping",
        "length_penalty",
        "low_memory",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "target_lookbehind",
    }
)
"""Fields that change nothing for transformers either, in what is served here."""

OURS = frozenset(
    {"seed", "logit_bias", "presence_penalty", "frequency_penalty", "ignore_eos", "stop_token_ids"}
)
"""Arguments that transformers does not have."""

ACCEPTED = SAMPLED | WITHOUT_EFFECT | ((PROCESSED | WARPED) & frozenset(vars(GenerationConfig())))
"""All accepted fields; those of processors only if the installed transformers has them."""

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
    # True equals 1, and asks for something.
    return value is not True and name in _NEUTRAL and bool(value == _NEUTRAL[name])
