"""Contexts of a model that two ranks share: asked as usual, and neither saved nor loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.modeling.families import BLOCK, Zoo, prompts_of

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.mark.slow
def test_ranks_hold_contexts_and_refuse_files(zoo: Zoo, tmp_path: Path) -> None:
    document, params = prompts_of((3 * BLOCK + 2,), seed=9)[0], SamplingParams(temperature=0, max_tokens=4)
    path = zoo.load("llama")[1]
    options = {"dtype": "float32", "block_size": BLOCK, "max_num_seqs": 2, "max_model_len": 64}
    cold = HPUDuoModel.from_pretrained(path, enable_prefix_caching=False, **options)  # type: ignore[arg-type]
    [[expected]] = cold.engine.generate([[*document, 5, 6]], params)
    shared = HPUDuoModel.from_pretrained(path, tensor_parallel_size=2, **options)  # type: ignore[arg-type]
    with shared.prefill(document) as context:
        [[found]] = shared.engine.generate([context.prompt([5, 6])], params, context=context.hold())
        assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, 3 * BLOCK)
        with pytest.raises(ValueError, match="with tensor_parallel_size=1"):
            context.save(tmp_path / "document")
    with pytest.raises(ValueError, match="with tensor_parallel_size=1"):
        shared.load_context(tmp_path / "document")
