"""A kind of row state that the package does not know is right whatever happens to its row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphs.backends.compile import CompileBackend
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.modeling.probe import ROW_KINDS
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import MAX_LEN, PATTERN, Tiny, serve, tokens_of
from tests.engine.token_counter import TokenCounter, counting, registered
from tests.modeling.families import BLOCK, prompts_of
from tests.tiers import crossed

pytestmark = pytest.mark.instruction_set

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PATTERNS = pytest.mark.parametrize("pattern", [None, PATTERN], ids=["full", "duo"])
ROW_BYTES = 4 + 3 * 2 * 4


@pytest.fixture(autouse=True)
def _counts() -> Iterator[None]:
    with registered():
        yield


def plain_tokens(tiny: Tiny, prompts: list[list[int]], params: Any = GREEDY) -> Any:
    ROW_KINDS.clear()
    return tokens_of(serve(tiny.load(enable_prefix_caching=False), prompts, params))


@PATTERNS
def test_memory_is_planned_and_taken_to_the_byte(tiny: Tiny, pattern: HeadPattern | None) -> None:
    served = tiny.load(pattern=pattern, num_prefix_snapshots=2)
    store = served.engine.runner.store
    assert store.num_bytes == store.plan.total_bytes
    assert [state.row_bytes for state in store.row_states if "counter" in state.name] == [ROW_BYTES]
    assert sum(state.row_bytes for state in store.row_states) == store.plan.row_bytes
    assert sum(state.num_bytes for state in store.row_states) == store.plan.row_bytes * (4 + 2 + 1)
    ROW_KINDS.clear()
    without = tiny.load(pattern=pattern, num_prefix_snapshots=2).engine.runner.store.plan
    assert store.plan.row_bytes - without.row_bytes == ROW_BYTES
    assert store.plan.block_bytes == without.block_bytes


@pytest.mark.parametrize(
    ("graphs", "pattern"),
    crossed(
        {"eager": "eager", "replay": "replay", "compile": CompileBackend("eager")},
        {"full": None, "duo": PATTERN},
        fast=("eager", "replay"),
    ),
)
def test_plain_requests_are_counted_in_chunks_batches_and_moved_rows(
    tiny: Tiny, pattern: HeadPattern | None, graphs: Any
) -> None:
    prompts = prompts_of((13, 5, 22, 9, 40, 3))
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 9, 2, 14, 5, 8)]
    served = tiny.load(pattern=pattern, graphs=graphs, enable_prefix_caching=False)
    with counting(served):
        tokens = tokens_of(serve(served, prompts, params))
    if pattern is None:
        assert tokens == plain_tokens(tiny, prompts, params)


@PATTERNS
def test_a_hit_begins_with_the_count_at_its_end(tiny: Tiny, pattern: HeadPattern | None) -> None:
    served = tiny.load(pattern=pattern)
    document, *questions = prompts_of((3 * BLOCK + 3, 5, 9, 1))
    with counting(served):
        for question in questions:
            served.engine.generate([[*document, *question]], GREEDY)
    prefixes = served.stats().prefixes
    assert prefixes is not None
    # The first prompt's last border is that of the document, or one behind it; the third hits its branch.
    assert prefixes.num_hit_tokens >= 3 * BLOCK
    assert prefixes.snapshot_bytes == prefixes.num_snapshots * served.engine.runner.store.plan.row_bytes


@PATTERNS
def test_samples_of_one_prompt_are_counted_each(tiny: Tiny, pattern: HeadPattern | None) -> None:
    served = tiny.load(pattern=pattern)
    several = SamplingParams(temperature=1.0, n=3, max_tokens=7, ignore_eos=True, seed=3)
    with counting(served):
        serve(served, prompts_of((2 * BLOCK + 5, 9)), several)


@pytest.mark.parametrize(
    ("pattern", "caches"), crossed({"full": None, "duo": PATTERN}, {"cached": True, "cold": False})
)
def test_preempted_requests_are_counted_again(tiny: Tiny, pattern: HeadPattern | None, caches: bool) -> None:
    prompts = prompts_of((13, 5, 22, 9))
    served = tiny.load(pattern=pattern, num_blocks=9, max_model_len=60, enable_prefix_caching=caches)
    with counting(served):
        tokens = tokens_of(serve(served, prompts, GREEDY))
    assert served.stats().num_preemptions > 0
    if pattern is None:
        assert tokens == plain_tokens(tiny, prompts)


@PATTERNS
def test_a_saved_context_has_the_count_of_its_document(
    tiny: Tiny, pattern: HeadPattern | None, tmp_path: Path
) -> None:
    document, question = prompts_of((3 * BLOCK + 3, 5))
    saving = tiny.load(pattern=pattern)
    with counting(saving), saving.prefill(document) as context:
        context.save(tmp_path / "document")
    served = tiny.load(pattern=pattern, max_num_seqs=2)
    with counting(served), served.load_context(tmp_path / "document") as context:
        [[sample]] = served.engine.generate([context.prompt(question)], GREEDY, context=context.hold())
        assert sample.num_cached_tokens == 3 * BLOCK
    ROW_KINDS.clear()
    with pytest.raises(ValueError, match=r"layers\.1\.token_counter\.count"):
        tiny.load(pattern=pattern).load_context(tmp_path / "document")


def test_tokens_are_not_taken_back_from_states_that_cannot(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="expected decode_len=1 for a model with states that cannot take"):
        tiny.load(decode_len=2)


def test_a_kind_is_registered_under_its_own_name(tiny: Tiny) -> None:
    ROW_KINDS["counter"] = lambda *_: TokenCounter(1)
    with pytest.raises(ValueError, match=r"expected a row state of kind 'counter', .* got 'token_counter'"):
        tiny.load()


@pytest.fixture(scope="module", params=[None, PATTERN], ids=["full", "duo"])
def tight(tiny: Tiny, request: pytest.FixtureRequest) -> HPUDuoModel:
    with registered():
        return tiny.load(pattern=request.param, num_blocks=14, max_num_seqs=3, num_prefix_snapshots=3)


PROMPTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 5 * BLOCK), st.integers(0, 9), st.integers(1, 12)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PROMPTS, st.sampled_from([1, 1, 2, 3]))
def test_counts_are_right_in_random_traffic(tight: HPUDuoModel, drawn: list[Any], num_samples: int) -> None:
    """Prompts begin with one of a few texts, so they hit, branch, evict and preempt each other."""
    texts, ends = prompts_of((5 * BLOCK,) * 3), prompts_of((9,), seed=5)[0]
    prompts = [[*texts[text][:length], *ends[:end]] for text, length, end, _ in drawn]
    params = [
        SamplingParams(temperature=1.0, seed=1, n=num_samples, max_tokens=new, ignore_eos=True)
        for *_, new in drawn
    ]
    assert max(map(len, prompts)) + 12 <= MAX_LEN
    with counting(tight):
        serve(tight, prompts, params)
