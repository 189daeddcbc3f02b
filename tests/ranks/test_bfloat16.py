"""Ranks in bfloat16, whose linears are packed on a CPU that multiplies packed weights."""

from __future__ import annotations

import pytest
import torch

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.lab.tasks.passkeys import document, question, token_counter
from hpu_duo.modeling.packed_linear import can_pack

pytestmark = pytest.mark.usefixtures("forked_ranks")


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
