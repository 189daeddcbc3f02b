"""Offline batches have the tokens of ``generate``, and a bad prompt or an error costs no other prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from hpu_duo.config.engine import EngineConfig
from hpu_duo.config.limits import DeviceBudget
from hpu_duo.generation.offline import OfflineResult
from hpu_duo.modeling.weight_stream import weight_bytes
from hpu_duo.planning.offload import T4
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup import placement
from tests.engine.tiny import Tiny, assert_holds_nothing, serve, tokens_of
from tests.modeling.families import BASE, prompts_of, save_random

NUM_LAYERS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = prompts_of((13, 5, 22, 9, 31, 7))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A small Llama of eight layers with most weights in them, without a tokenizer."""
    path = tmp_path_factory.mktemp("deep")
    wide = {"num_hidden_layers": NUM_LAYERS, "intermediate_size": 1024}
    return Tiny(path, save_random(LlamaConfig(**{**BASE, **wide}), path))


def of_results(results: list[OfflineResult]) -> list[list[list[int]]]:
    return [[each.token_ids for each in result.samples] for result in results]


def test_tokens_are_those_of_generate_and_results_are_in_order(tiny: Tiny) -> None:
    model, seen = tiny.load(), list[int]()
    drawn = SamplingParams(temperature=1, max_tokens=3, seed=3, n=2)
    params = [GREEDY, drawn] * 3
    results = model.generate_offline(PROMPTS, params, on_result=lambda one: seen.append(one.index))
    assert [one.index for one in results] == list(range(6))
    assert sorted(seen) == list(range(6))
    assert seen != sorted(seen)  # short outputs end first
    assert of_results(results) == tokens_of(serve(model, PROMPTS, params))
    assert [len(one.samples) for one in results] == [1, 2] * 3
    [of_text] = model.generate_offline(["abc"], GREEDY)
    [[same]] = serve(model, [list(of_text.prompt_token_ids)], GREEDY)
    assert of_text.text == same.text


def test_a_bad_prompt_has_an_error_with_its_index_and_the_others_their_tokens(deep: Tiny) -> None:
    model = deep.load()
    bad: list[Any] = [[], [5] * 1000, "a text", [10**6], 7]
    results = model.generate_offline([PROMPTS[0], *bad, PROMPTS[1]], GREEDY)
    for index, result in enumerate(results[1:-1], start=1):
        assert f"prompts[{index}]" in str(result.error)
        with pytest.raises((TypeError, ValueError), match="prompts"):
            _ = result.text
    assert [of_results(results)[at] for at in (0, -1)] == tokens_of(serve(model, PROMPTS[:2], GREEDY))
    for prompts, params in (([], GREEDY), ("text", GREEDY), (PROMPTS[:2], [GREEDY]), (PROMPTS[:2], [])):
        with pytest.raises(ValueError, match="expected"):
            model.generate_offline(prompts, params)


def test_a_text_that_cannot_be_tokenized_costs_no_other_prompt(tiny: Tiny) -> None:
    good, bad = tiny.load().generate_offline(["ab", "\ud800"], GREEDY)
    assert len(good.samples[0].token_ids) == 6
    assert isinstance(bad.error, ValueError)
    assert "prompts[1]: expected a text that can be tokenized" in str(bad.error)


