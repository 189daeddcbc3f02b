"""Layers share compiled code exactly when nothing tells them apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig, SmolLM3Config

from graphs.backends.compile import CompileBackend
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.modeling.attention import LayerKind
from hpu_duo.modeling.quantised.format import Activations
from tests.modeling.families import BASE, BLOCK, FAMILIES, IS_5, Zoo, greedy, prompts_of, save_random
from tests.tiers import EXHAUSTIVE

EXPERTS = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def num_kinds(path: Path, **options: Any) -> int:
    served = HPUDuoModel.from_pretrained(path, max_model_len=64, max_num_seqs=2, block_size=BLOCK, **options)
    return len(served.engine.runner.model.kinds)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama", 1), ("smollm3", 2), ("gemma3", 2), ("qwen2_partly_sliding", 2), ("gpt2", 1), ("qwen3_moe", 1)],
)
def test_families_have_as_many_kinds_as_their_layers_differ(zoo: Zoo, name: str, expected: int) -> None:
    if name not in FAMILIES:
        pytest.skip("not served with the installed transformers")
    assert num_kinds(zoo.load(name)[1]) == expected


def test_each_split_into_retrieval_and_streaming_heads_is_a_kind(zoo: Zoo) -> None:
    mask = np.array([[True, True], [False, False], [False, True], [True, False]])
    pattern = HeadPattern(mask.astype(np.float32), 2, 3, retrieval=mask)
    assert num_kinds(zoo.load("llama")[1], pattern=pattern) == 3


@pytest.mark.parametrize(
    "make_config",
    [
        lambda: SmolLM3Config(**{**BASE, "no_rope_layers": [1, 0, 1, 0]}),
        pytest.param(
            lambda: Qwen3MoeConfig(**{**BASE, **EXPERTS, "mlp_only_layers": [0, 2]}),
            marks=(
                *EXHAUSTIVE,
                pytest.mark.skipif(not IS_5, reason="before 5, only a loop over the chosen experts"),
            ),
        ),
        pytest.param(lambda: LlamaConfig(**BASE), marks=EXHAUSTIVE),
    ],
    ids=["rope_or_not", "experts_or_not", "all_alike"],
)
def test_compiled_layers_entered_without_checks_run_the_code_of_their_own_kind(
    tmp_path: Path, make_config: Callable[[], PretrainedConfig]
) -> None:
    model = save_random(make_config(), tmp_path)
    served = HPUDuoModel.from_pretrained(
        tmp_path,
        graphs=CompileBackend(compiler="eager", guards=False),
        attention="reference",
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        block_size=BLOCK,
    )
    prompts = prompts_of([9, 20])
    output = served.generate(prompts, max_new_tokens=6)
    for row, prompt in zip(output, prompts):
        assert row[len(prompt) : len(prompt) + 6].tolist() == greedy(model, prompt, 6)


def test_a_layer_with_another_plain_value_or_another_shape_is_of_another_kind(zoo: Zoo) -> None:
    path = zoo.load("llama")[1]
    served = HPUDuoModel.from_pretrained(path, max_model_len=64, max_num_seqs=2, block_size=BLOCK)
    model = served.engine.runner.model
    first, second = model.model.model.layers[:2]
    spec = model.specs[0]
    kind = LayerKind(first, spec)
    assert kind == LayerKind(second, spec)
    assert hash(kind) == hash(LayerKind(second, spec))
    for value in (1, 1.0, True, None, "1"):
        second.mlp.flag = value
        assert kind != LayerKind(second, spec)
        first.mlp.flag = value
        assert LayerKind(first, spec) == LayerKind(second, spec)
        first.mlp.flag = 1 if value is True else True
        assert LayerKind(first, spec) != LayerKind(second, spec)
    first.mlp.flag = Activations("int8")
    for given, is_same in ((Activations("fp8"), False), (Activations("int8"), True)):
        second.mlp.flag = given
        assert (LayerKind(first, spec) == LayerKind(second, spec)) == is_same
    del first.mlp.flag, second.mlp.flag
    second.mlp.down_proj.weight = torch.nn.Parameter(second.mlp.down_proj.weight.to(torch.float64))
    assert kind != LayerKind(second, spec)
