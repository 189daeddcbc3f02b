"""Ranks that hold some experts whole give the tokens of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, MixtralConfig

from hpu_duo.device import run_processes
from hpu_duo.device.ranks import Ranks
from hpu_duo.llm import HPUDuoModel
from hpu_duo.parallel import ExpertShare
from hpu_duo.sampling import SamplingParams
from tests.modeling.families import BASE, IS_5, Zoo, prompts_of, save_random
from tests.ranks.more_families import SERVED, is_known, tiny
from tests.ranks.work import Answer, Case, serve, serve_here
from tests.tiers import every, selected

pytestmark = pytest.mark.usefixtures("forked_ranks")

LENGTHS = (1, 9, 21)
GREEDY = [SamplingParams(max_tokens=6, temperature=0)] * len(LENGTHS)
IN_ZOO = ("mixtral", "qwen3_moe")
EXPERTS = {"parallel": {"expert_parallel": True}}
from_5 = pytest.mark.skipif(not IS_5, reason="before 5, experts are modules of their own")


def has_experts(name: str) -> bool:
    """Whether a family that ranks serve has experts here, and transformers an expert-parallel plan for it."""
    if not is_known(name):
        return False
    try:
        ExpertShare.of(tiny(name, SERVED[name]), Ranks(0, 2))
    except ValueError:
        return False
    return True


@pytest.fixture(scope="module")
def cases(
    request: pytest.FixtureRequest, zoo: Zoo, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("experts")
    paths: dict[str, Path] = {name: zoo.load(name)[1] for name in IN_ZOO}
    for name in (each for each in selected(request, "name") if each in SERVED and has_experts(each)):
        paths[name] = root / name
        save_random(tiny(name, SERVED[name]), paths[name])
    return {name: Case(path, prompts_of(LENGTHS), GREEDY, **EXPERTS) for name, path in paths.items()}


@pytest.fixture(scope="module")
def answers(cases: dict[str, Case]) -> dict[str, Answer]:
    return run_processes(serve, (cases,), [{}] * 2, 600)[0]


def alone(case: Case) -> Answer:
    return serve_here(Case(case.path, case.prompts, case.params))


@from_5
@pytest.mark.slow
@pytest.mark.parametrize("name", [*IN_ZOO, *every(6, filter(has_experts, SERVED))])
def test_two_ranks_give_the_tokens_of_one(
    name: str, cases: dict[str, Case], answers: dict[str, Answer]
) -> None:
    assert answers[name].error == ""
    assert answers[name].tokens == alone(cases[name]).tokens


@from_5
@pytest.mark.slow
def test_four_ranks_with_an_expert_each_give_the_tokens_of_one(cases: dict[str, Case]) -> None:
    by_four = {name: cases[name] for name in IN_ZOO}
    found = run_processes(serve, (by_four,), [{}] * 4, 600)[0]
    for name, case in by_four.items():
        assert found[name].error == ""
        assert found[name].tokens == alone(case).tokens


@from_5
@pytest.mark.slow
def test_simulated_hpus_serve_experts_with_nothing_new_after_warm_up(zoo: Zoo) -> None:
    path = zoo.load("qwen3_moe")[1]
    options: dict[str, Any] = {"model": {"device": "hpu-sim"}, "warms_up": True, **EXPERTS}
    case = Case(path, prompts_of(LENGTHS), GREEDY, **options)
    answer = run_processes(serve, ({"one": case},), [{}] * 2, 600)[0]["one"]
    assert answer.error == ""
    assert answer.tokens == alone(case).tokens
    for own in answer.of_ranks:
        assert (own.misses, own.late, own.recompiles, own.findings) == (0, 0, 0, ())
        assert own.kv_bytes == own.planned_bytes


@from_5
@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (LlamaConfig(**BASE), 2, "'llama' cannot be served with expert_parallel: transformers has no"),
        (
            MixtralConfig(**{**BASE, "num_local_experts": 3}),
            2,
            "a number of experts of 'mixtral' that is a multiple of tensor_parallel_size=2 .*, got 3",
        ),
        (MixtralConfig(**{**BASE, "num_local_experts": 4}), 1, "tensor_parallel_size above 1 .* got 1"),
    ],
    ids=["no experts", "an odd number", "one rank"],
)
def test_what_has_no_share_of_experts_is_refused(
    config: Any, size: int, message: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    # Nobody reads it.
    save_file({"none": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        HPUDuoModel.from_pretrained(tmp_path, tensor_parallel_size=size, expert_parallel=True, num_blocks=16)


@from_5
def test_names_and_parts_of_the_experts_of_a_rank() -> None:
    config = MixtralConfig(**{**BASE, "num_local_experts": 6})
    share = ExpertShare.of(config, Ranks(1, 3))
    assert share == ExpertShare(6, 2, 2)
    moe = "model.layers.0.block_sparse_moe"
    assert share.name(f"{moe}.experts.1.w1.weight") is None
    assert share.name(f"{moe}.experts.3.w1.weight") == f"{moe}.experts.1.w1.weight"
    assert share.name(f"{moe}.gate.weight") == f"{moe}.gate.weight"
    for path, shape, span in (
        ("mlp.experts.gate_up_proj", (6, 8, 4), (2, 4)),
        ("mlp.experts.down_proj_bias", (6, 4), (2, 4)),
        ("block_sparse_moe.input_linear", (6, 8, 4), (2, 4)),
        ("block_sparse_moe.experts.3.w1", (6, 4), None),
        ("mlp.experts.e_score_correction_bias", (6,), None),
    ):
        assert share.are_in(path.split("."), shape)
        assert share.span(path.split("."), shape) == span
    for path, shape in (("mlp.shared_experts.up_proj", (6, 4)), ("block_sparse_moe.gate", (6, 4))):
        assert not share.are_in(path.split("."), shape)
