"""The engine on Triton kernels: the tokens of the reference, and refusals at load."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpu_duo.sampling import SamplingParams
from hpu_duo.startup import blueprint as kernel_choice
from hpu_duo.startup.blueprint import choose_kernels
from kernels_ref import Implementation
from kernels_ref.triton import availability
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.tiers import further
from tests.triton_interpreter import replacing_once

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
PROMPTS = [[5, 9, 2, 7, 7, 1, 3, 8, 4, 6, 2, 5, 1, 9, 4, 4, 3, 8, 2, 6], [3, 1, 4], [2, 7, 1, 8, 2, 8]]
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True, scope="module")
def _fast_interpreter() -> Iterator[None]:
    with replacing_once():
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", [pytest.param(None, marks=pytest.mark.exhaustive), PATTERN], ids=["full", "duo"]
)
def test_greedy_tokens_equal_those_of_the_reference_on_cpu(tiny: Tiny, pattern: Any) -> None:
    options = {"pattern": pattern, "dtype": "float32", "max_chunk_rows": 2}
    wanted = serve(tiny.load(attention="reference", device="cpu", **options), PROMPTS, GREEDY)
    served = tiny.load(attention="triton", device=DEVICE, **options)
    assert {spec.impl for spec in served.engine.runner.model.specs} == {Implementation.TRITON}
    assert tokens_of(serve(served, PROMPTS, GREEDY)) == tokens_of(wanted)


@pytest.mark.parametrize("name", ["int8_per_token_head", *further("int4_per_token_head")])
def test_decoded_chunks_of_a_format_give_the_tokens_of_the_reference(tiny: Tiny, name: str) -> None:
    options = {"pattern": PATTERN, "dtype": "float32", "max_chunk_rows": 2, "kv_cache_dtype": name}
    wanted = serve(tiny.load(attention="reference", device="cpu", **options), PROMPTS, GREEDY)
    served = tiny.load(attention="triton", device=DEVICE, **options)
    assert tokens_of(serve(served, PROMPTS, GREEDY)) == tokens_of(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["eager", "compile", "cuda"])
def test_half_precision_serves_many_requests_on_a_gpu(tiny: Tiny, graphs: str) -> None:
    served = tiny.load(attention="auto", device="cuda", dtype="bfloat16", pattern=PATTERN, graphs=graphs)
    assert {spec.impl for spec in served.engine.runner.model.specs} == {Implementation.TRITON}
    done = serve(served, PROMPTS * 8, SamplingParams(max_tokens=24, ignore_eos=True))
    assert all(len(sample.token_ids) == 24 for samples in done for sample in samples)


def layers(head_dim: int = 64, softcap: float | None = None) -> Any:
    call = SimpleNamespace(head_dim=head_dim, value_head_dim=head_dim, softcap=softcap, latent=None)
    return (SimpleNamespace(call=call),)


def test_auto_takes_triton_on_cuda_whatever_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "problem", lambda device: None)
    assert choose_kernels("auto", CUDA, layers()).impl is Implementation.TRITON
    assert choose_kernels("auto", CUDA, layers(softcap=30.0)).impl is Implementation.TRITON
    assert choose_kernels("triton", CPU, layers()).impl is Implementation.TRITON
    assert choose_kernels("auto", CPU, layers()).impl is Implementation.SDPA


def test_auto_says_why_it_falls_back_on_cuda(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(availability, "problem", lambda device: "the package triton is not installed")
    with caplog.at_level(logging.WARNING, logger=kernel_choice.__name__):
        assert choose_kernels("auto", CUDA, layers()).impl is Implementation.REFERENCE
    assert "the package triton is not installed" in caplog.text


def test_asking_for_triton_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="head sizes of up to 256, and this model has heads of 512"):
        choose_kernels("triton", CUDA, layers(head_dim=512))
    with pytest.raises(ValueError, match="not on 'hpu'"):
        choose_kernels("triton", torch.device("hpu"), layers())


@pytest.mark.slow
@pytest.mark.exhaustive
def test_without_a_gpu_and_without_the_interpreter_the_engine_refuses_triton(tiny: Tiny) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    script = (
        "from hpu_duo import HPUDuoModel\n"
        f"HPUDuoModel.from_pretrained({str(tiny.path)!r}, device='cpu', attention='triton', max_model_len=64)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "ValueError: attention 'triton' is not available: without a GPU" in done.stderr
