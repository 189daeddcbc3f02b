"""Blocks and rings of two ranks that go to the host and come back: the tokens of ranks that keep them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpu_duo.device import Member, run_processes
from hpu_duo.kv.tiers.policy import LoadPolicy
from hpu_duo.sampling import SamplingParams
from tests.modeling.families import BLOCK, Zoo, prompts_of
from tests.ranks.test_kv_budget import PATTERN
from tests.ranks.work import Answer, Case, serve

pytestmark = pytest.mark.usefixtures("forked_ranks")

TEXTS = prompts_of([5 * BLOCK + 1, 4 * BLOCK + 3, 5 * BLOCK, 4 * BLOCK] * 2, seed=3)


def serve_loading(member: Member, cases: dict[str, Case]) -> dict[str, Answer]:
    """Serve, and load whatever there is: this model computes a block faster than a thread copies one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadPolicy, "loads", lambda *_: True)
        return serve(member, cases)


@pytest.fixture(scope="module")
def answers(zoo: Zoo) -> dict[str, Answer]:
    """Texts that come back, by heads and by context, with and without a tier."""
    prompts = [*TEXTS] * 2
    params = [SamplingParams(max_tokens=4, temperature=0)] * len(prompts)
    cases: dict[str, Case] = {}
    for name, parallel in (("heads", {}), ("context", {"retrieval_parallel": "context"})):
        scheduler: dict[str, Any] = {"max_model_len": 56, "max_num_seqs": 1}
        case = Case(
            zoo.load("llama_mha")[1],
            prompts,
            params,
            heads={"pattern": PATTERN},
            cache={"num_blocks": 40, "num_prefix_snapshots": 8, "kv_offloading_size": 0.02},
            scheduler=scheduler,
            model={"attention": "reference"},
            parallel=parallel,
        )
        cases[name] = case
        cases[f"plain {name}"] = replace(case, cache={"num_blocks": 64})
    return run_processes(serve_loading, (cases,), [{}] * 2, 600)[0]


@pytest.mark.parametrize("name", ["heads", pytest.param("context", marks=pytest.mark.slow)])
def test_ranks_load_what_they_have_stored(answers: dict[str, Answer], name: str) -> None:
    answer = answers[name]
    assert not answer.error
    assert answer.tokens == answers[f"plain {name}"].tokens
    assert answer.seen["loaded"] > 0
