"""Prefixes that were evicted to host memory, in the engine: the same tokens, and fewer of them computed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bias_builders import Window
from hpu_duo import HPUDuoModel, SamplingParams, request
from hpu_duo.config.limits import CacheConfig
from hpu_duo.context import PrefixContext
from hpu_duo.device.ranks import Membership
from hpu_duo.kv.plan import LayerKV, MemoryPlan
from hpu_duo.kv.tiers.eviction import ORDERS
from hpu_duo.kv.tiers.host_link import HostLink
from hpu_duo.kv.tiers.link import SimulatedLink, Transfer, Transfers
from hpu_duo.kv.tiers.policy import LoadPolicy
from hpu_duo.kv.tiers.stream_link import StreamLink
from hpu_duo.startup.offloading import HostSlots, _check_host
from kernels_ref import Blocks, HeadGroup, Rings
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import BLOCK, prompts_of
from tests.tiers import crossed, further

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = {"num_blocks": 24, "num_prefix_snapshots": 6, "max_model_len": 80}
HOST = {**SMALL, "kv_offloading_size": 0.05}
DUO = {"pattern": PATTERN}
BUDGET: dict[str, Any] = {"kv_policy": "h2o", "kv_budget": 16, "kv_chunk": 8}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "duo": DUO,
    "codes": {"kv_cache_dtype": "int8_per_token_head", **DUO},
    "streaming": {"pattern": PATTERN, "threshold": 2.0},
    "budget": BUDGET,
}
TEXTS = prompts_of((5 * BLOCK + 3, 6 * BLOCK + 1, 7 * BLOCK, 4 * BLOCK + 2, 6 * BLOCK + 3, 5 * BLOCK), seed=3)


@pytest.fixture(autouse=True)
def load_whatever_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """This model computes a block faster than a thread copies one."""
    monkeypatch.setattr(LoadPolicy, "loads", lambda *_: True)


def in_steps(served: HPUDuoModel, latency: float = 0.0) -> HPUDuoModel:
    """Replace the link by one whose clock is polls, and whose transfers arrive when they land."""
    executor, tiers = served.engine.runner.executor, served.engine.scheduler.allocations.tiers
    assert tiers is not None
    assert isinstance(executor.link, HostLink | StreamLink)
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    def advance(to: float) -> None:
        now[0] = to

    link = SimulatedLink(tiers.sizes[:2], latency, 4096.0, 4096.0, clock, advance, executor.link)
    executor.link = tiers.stage.link = link
    return served


def test_transfers_of_units_of_other_ranks_land_here_too(tiny: Tiny) -> None:
    link = tiny.load(**HOST).engine.runner.executor.link
    assert link is not None
    row = Transfer(is_row=True, unit=0, slots=(0,))
    link.begin(Transfers(stores=(row,), loads=(row,)))
    link.wait_any()
    link.wait_any()
    assert {each.transfer for each in link.poll()} == {row}


def answers(served: HPUDuoModel, rounds: int = 2) -> list[list[list[list[int]]]]:
    """Tokens of all texts, one after the other, round after round: each comes back when it is evicted."""
    return [[tokens_of(serve(served, [text], GREEDY))[0] for text in TEXTS] for _ in range(rounds)]


@pytest.mark.parametrize("kind", crossed(list(KINDS), fast=("codes", "budget")))
def test_texts_that_come_back_from_the_host_have_the_same_tokens(tiny: Tiny, kind: str) -> None:
    plain, tiered = tiny.load(**SMALL, **KINDS[kind]), tiny.load(**HOST, **KINDS[kind])
    assert answers(tiered) == answers(plain)
    tiers = tiered.engine.scheduler.allocations.tiers
    assert tiers is not None
    assert tiers.counters.num_loaded > 0
    assert tiers.counters.num_hit_tokens > 5 * BLOCK
    hits = [each.num_hit_tokens for served in (plain, tiered) if (each := served.stats().prefixes)]
    assert hits[1] > hits[0] + 5 * BLOCK


@cache
def answers_of_rings(tiny: Tiny) -> list[list[list[list[int]]]]:
    return answers(tiny.load(**SMALL, **DUO))


@pytest.mark.parametrize(
    "policy", [*further("write_through", "write_through_cost"), "write_through_selective"]
)
def test_other_write_policies_give_the_same_tokens(tiny: Tiny, policy: str) -> None:
    tiered = tiny.load(**HOST, **DUO, kv_offloading_write_policy=policy, kv_offloading_min_tokens=20)
    assert answers(tiered) == answers_of_rings(tiny)
    offload = tiered.stats().offload
    assert offload is not None
    assert offload.num_loaded > 0
    assert offload.num_stored > offload.num_evicted
    assert offload.used_bytes <= offload.total_bytes <= 0.05 * 2**30
    # The others are reserved for transfers.
    assert tiered.stats().total_blocks == 24 - 4


@cache
def slot_gib(tiny: Tiny) -> float:
    tiers = tiny.load(**HOST, **DUO).engine.scheduler.allocations.tiers
    assert tiers is not None
    return tiers.sizes.slot_bytes / 2**30


def test_a_tier_of_one_record_gives_the_same_tokens(tiny: Tiny) -> None:
    one = tiny.load(**{**HOST, "kv_offloading_size": slot_gib(tiny)}, **DUO)
    tiers = one.engine.scheduler.allocations.tiers
    assert tiers is not None
    assert tiers.host.num_slots == 1
    assert answers(one) == answers_of_rings(tiny)
    assert tiers.counters.num_stored > 0


@pytest.mark.parametrize("policy", ["arc", "value"])
def test_other_eviction_policies_give_the_same_tokens(tiny: Tiny, policy: str) -> None:
    few = {**HOST, "kv_offloading_size": 24 * slot_gib(tiny), "kv_offloading_eviction_policy": policy}
    tiered = in_steps(tiny.load(**few, **DUO))
    assert answers(tiered) == answers_of_rings(tiny)
    tiers = tiered.engine.scheduler.allocations.tiers
    assert tiers is not None
    assert type(tiers.host._order) is type(ORDERS[policy](1))
    assert tiers.counters.num_loaded > 0
    assert tiers.host.num_evicted > 0


def test_records_of_another_salt_are_not_found(tiny: Tiny) -> None:
    tiered = tiny.load(**HOST)
    hits = []
    for salt in ("a", "b", "a"):
        for text in TEXTS:
            serve(tiered, [text], replace(GREEDY, cache_salt=salt))
        offload = tiered.stats().offload
        assert offload is not None
        assert offload.num_queried_tokens > offload.num_hit_tokens
        hits.append(offload.num_hit_tokens)
    assert hits[0] == hits[1] == 0 < hits[2]


@pytest.mark.parametrize("kind", [*further("full"), "duo"])
def test_preempted_requests_come_back_from_the_host(tiny: Tiny, kind: str) -> None:
    prompts = prompts_of((33, 25, 32, 29, 30, 37, 25, 28, 31, 34))
    params = SamplingParams(temperature=0, max_tokens=40)
    limits = {"max_model_len": 80, "max_num_seqs": 4, **KINDS[kind]}
    # As many blocks and snapshots beside those that are reserved.
    rows = {"num_prefix_snapshots": 6}, {"num_prefix_snapshots": 8}
    plain = tiny.load(**limits, num_blocks=24, **rows[0])
    tiered = in_steps(tiny.load(**limits, num_blocks=28, **rows[1], kv_offloading_size=0.05))
    assert tokens_of(serve(tiered, prompts, params)) == tokens_of(serve(plain, prompts, params))
    offload, stats = tiered.stats().offload, tiered.stats()
    assert offload is not None
    assert stats.num_preemptions > 0
    assert offload.num_hit_tokens > 0


@pytest.mark.parametrize("kind", ["full", "duo"])
def test_an_idle_context_leaves_for_a_request_and_comes_back_with_its_question(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    now = [0.0]
    monkeypatch.setattr(request, "_now", lambda: now[0])
    document, question = prompts_of((8 * BLOCK + 1, 5), seed=9)
    large = [*TEXTS[2], *TEXTS[0][:14]]

    def ask(served: HPUDuoModel, context: PrefixContext) -> list[list[int]]:
        return tokens_of(served.engine.generate([context.prompt(question)], GREEDY, context=context.hold()))

    limits = {
        "max_model_len": 80,
        "num_blocks": 18,
        "max_num_seqs": 1,
        "num_prefix_snapshots": 8,
        **KINDS[kind],
    }
    plain = tiny.load(**limits)
    # A thread that is slow to copy would leave no room for further blocks, which are lost then.
    served = in_steps(tiny.load(**limits, kv_offloading_size=0.05, context_idle_seconds=10.0))
    with plain.prefill(document) as context:
        expected = ask(plain, context)
    with served.prefill(document) as context:
        assert ask(served, context) == expected
        with pytest.raises(ValueError, match="contexts leave 6 of 14"):
            served.engine.generate([large], GREEDY)
        now[0] = 11.0
        assert tokens_of(served.engine.generate([large], GREEDY)) == tokens_of(serve(plain, [large], GREEDY))
        before = served.stats().num_prompt_tokens
        assert ask(served, context) == expected
        # Its opening computes its end, with rings from the snapshot before it, and the question its tokens.
        assert served.stats().num_prompt_tokens - before <= 2 * BLOCK + 1 + len(question)
        offload = served.stats().offload
        assert offload is not None
        assert offload.num_hit_tokens >= 2 * BLOCK


def test_a_slow_link_delays_no_step_and_changes_no_token(tiny: Tiny) -> None:
    """Bytes arrive when a transfer lands, and units on their way are poisoned until then."""
    plain, tiered = tiny.load(**SMALL, **DUO), tiny.load(**HOST, **DUO)
    prompts = [*TEXTS, *TEXTS[::-1], *TEXTS]
    expected = tokens_of(serve(plain, prompts, GREEDY))
    assert tokens_of(serve(in_steps(tiered, latency=2.0), prompts, GREEDY)) == expected
    offload = tiered.stats().offload
    assert offload is not None
    assert offload.num_loaded > 0


def test_a_transfer_that_fails_ends_no_request(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    plain, tiered = tiny.load(**SMALL, **DUO), tiny.load(**HOST, **DUO)
    assert answers(tiered, 1) == (expected := answers(plain, 1))
    with monkeypatch.context() as patch:
        patch.setattr(tiered.engine.runner.executor.link, "_load", fail)
        assert answers(tiered, 1) == expected
    assert "failed, so records are dropped: MemoryError('no room')" in caplog.text
    assert answers(tiered, 3) == expected * 3
    offload = tiered.stats().offload
    assert offload is not None
    assert offload.num_loaded > 0


@pytest.mark.parametrize("kind", [*further("full"), "duo"])
def test_records_that_change_on_the_host_are_dropped_and_counted(tiny: Tiny, kind: str) -> None:
    """Their texts are computed again."""
    plain, tiered = tiny.load(**SMALL, **KINDS[kind]), in_steps(tiny.load(**HOST, **KINDS[kind]))
    assert answers(tiered, 1) == (expected := answers(plain, 1))
    tiers = tiered.engine.scheduler.allocations.tiers
    assert tiers is not None
    before = len(tiers.host)
    tiered.engine.runner.executor.link._link.slots[:, 3] ^= 1  # type: ignore[union-attr]
    assert answers(tiered, 1) == expected
    offload = tiered.stats().offload
    assert offload is not None
    assert 0 < offload.num_damaged <= before
    assert offload.num_damaged >= offload.num_abandoned > 0
    assert answers(tiered, 2) == expected * 2
    offload = tiered.stats().offload
    assert offload is not None
    assert offload.num_hit_tokens > 0


def test_a_rank_without_blocks_has_as_many_slots_as_the_others() -> None:
    blocks, rings = ((LayerKV((HeadGroup(1, kind),), 16),) for kind in (Blocks(), Rings(Window(4, 12))))
    # A block of 4 tokens, and a ring of 16.
    for mine, other, num_bytes in ((blocks, rings, 512), (rings, blocks, 2048)):
        plan = MemoryPlan(mine, 4, 4, max_num_seqs=2, num_blocks=8, others=(other,))
        assert HostSlots.of(1 / 1024, plan) == HostSlots(
            2**20 // 2560, num_bytes, per_row=1, share=num_bytes / 2560
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_size": 0}, "expected kv_offloading_size to be GiB above 0 or None, got 0"),
        ({"kv_offloading_size": 1e-9}, "expected kv_offloading_size of one block or more, .* got 1 bytes"),
        ({"kv_offloading_size": float("inf")}, "expected kv_offloading_size to be .*, got inf"),
        ({"kv_offloading_size": 1e9}, "expected kv_offloading_size within the free memory of the host"),
        ({**HOST, "num_blocks": 7, "max_model_len": 40}, "expected 8 blocks or more with kv_offloading_size"),
        ({**HOST, "num_prefix_snapshots": 2, **DUO}, "expected num_prefix_snapshots of 3 or more"),
        ({**HOST, "enable_prefix_caching": False, "num_prefix_snapshots": None}, "needs enable_prefix_cach"),
        ({"kv_offloading_backend": "lmcache"}, "'native', got 'lmcache': LMCache stores no rings"),
        ({"kv_offloading_write_policy": "write_through"}, "needs kv_offloading_size, got None"),
        ({**HOST, "kv_offloading_min_tokens": 0}, "expected kv_offloading_min_tokens"),
    ],
)
def test_what_cannot_be_offloaded_is_one_sentence(tiny: Tiny, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.load(**options)


@pytest.mark.parametrize("has_disk", [False, True])
def test_steps_are_not_recorded_with_a_tier(tiny: Tiny, tmp_path: Path, has_disk: bool) -> None:
    disk = {"kv_offloading_disk": tmp_path / "kv", "kv_offloading_disk_size": 0.02}
    with pytest.raises(ValueError, match="steps are recorded without kv_offloading_size"):
        tiny.load(**HOST, **(disk if has_disk else {}), record_steps=tmp_path / "steps")


def test_a_server_rests_where_snapshots_are_larger_than_the_tier(tiny: Tiny) -> None:
    wide = replace(PATTERN, recent=40)
    options = {**SMALL, "pattern": wide, "kv_offloading_write_policy": "write_through"}
    memory = tiny.load(**SMALL, pattern=wide).engine.runner.store.plan
    assert memory.row_bytes > memory.block_bytes
    served = tiny.load(**options, kv_offloading_size=1.5 * memory.block_bytes / 2**30)
    serve(served, TEXTS[:2], SamplingParams(temperature=0, max_tokens=2))
    assert any(not served.engine.settle_idle() for _ in range(200))


@pytest.mark.parametrize(
    ("machines", "free", "problem"),
    [
        ("ab", (60, 60), None),
        ("aa", (120, 100), None),
        ("aa", (120, 99), "free memory of the host, 99 bytes, got 100 bytes of the ranks on a"),
    ],
    ids=["one on each of two machines", "two on one", "too many on one"],
)
def test_records_fit_into_the_machine_of_their_ranks(
    machines: str, free: tuple[int, int], problem: str | None
) -> None:
    """The free memory that counts is the least that any of them has measured."""
    collect = SimpleNamespace(collect=lambda own: [(name, 50, has) for name, has in zip(machines, free)])
    expectation = nullcontext() if problem is None else pytest.raises(ValueError, match=problem)
    with expectation:
        _check_host(CacheConfig(kv_offloading_size=1.0), 50, cast(Membership, collect))
