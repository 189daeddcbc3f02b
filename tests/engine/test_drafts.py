"""Drafters change the number of steps and nothing else: the tokens are those that are sampled without one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from hpu_duo import HPUDuoModel
from hpu_duo.drafting import Drafter
from hpu_duo.engine.outputs import Completion
from hpu_duo.engine.samples import SampleState
from hpu_duo.lab.replay import replay
from hpu_duo.request import FinishReason, Request
from hpu_duo.sampling import SamplingParams, SamplingRow, StructuredOutputs
from hpu_duo.startup.recorded_steps import options_of, read_log
from tests.engine.tiny import PATTERN, Tiny, make_tiny, serve, tokens_of
from tests.modeling.families import VOCAB, prompts_of
from tests.tiers import EXHAUSTIVE, further

DECODE_LEN = 4
EOS = 2
PROMPTS = prompts_of([30, 12, 1, 22, 17], seed=3)
GREEDY = SamplingParams(temperature=0, max_tokens=23, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, min_p=0.02, seed=5, max_tokens=23)
PARAMS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "samples": replace(SEEDED, n=3, max_tokens=14),
    "penalties": replace(
        SEEDED, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=-0.3, min_tokens=9
    ),
    "bias": replace(GREEDY, logit_bias={7: 2.0, 9: -3.0}, max_tokens=9, logprobs=3),
    "one token": replace(SEEDED, max_tokens=1),
    "forced": replace(SEEDED, forced_token_ids=(5, 9, 6, 8, 7), max_tokens=13),
    "decoded prompt": replace(GREEDY, decoded_prompt_tokens=6),
}
SIZES: dict[str, dict[str, Any]] = {
    "blocks": {},
    "rings": {"pattern": PATTERN},
    "few blocks": {"pattern": PATTERN, "num_blocks": 8, "max_model_len": 64},
    "no cache": {"enable_prefix_caching": False},
}

Guess = Callable[[list[int], int], Sequence[int]]
"""Makes drafts of the tokens that come next, and of how many are wanted."""
Guesses = Guess | Mapping[str, Guess]
"""One for all prompts, or one for each."""


class Knowing(Drafter):
    """A drafter that knows what every request will be answered, and says something about it."""

    def __init__(
        self, guess: Guesses, done: Sequence[Sequence[Completion]], prompts: Sequence[Sequence[int]]
    ):
        guesses = list(guess.values()) if isinstance(guess, Mapping) else [guess]
        self._guesses = {tuple(prompt): one for prompt, one in zip(prompts, cycle(guesses))}
        self._answers = {
            (tuple(prompt), sample.sample_index): sample.token_ids
            for prompt, samples in zip(prompts, done)
            for sample in samples
        }

    def propose(self, request: Request, most: int) -> Sequence[int]:
        prompt = tuple(request.prompt_token_ids.tolist())
        answer = self._answers[prompt, request.sample_index]
        assert request.output_token_ids.tolist() == answer[: request.num_output_tokens]
        assert 1 <= most < DECODE_LEN
        return self._guesses[prompt](answer[request.num_output_tokens :], most)


def right(coming: list[int], most: int) -> Sequence[int]:
    return coming[:most]


def wrong(coming: list[int], most: int) -> Sequence[int]:
    return [(token + 1) % VOCAB for token in [*coming, *[5] * most][:most]]


def half(coming: list[int], most: int) -> np.ndarray:
    """Right at first, in most places."""
    drafts = np.array([*coming, *[5] * most][:most])
    drafts[len(coming) % 3 :] += 1
    return drafts % VOCAB


def anything(coming: list[int], most: int) -> np.ndarray:
    """Random tokens, which are right now and then."""
    return np.random.default_rng(len(coming)).integers(0, VOCAB, most)


def end(coming: list[int], most: int) -> Sequence[int]:
    """Only the token that may end a text."""
    return [EOS] * most


GUESSES: dict[str, Guess] = {"right": right, "wrong": wrong, "half": half, "anything": anything, "end": end}


def compare(plain: HPUDuoModel, drafting: HPUDuoModel, guess: Guesses, params: SamplingParams) -> None:
    """Serve the same prompts twice each, the second time from the prefix cache if there is one."""
    for _ in range(2):
        expected = serve(plain, PROMPTS, params)
        drafting.engine.drafter = Knowing(guess, expected, PROMPTS)
        for samples, others in zip(serve(drafting, PROMPTS, params), expected, strict=True):
            for sample, other in zip(samples, others, strict=True):
                logprobs = [[one.logprob, *one.top.values()] for one in sample.logprobs]
                assert np.allclose(
                    logprobs, [[one.logprob, *one.top.values()] for one in other.logprobs], atol=1e-4
                )
                ends = (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason)
                assert ends == (other.token_ids, other.text, other.finish_reason, other.stop_reason)


def _cases() -> Iterator[Any]:
    """Sizes and parameters with a guess for each prompt; in the last tier, with one guess for all of them."""
    fast = (("few blocks", "seeded"), ("rings", "forced"))
    for (row, sizes), (column, params) in product(enumerate(SIZES), enumerate(PARAMS)):
        marks = [pytest.mark.slow] if (row + column) % len(SIZES) == 0 else EXHAUSTIVE
        marks = [] if (sizes, params) in fast else marks
        yield pytest.param(sizes, params, GUESSES, marks=marks, id=f"{sizes}-{params}")
        for name, guess in GUESSES.items():
            yield pytest.param(sizes, params, {name: guess}, marks=EXHAUSTIVE, id=f"{sizes}-{params}-{name}")


@pytest.mark.parametrize(("sizes", "params", "guesses"), list(_cases()))
def test_outputs_are_those_without_a_drafter(
    tiny: Tiny, sizes: str, params: str, guesses: dict[str, Guess]
) -> None:
    plain, drafting = tiny.load(**SIZES[sizes]), tiny.load(**SIZES[sizes], decode_len=DECODE_LEN)
    compare(plain, drafting, guesses, PARAMS[params])
    stats = drafting.stats()
    assert stats.num_output_tokens == plain.stats().num_output_tokens
    if list(guesses) == ["wrong"]:
        assert stats.num_accepted_tokens == 0
    elif {"right", "half"} & guesses.keys() and params != "one token":
        assert 0 < stats.num_accepted_tokens <= stats.num_drafted_tokens
    if (sizes, params) == ("few blocks", "seeded"):
        assert stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("sizes", "params"),
    [
        *further(("blocks", "greedy"), ("no cache", "greedy"), ("rings", "samples")),
        ("few blocks", "samples"),
    ],
)
def test_a_drafter_that_is_always_wrong_costs_no_step(tiny: Tiny, sizes: str, params: str) -> None:
    """Nor a preemption, a cached prefix, or the place of another request."""
    options = {**SIZES[sizes], "decode_len": DECODE_LEN}
    plain, drafting = tiny.load(**options), tiny.load(**options)
    compare(plain, drafting, wrong, PARAMS[params])
    without, with_drafts = plain.stats(), drafting.stats()
    for name in ("num_steps", "num_prompt_tokens", "num_preemptions", "prefixes"):
        assert getattr(with_drafts, name) == getattr(without, name), name
    assert with_drafts.num_drafted_tokens > 0


@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["full", "duo"])
def test_a_drafter_that_is_always_right_saves_most_steps(tiny: Tiny, pattern: Any) -> None:
    params = replace(SEEDED, max_tokens=41)
    (expected,) = serve(tiny.load(pattern=pattern), PROMPTS[:1], params)
    served = tiny.load(pattern=pattern, decode_len=DECODE_LEN)
    served.engine.drafter = Knowing(right, [expected], PROMPTS)
    (done,) = serve(served, PROMPTS[:1], params)
    assert tokens_of([done]) == tokens_of([expected])
    stats = served.stats()
    # The prompt gives the first token; ten steps of four tokens follow.
    assert stats.steps["--u"] == 10
    assert (stats.num_drafted_tokens, stats.num_accepted_tokens) == (30, 30)


@pytest.mark.parametrize(
    "max_tokens", [*range(6, 10), *(pytest.param(each, marks=EXHAUSTIVE) for each in (10, 11))]
)
def test_the_last_token_may_be_any_of_a_draft(tiny: Tiny, max_tokens: int) -> None:
    params = replace(GREEDY, max_tokens=max_tokens)
    compare(tiny.load(), tiny.load(decode_len=DECODE_LEN), right, params)


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny model with an end-of-text token."""
    tiny = make_tiny(tmp_path_factory.mktemp("ending"), {EOS: "<eos>"})
    GenerationConfig(pad_token_id=0, eos_token_id=EOS).save_pretrained(tiny.path)
    return tiny


