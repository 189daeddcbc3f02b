"""Models whose last layers attend to keys and values of earlier ones."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.drafting import Drafter
from hpu_duo.heads import HeadPattern
from hpu_duo.lab.identify import Band, FullFrom, GatedModel
from hpu_duo.modeling import attention as attending
from hpu_duo.modeling.attention import Probe
from hpu_duo.sampling import SamplingParams
from kernels_ref import LayerSpec, QuestBlocks, unified_attention
from tests.modeling.driving import greedy_logits
from tests.modeling.families import (
    BASE,
    BLOCK,
    WINDOW,
    greedy,
    is_known,
    make_config,
    prompts_of,
    save_random,
)
from tests.tiers import EXHAUSTIVE, further

FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3nTextConfig": {"laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "Gemma4TextConfig": {"global_head_dim": 16, "use_double_wide_mlp": True},
}
SHARED = {
    **BASE,
    "num_kv_shared_layers": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": BASE["vocab_size"],
}


PATTERN: dict[str, Any] = {
    "pattern": HeadPattern(np.array([[0.0, 1.0]] * 2), sink=2, recent=9).binarise(threshold=0.5),
    "max_model_len": 64,
    "max_num_seqs": 3,
    "block_size": BLOCK,
    "max_num_batched_tokens": 13,
}
CAPTURE: dict[str, dict[str, Any]] = {
    "eager": {"attention": "reference"},
    "replay": {"attention": "sdpa", "graphs": "replay"},
    "compile": {"graphs": CompileBackend("eager")},
    # In bfloat16, an HPU's default, two tokens of one step are too close: transformers picks the other, too.
    "hpu-sim": {"device": "hpu-sim", "dtype": "float32"},
}


def shared(tmp_path: Path, name: str, **changes: Any) -> Any:
    if not is_known(name):
        pytest.skip("transformers has no such model yet")
    return save_random(make_config(name, **{**SHARED, **FAMILIES[name], **changes}), tmp_path)


@pytest.mark.usefixtures("default_buckets")
@pytest.mark.parametrize(
    ("name", "capture"),
    [
        pytest.param(
            *case,
            marks=() if case[1] == "hpu-sim" or case in zip(FAMILIES, ("eager", "replay")) else EXHAUSTIVE,
        )
        for case in product(FAMILIES, CAPTURE)
    ],
)
def test_layers_that_share_keys_and_values_have_one_store(tmp_path: Path, name: str, capture: str) -> None:
    model = shared(tmp_path, name)
    served = HPUDuoModel.from_pretrained(
        tmp_path,
        max_model_len=64,
        max_num_seqs=3,
        block_size=BLOCK,
        num_prefix_snapshots=8,
        max_num_batched_tokens=13,
        **CAPTURE[capture],
    )
    store = served.engine.runner.store
    assert [layer.source for layer in store.plan.layers] == [None, None, 0, 1]
    assert store.layers[2:] == store.layers[:2]
    assert store.num_bytes == store.plan.total_bytes
    alone = replace(store.plan, layers=tuple(replace(each, source=None) for each in store.plan.layers))
    assert (2 * store.plan.block_bytes, 2 * store.plan.row_bytes) == (alone.block_bytes, alone.row_bytes)
    # Chunks, mixed batches, moved rows, and a prefix that is taken up.
    prompts = prompts_of([20, 1, 40, 9])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for prompt in ([*prompts, [*prompts[2][:35], 5, 6]], [prompts[2]]):
        done = served.engine.generate(prompt, params)
        assert [sample.token_ids for [sample] in done] == [greedy(model, each, 8) for each in prompt]
    prefixes = served.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens > 0


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_token_of_each_row_passes_the_layers_behind_the_last_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, attention: str
) -> None:
    model = shared(tmp_path, name)
    options: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 3, "block_size": BLOCK}
    served = HPUDuoModel.from_pretrained(
        tmp_path, max_num_batched_tokens=13, graphs="eager", attention=attention, **options
    )
    writing, reading, queries = list[int](), list[int](), list[int]()

    def counted(q: torch.Tensor, *inputs: Any) -> torch.Tensor:
        if not inputs[4].writes:
            queries.append(len(q))
        return unified_attention(q, *inputs)

    monkeypatch.setattr(attending, "unified_attention", counted)
    for seen, layer in zip(
        (writing, reading), list(served.engine.runner.model.model.get_decoder().layers)[1:3]
    ):
        layer.mlp.register_forward_hook(lambda _, __, output, seen=seen: seen.append(output.shape[-2]))
    prompts = prompts_of([20, 1, 40])
    done = served.engine.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert [sample.token_ids for [sample] in done] == [greedy(model, each, 4) for each in prompts]
    assert max(writing) == 13
    assert max(reading) <= 3
    assert max(queries) <= 3


@pytest.mark.usefixtures("default_buckets")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Gemma4TextConfig", {"attention": "reference"}),
        ("Gemma3nTextConfig", {"attention": "sdpa"}),
        *further(
            ("Gemma4TextConfig", {"attention": "sdpa", "kv_cache_dtype": "k8v4"}),
            ("Gemma4TextConfig", {"device": "hpu-sim", "dtype": "float32", "attention": "hpu"}),
        ),
    ],
)
def test_attention_for_the_wanted_tokens_has_the_logits_of_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """Chunks, prompts beside decodes, sinks and windows of rings, blocks of one row and of several."""
    shared(tmp_path, name)
    prompts = prompts_of([20, 1, 40, 9])
    prompts.append([*prompts[2][:35], 5, 6])
    results = []
    for attends_for_some in (True, False):
        if not attends_for_some:
            monkeypatch.setattr(LayerSpec, "attends_for_some", False)
        served = HPUDuoModel.from_pretrained(tmp_path, **PATTERN, **options)
        results.append(greedy_logits(served.engine, prompts, 6, forced=prompts_of([6] * 5, seed=3)))
    for (_, logits), (_, expected) in zip(*results, strict=True):
        torch.testing.assert_close(logits.cpu(), expected.cpu(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_attention_for_the_wanted_tokens_verifies_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    shared(tmp_path, "Gemma4TextConfig")
    prompts, params = prompts_of([1, 9, 40, 20]), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(LayerSpec, "attends_for_some", False)
        served = HPUDuoModel.from_pretrained(tmp_path, attention="reference", **PATTERN)
        expected = [sample.token_ids for [sample] in served.engine.generate(prompts, params)]
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected)}

    class Half(Drafter):
        """Drafts of which every other one is right."""

        def propose(self, request: Any, most: int) -> list[int]:
            done = request.num_output_tokens
            coming = answers[tuple(request.prompt_token_ids.tolist())][done : done + most]
            return [*coming[:-1], (coming[-1] + done % 2) % BASE["vocab_size"]] if coming else []

    served = HPUDuoModel.from_pretrained(tmp_path, attention=attention, decode_len=3, **PATTERN)
    served.engine.drafter = Half()
    assert [sample.token_ids for [sample] in served.engine.generate(prompts, params)] == expected
    speculation, steps = served.stats().speculation, served.stats().steps
    assert speculation is not None
    assert 0 < speculation.num_accepted_tokens < speculation.num_draft_tokens
    assert steps["csu"] + steps["c-u"] > 1


@pytest.mark.parametrize(("attention", "pages"), [("reference", 4), ("sdpa", 4), ("sdpa", 16)])
def test_a_reader_chooses_pages_by_the_bounds_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str, pages: int
) -> None:
    model = shared(tmp_path, "Gemma4TextConfig")

    def load(every: int) -> tuple[HPUDuoModel, list[int | None]]:
        served = HPUDuoModel.from_pretrained(
            tmp_path,
            attention_rule=f"quest:pages={pages},every={every}",
            attention=attention,
            max_model_len=64,
            max_num_seqs=3,
            block_size=BLOCK,
            max_num_batched_tokens=24,
        )
        return served, [layer.source for layer in served.engine.runner.store.plan.layers]

    together, sources = load(1)
    assert sources == [None, None, 0, 1]
    assert load(2)[1] == [None, None, 0, None], "choices of several tokens are those of one layer"
    monkeypatch.setattr(QuestBlocks, "shares_units", False)
    alone, sources = load(1)
    assert sources == [None, None, 0, None]
    prompts = prompts_of([20, 1, 47, 39])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found, expected = (
        [sample.token_ids for [sample] in each.engine.generate(prompts, params)] for each in (together, alone)
    )
    assert found == expected
    is_full = found == [greedy(model, each, 12) for each in prompts]
    assert is_full == (pages == 16), "pages for the whole text are full attention, and 4 are not"


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_that_share_keys_and_values_are_served_as_transformers_runs_them(
    tmp_path: Path, name: str
) -> None:
    model = shared(tmp_path, name)
    options: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "block_size": BLOCK}
    served = HPUDuoModel.from_pretrained(tmp_path, **options)
    for prompt in prompts_of([1, 20, 40]):
        rows = served.generate([prompt], max_new_tokens=8)
        assert isinstance(rows, torch.Tensor)
        assert rows[0, len(prompt) :].tolist() == greedy(model, prompt, 8)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_pattern_has_rows_for_the_layers_that_store_keys(tmp_path: Path, name: str) -> None:
    """Rings that hold whole requests: heads of a store and of all its readers change places, no more."""
    model = shared(tmp_path, name)
    options: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 3, "block_size": BLOCK}
    pattern = HeadPattern(np.array([[0.0, 1.0]] * 2), sink=2, recent=62).binarise(threshold=0.5)
    served = HPUDuoModel.from_pretrained(tmp_path, pattern=pattern, max_num_batched_tokens=13, **options)
    layers = served.engine.runner.store.plan.layers
    assert [layer.source for layer in layers] == [None, None, 0, 1]
    assert [len(layer.groups) for layer in layers] == [1, 2, 1, 2]
    prompts = prompts_of([20, 1, 40, 9])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=2)
    for prompt, samples in zip(prompts, served.engine.generate(prompts, params)):
        assert [sample.token_ids for sample in samples] == [greedy(model, prompt, 8)] * 2
    whole = HeadPattern(np.array([[0.0, 1.0]] * 4), sink=2, recent=14).binarise(threshold=0.5)
    with pytest.raises(ValueError, match="expected a head pattern of 2 layers x 2 KV heads, got 4 x 2"):
        HPUDuoModel.from_pretrained(tmp_path, pattern=whole, **options)


def test_identification_has_one_gate_for_a_head_and_all_its_readers(tmp_path: Path) -> None:
    shared(tmp_path, "Gemma4TextConfig")
    gated = GatedModel.load(tmp_path, "float32", torch.device("cpu"))
    assert (gated.rows, gated.num_layers) == ((0, 1, 0, 1), 2)
    used = gated.gated_layers(40)
    assert used == (False, True), "a window shorter than the text"
    ids, positions = torch.tensor(prompts_of([40])[0]), torch.arange(40)
    whole = gated.teach(ids, positions, used, FullFrom.OWN).hidden
    gates = torch.ones(2, 2, requires_grad=True)
    hidden = gated.gated_hidden(ids, positions, gates, used, Band(1, 3), None)
    torch.testing.assert_close(hidden, whole, atol=1e-5, rtol=0)
    (gradient,) = torch.autograd.grad(hidden.square().sum(), [gates])
    assert (gradient[1] != 0).all()
    assert (gradient[0] == 0).all()


def test_readers_of_copies_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared(tmp_path, "Gemma4TextConfig")
    record = Probe.record

    def copying(self: Probe, module: Any, q: Any, k: torch.Tensor, *rest: Any) -> torch.Tensor:
        return record(self, module, q, k.clone(), *rest)

    monkeypatch.setattr(Probe, "record", copying)
    with pytest.raises(ValueError, match=r"expected 2 layers .num_kv_shared_layers. .*attend to copies"):
        HPUDuoModel.from_pretrained(tmp_path, max_model_len=64)
