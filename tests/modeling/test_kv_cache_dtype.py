"""Formats of keys and values that users choose, in the engine: the same scores however a text is stored."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphs import BucketTable
from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel, SamplingParams
from hpu_duo.kv import store
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.lab.sim.fused import named
from kernels_ref import decoding
from kernels_ref.formats import PAIR, PLAIN, VectorFormat, names_of_formats
from kernels_ref.formats.base import Rounded
from kernels_ref.formats.int4 import Int4
from kernels_ref.formats.int8 import Int8
from tests.engine.tensor_contexts import save_tensors
from tests.engine.tiny import PATTERN, Tiny, make_tiny, serve, tokens_of
from tests.modeling.families import BLOCK, prompts_of
from tests.tiers import EXHAUSTIVE, crossed, further

pytestmark = pytest.mark.usefixtures("default_buckets")

NAMES = ["int8_per_token_head", "int4_per_token_head", "fp8", "fp8_per_token_head", "k8v4"]
FURTHER = {"k8v4": pytest.mark.slow}
RINGS = [pytest.param(name, marks=FURTHER.get(name, EXHAUSTIVE)) for name in NAMES]
PREEMPTED = [pytest.param(name, marks=() if name == NAMES[1] else EXHAUSTIVE) for name in NAMES]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DUO = {"pattern": PATTERN}
SKIP = "kv_cache_dtype_skip_layers"
TEXT, *TAILS = prompts_of((5 * BLOCK + 3, 9, 4), seed=5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def scored(served: HPUDuoModel) -> list[float]:
    """Log-probabilities of the continuations of one text."""
    return [x for score in served.score([TEXT], [TAILS])[0] for x in score.logprobs]


@pytest.mark.parametrize(
    ("name", "options"),
    crossed(NAMES, {"full": {}, "duo": DUO, "sdpa": {"attention": "sdpa"}}, fast=NAMES[:3]),
)
def test_scores_depend_on_no_division_into_chunks_and_on_no_reuse(
    tiny: Tiny, name: str, options: dict[str, Any]
) -> None:
    check_divisions(tiny, {**options, "kv_cache_dtype": name})


@pytest.mark.parametrize("name", RINGS)
def test_scores_depend_on_no_division_where_rings_have_a_format(tiny: Tiny, name: str) -> None:
    for attention in ("reference", "sdpa"):
        check_divisions(tiny, {"kv_cache_dtype": name, "ring_dtype": name, "attention": attention, **DUO})


def check_divisions(tiny: Tiny, options: dict[str, Any]) -> None:
    """Score a text whole, in chunks, several tokens at a time, cold and warm: the scores are the same."""
    # Products of other shapes differ in their last bits, by which a code may change.
    whole = scored(tiny.load(max_num_batched_tokens=64, enable_prefix_caching=False, **options))
    plain = {**options, "kv_cache_dtype": "auto", "ring_dtype": "auto"}
    assert whole != pytest.approx(scored(tiny.load(**plain)), abs=1e-4)
    for size in (1, BLOCK - 1, BLOCK):
        limits = {"max_num_batched_tokens": size, "max_num_seqs": 1}
        assert scored(tiny.load(**limits, **options)) == pytest.approx(whole, abs=1e-4)
    # Several tokens of a row are decoded together, and rows fork.
    served = tiny.load(max_num_batched_tokens=64, decode_len=4, **options)
    cold, warm = scored(served), scored(served)
    assert cold == pytest.approx(whole, abs=1e-4)
    assert warm == pytest.approx(whole, abs=1e-4)
    prefixes = served.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens > 0 or "pattern" in options


TABLE = BucketTable.from_strings(["csu/q16/s12/u16/l4"])
CPU: dict[str, dict[str, Any]] = {
    "several tokens": {"decode_len": 4},
    "rule": {"attention_rule": "sink_band:sink=2,band=9", "decode_len": 3},
    "chosen blocks": {"attention_rule": "top_blocks:blocks=3"},
    "compiled": {"graphs": CompileBackend("eager"), "buckets": TABLE},
}


# Compiled steps with a format have a fast test in test_kv_format.py.
@pytest.mark.parametrize(("kind", "name"), crossed(list(CPU), NAMES, fast=list(CPU)[:3]))
def test_kernels_of_a_cpu_get_decoded_chunks(
    tiny: Tiny, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"kv_cache_dtype": name, **CPU[kind]}
    portable = {key: value for key, value in options.items() if key not in ("graphs", "buckets")}
    expected = scored(tiny.load(**portable))
    # As in long contexts: several chunks of two blocks or of one.
    monkeypatch.setattr(
        decoding, "chunk_bytes", lambda _, is_decode: 1 if is_decode else 2 * BLOCK * 2 * 8 * 4
    )
    assert scored(tiny.load(attention="sdpa", **options)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", ["plain", *further("rule"), "chosen blocks"])
@pytest.mark.parametrize(("name", "vectors"), [("int8_per_token_head", Int8), ("bfloat16", Rounded)])
def test_blocks_of_ended_requests_are_not_decoded(
    tiny: Tiny, name: str, vectors: type[VectorFormat], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, decoded = vectors.decode, 0

    def counted(self: VectorFormat, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        nonlocal decoded
        decoded += parts[0].numel()
        return decode(self, parts, dtype)

    monkeypatch.setattr(vectors, "decode", counted)
    served = tiny.load(attention="sdpa", kv_cache_dtype=name, num_blocks=40, **CPU.get(kind, {}))
    found = []
    for prompt in prompts_of((5, 60, 60, 5), seed=3):
        before = decoded
        serve(served, [prompt], GREEDY)
        found.append(decoded - before)
    assert 0 < found[3] <= found[0]


@pytest.mark.parametrize(
    ("name", "pattern"),
    crossed(NAMES, {"full": None, "duo": PATTERN}, fast=("int8_per_token_head", NAMES[1])),
)
def test_preempted_requests_continue_with_the_same_tokens(
    tiny: Tiny, name: str, pattern: Any, **more: Any
) -> None:
    prompts = prompts_of((13, 5, 22), seed=1)
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=20, n=3, ignore_eos=True)
    options: dict[str, Any] = {"pattern": pattern, "kv_cache_dtype": name, "max_num_seqs": 5, **more}
    expected = tokens_of(serve(tiny.load(enable_prefix_caching=False, **options), prompts, params))
    tight = tiny.load(num_blocks=10, max_model_len=60, **options)
    assert tokens_of(serve(tight, prompts, params)) == expected
    assert tight.stats().num_preemptions > 0


@pytest.mark.parametrize("name", PREEMPTED)
def test_preempted_requests_with_a_format_of_rings_and_budgets_continue_with_the_same_tokens(
    tiny: Tiny, name: str
) -> None:
    test_preempted_requests_continue_with_the_same_tokens(tiny, name, PATTERN, ring_dtype=name)
    budget = {"kv_policy": "h2o", "kv_budget": 12, "kv_chunk": 8}
    test_preempted_requests_continue_with_the_same_tokens(tiny, name, PATTERN, ring_dtype=name, **budget)


def _spoiled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Codes of ones only, and scales of NaN; zeros in the dtype of the model, and in states of rows."""
    found = {torch.int8: -1, torch.uint8: 0xFF, torch.bfloat16: torch.nan}
    return torch.full(shape, found.get(dtype, 0), dtype=dtype, device=device)


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "duo": DUO,
    "rule": {"attention_rule": "sink_band:sink=2,band=9"},
    "chosen blocks": {"attention_rule": "top_blocks:blocks=3"},
    "budget": {"kv_policy": "h2o", "kv_budget": 12, "kv_chunk": 8, **DUO},
    "plan": {"kv_policy": "snapkv:window=3,kernel=3", "kv_budget": 12, "kv_prompt": "whole", **DUO},
    "simulated HPU": {"attention": "auto", "device": "hpu-sim"},
    "sdpa": {"attention": "sdpa", **DUO},
    "rings": {"ring_dtype": True, **DUO},
}


