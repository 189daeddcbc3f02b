"""Prefixes of requests with a KV budget: taking them up changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpu_duo import HeadPattern, HPUDuoModel
from tests.modeling.budget_driving import Seen, assert_follows, run_budget
from tests.modeling.families import BLOCK, Zoo, prompts_of

BUDGET, CHUNK, NUM_NEW = 9, 2 * BLOCK, 6
MASK = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1]], np.bool_)
PATTERN = HeadPattern(MASK.astype(np.float32), 2, 3, retrieval=MASK)
HEADS = [np.flatnonzero(~retrieves).tolist() for retrieves in MASK]


def load(zoo: Zoo, policy: str, **options: Any) -> HPUDuoModel:
    defaults = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": CHUNK + 4,
        "max_model_len": 100,
        "attention": "reference",
    }
    budget = {"kv_policy": policy, "kv_budget": BUDGET, "kv_chunk": CHUNK}
    path = zoo.load("llama_mha")[1]
    return HPUDuoModel.from_pretrained(path, block_size=BLOCK, **{**defaults, **budget, **options})


def assert_exact(
    zoo: Zoo, seen: Sequence[Seen], prompts: Sequence[list[int]], policy: str, heads: Any
) -> None:
    numbers = {"budget": BUDGET, "chunk": CHUNK, "heads": heads, "policy": policy}
    assert_follows(zoo.load("llama_mha")[0], seen, prompts, **numbers)


ROTARY = [
    ("streaming-llm:positions=cache", None),
    ("h2o:positions=cache", PATTERN),
    ("expected-attention:sink=2,future=20", None),
]


@pytest.mark.parametrize(
    ("policy", "pattern"), [("h2o", None), ("tova", None), ("h2o", PATTERN), *ROTARY], ids=str
)
def test_a_later_request_takes_up_chunks_and_keeps_what_it_would_keep_alone(
    zoo: Zoo, policy: str, pattern: HeadPattern | None
) -> None:
    served, heads = load(zoo, policy, pattern=pattern), None if pattern is None else HEADS
    document, *questions = prompts_of([2 * CHUNK + 3, 5, 9, 1])
    first = run_budget(served, [document], NUM_NEW)
    prompts = [document, *([*document, *question] for question in questions)]
    # The last one goes on behind an answer, which was decoded and is computed as a prompt now.
    prompts.append([*document, *first[0].new, *questions[0]])
    for prompt in prompts:
        assert_exact(zoo, run_budget(served, [prompt], NUM_NEW), [prompt], policy, heads)
    prefixes = served.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens == len(prompts) * 2 * CHUNK


def test_requests_that_arrive_together_compute_a_shared_beginning_once(zoo: Zoo) -> None:
    served = load(zoo, "h2o")
    beginning, *ends = prompts_of([CHUNK + 5, 20, 3, 9])
    prompts = [[*beginning, *end] for end in ends]
    assert_exact(zoo, run_budget(served, prompts, NUM_NEW), prompts, "h2o", None)
    prefixes = served.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens > 0


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 12)), min_size=2, max_size=6),
    st.sampled_from([None, PATTERN]),
)
def test_whatever_was_served_before_a_request_follows_the_definition(
    zoo: Zoo, texts: list[tuple[int, int, int]], pattern: HeadPattern | None
) -> None:
    served = load(zoo, "h2o", pattern=pattern, num_prefix_snapshots=2, num_blocks=16, max_model_len=60)
    beginnings = prompts_of([40, 40, 40, 40], seed=3)
    prompts = [
        [*beginnings[which][:length], *prompts_of([rest], seed=rest)[0]] for which, length, rest in texts
    ]
    half = len(prompts) // 2
    for some in (prompts[:half], prompts[half:]):
        heads = None if pattern is None else HEADS
        assert_exact(zoo, run_budget(served, some, NUM_NEW), some, "h2o", heads)


def test_a_context_ends_at_a_chunk_and_is_not_saved(zoo: Zoo, tmp_path: Any) -> None:
    served = load(zoo, "h2o")
    document, question = prompts_of([2 * CHUNK + 3, 4])
    with served.prefill(document) as context:
        answer = served.generate([question], context=context, max_new_tokens=NUM_NEW, eos_token_id=None)
        with pytest.raises(ValueError, match="without kv_policy"):
            context.save(tmp_path / "book.context")
    (alone,) = run_budget(load(zoo, "h2o", enable_prefix_caching=False), [[*document, *question]], NUM_NEW)
    assert answer[0][-NUM_NEW:].tolist() == alone.new


def test_samples_of_one_prompt_are_those_of_requests_of_their_own(zoo: Zoo) -> None:
    options = {"do_sample": True, "max_new_tokens": NUM_NEW, "eos_token_id": None, "seed": 4}
    prompt = prompts_of([2 * CHUNK + 3])
    cold = load(zoo, "h2o", enable_prefix_caching=False).generate(prompt, num_return_sequences=3, **options)
    warm = load(zoo, "h2o").generate(prompt, num_return_sequences=3, **options)
    assert warm.tolist() == cold.tolist()
    assert len({tuple(row) for row in cold.tolist()}) > 1


def test_chunks_that_do_not_end_with_blocks_are_refused_beside_a_prefix_cache(zoo: Zoo) -> None:
    with pytest.raises(ValueError, match="kv_chunk to be a multiple of block_size=8"):
        load(zoo, "h2o", kv_chunk=CHUNK - 1)
