"""bfloat16: as close to float32 as transformers' own bfloat16 is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.modeling.loading import dtype_option
from tests.modeling.dense_oracle import oracle_logits
from tests.modeling.driving import greedy_logits, teacher_forced
from tests.modeling.families import BLOCK, VOCAB, prompts_of, save_random
from tests.tiers import crossed

pytestmark = pytest.mark.instruction_set

NUM_NEW = 12
SLACK = 1.5


MODELS = pytest.mark.parametrize(
    ("model", "attention"),
    crossed(
        {f"{seed}-{head_dim}": (seed, head_dim) for seed, head_dim in ((0, 16), (1, 16), (2, 16), (0, 64))},
        ["reference", "sdpa"],
        fast=("0-16", "1-16", "0-64"),
    ),
)
"""Seeds and head sizes, with each implementation in turn."""


def make_checkpoint(directory: Path, seed: int, head_dim: int) -> tuple[Any, Any]:
    """Weights that bfloat16 holds exactly, as a float32 and as a bfloat16 model.

    Heads of 16 are too small for the decode kernel of CPUs with AVX512-BF16, heads of 64 are not.
    """
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
    )
    model = save_random(config, directory, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3 if parameter.ndim >= 2 else 1.0)
    model.to(torch.bfloat16).save_pretrained(directory)
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", **dtype_option(dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    return exact, rounded


def load(directory: Path, attention: str, **options: Any) -> HPUDuoModel:
    return HPUDuoModel.from_pretrained(
        directory,
        dtype="bfloat16",  # "auto" computes in float32 on a CPU without AVX512-BF16
        attention=attention,
        block_size=BLOCK,
        max_num_seqs=6,
        max_num_batched_tokens=13,
        max_model_len=96,
        **options,
    )


def errors(logits: list[torch.Tensor], expected: list[torch.Tensor]) -> tuple[float, float]:
    difference = (torch.cat(logits) - torch.cat(expected)).abs()
    return difference.max().item(), difference.mean().item()


@MODELS
def test_error_is_no_more_than_that_of_transformers(
    tmp_path: Path, model: tuple[int, int], attention: str
) -> None:
    seed, head_dim = model
    exact, rounded = make_checkpoint(tmp_path, seed, head_dim)
    prompts, new = prompts_of(seed=seed), prompts_of([NUM_NEW] * 6, seed=seed + 100)
    expected = [teacher_forced(exact, *text) for text in zip(prompts, new)]
    theirs = errors([teacher_forced(rounded, *text) for text in zip(prompts, new)], expected)

    served = load(tmp_path, attention)
    assert served.engine.runner.store.layers[0][0].views[0].dtype == torch.bfloat16
    ours = errors([x for _, x in greedy_logits(served.engine, prompts, NUM_NEW, new)], expected)
    assert ours[0] <= SLACK * theirs[0]
    assert ours[1] <= SLACK * theirs[1]


@MODELS
def test_error_with_streaming_heads_is_no_more_than_that_of_a_masked_model(
    tmp_path: Path, model: tuple[int, int], attention: str
) -> None:
    seed, head_dim = model
    exact, rounded = make_checkpoint(tmp_path, seed, head_dim)
    mask = np.array([[True, False], [False, False], [False, True]])
    pattern = HeadPattern(mask.astype(np.float32), 2, 9, retrieval=mask)
    prompts, new = prompts_of(seed=seed), prompts_of([NUM_NEW] * 6, seed=seed + 100)

    def masked(model: Any) -> list[torch.Tensor]:
        texts = zip(prompts, new)
        return [oracle_logits(model, pattern, [*p, *n[:-1]])[len(p) - 1 :] for p, n in texts]

    expected = masked(exact)
    theirs = errors(masked(rounded), expected)
    served = load(tmp_path, attention, pattern=pattern)
    ours = errors([x for _, x in greedy_logits(served.engine, prompts, NUM_NEW, new)], expected)
    assert ours[0] <= SLACK * theirs[0]
    assert ours[1] <= SLACK * theirs[1]
