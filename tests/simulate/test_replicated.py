"""Replicas on one clock: nothing is lost with a replica, and one behind a router is the engine alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import StepCost
from hpu_duo.fleet.routing import D2LPM, make_router
from hpu_duo.lab.simulate.fleet import Fleet
from hpu_duo.lab.simulate.replicated import Loss, ReplicatedSimulation
from hpu_duo.lab.simulate.report import RunReport
from hpu_duo.lab.simulate.server import SimulatedServer
from hpu_duo.lab.simulate.sessions import SessionArrivals
from hpu_duo.lab.traces import Session, make_workload
from hpu_duo.planning.simulation import Simulation
from hpu_duo.scheduling import DeficitLongestPrefixMatch
from tests.routing.texts import ROUTERS
from tests.simulate.test_run_log import seconds_of
from tests.simulate.test_sessions import LIMITS, session_strategy

SESSIONS = st.lists(session_strategy, min_size=1, max_size=8)
SERVER = SimulatedServer(
    replace(LIMITS, caches_prefixes=True, uses_rows=False, num_blocks=60), seconds_of, StepCost(block_size=4)
)


def kept(sessions: list[Session]) -> list[Session]:
    return [one for each in sessions if (one := each.no_longer_than(85)) is not None]


@settings(max_examples=25, deadline=None)
@given(sessions=SESSIONS, router=ROUTERS, policy=st.sampled_from(["fcfs", "dlpm:quantum=9", "lpm"]))
def test_one_replica_is_the_engine_alone(sessions: list[Session], router: str, policy: str) -> None:
    log, _ = Fleet(1, router).run(SERVER, policy, kept(sessions))
    alone = SERVER.run(policy, kept(sessions))
    assert log.records == alone.records
    assert log.service == alone.service
    assert (log.num_steps, log.busy, log.end) == (alone.num_steps, alone.busy, alone.end)


@settings(max_examples=40, deadline=None)
@given(
    sessions=SESSIONS,
    router=ROUTERS,
    num=st.integers(1, 3),
    losses=st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 60), st.sampled_from([0.0, 3.0, 40.0])), max_size=6
    ),
    tells=st.booleans(),
)
def test_every_request_ends_once_with_all_of_its_tokens_whatever_is_lost(
    sessions: list[Session],
    router: str,
    num: int,
    losses: list[tuple[int, float, float]],
    tells: bool,
) -> None:
    told = tuple(Loss(*each) for each in losses if each[0] < num)
    served = kept(sessions)
    log, figures = Fleet(num, router, told, tells).run(SERVER, "fcfs", served)
    asked = Counter(
        tokens
        for each in served
        for tokens in [each.first.num_output_tokens, *(turn.num_output_tokens for turn in each.turns)]
    )
    assert Counter(each.num_output_tokens for each in log.records.values()) == asked
    assert all(each.ended is not None for each in log.records.values())
    assert sum(each.num_losses for each in log.records.values()) == figures.num_lost
    assert 0 <= figures.expected_hit_rate <= 1


class CountingD2LPM(D2LPM):
    """Sums what users have paid."""

    def __init__(self) -> None:
        super().__init__(quantum=9)
        self.paid: Counter[str | None] = Counter()

    def _pay(self, sent, cost):  # type: ignore[no-untyped-def]
        self.paid[sent.request.user] += cost
        super()._pay(sent, cost)


class CountingDLPM(DeficitLongestPrefixMatch):
    """Sums what users have paid."""

    def __init__(self) -> None:
        super().__init__(quantum=9)
        self.paid: Counter[str | None] = Counter()

    def _pay(self, user, cost):  # type: ignore[no-untyped-def]
        self.paid[user] += cost
        super()._pay(user, cost)


@settings(max_examples=25, deadline=None)
@given(sessions=SESSIONS, num=st.integers(1, 3))
def test_users_pay_to_d2lpm_what_they_pay_to_dlpm_in_all_replicas(sessions: list[Session], num: int) -> None:
    policies: list[CountingDLPM] = []

    def engine():  # type: ignore[no-untyped-def]
        made = SERVER.engine("fcfs")
        policies.append(CountingDLPM())
        made.scheduler = type(made.scheduler)(SERVER.limits, policy=policies[-1])
        return made

    router = CountingD2LPM()
    arrivals = SessionArrivals(kept(sessions), SERVER.limits.max_model_len)
    for _ in ReplicatedSimulation(engine, num, router, arrivals).steps():
        pass
    local: Counter[str | None] = Counter()
    for policy in policies:
        local.update(policy.paid)
    assert +router.paid == +local
    if num == 1:
        alone = CountingDLPM()
        again = SERVER.engine("fcfs")
        again.scheduler = type(again.scheduler)(SERVER.limits, policy=alone)
        arrivals = SessionArrivals(kept(sessions), SERVER.limits.max_model_len)
        for _ in Simulation(again, arrivals).steps():
            pass
        assert +alone.paid == +router.paid


@pytest.mark.parametrize("router", ["e2", "d2lpm", "cache-aware"])
def test_stale_beliefs_cost_only_time(router: str) -> None:
    documents = make_workload("documents:per_s=0.05,num_documents=6,documents=40,questions=6,outputs=4")
    small = replace(SERVER, limits=replace(SERVER.limits, num_blocks=26))
    reports = {}
    for tells in (True, False):
        name = f"{router}:min_cached=4" + (f",capacity={26 * 4}" if tells else "")
        log, figures = Fleet(2, name, tells_hits=tells).run(small, "fcfs", documents.sessions(80))
        reports[tells] = RunReport.of("fcfs", log, replicas=figures)
        assert reports[tells].num_completed == 80
        assert reports[tells].hit_rate <= figures.expected_hit_rate
    gaps = [each.replicas.expected_hit_rate - each.hit_rate for each in reports.values() if each.replicas]
    assert gaps[0] < gaps[1]


def test_a_router_that_knows_prefixes_hits_more_than_one_that_does_not() -> None:
    documents = make_workload("documents:per_s=0.02,num_documents=8,documents=40,questions=6,outputs=4")
    rates = {}
    for router in ("round-robin", "e2", "cache-aware", "d2lpm"):
        name = router if router == "round-robin" else f"{router}:min_cached=4"
        log, figures = Fleet(4, name).run(SERVER, "fcfs", documents.sessions(120))
        rates[router] = RunReport.of("fcfs", log, replicas=figures).hit_rate
    assert rates["round-robin"] < min(rates["e2"], rates["cache-aware"], rates["d2lpm"])


@pytest.mark.parametrize("text", ["1", "a@3", "1@", "-1@3", "1@-3"])
def test_losses_are_read_from_numbers_and_times(text: str) -> None:
    assert Loss.parse("1@2.5", 3.0) == Loss(1, 2.5, 3.0)
    with pytest.raises(ValueError, match="expected a"):
        Loss.parse(text, 3.0)


def test_replicas_that_there_are_not_are_refused() -> None:
    arrivals = SessionArrivals([], 85)
    with pytest.raises(ValueError, match="1 replica or more, got 0"):
        ReplicatedSimulation(lambda: SERVER.engine("fcfs"), 0, make_router("e2"), arrivals)
    with pytest.raises(ValueError, match="below 2 to be lost, got 2"):
        ReplicatedSimulation(
            lambda: SERVER.engine("fcfs"), 2, make_router("e2"), arrivals, [Loss(2, 0.0, 1.0)]
        )
