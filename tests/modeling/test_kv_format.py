"""A second format of keys and values in the engine: a file, and the line that registers it.

What it serves is compared with an engine of plain floats that gets keys and values rounded ahead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graphs import BucketTable
from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel, SamplingParams
from hpu_duo.config.engine import CacheConfig, EngineConfig, ModelConfig
from kernels_ref import PLAIN, KVFormat
from kernels_ref.formats import format_of, register_format
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import BLOCK, prompts_of
from tests.modeling.int8_format import INT8, Int8, rounded, rounded_ahead
from tests.tiers import crossed, further

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PATTERNS = pytest.mark.parametrize("pattern", [*further(None), PATTERN], ids=["full", "duo"])
IN_INT8 = EngineConfig(
    model=ModelConfig(path="."), cache=CacheConfig(kv_cache_dtype=INT8.name, ring_dtype=INT8.name)
)
TABLE = BucketTable.from_strings(["csu/q16/s48/u48/l4"])


def load(tiny: Tiny, **options: Any) -> HPUDuoModel:
    """Serve it with int8 stores."""
    return tiny.load(config=IN_INT8, **options)


def expected_of(
    tiny: Tiny, patch: pytest.MonkeyPatch, prompts: list[list[int]], params: Any = GREEDY, **options: Any
) -> Any:
    """Tokens of the engine of plain floats, without reuse or pressure."""
    with rounded_ahead(patch):
        return tokens_of(serve(tiny.load(enable_prefix_caching=False, **options), prompts, params))


def test_a_store_gives_back_what_was_encoded() -> None:
    x = torch.randn(3, 2, 16) * torch.logspace(-30, 30, 3)[:, None, None]
    x[1, 1] = 0
    given_back = Int8().decode(Int8().encode(x), torch.float32)
    assert given_back.equal(rounded(x))
    assert not given_back.equal(x)


@PATTERNS
def test_prefix_hits_give_the_tokens_of_whole_prompts(
    tiny: Tiny, pattern: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = prompts_of((3 * BLOCK,), seed=2)[0]
    prompts = [[*document, *tail] for tail in prompts_of((5, 3, 7), seed=3)]
    expected = expected_of(tiny, monkeypatch, prompts, pattern=pattern)
    assert expected != tokens_of(serve(tiny.load(pattern=pattern), prompts, GREEDY))
    served = load(tiny, pattern=pattern)
    assert [tokens_of(serve(served, [prompt], GREEDY))[0] for prompt in prompts] == expected
    assert served.stats().prefixes.num_hit_tokens >= 2 * len(document)


@PATTERNS
def test_parallel_samples_fork_and_requests_are_preempted(
    tiny: Tiny, pattern: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of((13, 5, 22), seed=1)
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=20, n=3, ignore_eos=True)
    options: dict[str, Any] = {"pattern": pattern, "max_num_seqs": 5}
    expected = expected_of(tiny, monkeypatch, prompts, params, **options)
    tight = load(tiny, num_blocks=10, max_model_len=60, **options)
    assert tokens_of(serve(tight, prompts, params)) == expected
    assert tight.stats().num_preemptions > 0


@PATTERNS
def test_a_saved_context_is_loaded_into_the_same_format_only(
    tiny: Tiny, pattern: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, question = prompts_of((5 * BLOCK + 3, 4), seed=9)
    expected = expected_of(tiny, monkeypatch, [[*document, *question]], pattern=pattern)
    with load(tiny, pattern=pattern).prefill(document) as context:
        context.save(tmp_path / "document")
    served = load(tiny, pattern=pattern)
    with served.load_context(tmp_path / "document") as context:
        done = served.engine.generate([context.prompt(question)], GREEDY, context=context.hold())
        assert done[0][0].num_cached_tokens >= context.num_held_tokens > 0
        assert tokens_of(done) == expected
    with pytest.raises(ValueError, match=f"with kv_cache_dtype auto, got one with {INT8.name}"):
        tiny.load(pattern=pattern).load_context(tmp_path / "document")


OTHERS = {
    "rule": {"attention_rule": "sink_band:sink=2,band=9"},
    "chosen blocks": {"attention_rule": "top_blocks:blocks=3"},
    "budget": {"kv_policy": "h2o", "kv_budget": 12, "kv_chunk": 8},
    "whole prompts": {
        "kv_policy": "snapkv:window=3,kernel=3",
        "kv_budget": 12,
        "kv_prompt": "whole",
        "enable_prefix_caching": False,
    },
    "replayed": {"graphs": "replay", "buckets": TABLE},
    "compiled": {"graphs": CompileBackend("eager"), "buckets": TABLE},
    "rows of several tokens": {"decode_len": 4, "max_num_batched_tokens": 24},
    "CPU kernels": {"attention": "sdpa"},
    "simulated HPU": {"attention": "auto", "device": "hpu-sim"},
}


@pytest.mark.usefixtures("default_buckets")
@pytest.mark.parametrize(
    "name", crossed(list(OTHERS), fast=("chosen blocks", "budget", "replayed", "compiled"))
)
def test_other_kinds_of_heads_and_backends_attend_to_what_the_store_gives_back(
    tiny: Tiny, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, options = prompts_of((13, 5, 30), seed=4), {"enable_prefix_caching": False, **OTHERS[name]}
    own = ("graphs", "buckets", "attention", "device", "enable_prefix_caching")
    plain = {key: value for key, value in options.items() if key not in own}
    expected = expected_of(tiny, monkeypatch, prompts, **plain)
    assert tokens_of(serve(load(tiny, **options), prompts, GREEDY)) == expected


@PATTERNS
@pytest.mark.parametrize("kind", ["kept", "budget", "whole prompts"])
def test_stores_take_what_the_memory_plan_says(tiny: Tiny, pattern: Any, kind: str) -> None:
    served = load(tiny, pattern=pattern, num_blocks=9, max_model_len=60, **OTHERS.get(kind, {}))
    store, dim = served.engine.runner.store, served.engine.runner.store.plan.layers[0].head_dim
    assert store.num_bytes == store.plan.total_bytes
    assert {layer.token_bytes(layer.groups[0], 4) for layer in store.plan.layers} == {2 * (dim + 4)}
    assert served.stats().kv_bytes == store.plan.total_bytes


def test_what_cannot_read_or_keep_a_format_says_so(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=f"in the model's dtype, ring_dtype 'auto', got '{INT8.name}'"):
        load(tiny, kv_policy="h2o:positions=cache", kv_budget=12)
    with pytest.raises(ValueError, match=f"one of auto, .*{INT8.name}.*, got 'int3'"):
        format_of("int3")
    with pytest.raises(ValueError, match="expected a name that no format"):
        register_format(KVFormat(PLAIN.name, Int8(), Int8()))
