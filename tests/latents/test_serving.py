"""Models with latent attention, which store latents, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpu_duo import HPUDuoModel
from hpu_duo.heads import HeadPattern
from hpu_duo.lab import sim
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams
from kernels_ref import LatentBlocks, LatentRings
from tests.modeling.dense_oracle import oracle_logits
from tests.modeling.driving import greedy_logits
from tests.modeling.families import BLOCK, greedy, prompts_of
from tests.modeling.test_value_sizes import NUM_NEW, OPTIONS, saved
from tests.sim.workload import LIMITS, Workload
from tests.tiers import every


def test_other_formats_of_keys_and_values_are_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, "deepseek_v3")
    with pytest.raises(ValueError, match="kv_cache_dtype 'k8v4' is not served for latents"):
        HPUDuoModel.from_pretrained(tmp_path, kv_cache_dtype="k8v4", **OPTIONS)


def test_triton_kernels_are_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, "deepseek_v3")
    with pytest.raises(ValueError, match="this model stores latents"):
        HPUDuoModel.from_pretrained(tmp_path, attention="triton", **OPTIONS)


def test_a_kv_budget_stores_each_head_and_a_note_has_the_factor(tmp_path: Path) -> None:
    saved(tmp_path, "deepseek_v3")
    served = HPUDuoModel.from_pretrained(tmp_path, kv_policy="h2o", kv_budget=40, **OPTIONS)
    assert any("stored expanded: 160 elements" in note for note in served.stats().notes)


def test_a_saved_context_has_latents(tmp_path: Path) -> None:
    model = saved(tmp_path, "deepseek_v3")
    served, again = (HPUDuoModel.from_pretrained(tmp_path, **OPTIONS) for _ in range(2))
    prompt, rest = prompts_of([40, 2])
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with served.prefill(prompt) as context:
        context.save(tmp_path / "context")
    with again.load_context(tmp_path / "context"):
        [[found]] = again.engine.generate([[*prompt, *rest]], params)
    assert found.token_ids == greedy(model, [*prompt, *rest], NUM_NEW)
    prefixes = again.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens == len(prompt)


@pytest.mark.usefixtures("simulated_hpu", "default_buckets")
@pytest.mark.slow
@pytest.mark.parametrize(
    "family", every(3, ["deepseek_v2", "minicpm3", "mimo_v2_flash", "longcat_flash", "deepseek_v3"])
)
def test_a_simulated_hpu_forks_preempts_and_caches_prefixes_with_the_tokens_of_a_cpu(
    tmp_path: Path, family: str
) -> None:
    saved(tmp_path, family)
    work = Workload.random(24, seed=3)
    options = {**LIMITS, "block_size": BLOCK, "dtype": "float32"}
    served = HPUDuoModel.from_pretrained(tmp_path, device="hpu-sim", **options)
    # Layers of experts, one without, and layers with a window.
    assert len(served.engine.runner.model.kinds) <= 2 + (family == "mimo_v2_flash")
    served.warmup()
    with sim.watch() as seen:
        done = work.run(served)
    report, stats = seen.report(), served.stats()
    assert (report.new_graphs, report.new_recipes) == (0, 0)
    assert not report.excused
    assert stats.num_preemptions > 0
    assert stats.prefixes is not None
    # Evicted blocks leave snapshots of rings without hits.
    assert family == "mimo_v2_flash" or stats.prefixes.num_hit_tokens > 0
    on_cpu = HPUDuoModel.from_pretrained(
        tmp_path, device="cpu", attention="reference", buckets=served.engine.runner.graphs.table, **options
    )
    for request, (tokens, reason) in work.run(on_cpu).items():
        found, found_reason = done[request]
        assert found_reason == reason
        # An aborted request has the tokens of the steps until then.
        num_common = min(len(found), len(tokens)) if reason is FinishReason.ABORT else None
        assert found[:num_common] == tokens[:num_common]


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("deepseek_v2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_streaming_heads_read_rings_and_a_layer_of_them_stores_nothing_else(
    tmp_path: Path, family: str, attention: str
) -> None:
    model = saved(tmp_path, family)
    retrieval = np.array([[False, True, False, True], [False] * 4, [True] * 4, [True, False, False, False]])
    pattern = HeadPattern(retrieval.astype(np.float32), sink=2, recent=6, retrieval=retrieval)
    served = HPUDuoModel.from_pretrained(
        tmp_path, pattern=pattern, attention=attention, max_num_batched_tokens=13, **OPTIONS
    )
    prompts = prompts_of((1, 9, 41))
    for prompt, (new, logits) in zip(prompts, greedy_logits(served.engine, prompts, NUM_NEW)):
        expected = oracle_logits(model, pattern, [*prompt, *new])[len(prompt) - 1 : -1]
        torch.testing.assert_close(logits, expected.float(), atol=1e-4, rtol=0)
    plan = served.engine.runner.store.plan
    kinds = [tuple(type(group.kind) for group in layer.groups) for layer in plan.layers]
    assert kinds == [
        (LatentBlocks, LatentRings),
        (LatentRings,),
        (LatentBlocks,),
        (LatentBlocks, LatentRings),
    ]
    token_bytes = 4 * (16 + 8)
    assert (plan.block_bytes, plan.row_bytes) == (3 * BLOCK * token_bytes, 3 * (2 + 6) * token_bytes)
    assert served.engine.runner.store.num_bytes == plan.total_bytes


class OtherLinear(torch.nn.Linear):
    """A projection of a kind that is not split into one for keys and one for values."""


def test_latents_that_no_matrix_expands_are_stored_expanded_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(tmp_path, "deepseek_v3")
    kind = type(model.model.layers[0].self_attn)
    make = kind.__init__

    def make_other(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.kv_b_proj.__class__ = OtherLinear

    monkeypatch.setattr(kind, "__init__", make_other)
    served = HPUDuoModel.from_pretrained(tmp_path, **OPTIONS)
    [note] = [each for each in served.stats().notes if "stored expanded" in each]
    assert "160 elements" in note
    assert "have 24 (6.7 times as much memory)" in note
    plan = served.engine.runner.store.plan
    assert not any(isinstance(group.kind, LatentBlocks) for layer in plan.layers for group in layer.groups)
    prompts = prompts_of((1, 9, 41))
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    done = served.engine.generate(prompts, params)
    assert [sample.token_ids for [sample] in done] == [greedy(model, each, NUM_NEW) for each in prompts]
