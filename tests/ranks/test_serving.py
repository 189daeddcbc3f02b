"""Serving by several ranks: patterns, chunks, preemption, prefixes, sampling, captured steps."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphs import BucketTable
from hpu_duo.device import Member, run_processes
from hpu_duo.heads import HeadPattern
from hpu_duo.llm import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.engine.test_mtp import FULL, know_layers, mellum_name, save_predicting, save_several
from tests.modeling.families import BASE, BLOCK, VERSION, Zoo, make_config, prompts_of, save_random
from tests.ranks.work import Answer, Case, serve, serve_here
from tests.tiers import every

pytestmark = pytest.mark.usefixtures("forked_ranks")

GREEDY = SamplingParams(max_tokens=14, temperature=0)
LENGTHS = (3, 40, 9, 25, 61, 17)
NUM_LAYERS = 4
BY_FOUR_ONLY = ("vocabulary of 97", "two rows of chunks")


def pattern(seed: int, counts: tuple[int, ...] = (2, 4, 0, 2)) -> HeadPattern:
    """A pattern of four heads a layer, so many of which retrieve."""
    scores = np.random.default_rng(seed).random((NUM_LAYERS, 4)).astype(np.float32)
    nothing = HeadPattern(scores, sink=2, recent=6, retrieval=np.zeros(scores.shape, np.bool_))
    return HeadPattern(scores, sink=2, recent=6, retrieval=nothing.promote(counts).mask)


@pytest.fixture(scope="module")
def cases(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    llama, mha = zoo.load("llama")[1], zoo.load("llama_mha")[1]
    odd = tmp_path_factory.mktemp("odd")
    save_random(make_config("LlamaConfig", **{**BASE, "vocab_size": 97}), odd)
    prompts = prompts_of(LENGTHS, seed=3)
    twice = [*prompts, *prompts]
    drawn = [
        SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, seed=1),
        SamplingParams(max_tokens=12, temperature=1.3, top_k=7, seed=2),
        SamplingParams(max_tokens=12, temperature=0, logprobs=3),
        SamplingParams(max_tokens=12, temperature=0.7, min_p=0.05, repetition_penalty=1.2, seed=3),
        SamplingParams(max_tokens=12, temperature=1.0, n=2, seed=4),
        SamplingParams(max_tokens=12, temperature=0, logit_bias={5: 4.0}),
    ]
    duo = {"pattern": pattern(1)}
    common = {"prompts": prompts, "params": [GREEDY] * len(prompts)}
    return {
        "pattern": Case(mha, **common, heads=duo),
        "promoted": Case(mha, **common, heads={"pattern": pattern(2, (1, 3, 0, 2))}),
        "preempted": Case(
            mha, **common, heads=duo, cache={"num_blocks": 10}, scheduler={"max_model_len": 76}
        ),
        "prefixes": Case(
            mha,
            twice,
            [GREEDY] * len(twice),
            heads=duo,
            cache={"enable_prefix_caching": True, "num_prefix_snapshots": 16},
            scheduler={"max_num_seqs": 2},
        ),
        "sampled": Case(llama, prompts, drawn),
        "vocabulary of 97": Case(odd, prompts, drawn),
        "two rows of chunks": Case(
            mha, **common, heads=duo, scheduler={"max_num_batched_tokens": 16, "max_chunk_rows": 2}
        ),
        "replayed": Case(mha, **common, heads=duo, graph={"backend": "replay"}),
    }


def test_the_tokens_are_those_of_one_rank(cases: dict[str, Case]) -> None:
    cases = {name: case for name, case in cases.items() if name not in BY_FOUR_ONLY}
    answers = run_processes(serve, (cases,), [{}] * 2, 600)[0]
    # Ranks have equally many retrieval heads, so that some are promoted.
    alike = {**cases, "promoted": replace(cases["promoted"], heads={"pattern": pattern(2, (2, 4, 0, 2))})}
    ones = {name: serve_here(case) for name, case in alike.items()}
    assert [name for name in cases if answers[name].tokens != ones[name].tokens] == []
    seen = {name: answer.seen for name, answer in answers.items()}
    assert all(each["broadcasts"] == each["steps"] for each in seen.values())
    assert seen["promoted"]["retrieval"] == 4  # on each rank
    promoted = pattern(2, (1, 3, 0, 2)).promote((2, 4, 0, 2))
    whole = serve_here(replace(cases["promoted"], heads={"pattern": promoted})).seen["promoted"]
    # The first rank holds one of the two that were promoted.
    assert whole[0] == 2
    assert seen["promoted"]["promoted"] == (1, whole[1] // 2)
    assert seen["preempted"]["preemptions"] > 0
    assert seen["prefixes"]["cached"] > 0
    for own in answers["pattern"].of_ranks:
        assert own.kv_bytes * 2 == ones["pattern"].seen["kv_bytes"]
    assert all(len(answer.of_ranks) == 2 for answer in answers.values())
    assert all(own.misses == own.late == 0 for answer in answers.values() for own in answer.of_ranks)
    assert all(own.kv_bytes == own.planned_bytes for each in answers.values() for own in each.of_ranks)
    # What ranks sum: the residual stream behind the embeddings, and twice a layer; nothing else.
    hidden_bytes = 4 * BASE["hidden_size"]
    for name in ("pattern", "sampled"):
        num_sums = 2 * NUM_LAYERS + 1
        assert seen[name]["sums"] == num_sums * seen[name]["steps"]
        assert seen[name]["summed_bytes"] == num_sums * hidden_bytes * seen[name]["query_tokens"]
    for name in cases:
        counted_alike(seen[name], is_counted=name != "replayed")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_four_ranks_give_the_tokens_of_one(cases: dict[str, Case]) -> None:
    answers = run_processes(serve, (cases,), [{}] * 4, 600)[0]
    # A layer of four heads retrieves with all of them or with none, since each rank has one.
    even = {"pattern": pattern(1).promote((4, 4, 0, 4))}
    ones = {
        name: serve_here(replace(case, heads=even) if case.heads else case) for name, case in cases.items()
    }
    assert [name for name in cases if answers[name].tokens != ones[name].tokens] == []
    assert answers["preempted"].seen["preemptions"] > 0
    assert answers["prefixes"].seen["cached"] > 0
    for name, answer in answers.items():
        assert answer.seen["broadcasts"] == answer.seen["steps"]
        assert len(answer.of_ranks) == 4
        assert all(own.misses == own.late == 0 for own in answer.of_ranks)
        assert all(own.kv_bytes == own.planned_bytes for own in answer.of_ranks)
        counted_alike(answer.seen, is_counted=name != "replayed")


def counted_alike(seen: dict[str, Any], *, is_counted: bool) -> None:
    """Check that statistics tell, by formula, the bytes that were counted, and one broadcast a step.

    Args:
        is_counted: whether exchanges were seen at all: those of replayed steps are not.
    """
    before, after = seen["ranks"]
    assert after.num_messages - before.num_messages == seen["steps"]
    assert after.num_broadcasts - before.num_broadcasts == seen["steps"]
    broadcast_bytes = after.broadcast_bytes - before.broadcast_bytes
    assert broadcast_bytes == seen["steps"] * seen["message_bytes"]
    if is_counted:
        assert after.reduced_bytes == seen["summed_bytes"] > 0
        assert after.gathered_bytes == seen["gathered_bytes"] > 0
        assert after.scattered_bytes == seen["scattered_bytes"]
    assert before.reduced_bytes == before.gathered_bytes == before.scattered_bytes == 0


def captured_ahead(answer: Answer) -> None:
    """Check that all ranks captured the same buckets in warm-up, and compiled nothing afterwards."""
    for own in answer.of_ranks:
        assert (own.misses, own.late, own.recompiles, own.findings) == (0, 0, 0, ())
        assert own.captures == answer.seen["captures"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", every(2, [2, 4]))
def test_simulated_hpus_capture_everything_ahead(zoo: Zoo, num_ranks: int) -> None:
    mha = zoo.load("llama_mha")[1]
    prompts = prompts_of((3, 20, 9), seed=4)
    case = Case(
        mha,
        prompts,
        [GREEDY] * 3,
        heads={"pattern": pattern(1, (4, 4, 0, 4))},
        cache={"num_blocks": 24},
        scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 48},
        model={"device": "hpu-sim"},
        warms_up=True,
    )
    answer = run_processes(serve, ({"sim": case},), [{}] * num_ranks, 600)[0]["sim"]
    assert len(answer.of_ranks) == num_ranks
    assert answer.tokens == serve_here(Case(mha, prompts, [GREEDY] * 3, heads=case.heads)).tokens
    captured_ahead(answer)
    assert {own.kv_bytes for own in answer.of_ranks} == {answer.seen["kv_bytes"]}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_ranks_give_the_tokens_of_one(zoo: Zoo) -> None:
    # Rank 0 is this process: whoever counts exchanges there keeps torch from compiling.
    prompts, greedy = prompts_of((3, 20), seed=4), SamplingParams(max_tokens=6, temperature=0)

    def served(**settings: Any) -> tuple[list[list[int]], int]:
        model = HPUDuoModel.from_pretrained(
            zoo.load("llama_mha")[1],
            dtype="float32",
            pattern=pattern(1, (4, 2, 0, 4)),
            block_size=BLOCK,
            num_blocks=24,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            max_model_len=48,
            **settings,
        )
        outputs = model.engine.generate(prompts, greedy)
        return [list(each[0].token_ids) for each in outputs], model.engine.runner.graphs.counters.hits

    expected, _ = served(graphs="eager")
    found, num_compiled = served(graphs="compile", tensor_parallel_size=2)
    assert found == expected
    assert num_compiled > 0


@pytest.mark.slow
def test_ranks_exchange_the_same_buckets_while_serving(zoo: Zoo) -> None:
    prompts, greedy = prompts_of((3, 20), seed=4), SamplingParams(max_tokens=12, temperature=0)
    table = BucketTable.from_strings(
        ["csu/q16/s24/u24/l2", "c-u/q16/s0/u24/l2", "-su/q2/s24/u24/l2", "--u/q2/s0/u24/l2"]
    )
    model = HPUDuoModel.from_pretrained(
        zoo.load("llama_mha")[1],
        device="cpu",
        attention="reference",
        dtype="float32",
        graphs="replay",
        buckets=table,
        block_size=BLOCK,
        num_blocks=24,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=48,
        tensor_parallel_size=2,
    )
    model.warmup()

    def tokens() -> list[list[int]]:
        return [list(each[0].token_ids) for each in model.engine.generate(prompts, greedy)]

    expected = tokens()
    model.engine.replan(60.0, first_plan=1)
    for _ in range(600):
        assert tokens() == expected
        while model.engine.replan_idle():
            pass
        found = model.stats().replanned
        if found is not None and found.num_captured and not found.num_waiting:
            break
        time.sleep(0.05)
    # A rank with another table would fail in the exchanges of the next steps.
    assert tokens() == expected
    assert model.engine.runner.graphs.table.buckets != table.buckets
    assert model.engine.runner.graphs.counters.late_captures == 0


@pytest.mark.slow
def test_a_model_is_right_for_itself_where_ranks_share_blocks_by_context(cases: dict[str, Case]) -> None:
    """All of it is on each rank, in whole blocks of the engine."""
    plain = replace(cases["pattern"], heads={}, parallel={"retrieval_parallel": "context"})
    drafts = {"method": "draft_model", "model": str(plain.path), "num_speculative_tokens": 3}
    drafts["num_speculative_tokens_per_batch_size"] = [[1, 8, 3]]
    drafting = replace(plain, scheduler={"speculative_config": drafts})
    answer = run_processes(serve, ({"context": drafting},), [{}] * 2, 600)[0]["context"]
    expected = serve_here(plain)
    assert not answer.error
    assert answer.tokens == expected.tokens
    assert answer.seen["steps"] < 0.6 * expected.seen["steps"]


@pytest.mark.slow
def test_drafts_of_the_model_change_no_token_and_are_counted(cases: dict[str, Case]) -> None:
    drafts = {
        "method": "duo",
        "num_speculative_tokens": 3,
        "draft_sink": 2,
        "draft_recent": 6,
        "suffix_decoding_min_token_prob": 1.0,
        "num_speculative_tokens_per_batch_size": [[1, 4, 3]],
    }
    plain = {
        "heads": cases["pattern"],
        "sampled": cases["sampled"],
        "context": replace(cases["pattern"], parallel={"retrieval_parallel": "context"}),
    }
    drafting = {name: replace(each, scheduler={"speculative_config": drafts}) for name, each in plain.items()}
    answers = run_processes(serve, (drafting,), [{}] * 2, 600)[0]
    for name, answer in answers.items():
        assert not answer.error
        assert answer.tokens == serve_here(plain[name]).tokens
        counted_alike(answer.seen, is_counted=True)


def serve_layers(member: Member, cases: dict[str, Case]) -> dict[str, Answer]:
    """Serve models of two layers whose layers behind these draft."""
    with pytest.MonkeyPatch.context() as patch:
        know_layers(patch)
        return serve(member, cases)


@pytest.mark.slow
@pytest.mark.skipif(VERSION < (5, 24), reason="MtpModel needs transformers 5.24")
@pytest.mark.parametrize("num_layers", [1, 3])
def test_drafts_of_the_checkpoints_own_layers_change_no_token_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> None:
    """Each rank has all of the layers, and its part of embedding and head."""
    if num_layers == 1:
        save_predicting(tmp_path, "MellumConfig", mellum_name, num_experts=4, sliding_window=11, **FULL)
    else:
        save_several(monkeypatch, tmp_path)
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    drafts["num_speculative_tokens_per_batch_size"] = [[1, 4, 3]]
    sampled = SamplingParams(max_tokens=14, temperature=0.7, seed=1)
    plain = Case(tmp_path, prompts_of((3, 40, 9), seed=3), [GREEDY, sampled, sampled])
    drafting = replace(plain, scheduler={"speculative_config": drafts})
    cases = {"eager": drafting, "replay": replace(drafting, graph={"backend": "replay"})}
    cases["context"] = replace(drafting, parallel={"retrieval_parallel": "context"})
    answers = run_processes(serve_layers, (cases,), [{}] * 2, 600)[0]
    expected = serve_here(plain)
    for name, answer in answers.items():
        assert not answer.error
        assert answer.tokens == expected.tokens
        assert answer.seen["steps"] == answers["eager"].seen["steps"] < expected.seen["steps"]
        counted_alike(answer.seen, is_counted=name == "eager")
