"""Models with states by several ranks, which split them by heads, or by channels of convolutions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hpu_duo.device import run_processes
from hpu_duo.device.ranks import Ranks
from hpu_duo.modeling.loading import build_without_weights
from hpu_duo.modeling.probe import read_layers
from hpu_duo.modeling.transformers_internals import joined_parts
from hpu_duo.parallel.config import RankHeads
from hpu_duo.parallel.loading import make_cutter, read_share
from hpu_duo.parallel.share_trial import check_share
from hpu_duo.sampling import SamplingParams
from tests.modeling.families import prompts_of
from tests.ranks.work import Case, serve, serve_here
from tests.recurrent.hybrids import HYBRIDS, saved
from tests.tiers import EXHAUSTIVE

FAST = ("Lfm2Config", "Qwen3NextConfig", "GraniteMoeHybridConfig")
SMALL = {"max_num_batched_tokens": 13, "max_num_seqs": 3}
DRAFTING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


NORMED = {"mamba_rms_norm": True, "mamba_n_groups": 1}
EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 48,
}


@pytest.mark.parametrize(
    ("name", "size", "changes"),
    [
        ("FalconH1Config", 4, {}),
        ("FalconH1Config", 2, NORMED),
        ("FalconH1Config", 2, {**NORMED, "mamba_norm_before_gate": False}),
        ("FalconH1Config", 2, {"mamba_d_ssm": None, "mamba_expand": 2}),
        ("FalconH1Config", 2, {"time_step_limit": [0.001, 0.1]}),
        ("NemotronHConfig", 2, EXPERTS),
    ],
    ids=["4 ranks, 2 groups", "norm before gate", "norm after gate", "width", "limits", "experts"],
)
def test_shares_of_a_state_space_add_up_to_it(
    tmp_path: Path, name: str, size: int, changes: dict[str, Any]
) -> None:
    saved(tmp_path, name, **changes)
    config = AutoConfig.from_pretrained(tmp_path)
    whole = build_without_weights(tmp_path, config, torch.float32)
    layers, last = read_layers(whole), Ranks(size - 1, size)
    heads = [RankHeads.of([range(each.call.num_kv_heads)], each.call.num_heads, last) for each in layers]
    check_share(tmp_path, config, torch.float32, whole, layers, heads, last)


def test_ranks_read_their_rows_of_weights_that_are_joined(tmp_path: Path) -> None:
    model = saved(tmp_path, "OlmoHybridConfig")
    config = AutoConfig.from_pretrained(tmp_path)
    whole = build_without_weights(tmp_path, config, torch.float32)
    layers, path = read_layers(whole), "model.layers.0.linear_attn."
    expected = model.get_parameter(f"{path}conv1d.weight")
    for ranks in (Ranks(0, 2), Ranks(1, 2)):
        heads = [RankHeads.of([range(2)], 4, ranks)] * len(layers)
        cutter = make_cutter(config, whole, layers, heads, ranks)
        cut = cutter.cut(f"{path}conv1d.weight", expected.shape)
        assert cut is not None
        state = read_share(tmp_path, whole, cutter, ranks, joined=joined_parts("olmo_hybrid"))
        parts = [state[f"{path}{name}_conv1d.weight"][...] for name in "qkv"]
        assert sum(map(len, parts)) == len(expected) // 2
        assert torch.equal(torch.cat(parts), cut.of(expected))


SLOW = ("NemotronHConfig", "FalconH1Config", "OlmoHybridConfig", "Lfm3Config", "Lfm2MoeConfig")
LIKE_THEM = ("BambaConfig", "Qwen3_5MoeTextConfig", "Qwen3_5TextConfig")
assert {*FAST, *SLOW, *LIKE_THEM} == {*HYBRIDS}


@pytest.mark.parametrize(
    "names",
    [
        FAST,
        pytest.param(SLOW, marks=pytest.mark.slow),
        pytest.param(LIKE_THEM, marks=EXHAUSTIVE),
    ],
)
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Chunks, moved and preempted rows, prefixes that are taken up, and drafts that are right in part."""
    prompts = prompts_of([20, 1, 40, 9])
    prompts.append([*prompts[2][:35], 5, 6])
    greedy = [SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)] * len(prompts)
    cases, ones = {}, {}
    # Blocks are too few for all requests at once, or enough for cached prefixes.
    blocks = {name: (11, 40)[number % 2] for number, name in enumerate(names)}
    for name in names:
        saved(tmp_path / name, name)
        case = Case(
            tmp_path / name,
            prompts,
            greedy,
            scheduler=SMALL,
            cache={"num_blocks": blocks[name], "num_prefix_snapshots": 8},
        )
        ones[name] = serve_here(case)
        guesses = [
            [token if place % 5 else 3 for place, token in enumerate(each)] for each in ones[name].tokens
        ]
        params = [replace(greedy[0], prediction_token_ids=guess) for guess in guesses]
        cases[name] = replace(case, params=params, scheduler={**SMALL, "speculative_config": DRAFTING})
    preemptions = cached = 0
    for name, found in run_processes(serve, (cases,), [{}] * 2, 600)[0].items():
        assert found.error == ""
        assert found.tokens == ones[name].tokens
        assert found.seen["steps"] < ones[name].seen["steps"], "drafts are accepted"
        preemptions, cached = preemptions + found.seen["preemptions"], cached + found.seen["cached"]
        own, other = found.of_ranks
        assert own.kv_bytes == other.kv_bytes == own.planned_bytes
    assert preemptions > 0
    assert cached > 0