@pytest.mark.parametrize(
    ("kind", "place", "guess"),
    [
        pytest.param(*case, marks=[] if number % 13 == 0 else EXHAUSTIVE)
        for number, case in enumerate(product(["stop string", "stop token"], range(2, 9), GUESSES))
    ],
)
def test_what_ends_an_output_may_be_any_token_of_a_draft(
    tiny: Tiny, kind: str, place: int, guess: str
) -> None:
    """Nothing behind it is output, counted, or left in the prefix cache."""
    ((whole,),) = serve(tiny.load(), PROMPTS[:1], SEEDED)
    ends = {"stop": (whole.text[place - 1 : place + 1],)}
    if kind == "stop token":
        ends = {"stop_token_ids": (whole.token_ids[place],)}
    params, options = replace(SEEDED, **ends, min_tokens=2), {"block_size": 4, "decode_len": DECODE_LEN}
    plain, drafting = tiny.load(**options), tiny.load(**options)
    ((expected,),) = serve(plain, PROMPTS[:1], params)
    assert expected.finish_reason is FinishReason.STOP
    drafting.engine.drafter = Knowing(GUESSES[guess], [[whole]], PROMPTS)
    ((done,),) = serve(drafting, PROMPTS[:1], params)
    assert (done.token_ids, done.text) == (expected.token_ids, expected.text)
    assert done.stop_reason == expected.stop_reason
    ours, theirs = drafting.stats(), plain.stats()
    assert ours.num_output_tokens == theirs.num_output_tokens == len(done.token_ids)
    assert ours.prefixes == theirs.prefixes


