"""Every family that transformers has a plan for gives the same tokens by several ranks as by one."""

from __future__ import annotations

import pytest

from hpu_duo.device import run_processes
from hpu_duo.sampling import SamplingParams
from tests.modeling.families import FAMILIES, IS_5, LENGTHS, Zoo, prompts_of
from tests.ranks.work import Answer, Case, serve, serve_here

pytestmark = pytest.mark.usefixtures("forked_ranks")

REFUSED = {
    "gpt2": "'gpt2' cannot be served by several ranks: transformers has no tensor-parallel plan",
    **({} if IS_5 else {"gpt_oss": "'gpt_oss' cannot be served by several ranks: "}),
    "gptj": "'gptj' cannot be served by several ranks: expected slices of transformer.h.0.mlp.fc_in",
    "stablelm": "'stablelm' cannot be served by several ranks: transformers has no tensor-parallel plan",
}
BY_FOUR = ("llama", "llama_mqa", "phi3", "olmo2", "gemma3", "qwen3_moe", "gpt_neox")
"""Families by four ranks: few key/value heads, two kinds of fused projections, wide norms, experts."""

SERVED = tuple(name for name in FAMILIES if name not in REFUSED)
BY_CONTEXT = SERVED[::3]
"""Families whose blocks are dealt out over two ranks."""
OTHERWISE = tuple(name for name in FAMILIES if name in (*BY_FOUR, *BY_CONTEXT))


def cases_of(zoo: Zoo, names: tuple[str, ...]) -> dict[str, Case]:
    greedy = [SamplingParams(max_tokens=10, temperature=0)] * len(LENGTHS)
    return {name: Case(zoo.load(name)[1], prompts_of(), greedy) for name in names}


def differing(cases: dict[str, Case], answers: dict[str, Answer]) -> list[str]:
    """Names of those whose tokens are not those of one process, or that took more than a broadcast a step."""
    return [
        name
        for name, case in cases.items()
        if (found := answers[name]).tokens != serve_here(case).tokens
        or found.seen["broadcasts"] != found.seen["steps"]
        or len({each.broadcasts for each in found.of_ranks}) != 1
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(
            tuple(name for name in FAMILIES if name not in OTHERWISE),
            id="by two ranks only",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(OTHERWISE, id="otherwise too", marks=pytest.mark.exhaustive),
    ],
)
def test_two_ranks_give_the_tokens_of_one(zoo: Zoo, names: tuple[str, ...]) -> None:
    cases = cases_of(zoo, names)
    answers = run_processes(serve, (cases,), [{}] * 2, 600)[0]
    assert differing({name: case for name, case in cases.items() if name not in REFUSED}, answers) == []
    for name in REFUSED.keys() & cases.keys():
        assert answers[name].error.startswith(REFUSED[name])


@pytest.mark.slow
def test_four_ranks_give_the_tokens_of_one(zoo: Zoo) -> None:
    cases = cases_of(zoo, BY_FOUR)
    assert differing(cases, run_processes(serve, (cases,), [{}] * 4, 600)[0]) == []
