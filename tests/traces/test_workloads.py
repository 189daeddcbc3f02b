"""Generators of requests: as many as asked for, in order, the same for a seed, and as their fields say."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.lab.traces import (
    WORKLOADS,
    Arrival,
    Lengths,
    Session,
    Turn,
    count_requests,
    make_workload,
    read_trace,
)
from hpu_duo.lab.traces.readers.mooncake import write_mooncake
from hpu_duo.lab.traces.workloads import Agents, Bursts, Chats, Documents, Flood, Poisson

NUM = 4000


@pytest.mark.parametrize("name", WORKLOADS)
@given(num=st.integers(1, 150), seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_every_generator_draws_as_many_requests_as_asked_for_in_order(name: str, num: int, seed: int) -> None:
    workload = make_workload(name, seed)
    sessions = workload.sessions(num)
    assert count_requests(sessions) == num
    times = [session.first.time_s for session in sessions]
    assert times == sorted(times)
    assert all(prefix_of(session.first) <= session.first.num_prompt_tokens for session in sessions)
    assert workload.sessions(num) == sessions


def prefix_of(arrival: Arrival) -> int:
    """Tokens of the blocks that a prompt names."""
    return len(arrival.block_ids) * arrival.block_size


@pytest.mark.parametrize("name", WORKLOADS)
def test_another_seed_gives_other_requests_and_defaults_make_a_generator(name: str) -> None:
    kind = WORKLOADS[name]
    assert kind().sessions(30) == make_workload(name).sessions(30)
    assert make_workload(f"{name}:seed=1").sessions(30) != kind().sessions(30)
    assert {"seed", "per_s"} <= {field.name for field in fields(kind)}  # type: ignore[arg-type]


@pytest.mark.parametrize("workload", [Poisson(per_s=5.0), Bursts(per_s=5.0), Documents(per_s=5.0)])
def test_lone_requests_come_at_their_rate(workload: Poisson | Bursts | Documents) -> None:
    times = [session.first.time_s for session in workload.sessions(NUM)]
    # The mean gap of NUM requests; a crowd of 20 has the variance of as many.
    assert times[-1] / NUM * 5 == pytest.approx(1, abs=0.3 if isinstance(workload, Bursts) else 0.1)


def test_bursts_come_together() -> None:
    times = [session.first.time_s for session in Bursts(per_s=1.0, size=20, spread_s=0.5).sessions(NUM)]
    near = sum(later - earlier < 0.5 for earlier, later in pairwise(times)) / NUM
    alone = [session.first.time_s for session in Poisson(per_s=1.0).sessions(NUM)]
    assert near > 0.9
    assert sum(later - earlier < 0.5 for earlier, later in pairwise(alone)) / NUM < 0.5


def test_chats_and_agents_have_as_many_turns_as_they_should_and_begin_alike() -> None:
    chats = Chats(turns=5.0, system_len=300).sessions(NUM)
    assert NUM / len(chats) == pytest.approx(5, rel=0.15)
    assert {(chat.first.block_ids, chat.first.block_size) for chat in chats} == {((0,), 300)}
    pauses = [turn.pause_s for chat in chats for turn in chat.turns]
    assert np.mean(pauses) == pytest.approx(20, rel=0.15)
    tasks = Agents(steps=12.0, num_kinds=3).sessions(NUM)
    assert NUM / len(tasks) == pytest.approx(12, rel=0.2)
    assert {task.first.block_ids for task in tasks} == {(0,), (1,), (2,)}
    assert {task.first.user for task in tasks} == {"agent 0", "agent 1", "agent 2"}


def test_popular_documents_are_asked_more_often_and_keep_their_length() -> None:
    asked = [session.first for session in Documents(num_documents=10, skew=1.0).sessions(NUM)]
    counts = Counter(each.block_ids[0] for each in asked)
    # Of 10 documents with shares 1, 1/2, ... the first has 34 % and the last 3.4 %.
    assert counts[0] / NUM == pytest.approx(0.341, abs=0.03)
    assert counts[9] / NUM == pytest.approx(0.034, abs=0.015)
    assert len({(each.block_ids, each.block_size) for each in asked}) == 10


def test_the_flooder_sends_as_much_more_as_its_rate_says_once_it_begins() -> None:
    flood = Flood(num_users=3, per_s=1.0, flood_per_s=10.0, flood_from_s=20.0, flood_prefix_len=64)
    sent = [session.first for session in flood.sessions(NUM)]
    counts = Counter(each.user for each in sent if each.time_s >= 20)
    others = [counts[f"user {number}"] for number in range(3)]
    assert counts["flooder"] / np.mean(others) == pytest.approx(10, rel=0.15)
    assert min(each.time_s for each in sent if each.user == "flooder") >= 20
    assert {prefix_of(each) for each in sent if each.user == "flooder"} == {64}
    assert {prefix_of(each) for each in sent if each.user != "flooder"} == {0}


def test_lengths_have_their_median_and_spread() -> None:
    drawn = Lengths(200, 0.7).draw(20_000, np.random.default_rng(0))
    assert np.median(drawn) == pytest.approx(200, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.7, rel=0.03)
    assert Lengths(7).draw(3, np.random.default_rng(0)) == [7, 7, 7]
    assert min(Lengths(1, 3.0).draw(1000, np.random.default_rng(0))) == 1
    assert Lengths.parse("512~0.8") == Lengths(512, 0.8)
    assert Lengths.parse("64") == Lengths(64)


turns_strategy = st.lists(
    st.builds(Turn, st.floats(0, 10), st.integers(1, 40), st.integers(1, 40)), max_size=5
).map(tuple)


@given(prompt=st.integers(1, 60), output=st.integers(1, 40), turns=turns_strategy, most=st.integers(1, 200))
def test_a_session_is_cut_where_its_text_becomes_too_long(
    prompt: int, output: int, turns: tuple[Turn, ...], most: int
) -> None:
    kept = Session(Arrival(0.0, prompt, output), turns).no_longer_than(most)
    lengths = np.cumsum([prompt + output, *(turn.num_new_tokens + turn.num_output_tokens for turn in turns)])
    fitting = int((lengths <= most).sum())
    if kept is None:
        assert fitting == 0
    else:
        assert kept.turns == turns[: fitting - 1]


def test_users_of_a_trace_survive_a_file(tmp_path: Path) -> None:
    arrivals = [Arrival(0.0, 5, 2, user="ann"), Arrival(1.0, 6, 2)]
    path = tmp_path / "trace.jsonl"
    write_mooncake(path, arrivals)
    assert [each.user for each in read_trace(path).arrivals] == ["ann", None]


def test_settings_of_a_command_line_replace_fields() -> None:
    made = make_workload("poisson:per_s=2.5,outputs=30~0.5,num_users=4", seed=9)
    assert made == replace(Poisson(), per_s=2.5, outputs=Lengths(30, 0.5), num_users=4, seed=9)


@pytest.mark.parametrize(
    "text", ["speed=3", "per_s", "per_s=fast", "num_users=1.5", "outputs=5~x", "outputs=0"]
)
def test_settings_that_no_generator_has_are_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        make_workload(f"poisson:{text}")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Poisson(per_s=0.0),
        lambda: Poisson(num_users=0),
        lambda: Poisson(seed=-1),
        lambda: Bursts(size=0.5),
        lambda: Bursts(spread_s=-1.0),
        lambda: Chats(turns=0.0),
        lambda: Chats(pause_s=-1.0),
        lambda: Agents(instructions_len=0),
        lambda: Documents(num_documents=0),
        lambda: Flood(flood_per_s=0.0),
        lambda: Lengths(0),
        lambda: Lengths(5, -0.1),
        lambda: Turn(-1.0, 1, 1),
        lambda: Turn(0.0, 0, 1),
        lambda: Turn(0.0, 1, 0),
    ],
)
def test_fields_out_of_range_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="expected"):
        make()
