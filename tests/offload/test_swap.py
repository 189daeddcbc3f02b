"""Preempted requests that leave to host memory: the same tokens, and none of them computed again."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpu_duo import HPUDuoModel, SamplingParams
from hpu_duo.kv.tiers.policy import LoadPolicy
from hpu_duo.kv.tiers.swap import PreemptionMode, SwapCounters, SwapSpace
from hpu_duo.kv.tiers.swapping import Swapping
from hpu_duo.request import Request, TokenLimits
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import BLOCK, prompts_of
from tests.offload.test_offloading import KINDS, in_steps
from tests.recurrent import hybrids
from tests.tiers import crossed, further

PROMPTS = prompts_of((33, 25, 32, 29, 30, 37, 25, 28, 31, 34))
PARAMS = SamplingParams(temperature=0, max_tokens=40)
SWAP: dict[str, Any] = {"kv_offloading_size": 0.02, "preemption_mode": "swap", "swap_space": 0.02}


def limits(kind: str) -> dict[str, Any]:
    pattern = {"pattern": PATTERN} if kind == "budget" else {}
    return {"max_model_len": 80, "num_blocks": 24, "num_prefix_snapshots": 8, **KINDS[kind], **pattern}


def counters(served: HPUDuoModel) -> SwapCounters:
    offload = served.stats().offload
    assert offload is not None
    assert offload.swap is not None
    return offload.swap


@cache
def expected_of(tiny: Tiny, kind: str) -> list[list[list[int]]]:
    """Tokens where nobody is swapped."""
    return tokens_of(serve(tiny.load(**limits(kind)), PROMPTS, PARAMS))


@pytest.mark.parametrize("kind", crossed(list(KINDS), fast=("full", "codes")))
def test_swapped_requests_have_the_same_tokens_and_compute_none_again(tiny: Tiny, kind: str) -> None:
    swapped = in_steps(tiny.load(**limits(kind), **SWAP))
    assert tokens_of(serve(swapped, PROMPTS, PARAMS)) == expected_of(tiny, kind)
    found = counters(swapped)
    if kind == "streaming":  # it has no blocks, so nobody is preempted
        assert found.num_out == 0
        return
    assert found.num_out == found.num_in == swapped.stats().num_preemptions > 0
    assert found.num_recomputed == found.num_lost == 0
    # Some began to come back twice.
    assert found.in_bytes >= found.out_bytes > 0


@pytest.mark.parametrize("kind", [*further("full"), "duo"])
def test_requests_of_a_context_have_room_when_they_come_back(tiny: Tiny, kind: str) -> None:
    """Their context's blocks, which are shared, and one request more than fill the cache."""
    options = {**limits(kind), "max_model_len": 160, "num_blocks": 28}
    plain, swapped = tiny.load(**options), in_steps(tiny.load(**options, **SWAP))
    [document] = prompts_of((15 * BLOCK,), seed=9)

    def answers(served: HPUDuoModel) -> list[list[int]]:
        with served.prefill(document) as context:
            prompts = [context.prompt(prompt[:6]) for prompt in PROMPTS]
            return tokens_of(served.engine.generate(prompts, PARAMS, context=context.hold()))

    assert answers(swapped) == answers(plain)
    assert swapped.stats().num_preemptions > 0


@pytest.mark.parametrize(
    ("name", "drafts"), [("Qwen3NextConfig", 3), pytest.param("Lfm2Config", 0, marks=pytest.mark.slow)]
)
def test_states_of_layers_and_of_drafts_are_swapped(tmp_path: Path, name: str, drafts: int) -> None:
    hybrids.saved(tmp_path, name)
    options = {**limits("full"), "max_num_seqs": 6, "max_num_batched_tokens": 32}
    if drafts:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts}
    plain = hybrids.load(tmp_path, **options)
    swapped = in_steps(hybrids.load(tmp_path, **options, **SWAP))
    assert tokens_of(serve(swapped, PROMPTS, PARAMS)) == tokens_of(serve(plain, PROMPTS, PARAMS))
    assert counters(swapped).num_out == counters(swapped).num_in > 0
    assert counters(swapped).num_lost == 0


@pytest.mark.parametrize(("num_tokens", "is_swapped"), [(8, False), (9, True)])
def test_auto_swaps_where_both_copies_are_faster_than_computing(num_tokens: int, is_swapped: bool) -> None:
    allocations: Any = SimpleNamespace(shrink=lambda _: None, release_prefix=lambda _: None)
    stage: Any = None
    space, policy = SwapSpace(stage, range(9), 1, slot_bytes=1000), LoadPolicy(prefill_s=1e-3, byte_s=1e-6)
    victim = Request("r", [1] * 12, PARAMS, TokenLimits(80))
    # Three blocks and a row, out and in: 8 ms, and 1 ms a token.
    victim.num_blocks, victim.num_computed_tokens = 3, num_tokens
    assert Swapping(allocations, space, PreemptionMode.AUTO, policy).begin(victim) is is_swapped
    assert (space.has(victim), space.counters.num_recomputed) == (is_swapped, not is_swapped)


def test_without_room_a_request_is_computed_again(tiny: Tiny) -> None:
    swap = {**SWAP, "swap_space": 5e-6}
    swapped = in_steps(tiny.load(**limits("duo"), **swap))
    assert tokens_of(serve(swapped, PROMPTS, PARAMS)) == expected_of(tiny, "duo")
    assert counters(swapped).num_recomputed > 0


def test_a_transfer_that_fails_computes_swapped_requests_again(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = tiny.load(**limits("duo"), **SWAP)
    link, number = swapped.engine.runner.executor.link, iter(range(10**6))
    load = link._load  # type: ignore[union-attr]

    def fail_once(batch: Any) -> Any:
        if next(number) == 1:
            raise MemoryError("no room")
        return load(batch)

    monkeypatch.setattr(link, "_load", fail_once)
    assert tokens_of(serve(swapped, PROMPTS, PARAMS)) == expected_of(tiny, "duo")
    assert counters(swapped).num_lost > 0


def test_a_swapped_request_that_is_damaged_on_the_host_is_computed_again(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other one is."""
    swapped = in_steps(tiny.load(**limits("codes"), **SWAP))
    link, bring, changed = swapped.engine.runner.executor.link, SwapSpace.bring, list[Request]()

    def change_and_bring(space: SwapSpace, request: Request) -> bool:
        if not changed:
            link._link.slots[space._swapped[request].blocks[0], 9] ^= 1  # type: ignore[union-attr]
            changed.append(request)
        return bring(space, request)

    monkeypatch.setattr(SwapSpace, "bring", change_and_bring)
    assert tokens_of(serve(swapped, PROMPTS, PARAMS)) == expected_of(tiny, "codes")
    found = counters(swapped)
    assert (found.num_damaged, found.num_lost, found.num_recomputed) == (1, 1, 0)
    assert found.num_in == found.num_out - 1 > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_space": None}, "expected swap_space with preemption_mode 'swap' or 'auto', and only then"),
        ({"preemption_mode": "recompute"}, "expected swap_space with preemption_mode"),
        ({"swap_space": 0}, "expected swap_space to be GiB above 0"),
        ({"swap_space": 1e-9}, "expected swap_space of one block or more"),
        ({"swap_space": 1e9}, "kv_offloading_size and swap_space together within the free memory"),
        ({"kv_offloading_size": None}, "preemption_mode='swap' needs kv_offloading_size"),
    ],
)
def test_what_cannot_be_swapped_is_one_sentence(tiny: Tiny, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.load(**{**limits("duo"), **SWAP, **options})
