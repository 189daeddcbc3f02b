"""Deficit longest prefix match: its bound, its limits, and what it charges for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.scheduling import DeficitLongestPrefixMatch, make_policy
from tests.scheduling.fairness import Backlog
from tests.scheduling.serving import CACHING, Serving
from tests.scheduling.test_cache_aware import ONE_BY_ONE, TEXTS, serving_of


def shared_prompt(user: str, length: int) -> list[int]:
    """Bob's prompts begin alike; Ann's all begin with their length."""
    return [1] * 12 + [2 + length % 9] * length if user == "bob" else [2 + length % 9] * length


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    quantum=st.sampled_from([0.5, 3.0, 20.0, 100.0]),
    max_num_seqs=st.integers(1, 5),
    most_prompt=st.integers(1, 20),
    most_output=st.integers(1, 10),
)
def test_the_service_of_users_who_always_wait_differs_by_the_bound_in_every_window(
    seed: int, quantum: float, max_num_seqs: int, most_prompt: int, most_output: int
) -> None:
    policy = DeficitLongestPrefixMatch(quantum)
    serving = Serving(policy, replace(CACHING, max_num_seqs=max_num_seqs))
    backlog = Backlog(
        serving, ["ann", "bob"], seed,
        most_prompt=most_prompt, most_output=most_output, prompt_of=shared_prompt,
        depth=max_num_seqs + 1,
    ).run(120)  # fmt: skip
    longest = 12 + most_prompt
    assert backlog.widest("ann", "bob") <= 2 * (quantum + longest + 2 * max_num_seqs * most_output)
    assert max(policy.credit("ann"), policy.credit("bob")) <= quantum


@settings(max_examples=30, deadline=None)
@given(known=TEXTS, texts=TEXTS, users=st.lists(st.sampled_from("abc"), min_size=10, max_size=10))
def test_an_infinite_quantum_is_longest_prefix_match(
    known: list[list[int]], texts: list[list[int]], users: list[str]
) -> None:
    orders = []
    for policy in ("lpm:patience=inf", "dlpm:quantum=inf,patience=inf"):
        serving = serving_of(policy, known)
        for number, (text, user) in enumerate(zip(texts, users)):
            serving.add(str(number), 3, prompt=[*text, 9], user=user)
        orders.append(serving.finish().admissions)
    assert orders[0] == orders[1]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_among_the_requests_of_one_user_the_order_is_that_of_lpm(seed: int) -> None:
    orders = []
    for policy in ("lpm:patience=inf", "dlpm:quantum=2,patience=inf"):
        serving = serving_of(policy, [[1] * 12, [1] * 4 + [2] * 8])
        for number in range(8):
            serving.add(str(number), 2, prompt=[1] * (1 + seed * (number + 1) % 13) + [2] * 5, user="ann")
        orders.append(serving.finish().admissions)
    assert orders[0] == orders[1]


def test_cached_tokens_are_not_paid_for() -> None:
    policy = DeficitLongestPrefixMatch(quantum=1000)
    serving = Serving(policy, CACHING)
    serving.add("first", 1, prompt=[1] * 8 + [9], user="ann")
    keeps = serving.add("keeps ann's account", 30, prompt=[7], user="ann")
    while keeps.num_output_tokens < 3:
        serving.step()
    before, outputs = policy.credit("ann"), keeps.num_output_tokens
    serving.add("again", 1, prompt=[1] * 8 + [8], user="ann")
    serving.step()
    paid = before - policy.credit("ann") - 2 * (keeps.num_output_tokens - outputs)
    assert paid == 1 + 2 * 1  # one token behind two blocks, and one of the output


def test_a_user_who_floods_with_a_shared_prefix_does_not_starve_another() -> None:
    served = {}
    for policy in ("lpm:patience=inf", "dlpm:quantum=20"):
        serving = serving_of(policy, [[1] * 8])
        for number in range(60):
            serving.add(f"flood{number}", 1, prompt=[1] * 8 + [9], user="bob")
        serving.add("cold", 1, prompt=[7] * 9, user="ann")
        serving.finish()
        served[policy] = serving.admissions.index("cold")
    assert served["lpm:patience=inf"] == 60
    assert served["dlpm:quantum=20"] < 15


def test_every_user_is_looked_at_however_many_requests_another_has() -> None:
    serving = Serving("dlpm:quantum=5,window=2", ONE_BY_ONE)
    for number in range(30):
        serving.add(f"bob{number}", 1, prompt=4, user="bob")
    for number in range(10):
        serving.add(f"ann{number}", 1, prompt=4, user="ann")
    first = [serving.step()[0][:3] for _ in range(16)]
    assert abs(first.count("ann") - first.count("bob")) <= 2


def test_the_earliest_request_of_a_user_is_overtaken_as_often_as_patience_has_it() -> None:
    serving = serving_of("dlpm:patience=3,quantum=1000", [[1] * 8])
    serving.add("cold", 1, prompt=[7] * 9, user="ann")
    for number in range(20):
        serving.add(f"hot{number}", 1, prompt=[1] * 8 + [9], user="ann")
        serving.step()
    assert serving.admissions.index("cold") == 3


def test_a_user_who_left_keeps_no_credit_and_pays_debts_with_the_quanta_of_others() -> None:
    policy = DeficitLongestPrefixMatch(quantum=10)
    serving = Serving(policy, replace(ONE_BY_ONE, caches_prefixes=False))
    serving.add("long", 20, user="ann")
    serving.finish()
    debt = policy.credit("ann")
    assert debt == 10 - 1 - 2 * 20
    for number in range(20):
        serving.add(f"bob{number}", 1, prompt=4, user="bob")
    serving.finish()
    assert policy.credit("ann") == 0
    serving.add("short", 1, user="cid")
    serving.finish()
    assert policy.credit("cid") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("quantum=0", "expected quantum to be above 0, got 0"),
        ("quantum=nan", "expected quantum to be above 0, got nan"),
        ("window=0", "expected window to be 1 or more"),
        ("input_price=-1", "expected input_price to be a number of 0 or more, got -1"),
    ],
)
def test_wrong_options_are_refused(options: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(f"dlpm:{options}")