@pytest.mark.parametrize("n", [1, 2])
def test_an_error_of_one_request_ends_no_other(deep: Tiny, n: int) -> None:
    model = deep.load()

    class Fails:
        def __call__(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("this sampler is broken")

        def __getattr__(self, name: str) -> Any:
            return self

    broken = SamplingParams(temperature=0, max_tokens=6, n=n, host_sampler=lambda _: Fails())
    results = model.generate_offline(PROMPTS[:3], [GREEDY, broken, GREEDY])
    assert [one.error is None for one in results] == [True, False, True]
    assert "this sampler is broken" in str(results[1].error)
    expected = tokens_of(serve(model, [PROMPTS[0], PROMPTS[2]], GREEDY))
    assert of_results(results)[::2] == expected
    assert_holds_nothing(model)


@pytest.mark.parametrize("on_disk", [False, True])
def test_auto_places_weights_that_do_not_fit_and_chooses_groups(
    deep: Tiny, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = weight_bytes(deep.model.model.layers[0])
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 18, "max_model_len": 48, "num_blocks": 64}
    whole = deep.load(offload_policy="auto", **sizes)
    assert not whole.engine_config.model.offloads_weights  # everything fits
    expected = of_results(whole.generate_offline(PROMPTS, GREEDY))
    left, host = 7 * layer, 3.5 * layer if on_disk else 20 * layer
    rates: dict[str, Any] = {"up": 1e6, "disk_read_weights": 1e6, "flexgen_memory": False}
    machine = replace(T4, device_memory=left, host_memory=host, disk=1e9 if on_disk else 0.0, **rates)
    monkeypatch.setattr(DeviceBudget, "left_bytes", property(lambda _: left))
    measured = placement.offload_machine
    monkeypatch.setattr(placement, "offload_machine", lambda *_, **__: machine)
    folder = {"offload_disk": tmp_path} if on_disk else {}
    model = deep.load(offload_policy="auto", **folder, **sizes)
    chosen = model.engine_config
    expected_policy = "0,12.5,100,0,100,0" if on_disk else "0,100,100,0,100,0"
    assert (chosen.model.offload_policy, chosen.model.offload_num_batches) == (expected_policy, 4)
    assert chosen.scheduler.max_num_batched_tokens == 4 * 18
    assert any("offload_policy=auto" in note and "4 groups of 2 rows" in note for note in model.stats().notes)
    assert of_results(model.generate_offline(PROMPTS, GREEDY)) == expected
    # By measured rates.
    monkeypatch.setattr(placement, "offload_machine", measured)
    [*_, note] = placement.placed(replace(chosen, model=replace(chosen.model, offload_policy="auto")))[1]
    assert "tokens/s" in note
    # What was given stays.
    monkeypatch.setattr(placement, "offload_machine", lambda *_, **__: machine)
    config = replace(chosen, model=replace(chosen.model, offload_policy="auto", offload_num_batches=2))
    assert placement.placed(config)[0].model.offload_num_batches == 2
    monkeypatch.setattr(DeviceBudget, "left_bytes", property(lambda _: layer))
    monkeypatch.setattr(placement, "offload_machine", lambda *_, **__: replace(machine, device_memory=layer))
    with pytest.raises(ValueError, match="memories that hold the model and one request of 48 tokens"):
        placement.placed(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_attention": 1.0, "enable_prefix_caching": False}, "got cpu_attention"),
        ({"tensor_parallel_size": 2}, "got tensor_parallel_size=2"),
        ({"cpu_offload_gb": 1.0}, "expected cpu_offload_gb or offload_policy, got both"),
    ],
)
def test_auto_is_refused_with_what_it_does_not_place(
    deep: Tiny, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        deep.load(offload_policy="auto", **options)


def test_auto_serves_a_model_that_fits_and_whose_sizes_cannot_be_read(
    deep: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        raise ValueError("the cost model does not cover it")

    monkeypatch.setattr(placement, "read_model", refuse)
    num_bytes = sum(file.stat().st_size for file in deep.path.glob("*.safetensors"))
    monkeypatch.setattr(DeviceBudget, "left_bytes", property(lambda _: num_bytes))
    config = EngineConfig.of(deep.path, offload_policy="auto", dtype="float32")
    chosen, [note] = placement.placed(config)
    assert chosen.model.offload_policy is None
    assert "stay on the device: the cost model does not cover it" in note
    monkeypatch.setattr(DeviceBudget, "left_bytes", property(lambda _: num_bytes // 2))
    with pytest.raises(ValueError, match="the cost model does not cover it"):
        placement.placed(config)


def test_auto_on_an_hpu_takes_models_that_fit(
    deep: Tiny, simulated_hpu: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.of(deep.path, offload_policy="auto", device="hpu-sim")
    assert placement.placed(config)[0].model.offload_policy is None
    monkeypatch.setattr(DeviceBudget, "left_bytes", property(lambda _: 1 << 16))
    with pytest.raises(ValueError, match="fits the 65,536 bytes of the HPU"):
        placement.placed(config)
