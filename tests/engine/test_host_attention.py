"""Rows with blocks on the host have the tokens of an engine whose device holds them all."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from bias_builders import Window
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.device import runtime
from hpu_duo.device.runtime import HostMemory
from hpu_duo.engine.on_host import attention
from hpu_duo.engine.on_host import runner as host_runner
from hpu_duo.engine.on_host.attention import (
    check_specs,
    planned_bytes,
)
from hpu_duo.engine.on_host.choice import HostRates
from hpu_duo.engine.on_host.crossing import Streams
from hpu_duo.engine.on_host.runner import HostRunner
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams
from kernels_ref import (
    Blocks,
    GroupKind,
    HeadGroup,
    Implementation,
    LatentBlocks,
    LatentSize,
    LayerSpec,
    Rings,
    StoreTurn,
)
from tests.engine.test_host_attention_layer import FakeStreams
from tests.engine.test_random_workload import random_params, run_all
from tests.engine.tiny import Tiny, assert_holds_nothing, serve, tokens_of
from tests.modeling.families import BASE, BLOCK, prompts_of, save_random

pytestmark = pytest.mark.instruction_set

NUM_BLOCKS, NUM_ON_HOST = 11, 24
PATTERN = HeadPattern(
    np.zeros((2, 2), np.float32), sink=2, recent=6, retrieval=np.array([[True, False], [False, True]])
)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def are_measured(rates: HostRates | None) -> bool:
    """Whether all rates are there; attention on the device may be too fast to measure."""
    if rates is None or rates.tile is None:
        return rates is not None and all(0 < rate < math.inf for rate in rates[:3]) and rates.call >= 0
    return all(0 < rate < math.inf for rate in rates[:2]) and rates.device > 0 and min(rates[3:]) >= 0


DRAWN = SamplingParams(temperature=1, max_tokens=12, seed=3)
PROMPTS = prompts_of((76, 5, 81, 9, 70, 33))
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny Llama, whose heads are large enough for all kernels of CPUs."""
    path = tmp_path_factory.mktemp("host")
    return Tiny(path, save_random(LlamaConfig(**{**BASE, "num_hidden_layers": 2, "head_dim": 32}), path))


def load(tiny: Tiny, num_on_host: int = NUM_ON_HOST, mode: str = "attend", **options: Any) -> HPUDuoModel:
    """Serve with few blocks on the device, and some on the host."""
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_blocks": NUM_BLOCKS, "graphs": "eager"}
    plain = {**sizes, "enable_prefix_caching": False, **options}
    if not num_on_host:
        return tiny.load(**{**plain, "num_blocks": 64})
    block_bytes = tiny.load(**{**plain, "num_blocks": 64}).engine.runner.store.plan.block_bytes
    return tiny.load(
        **plain, cpu_attention_mode=mode, cpu_attention=(num_on_host + 0.5) * block_bytes / 2**30
    )


