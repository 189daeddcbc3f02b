"""Ranks with packed weights of 16 bits: bfloat16 where a CPU multiplies it, else float32 arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpu_duo import HPUDuoModel, SamplingParams
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.device import run_processes
from hpu_duo.lab.tasks.passkeys import document, question, token_counter
from hpu_duo.modeling import precision
from hpu_duo.modeling.packed_linear import can_pack
from tests.modeling.families import prompts_of
from tests.modeling.test_mixed_precision import save
from tests.needs import needs_x86_kernels
from tests.ranks.work import Case, serve, serve_here

pytestmark = pytest.mark.usefixtures("forked_ranks")


@contextmanager
def float32_arithmetic(name: str) -> Iterator[None]:
    """As on a CPU that does not multiply 16-bit floats."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "_is_multiplied", lambda dtype: False)
        yield


CASES: dict[str, tuple[str, torch.dtype, dict[str, object]]] = {
    "heads": ("llama", torch.bfloat16, {}),
    "context": ("llama", torch.float16, {"retrieval_parallel": "context"}),
    "experts": ("mixtral", torch.bfloat16, {"expert_parallel": True}),
    "widths of experts": ("mixtral", torch.float16, {}),
}


@needs_x86_kernels
@pytest.mark.parametrize(
    "names", [("context", "experts"), pytest.param(("heads", "widths of experts"), marks=pytest.mark.slow)]
)
def test_two_ranks_keep_16_bits_and_give_the_tokens_of_one(names: tuple[str, ...], tmp_path: Path) -> None:
    def case(name: str) -> Case:
        family, dtype, parallel = CASES[name]
        path = save(family, dtype, tmp_path / name)
        greedy = [SamplingParams(max_tokens=10, temperature=0)] * 3
        return Case(path, prompts_of((13, 5, 30)), greedy, model={"dtype": "auto"}, parallel=parallel)

    cases = {name: case(name) for name in names}
    answers = run_processes(serve, (cases, float32_arithmetic), [{}] * 2, 120)[0]
    for name, each in cases.items():
        with float32_arithmetic(name):
            alone = serve_here(replace(each, parallel={}))
        assert answers[name].tokens == alone.tokens
        stored = answers[name].seen["dtypes"]
        assert stored == alone.seen["dtypes"]
        assert stored[0] == stored[1] != "float32"


@pytest.mark.slow
@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="needs a CPU whose oneDNN multiplies bfloat16")
@pytest.mark.parametrize("retrieval_parallel", ["heads", "context"])
def test_two_ranks_with_packed_weights_find_a_passkey(retrieval_parallel: str) -> None:
    model = HPUDuoModel.from_pretrained(
        MODEL_DIR,
        device="cpu",
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=2,
        tensor_parallel_size=2,
        retrieval_parallel=retrieval_parallel,
    )
    assert model.tokenizer is not None
    text = document(token_counter(model.tokenizer), num_tokens=600, num_passkeys=1, passkey_words=3, seed=0)
    (passkey,) = text.passkeys
    prompts = model.tokenizer([text.text + question(passkey)])["input_ids"]
    (row,) = model.generate(prompts, max_new_tokens=3)
    assert model.tokenizer.decode(row[len(prompts[0]) :]).strip() == passkey.answer.strip(" .")
