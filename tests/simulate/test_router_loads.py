"""Routers before eight replicas, against the shortest queue: nothing piles up for a prefix of no worth."""

from __future__ import annotations

from collections import Counter
from functools import cache
from statistics import fmean

import pytest

from graphs import BatchShape, StepCost, StepLimits
from hpu_duo.fleet.routing import Dispatch, make_router
from hpu_duo.lab.simulate.replicated import ReplicatedSimulation
from hpu_duo.lab.simulate.run_log import RunLog
from hpu_duo.lab.simulate.server import SimulatedServer
from hpu_duo.lab.simulate.sessions import SessionArrivals
from hpu_duo.lab.traces import make_workload
from tests.tiers import crossed

NUM_REPLICAS, NUM_REQUESTS = 8, 240
LIMITS = StepLimits(
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    max_model_len=32768,
    block_size=128,
    num_blocks=4096,
    max_chunk_rows=8,
    decode_len=1,
    uses_rows=False,
    caches_prefixes=True,
)
SHORT = "prefix_len=90,prompts=20~0.2"
OF_NO_WORTH = {
    "a short system message": f"per_s=2,{SHORT}",
    "many with a short system message": f"per_s=8,{SHORT}",
    "disjoint prompts": "per_s=2,prompts=400~0.5",
    "64 shared tokens": "per_s=8,prompts=40~0.4,prefix_len=64,num_prefixes=16",
}
OF_WORTH = {
    "one long document": "per_s=8,prompts=60~0.4,prefix_len=16384",
    "256 shared tokens": "per_s=8,prompts=200~0.4,prefix_len=256,num_prefixes=16",
    "2,048 shared tokens": "per_s=8,prompts=200~0.4,prefix_len=2048,num_prefixes=16",
    "16,384 shared tokens": "per_s=8,prompts=200~0.4,prefix_len=16384,num_prefixes=16",
}


def seconds_of(shape: BatchShape) -> float:
    """A step takes 15 ms, and 0.1 ms more for each token."""
    return 0.015 + 1e-4 * shape.query_len + 1e-5 * (shape.num_shared_blocks + shape.num_unique_blocks)


SERVER = SimulatedServer(LIMITS, seconds_of, StepCost())


@cache
def served(name: str, load: str, num_requests: int = NUM_REQUESTS) -> tuple[float, float, float]:
    """The most requests of a replica over its even share; mean seconds to the first token and to the end."""
    router, sent_to = make_router(name), Counter[str]()
    begins = router._begins

    def count(sent: Dispatch) -> None:
        sent_to[sent.replica] += 1
        begins(sent)

    router._begins = count  # type: ignore[method-assign]
    sessions = make_workload(f"poisson:outputs=20~0.4,{load}").sessions(num_requests)
    arrivals = SessionArrivals(sessions, LIMITS.max_model_len)
    log = RunLog(arrivals.came, SERVER.cost)
    for step in ReplicatedSimulation(lambda: SERVER.engine("fcfs"), NUM_REPLICAS, router, arrivals).steps():
        log.take(step)
    records = log.records.values()
    return (
        max(sent_to.values()) * NUM_REPLICAS / num_requests,
        fmean(each.ttft for each in records if each.ttft is not None),
        fmean(each.e2el for each in records if each.e2el is not None),
    )


@pytest.mark.parametrize(
    ("load", "router"), crossed(OF_NO_WORTH, ["e2", "cache-aware", "d2lpm"], fast=list(OF_NO_WORTH)[:3])
)
def test_requests_do_not_pile_up_for_what_saves_nothing(load: str, router: str) -> None:
    share, first_s, end_s = served(router, load)
    _, least_first_s, least_end_s = served("least-loaded", load)
    assert share <= 1.5
    assert first_s <= 1.1 * least_first_s
    assert end_s <= 1.1 * least_end_s


@pytest.mark.parametrize("load", crossed(OF_WORTH, fast=("2,048 shared tokens",)))
def test_e2_makes_nobody_wait_for_what_is_cached(load: str) -> None:
    _, first_s, end_s = served("e2", load)
    _, least_first_s, least_end_s = served("least-loaded", load)
    assert first_s <= 1.1 * least_first_s
    assert end_s <= 1.1 * least_end_s


def test_cache_aware_lets_no_replica_idle_for_one_long_document() -> None:
    _, first_s, _ = served("cache-aware", OF_WORTH["one long document"])
    _, least_first_s, _ = served("least-loaded", OF_WORTH["one long document"])
    assert first_s <= 1.1 * least_first_s


@pytest.mark.slow
@pytest.mark.exhaustive
def test_cache_aware_lets_nobody_wait_longer_for_the_end_of_a_long_load() -> None:
    _, _, end_s = served("cache-aware", OF_WORTH["one long document"], 720)
    _, _, least_end_s = served("least-loaded", OF_WORTH["one long document"], 720)
    assert end_s <= 1.1 * least_end_s
