"""Every family gives the tokens of a cold engine while prefixes are cached and evicted, under salts too."""

from __future__ import annotations

from random import Random

import pytest

from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import serve, tokens_of
from tests.modeling.families import BLOCK, FAMILIES, Zoo, prompts_of


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        name if name in ("gemma2", "qwen3_moe") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in FAMILIES
    ],
)
def test_a_full_cache_changes_no_token_of_any_family(zoo: Zoo, family: str) -> None:
    draw = Random(family)
    options = {"block_size": BLOCK, "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 96}
    _, path = zoo.load(family)
    cold = HPUDuoModel.from_pretrained(path, dtype="float32", enable_prefix_caching=False, **options)
    # More snapshots than the share of so few blocks.
    snapshots = {"num_prefix_snapshots": 4} if cold.engine.scheduler.limits.uses_rows else {}
    warm = HPUDuoModel.from_pretrained(path, dtype="float32", num_blocks=18, **snapshots, **options)
    stems = prompts_of((45, 45), seed=3)
    for turn in range(3):
        prompts = [
            [*draw.choice(stems)[: draw.choice([BLOCK, 17, 29, 33, 40])], *tail]
            for tail in prompts_of([draw.randrange(1, 20) for _ in range(6)], seed=turn)
        ]
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=draw.randrange(1, 24),
                ignore_eos=True,
                cache_salt=draw.choice([None, None, "salt"]),
            )
            for _ in prompts
        ]
        assert tokens_of(serve(warm, prompts, params)) == tokens_of(serve(cold, prompts, params))
    prefixes = warm.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens > 0
    assert prefixes.num_evicted_blocks + prefixes.num_evicted_snapshots > 0
