"""Heads with a KV budget on several ranks: the tokens and the kept positions of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graphs import BucketTable
from hpu_duo import HPUDuoModel
from hpu_duo.config.kv_plan import Keep, KVPlan
from hpu_duo.device import run_processes
from hpu_duo.heads import HeadPattern
from hpu_duo.sampling import SamplingParams
from tests.modeling.families import BLOCK, Zoo, prompts_of
from tests.modeling.test_shared_budgets import shared
from tests.ranks.test_serving import captured_ahead, counted_alike
from tests.ranks.work import Answer, Case, serve, serve_here
from tests.tiers import every

pytestmark = pytest.mark.usefixtures("forked_ranks")

GREEDY = SamplingParams(max_tokens=9, temperature=0)
LENGTHS = (5, 37, 18)
BUDGET, CHUNK = 9, 6
POLICIES = (
    "h2o",
    "snapkv:window=3,kernel=3",
    "expected-attention:sink=2,future=20",
    "tova:protect=2",
    "streaming-llm:positions=cache",
    "h2o:positions=cache",
    "local",
)
BY_POSITION = ("streaming-llm:sink=2", "fixed:stride=32,columns=1", "strided:stride=16")
MASK = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1]], np.bool_)
PATTERN = HeadPattern(MASK.astype(np.float32), 2, 3, retrieval=MASK)
ALL, RING = Keep(), Keep("ring:sink=2,recent=5")
H2O, SMALL, TOVA = Keep("h2o", BUDGET), Keep("h2o", 5), Keep("tova:protect=2", BUDGET)
PLAN = KVPlan(
    (
        (ALL, H2O, RING, ALL),
        (H2O, SMALL, ALL, H2O),
        (TOVA, SMALL, TOVA, H2O),
        (RING, RING, RING, RING),
    )
)
"""Ranks share TOVA's heads evenly, others as they come."""
FEW_BLOCKS = KVPlan(((H2O, SMALL, H2O, ALL), *((H2O, RING, SMALL, H2O),) * 3))
"""One rank alone has a head that keeps blocks."""


DRAFTS: dict[str, Any] = {
    "speculative_config": {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 3, 3]],
    }
}


WHOLE: dict[str, Any] = {
    "cache": {"kv_prompt": "whole", "kv_chunk": None},
    "scheduler": {"max_num_batched_tokens": 66},
}


