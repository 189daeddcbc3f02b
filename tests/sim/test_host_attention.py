"""Attention on the host beside the simulated HPU: graphs are cut where queries leave and triples arrive."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from graphs import BucketTable
from hpu_duo import HPUDuoModel
from hpu_duo.engine.on_host.captured import CapturedHostAttention
from hpu_duo.engine.on_host.runner import HostRunner
from hpu_duo.lab import sim
from hpu_duo.lab.sim.runtime import SimRuntime
from hpu_duo.lab.sim.tensor import SimTensor
from hpu_duo.startup import device_side, offloading
from tests.engine.test_host_attention import DRAFTS, DRAWN, GREEDY, NUM_ON_HOST, PATTERN, PROMPTS, tiny
from tests.engine.test_looped_layers import VendorsOnCpu, num_compiled
from tests.engine.test_random_workload import random_params, run_all
from tests.engine.tiny import Tiny, assert_holds_nothing, serve, tokens_of
from tests.modeling.families import prompts_of
from tests.vendor import choose_mode, importable

__all__ = ["tiny"]  # a fixture

pytestmark = pytest.mark.usefixtures("simulated_hpu", "default_buckets")


def load(tiny: Tiny, num_on_host: int = NUM_ON_HOST, **options: Any) -> HPUDuoModel:
    """Serve on the simulated device with few blocks, and some on the host; or on a CPU with all blocks."""
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "enable_prefix_caching": False, **options}
    on_cpu = {"num_blocks": 64, "device": "cpu", "graphs": "eager", "buckets": None}
    if sizes.get("attention") == "hpu":
        on_cpu["attention"] = "reference"
    whole = tiny.load(**{**sizes, **on_cpu, "cpu_attention_mode": "attend"})
    if not num_on_host:
        return whole
    gib = (num_on_host + 0.5) * whole.engine.runner.store.plan.block_bytes / 2**30
    return tiny.load(**{"num_blocks": 11, "device": "hpu-sim", **sizes, "cpu_attention": gib})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pattern": PATTERN, "speculative_config": DRAFTS},
        pytest.param({"attention": "hpu", "kv_cache_dtype": "int8_per_token_head"}, marks=pytest.mark.slow),
    ],
    ids=["full", "duo-drafts", "fused-int8"],
)
def test_tokens_are_those_of_a_larger_device_and_nothing_new_is_compiled(
    tiny: Tiny, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [GREEDY, DRAWN] * 3
    wanted = tokens_of(serve(load(tiny, 0, **options), PROMPTS, params))
    model = load(tiny, **options)
    runner = model.engine.runner
    assert isinstance(runner, HostRunner)
    model.warmup()
    monkeypatch.setattr(SimRuntime, "synchronize", lambda _: pytest.fail("a step waits for the device"))
    with sim.watch() as seen:
        assert tokens_of(serve(model, PROMPTS, params)) == wanted
    report, host, traffic = seen.report(), model.engine.scheduler.allocations.host, runner.host.traffic
    assert host is not None
    assert host.num_moved > 0 == host.num_used
    assert traffic.contexts > 0
    assert traffic.triples > 0
    assert (report.new_graphs, report.new_recipes) == (0, 0)
    assert not report.excused
    # One read of results, and one of queries for each layer if a decode has blocks on the host.
    text = tiny.model.config
    assert {step.d2h_reads for step in report.steps} == {0, 1, 1 + text.num_hidden_layers}
    heads, rows = text.num_attention_heads * (1 if options.get("pattern") is None else 1 / 2), 3
    q_bytes = rows * heads * text.head_dim * 4
    crossed = [step.d2h_bytes for step in report.steps if step.d2h_reads > 1]
    assert max(crossed) <= text.num_hidden_layers * q_bytes * (1 + DRAFTS["num_speculative_tokens"]) + 200


def test_device_memory_is_planned_and_made_before_serving(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tokens of several buckets, and of tiles."""
    planned = dict[str, int]()

    def note(plan: Callable[..., int], *given: Any) -> int:
        planned[plan.__name__] = plan(*given)
        return planned[plan.__name__]

    for module, name in (
        (device_side, "link_bytes"),
        (device_side, "bucket_bytes"),
        (offloading, "staged_bytes"),
    ):
        monkeypatch.setattr(module, name, partial(note, getattr(offloading, name)))
    table = BucketTable.from_strings(["csu/q8/s11/u11/l3", "csu/q16/s11/u11/l3", "--u/q3/s0/u11/l3"])
    model = load(tiny, buckets=table, pattern=PATTERN, graph_memory_bytes=1 << 20)
    model.warmup()
    runner = model.engine.runner
    assert isinstance(runner, HostRunner)
    host = runner.host
    assert isinstance(host, CapturedHostAttention)

    def on_device(tensors: dict[Any, torch.Tensor]) -> dict[Any, tuple[int, int]]:
        """Address and bytes of the memory behind each."""
        stored = {
            key: each.host.untyped_storage() for key, each in tensors.items() if isinstance(each, SimTensor)
        }
        return {key: (each.data_ptr(), each.nbytes()) for key, each in stored.items()}

    made, whole = on_device(host._made), on_device(host._whole)
    serve(model, PROMPTS, [GREEDY, DRAWN] * 3)
    assert min(host.traffic.triples, host.traffic.contexts) > 0
    assert (on_device(host._made), on_device(host._whole)) == (made, whole)
    assert {name for name, _ in host._views} == {"empty", "triples"}
    assert set(on_device(host._views).values()) == set(whole.values())
    in_tokens = sum(num_bytes for _, num_bytes in whole.values())
    pinned = [each for each in host._made.values() if not isinstance(each, SimTensor)]
    assert planned.pop("staged_bytes") >= sum(each.nbytes for each in pinned)
    assert planned == {"link_bytes": host.staging_bytes, "bucket_bytes": in_tokens}
    assert runner.store.plan.graph_bytes == (1 << 20) + in_tokens


