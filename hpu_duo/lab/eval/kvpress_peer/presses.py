"""Presses of kvpress that come nearest to policies of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpu_duo.heads.eviction import TOVA, ExpectedAttention, HeavyHitters, SnapKV, StreamingLLM, make_kv_policy


@dataclass(frozen=True)
class Press:
    """A press by name.

    Attributes:
        name: of its class in kvpress.
        arguments: of its class, the compression ratio apart.
        attention: transformers' implementation that it needs; only ``eager`` returns weights.
    """

    name: str
    arguments: Mapping[str, float] = field(default_factory=dict)
    attention: str = "sdpa"

    def as_request(self) -> dict[str, object]:
        """The press, as the worker reads it."""
        return {"name": self.name, "arguments": dict(self.arguments), "attention": self.attention}


def press_of(policy: str) -> Press | None:
    """The press that comes nearest to a policy, with its options where it has them; None if there is none.

    ``ObservedAttentionPress`` divides a token's sum of weights by the number of queries that saw it, which
    ``h2o`` does not, and protects no recent tokens. ``TOVAPress`` always keeps the newest token. All presses
    keep the positions of the text.

    Args:
        policy: ``kv_policy``, with options behind it.

    Raises:
        ValueError: there is no such policy.
    """
    found = make_kv_policy(policy)
    if found.positions_in_cache:
        return None
    match found:
        case HeavyHitters():
            return Press("ObservedAttentionPress", attention="eager")
        case TOVA():
            return Press("TOVAPress")
        case StreamingLLM():
            return Press("StreamingLLMPress", {"n_sink": found.sink})
        case SnapKV():
            return Press("SnapKVPress", {"window_size": found.window, "kernel_size": found.kernel})
        case ExpectedAttention():
            options = {"n_sink": found.sink, "n_future_positions": found.future, "epsilon": found.epsilon}
            return Press("ExpectedAttentionPress", options)
        case _:
            return None