def host_of(model: HPUDuoModel) -> HostRunner:
    """Return the runner with blocks on the host."""
    runner = model.engine.runner
    assert isinstance(runner, HostRunner)
    return runner


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("attend", {}),
        ("auto", {"attention": "sdpa", "kv_cache_dtype": "int8_per_token_head"}),
        ("attend", {"attention": "sdpa", "pattern": PATTERN, "speculative_config": DRAFTS}),
        ("move", {"attention": "sdpa", "pattern": PATTERN, "speculative_config": DRAFTS}),
    ],
    ids=["reference", "int8-auto", "duo-drafts", "duo-drafts-moved"],
)
def test_tokens_are_those_of_a_larger_device(
    tiny: Tiny, mode: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of codes, and where blocks move, by streams."""
    params, streams = [GREEDY, DRAWN] * 3, FakeStreams()
    wanted = tokens_of(serve(load(tiny, 0, **options), PROMPTS, params))
    if mode != "attend":
        monkeypatch.setattr(host_runner, "crossing_of", lambda _: Streams(streams))
    model = load(tiny, **options, mode=mode)
    runner = host_of(model)
    assert streams.num_pinned == (0 if mode == "attend" else runner.host.num_bytes)
    chosen = set[bool]()
    if mode == "auto":
        assert are_measured(runner.host.rates)
        # Short contexts are faster to move behind this link, long ones to attend to there.
        runner.host.rates, choose = HostRates(1.0, 1.5, math.inf), runner.host._moving_is_faster
        runner.host._moving_is_faster = lambda step: chosen.add(found := choose(step)) or found
    assert tokens_of(serve(model, PROMPTS, params)) == wanted
    host, traffic = model.engine.scheduler.allocations.host, runner.host.traffic
    assert host is not None
    assert host.num_moved > 0 == host.num_used
    assert any("tokens of running requests" in note for note in model.stats().notes)
    assert traffic.contexts > 0  # behind chunks of prompts
    assert (traffic.triples > 0) is (mode != "move")
    assert chosen == ({False, True} if mode == "auto" else set())
    assert (streams.num_holds > 0) is (mode != "attend")
    assert (streams.num_waits > 0) is (mode == "auto")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("attend", {}),
        ("move", {"attention": "reference"}),
        ("auto", {"kv_cache_dtype": "int8_per_token_head"}),
        ("attend", {"pattern": PATTERN, "speculative_config": DRAFTS}),
        ("move", {"pattern": PATTERN, "speculative_config": DRAFTS}),
    ],
    ids=["attend", "reference-move", "int8-auto", "duo-drafts", "duo-drafts-moved"],
)
def test_tokens_on_cuda_are_those_of_a_cpu(tiny: Tiny, mode: str, options: dict[str, Any]) -> None:
    """Codes of other devices may be rounded the other way, so those are compared with a GPU's."""
    options, device = {"attention": "auto", **options}, "cpu"
    if "kv_cache_dtype" in options or options["attention"] == "reference":
        device = "cuda"
    wanted = tokens_of(serve(load(tiny, 0, **options, device=device), PROMPTS, GREEDY))
    model = load(tiny, **options, mode=mode, device="cuda")
    host, traffic = model.engine.scheduler.allocations.host, host_of(model).host.traffic
    assert tokens_of(serve(model, PROMPTS, GREEDY)) == wanted
    assert host is not None
    assert host.num_moved > 0 == host.num_used
    assert traffic.contexts > 0
    if mode != "auto":
        assert (traffic.triples > 0) is (mode == "attend")
    else:
        assert are_measured(host_of(model).host.rates)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["attend", "move"])
def test_tokens_with_weights_on_the_host_of_cuda_too_are_those_of_a_cpu(tiny: Tiny, mode: str) -> None:
    """With so few blocks on the host that requests are preempted."""
    options = {"max_num_seqs": 4, "pattern": PATTERN, "attention": "auto"}
    prompts, params = prompts_of((50, 9, 31, 44, 40, 23, 48, 17), seed=6), replace(GREEDY, max_tokens=40)
    wanted = tokens_of(serve(load(tiny, 0, **options, device="cpu"), prompts, params))
    model = load(tiny, 3, mode=mode, **options, cpu_offload_gb=1e-6, num_blocks=14, device="cuda")
    assert model.engine.runner.model.stream is not None
    assert tokens_of(serve(model, prompts, params)) == wanted
    assert model.stats().num_preemptions > 0


