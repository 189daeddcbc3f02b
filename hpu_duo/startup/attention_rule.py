"""Resolution of a user's attention rule."""

from __future__ import annotations

from bias_builders import Rule
from hpu_duo.attention_rules import make_attention_rule
from hpu_duo.config import EngineConfig


def resolve_attention_rule(config: EngineConfig) -> Rule | None:
    """Return the rule of the heads that would stream under a pattern, or of all; None where there is none.

    Raises:
        ValueError: the rule is unknown, or the engine is asked for something that rules do not go with.
    """
    text = config.heads.attention_rule
    if text is None:
        return None
    rule = make_attention_rule(text)
    refused = {
        "tensor_parallel_size of 1": config.parallel.tensor_parallel_size > 1,
        "kv_policy=None": config.cache.kv_policy is not None,
    }
    for expected, is_asked in refused.items():
        if is_asked:
            raise ValueError(f"attention_rule={text!r} is served with {expected} only")
    return rule