def options_of(kind: str, name: str) -> dict[str, Any]:
    """Settings of heads of a kind, whose rings have the format of that name if it says so."""
    return {key: name if key == "ring_dtype" else value for key, value in KINDS[kind].items()}


@pytest.mark.parametrize(("name", "kind"), crossed(NAMES, list(KINDS)))
def test_what_is_in_unused_slots_changes_nothing(
    tiny: Tiny, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of((13, 5, 30), seed=4)
    options = {"kv_cache_dtype": name, "enable_prefix_caching": False, **options_of(kind, name)}
    expected = tokens_of(serve(tiny.load(**options), prompts, GREEDY))
    monkeypatch.setattr(store, "reserved_zeros", _spoiled)
    assert tokens_of(serve(tiny.load(**options), prompts, GREEDY)) == expected


@pytest.mark.parametrize(("name", "kind"), crossed(names_of_formats(), list(KINDS)))
def test_stores_take_what_the_memory_plan_says(tiny: Tiny, name: str, kind: str) -> None:
    prefixes = {"enable_prefix_caching": False} if kind == "plan" else {}
    options = {"num_blocks": 9, "max_model_len": 60, **prefixes, **options_of(kind, name)}
    served = tiny.load(kv_cache_dtype=name, **options)
    held, plan = served.engine.runner.store, served.engine.runner.store.plan
    assert held.num_bytes == plan.total_bytes == served.stats().kv_bytes
    assert plan.full_attention_bytes(1) == len(plan.layers) * 2 * 2 * plan.layers[0].head_dim * 4
    assert served.stats().resolved.token_bytes * BLOCK == plan.block_bytes
    resolved = served.stats().resolved.kv_cache_dtype
    shown = "float32" if name == PLAIN.name else name.replace("_e4m3", "")
    assert shown in resolved
    is_mixed = "pattern" in KINDS[kind] and kind != "rings" and shown != "float32"
    assert ("budget" in resolved or "rings" in resolved) == is_mixed


def test_layers_that_are_skipped_keep_the_dtype_of_the_model(tiny: Tiny) -> None:
    def of(**options: Any) -> MemoryPlan:
        return tiny.load(num_blocks=9, max_model_len=60, **options).engine.runner.store.plan

    plain, whole, part = (
        of(),
        of(kv_cache_dtype="fp8"),
        of(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=[0]),
    )
    assert 4 * whole.block_bytes == plain.block_bytes
    assert part.block_bytes == (plain.block_bytes + whole.block_bytes) // 2
    assert of(kv_cache_dtype="bfloat16").block_bytes * 2 == plain.block_bytes
    assert (
        not of(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers="sliding_window")
        .layers[0]
        .groups[0]
        .format.is_plain
    )
    with pytest.raises(ValueError, match="skip_layers of 0 to 1, the layers of this model, got 7"):
        of(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("1", "7"))
    with pytest.raises(ValueError, match="numbers of layers or 'sliding_window', got 'first'"):
        of(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers="first")
    with pytest.raises(ValueError, match=r"numbers of layers or 'sliding_window', got 1\.5"):
        of(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=1.5)
    with pytest.raises(ValueError, match="needs a kv_cache_dtype or ring_dtype, got 'auto'"):
        of(kv_cache_dtype_skip_layers=[0])
    with pytest.raises(ValueError, match=r"calculate_kv_scales is not served: .*'fp8_per_token_head'"):
        of(calculate_kv_scales=True)
    for other in (8, None, ["fp8"]):
        with pytest.raises(ValueError, match=r"kv_cache_dtype to be a name, one of auto, .*, got "):
            of(kv_cache_dtype=other)
    with pytest.raises(ValueError, match=r"ring_dtype to be one of auto, .*, got 'fp8_e5m2': two bits"):
        of(ring_dtype="fp8_e5m2")
    with pytest.raises(ValueError, match="one vector, got 'kivi_2': a slot of a ring that is overwritten"):
        of(ring_dtype="kivi_2")
    rings = {**DUO, "ring_dtype": "fp8"}
    plain, whole, part = (of(**each).row_bytes for each in (DUO, rings, {**rings, **{SKIP: [0]}}))
    assert plain == 4 * whole
    assert part == (plain + whole) // 2


def test_a_format_that_no_head_has_is_said_to_be_unused(tiny: Tiny) -> None:
    budget = {"kv_policy": "h2o", "kv_budget": 12, "kv_chunk": 8}
    assert "kv_cache_dtype 'fp8' is not used" in tiny.load(kv_cache_dtype="fp8", **budget).stats().notes[0]
    assert "ring_dtype 'fp8' is not used" in tiny.load(ring_dtype="fp8").stats().notes[0]
    floats, rings = {"kv_cache_dtype": "float32", **budget}, {"ring_dtype": "fp8", **DUO}
    for used in (rings, {"kv_cache_dtype": "fp8", **budget, **DUO}, floats, budget):
        assert not any("is not used" in note for note in tiny.load(**used).stats().notes)


@pytest.mark.parametrize("mixed", [f"fp8{PAIR}int4_per_token_head", *further("int8_per_token_head")])
def test_a_saved_context_loads_into_its_own_format_only(tiny: Tiny, mixed: str, tmp_path: Path) -> None:
    saved = tmp_path / "document"
    with tiny.load(kv_cache_dtype=mixed, **DUO).prefill(TEXT) as context:
        context.save(saved)
    expected = serve(tiny.load(kv_cache_dtype=mixed, **DUO), [[*TEXT, *TAILS[0]]], GREEDY)
    served = tiny.load(kv_cache_dtype=mixed, **DUO)
    with served.load_context(saved) as context:
        done = served.engine.generate([context.prompt(TAILS[0])], GREEDY, context=context.hold())
        assert done[0][0].num_cached_tokens > 0
        assert tokens_of(done) == tokens_of(expected)
    for other in ("auto", "k8v4"):
        with pytest.raises(ValueError, match=f"with kv_cache_dtype {other}, got one with {mixed}"):
            tiny.load(kv_cache_dtype=other, **DUO).load_context(saved)
    with tiny.load(**DUO).prefill(TEXT) as context:
        save_tensors(context, saved, "1")
    with tiny.load(**DUO).load_context(saved) as context:
        assert context.num_held_tokens > 0
    with pytest.raises(ValueError, match="with kv_cache_dtype fp8, got one with auto"):
        tiny.load(kv_cache_dtype="fp8", **DUO).load_context(saved)


def test_a_device_that_reads_codes_differently_is_found_at_load(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"attention": "auto", "device": "hpu-sim", "kv_cache_dtype": "k8v4"}
    decode, encode = Int4.decode, Int4.encode

    def other(self: Int4, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        found = decode(self, parts, dtype)
        return found if found.device.type == "cpu" else found.flip(-1)

    def coarse(self: Int4, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return encode(self, x if x.device.type == "cpu" else x.abs())

    for name, function, problem in (
        ("decode", other, "it decodes other"),
        ("encode", coarse, "it encodes other"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(Int4, name, function)
            with pytest.raises(
                ValueError, match=f"kv_cache_dtype 'k8v4' is not available on hpu.*: {problem}"
            ):
                tiny.load(**options)


@pytest.mark.parametrize("name", ["fp8", *further("fp8_per_token_head")])
def test_fp8_ends_at_240_on_a_gaudi_2(tiny: Tiny, name: str, tmp_path: Path) -> None:
    scales = {f"model.layers.{n}.self_attn.{x}_scale": torch.tensor(0.015) for n in (0, 1) for x in "kv"}
    save_file(scales, tmp_path / "kv_scales.safetensors")
    given = {"kv_scales": tmp_path} if name == "fp8" else {}
    options = {"attention": "reference", "device": "hpu-sim", "kv_cache_dtype": name, **given}
    with named("GAUDI2"):
        served = tiny.load(**options)
        serve(served, [TEXT], GREEDY)
    codes = torch.cat([x.flatten() for x in served.engine.runner.model.stores_flat if x.dtype == torch.uint8])
    largest = float(codes.cpu().view(torch.float8_e4m3fn).float().abs().max())
    assert 120 < largest <= 240
    if given:
        assert f"keys and values in fp8 are divided by the scales of {tmp_path}" in served.stats().notes
        assert served.engine.runner.model.kv_scales == [pytest.approx([0.028, 0.028])] * 2
        assert served.stats().num_clipped_values >= 0


@pytest.mark.parametrize(
    "options", [*further({}), DUO, *further({"attention": "sdpa"})], ids=["full", "duo", "sdpa"]
)
def test_scales_of_a_checkpoint_divide_what_is_stored_in_fp8(
    tiny: Tiny, options: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copytree(tiny.path, tmp_path, dirs_exist_ok=True)
    scaled, file = Tiny(tmp_path, tiny.model), tmp_path / "model.safetensors"
    stored = load_file(file)

    def write(**scales: float) -> None:
        each = {f"model.layers.{n}.self_attn.{end}": scales[end] for n in (0, 1) for end in scales}
        save_file(stored | {name: torch.tensor(x) for name, x in each.items()}, file, {"format": "pt"})

    # Powers of two change nothing in vectors of float32 that are divided by them.
    for name, k_scale, v_scale in ((f"float32{PAIR}fp8", 4.0, 1.0), (f"fp8{PAIR}float32", 1.0, 0.125)):
        expected = scored(tiny.load(kv_cache_dtype=name, **options))
        write(k_scale=k_scale, v_scale=v_scale)
        assert scored(scaled.load(kv_cache_dtype=name, **options)) == pytest.approx(expected, abs=1e-5)
        # What is below 1/1024 of a scale is stored as 0.
        write(k_scale=1e4, v_scale=1e4)
        assert scored(scaled.load(kv_cache_dtype=name, **options)) != pytest.approx(expected, abs=1e-4)
    assert scored(scaled.load(**options)) == pytest.approx(scored(tiny.load(**options)), abs=1e-5)
    write(k_scale=0.3)
    with pytest.raises(ValueError, match="expected v_scale of layer 0, as others have, found none"):
        scaled.load(kv_cache_dtype="fp8", **options)
    write(k_scale=0.0, v_scale=1.0)
    with pytest.raises(ValueError, match=r"k_scale to be above 0 and finite, got 0\.0"):
        scaled.load(kv_cache_dtype="fp8", **options)
    # Elements of prompts are counted that are beyond 448 after the division.
    write(k_scale=1e-6, v_scale=1.0)
    served, heads = scaled.load(kv_cache_dtype=f"fp8{PAIR}float32", **options), 1 if options == DUO else 2
    serve(served, [TEXT], GREEDY)
    clipped = served.stats().num_clipped_values
    assert 0.9 < clipped / (len(TEXT) * heads * 2 * served.config.head_dim) <= 1
    serve(served, [TEXT[1:6]], GREEDY)
    assert served.stats().num_clipped_values > clipped
    # Layers that keep the dtype of the model, or read stores of others, need none.
    write(k_scale=0.5, v_scale=1.0)
    save_file(
        {name: x for name, x in load_file(file).items() if "layers.1.self_attn.k_scale" not in name}, file
    )
    assert scored(scaled.load(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=[1], **options))
    with pytest.raises(ValueError, match="expected k_scale of layer 1, as others have, found none"):
        scaled.load(kv_cache_dtype="fp8", **options)
