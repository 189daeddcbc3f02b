"""The virtual token counter: its bound, its lifts, its weights and its corrections."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.scheduling import VirtualTokenCounter, make_policy
from tests.scheduling.fairness import Backlog
from tests.scheduling.serving import ALONE, ROOMY, Serving


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    max_num_seqs=st.integers(1, 6),
    most_prompt=st.integers(1, 30),
    most_output=st.integers(1, 12),
    extra=st.integers(0, 3),
)
def test_the_service_of_users_who_always_wait_differs_by_the_bound_in_every_window(
    seed: int, max_num_seqs: int, most_prompt: int, most_output: int, extra: int
) -> None:
    limits = replace(ROOMY, max_num_seqs=max_num_seqs)
    backlog = Backlog(
        Serving("vtc", limits), ["ann", "bob"], seed,
        most_prompt=most_prompt, most_output=most_output, depth=max_num_seqs + 1 + extra,
    ).run(120)  # fmt: skip
    most_running = max_num_seqs * (most_prompt + most_output)
    assert backlog.widest("ann", "bob") <= 2 * max(most_prompt, 2 * most_running)


def test_first_come_first_served_has_no_such_bound() -> None:
    """A user who sends ten times as much gets ten times as much, for as long as it lasts."""
    widest = {}
    for policy in ("fcfs", "vtc"):
        serving = Serving(policy)
        for number in range(330):
            serving.add(str(number), 4, prompt=4, user="bob" if number % 11 else "ann")
        had = {"ann": 0, "bob": 0}
        for _ in range(50):
            for name in serving.step():
                had["bob" if int(name) % 11 else "ann"] += 1
        widest[policy] = had["bob"] - had["ann"]
    assert widest["fcfs"] > 150
    assert widest["vtc"] < 20


def test_a_user_who_comes_back_has_saved_up_nothing() -> None:
    serving = Serving("vtc", ALONE)
    serving.add("early", 1, user="bob")
    for number in range(30):
        serving.add(f"ann{number}", 2, user="ann")
    for _ in range(21):
        serving.step()
    for number in range(10):
        serving.add(f"bob{number}", 2, user="bob")
    served = [serving.step()[0][:3] for _ in range(20)]
    assert served.count("ann") == served.count("bob") == 10


def test_a_user_who_comes_when_nobody_waits_is_lifted_to_what_the_last_one_who_left_has_paid_by_now() -> None:
    policy = VirtualTokenCounter()
    serving = Serving(policy)
    serving.add("a", 5, prompt=20, user="ann")
    serving.finish()
    assert policy.counter("ann") == 20 + 2 * 5
    serving.add("b", 1, user="bob")
    assert policy.counter("bob") == 20 + 2 * 5


def test_a_user_who_comes_after_a_long_request_of_the_only_other_one_takes_turns_with_it() -> None:
    serving = Serving("vtc", replace(ALONE, max_model_len=320))
    serving.add("long", 300, user="ann")
    serving.finish()
    for number in range(10):
        serving.add(f"bob{number}", 2, user="bob")
        serving.add(f"ann{number}", 2, user="ann")
    served = [serving.step()[0][:3] for _ in range(20)]
    assert served.count("ann") == served.count("bob") == 10


def test_whoever_comes_when_nobody_waits_is_lifted_by_the_last_one_who_left_not_by_the_greediest() -> None:
    policy = VirtualTokenCounter()
    serving = Serving(policy)
    serving.add("a", 50, prompt=20, user="ann")
    serving.step()
    serving.add("b", 1, prompt=3, user="bob")
    assert policy.counter("bob") == policy.counter("ann")
    serving.finish()
    serving.add("c", 1, user="cid")
    assert policy.counter("cid") == policy.counter("bob") < policy.counter("ann")


def test_service_follows_the_weights(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    file.write_text(json.dumps({"bob": 2, "cid": 3}))
    serving = Serving(f"vtc:weights={file}", ALONE)
    backlog = Backlog(serving, ["ann", "bob", "cid", "dan"], 1, most_prompt=4, most_output=4).run(1500)
    had = {user: each[-1] for user, each in backlog.service.items()}
    assert had["bob"] / had["ann"] == pytest.approx(2, rel=0.1)
    assert had["cid"] / had["ann"] == pytest.approx(3, rel=0.1)
    assert had["dan"] / had["ann"] == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("lengths", ["none", "stated", "recent"])
def test_what_is_paid_in_advance_is_corrected_in_the_end(lengths: str) -> None:
    policy = VirtualTokenCounter(lengths=lengths)
    serving = Serving(policy, ROOMY)
    for number, (num_tokens, expected) in enumerate([(6, 2), (6, 6), (9, 20), (3, 9), (1, 1)]):
        serving.add(str(number), num_tokens, prompt=7, user="ann", expected_tokens=expected)
    serving.finish()
    assert policy.counter("ann") == pytest.approx(5 * 7 + 2 * (6 + 6 + 9 + 3 + 1))


def test_known_lengths_are_paid_for_when_a_request_is_admitted() -> None:
    policy = VirtualTokenCounter(lengths="stated")
    serving = Serving(policy)
    serving.add("a", 10, prompt=7, user="ann")
    serving.step()
    assert policy.counter("ann") == 7 + 2 * 10


def test_a_request_that_ends_early_is_paid_for_as_far_as_it_came() -> None:
    policy = VirtualTokenCounter(lengths="stated")
    serving = Serving(policy, ALONE)
    serving.add("runs", 10, prompt=7, user="ann")
    serving.add("waits", 10, prompt=7, user="ann")
    serving.step()
    serving.step()
    serving.scheduler.abort("waits")
    serving.scheduler.abort("runs")
    assert policy.counter("ann") == 7 + 2 * 2


def test_with_known_lengths_users_stay_closer_together() -> None:
    """Long outputs are seen when they begin, and not when they have been had."""
    widest = {}
    for name in ("vtc", "vtc:lengths=stated"):
        backlog = Backlog(Serving(name), ["ann", "bob"], 3, most_prompt=2, most_output=40, depth=4).run(1200)
        gaps = [abs(a - b) for a, b in zip(backlog.service["ann"], backlog.service["bob"])]
        widest[name] = sum(gaps) / len(gaps)
    assert widest["vtc:lengths=stated"] < widest["vtc"]


def test_counters_of_users_who_are_gone_are_forgotten() -> None:
    policy = VirtualTokenCounter()
    serving = Serving(policy, ALONE)
    for number in range(5000):
        serving.add(str(number), 1, user=f"user{number}")
        serving.step()
    assert len(policy._counters) < 1500


def test_no_request_of_another_user_is_preempted_while_the_greediest_has_some() -> None:
    limits = replace(ROOMY, num_blocks=11, max_num_seqs=4)
    serving = Serving("vtc", limits)
    for name, user in (("a", "ann"), ("b", "bob"), ("c", "bob"), ("d", "bob")):
        serving.add(name, 20, prompt=6, user=user)
    preempted = []
    while serving.scheduler.has_unfinished:
        plan = serving.scheduler.plan()
        assert plan is not None
        preempted += [request.request_id for request in plan.preempted]
        serving.scheduler.commit(plan, [5] * plan.num_samples)
    assert preempted
    assert "a" not in preempted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_price": -1}, "expected input_price to be a number of 0 or more, got -1"),
        ({"output_price": float("inf")}, "expected output_price to be a number of 0 or more, got inf"),
        ({"lengths": "x"}, "expected lengths to be one of none, stated, recent, got 'x'"),
        ({"weights": "/nowhere.json"}, "cannot read weights of users from /nowhere.json"),
        ({"weights": {"ann": 0}}, "expected the weight of user 'ann' to be a number above 0, got 0"),
        ({"weights": {"ann": "2"}}, "expected the weight of user 'ann' to be a number above 0, got '2'"),
        ({"weights": [1]}, "expected weights to be a JSON object of users and numbers"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VirtualTokenCounter(**options)  # type: ignore[arg-type]


def test_options_are_taken_from_the_name() -> None:
    policy = make_policy("vtc:input_price=3,output_price=5")
    assert isinstance(policy, VirtualTokenCounter)
    serving = Serving(policy)
    serving.add("a", 2, prompt=4, user="ann")
    serving.finish()
    assert policy.counter("ann") == 3 * 4 + 5 * 2