@pytest.mark.parametrize(
    "guesses",
    [
        pytest.param(GUESSES, id="all"),
        *(pytest.param({name: guess}, marks=EXHAUSTIVE, id=name) for name, guess in GUESSES.items()),
    ],
)
@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": r"[A-Z]{2}-[0-9]{1,4}( [a-z]+)?!"},
        {"choice": ("Ab", "Abc", "x")},
        {"json": '{"type": "object", "properties": {"a": {"enum": [10, 12]}}, "required": ["a"]}'},
    ],
    ids=["regex", "choice", "json"],
)
def test_drafts_keep_to_a_grammar(ending: Tiny, grammar: dict[str, Any], guesses: dict[str, Guess]) -> None:
    params = SamplingParams(
        temperature=1.1, seed=8, max_tokens=20, structured_outputs=StructuredOutputs(**grammar)
    )
    plain, drafting = ending.load(), ending.load(decode_len=DECODE_LEN)
    compare(plain, drafting, guesses, params)
    # A choice may end before a draft that is right, where only one prompt has such drafts.
    if list(guesses) == ["right"] or ("right" in guesses and "choice" not in grammar):
        assert drafting.stats().num_accepted_tokens > 0


def test_rows_that_are_sampled_on_the_host_take_no_drafts(tiny: Tiny) -> None:
    options: dict[str, Any] = {"max_new_tokens": 9, "no_repeat_ngram_size": 2}
    expected = tiny.load().generate(PROMPTS[:2], **options)
    served = tiny.load(decode_len=DECODE_LEN)
    served.engine.drafter = Knowing(right, [], PROMPTS)
    assert served.generate(PROMPTS[:2], **options).tolist() == expected.tolist()


