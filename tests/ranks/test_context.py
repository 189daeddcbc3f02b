"""Several ranks give the tokens of one where the blocks of retrieval heads are dealt out over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from hpu_duo.device import run_processes
from hpu_duo.parallel import head_exchanges
from hpu_duo.sampling import SamplingParams
from tests.modeling.families import BASE, BLOCK, FAMILIES, VOCAB, Zoo, prompts_of, save_random
from tests.modeling.test_value_sizes import LATENT, ROUTED
from tests.ranks.test_families import BY_CONTEXT as FAMILIES_BY_CONTEXT
from tests.ranks.test_families import SERVED, cases_of, differing
from tests.ranks.test_serving import NUM_LAYERS, captured_ahead, counted_alike, pattern
from tests.ranks.work import Answer, Case, serve, serve_here
from tests.tiers import every

pytestmark = pytest.mark.usefixtures("forked_ranks")

GREEDY = SamplingParams(max_tokens=8, temperature=0)
LENGTHS = (13, 14, 29, 61)
BY_CONTEXT = {"retrieval_parallel": "context"}
UNEVEN = (1, 3, 0, 2)
"""Retrieval heads of each layer, of four: ranks have unequal numbers of them, or none."""
THREE_OF_FOUR = (3, 3, 3, 3)


@pytest.fixture(scope="module")
def cases(zoo: Zoo) -> dict[str, Case]:
    llama, mha = zoo.load("llama")[1], zoo.load("llama_mha")[1]
    prompts = prompts_of(LENGTHS, seed=3)
    twice = [*prompts, *prompts]
    drawn = [SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=seed) for seed in range(4)]
    duo = {"pattern": pattern(1, UNEVEN)}
    common = {"prompts": prompts, "params": [GREEDY] * len(prompts), "parallel": BY_CONTEXT}
    return {
        "all heads, several tokens a row": Case(llama, **common, scheduler={"decode_len": 3}),
        # The second rank has no streaming head in any layer.
        "cached": Case(
            mha,
            twice,
            drawn * 2,
            heads={"pattern": pattern(1, THREE_OF_FOUR)},
            cache={"num_prefix_snapshots": 16},
            scheduler={"max_num_seqs": 2},
            parallel=BY_CONTEXT,
        ),
        "preempted, two rows of chunks, replayed": Case(
            mha,
            **common,
            heads=duo,
            cache={"num_blocks": 5},
            scheduler={"max_model_len": 72, "max_num_batched_tokens": 16, "max_chunk_rows": 2},
            graph={"backend": "replay"},
        ),
    }


def test_the_tokens_are_those_of_one_rank(cases: dict[str, Case]) -> None:
    answers = run_processes(serve, (cases,), [{}] * 2, 600)[0]
    # A block of two ranks holds twice as many tokens.
    ones = {name: serve_here(replace(case, cache={})) for name, case in cases.items()}
    assert [name for name in cases if answers[name].tokens != ones[name].tokens] == []
    seen = {name: answer.seen for name, answer in answers.items()}
    assert all(each["broadcasts"] == each["steps"] for each in seen.values())
    assert seen["preempted, two rows of chunks, replayed"]["preemptions"] > 0
    assert seen["cached"]["cached"] > 0
    # Heads are not promoted to be even: of (1, 3, 0, 2) the first rank has (0, 1, 0, 1).
    assert seen["preempted, two rows of chunks, replayed"]["retrieval"] == 2
    # As many blocks hold twice the tokens, in the same bytes on each rank.
    whole = "all heads, several tokens a row"
    for own in answers[whole].of_ranks:
        assert own.kv_bytes == ones[whole].seen["kv_bytes"]
    uneven_memory(answers, THREE_OF_FOUR)
    # Candidates are a number and a token for each row of logits; otherwise logits are exchanged whole.
    exchanged(seen[whole], retrieval=2, group_size=2, decode_len=3, logit_bytes=8)
    exchanged(seen["cached"], retrieval=3, group_size=1, decode_len=1, logit_bytes=4 * VOCAB // 2)


@pytest.fixture(scope="module")
def latent_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    path = tmp_path_factory.mktemp("latents")
    save_random(AutoConfig.for_model("deepseek_v3", **{**BASE, **ROUTED, **LATENT}), path)
    prompts = prompts_of(LENGTHS, seed=3)
    common = {"params": [GREEDY] * len(prompts), "parallel": BY_CONTEXT}
    duo = {"pattern": pattern(1, UNEVEN)}
    few = {"max_model_len": 72, "max_num_batched_tokens": 16, "max_chunk_rows": 2}
    return {
        "several tokens a row": Case(path, prompts, **common, scheduler={"decode_len": 3}),
        "cached": Case(
            path,
            [*prompts, *prompts],
            [GREEDY] * 2 * len(prompts),
            heads=duo,
            cache={"num_prefix_snapshots": 16},
            scheduler={"max_num_seqs": 2},
            parallel=BY_CONTEXT,
        ),
        "preempted, replayed": Case(
            path,
            prompts,
            **common,
            heads=duo,
            cache={"num_blocks": 5},
            scheduler=few,
            graph={"backend": "replay"},
        ),
    }


def test_latents_are_sharded_by_context(latent_cases: dict[str, Case]) -> None:
    answers = run_processes(serve, (latent_cases,), [{}] * 2, 600)[0]
    ones = {name: serve_here(replace(case, cache={}, parallel={})) for name, case in latent_cases.items()}
    assert {name: answer.error or answer.tokens for name, answer in answers.items()} == {
        name: one.tokens for name, one in ones.items()
    }
    seen = {name: answer.seen for name, answer in answers.items()}
    assert seen["preempted, replayed"]["preemptions"] > 0
    assert seen["cached"]["cached"] > 0
    for answer in answers.values():
        counted_alike(answer.seen, is_counted=True)
    # As many blocks hold twice the tokens, in the bytes of one rank: 16 + 8 elements of a token and layer.
    whole = "several tokens a row"
    for own in answers[whole].of_ranks:
        assert own.kv_bytes == own.planned_bytes == ones[whole].seen["kv_bytes"]
        assert own.kv_bytes == (64 + 1) * BLOCK * NUM_LAYERS * (16 + 8) * 4


@pytest.mark.slow
def test_simulated_hpus_capture_latents_ahead(latent_cases: dict[str, Case]) -> None:
    case = replace(
        latent_cases["preempted, replayed"],
        cache={"num_blocks": 12},
        graph={},
        model={"device": "hpu-sim"},
        scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 80},
        warms_up=True,
    )
    answer = run_processes(serve, ({"sim": case},), [{}] * 2, 600)[0]["sim"]
    assert answer.tokens == serve_here(replace(case, model={}, parallel={}, warms_up=False)).tokens
    captured_ahead(answer)


def uneven_memory(answers: dict[str, Answer], counts: tuple[int, ...]) -> None:
    """Check that every rank has the memory of its plan, and that of ``cached`` what a count by head gives."""
    for own in (own for answer in answers.values() for own in answer.of_ranks):
        assert own.kv_bytes == own.planned_bytes > 0
    owns = [own.kv_bytes for own in answers["cached"].of_ranks]
    assert owns == bytes_by_context(counts, len(owns), num_rows=2 + 16)


def bytes_by_context(counts: tuple[int, ...], size: int, num_rows: int) -> list[int]:
    """Bytes of the store of each rank by 64 blocks and heads of 8 channels, counted head by head.

    A rank has a part of the tokens of all retrieval heads, and rings of its own streaming heads: of 2 and 6
    tokens, for each row, for padding, and once for a prompt to read.
    """
    head_bytes = 2 * 8 * 4
    found = [(64 + 1) * BLOCK * sum(counts) * head_bytes] * size
    for num_retrieval in counts:
        for rank in range(size):
            # Retrieval heads are dealt out as evenly as they go, one more to the last ranks.
            num_own = num_retrieval // size + (rank >= size - num_retrieval % size)
            num_slots = 2 + 6
            found[rank] += (num_rows + 2) * num_slots * (NUM_LAYERS // size - num_own) * head_bytes
    return found


def exchanged(
    seen: dict[str, Any], retrieval: int, group_size: int, decode_len: int, logit_bytes: int
) -> None:
    """Check that two ranks exchange what the cost model counts, in layers of so many retrieval heads."""
    steps = seen["buckets"]
    rows = sum(bucket.num_logits * decode_len for bucket, is_sampled in steps if is_sampled)
    layers = [
        head_exchanges(retrieval, group_size, (8, 8), 4, bucket, decode_len, 2) for bucket, _ in steps
    ] * NUM_LAYERS
    assert seen["gathered_bytes"] == sum(each.gathered for each in layers) + rows * logit_bytes
    assert seen["scattered_bytes"] == sum(each.scattered for each in layers) > 0
    counted_alike(seen, is_counted=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", every(2, [2, 4]))
def test_simulated_hpus_capture_everything_ahead(zoo: Zoo, num_ranks: int) -> None:
    mha = zoo.load("llama_mha")[1]
    prompts = prompts_of((3, 20, 9), seed=4)
    case = Case(
        mha,
        prompts,
        [GREEDY] * 3,
        heads={"pattern": pattern(1, (1, 3, 1, 3))},
        cache={"num_blocks": 12},
        scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 48},
        model={"device": "hpu-sim"},
        parallel=BY_CONTEXT,
        warms_up=True,
    )
    answer = run_processes(serve, ({"sim": case},), [{}] * num_ranks, 600)[0]["sim"]
    assert len(answer.of_ranks) == num_ranks
    assert answer.tokens == serve_here(Case(mha, prompts, [GREEDY] * 3, heads=case.heads)).tokens
    captured_ahead(answer)
    # All have 12 blocks and one for padding, of 8 tokens, of all 8 retrieval heads of the layers, with keys
    # and values of 8 channels; of the heads of two ranks 6 and 2 stream, of those of four 4, 2, 2 and none.
    rings = [own.kv_bytes - 13 * 8 * 8 * 2 * 8 * 4 for own in answer.of_ranks]
    num_streaming = {2: (6, 2), 4: (4, 2, 2, 0)}[num_ranks]
    assert rings == [rings[0] // num_streaming[0] * number for number in num_streaming]
    assert rings[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FAMILIES_BY_CONTEXT, id="some families", marks=pytest.mark.exhaustive),
        pytest.param(
            [name for name in SERVED if name not in FAMILIES_BY_CONTEXT],
            id="other families",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_two_ranks_give_the_tokens_of_one_for_every_family(zoo: Zoo, names: Sequence[str]) -> None:
    cases = by_context(cases_of(zoo, tuple(names)))
    answers = run_processes(serve, (cases,), [{}] * 2, 600)[0]
    refused = {name: answer.error for name, answer in answers.items() if answer.error}
    assert all("needs a key/value head for each rank" in error for error in refused.values())
    assert refused.keys() == {"llama_mqa"} & cases.keys()
    assert differing({name: case for name, case in cases.items() if name not in refused}, answers) == []


@pytest.mark.slow
def test_four_ranks_give_the_tokens_of_one(zoo: Zoo) -> None:
    mha = zoo.load("llama_mha")[1]
    prompts = prompts_of(LENGTHS, seed=5)
    cases = {
        f"{counts}": Case(
            mha, prompts, [GREEDY] * len(prompts), heads={"pattern": pattern(1, counts)}, parallel=BY_CONTEXT
        )
        for counts in (UNEVEN, (4,) * NUM_LAYERS, (1, 2, 3, 4))
    }
    common = {"heads": {"pattern": pattern(1, UNEVEN)}, "parallel": BY_CONTEXT}
    greedy = [GREEDY] * len(prompts)
    drawn = [SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=seed) for seed in range(4)]
    few = {"max_model_len": 72, "max_num_batched_tokens": 16, "max_chunk_rows": 2}
    cases["preempted"] = Case(mha, prompts, greedy, **common, cache={"num_blocks": 3}, scheduler=few)
    snapshots, two = {"num_prefix_snapshots": 16}, {"max_num_seqs": 2}
    cases["cached"] = Case(mha, [*prompts, *prompts], drawn * 2, **common, cache=snapshots, scheduler=two)
    answers = run_processes(serve, (cases,), [{}] * 4, 600)[0]
    # A block of four ranks holds four times as many tokens.
    assert differing({name: replace(case, cache={}) for name, case in cases.items()}, answers) == []
    assert answers["preempted"].seen["preemptions"] > 0
    assert answers["cached"].seen["cached"] > 0
    uneven_memory(answers, UNEVEN)


def by_context(cases: dict[str, Case]) -> dict[str, Case]:
    return {name: replace(case, parallel=BY_CONTEXT) for name, case in cases.items()}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_four_ranks_give_the_tokens_of_one_for_families_with_a_head_for_each(tmp_path: Path) -> None:
    cases, greedy = {}, [SamplingParams(max_tokens=10, temperature=0)] * len(prompts_of())
    for name in ("phi3", "olmo2", "gemma3", "qwen3_moe", "mistral_sliding", "cohere"):
        config = FAMILIES[name]()
        config.num_key_value_heads = 4
        save_random(config, tmp_path / name)
        cases[name] = Case(tmp_path / name, prompts_of(), greedy, parallel=BY_CONTEXT)
    assert differing(cases, run_processes(serve, (cases,), [{}] * 4, 600)[0]) == []
