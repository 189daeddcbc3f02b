"""Passkeys, needle grids and perplexity on the built-in model, against transformers' own pass."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.lab.eval import NeedleGrid, PasskeyTask, ResultFile, Subject, passkey_accuracy, stream_perplexity
from hpu_duo.lab.eval.kv_bytes import KVBytes
from hpu_duo.lab.eval.model_under_test import encode_known
from hpu_duo.lab.tasks.passkeys import question
from hpu_duo.sampling import SamplingParams

TASK = PasskeyTask(400, num_documents=2, num_passkeys=3, passkey_words=4)
Load = Callable[[float | None], Subject]


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, torch_dtype=torch.float32)


def test_passkeys_are_found_with_the_pattern_and_lost_without(builtin: Load) -> None:
    full, pattern, streaming = (passkey_accuracy(builtin(one), TASK) for one in (None, 0.5, 1.0))
    assert (full.accuracy, pattern.accuracy) == (1.0, 1.0)
    assert streaming.accuracy <= 1 / 3
    assert streaming.logprob < full.logprob - 2
    assert streaming.kv.ratio < pattern.kv.ratio < full.kv.ratio


def test_scored_answers_are_those_that_generation_gives(builtin: Load) -> None:
    """Without retrieval heads some are right and some wrong; both ways agree on which."""
    subject = builtin(1.0)
    (written,) = PasskeyTask(120, 1, 6, 2).documents(subject)
    prompt = subject.encode(written.text, is_start=True)
    asked = [subject.encode(question(one)) for one in written.passkeys]
    answers = [subject.encode(one.answer) for one in written.passkeys]
    (scores,), _ = subject.score([prompt], [[[*ask, *told] for ask, told in zip(asked, answers)]])
    done = subject.model.engine.generate(
        [prompt + ask for ask in asked],
        [SamplingParams(temperature=0, max_tokens=len(told), ignore_eos=True) for told in answers],
    )
    exact = [all(score.is_likeliest[-len(told) :]) for score, told in zip(scores, answers)]
    assert exact == [samples[0].token_ids == told for samples, told in zip(done, answers)]
    assert 0 < sum(exact) < len(exact)


def test_bytes_kept_are_those_that_the_engine_leases(builtin: Load) -> None:
    subject = builtin(0.75)
    subject.score([list(range(5, 400))], [[[7, 8, 9]]])
    kv, stats = subject.kv_bytes(395 + 3 - 1), subject.model.stats()
    one = subject.model.engine
    one.add_request(list(range(5, 401)), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    one.step()
    held = subject.model.stats()
    assert (held.held_bytes, held.full_attention_bytes) == (
        subject.kv_bytes(396).held,
        subject.kv_bytes(396).full,
    )
    one.step()
    assert kv.held >= held.held_bytes
    assert stats.num_running == 0


def test_bytes_of_an_answer_are_those_of_its_prompt_and_all_its_tokens() -> None:
    """Each prompt alone in an engine of its own, and both in one batch."""
    prompts, most = [list(range(5, 105)), list(range(5, 45))], [40, 9]

    def load() -> Subject:
        return Subject(
            HPUDuoModel.from_pretrained(
                MODEL_DIR,
                pattern=PATTERN_DIR,
                sparsity=0.5,
                max_num_seqs=2,
                block_size=16,
                enable_prefix_caching=False,
            )
        )

    together = load()
    answers, kept = together.answer(prompts, most)
    for prompt, num_tokens, answer, kv in zip(prompts, most, answers, kept):
        alone = load().model
        ((sample,),) = alone.engine.generate([prompt], SamplingParams(temperature=0, max_tokens=num_tokens))
        stats = alone.stats()
        assert sample.text == answer
        assert kv.num_tokens == len(prompt) + len(sample.token_ids) - 1
        assert (kv.held, kv.full) == (stats.peak_held_bytes, stats.peak_full_attention_bytes)
    _, ((one, other),) = together.score([prompts[0]], [[[7, 8, 9], [7] * 40]])
    assert (one, other) == (together.kv_bytes(102), together.kv_bytes(139))


def test_bytes_of_several_texts_are_their_sum_and_a_row_shows_the_mean(builtin: Load) -> None:
    subject = builtin(0.5)
    short, long = subject.kv_bytes(100), subject.kv_bytes(2000)
    both = KVBytes.total([short, long])
    assert both.ratio == (short.held + long.held) / (short.full + long.full)
    assert long.ratio < both.ratio < short.ratio
    assert both.report_fields["kv_num_tokens"] == 1050
    assert KVBytes.of_record(json.loads(json.dumps(both.record_fields))) == both


def test_a_grid_that_was_stopped_goes_on_where_it_was(builtin: Load, tmp_path: Path) -> None:
    grid = NeedleGrid((300, 200), (0.3, 1.0), num_documents=1, passkey_words=3)
    path = tmp_path / "results.jsonl"
    whole = list(grid.fill(builtin(1.0), ResultFile(path, "niah", {})))
    cells = [(cell["num_tokens"], cell["depth"]) for cell in whole]
    assert cells == [(200, 0.3), (200, 1.0), (300, 0.3), (300, 1.0)]
    # All heads stream, 16 + 64 tokens: what lies at the end is still there.
    assert [cell["num_exact"] for cell in whole] == [0, 1, 0, 1]
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"\n", 0, -1) - 9])
    assert list(grid.fill(builtin(1.0), ResultFile(path, "niah", {}))) == whole
    assert path.read_bytes() == data


def test_perplexity_is_that_of_one_pass_over_the_text(builtin: Load, reference: Any) -> None:
    subject = builtin(None)
    (written,) = PasskeyTask(150, 1, 1, 4).documents(subject)
    ids = subject.encode(written.text, is_start=True)
    result = stream_perplexity(subject, ids, num_prefix=10, window=50)
    with torch.inference_mode():
        logprobs = torch.log_softmax(reference(torch.tensor([ids])).logits[0].float(), -1)
    wanted = [float(logprobs[at - 1, ids[at]]) for at in range(10, len(ids))]
    # The model is served in bfloat16.
    assert result.perplexity == pytest.approx(math.exp(-sum(wanted) / len(wanted)), rel=0.02)
    assert [first for first, _ in result.by_position] == list(range(10, len(ids), 50))
    assert result.num_tokens == len(wanted)


def test_what_the_model_cannot_hold_is_refused_before_anything_runs(
    builtin: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = builtin(0.5)
    before = subject.model.stats().num_steps
    with pytest.raises(ValueError, match=r"passkey documents of at most 8192 tokens.*got 8[2-9]"):
        passkey_accuracy(subject, PasskeyTask(8185, 1, 1, 4))
    with pytest.raises(ValueError, match="haystacks of at most 8192"):
        NeedleGrid((100, 8190), (0.5,), passkey_words=4).check(subject)
    # Far too long texts are not even written.
    with monkeypatch.context() as patch:
        patch.setattr(PasskeyTask, "documents", None)
        with pytest.raises(ValueError, match=r"passkey documents of at most 8192 tokens.*got 9000000"):
            passkey_accuracy(subject, PasskeyTask(9_000_000))
        with pytest.raises(ValueError, match=r"haystacks of at most 8192 tokens.*got 9000000"):
            NeedleGrid((9_000_000,), (0.5,)).check(subject)
    with pytest.raises(ValueError, match="a text of at most 8192"):
        stream_perplexity(subject, [5] * 8193)
    with pytest.raises(ValueError, match="more than 8 tokens, the prefix, got 8"):
        stream_perplexity(subject, [5] * 8, num_prefix=8)
    assert subject.model.stats().num_steps == before


class Lossy:
    """Knows every word but "walrus"; its unknown token also begins a text, as OPT's does, and ends it."""

    unk_token, unk_token_id = "</s>", 2

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        ids = [2 if word in ("walrus", "</s>") else 9 for word in text.split()]
        return {"input_ids": [2, *ids] if add_special_tokens else ids}