@pytest.mark.slow
def test_a_full_host_preempts_and_no_token_changes(tiny: Tiny) -> None:
    """Without a warm-up: steps of requests capture graphs."""
    options: dict[str, Any] = {"max_num_seqs": 4, "num_blocks": 14, "pattern": PATTERN}
    model, rng = load(tiny, 3, **options), random.Random(5)
    lengths = [rng.choice((1, 9, 30, rng.randint(1, 50))) for _ in range(8)]
    work = [
        (prompt, replace(random_params(rng), max_tokens=rng.randint(20, 45)))
        for prompt in prompts_of(lengths, seed=6)
    ]
    done = run_all(model, work, rng)
    assert_holds_nothing(model)
    assert model.stats().num_preemptions > 0
    runner = model.engine.runner
    assert isinstance(runner, HostRunner)
    assert runner.host.traffic.triples > 0
    prompts, params = zip(*work)
    for number, samples in enumerate(serve(load(tiny, 0, pattern=PATTERN), prompts, params)):
        for sample in samples:
            got, _ = done[number, sample.sample_index]
            assert got == sample.token_ids[: len(got)]


@pytest.mark.slow
def test_compiled_layers_are_cut(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the backend of a real device, whose compiler gets each piece between two cuts."""
    wanted = tokens_of(serve(load(tiny, 0, pattern=PATTERN), PROMPTS, GREEDY))
    for _ in importable(monkeypatch):
        choose_mode(monkeypatch, is_lazy=False)
        torch._dynamo.reset()
        table = BucketTable.from_strings(["csu/q16/s11/u11/l3", "--u/q3/s0/u11/l3"])
        options = {"device": "cpu", "graphs": VendorsOnCpu(), "buckets": table, "fail_on_recompile": True}
        model = load(tiny, **options, pattern=PATTERN)
        model.warmup()
        warmed, runner = num_compiled(), model.engine.runner
        assert isinstance(runner, HostRunner)
        assert tokens_of(serve(model, PROMPTS, GREEDY)) == wanted
        assert num_compiled() == warmed
        keys = runner.graphs.backend.keys
        assert warmed > len(keys)  # layers are several pieces
        assert {key[1] for _, key in keys if isinstance(key, tuple) and key[0] == "loop"} == {"shared_chunk"}
        assert min(runner.host.traffic.triples, runner.host.traffic.contexts) > 0


def test_a_failed_copy_to_the_host_fails_the_step(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny)
    runner = model.engine.runner
    assert isinstance(runner, HostRunner)

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise MemoryError("no room")

    monkeypatch.setattr(CapturedHostAttention, "_store", fail)
    with pytest.raises(MemoryError, match="no room"):
        model.engine.generate(PROMPTS, GREEDY)
    assert_holds_nothing(model)
    assert tokens_of(serve(model, PROMPTS, GREEDY)) == tokens_of(serve(load(tiny, 0), PROMPTS, GREEDY))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"cpu_attention_mode": "move"}, "cpu_attention_mode='move'"),
        ({"cpu_attention_mode": "auto"}, "cpu_attention_mode='auto'"),
        ({"offload_num_batches": 2}, "offload_num_batches above 1"),
    ],
)
def test_an_hpu_neither_moves_contexts_for_decodes_nor_has_groups(
    tiny: Tiny, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=f"on an HPU, .* got {name}"):
        load(tiny, **{"cpu_attention_mode": "attend", **options})