def test_shares_of_a_policy_are_those_of_device_and_host(tiny: Tiny) -> None:
    """With weights of a layer on the host as well."""
    first = load(tiny)
    cache = first.engine_config.cache
    sizes: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
        "enable_prefix_caching": False,
        "cpu_attention": cache.cpu_attention,
        "offload_policy": "50,50,35,65,100,0",
    }
    model = tiny.load(**sizes)
    host, limits = model.engine.scheduler.allocations.host, model.engine.scheduler.limits
    assert host is not None
    assert host.num_blocks == NUM_ON_HOST
    assert limits.num_blocks == int((NUM_ON_HOST + 0.5) * 35 / 65)
    assert model.engine.runner.model.stream is not None
    assert tokens_of(serve(model, PROMPTS, GREEDY)) == tokens_of(serve(first, PROMPTS, GREEDY))
    with pytest.raises(ValueError, match=r"neither num_blocks nor kv_cache_bytes .* got .*num_blocks=12"):
        tiny.load(**sizes, num_blocks=12)
    # Rings are not in the shares.
    cache = load(tiny, NUM_BLOCKS, pattern=PATTERN).engine_config.cache
    sizes |= {"cpu_attention": cache.cpu_attention, "pattern": PATTERN}
    model = tiny.load(**{**sizes, "offload_policy": "100,0,50,50,100,0"})
    assert model.engine.scheduler.limits.num_blocks == NUM_BLOCKS
    for own, is_capped in (({}, False), ({"offload_policy": "100,0,95,5,100,0"}, True)):
        notes = tiny.load(**{**sizes, "offload_policy": "100,0,50,50,100,0", **own}).stats().notes
        assert any("KV blocks of offload_policy: 3 requests" in note for note in notes) is is_capped
        assert any("lie on the host" in note for note in notes) is not is_capped
    cache = {"kv_cache_bytes": 1 << 20, "offload_policy": None}
    notes = tiny.load(**{**sizes, **cache}).stats().notes
    assert any("KV blocks of kv_cache_bytes: 3 requests" in note for note in notes)
    for policy, message in (
        (
            "100,0,45,55,100,0",
            "11 or more with cpu_attention, or such a share of the device in offload_policy.* got 9",
        ),
        ("100,0,100,0,100,0", r"kv_host above 0 with cpu_attention=.*, got '100,0,100,0,100,0'"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny.load(**{**sizes, "offload_policy": policy})


def test_a_decode_moves_queries_and_triples_only(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    built, tokens = list[Any](), attention._tokens
    monkeypatch.setattr(attention, "_tokens", lambda rows, step: built.append(rows) or tokens(rows, step))
    model = load(tiny)
    runner, engine = host_of(model), model.engine
    for prompt in PROMPTS[:3]:
        engine.add_request(prompt, GREEDY)
    text, traffic = tiny.model.config, runner.host.traffic
    heads, dim = text.num_attention_heads, text.head_dim
    num_steps = 0
    while engine.has_unfinished:
        before, stats = replace(traffic), model.stats()
        of_rows = model.engine.runner.store.plan.row_bytes * stats.used_rows
        held = sum(each.num_blocks for each in engine.scheduler._running)
        assert stats.used_host_blocks == held - stats.used_blocks
        assert stats.held_bytes == of_rows + held * model.engine.runner.store.plan.block_bytes
        running = [each for each in engine.scheduler._running if each.num_uncomputed_tokens == 1]
        built.clear()
        engine.step()
        rows = sum(bool(each.host_blocks) for each in running)
        if running and all(each.finish_reason is None for each in running):
            vectors = rows * heads * text.num_hidden_layers
            assert traffic.triples - before.triples == vectors * (dim + 2) * 4
            assert traffic.queries - before.queries == vectors * dim * 4
            num_steps += rows > 0
            assert len(built) == (rows > 0)  # for all layers
    assert num_steps > 0


def test_a_full_host_preempts_and_no_token_changes(tiny: Tiny) -> None:
    options = {"max_num_seqs": 4, "num_blocks": 14, "attention": "sdpa"}
    model, rng = load(tiny, 3, pattern=PATTERN, **options), random.Random(5)
    lengths = [rng.choice((1, 9, 30, rng.randint(1, 50))) for _ in range(8)]
    work = [
        (prompt, replace(random_params(rng), max_tokens=rng.randint(20, 45)))
        for prompt in prompts_of(lengths, seed=6)
    ]
    done = run_all(model, work, rng)
    assert_holds_nothing(model)
    host = model.engine.scheduler.allocations.host
    assert host is not None
    assert host.num_moved > 0 == host.num_used
    assert model.stats().num_preemptions > 0
    prompts, params = zip(*work)
    for number, samples in enumerate(
        serve(load(tiny, 0, pattern=PATTERN, attention="sdpa"), prompts, params)
    ):
        for sample in samples:
            got, reason = done[number, sample.sample_index]
            assert got == sample.token_ids[: len(got)]
            assert reason is FinishReason.ABORT or len(got) == len(sample.token_ids)


def test_rows_of_an_interrupted_step_are_forgotten(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while a step waits for the host leaves nothing to attend to in the next step."""
    model = load(tiny)
    host = host_of(model).host

    def interrupted() -> None:
        if any(row.is_decode for row in host._now.there):
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(host.worker, "drain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve(model, PROMPTS[:3], GREEDY)
    assert_holds_nothing(model)
    assert tokens_of(serve(model, [[7]], GREEDY)) == tokens_of(serve(load(tiny, 0), [[7]], GREEDY))


def test_a_request_waits_for_blocks_that_others_share(tiny: Tiny) -> None:
    """Shared blocks cannot move: else a request would be admitted and preempted in each step."""
    model = load(tiny, num_blocks=13)
    engine = model.engine
    engine.add_request(PROMPTS[0], replace(DRAWN, n=2, max_tokens=10))
    while engine.stats().num_running < 2:
        engine.step()
    engine.add_request(PROMPTS[4], GREEDY)
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().num_preemptions <= 1


def test_requests_that_all_fit_on_the_device_are_served(tiny: Tiny) -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 20}
    model = tiny.load(**sizes, enable_prefix_caching=False, cpu_attention=1e-3)
    assert model.engine.scheduler.limits.num_blocks == 9


def test_device_and_host_are_within_the_memory_of_the_machine(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stores of a CPU take their memory later, when blocks are written."""
    first = load(tiny)
    plan, on_host = first.engine.runner.store.plan, first.engine_config.cache.cpu_attention
    assert on_host is not None
    host = host_of(first).host
    planned = planned_bytes(plan, NUM_ON_HOST, is_apart=False)
    assert planned == (host.num_bytes, host.staging_bytes)
    free = plan.total_bytes + sum(planned)
    monkeypatch.setattr(runtime, "host_memory", lambda: HostMemory(8 * free, free))
    few: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    tiny.load(**few, num_blocks=NUM_BLOCKS, cpu_attention=on_host)
    with pytest.raises(ValueError, match="the KV cache needs"):
        tiny.load(**few, num_blocks=NUM_BLOCKS + 1, cpu_attention=on_host)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graphs": "replay"}, "got graphs='replay'"),
        ({"tensor_parallel_size": 2}, "got tensor_parallel_size=2"),
        ({"record_steps": "steps.bin"}, "got record_steps"),
        (
            {"pattern": PATTERN, "kv_policy": "h2o", "kv_budget": 12},
            "serves heads that store all tokens",
        ),
        ({"num_blocks": 10}, "expected num_blocks of 11 or more"),
        ({"enable_prefix_caching": True}, "needs enable_prefix_caching=False"),
        ({"cpu_attention": 1e-9}, "expected cpu_attention of one block or more"),
        ({"cpu_attention": True}, "expected cpu_attention to be GiB"),
        ({"cpu_attention": 1e6}, "within the free memory"),
        ({"cpu_attention_mode": "fast"}, "expected cpu_attention_mode"),
        ({"cpu_attention": None, "cpu_attention_mode": "move"}, "'move' needs cpu_attention, got None"),
    ],
)
def test_what_is_not_served_is_refused(tiny: Tiny, options: dict[str, Any], message: str) -> None:
    sizes = {"max_num_seqs": 3, "num_blocks": NUM_BLOCKS, "enable_prefix_caching": False}
    with pytest.raises(ValueError, match=message):
        tiny.load(**{**sizes, "cpu_attention": 1e-3, **options})


@pytest.mark.parametrize(
    ("kind", "writes", "message"),
    [
        (LatentBlocks(None, LatentSize(8, 4)), True, "got latent blocks"),
        (Blocks(Window(2, 6)), True, "got .*6"),
        (Rings(Window(2, 6)), True, "got no head that stores all tokens"),
        (Blocks(), False, "got layers that read the keys of an earlier one"),
    ],
)
def test_heads_that_are_not_served_are_named(kind: GroupKind, writes: bool, message: str) -> None:
    turn = StoreTurn.ONLY if writes else StoreTurn.NEXT
    spec = LayerSpec((HeadGroup(1, kind),), 1, 8, 1.0, None, Implementation.SDPA, turn=turn)
    with pytest.raises(ValueError, match=message):
        check_specs([spec])


def test_a_prompt_larger_than_device_and_host_is_refused(tiny: Tiny) -> None:
    model = load(tiny, 1, max_model_len=None)
    held = (NUM_BLOCKS + 1) * BLOCK
    assert model.engine.scheduler.limits.max_model_len == held + 1
    with pytest.raises(ValueError, match=f"leave room for an output token in max_model_len={held + 1}"):
        model.engine.add_request([1] * (held + 2), GREEDY)