class Broken(Drafter):
    """Proposes what no drafter may."""

    def __init__(self, drafts: Any) -> None:
        self._drafts = drafts

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return self._drafts  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("drafts", "message"),
    [([VOCAB], ""), ([-1, 5], ""), ([5] * 50, ""), ([[5], [6, 7]], "has failed"), (["a"], "has failed")],
)
def test_a_bad_drafter_costs_nobody_a_token(
    tiny: Tiny, drafts: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, params = PROMPTS[1:3], replace(GREEDY, max_tokens=9)
    expected = tokens_of(serve(tiny.load(), prompts, params))
    served = tiny.load(decode_len=DECODE_LEN)
    served.engine.drafter = Broken(drafts)
    with caplog.at_level(logging.ERROR):
        assert tokens_of(serve(served, prompts, params)) == expected
    assert [message in record.message for record in caplog.records] == ([True] if message else [])


def test_a_request_whose_drafts_cannot_be_checked_takes_none(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(serve(tiny.load(), PROMPTS, GREEDY))
    cut, failed = SampleState.cut_drafts, []

    def fail_once(self: SampleState, drafts: list[int]) -> Any:
        if not failed:
            failed.append(self)
            raise RuntimeError("text that cannot be decoded")
        return cut(self, drafts)

    monkeypatch.setattr(SampleState, "cut_drafts", fail_once)
    served = tiny.load(decode_len=DECODE_LEN)
    served.engine.drafter = Broken([5])
    assert tokens_of(serve(served, PROMPTS, GREEDY)) == expected
    assert failed
    assert served.stats().num_drafted_tokens > 0, "others still take drafts"


def test_a_drafter_says_how_many_drafts_steps_of_so_many_rows_verify(tiny: Tiny) -> None:
    expected = serve(tiny.load(), PROMPTS[:2], GREEDY)
    served = tiny.load(decode_len=DECODE_LEN)
    served.engine.drafter = drafter = Knowing(right, expected, PROMPTS)
    drafter.most_by_rows = [(1, 4, 1)]
    assert tokens_of(serve(served, PROMPTS[:2], GREEDY)) == tokens_of(expected)
    stats = served.stats().speculation
    assert stats is not None
    assert stats.num_draft_tokens == stats.num_drafts > 0


def test_text_and_grammar_are_not_copied_where_nothing_is_proposed(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, copied = tiny.load(decode_len=DECODE_LEN), list[SampleState]()
    served.engine.drafter = Broken([])
    fork = SampleState._fork_text

    def counted(self: SampleState) -> SampleState:
        copied.append(self)
        return fork(self)

    monkeypatch.setattr(SampleState, "_fork_text", counted)
    serve(served, PROMPTS[:1], replace(GREEDY, stop=("never",)))
    assert not copied


def test_a_drafter_needs_rows_that_decode_several_tokens(tiny: Tiny) -> None:
    served = tiny.load()
    with pytest.raises(ValueError, match=r"expected decode_len of 2 or more to verify drafts.*decode_len=1"):
        served.engine.drafter = Broken([])
    assert served.engine.drafter is None


def test_what_cannot_be_sampled_behind_drafts_ends_nobody(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft in front of it might not have been taken, so it is sampled again in a step of its own."""
    expected = serve(tiny.load(), PROMPTS, SEEDED)
    served = tiny.load(decode_len=DECODE_LEN)
    served.engine.drafter = Knowing(right, expected, PROMPTS)
    rows_of = SampleState.sampling_rows

    def spoiled(state: SampleState, num_samples: int) -> list[SamplingRow]:
        rows = rows_of(state, num_samples)
        bad = replace(rows[-1].params, logit_bias={VOCAB + 5: 1.0})
        return [*rows[:-1], rows[-1]._replace(params=bad)]

    monkeypatch.setattr(SampleState, "sampling_rows", spoiled)
    assert tokens_of(serve(served, PROMPTS, SEEDED)) == tokens_of(expected)
    assert served.stats().num_accepted_tokens > 0


class Interrupt(KeyboardInterrupt):
    """An interrupt, told apart from a real Ctrl-C."""


@pytest.mark.parametrize("guess", ["right", "half"])
def test_interrupted_steps_and_a_drafter_that_comes_and_goes_cost_nobody_a_token(
    tiny: Tiny, guess: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = PROMPTS[1:3]
    expected = serve(tiny.load(pattern=PATTERN), prompts, SEEDED)
    served = tiny.load(pattern=PATTERN, decode_len=DECODE_LEN)
    engine, finish, num_steps = served.engine, served.engine.runner.finish, 0
    knowing = Knowing(GUESSES[guess], expected, prompts)

    def interrupt_now_and_then(handle: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        engine._stepper.drafter = None if num_steps % 5 == 0 else knowing
        # Requests are read again in between: in four steps at most.
        if num_steps % 8 == 0:
            raise Interrupt
        return finish(handle)

    monkeypatch.setattr(engine.runner, "finish", interrupt_now_and_then)
    tokens: dict[str, list[int]] = {engine.add_request(prompt, SEEDED): [] for prompt in prompts}
    while engine.has_unfinished:
        assert num_steps < 200
        try:
            outputs = engine.step()
        except Interrupt:
            continue
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    assert num_steps > 8
    assert [[one] for one in tokens.values()] == tokens_of(expected)
    assert served.stats().num_accepted_tokens > 0


def test_recorded_steps_with_drafts_are_replayed(tiny: Tiny, tmp_path: Path) -> None:
    expected = serve(tiny.load(pattern=PATTERN), PROMPTS, SEEDED)
    served = tiny.load(pattern=PATTERN, decode_len=DECODE_LEN, record_steps=tmp_path / "steps")
    served.engine.drafter = Knowing(half, expected, PROMPTS)
    assert tokens_of(serve(served, PROMPTS, SEEDED)) == tokens_of(expected)
    served.engine.step_recorder.close()  # type: ignore[union-attr]
    log = read_log(tmp_path / "steps")
    again = HPUDuoModel.from_pretrained(tiny.path, **options_of(log.origin))
    report = replay(again.engine, tiny.path, log)
    assert report.differences == ()
    assert report.num_tokens > served.stats().num_output_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "sdpa"},
        pytest.param({"graphs": "replay"}, marks=pytest.mark.slow),
        pytest.param({"device": "hpu-sim", "max_num_seqs": 3, "num_blocks": 30}, marks=EXHAUSTIVE),
        pytest.param({"tensor_parallel_size": 2}, marks=EXHAUSTIVE),
    ],
    ids=["sdpa", "replay", "hpu-sim", "two ranks"],
)
@pytest.mark.usefixtures("default_buckets")
def test_however_steps_run_drafts_are_verified(tiny: Tiny, options: dict[str, Any]) -> None:
    plain, drafting = tiny.load(), tiny.load(decode_len=DECODE_LEN, **options)
    compare(plain, drafting, half, PARAMS["penalties"])
    stats = drafting.stats()
    assert stats.num_accepted_tokens > 0
    assert stats.num_graph_misses == 0
