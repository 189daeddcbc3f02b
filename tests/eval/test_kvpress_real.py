"""kvpress itself: bytes, and the tokens that its presses and the engine's policies keep of one prompt."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpu_duo import HPUDuoModel, SamplingParams
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.lab.eval import Subject
from hpu_duo.lab.eval.kvpress_peer import KVPressModel, KVPressProcess, press_of
from hpu_duo.lab.kept_tokens import kept_tokens
from hpu_duo.lab.tasks.passkeys import document

NAMED_BY = "HPU_DUO_TEST_KVPRESS_PYTHON"
NUM_KEPT = 200
NUM_SHARED = {"streaming-llm": 200, "expected-attention": 200, "snapkv": 198, "tova": 199}
"""Tokens of each head that both keep at least. SnapKV's press leaves the window out of its pooling, which two
tokens feel; TOVA's keeps the newest token whatever its weight."""
TOKEN_BYTES = 4 * 4 * 2 * 64 * 4
"""Layers, KV heads, keys and values, head dimension, float32."""
LOADED: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_num_seqs": 2,
    "enable_prefix_caching": False,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python() -> Path:
    named = os.environ.get(NAMED_BY)
    if named is None:
        pytest.skip(f"{NAMED_BY} names no Python that has kvpress")
    return Path(named)


@pytest.fixture(scope="module")
def full() -> Subject:
    return Subject(HPUDuoModel.from_pretrained(MODEL_DIR, **LOADED))


@pytest.fixture(scope="module")
def prompt(full: Subject) -> list[int]:
    return full.encode(document(full.count, 1000, 4, 8, 2**41 + 5).text, is_start=True)


def test_full_attention_is_that_of_the_engine_and_cut_prompts_have_the_bytes_asked_for(
    python: Path, full: Subject, prompt: list[int]
) -> None:
    continuations = [[full.encode("The secret word is a boat."), [7]]]
    with KVPressProcess(python, MODEL_DIR, "float32") as process:
        theirs = KVPressModel(process, full.tokenizer, full.max_len, (2,))
        ((wanted, _), (found, _)) = (one.score([prompt], continuations) for one in (full, theirs))
        for one, two in zip(wanted[0], found[0], strict=True):
            assert two.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        for policy in (*NUM_SHARED, "h2o"):
            model = KVPressModel(process, full.tokenizer, full.max_len, (2,), press_of(policy), NUM_KEPT)
            _, (kv,) = model.score([prompt], continuations)
            assert [one.held for one in kv] == [
                (NUM_KEPT + len(one)) * TOKEN_BYTES for one in continuations[0]
            ]


def test_presses_and_policies_keep_the_same_tokens_of_a_whole_prompt(python: Path, prompt: list[int]) -> None:
    presses = [press.as_request() for press in map(press_of, NUM_SHARED) if press is not None]
    asked = {"model": str(MODEL_DIR), "prompt": prompt, "kept": NUM_KEPT, "presses": presses}
    told = subprocess.run(
        [python, Path(__file__).parent / "kept_by_kvpress.py"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    for (policy, least), layers in zip(NUM_SHARED.items(), json.loads(told.stdout), strict=True):
        budget: dict[str, Any] = {"kv_policy": policy, "kv_budget": float(NUM_KEPT), "kv_prompt": "whole"}
        sizes: dict[str, Any] = {"max_model_len": 1200, "max_num_batched_tokens": 1208}
        engine = HPUDuoModel.from_pretrained(MODEL_DIR, **LOADED, **budget, **sizes).engine
        request = engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=3))
        engine.step()
        for heads, own in zip(layers, kept_tokens(engine, request).layers, strict=True):
            for positions, kept in zip(heads, own, strict=True):
                assert len(set(positions) & set(kept.positions.tolist())) >= least, policy
