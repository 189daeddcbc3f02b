"""A second format of keys and values on two ranks: the tokens of two whose keys were rounded ahead."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from hpu_duo.device import Member, run_processes
from hpu_duo.sampling import SamplingParams
from kernels_ref.formats import format_of
from tests.modeling.families import Zoo, prompts_of
from tests.modeling.int8_format import INT8, rounded, rounded_ahead
from tests.ranks.test_kv_budget import PATTERN
from tests.ranks.work import Answer, Case, serve
from tests.tiers import selected

pytestmark = pytest.mark.usefixtures("forked_ranks")

GREEDY = SamplingParams(max_tokens=9, temperature=0)


SERVED = "int8_per_token_head"
PLAIN = "plain "
"""Begins the names of cases with plain stores, whose keys and values every rank rounds."""


def given_back(x: torch.Tensor) -> torch.Tensor:
    """Return what a store of ``int8_per_token_head`` gives back."""
    vectors = format_of(SERVED).keys
    return vectors.decode(vectors.encode(x), x.dtype)


def rounding(name: str) -> AbstractContextManager[None]:
    """Round keys and values of these cases."""
    if not name.startswith(PLAIN):
        return nullcontext()
    return rounded_ahead(pytest.MonkeyPatch(), given_back if SERVED in name else rounded)


def serve_both(member: Member, cases: dict[str, Case]) -> dict[str, Answer]:
    """Serve in processes that have imported this file, and so know the format."""
    return serve(member, cases, rounding)


def case_of(zoo: Zoo, stored: str = INT8.name, **settings: Any) -> Case:
    """Requests that come twice, of which two fork, in few blocks."""
    prompts = [*prompts_of((5, 37, 18), seed=3)] * 2
    params = [replace(GREEDY, n=1 + place % 2, temperature=0.9, seed=place) for place in range(len(prompts))]
    cache = {"kv_cache_dtype": stored, "ring_dtype": stored, "num_blocks": 14}
    return Case(
        zoo.load("llama_mha")[1],
        prompts,
        params,
        cache=cache,
        scheduler={"max_model_len": 56, "max_num_seqs": 3},
        model={"attention": "reference"},
        **settings,
    )


@pytest.fixture(scope="module")
def answers(zoo: Zoo, request: pytest.FixtureRequest) -> dict[str, Answer]:
    """Answers of the cases that this run has, and of those with plain stores."""
    duo = {"heads": {"pattern": PATTERN}}
    settings: dict[str, Any] = {
        "heads": {},
        "duo": duo,
        "context": {"parallel": {"retrieval_parallel": "context"}, **duo},
    }
    settings |= {f"{name} {SERVED}": {"stored": SERVED, **settings[name]} for name in ("duo", "context")}
    cases = {name: case_of(zoo, **settings[name]) for name in selected(request, "name")}
    cache = {"num_blocks": 64, "enable_prefix_caching": False}
    plain = {PLAIN + name: replace(case, cache=cache) for name, case in cases.items()}
    return run_processes(serve_both, ({**cases, **plain},), [{}] * 2, 600)[0]


@pytest.mark.parametrize(
    "name",
    [pytest.param("heads", marks=pytest.mark.slow), "duo", "context", f"duo {SERVED}", f"context {SERVED}"],
)
def test_ranks_answer_like_those_that_round_ahead(answers: dict[str, Answer], name: str) -> None:
    answer = answers[name]
    assert answer.tokens == answers[PLAIN + name].tokens
    assert all(own.kv_bytes == own.planned_bytes for own in answer.of_ranks)
    assert answer.seen["cached"] > 0