def case_of(zoo: Zoo, name: str, policy: str = "", **settings: dict[str, Any]) -> Case:
    """Requests of a model whose heads have a budget, or keep what the cache's settings say."""
    prompts = prompts_of(LENGTHS, seed=3)
    cache: dict[str, Any] = {"kv_chunk": CHUNK, "enable_prefix_caching": False}
    if policy:
        cache |= {"kv_policy": policy, "kv_budget": 40 if policy in BY_POSITION[1:] else BUDGET}
    scheduler = {"max_model_len": 64, "max_chunk_rows": 2, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    return Case(
        zoo.load(name)[1],
        prompts,
        [GREEDY] * len(prompts),
        cache={**cache, **settings.pop("cache", {})},
        scheduler={**scheduler, **settings.pop("scheduler", {})},
        **settings,
    )


def twice(case: Case) -> Case:
    """The same requests one after the other, and again, with cached prefixes."""
    cache = {"enable_prefix_caching": True, "kv_chunk": 2 * BLOCK, "num_prefix_snapshots": 8}
    scheduler = {"max_num_seqs": 2, "max_chunk_rows": 1}
    return replace(
        case,
        prompts=[*case.prompts, *case.prompts],
        params=[*case.params, *case.params],
        cache={**case.cache, **cache},
        scheduler={**case.scheduler, **scheduler},
    )


@pytest.fixture(scope="module")
def cases(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Policies whose scores are summed over ranks or not, by each way to share heads."""
    path = tmp_path_factory.mktemp("shared_keys")
    shared(path)
    duo = {"heads": {"pattern": PATTERN}}
    return {
        "h2o": case_of(zoo, "llama", "h2o"),
        "tova": case_of(zoo, "llama", "tova:protect=2"),
        # One key/value head, of which both ranks hold a copy.
        **{f"copies, {policy}": case_of(zoo, "llama_mqa", policy) for policy in (POLICIES[0], POLICIES[4])},
        "plan": case_of(zoo, "llama_mha", cache={"kv_plan": PLAN}),
        "preempted": case_of(
            zoo,
            "llama_mha",
            "tova:protect=2",
            **duo,
            cache={"num_blocks": 9},
            scheduler={"max_model_len": 46},
        ),
        "prefixes": twice(case_of(zoo, "llama_mqa", "h2o")),
        "layers share keys": replace(case_of(zoo, "llama", "tova:protect=2"), path=path),
    }


@pytest.fixture(scope="module")
def more_cases(zoo: Zoo) -> dict[str, Case]:
    """Every policy and every other reason once, each in one of the ways to share heads."""
    duo = {"heads": {"pattern": PATTERN}}
    return {
        **{policy: case_of(zoo, "llama", policy) for policy in (POLICIES[2], *BY_POSITION[::2])},
        **{
            f"copies, {policy}": case_of(zoo, "llama_mqa", policy)
            for policy in (POLICIES[1], POLICIES[3], BY_POSITION[1])
        },
        **{f"pattern, {policy}": case_of(zoo, "llama_mha", policy, **duo) for policy in POLICIES[5:]},
        "few blocks, prefixes": twice(case_of(zoo, "llama_mha", cache={"kv_plan": FEW_BLOCKS})),
        "pattern, prefixes": twice(case_of(zoo, "llama_mha", "tova:protect=2", **duo)),
        "whole prompts": case_of(zoo, "llama", "tova:protect=2", **WHOLE),
        "whole prompts in chunks, pattern": case_of(
            zoo, "llama_mha", "snapkv:window=3,kernel=3", cache={"kv_prompt": "whole"}, **duo
        ),
        "copies, replayed": case_of(zoo, "llama_mqa", "h2o", graph={"backend": "replay"}),
        "copies, drafts": case_of(zoo, "llama_mqa", "h2o", scheduler=DRAFTS),
        "tova, drafts": case_of(zoo, "llama", "tova:protect=2", scheduler=DRAFTS),
        "gemma2, h2o": case_of(zoo, "gemma2", "h2o"),
        "phi3, tova": case_of(zoo, "phi3", "tova:protect=2"),
    }


@pytest.fixture(scope="module")
def further_cases(zoo: Zoo) -> dict[str, Case]:
    """Each policy the other ways, and further families."""
    duo = {"heads": {"pattern": PATTERN}}
    return {
        **{policy: case_of(zoo, "llama", policy) for policy in (POLICIES[1], *POLICIES[4:], BY_POSITION[1])},
        **{f"pattern, {policy}": case_of(zoo, "llama_mha", policy, **duo) for policy in POLICIES[:5]},
        f"copies, {POLICIES[2]}": case_of(zoo, "llama_mqa", POLICIES[2]),
        "copies, strided": case_of(zoo, "llama_mqa", "strided:stride=16"),
        "replayed": case_of(zoo, "llama_mha", "tova:protect=2", **duo, graph={"backend": "replay"}),
        "plan, prefixes": twice(case_of(zoo, "llama_mha", cache={"kv_plan": PLAN})),
        "few blocks": case_of(zoo, "llama_mha", cache={"kv_plan": FEW_BLOCKS}),
        "whole prompts, copies": case_of(zoo, "llama_mqa", "h2o", **WHOLE),
        "whole prompts in chunks": case_of(zoo, "llama", "tova:protect=2", cache={"kv_prompt": "whole"}),
        "whole prompts in chunks, copies": case_of(zoo, "llama_mqa", "h2o", cache={"kv_prompt": "whole"}),
        "whole prompts in chunks, plan": case_of(
            zoo, "llama_mha", cache={"kv_prompt": "whole", "kv_plan": PLAN}
        ),
        **{f"{name}, h2o": case_of(zoo, name, "h2o") for name in ("olmo2", "qwen3_moe")},
        **{f"{name}, tova": case_of(zoo, name, "tova:protect=2") for name in ("gemma3", "qwen3")},
    }


def kept_by_all(answer: Answer, case: Case) -> Iterator[dict[tuple[str, int], np.ndarray]]:
    """Positions that all ranks hold of each layer, in the order of the heads of one rank."""
    size = len(answer.of_ranks)
    for index, layers in enumerate(zip(*(own.kept for own in answer.of_ranks), strict=True)):
        is_turned = "kv_plan" in case.cache and not case.parallel
        order = sorted(range(size), key=lambda rank: (rank + index) % size if is_turned else rank)
        kinds = dict.fromkeys(kind for layer in layers for kind in layer)
        yield {
            kind: np.concatenate([layers[rank][kind] for rank in order if kind in layers[rank]], axis=1)
            for kind in kinds
        }


def assert_as_one(cases: dict[str, Case], answers: dict[str, Answer]) -> dict[str, Answer]:
    """Compare tokens and kept positions with those of one rank, which are returned."""
    ones = {name: serve_here(case) for name, case in cases.items()}
    assert {name: answer.error for name, answer in answers.items() if answer.error} == {}
    assert [name for name in cases if answers[name].tokens != ones[name].tokens] == []
    for name, case in cases.items():
        whole = ones[name].seen["kept"]
        for index, (layer, expected) in enumerate(zip(kept_by_all(answers[name], case), whole, strict=True)):
            assert layer.keys() == expected.keys(), (name, index)
            for kind, kept in layer.items():
                copies = kept.shape[1] // expected[kind].shape[1]
                assert np.array_equal(kept, expected[kind].repeat(copies, axis=1)), (name, index, kind)
    return ones


def assert_bytes(case: Case, answer: Answer, one: Answer) -> None:
    """Check that ranks hold what their plans say, and that statistics add them up."""
    assert all(own.kv_bytes == own.planned_bytes for own in answer.of_ranks)
    size = len(answer.of_ranks)
    found, expected = (
        {(each.policy, each.num_slots): each for each in seen.seen["budgets"]} for seen in (answer, one)
    )
    assert found.keys() == expected.keys()
    for kind, stats in found.items():
        copies = stats.num_heads // expected[kind].num_heads
        assert copies in (1, size // 2, size)
        # Keys and values of 8 or 16 channels in float32, a position and a score.
        assert stats.bytes_per_request == copies * expected[kind].bytes_per_request
        assert stats.num_evictions == copies * expected[kind].num_evictions > 0


def test_two_ranks_keep_and_say_what_one_does(cases: dict[str, Case]) -> None:
    answers = run_processes(serve, (cases,), [{}] * 2, 600)[0]
    ones = assert_as_one(cases, answers)
    assert_served(cases, answers, ones)
    # Only what has to be summed is: weights of all heads of a layer, or of each copy of one.
    sums = {name: answer.seen["sums"] / answer.seen["steps"] for name, answer in answers.items()}
    assert sums["h2o"] == sums["copies, streaming-llm:positions=cache"] == 2 * 4 + 1
    assert sums["tova"] > sums["h2o"] < sums["copies, h2o"]


def assert_served(cases: dict[str, Case], answers: dict[str, Answer], ones: dict[str, Answer]) -> None:
    """Check memory and exchanges of all cases, and that what some are there for has happened."""
    for name, answer in answers.items():
        assert_bytes(cases[name], answer, ones[name])
        assert answer.seen["broadcasts"] == answer.seen["steps"]
        assert all(own.misses == own.late == 0 for own in answer.of_ranks)
        counted_alike(answer.seen, is_counted="replayed" not in name)
        assert (answer.seen["cached"] > 0) == ("prefixes" in name)
        assert (answer.seen["preemptions"] > 0) == (name == "preempted")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_ranks_keep_what_one_does_for_every_policy(more_cases: dict[str, Case]) -> None:
    answers = run_processes(serve, (more_cases,), [{}] * 2, 600)[0]
    assert_served(more_cases, answers, assert_as_one(more_cases, answers))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_ranks_keep_what_one_does_for_every_policy_the_other_way(further_cases: dict[str, Case]) -> None:
    answers = run_processes(serve, (further_cases,), [{}] * 2, 600)[0]
    assert_served(further_cases, answers, assert_as_one(further_cases, answers))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_four_ranks_keep_what_one_does(
    zoo: Zoo, cases: dict[str, Case], more_cases: dict[str, Case], further_cases: dict[str, Case]
) -> None:
    # Two ranks hold copies of each of two heads, or four of one.
    of_two = ("h2o", "tova", POLICIES[2], "strided:stride=16", "whole prompts in chunks")
    of_one = ("copies, h2o", "copies, tova:protect=2", "prefixes")
    known = {**further_cases, **more_cases, **cases}
    wanted = {name: known[name] for name in (*of_two, *of_one, "few blocks")}
    # A rank has one head of four, so all or none of a layer have TOVA's choice, or retrieve.
    plan = KVPlan(((H2O, SMALL, RING, ALL), (TOVA,) * 4, (ALL, ALL, H2O, ALL), (SMALL, H2O, H2O, SMALL)))
    wanted["plan"] = case_of(zoo, "llama_mha", cache={"kv_plan": plan})
    rows = np.array([[1] * 4, [0] * 4, [0] * 4, [1] * 4], np.bool_)
    pattern = HeadPattern(rows.astype(np.float32), 2, 3, retrieval=rows)
    wanted["pattern"] = case_of(zoo, "llama_mha", "tova:protect=2", heads={"pattern": pattern})
    answers = run_processes(serve, (wanted,), [{}] * 4, 600)[0]
    assert_served(wanted, answers, assert_as_one(wanted, answers))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", every(2, [4, 2]))
def test_ranks_that_deal_blocks_out_keep_what_one_does(zoo: Zoo, num_ranks: int) -> None:
    counts = ((3, 3, 3, 3), (1, 3, 0, 2))
    masks = [np.arange(4) < np.array(each)[:, None] for each in counts]
    patterns = [HeadPattern(mask.astype(np.float32), 2, 3, retrieval=mask) for mask in masks]
    common: dict[str, Any] = {"parallel": {"retrieval_parallel": "context"}}
    whole = {"cache": {"kv_prompt": "whole"}}
    # The last rank has no head with a budget in any layer.
    found = {
        f"{policy}, {counts[number]}": case_of(zoo, "llama_mha", policy, heads={"pattern": pattern}, **common)
        for number, pattern in enumerate(patterns)
        for policy in ("h2o", "snapkv:window=3,kernel=3")
    }
    plan = KVPlan(((ALL, H2O, RING, SMALL), (H2O, SMALL, H2O, H2O), (ALL, ALL, ALL, H2O), (RING,) * 4))
    found["plan"] = case_of(zoo, "llama_mha", cache={"kv_plan": plan}, **common)
    duo = {"heads": {"pattern": patterns[1]}}
    found["whole prompts"] = case_of(zoo, "llama_mha", "h2o", **duo, **whole, **common)
    answers = run_processes(serve, (found,), [{}] * num_ranks, 600)[0]
    ones = assert_as_one(found, answers)
    for name, case in found.items():
        assert_bytes(case, answers[name], ones[name])
        counted_alike(answers[name].seen, is_counted=True)


@pytest.mark.slow
def test_simulated_hpus_capture_everything_ahead(zoo: Zoo) -> None:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_chunk_rows": 1, "max_model_len": 48}
    common: dict[str, Any] = {"cache": {"num_blocks": 24}, "scheduler": limits}
    # Of the one head both ranks hold a copy.
    ones = {policy: case_of(zoo, "llama_mqa", policy, **common) for policy in ("h2o", "tova:protect=2")}
    cases = {
        policy: replace(case, model={"device": "hpu-sim"}, warms_up=True) for policy, case in ones.items()
    }
    answers = run_processes(serve, (cases,), [{}] * 2, 600)[0]
    for policy, case in ones.items():
        assert answers[policy].tokens == serve_here(case).tokens
        captured_ahead(answers[policy])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), every(2, [("llama", "tova"), ("llama_mqa", "h2o")]))
def test_sums_of_scores_compile(zoo: Zoo, name: str, policy: str) -> None:
    options = {
        "kv_policy": policy,
        "kv_budget": BUDGET,
        "kv_chunk": CHUNK,
        "max_model_len": 64,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 24,
        "max_chunk_rows": 2,
        "enable_prefix_caching": False,
        "block_size": BLOCK,
        "dtype": "float32",
    }
    path, prompts = zoo.load(name)[1], prompts_of(LENGTHS, seed=3)
    one = HPUDuoModel.from_pretrained(path, **options)  # type: ignore[arg-type]
    expected = one.generate(prompts, max_new_tokens=9, eos_token_id=None)
    table = BucketTable.from_strings(["csu/q24/s0/u0/l3"])
    two = HPUDuoModel.from_pretrained(
        path,
        tensor_parallel_size=2,
        graphs="compile",
        buckets=table,
        **options,  # type: ignore[arg-type]
    )
    assert torch.equal(two.generate(prompts, max_new_tokens=9, eos_token_id=None), expected)
    stats = two.stats()
    assert (stats.resolved.graphs, stats.num_graph_misses, stats.num_uncaptured_steps) == ("compile", 0, 0)


TWO_BY_CONTEXT = {"tensor_parallel_size": 2, "retrieval_parallel": "context"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {**TWO_BY_CONTEXT, "kv_policy": "tova", "kv_budget": 9}, "retrieval_parallel='heads' only"),
        (
            "llama",
            {**TWO_BY_CONTEXT, "kv_plan": KVPlan(((TOVA, ALL),) * 4)},
            "kv_policy='tova:protect=2' is served with retrieval_parallel='heads' only",
        ),
        (
            "llama_mha",
            {"tensor_parallel_size": 2, "kv_plan": KVPlan(((TOVA, TOVA, TOVA, H2O),) * 4)},
            "share: a multiple of 2 of those in layer 0 that keep tova 2, 9 slots, chunks of 8, got 3",
        ),
        (
            "llama",
            {"tensor_parallel_size": 4, "kv_plan": KVPlan(((H2O, SMALL),) * 4)},
            "heads 4 ranks share: a multiple of 2 of those in layer 0",
        ),
    ],
)
def test_what_ranks_do_not_serve_is_refused_before_they_start(
    zoo: Zoo, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        HPUDuoModel.from_pretrained(
            zoo.load(name)[1], kv_chunk=8, block_size=BLOCK, max_model_len=64, **options
        )
    assert message in str(caught.value)
