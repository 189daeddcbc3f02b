"""Ends of outputs, and their reasons."""

from typing import Any

import pytest
import torch

from hpu_duo.engine.outputs import Completion
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import MAX_LEN, Tiny, serve, text_of
from tests.modeling.driving import teacher_forced
from tests.modeling.families import greedy, prompts_of

PROMPT = prompts_of([11], seed=1)[0]
NUM_NEW = 20


def greedy_params(**changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **{"max_tokens": NUM_NEW, **changes})


def run(tiny: Tiny, **changes: Any) -> Completion:
    """The prompt among others, with its own parameters."""
    params = [greedy_params(), greedy_params(**changes), greedy_params(max_tokens=3)]
    return serve(tiny.load(), [PROMPT[:5], PROMPT, PROMPT[:8]], params)[1][0]


@pytest.fixture(scope="module")
def full(tiny: Tiny) -> list[int]:
    """An output that nothing stops; its tokens are distinct enough to stop at one of them."""
    tokens = greedy(tiny.model, PROMPT, NUM_NEW)
    assert len(set(tokens[:12])) == 12
    return tokens


def test_a_stop_token_ends_the_output_and_stays_in_it(tiny: Tiny, full: list[int]) -> None:
    done = run(tiny, stop_token_ids=[full[6]])
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (full[:7], FinishReason.STOP, full[6])


def test_max_tokens_ends_the_output_with_reason_length(tiny: Tiny, full: list[int]) -> None:
    done = run(tiny, max_tokens=9)
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (full[:9], FinishReason.LENGTH, None)


def test_a_stop_string_ends_the_output_and_is_cut_from_the_text(tiny: Tiny, full: list[int]) -> None:
    stop = text_of(full[5:7])
    done = run(tiny, stop=[stop, "never"])
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (full[:7], FinishReason.STOP, stop)
    assert done.text == text_of(full[:5])
    kept = run(tiny, stop=stop, include_stop_str_in_output=True)
    assert kept.text == text_of(full[:7])


def test_min_tokens_forbids_stop_tokens_until_then(tiny: Tiny, full: list[int]) -> None:
    done = run(tiny, stop_token_ids=[full[2], full[6]], min_tokens=5)
    assert full[2] not in done.token_ids[:4]
    assert done.token_ids[:2] == full[:2]
    assert len(done.token_ids) >= 5


@pytest.fixture(scope="module")
def with_eos(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, full: list[int]) -> Tiny:
    """The same weights, with two end-of-text tokens that come up."""
    path = tmp_path_factory.mktemp("with_eos")
    for name in tiny.path.iterdir():
        (path / name.name).write_bytes(name.read_bytes())
    tiny.model.generation_config.__class__(eos_token_id=[full[6], full[9]], pad_token_id=0).save_pretrained(
        path
    )
    return Tiny(path, tiny.model)


def test_each_token_of_an_eos_list_ends_the_output_unless_ignored(with_eos: Tiny, full: list[int]) -> None:
    done = run(with_eos)
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (full[:7], FinishReason.STOP, None)
    assert run(with_eos, ignore_eos=True).token_ids == full
    assert full[6] not in run(with_eos, min_tokens=12).token_ids[:11]


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_reaching_max_model_len_ends_the_output_with_reason_length(
    tiny: Tiny, max_tokens: int | None
) -> None:
    done = serve(tiny.load(max_model_len=40), [PROMPT], greedy_params(max_tokens=max_tokens))[0][0]
    assert len(PROMPT) + len(done.token_ids) == 40
    assert done.finish_reason is FinishReason.LENGTH
    assert done.token_ids == greedy(tiny.model, PROMPT, 40 - len(PROMPT))


def cuts_told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "max_model_len=40" in record.getMessage()]


def test_a_call_whose_outputs_max_model_len_cuts_warns_once(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    served = tiny.load(max_model_len=40)
    asked = [greedy_params(max_tokens=1000, n=2), greedy_params(max_tokens=3), greedy_params(max_tokens=None)]
    caplog.clear()
    served.engine.generate([PROMPT] * 3, asked)
    (told,) = cuts_told(caplog)
    assert told.startswith(f"2 of 4 outputs ended at max_model_len=40, up to {1000 - 29} tokens before")
    served.generate([PROMPT], max_new_tokens=100)
    assert len(cuts_told(caplog)) == 2


def test_a_call_that_ends_as_asked_does_not_warn(
    tiny: Tiny, caplog: pytest.LogCaptureFixture, full: list[int]
) -> None:
    served = tiny.load(max_model_len=40)
    caplog.clear()
    asked = [greedy_params(max_tokens=29), greedy_params(max_tokens=100, stop_token_ids=[full[3]])]
    served.engine.generate([PROMPT] * 2, asked)
    assert not cuts_told(caplog)


def test_the_longest_prompt_leaves_room_for_one_token(tiny: Tiny) -> None:
    prompt = prompts_of([MAX_LEN - 1])[0]
    done = serve(tiny.load(), [prompt], greedy_params())[0][0]
    assert done.token_ids == greedy(tiny.model, prompt, 1)


@pytest.mark.parametrize("num_logprobs", [0, 5, 96])
def test_logprobs_are_the_log_softmax_of_the_models_logits(tiny: Tiny, num_logprobs: int) -> None:
    params = SamplingParams(
        temperature=1.4, seed=3, repetition_penalty=1.3, max_tokens=10, logprobs=num_logprobs
    )
    mates = [greedy_params(max_tokens=4), params, greedy_params(max_tokens=12, logprobs=2)]
    done = serve(tiny.load(), [PROMPT[:3], PROMPT, PROMPT[:7]], mates)[1][0]
    expected = torch.log_softmax(teacher_forced(tiny.model, PROMPT, done.token_ids), dim=-1)
    assert len(done.logprobs) == 10
    for entry, token, row in zip(done.logprobs, done.token_ids, expected):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert entry.rank == 1 + (row > row[token]).sum().item()
        best = row.topk(num_logprobs)
        assert list(entry.top) == best.indices.tolist()
        assert list(entry.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)
