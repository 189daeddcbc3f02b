"""The open loop: nobody waits for anybody, unless asked to, and an interrupted run keeps what it has."""

import asyncio
import gc
import json
import signal
from collections.abc import Callable

import numpy as np
import pytest

from hpu_duo.garbage import leave_out_what_is_there, unfreeze
from hpu_duo.lab.load import Endpoint, Failure, LoadRun, Outcome, Pace, plan_requests
from hpu_duo.lab.load.client import Client, ServerError
from hpu_duo.lab.load.measure import Measurement
from hpu_duo.lab.traces import Arrival, PromptIds, RandomLengths, Rate
from tests.load.stub_server import DONE, Answer, StubServer, token, usage

Serve = Callable[[Callable[[dict], Answer]], StubServer]
IDS = PromptIds(range(50))


def burst(num: int) -> list[Arrival]:
    return [Arrival(0.0, at + 1, 2) for at in range(num)]


def measure(
    address: str,
    arrivals: list[Arrival],
    *,
    on_end: Callable[[Outcome], None] | None = None,
    model: str | None = None,
    num_warmups: int = 0,
    pace: Pace | None = None,
) -> LoadRun:
    measurement = Measurement(
        Endpoint.COMPLETIONS, arrivals, IDS, model, pace=pace or Pace(), num_warmups=num_warmups
    )
    return asyncio.run(measurement.run(Client(address), on_end))[1]


def one_token(body: dict) -> Answer:
    return Answer([token("a", "length"), usage(len(body["prompt"]), 1), DONE])


def test_nobody_waits_for_the_end_of_another_request(serve: Serve) -> None:
    # Nobody is answered before all are there: a client that waited would wait for ever.
    all_there = asyncio.Event()
    num = 40

    def answer(body: dict) -> Answer:
        if len(server.bodies) == num:
            all_there.set()
        return Answer([all_there, token("a", "length"), DONE])

    server = serve(answer)
    run = measure(server.address, burst(num))
    assert all(outcome.is_whole for outcome in run.outcomes)
    assert server.most_at_once == num


def test_no_request_is_sent_before_its_time_and_all_in_order(serve: Serve) -> None:
    server = serve(one_token)
    arrivals = RandomLengths(10, 2, 0.9).draw(30, Rate(150.0, 0.5), np.random.default_rng(0))
    run = measure(server.address, arrivals)
    assert all(outcome.sent_s >= outcome.planned_s for outcome in run.outcomes)
    assert [outcome.planned_s for outcome in run.outcomes] == [each.time_s for each in arrivals]
    sent = [outcome.sent_s for outcome in run.outcomes]
    assert sent == sorted(sent)
    assert [outcome.num_prompt_tokens for outcome in run.outcomes] == [
        each.num_prompt_tokens for each in arrivals
    ]
    assert run.duration_s >= arrivals[-1].time_s


def test_no_more_requests_are_under_way_than_asked_for(serve: Serve) -> None:
    server = serve(one_token)
    run = measure(server.address, burst(24), pace=Pace(3))
    assert len(server.bodies) == 24
    assert server.most_at_once <= 3
    assert all(outcome.is_whole for outcome in run.outcomes)


@pytest.mark.slow
def test_warm_ups_do_not_count(serve: Serve) -> None:
    server = serve(one_token)
    ended: list[Outcome] = []
    run = measure(server.address, burst(2), num_warmups=3, on_end=ended.append)
    assert len(server.bodies) == 5
    assert len(run.outcomes) == len(ended) == 2


def test_a_failed_warm_up_ends_the_measurement(serve: Serve) -> None:
    server = serve(lambda _: Answer([b"{}"], 400, "application/json"))
    with pytest.raises(ServerError, match="a warm-up request failed"):
        measure(server.address, burst(2), num_warmups=1)
    assert len(server.bodies) == 1


def test_a_model_that_is_not_served_is_refused(serve: Serve) -> None:
    server = serve(one_token)
    measure(server.address, burst(1), model="other")
    assert server.bodies[0]["model"] == "other"
    with pytest.raises(ServerError, match="a model among stub, other, got 'third'"):
        measure(server.address, burst(1), model="third")


def test_a_failure_is_an_outcome_among_others(serve: Serve) -> None:
    server = serve(
        lambda body: one_token(body) if len(body["prompt"]) % 2 else Answer([b"full"], 503, "text/plain")
    )
    run = measure(server.address, burst(6))
    assert [outcome.kind for outcome in run.outcomes] == ["whole", "status 503"] * 3


def test_a_run_leaves_as_many_objects_out_of_collections_as_before(serve: Serve) -> None:
    server = serve(one_token)
    try:
        unfreeze()
        measure(server.address, burst(1))
        assert gc.get_freeze_count() == 0
    finally:
        leave_out_what_is_there()  # as conftest.py has
    measure(server.address, burst(1))
    assert gc.get_freeze_count() > 0


def test_ctrl_c_ends_a_run_and_keeps_what_has_come(serve: Serve) -> None:
    never = asyncio.Event()
    server = serve(
        lambda body: one_token(body) if len(body["prompt"]) == 1 else Answer([token("b"), never, DONE])
    )
    arrivals = [*burst(3), Arrival(600.0, 1, 1)]
    run = measure(server.address, arrivals, on_end=lambda _: signal.raise_signal(signal.SIGINT))
    assert run.is_interrupted
    assert run.outcomes[0].is_whole
    assert [outcome.failure for outcome in run.outcomes[1:]] == [Failure.INTERRUPTED] * 3
    assert [outcome.is_sent for outcome in run.outcomes] == [True, True, True, False]


def test_plans_are_the_same_for_the_same_trace() -> None:
    arrivals = [
        Arrival(0.0, 8, 3, (1, 2), 4),
        Arrival(1.0, 8, 4, (1, 3), 4),
        Arrival(2.0, 2, 5, text="hi you"),
    ]
    plans = [plan_requests(arrivals, Endpoint.COMPLETIONS, "m", PromptIds(range(900))) for _ in range(2)]
    assert plans[0] == plans[1]
    prompts = [json.loads(each.body)["prompt"] for each in plans[0]]
    assert prompts[0][:4] == prompts[1][:4]
    assert prompts[0][4:] != prompts[1][4:]
    assert prompts[2] == "hi you"
    assert [json.loads(each.body)["max_tokens"] for each in plans[0]] == [3, 4, 5]


def test_a_chat_of_token_ids_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="expected a tokenizer"):
        plan_requests(burst(1), Endpoint.CHAT, "m", IDS)
    (plan,) = plan_requests(burst(1), Endpoint.CHAT, "m", IDS, decode=str)
    assert json.loads(plan.body)["messages"][0]["content"].startswith("[")


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_concurrency of at least 1, got 0"):
        Pace(0)
