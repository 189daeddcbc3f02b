"""Two ranks serve a quantised checkpoint with the tokens of its plain twin, and no load takes much more."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hpu_duo.device import Member, run_processes
from hpu_duo.device.ranks import Ranks
from hpu_duo.modeling.loading import build_without_weights, load_model, read_config
from hpu_duo.modeling.probe import read_layers
from hpu_duo.modeling.quantised.inc import METHOD as INC
from hpu_duo.modeling.quantised.inc import VARIABLE, read_inc
from hpu_duo.modeling.quantised.linear import DEQUANTISED, WeightExecution
from hpu_duo.modeling.quantised.state import quantised_layers
from hpu_duo.parallel.config import RankHeads
from hpu_duo.parallel.loading import load_share
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN
from tests.modeling.families import IS_5, make_config, prompts_of, save_random
from tests.quantised.inc_files import nodes_of, write_inc
from tests.quantised.test_checkpoints import LAYOUTS, SIZES, load, tokens, twins_in_mxfp4
from tests.quantised.writers import KINDS, write_twins
from tests.ranks.test_memory import anonymous_bytes
from tests.ranks.work import Case, serve
from tests.tiers import crossed, every

TWINS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "zeros": ("int8 zeros", "biases", {}),
    "blocks": ("fp8 block", "some layers", {}),
    "groups": ("gptq mixed", "some layers", {"heads": {"pattern": PATTERN}}),
    "fused": ("packed zeros", "fused projections", {}),
    "experts": ("awq", "experts", {}),
    "a head": ("fp8 tensor", "a head", {}),
}
"""The producer, the layout and settings."""


CODES = WeightExecution(keeps=lambda stored: True)


def case_of(directory: Path, kind: str, layout: str, settings: dict[str, Any]) -> tuple[Case, Case]:
    """The plain checkpoint and the quantised one."""
    family, fields, names = LAYOUTS[layout]
    save_random(make_config(family, **{**SIZES, **fields}), directory / "plain")
    quantised = write_twins(directory / "plain", directory / "quantised", KINDS[kind], names=names)
    greedy = SamplingParams(max_tokens=6, temperature=0)
    case = Case(
        directory / "plain", prompts_of([5, 19]), [greedy] * 2, scheduler={"max_model_len": 48}, **settings
    )
    return case, replace(case, path=quantised)


@pytest.mark.parametrize(
    ("name", "execution"), crossed(list(TWINS), {"dequantised": DEQUANTISED, "codes": CODES})
)
def test_shares_are_those_of_the_plain_twin(name: str, execution: WeightExecution, tmp_path: Path) -> None:
    plain, quantised = case_of(tmp_path, *TWINS[name])
    for rank in range(2):
        expected, got = share_of(plain.path, rank), share_of(quantised.path, rank, execution)
        assert expected.keys() == got.keys()
        for key, weight in expected.items():
            assert torch.equal(got[key], weight), (rank, key)


def share_of(path: Path, rank: int, execution: WeightExecution = DEQUANTISED) -> dict[str, torch.Tensor]:
    """The weights of one of two ranks, each with a KV head and its two query heads."""
    config = read_config(path)
    whole = build_without_weights(path, config, torch.float32)
    layers = read_layers(whole)
    heads = [RankHeads((rank,), (2 * rank, 2 * rank + 1))] * len(layers)
    ranks = Ranks(rank, 2)
    share = load_share(path, config, torch.float32, whole, layers, heads, ranks, execution=execution)
    layers_of_codes = quantised_layers(share)
    codes = {f"{name}.weight": each.dequantised(torch.float32) for name, each in layers_of_codes.items()}
    return share.state_dict() | codes


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_serve_the_tokens_of_the_plain_twin(tmp_path: Path) -> None:
    plain, quantised = case_of(tmp_path, *TWINS["groups"])
    answers = run_processes(serve, ({"plain": plain, "quantised": quantised},), [{}] * 2, 600)[0]
    assert answers["quantised"].tokens == answers["plain"].tokens


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_serve_measured_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plain"
    save_random(make_config("LlamaConfig", **SIZES), path)
    nodes = nodes_of(load_file(path / "model.safetensors"), SIZES["num_hidden_layers"])
    monkeypatch.setenv(VARIABLE, str(write_inc(tmp_path, [nodes])))
    prompts, params = prompts_of([5, 19]), [SamplingParams(max_tokens=6, temperature=0)] * 2
    # Not rounded inputs, keys and values: ranks add in another order, by which a code may change.
    options = {"quantization": INC, "quantization_execution": "dequantise"}
    case = Case(path, prompts, params, scheduler={"max_model_len": 48}, model=options)
    found = run_processes(serve, ({"inc": case},), [{}] * 2, 600)[0]["inc"]
    served = load(path, **options, max_model_len=48)
    assert found.tokens == [done[0].token_ids for done in served.engine.generate(prompts, params)]


@pytest.mark.skipif(not IS_5, reason="gpt-oss keeps its experts in other modules before transformers 5")
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("size", "settings"),
    [(2, {"expert_parallel": True}), (4, {})],
    ids=["whole experts", "parts of blocks"],
)
def test_ranks_share_experts_in_mxfp4(size: int, settings: dict[str, Any], tmp_path: Path) -> None:
    plain, quantised = twins_in_mxfp4(tmp_path)
    greedy = [SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)] * 2
    case = Case(quantised, prompts_of([5, 19]), greedy, scheduler={"max_model_len": 48}, parallel=settings)
    found = run_processes(serve, ({"one": case},), [{}] * size, 600)[0]["one"]
    assert found.error == ""
    assert found.tokens == [done[len(prompt) :] for done, prompt in zip(tokens(load(plain)), case.prompts)]


WIDE = {
    **SIZES,
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def peak_of_loading(member: Member, path: Path, rounding: str | None = None) -> tuple[int, int]:
    """The most that loading adds at any moment, and the bytes of the model; rounded weights stay codes."""
    execution = DEQUANTISED if rounding is None else replace(CODES, rounding=rounding)
    if rounding == INC:
        execution = replace(execution, scales=read_inc(path.parent / "maxabs_quant_g2.json"))
    config, peak, is_done = read_config(path), [0], threading.Event()
    # What transformers imports lazily is not of the weights.
    load_model(path.parent / "small", read_config(path.parent / "small"), torch.float32, torch.device("cpu"))
    before = anonymous_bytes()

    def watch() -> None:
        while not is_done.is_set():
            peak[0] = max(peak[0], anonymous_bytes() - before)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(path, config, torch.float32, torch.device("cpu"), execution)
    is_done.set()
    watcher.join()
    return peak[0], sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", every(2, ["gptq", "fp8 block"]))
def test_a_load_takes_the_plain_model_and_about_a_layer(name: str, tmp_path: Path) -> None:
    for directory, sizes in (("large", WIDE), ("small", SIZES)):
        save_random(make_config("LlamaConfig", **sizes), tmp_path / f"plain {directory}")
        write_twins(tmp_path / f"plain {directory}", tmp_path / directory, KINDS[name])
    ((peak, size),) = run_processes(peak_of_loading, (tmp_path / "large",), [{}], 300)
    assert peak < size + size / WIDE["num_hidden_layers"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", every(3, ["int4", "int8", INC]))
def test_a_load_that_rounds_takes_the_codes_and_about_a_layer(name: str, tmp_path: Path) -> None:
    for directory, sizes in (("large", WIDE), ("small", SIZES)):
        save_random(make_config("LlamaConfig", **sizes), tmp_path / directory)
    if name == INC:
        state = load_file(tmp_path / "large/model.safetensors")
        write_inc(tmp_path, [nodes_of(state, WIDE["num_hidden_layers"])])
    ((peak, size),) = run_processes(peak_of_loading, (tmp_path / "large", name), [{}], 300)
    plain_layer = 4 * (4 * 512 * 512 + 3 * 512 * 1536)
    assert peak < size + plain_layer
