"""Models in which some layers have states instead of keys and values."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from graphs.backends.compile import CompileBackend
from hpu_duo.heads import HeadPattern
from hpu_duo.planning import GAUDI3, Deployment, Serving
from hpu_duo.planning.read_model import read_model
from hpu_duo.sampling import SamplingParams
from kernels_ref import PLAIN, Budget
from kernels_ref.x86 import library
from tests.modeling.driving import greedy_logits
from tests.modeling.families import BASE, BLOCK, greedy, make_config, prompts_of, save_random
from tests.recurrent.hybrids import HYBRIDS, load, saved
from tests.tiers import EXHAUSTIVE

CAPTURE: dict[str, dict[str, Any]] = {
    "eager": {"attention": "reference"},
    "replay": {"attention": "sdpa", "graphs": "replay"},
    "compile": {"graphs": CompileBackend("eager")},
    "hpu-sim": {"device": "hpu-sim", "dtype": "float32"},
}
EQUAL: dict[str, Any] = {"rtol": 0, "atol": 0}


def token_by_token(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits of each token by its own cache, ``[Q, V]``.

    Its delta rule over a whole text, in chunks, differs from this by up to 4e-4 in float32.
    """
    cache, found = None, []
    with torch.inference_mode():
        for number, token in enumerate(tokens):
            # Without positions, Bamba's are wrong.
            position = torch.tensor([[number]])
            output = model(
                torch.tensor([[token]]), position_ids=position, past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            found.append(output.logits[0, -1])
    return torch.stack(found)


def within_rounding(model: Any, tokens: list[int]) -> tuple[torch.Tensor, float]:
    """Logits of the last tokens in float64, and how far float32 may be from them.

    That is 1e-4, or half as much again as transformers' own float32 pass over the text differs: up to 2.6e-4
    where random experts amplify rounding.
    """
    exact = token_by_token(copy.deepcopy(model).double(), tokens)[-7:-1]
    with torch.inference_mode():
        once = model(torch.tensor([tokens])).logits[0, -7:-1]
    return exact.float(), max(1e-4, 1.5 * float((once - exact).abs().max()))


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FAST = ("Lfm2Config", "Qwen3NextConfig")
FURTHER = ("GraniteMoeHybridConfig", "BambaConfig", "FalconH1Config")
"""Their state spaces are those of Nemotron-H."""
STATES_OF = (*FAST, "NemotronHConfig")
"""A family for each kind of states, for what does not depend on the other layers."""


def marks_of(name: str, first: tuple[str, ...]) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of a case of a family; those that are not among ``first`` are in the last tier."""
    if name in FAST:
        return ()
    return (pytest.mark.slow,) if name in first else EXHAUSTIVE


FAMILIES, STATES = (
    pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name, first)) for name in HYBRIDS])
    for first in (tuple(name for name in HYBRIDS if name not in FURTHER), STATES_OF)
)


def _cases() -> Iterator[Any]:
    """Families and ways to capture: two families replayed and on a simulated HPU, each other one in one way.

    Two are compiled, of each kind of states; convolutions stand before both.
    """
    for number, name in enumerate(HYBRIDS):
        for way in CAPTURE:
            if name in FAST:
                compiled = (pytest.mark.slow,) if (name, way) == (FAST[-1], "compile") else EXHAUSTIVE
                marks: Any = () if way in ("replay", "hpu-sim") else compiled
            else:
                first = [each for each in CAPTURE if each != "compile" or name == "GraniteMoeHybridConfig"]
                marks = pytest.mark.slow if way == first[number % len(first)] else EXHAUSTIVE
            yield pytest.param(name, CAPTURE[way], marks=marks, id=f"{name}-{way}")


@pytest.mark.usefixtures("default_buckets")
@pytest.mark.parametrize(("name", "capture"), list(_cases()))
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str, capture: dict[str, Any]) -> None:
    """Chunks, mixed batches, moved rows, and a prefix that is taken up where its state was."""
    model = saved(tmp_path, name)
    served = load(tmp_path, num_prefix_snapshots=8, **capture)
    store = served.engine.runner.store
    assert store.num_bytes == store.plan.total_bytes
    assert sum(state.row_bytes for state in store.row_states) == store.plan.row_bytes > 0
    prompts = prompts_of([20, 1, 40, 9])
    for prompt in ([*prompts, [*prompts[2][:35], 5, 6]], [prompts[2]]):
        done = served.engine.generate(prompt, GREEDY)
        assert [sample.token_ids for [sample] in done] == [greedy(model, each, 8) for each in prompt]
    prefixes = served.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens > 0


@STATES
def test_logits_are_those_of_transformers_and_of_no_other_row(tmp_path: Path, name: str) -> None:
    model, results = saved(tmp_path, name), []
    for seed in (0, 1):
        served = load(tmp_path, enable_prefix_caching=False)
        prompts = [*prompts_of([23, 2], seed=seed), prompts_of([31], seed=7)[0]]
        found = greedy_logits(served.engine, prompts, 6, forced=[[3, 4, 5, 6, 7, 8]] * 3)
        for prompt, (new, logits) in zip(prompts, found):
            expected = token_by_token(model, [*prompt, *new])[-7:-1]
            # Random experts amplify the rounding of delta rules: 1.3e-4 is the most that was seen.
            atol = 2e-4 if name == "Qwen3_5MoeTextConfig" else 1e-4
            if name == "GraniteMoeHybridConfig":
                expected, atol = within_rounding(model, [*prompt, *new])
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=atol)
        results.append(found[-1][1])
    # Without our kernels, products of experts depend on their number of rows.
    is_exact = "Moe" not in name or library.lanes()
    torch.testing.assert_close(*results, **(EQUAL if is_exact else {"rtol": 1e-4, "atol": 1e-3}))


@pytest.mark.usefixtures("default_buckets")
@pytest.mark.parametrize(
    "name",
    ["Lfm2MoeConfig", *(pytest.param(name, marks=EXHAUSTIVE) for name in HYBRIDS if name != "Lfm2MoeConfig")],
)
def test_no_text_changes_another_row_on_a_simulated_hpu(tmp_path: Path, name: str) -> None:
    """Prompts run through all experts; decodes gather the weights of the chosen ones."""
    saved(tmp_path, name, **({"num_experts": 32} if "Moe" in name else {}))
    served = load(tmp_path, enable_prefix_caching=False, **CAPTURE["hpu-sim"])
    last, results = prompts_of([31], seed=7), []
    for seed in (0, 1):
        forced = [[3 + seed, 4, 5, 6, 7 + seed, 8]] * 2 + [[3, 4, 5, 6, 7, 8]]
        found = greedy_logits(served.engine, [*prompts_of([23, 2], seed=seed), *last], 6, forced=forced)
        results.append([logits.cpu() for _, logits in found])
    assert not any(torch.equal(*each) for each in zip(results[0][:-1], results[1][:-1])), "others changed"
    torch.testing.assert_close(results[0][-1], results[1][-1], **EQUAL)


@STATES
@pytest.mark.parametrize("caches", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_preempted_requests_and_samples_of_one_prompt_are_right(
    tmp_path: Path, name: str, caches: bool
) -> None:
    model = saved(tmp_path, name)
    served = load(tmp_path, num_blocks=9, enable_prefix_caching=caches)
    prompts = prompts_of([13, 5, 22, 9])
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, n=2)
    done = served.engine.generate(prompts, params)
    assert served.stats().num_preemptions > 0
    for prompt, samples in zip(prompts, done):
        assert [sample.token_ids for sample in samples] == [greedy(model, prompt, 20)] * 2


@pytest.mark.parametrize(
    ("name", "size", "changes", "reason"),
    [
        ("NemotronHConfig", 4, {}, "expected a norm of all results, or of groups .* 24 results .* has 12"),
        (
            "FalconH1Config",
            2,
            {"mamba_n_groups": 1, "mamba_n_heads": 3},
            "expected mamba_n_heads to be a multiple",
        ),
    ],
)
def test_states_that_ranks_do_not_split_are_refused(
    tmp_path: Path, name: str, size: int, changes: dict[str, Any], reason: str
) -> None:
    saved(tmp_path, name, **changes)
    with pytest.raises(ValueError, match=reason):
        load(tmp_path, tensor_parallel_size=size)


NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
BY_ITSELF = {"method": "duo", "num_speculative_tokens": 2, "draft_sink": 2, "draft_recent": 8}


@STATES
@pytest.mark.parametrize(
    ("config", "graphs"),
    [(NGRAMS, "eager"), pytest.param(NGRAMS, "replay", marks=EXHAUSTIVE), (BY_ITSELF, "replay")],
)
def test_drafts_change_no_token(tmp_path: Path, name: str, config: dict[str, Any], graphs: str) -> None:
    model = saved(tmp_path, name)
    served = load(tmp_path, speculative_config=config, graphs=graphs, num_blocks=16)
    prompts = prompts_of([20, 7, 11])
    expected = [greedy(model, each, 24) for each in prompts]
    # Predicted texts are right in part.
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=24,
            ignore_eos=True,
            prediction_token_ids=None
            if config is BY_ITSELF
            else [token if number % 5 else 3 for number, token in enumerate(each)],
        )
        for each in expected
    ]
    done = served.engine.generate(prompts, params)
    assert [sample.token_ids for [sample] in done] == expected
    found = served.stats().speculation
    assert found is not None
    assert 0 < found.num_accepted_tokens <= found.num_draft_tokens


@FAMILIES
def test_capacity_counts_the_states_of_a_request(tmp_path: Path, name: str) -> None:
    saved(tmp_path, name)
    plan = load(tmp_path, dtype="bfloat16").engine.runner.store.plan
    size = read_model(tmp_path)
    assert size.states == tuple(layer.rows for layer in plan.layers[len(size.layers) :])
    assert sum(kind.row_bytes for kinds in size.states for kind in kinds) > 0
    # Layers may have both, or neither.
    num_layers = {"FalconH1Config": 8, "NemotronHConfig": 3}.get(name, 4)
    assert len(size.layers) + len(size.states) == len(plan.layers) == num_layers
    drafting = {"method": "ngram", "num_speculative_tokens": 3}
    served = load(tmp_path, dtype="bfloat16", speculative_config=drafting).engine
    priced = Deployment(size, Serving(GAUDI3, decode_len=4), 0, PLAIN, 64)
    assert priced.plan(1, 1).row_bytes == served.runner.store.plan.row_bytes > plan.row_bytes
    assert not priced.not_served


@pytest.mark.parametrize(("name", "number"), [("Lfm2Config", 1), ("Qwen3NextConfig", 2)])
def test_patterns_name_heads_of_layers_that_attend(tmp_path: Path, name: str, number: int) -> None:
    """Windows are as long as any request, so that tokens stay what they are."""
    model = saved(tmp_path, name)
    mask = np.array([[0.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    prompts = prompts_of([20, 33])
    size = read_model(tmp_path)
    for scores in (mask, mask[number : number + 1]):
        pattern = HeadPattern(scores, sink=2, recent=62).binarise(threshold=0.5)
        served = load(tmp_path, pattern=pattern, attention="reference")
        kinds = [group.kind.name for group in served.engine.runner.store.plan.layers[0].groups]
        assert len(kinds) == 2
        done = served.engine.generate(prompts, GREEDY)
        assert [sample.token_ids for [sample] in done] == [greedy(model, each, 8) for each in prompts]
        priced = Deployment(size, Serving(GAUDI3, pattern=pattern), 0.5, PLAIN, 64)
        assert [len(layer.groups) for layer in priced.kv_layers] == [2]
    for num_layers, num_heads in ((1, 3), (2, 2), (5, 2)):
        other = HeadPattern(np.ones((num_layers, num_heads)), sink=2, recent=62).binarise(threshold=0.5)
        with pytest.raises(ValueError, match=f"of 1 layers x 2 KV heads, got {num_layers} x {num_heads}"):
            load(tmp_path, pattern=other)


def test_a_pattern_has_rows_for_all_layers_where_the_first_attend(tmp_path: Path) -> None:
    config = make_config("Lfm2Config", **{**BASE, "layer_types": ["full_attention", "conv", "conv", "conv"]})
    save_random(config, tmp_path)
    pattern = HeadPattern(np.eye(4, 2), sink=2, recent=62).binarise(threshold=0.5)
    served = load(tmp_path, pattern=pattern).engine.pattern
    assert served is not None
    assert served.mask.tolist() == [[True, False]]


def test_settings_and_scales_name_layers_by_their_numbers_among_all(tmp_path: Path) -> None:
    saved(tmp_path, "Lfm2Config")
    directory = tmp_path / "scales"
    directory.mkdir()
    scales = {f"model.layers.1.self_attn.{name}_scale": torch.tensor(0.5) for name in "kv"}
    save_file(scales, directory / "scales.safetensors", {"format": "pt"})
    served = load(tmp_path, kv_cache_dtype="fp8", kv_scales=directory)
    assert served.engine.runner.model.kv_scales == [[0.5, 0.5]]
    served = load(tmp_path, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=[1])
    assert any("'fp8' is not used" in note for note in served.stats().notes)
    with pytest.raises(ValueError, match="skip_layers of 1, the layers of this model that attend, got 0"):
        load(tmp_path, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=[0])


@pytest.mark.parametrize("name", FAST)
def test_heads_with_a_budget_attend_beside_states(tmp_path: Path, name: str) -> None:
    """The budget holds every text, so that tokens stay what they are."""
    model = saved(tmp_path, name)
    served = load(tmp_path, kv_policy="h2o", kv_budget=60, kv_chunk=8)
    (kind,) = {group.kind for layer in served.engine.runner.store.plan.layers for group in layer.groups}
    assert isinstance(kind, Budget)
    prompts = prompts_of([20, 33, 9])
    done = served.engine.generate(prompts, GREEDY)
    assert [sample.token_ids for [sample] in done] == [greedy(model, each, 8) for each in prompts]


@STATES
def test_a_saved_context_has_the_states_at_its_end(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name)
    document, question = prompts_of((3 * BLOCK + 3, 5))
    with load(tmp_path).prefill(document) as context:
        context.save(tmp_path / "document")
    served = load(tmp_path, max_num_seqs=2)
    with served.load_context(tmp_path / "document") as context:
        [[sample]] = served.engine.generate([context.prompt(question)], GREEDY, context=context.hold())
    assert sample.num_cached_tokens == 3 * BLOCK
    assert sample.token_ids == greedy(model, [*document, *question], 8)
