"""Heads with a KV budget on Triton kernels keep what the definition of their policy keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from graphs import BucketTable
from graphs.backends.compile import CompileBackend
from hpu_duo import HeadPattern
from kernels_ref import Implementation
from tests.modeling.budget_driving import assert_follows, run_budget
from tests.modeling.families import Zoo, prompts_of
from tests.modeling.test_kv_budget import BUDGET, CHUNK, MASK, WHOLE, load
from tests.tiers import every
from tests.triton_interpreter import replacing_once

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS, NUM_NEW = (1, 8, 19), 3
TABLE = BucketTable.from_strings(["csu/q15/s0/u0/l3"])
POLICIES = [
    "snapkv:window=3,kernel=3",
    "h2o:positions=cache",
    *(
        pytest.param(policy, marks=pytest.mark.exhaustive)
        for policy in (
            *("expected-attention:sink=2,future=20", "h2o", "tova"),
            *("streaming-llm", "streaming-llm:positions=cache", "local"),
        )
    ),
]


@pytest.fixture(autouse=True, scope="module")
def _fast_interpreter() -> Iterator[None]:
    with replacing_once():
        yield


def assert_served(
    zoo: Zoo, name: str, policy: str, heads: list[list[int]] | None = None, **options: Any
) -> None:
    """Compare a run, in stores that hold NaN before, with the definition.

    Args:
        heads: those with the budget, by layer; None for all.
    """
    chosen = {"attention": "triton", "device": DEVICE, "dtype": "float32", "max_num_seqs": len(LENGTHS)}
    chosen["max_num_batched_tokens"] = 2 * CHUNK + len(LENGTHS)
    served = load(zoo, name, policy, **{**chosen, **options})
    assert {spec.impl for spec in served.engine.runner.model.specs} == {Implementation.TRITON}
    for units in (units for layer in served.engine.runner.store.layers for units in layer):
        for store in (*units.tensors, *(units.scratch or ())):
            store.fill_(torch.nan)
    prompts, chunk = prompts_of(LENGTHS), options.get("kv_chunk", CHUNK) or 1 << 20
    seen = run_budget(served, prompts, NUM_NEW)
    oracle = {"policy": policy, "budget": BUDGET, "chunk": chunk}
    assert_follows(zoo.load(name)[0], seen, prompts, **oracle, **({} if heads is None else {"heads": heads}))


@pytest.mark.parametrize("policy", POLICIES)
def test_kept_sets_logits_and_tokens_are_those_of_the_definition(zoo: Zoo, policy: str) -> None:
    assert_served(zoo, "llama", policy)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "policy"), [("llama_mqa", "tova"), ("qwen3", "h2o"), ("llama_mha", "h2o")])
def test_groups_of_any_size_follow_the_definition(zoo: Zoo, name: str, policy: str) -> None:
    assert_served(zoo, name, policy)


@pytest.mark.parametrize("name", every(2, ["gpt_oss", "gemma2"]))
def test_soft_caps_and_sink_logits_take_their_part(zoo: Zoo, name: str) -> None:
    assert_served(zoo, name, "h2o")


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["h2o", "snapkv:window=3,kernel=3"])
def test_whole_prompts_are_cut_once(zoo: Zoo, policy: str) -> None:
    assert_served(zoo, "llama", policy, **WHOLE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("graphs", ["replay", CompileBackend("eager")])
def test_captured_steps_follow_the_definition(zoo: Zoo, graphs: str | CompileBackend) -> None:
    assert_served(zoo, "llama", "h2o", graphs=graphs, buckets=TABLE)


def test_heads_with_a_budget_stand_beside_heads_that_see_all(zoo: Zoo) -> None:
    pattern = HeadPattern(MASK.astype(np.float32), 2, 3, retrieval=MASK)
    heads = [np.flatnonzero(~retrieves).tolist() for retrieves in MASK]
    assert_served(zoo, "llama_mha", "h2o", heads=heads, pattern=pattern)


def test_free_slots_among_the_sinks_are_not_read(zoo: Zoo) -> None:
    assert_served(zoo, "llama", "streaming-llm:sink=5,positions=cache", kv_chunk=2)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["eager", "compile", "cuda"])
@pytest.mark.parametrize("policy", ["h2o", "tova", "h2o:positions=cache"])
def test_half_precision_serves_many_requests_on_a_gpu(zoo: Zoo, policy: str, graphs: str) -> None:
    options = {"attention": "triton", "device": "cuda", "dtype": "bfloat16", "graphs": graphs}
    served = load(zoo, "llama", policy, **options)
    done = served.generate(prompts_of() * 4, max_new_tokens=24, eos_token_id=None)
    assert len(done) == 4 * len(prompts_of())
    assert all(budget is not None and budget.num_evictions > 0 for budget in served.stats().budgets)
