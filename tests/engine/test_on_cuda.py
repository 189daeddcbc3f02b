"""The engine on a CUDA device, in float32: the tokens of the CPU, whatever a layer stores and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import prompts_of
from tests.modeling.test_shared_keys import shared
from tests.modeling.test_value_sizes import OPTIONS
from tests.modeling.test_value_sizes import saved as saved_latents
from tests.quantised.test_activations import WAYS, write
from tests.quantised.test_checkpoints import load, tokens, twins
from tests.quantised.writers import KINDS
from tests.recurrent import hybrids

pytestmark = pytest.mark.gpu
LOOPS = [[5, 9, 6, 8, 7] * 5, [3, 4] * 8, *prompts_of([17, 1], seed=4)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DUO = {"pattern": PATTERN}
H2O: dict[str, Any] = {"kv_policy": "h2o", "kv_budget": 16, "kv_chunk": 8}
CASES: dict[str, dict[str, Any]] = {
    "int8": {"kv_cache_dtype": "int8_per_token_head", **DUO},
    "int4": {"kv_cache_dtype": "int4_per_token_head", **DUO},
    "fp8": {"kv_cache_dtype": "fp8", **DUO},
    "scaled fp8": {"kv_cache_dtype": "fp8_per_token_head"},
    "k8v4": {"kv_cache_dtype": "k8v4"},
    "drafts": {"speculative_config": NGRAM, **DUO},
    "drafts, int8": {"speculative_config": NGRAM, "kv_cache_dtype": "int8_per_token_head", **DUO},
    "budget": H2O,
    "budget, drafts": {"speculative_config": NGRAM, **H2O},
    "self drafts": {"speculative_config": {"method": "duo", "num_speculative_tokens": 3}, **DUO},
    "weights": {"quantization": "int8"},
    "int4 weights": {"quantization": "int4"},
    "fp8 weights": {"quantization": "fp8"},
    "streamed": {"graphs": "eager", "cpu_offload_gb": 1e-6, **DUO},
    "zig-zag": {"graphs": "eager", "cpu_offload_gb": 1e-6, "offload_num_batches": 2},
    "captured": {"graphs": "cuda", **DUO},
    "captured, int4": {"graphs": "cuda", "kv_cache_dtype": "int4_per_token_head", **DUO},
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_cpu(tiny: Tiny, name: str) -> None:
    options = CASES[name]
    wanted = tiny.load(**{**options, "device": "cpu", "graphs": "eager"})
    served = tiny.load(**{"attention": "auto", **options, "device": "cuda"})
    for _ in range(2):  # the second time from the prefix cache
        assert tokens_of(serve(served, LOOPS, GREEDY)) == tokens_of(serve(wanted, LOOPS, GREEDY))


@pytest.mark.parametrize("name", [*WAYS, "int8 zeros", "packed channel", "float channel"])
def test_tokens_of_codes_are_those_of_the_cpu(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, WAYS[name]) if name in WAYS else twins(tmp_path, "LlamaConfig", KINDS[name])[1]
    served = load(path, device="cuda")
    is_read = name not in ("fp8 by group", "int8 inputs, int4 weights")  # groups of 16 inputs
    assert ("Triton" in served.stats().resolved.weights) == is_read
    assert tokens(served) == tokens(load(path, device="cpu"))


def test_tokens_of_weights_on_a_disk_are_those_of_the_cpu(tiny: Tiny, tmp_path: Path) -> None:
    wanted = tokens_of(serve(tiny.load(device="cpu", graphs="eager"), LOOPS, GREEDY))
    served = tiny.load(
        device="cuda", graphs="eager", offload_policy="0,50,100,0,100,0", offload_disk=tmp_path
    )
    assert tokens_of(serve(served, LOOPS, GREEDY)) == wanted


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3NextConfig",
        "Lfm2Config",
        "OlmoHybridConfig",
        "GraniteMoeHybridConfig",
        "NemotronHConfig",
        "FalconH1Config",
    ],
)
def test_tokens_of_states_are_those_of_the_cpu(tmp_path: Path, name: str) -> None:
    hybrids.saved(tmp_path, name)
    cpu, cuda = (hybrids.load(tmp_path, device=device, dtype="float32") for device in ("cpu", "cuda"))
    assert tokens_of(serve(cuda, LOOPS, GREEDY)) == tokens_of(serve(cpu, LOOPS, GREEDY))


def test_tokens_of_latents_are_those_of_the_cpu(tmp_path: Path) -> None:
    saved_latents(tmp_path, "deepseek_v3")
    cpu, cuda = (
        HPUDuoModel.from_pretrained(tmp_path, **{**OPTIONS, "device": device}) for device in ("cpu", "cuda")
    )
    assert tokens_of(serve(cuda, LOOPS, GREEDY)) == tokens_of(serve(cpu, LOOPS, GREEDY))


def test_tokens_of_layers_that_share_stores_are_those_of_the_cpu(tmp_path: Path) -> None:
    shared(tmp_path, "Gemma3nTextConfig")
    cpu, cuda = (
        HPUDuoModel.from_pretrained(tmp_path, **{**OPTIONS, "device": device}) for device in ("cpu", "cuda")
    )
    assert tokens_of(serve(cuda, LOOPS, GREEDY)) == tokens_of(serve(cpu, LOOPS, GREEDY))
