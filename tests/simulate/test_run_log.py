"""Notes of a run: times of requests, service of users, padding."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import BatchShape, BucketTable, StepCost, StepLimits
from hpu_duo.lab.simulate.report import METRICS, RunReport
from hpu_duo.lab.simulate.run_log import NOBODY
from hpu_duo.lab.simulate.server import SimulatedServer
from hpu_duo.lab.traces import Arrival, Session, Turn
from hpu_duo.scheduling import POLICIES
from tests.simulate.test_sessions import LIMITS, session_strategy

COST = StepCost(block_size=4)


def seconds_of(bucket: BatchShape) -> float:
    return 1.0 + 0.25 * bucket.query_len


def server(**limits: int) -> SimulatedServer:
    fields = {**vars(LIMITS), "caches_prefixes": False, **limits}
    return SimulatedServer(StepLimits(**fields), seconds_of, COST)


@pytest.mark.parametrize("caches", [False, True])
@given(sessions=st.lists(session_strategy, min_size=1, max_size=8), num_blocks=st.sampled_from([22, 60]))
@settings(max_examples=12, deadline=None)
def test_requests_are_noted_once_and_service_is_what_they_asked_for(
    caches: bool, sessions: list[Session], num_blocks: int
) -> None:
    kept = [one for each in sessions if (one := each.no_longer_than(85)) is not None]
    served = server(num_blocks=num_blocks)
    log = (served.caching_prefixes(None) if caches else served).run("fcfs", kept)
    report = RunReport.of("fcfs", log)
    assert report.num_completed == report.num_requests == sum(each.num_requests for each in kept)
    service: Counter[str] = Counter()
    for record in log.records.values():
        assert record.started is not None
        assert record.first_token is not None
        assert record.ended is not None
        assert record.arrived <= record.started < record.first_token <= record.ended
        assert 0 <= record.num_cached_tokens < record.num_prompt_tokens + 1
        service[record.user] += 2 * record.num_output_tokens + record.num_prompt_tokens
        if caches and not record.num_preemptions:
            service[record.user] -= record.num_cached_tokens
    if not caches or not report.num_preemptions:
        assert report.fairness.service == service
    assert report.hit_rate == 0 or caches
    assert log.service.times == sorted(log.service.times)
    assert report.busy_share <= 1 + 1e-9
    assert set(report.metrics) == set(METRICS)


def lone(time_s: float, num_prompt: int, num_output: int, user: str | None = None) -> Session:
    return Session(Arrival(time_s, num_prompt, num_output, user=user))


def test_times_are_those_of_the_steps() -> None:
    # Alone: a step of 8 tokens takes 3 s, and each decode 1.25 s.
    log = server().run("fcfs", [lone(0.0, 8, 3), lone(10.0, 4, 1, "ann")])
    first, second = log.records["s0.0"], log.records["s1.0"]
    assert (first.arrived, first.started, first.first_token, first.ended) == (0.0, 0.0, 3.0, 5.5)
    assert (first.ttft, first.tpot, first.e2el, first.latency_per_token) == (3.0, 1.25, 5.5, 5.5 / 3)
    assert (second.arrived, second.first_token, second.ended) == (10.0, 12.0, 12.0)
    assert second.tpot is None
    assert (first.user, second.user) == (NOBODY, "ann")
    report = RunReport.of("fcfs", log)
    assert report.fairness.service == {NOBODY: 8 + 2 * 3, "ann": 4 + 2 * 1}
    assert report.duration_s == 12.0
    assert report.busy_share == pytest.approx(7.5 / 12)
    assert report.requests_per_s == pytest.approx(2 / 12)
    assert report.output_tokens_per_s == pytest.approx(4 / 12)
    assert report.as_json()["mean_e2el_ms"] == pytest.approx(1000 * (5.5 + 2.0) / 2)


def test_requests_that_are_not_served_in_time_are_noted_as_waiting() -> None:
    log = server(max_num_seqs=1).run("fcfs", [lone(0.0, 8, 9), lone(1.0, 4, 1)], until_s=4.0)
    report = RunReport.of("fcfs", log)
    assert (report.num_requests, report.num_completed) == (2, 0)
    assert log.records["s1.0"].started is None
    assert report.duration_s == 4.25
    assert report.longest_wait_s == 3.25
    assert report.metrics["ttft"].num == 0


def test_padding_is_that_of_the_buckets() -> None:
    table = BucketTable.from_strings(["csu/q16/s64/u64/l4"], COST)
    log = server().with_table(table).run("fcfs", [lone(0.0, 8, 2)])
    report = RunReport.of("fcfs", log)
    # Steps of 8 tokens and of 1, in two of 16.
    assert report.token_padding == pytest.approx(1 - 9 / 32)
    assert log.cost_of_buckets == 2 * COST(table.buckets[0])
    assert report.padding == pytest.approx(1 - log.cost_of_shapes / log.cost_of_buckets)
    with pytest.raises(ValueError, match="expected buckets for every step"):
        server().with_table(BucketTable.from_strings(["csu/q4/s4/u4/l1"], COST))


def test_sessions_hit_what_they_have_said_before() -> None:
    strangers = server().caching_prefixes(None).run("fcfs", [lone(0.0, 20, 5), lone(0.0, 9, 1)])
    assert RunReport.of("fcfs", strangers).hit_rate == 0
    chat = [Session(Arrival(0.0, 20, 5), (Turn(1.0, 4, 2),))]
    log = server().caching_prefixes(None).run("fcfs", chat)
    # 24 of the 25 tokens of the first turn are computed, which is 6 whole blocks.
    assert log.records["s0.1"].num_cached_tokens == 24
    assert RunReport.of("fcfs", log).hit_rate == pytest.approx(24 / (20 + 29))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everybody_to_the_end(policy: str) -> None:
    sessions = [lone(float(at // 4), 3 + 5 * at % 17, 1 + at % 7, f"user {at % 3}") for at in range(30)]
    log = server(num_blocks=22).caching_prefixes(None).run(policy, sessions)
    assert RunReport.of(policy, log).num_completed == 30
