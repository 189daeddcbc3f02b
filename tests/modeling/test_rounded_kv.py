"""Stores of 16-bit floats under a float32 model: bfloat16 and float16.

What they serve is compared with an engine of plain floats that gets keys and values rounded ahead.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphs import BucketTable
from hpu_duo import SamplingParams
from hpu_duo.config.engine import CacheConfig, EngineConfig, ModelConfig
from kernels_ref.formats import ROUNDED, Rounded
from tests.engine.tiny import PATTERN, Tiny, make_tiny, serve, tokens_of
from tests.modeling.families import prompts_of
from tests.modeling.int8_format import rounded_ahead
from tests.tiers import crossed

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TABLE = BucketTable.from_strings(["csu/q16/s48/u48/l4"])
KINDS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "rings": {"pattern": PATTERN},
    "rule": {"attention_rule": "sink_band:sink=2,band=9"},
    "chosen blocks": {"attention_rule": "top_blocks:blocks=3"},
    "budget": {"kv_policy": "h2o", "kv_budget": 12, "kv_chunk": 8},
    "replayed": {"graphs": "replay", "buckets": TABLE},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("kind", "dtype"), crossed(list(KINDS), {str(each): each for each in ROUNDED}))
def test_tokens_attend_to_keys_and_values_as_they_are_stored(
    tiny: Tiny, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, options = prompts_of((13, 5, 30), seed=4), {"attention": "sdpa", **KINDS[kind]}
    plain = {key: value for key, value in options.items() if key not in ("graphs", "buckets")}
    with rounded_ahead(monkeypatch, lambda x: x.to(dtype).float()):
        expected = tokens_of(serve(tiny.load(enable_prefix_caching=False, **plain), prompts, GREEDY))
    settings = EngineConfig(
        model=ModelConfig(path="."),
        cache=CacheConfig(kv_cache_dtype=ROUNDED[dtype].name, ring_dtype=ROUNDED[dtype].name),
    )
    served = tiny.load(config=settings, **options)
    assert tokens_of(serve(served, prompts, GREEDY)) == expected
    stores = served.engine.runner.store.layers[0]
    assert {each.dtype for units in stores for each in units.tensors} == {dtype}


def test_numbers_beyond_float16_are_stored_as_its_largest() -> None:
    stored = Rounded(torch.float16).encode(torch.tensor([1e6, -1e6, 1.0]))[0]
    assert stored.tolist() == [65504.0, -65504.0, 1.0]
