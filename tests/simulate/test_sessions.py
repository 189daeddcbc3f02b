"""Sessions as arrivals: who comes when, with which tokens, and that a turn waits for the one before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.lab.simulate.forecast import Forecast
from hpu_duo.lab.simulate.sessions import SessionArrivals
from hpu_duo.lab.traces import Arrival, Session, Turn
from hpu_duo.planning.simulation import SimulatedEngine, Simulation

LIMITS = StepLimits(
    max_num_seqs=3,
    max_num_batched_tokens=16,
    max_model_len=200,
    block_size=4,
    num_blocks=60,
    max_chunk_rows=1,
    decode_len=1,
    uses_rows=False,
    caches_prefixes=True,
)

session_strategy = st.builds(
    Session,
    st.builds(
        Arrival,
        time_s=st.integers(0, 40).map(float),
        num_prompt_tokens=st.integers(1, 30),
        num_output_tokens=st.integers(1, 10),
        block_ids=st.lists(st.integers(0, 1), max_size=2).map(tuple),
        block_size=st.integers(1, 9),
        user=st.sampled_from([None, "ann", "bob"]),
    ),
    st.lists(
        st.builds(Turn, st.integers(0, 9).map(float), st.integers(1, 15), st.integers(1, 8)), max_size=3
    ).map(tuple),
)


@given(sessions=st.lists(session_strategy, max_size=8))
@settings(max_examples=40, deadline=None)
def test_every_turn_comes_its_pause_after_the_end_of_the_one_before(sessions: list[Session]) -> None:
    arrivals = SessionArrivals(sessions, LIMITS.max_model_len)
    simulation = Simulation(SimulatedEngine(Scheduler(LIMITS), lambda bucket: 1.0), arrivals)
    ended, texts = {}, {}
    for step in simulation.steps():
        for done in step.committed:
            if done.finish_reason is not None:
                ended[done.request.request_id] = step.end
                texts[done.request.request_id] = done.request.tokens
    assert len(ended) == sum(session.num_requests for session in sessions)
    for number, session in enumerate(sessions):
        assert arrivals.came[f"s{number}.0"] == (session.first.time_s, session.first.user)
        assert len(texts[f"s{number}.0"]) == session.first.num_tokens
        for place, turn in enumerate(session.turns):
            before, name = f"s{number}.{place}", f"s{number}.{place + 1}"
            assert arrivals.came[name] == (ended[before] + turn.pause_s, session.first.user)
            said = len(texts[before])
            assert np.array_equal(texts[name][:said], texts[before])
            assert len(texts[name]) == said + turn.num_new_tokens + turn.num_output_tokens


def test_prompts_share_what_their_blocks_say_and_are_of_their_user() -> None:
    shared = {"block_ids": (7,), "block_size": 10}
    sessions = [
        Session(Arrival(0.0, 16, 2, user="ann", **shared)),  # type: ignore[arg-type]
        Session(Arrival(0.0, 16, 3, **shared)),  # type: ignore[arg-type]
    ]
    one, other = SessionArrivals(sessions, 100).due(0.0)
    assert np.array_equal(one.prompt_token_ids[:10], other.prompt_token_ids[:10])
    assert not np.array_equal(one.prompt_token_ids[10:], other.prompt_token_ids[10:])
    assert (one.params.user, other.params.user) == ("ann", None)
    assert (one.params.expected_tokens, other.params.expected_tokens) == (2, 3)


def test_other_seeds_give_other_tokens_and_errors_of_lengths_have_their_spread() -> None:
    sessions = [Session(Arrival(0.0, 8, 1000)) for _ in range(400)]
    first = SessionArrivals(sessions, 2000, forecast=Forecast(0.5)).due(0.0)
    again = SessionArrivals(sessions, 2000, forecast=Forecast(0.5)).due(0.0)
    other = SessionArrivals(sessions, 2000, seed=1, forecast=Forecast(0.5)).due(0.0)
    assert [each.params for each in first] == [each.params for each in again]
    assert [each.tokens.tolist() for each in first] == [each.tokens.tolist() for each in again]
    assert [each.params for each in first] != [each.params for each in other]
    assert all(
        not np.array_equal(one.prompt_token_ids, two.prompt_token_ids) for one, two in zip(first, other)
    )
    errors = np.log([each.params.expected_tokens / 1000 for each in first])
    assert errors.std() == pytest.approx(0.5, rel=0.15)
    assert abs(errors.mean()) < 0.1
    with pytest.raises(ValueError, match="expected a length error of at least 0, got -1"):
        Forecast(length_error=-1)
