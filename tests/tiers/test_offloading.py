"""Prefixes that were evicted to host memory, in the engine: the same tokens, and fewer of them computed."""

from __future__ import annotations

from typing import Any

import pytest

from hpu_duo import HPUDuoModel, SamplingParams
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import BLOCK, prompts_of

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = {"num_blocks": 24, "num_prefix_snapshots": 6, "max_model_len": 80}
HOST = {**SMALL, "kv_offloading_size": 0.05}
DUO = {"pattern": PATTERN}
BUDGET = {"kv_policy": "h2o", "kv_budget": 16, "kv_chunk": 8}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "duo": DUO,
    "codes": {"kv_cache_dtype": "int8_per_token_head", **DUO},
    "streaming": {"pattern": PATTERN, "threshold": 2.0},
    "budget": BUDGET,
}
TEXTS = prompts_of((5 * BLOCK + 3, 6 * BLOCK + 1, 7 * BLOCK, 4 * BLOCK + 2, 6 * BLOCK + 3, 5 * BLOCK), seed=3)


def answers(served: HPUDuoModel, rounds: int = 3) -> list[list[list[list[int]]]]:
    """Tokens of all texts, one after the other, round after round: each comes back when it is evicted."""
    return [[tokens_of(serve(served, [text], GREEDY))[0] for text in TEXTS] for _ in range(rounds)]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_come_back_from_the_host_have_the_same_tokens(tiny: Tiny, kind: str) -> None:
    plain, tiered = tiny.load(**SMALL, **KINDS[kind]), tiny.load(**HOST, **KINDS[kind])
    assert answers(tiered) == answers(plain)
    tiers = tiered.engine.scheduler.allocations.tiers
    assert tiers is not None
    assert tiers.counters.num_loaded > 0
    assert tiers.counters.num_hit_tokens > 5 * BLOCK
    assert tiered.stats().prefixes.num_hit_tokens > plain.stats().prefixes.num_hit_tokens + 5 * BLOCK
