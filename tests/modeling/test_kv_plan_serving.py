"""Engines under a KV plan follow it through preemptions, cached prefixes and whatever runs beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpu_duo import HPUDuoModel
from hpu_duo.config.kv_plan import Keep, KVPlan
from tests.modeling.budget_driving import run_budget
from tests.modeling.families import BLOCK, Zoo, prompts_of
from tests.modeling.plan_driving import ALL, CHUNK, GROUPED, H2O, MIXED, RING, TOVA, assert_follows, load

GRID, NUM_NEW = 2 * BLOCK, 6
SNAPKV, OLDEST = Keep("snapkv:window=3,kernel=3", 8), Keep("streaming-llm:sink=2", 7)
SINGLE = KVPlan(((ALL,), (H2O,), (SNAPKV,), (RING,)))
MANY = KVPlan(
    (
        (SNAPKV, ALL, OLDEST, RING),
        (H2O, TOVA, SNAPKV, OLDEST),
        (ALL, ALL, TOVA, TOVA),
        (OLDEST, RING, RING, H2O),
    )
)
MODELS = [("llama_mha", MIXED), ("llama_mha", MANY), ("llama", GROUPED), ("llama_mqa", SINGLE)]


def load_caching(zoo: Zoo, name: str, plan: KVPlan, **options: Any) -> HPUDuoModel:
    defaults = {
        "kv_chunk": GRID,
        "enable_prefix_caching": True,
        "max_num_seqs": 4,
        "max_chunk_rows": 1,
        "max_num_batched_tokens": GRID + 4,
        "max_model_len": 100,
    }
    return load(zoo, name, plan, **{**defaults, **options})


def assert_serves(
    zoo: Zoo, name: str, served: HPUDuoModel, plan: KVPlan, prompts: Sequence[Sequence[int]]
) -> None:
    seen = run_budget(served, prompts, NUM_NEW)
    assert_follows(zoo, name, served, plan, seen, chunk=GRID, prompts=prompts)


@pytest.mark.parametrize(("name", "plan"), MODELS)
def test_a_preempted_request_comes_to_the_same_state_again(zoo: Zoo, name: str, plan: KVPlan) -> None:
    served = load(zoo, name, plan, num_blocks=9, max_model_len=60)
    prompts, preempted = prompts_of([19, 13, 22]), []
    seen = run_budget(served, prompts, 16, preempted)
    assert_follows(zoo, name, served, plan, seen, chunk=CHUNK, prompts=prompts)
    assert preempted


@pytest.mark.parametrize(("name", "plan"), MODELS)
def test_later_requests_take_up_chunks_and_keep_what_they_would_keep_alone(
    zoo: Zoo, name: str, plan: KVPlan
) -> None:
    served = load_caching(zoo, name, plan)
    document, *questions = prompts_of([2 * GRID + 3, 5, 1])
    assert_serves(zoo, name, served, plan, [document])
    prompts = [[*document, *question] for question in questions]
    assert_serves(zoo, name, served, plan, prompts)
    prefixes = served.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens == len(prompts) * 2 * GRID


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([ALL, RING, H2O, TOVA, SNAPKV, OLDEST]), min_size=8, max_size=8),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 36), st.integers(1, 9)), min_size=2, max_size=5),
    st.sampled_from([12, 24]),
)
def test_whatever_plan_and_whatever_runs_beside_heads_follow_their_definitions(
    zoo: Zoo, keeps: list[Keep], texts: list[tuple[int, int, int]], num_blocks: int
) -> None:
    layers = (tuple(keeps[:4]), tuple(keeps[4:]))
    plan = KVPlan((*layers, *layers[::-1]))
    options = {"num_prefix_snapshots": 2, "num_blocks": num_blocks, "max_model_len": 60}
    if not any(keep == ALL for keep in keeps):
        del options["num_blocks"]
    # Without a budget there is no grid of chunks.
    grid = {} if plan.has_budgets else {"kv_chunk": None}
    served = load_caching(zoo, "llama_mha", plan, **options, **grid)
    beginnings = prompts_of([36, 36], seed=3)
    prompts = [
        [*beginnings[which][:length], *prompts_of([rest], seed=rest)[0]] for which, length, rest in texts
    ]
    half = len(prompts) // 2
    for some in (prompts[:half], prompts[half:]):
        assert_serves(zoo, "llama_mha", served, plan, some)
