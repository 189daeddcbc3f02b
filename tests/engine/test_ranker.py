"""An engine with a ranker serves first what it expects to be short."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from hpu_duo.engine.engine import Engine
from hpu_duo.sampling import SamplingParams
from hpu_duo.scheduling.ranker import EncoderRanker, LinearRanker, Prompt, save_ranker
from tests.engine.tiny import Tiny
from tests.modeling.families import prompts_of


@pytest.fixture(scope="module")
def by_length(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranker that expects long outputs of long prompts."""
    ranker = LinearRanker(1 << 8)
    with torch.no_grad():
        ranker.of_length.fill_(1.0)
    directory = tmp_path_factory.mktemp("ranker")
    save_ranker(ranker, directory)
    return directory


Scored = list[tuple[int, list[int]]]
"""The thread and the lengths of each call."""


def _watch(engine: Engine) -> Scored:
    """Note who asks the ranker of an engine for what, from now on."""
    ranker = engine._intake.ranker
    assert ranker is not None
    scored: Scored = []

    def note(ranker: nn.Module, arguments: tuple[Sequence[Prompt]]) -> None:
        scored.append((threading.get_ident(), [len(prompt) for prompt in arguments[0]]))

    ranker.register_forward_pre_hook(note)
    return scored


def test_shorter_prompts_end_first_where_the_ranker_says_so(tiny: Tiny, by_length: Path) -> None:
    served = tiny.load(max_num_seqs=1, scheduling_policy="ltr", ranker=by_length)
    ended: list[str] = []
    params = SamplingParams(temperature=0, max_tokens=2)
    served.engine.generate(prompts_of([9, 30, 4]), params, lambda one: ended.append(one.request_id))
    assert list(dict.fromkeys(ended)) == ["request-2", "request-0", "request-1"]


def test_prompts_are_scored_once_when_they_arrive(tiny: Tiny, by_length: Path) -> None:
    """And not again when they are admitted, or displaced and queued again."""
    engine = tiny.load(max_num_seqs=2, scheduling_policy="ltr", ranker=by_length).engine
    scored, lengths = _watch(engine), [9, 30, 4, 17]
    for prompt in prompts_of(lengths):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=6, n=2))
    here = threading.get_ident()
    assert scored == [(here, [length]) for length in lengths]
    engine.step()
    engine.add_request(prompts_of([2])[0], SamplingParams(temperature=0, max_tokens=1))
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().num_preemptions > 0
    assert scored == [(here, [length]) for length in (*lengths, 2)]


def test_prompts_are_scored_in_the_thread_of_their_caller(tiny: Tiny, by_length: Path) -> None:
    engine = tiny.load(max_num_seqs=1, scheduling_policy="ltr", ranker=by_length).engine
    scored = _watch(engine)

    def call() -> int:
        for prompt in prompts_of([9, 4]):
            engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=2))
        engine.rank(prompts_of([5, 7]))
        return threading.get_ident()

    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(call).result()
    assert there != threading.get_ident()
    while engine.has_unfinished:
        engine.step()
    assert scored == [(there, [9]), (there, [4]), (there, [5, 7])]


def test_a_score_that_is_given_is_taken(tiny: Tiny, by_length: Path) -> None:
    engine = tiny.load(scheduling_policy="ltr", ranker=by_length).engine
    short, long = engine.rank(prompts_of([4, 30]))
    assert short < long
    engine.add_request(prompts_of([4])[0], request_id="given", score=7.5)
    engine.add_request(prompts_of([4])[0], request_id="asked")
    scores = {name: engine.scheduler.get(f"{name}#0") for name in ("given", "asked")}
    assert scores["given"] is not None
    assert scores["asked"] is not None
    assert (scores["given"].score, scores["asked"].score) == (7.5, short)


@pytest.mark.parametrize("prompt", [[], [-1], [10**9], [[1, 2], [3]], "text"])
def test_wrong_prompts_are_refused_as_without_a_ranker(tiny: Tiny, by_length: Path, prompt: object) -> None:
    messages = []
    for options in ({}, {"scheduling_policy": "ltr", "ranker": by_length}):
        engine = tiny.load(**options).engine
        with pytest.raises(ValueError, match="request 'x'") as refused:
            engine.add_request(prompt, request_id="x")  # type: ignore[arg-type]
        messages.append(str(refused.value))
        assert not engine.has_unfinished
    assert messages[0] == messages[1]


def test_a_policy_and_a_ranker_go_together(tiny: Tiny, by_length: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="expected ranker, a directory, with scheduling_policy='ltr', got None"
    ):
        tiny.load(scheduling_policy="ltr")
    with pytest.raises(
        ValueError, match="expected no ranker, which 'ltr' needs, with scheduling_policy='fcfs'"
    ):
        tiny.load(ranker=by_length)
    with pytest.raises(ValueError, match="expected a ranker of hpu-duo train-ranker in"):
        tiny.load(scheduling_policy="ltr", ranker=tmp_path)
    config = {"model_type": "bert", "vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1}
    few = EncoderRanker({**config, "num_attention_heads": 1, "intermediate_size": 8})
    save_ranker(few, tmp_path / "few")
    with pytest.raises(ValueError, match=r"expected a ranker with a vocabulary of at least .* got 7"):
        tiny.load(scheduling_policy="ltr", ranker=tmp_path / "few")
