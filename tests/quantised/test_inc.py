"""Files of Intel Neural Compressor: the scales of weights, inputs, keys and values that they mean."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hpu_duo.config.engine import ModelConfig
from hpu_duo.lab.sim.fused import named
from hpu_duo.modeling.loading import load_model, read_config
from hpu_duo.modeling.quantised.execution import choose_execution
from hpu_duo.modeling.quantised.inc import VARIABLE, IncScales, read_inc
from hpu_duo.modeling.quantised.state import quantised_layers
from kernels_ref.formats import INC
from tests.modeling.families import make_config, save_random
from tests.quantised.inc_files import nodes_of, write_inc
from tests.quantised.test_checkpoints import PROMPTS, SIZES, load, tokens
from tests.quantised.test_refused import damaged
from tests.tiers import EXHAUSTIVE, further

FP8 = torch.float8_e4m3fn
K_CACHE = "model.layers.1.self_attn.attn.impl.k_cache"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    save_random(make_config("LlamaConfig", **SIZES), path)
    return path


@pytest.fixture
def nodes(plain: Path) -> dict[str, Any]:
    return nodes_of(load_file(plain / "model.safetensors"), SIZES["num_hidden_layers"])


def use(patch: pytest.MonkeyPatch, file: Path) -> IncScales:
    patch.setenv(VARIABLE, str(file))
    return read_inc(file)


@pytest.mark.parametrize(
    ("method", "device", "inputs", "keys"),
    [
        # 5 / (240 / 4) = 0.083, 20 / 60 = 0.33; 5 / 112 = 0.045, 20 / 112 = 0.18.
        ("maxabs_hw", "GAUDI2", 1.0, 1.0),
        ("maxabs_hw", "GAUDI3", 2**-4, 0.25),
        ("maxabs_pow2", "GAUDI2", 2**-3, 0.5),
        ("maxabs_arbitrary", "GAUDI3", 5 / 112, 20 / 112),
        ("act_maxabs_pow2_weights_pcs_maxabs_pow2", "GAUDI2", 2**-3, 0.5),
        ("unit_scale", "GAUDI2", 1.0, 1.0),
    ],
)
def test_scales_are_those_of_the_method_and_the_device(
    method: str, device: str, inputs: float, keys: float, nodes: dict[str, Any], tmp_path: Path
) -> None:
    found = read_inc(write_inc(tmp_path, [nodes], scale_method=method, device_for_scales=device))
    assert found.largest == {"GAUDI2": 240, "GAUDI3": 448}[device]
    of_layer = found.linear("model.layers.0.self_attn.q_proj")
    assert of_layer is not None
    assert of_layer.inputs == pytest.approx(inputs, rel=1e-12)
    assert found.kv([0])[0][0] == pytest.approx(keys, rel=1e-12)
    # Layers of a fused module have its scales.
    assert found.linear("model.layers.0.self_attn.v_proj") == of_layer
    assert (of_layer.weight is None) == ("pcs" in method)


def test_ranks_are_unified_by_their_largest_and_scales_come_before_measurements(
    nodes: dict[str, Any], tmp_path: Path
) -> None:
    other = {**nodes, K_CACHE: {"inputs": [[[400.0]]]}}
    exact = {"scale_method": "maxabs_arbitrary"}
    assert read_inc(write_inc(tmp_path, [nodes, other], **exact)).kv([1])[1][0] == 400 / 60
    scales = {K_CACHE: {"inputs": [[0.125]], "outputs": [[0.125]]}}
    file = write_inc(tmp_path, [scales, scales], kind="Scale", end="_MAXABS_ARBITRARY", **exact)
    assert read_inc(file).kv([0, 1]) == {0: (20 / 60, 1.5 / 60), 1: (0.125, 3 / 60)}
    again = write_inc(tmp_path, [nodes, other], recalc_scales="True", **exact)
    assert read_inc(again).kv([1])[1][0] == 400 / 60
    # A folder may have been moved with its configuration.
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert read_inc(moved / again.name).kv([1])[1][0] == 400 / 60


def test_weights_and_inputs_are_rounded_by_measured_scales(
    plain: Path, nodes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = use(monkeypatch, write_inc(tmp_path, [nodes], blocklist={"types": [], "names": ["lm_head"]}))
    model = ModelConfig(path=plain, quantization="inc", quantization_execution="stored")
    execution = choose_execution(model, torch.float32, torch.device("cpu"))
    loaded = load_model(plain, read_config(plain), torch.float32, torch.device("cpu"), execution)
    layers, state = quantised_layers(loaded), load_file(plain / "model.safetensors")
    assert len(layers) == 7 * SIZES["num_hidden_layers"]
    x = torch.randn(5, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"):
        given, weight = scales.linear(name), state[f"{name}.weight"].float()
        assert given is not None
        assert given.weight is not None
        rounded = (weight / given.weight).clamp(-240, 240).to(FP8).float() * given.weight
        inputs = (x / given.inputs).clamp(-240, 240).to(FP8).float() * given.inputs
        assert layers[name](x).allclose(inputs @ rounded.t(), atol=1e-6)
        assert layers[name].dequantised(torch.float32).equal(rounded)
        assert not rounded.equal(weight)


@pytest.mark.parametrize(
    ("blocked", "plain_layers"),
    [
        ({"names": ["self_attn"]}, ("q_proj", "o_proj")),
        ({"names": ["mlp\\.gate_up\\b"]}, ()),
        ({"names": ["\\.gate_up_proj$"]}, ("gate_proj", "up_proj")),
        ({"types": ["RowParallelLinear"]}, ("o_proj", "down_proj")),
        ({"types": ["Linear"]}, ("q_proj", "o_proj", "gate_proj", "down_proj")),
    ],
)
def test_block_lists_are_respected(
    blocked: Mapping[str, Any], plain_layers: tuple[str, ...], nodes: dict[str, Any], tmp_path: Path
) -> None:
    found = read_inc(write_inc(tmp_path, [nodes], blocklist=blocked))
    for leaf in ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        part = "self_attn" if leaf in ("q_proj", "o_proj") else "mlp"
        is_plain = found.linear(f"model.layers.0.{part}.{leaf}") is None
        assert is_plain == (leaf in plain_layers or blocked.get("types") == ["Linear"]), leaf
    if blocked.get("names") == ["self_attn"]:
        with pytest.raises(ValueError, match=r"leaves .*k_cache of layer 0 unquantised"):
            found.kv([0])


@pytest.mark.usefixtures("default_buckets")
@pytest.mark.parametrize("device", ["GAUDI2", *further("GAUDI3")])
def test_the_deployed_flow_on_the_simulated_device(
    device: str, plain: Path, nodes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, write_inc(tmp_path, [nodes], device_for_scales=device))
    options = {"quantization": "inc", "kv_cache_dtype": INC, "device": "hpu-sim", "dtype": "bfloat16"}
    with named(device):
        served = load(plain, **options)
        found = served.stats().resolved
        assert found.weights == "fp8 (HPU operators) in 15 layers"
        assert INC in found.kv_cache_dtype
        assert len(tokens(served)) == 2
    if device == "GAUDI3":
        with named("GAUDI2"), pytest.raises(ValueError, match=r"scales of a Gaudi 2, this device, got .* 3"):
            load(plain, **options)


def test_keys_are_stored_by_measured_scales(
    plain: Path, nodes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, write_inc(tmp_path, [nodes]))
    served = load(plain, kv_cache_dtype=INC)
    # 20 / 60 and 1.5 / 60, and twice as much, are rounded up to powers of 16.
    assert served.engine.runner.model.kv_scales == [[1.0, 2**-4]] * 2
    assert served.engine.runner.model.specs[0].groups[0].format.keys.largest == 240  # type: ignore[attr-defined]
    assert tokens(served)
    # Contexts are of the same scales only.
    saved, options = tmp_path / "context", {"quantization": "inc", "kv_cache_dtype": INC}
    with load(plain, **options).prefill(PROMPTS[1]) as context:
        context.save(saved)
    load(plain, **options).load_context(saved).close()
    use(monkeypatch, write_inc(tmp_path, [{**nodes, K_CACHE: {"inputs": [[[2000.0]]]}}]))
    with pytest.raises(ValueError, match=r"with weights rounded to inc [0-9a-f]{16}, got one with"):
        load(plain, **options).load_context(saved)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "measure": ({"mode": "MEASURE"}, "got MEASURE: .*hpu-duo calibrate --kv-scales DIR"),
    "load": ({"mode": "LOAD"}, "got LOAD: weights that it has saved are not read"),
    "method": ({"scale_method": "smoothquant_opt"}, "one of unit_scale, .*, got smoothquant_opt"),
    "nested": ({"scale_method": {"default": {}}}, "scale_method to be a text"),
    "e5m2": ({"fp8_config": "E5M2"}, "fp8_config to be E4M3, got 'E5M2'"),
    "dynamic": ({"dynamic_quantization": True}, "constant scales of inputs, got dynamic_quantization"),
    "observer": ({"observer": "save"}, "observer to be maxabs or maxabs_per_channel, got 'save'"),
    "backoff": ({"scale_params": {"input_backoff": 0}}, "input_backoff above 0 and at most 1, got 0"),
    "device": ({"device_for_scales": "GAUDI4"}, "to be GAUDI2 or GAUDI3, got 'GAUDI4'"),
    "long name": (
        {"dump_stats_path": "x" * 5000 + "/g2/x"},
        "measurements at dump_stats_path, got .*too long",
    ),
    "no text": ({"dump_stats_path": "\ud800"}, r"dump_stats_path to be a text, got '\\ud800'"),
    "names": ({"blocklist": {"names": ["("]}}, "names in blocklist, got '\\('"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_that_are_refused(name: str, nodes: dict[str, Any], tmp_path: Path) -> None:
    fields, message = CONFIGS[name]
    with pytest.raises(ValueError, match=message):
        read_inc(write_inc(tmp_path, [nodes], **fields))


def test_measurements_that_are_refused(
    plain: Path, nodes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match=r"variable QUANT_CONFIG to name a JSON file .*, which quantization 'inc'"
    ):
        load(plain, quantization="inc")
    without = {name: node for name, node in nodes.items() if name != K_CACHE}
    use(monkeypatch, write_inc(tmp_path / "a", [without]))
    with pytest.raises(ValueError, match=f"expected measured inputs of {K_CACHE} in"):
        load(plain, kv_cache_dtype=INC)
    down = "model.layers.1.mlp.down_proj"
    use(monkeypatch, write_inc(tmp_path / "b", [{name: x for name, x in nodes.items() if name != down}]))
    with pytest.raises(ValueError, match=f"expected measured inputs of {down} in .*: measure it, or list"):
        load(plain, quantization="inc")
    use(
        monkeypatch,
        write_inc(tmp_path / "c", [{**nodes, down: {**nodes[down], "params": {"weight": [[1e-9]]}}}]),
    )
    with pytest.raises(ValueError, match=f"the scales are of another checkpoint in {down}"):
        load(plain, quantization="inc")
    for bad in (0.0, -1.0, float("nan"), "x", True, 10**400, -(10**400)):
        file = write_inc(tmp_path / "d", [{**nodes, K_CACHE: {"inputs": [[[bad]]]}}])
        with pytest.raises(ValueError, match=f"expected inputs of {K_CACHE} to be finite and above 0"):
            read_inc(file)
    file = write_inc(tmp_path / "e", [nodes, nodes])
    (tmp_path / "e/g2/inc_output_hooks_maxabs_1_2.json").unlink()
    with pytest.raises(ValueError, match=r"expected files of all 2 ranks, found no .*_1_2.json"):
        read_inc(file)
    file = write_inc(tmp_path / "f", [])
    (tmp_path / "f/g2/inc_output_hooks_maxabs_0_1.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"inc_output_hooks_maxabs_0_1.npz, a pickle, which may run code"):
        read_inc(file)
    lost = write_inc(tmp_path / "g", [nodes]).rename(tmp_path / "g/quant.json")
    lost.write_text(lost.read_text().replace("/g2/", "/"))
    with pytest.raises(ValueError, match="expected the kind of Gaudi that its scales are for"):
        read_inc(lost)


def fuzz(directory: Path, nodes: Mapping[str, Any], seed: int) -> str:
    """Read damaged files; return the error, or ""."""
    draw = random.Random(seed)
    file = write_inc(directory, [damaged(nodes, draw) if seed % 2 else nodes] * (1 + seed % 3 // 2))
    if not seed % 2:
        file.write_text(json.dumps(damaged(json.loads(file.read_text()), draw)))
    try:
        found = read_inc(file)
        found.kv([0, 1])
        found.linear("model.layers.0.mlp.up_proj")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=EXHAUSTIVE)])
def test_damaged_files_end_in_a_sentence(count: int, nodes: dict[str, Any], tmp_path: Path) -> None:
    small = {name: node for name, node in nodes.items() if "gate_up" in name or "cache" in name}
    errors = [fuzz(tmp_path, small, seed) for seed in range(count)]
    assert "" in errors
    assert not any("\n" in error for error in errors)
