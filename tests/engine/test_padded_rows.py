"""Rows that only pad a step to its bucket, which the CPU's linear layers leave out, change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from graphs import BatchShape, BucketTable, Phase
from hpu_duo import HPUDuoModel
from hpu_duo.modeling.attention import LiveRows
from hpu_duo.modeling.packed_linear import PanelLinear
from hpu_duo.sampling import SamplingParams
from kernels_ref.x86.library import is_supported
from tests.engine.tiny import PATTERN, serve, tokens_of
from tests.modeling.families import BASE, BLOCK, prompts_of, save_random

pytestmark = pytest.mark.instruction_set

WHOLE = Phase(causal=True, shared=True, unique=True)
TABLE = BucketTable(
    tuple(BatchShape(WHOLE, query_len, 64, 64, 8) for query_len in (8, 64, 80)),
    lambda bucket: 1.0 + bucket.query_len,
)
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that the kernels for CPUs with AVX512-BF16 take."""
    directory = tmp_path_factory.mktemp("bfloat16")
    sizes = {"hidden_size": 128, "intermediate_size": 160, "head_dim": 32, "num_hidden_layers": 2}
    save_random(LlamaConfig(**{**BASE, **sizes}), directory).to(torch.bfloat16).save_pretrained(directory)
    return directory


def load(checkpoint: Path, **options: Any) -> HPUDuoModel:
    return HPUDuoModel.from_pretrained(
        checkpoint,
        dtype="bfloat16",
        pattern=PATTERN,
        block_size=BLOCK,
        num_blocks=64,
        max_num_seqs=8,
        max_num_batched_tokens=80,
        max_model_len=96,
        **options,
    )


@pytest.mark.parametrize("trim_chunks", [False, True])
def test_padded_steps_give_the_tokens_of_exact_ones(
    checkpoint: Path, trim_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of([9, 30, 28])  # whose tokens are no near ties: float32 gives the same
    exact = load(checkpoint)
    with monkeypatch.context() as patch:
        patch.setattr(LiveRows, "set", lambda *_: None)  # layers that are told nothing compute all rows
        expected = tokens_of(serve(exact, prompts, GREEDY))
    padded = load(checkpoint, buckets=TABLE, trim_chunks=trim_chunks)
    layers = [each for each in padded.engine.runner.model.model.modules() if isinstance(each, PanelLinear)]
    assert bool(layers) == is_supported()
    assert tokens_of(serve(padded, prompts, GREEDY)) == expected
    assert padded.stats().num_padded_tokens > 0
    assert exact.stats().num_padded_tokens == 0
