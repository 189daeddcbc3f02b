"""The ranges of the numbers in a config.json.

transformers before 5 accepts any number as a size, and fails in the middle of a layer; later versions accept
some.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
_NUM_EXPERTS = Range(0, 65_536, is_whole=True)  # Dense models of a family with experts say 0.
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

    Fields that are null are taken for absent.

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