def test_a_tokenizer_that_cannot_encode_is_named(builtin: Load) -> None:
    tokenizer: Any = Lossy()
    with pytest.raises(ValueError, match="can encode 'a walrus', got its unknown token '</s>' in 1 of 2"):
        encode_known(tokenizer, "a walrus", is_start=True)
    with pytest.raises(ValueError, match="got its unknown token '</s>' in 1 of 3"):
        encode_known(tokenizer, "</s> a walrus")
    with pytest.raises(ValueError, match="got no tokens"):
        builtin(0.5).encode("")


def test_an_unknown_token_that_also_begins_texts_or_is_written_in_one_is_no_failure() -> None:
    tokenizer: Any = Lossy()
    assert encode_known(tokenizer, "a bear", is_start=True) == [2, 9, 9]
    assert encode_known(tokenizer, "hello </s> bear") == [9, 2, 9]


def test_what_a_tokenizer_puts_behind_a_text_is_left_out() -> None:
    class Ending(Lossy):
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            ids = super().__call__(text, add_special_tokens)["input_ids"]
            return {"input_ids": [*ids, 2] if add_special_tokens else ids}

    tokenizer: Any = Ending()
    assert encode_known(tokenizer, "a bear", is_start=True) == [2, 9, 9]


@pytest.mark.parametrize(
    "make",
    [
        lambda: PasskeyTask(0),
        lambda: PasskeyTask(100, num_documents=0),
        lambda: NeedleGrid((), (0.5,)),
        lambda: NeedleGrid((100,), (1.5,)),
        lambda: NeedleGrid((100, 100), (0.5,)),
    ],
)
def test_tasks_without_sense_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()
