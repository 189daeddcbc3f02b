"""Families beyond the zoo: several ranks give the tokens of one, or refuse them before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hpu_duo.device import run_processes
from hpu_duo.heads.pattern import HeadPattern
from hpu_duo.llm import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.modeling.families import prompts_of, save_random
from tests.ranks.more_families import OTHER_WAYS, REFUSED, SERVED, is_known, tiny
from tests.ranks.test_serving import counted_alike
from tests.ranks.work import Answer, Case, serve, serve_here
from tests.tiers import every, selected

pytestmark = pytest.mark.usefixtures("forked_ranks")

LENGTHS = (1, 9, 21)


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("more")
    greedy = [SamplingParams(max_tokens=6, temperature=0)] * len(LENGTHS)
    known = [name for name in selected(request, "name", OTHER_WAYS) if name in SERVED and is_known(name)]
    for name in known:
        save_random(tiny(name, SERVED[name]), root / name)
    return {name: Case(root / name, prompts_of(LENGTHS), greedy) for name in known}


@pytest.fixture(scope="module")
def answers(cases: dict[str, Case]) -> dict[str, Answer]:
    return run_processes(serve, (cases,), [{}] * 2, 600)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", every(5, SERVED))
def test_two_ranks_give_the_tokens_of_one(
    name: str, cases: dict[str, Case], answers: dict[str, Answer]
) -> None:
    if name not in cases:
        pytest.skip(f"the installed transformers has no {name}")
    assert answers[name].error == ""
    assert answers[name].tokens == serve_here(cases[name]).tokens


@pytest.mark.slow
def test_four_ranks_and_ranks_by_context_give_the_tokens_of_one(cases: dict[str, Case]) -> None:
    few = {name: cases[name] for name in OTHER_WAYS if name in cases}
    by_context = {
        name: replace(case, parallel={"retrieval_parallel": "context"}) for name, case in few.items()
    }
    ones = {name: serve_here(case).tokens for name, case in few.items()}
    for found in (
        run_processes(serve, (few,), [{}] * 4, 600)[0],
        run_processes(serve, (by_context,), [{}] * 2, 600)[0],
    ):
        assert {name: answer.error or answer.tokens for name, answer in found.items()} == ones
        for answer in found.values():
            counted_alike(answer.seen, is_counted=True)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_ranks_give_the_tokens_of_one_where_heads_stream(cases: dict[str, Case], tmp_path: Path) -> None:
    # One rank reorders the heads of few of these families: in this pattern they are in order.
    retrieval = np.array([[True, True, False, False]] * 2)
    long = {"prompts": prompts_of((1, 9, 41))}
    pattern = HeadPattern(retrieval.astype(np.float32), sink=2, recent=6, retrieval=retrieval)
    streaming = {}
    for name in (each for each in OTHER_WAYS if each in cases):
        save_random(tiny(name, {**SERVED[name], "num_key_value_heads": 4}), tmp_path / name)
        streaming[name] = replace(cases[name], path=tmp_path / name, heads={"pattern": pattern}, **long)
    ones = {name: serve_here(case).tokens for name, case in streaming.items()}
    found = run_processes(serve, (streaming,), [{}] * 2, 600)[0]
    assert {name: answer.error or answer.tokens for name, answer in found.items()} == ones
    whole = {name: serve_here(replace(case, heads={})).tokens for name, case in streaming.items()}
    assert [name for name in streaming if whole[name] == ones[name]] == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_shared_is_refused_by_name(name: str, tmp_path: Path) -> None:
    if not is_known(name):
        pytest.skip(f"the installed transformers has no {name}")
    changes, module = REFUSED[name]
    tiny(name, changes).save_pretrained(tmp_path)
    # Nobody reads it, neither this process nor another one.
    save_file({"none": torch.zeros(1)}, tmp_path / "model.safetensors")
    family = tiny(name, changes).get_text_config().model_type
    with pytest.raises(ValueError, match=rf"^'{family}' cannot be served by several ranks: .*{module}"):
        HPUDuoModel.from_pretrained(tmp_path, tensor_parallel_size=2, num_blocks=16)
