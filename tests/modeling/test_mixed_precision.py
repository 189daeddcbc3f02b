"""Float32 arithmetic on 16-bit weights, as on a CPU that does not multiply their dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from graphs.backends.base import EagerBackend
from hpu_duo import HPUDuoModel, SamplingParams
from hpu_duo.modeling import precision
from hpu_duo.modeling.experts import PanelExperts
from hpu_duo.modeling.packed_linear import PanelLinear
from kernels_ref.x86 import library
from tests.engine.tiny import serve, tokens_of
from tests.modeling.families import BLOCK, FAMILIES, greedy, prompts_of, save_random
from tests.modeling.int8_format import rounded_ahead
from tests.needs import needs_x86_kernels
from tests.tiers import crossed

NUM_NEW = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
LIMITS = {"block_size": BLOCK, "max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 96}

pytestmark = [
    needs_x86_kernels,
    pytest.mark.instruction_set,
]


WIDE = ("llama", "mixtral")
"""Families whose heads here have a size that our kernels read in 16 bits."""


def save(family: str, dtype: torch.dtype, directory: Path) -> Path:
    """A random checkpoint of 16 bits."""
    config = FAMILIES[family]()
    if family in WIDE:
        config.head_dim = 32
    save_random(config, directory).to(dtype).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("family", "dtype", "graphs"),
    crossed(
        ["llama", "qwen2", "gemma2", "mixtral"],
        {"bfloat16": torch.bfloat16, "float16": torch.float16},
        ["eager", "replay"],
        fast=("llama", "mixtral"),
    ),
)
def test_tokens_are_those_of_float32_on_the_same_weights(
    family: str, dtype: torch.dtype, graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_is_multiplied", lambda dtype: False)
    path, prompts = save(family, dtype, tmp_path), prompts_of((13, 5, 30), seed=4)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = [[greedy(model, prompt, NUM_NEW)] for prompt in prompts]
    served = HPUDuoModel.from_pretrained(path, device="cpu", graphs=graphs, **LIMITS)
    resolved = served.stats().resolved
    assert (resolved.dtype, resolved.weight_dtype) == ("float32", precision.name_of(dtype))
    assert resolved.kv_cache_dtype == (precision.name_of(dtype) if family in WIDE else "float32")
    if family in WIDE:
        plain = HPUDuoModel.from_pretrained(path, device="cpu", dtype="float32", **LIMITS)
        with rounded_ahead(monkeypatch, lambda x: x.to(dtype).float()):
            expected = tokens_of(serve(plain, prompts, GREEDY))
    assert tokens_of(serve(served, prompts, GREEDY)) == expected
    assert served.stats().notes == ()
    assert all(x.dim() < 3 for x in served.engine.runner.model.model.parameters())  # experts are packed


def test_without_packed_weights_all_of_the_model_is_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_is_multiplied", lambda dtype: False)
    path = save("llama", torch.float16, tmp_path)
    served = HPUDuoModel.from_pretrained(path, device="cpu", pack_weights=False, **LIMITS)
    assert {x.dtype for x in served.engine.runner.model.model.parameters()} == {torch.float32}
    assert any("the checkpoint is in float16" in note for note in served.stats().notes)


class OwnBackend(EagerBackend):
    """A backend of a user, which may compile steps."""

    name = "own"


@pytest.mark.parametrize(
    ("dtype", "options", "is_packed"),
    [
        (torch.float32, {"quantization": "int8"}, True),
        (torch.float32, {"quantization": "int8", "pack_weights": True}, True),
        (torch.float16, {"graphs": OwnBackend()}, False),
    ],
    ids=["float32 beside codes", "float32 on request", "own backend"],
)
def test_experts_are_packed_as_linears_are_and_where_no_backend_compiles_them(
    dtype: torch.dtype,
    options: dict[str, Any],
    is_packed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision, "_is_multiplied", lambda dtype: dtype == torch.float32)
    path = save("mixtral", dtype, tmp_path)
    served = HPUDuoModel.from_pretrained(path, device="cpu", **options, **LIMITS)
    modules = served.engine.runner.model.model.modules()
    assert any(isinstance(each, PanelExperts) for each in modules) == is_packed


@pytest.mark.parametrize("graphs", ["eager", "replay"])
def test_float32_weights_are_packed_where_that_is_wanted(
    graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompts = save("llama", torch.float32, tmp_path), prompts_of((13, 5, 30), seed=4)
    options: dict[str, Any] = {"device": "cpu", "graphs": graphs, "pack_weights": True, **LIMITS}
    served = HPUDuoModel.from_pretrained(path, **options)
    layers = [type(each) for each in served.engine.runner.model.model.modules()]
    assert PanelLinear in layers
    assert nn.Linear not in layers
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = [[greedy(model, prompt, NUM_NEW)] for prompt in prompts]
    assert tokens_of(serve(served, prompts, GREEDY)) == expected
    monkeypatch.setattr(library, "is_available", lambda dtype: False)
    with pytest.raises(ValueError, match="or weights that our kernels multiply in float32: got float32 on"):
        HPUDuoModel.from_pretrained(path, **options)
