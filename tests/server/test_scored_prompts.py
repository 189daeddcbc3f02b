"""Prompts that are scored are calls like others: they have places, and end with their callers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.server.conftest import TinyChat
from tests.server.live import live, wait_until
from tests.server.test_pressure import raw_post, slowed

SCORED = {"model": "tiny", "echo": True, "logprobs": 1, "max_tokens": 0}


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_prompts_that_are_scored_have_places_in_the_queue(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    with live(tiny.load(max_num_seqs=2), max_queue=1) as server, ThreadPoolExecutor(1) as pool:
        slowed(server, 0.02, monkeypatch)
        create = server.client().completions.create
        asked = {**SCORED, "max_tokens": max_tokens, "prompt": ["Once upon a time"] * 2}
        running = pool.submit(create, **asked)
        wait_until(lambda: server.service.engine.num_open == 2)
        with pytest.raises(openai.RateLimitError):
            create(**asked)
        with pytest.raises(openai.RateLimitError):
            create(**{**asked, "n": 2})
        assert server.service.engine.num_open == 2
        assert [len(one.logprobs.tokens) for one in running.result().choices] == [16 + max_tokens] * 2


def test_a_prompt_that_is_scored_is_dropped_within_a_step_when_its_caller_goes(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tiny.load()) as server:
        slowed(server, 0.05, monkeypatch)
        connection = raw_post(server, {**SCORED, "prompt": "Once upon a time " * 4})
        wait_until(lambda: server.model.stats().num_running == 1)
        began = server.model.stats().num_steps
        connection.close()
        wait_until(server.holds_nothing)
        assert server.model.stats().num_steps - began <= 2
        assert server.service.admission.num_held == 0
