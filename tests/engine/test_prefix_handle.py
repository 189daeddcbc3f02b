"""A document is read once and asked many times, with the tokens of requests without any cache."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer

from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, assert_holds_nothing, text_of, tokens_of
from tests.modeling.families import BLOCK, prompts_of

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "ignore_eos": True}
DOCUMENT = prompts_of((5 * BLOCK + 3,), seed=9)[0]
QUESTIONS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17, 18]]
STREAMING = HeadPattern(PATTERN.scores, sink=2, recent=6, retrieval=PATTERN.mask & False)
PATTERNS = pytest.mark.parametrize("pattern", [None, PATTERN, STREAMING], ids=["full", "duo", "streaming"])


def answers(served: HPUDuoModel, prompts: list[list[int]], params: SamplingParams = GREEDY) -> Any:
    return tokens_of(served.engine.generate(prompts, params))


def cold(tiny: Tiny, pattern: HeadPattern | None = None, **options: Any) -> HPUDuoModel:
    return tiny.load(pattern=pattern, enable_prefix_caching=False, **options)


@PATTERNS
def test_questions_get_the_tokens_of_whole_prompts_and_compute_only_themselves(
    tiny: Tiny, pattern: HeadPattern | None
) -> None:
    expected = answers(cold(tiny, pattern), [[*DOCUMENT, *question] for question in QUESTIONS])
    served = tiny.load(pattern=pattern)
    with served.prefill(DOCUMENT) as context:
        assert (len(context.token_ids), context.num_held_tokens) == (5 * BLOCK + 3, 5 * BLOCK)
        before = served.stats().num_prompt_tokens
        rows = served.generate(QUESTIONS, context=context, pad_token_id=0, **OPTIONS)
        assert isinstance(rows, torch.Tensor)
        computed = served.stats().num_prompt_tokens - before
        assert computed == sum(3 + len(question) for question in QUESTIONS)
        done = served.engine.generate([context.prompt(q) for q in QUESTIONS], GREEDY, context=context.hold())
        assert min(sample.num_cached_tokens for [sample] in done) >= 5 * BLOCK
        assert tokens_of(done) == expected
    for row, question, [tokens] in zip(rows.tolist(), QUESTIONS, expected):
        assert row[: len(question) + 6] == [*question, *tokens]
    assert_holds_nothing(served)


@PATTERNS
def test_what_is_held_outlives_the_pressure_of_other_requests(
    tiny: Tiny, pattern: HeadPattern | None
) -> None:
    tight = {"num_blocks": 14, "max_model_len": 64, "num_prefix_snapshots": 2 if pattern else None}
    expected = answers(cold(tiny, pattern), [[*DOCUMENT, *question] for question in QUESTIONS])
    served = tiny.load(pattern=pattern, **tight)
    with served.prefill(DOCUMENT) as context:
        for seed in range(2):
            others = prompts_of((30, 22, 17, 9), seed=seed)
            served.engine.generate(others, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        stats = served.stats()
        assert stats.prefixes is not None
        if pattern is not STREAMING:
            assert stats.num_preemptions > 0
            assert stats.prefixes.num_evicted_blocks > 0
        done = served.engine.generate([context.prompt(q) for q in QUESTIONS], GREEDY, context=context.hold())
        assert min(sample.num_cached_tokens for [sample] in done) >= 5 * BLOCK
        assert tokens_of(done) == expected


@PATTERNS
def test_forks_share_blocks_and_samples_fork_behind_them(tiny: Tiny, pattern: HeadPattern | None) -> None:
    params = SamplingParams(temperature=1.1, seed=4, n=3, max_tokens=6, ignore_eos=True)
    served, more = tiny.load(pattern=pattern, num_prefix_snapshots=4 if pattern else None), [3] * 2 * BLOCK
    expected = answers(cold(tiny, pattern), [[*DOCUMENT, *more, 5, 6]], params)
    with served.prefill(DOCUMENT) as context, context.fork(more) as longer:
        assert longer.num_held_tokens == 7 * BLOCK
        holds = served.engine.scheduler.allocations.prefixes
        assert holds is not None
        assert holds.holds.num_nodes == 7
        context.close()
        done = served.engine.generate([longer.prompt([5, 6])], params, context=longer.hold())
        assert tokens_of(done) == expected
    assert_holds_nothing(served)


def test_texts_are_tokenised_with_the_document_and_answered_by_texts(tiny: Tiny) -> None:
    document, questions = text_of(DOCUMENT), ["ab", "c d"]
    served = tiny.load()
    tokenizer = served.tokenizer
    assert tokenizer is not None
    with served.prefill(document) as context:
        found = served.generate(questions, context=context, **OPTIONS)
        assert served.generate("ab", context=context, **OPTIONS) == found[:1]
        assert context.prompt("ab") == tokenizer(document + "ab")["input_ids"]
        with context.fork("ab") as longer:
            assert longer.text == document + "ab"
            assert longer.prompt("c") == tokenizer(document + "abc")["input_ids"]
        streamer = TextIteratorStreamer(tokenizer)
        served.generate(["ab"], context=context, streamer=streamer, **OPTIONS)
        assert "".join(streamer).endswith(found[0])
    for question, text in zip(questions, found):
        ids = tokenizer(document + question)["input_ids"]
        [[tokens]] = answers(cold(tiny), [ids])
        assert text == tokenizer.decode(tokens)


def test_a_short_document_holds_nothing_and_is_asked_all_the_same(tiny: Tiny) -> None:
    served = tiny.load()
    with served.prefill([5, 6]) as context:
        assert context.num_held_tokens == 0
        rows = served.generate([[7]], context=context, **OPTIONS)
        assert isinstance(rows, torch.Tensor)
    [[expected]] = answers(cold(tiny), [[5, 6, 7]])
    assert rows.tolist() == [[7, *expected]]


def test_processors_and_lengths_count_the_document(tiny: Tiny) -> None:
    """Penalties look at its tokens, and ``max_length`` is that of the whole text."""
    served = tiny.load()
    asked = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "max_length": len(DOCUMENT) + 9}
    whole = cold(tiny).generate([[*DOCUMENT, 5]], do_sample=False, **asked)
    with served.prefill(DOCUMENT) as context:
        found = served.generate([[5]], context=context, do_sample=False, **asked)
    assert isinstance(whole, torch.Tensor)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, whole[:, len(DOCUMENT) :])


def test_salts_keep_contexts_apart(tiny: Tiny) -> None:
    served = tiny.load()
    with served.prefill(DOCUMENT, cache_salt="a") as one, served.prefill(DOCUMENT) as other:
        holds = served.engine.scheduler.allocations.prefixes
        assert holds is not None
        assert holds.holds.num_nodes == 10
        assert torch.equal(
            served.generate([[5]], context=one, **OPTIONS),  # type: ignore[arg-type]
            served.generate([[5]], context=other, **OPTIONS),  # type: ignore[arg-type]
        )
        with pytest.raises(ValueError, match="cache_salt"):
            served.engine.generate([one.prompt([5])], GREEDY, context=one.hold())


def test_a_context_closes_once_and_says_so_afterwards(tiny: Tiny) -> None:
    served = tiny.load()
    context = served.prefill(DOCUMENT)
    assert served.stats().used_blocks == 5
    context.close()
    context.close()
    assert_holds_nothing(served)
    for use in (lambda: served.generate([[5]], context=context), lambda: context.fork([5]), context.hold):
        with pytest.raises(ValueError, match="expected an open context, got a closed one"):
            use()


def test_a_context_that_nobody_refers_to_is_let_go(tiny: Tiny) -> None:
    served = tiny.load()
    context = served.prefill(DOCUMENT)
    del context
    gc.collect()
    served.engine.generate([[5]], GREEDY)
    assert_holds_nothing(served)


def test_questions_under_way_keep_a_closed_context(tiny: Tiny) -> None:
    served = tiny.load(num_blocks=9, max_model_len=64)
    [[expected]] = answers(cold(tiny), [[*DOCUMENT, 5]])
    context = served.prefill(DOCUMENT)
    served.engine.add_request(context.prompt([5]), GREEDY, context=context.hold())
    context.close()
    assert served.stats().used_blocks == 5
    tokens = [token for _ in range(6) for output in served.engine.step() for token in output.token_ids]
    assert tokens == expected
    assert_holds_nothing(served)


def test_what_a_failed_step_lost_is_read_again(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    served = tiny.load(pattern=PATTERN)
    [[expected]] = answers(cold(tiny, PATTERN), [[*DOCUMENT, 5]])
    with served.prefill(DOCUMENT) as context:
        with monkeypatch.context() as patch:
            patch.setattr(served.engine.runner, "launch", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                served.generate([[5]], context=context)
        served.engine.generate([[5]], GREEDY)
        rows = served.generate([[5]], context=context, **OPTIONS)
        assert isinstance(rows, torch.Tensor)
        assert rows.tolist() == [[5, *expected]]
        assert served.stats().used_blocks == 5
    assert_holds_nothing(served)


def test_threads_ask_open_and_close_at_once(tiny: Tiny) -> None:
    served = tiny.load(pattern=PATTERN, num_prefix_snapshots=6)
    documents = [prompts_of((3 * BLOCK + 2,), seed=seed)[0] for seed in range(4)]
    expected = answers(cold(tiny, PATTERN), [[*document, 5, 6] for document in documents])
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        for _ in range(3):
            with served.prefill(documents[number]) as context:
                found[number] = served.generate([[5, 6]], context=context, **OPTIONS)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[number].tolist()[0][2:] for number in range(4)] == [one for [one] in expected]
    assert_holds_nothing(served)


def test_what_cannot_be_held_is_refused_and_nobody_waits_for_ever(tiny: Tiny) -> None:
    served = tiny.load(num_blocks=8, max_model_len=64)
    with served.prefill(DOCUMENT) as context:
        with pytest.raises(ValueError, match="may need 4 blocks of its own, and contexts leave 3 of 8"):
            served.engine.generate([prompts_of((20,))[0]], SamplingParams(max_tokens=8))
        with pytest.raises(ValueError, match="at most 3 further blocks in contexts, got 4: they hold 5"):
            served.prefill(prompts_of((4 * BLOCK,), seed=2)[0])
        served.engine.add_request(prompts_of((15,))[0], SamplingParams(max_tokens=8), "waits")
        with pytest.raises(ValueError, match="beside a request that may need 3 of its own"):
            context.fork([4] * 2 * BLOCK)
        while served.engine.has_unfinished:
            served.engine.step()
        with context.fork([4] * 2 * BLOCK) as longer:
            assert longer.num_held_tokens == 7 * BLOCK
    assert_holds_nothing(served)


def test_contexts_take_no_more_snapshots_than_there_are(tiny: Tiny) -> None:
    served = tiny.load(pattern=PATTERN, num_prefix_snapshots=1)
    with served.prefill(DOCUMENT):
        with pytest.raises(ValueError, match="load with a larger num_prefix_snapshots"):
            served.prefill(prompts_of((20,), seed=2)[0])
        with served.prefill(DOCUMENT):
            pass
    with pytest.raises(ValueError, match="num_prefix_snapshots of 1 or more"):
        tiny.load(pattern=PATTERN, num_prefix_snapshots=0).prefill(DOCUMENT)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (["one", "two"], "several documents are several calls"),
        ([[1, 2], [3, 4]], "several documents are several calls"),
        ([[1, 2], [3]], "several documents are several calls"),
        ([], "expected one text"),
        ("", "expected text"),
        ([1.5], "expected one text"),
        ([500], "prompt tokens from 500"),
        ([1] * 200, "200 prompt tokens"),
        (None, "expected one text"),
    ],
)
def test_documents_that_are_none_are_refused(tiny: Tiny, document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.load().prefill(document)


def test_a_context_needs_a_cache_and_its_own_model(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="got enable_prefix_caching=False"):
        cold(tiny).prefill(DOCUMENT)
    with tiny.load().prefill(DOCUMENT) as context, pytest.raises(ValueError, match="context of this model"):
        tiny.load().generate([[5]], context=context)


def test_questions_that_fit_no_context_are_refused(tiny: Tiny) -> None:
    served = tiny.load()
    with served.prefill(DOCUMENT) as context:
        for questions, message in (
            (["a", [5]], "all texts or all token ids"),
            ([[]], "expected one text"),
            ([""], "expected text after"),
        ):
            with pytest.raises(ValueError, match=message):
                served.generate(questions, context=context)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="return_dict_in_generate"):
            served.generate(["a"], context=context, return_dict_in_generate=True)
        with pytest.raises(ValueError, match="begins with the 40 tokens of its context"):
            served.engine.generate([[5] * 60], GREEDY, context=context.hold())
