"""Stop strings in text that the detokenizer holds until its run of byte tokens has ended."""

import pytest
from transformers import PreTrainedTokenizerFast

from hpu_duo.engine.outputs import Completion
from hpu_duo.engine.samples import SampleState
from hpu_duo.engine.step_plan import CommittedToken
from hpu_duo.request import FinishReason, Request, TokenLimits
from hpu_duo.sampling import SamplingParams


def run(tokenizer: PreTrainedTokenizerFast, ids: list[int], stop: str) -> Completion:
    """The output that ends at the stop string or with the last id, after a prompt of one word."""
    params = SamplingParams(stop=stop, max_tokens=len(ids), include_stop_str_in_output=True)
    request = Request("a", ids[:1], params, TokenLimits(max_model_len=1000))
    state, done = SampleState(request, "a", (), tokenizer), Completion("a", 0)
    for number, token in enumerate(ids):
        output = state.take(CommittedToken(request, token, request.append(token), number), None)
        done.add(output)
        if output.is_finished:
            break
    return done


@pytest.mark.parametrize("behind", ["", "龍", "b"])
def test_a_stop_string_of_bytes_ends_the_output_with_its_last_byte(
    byte_fallback_tokenizer: PreTrainedTokenizerFast, behind: str
) -> None:
    stopped = byte_fallback_tokenizer.encode("a龍€", add_special_tokens=False)
    ids = byte_fallback_tokenizer.encode("a龍€" + behind, add_special_tokens=False)
    done = run(byte_fallback_tokenizer, ids, "龍€")
    assert (done.token_ids, done.text) == (stopped, " a龍€")
    assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, "龍€")


def test_a_stop_string_may_end_in_a_special_token_within_a_run(
    byte_fallback_tokenizer: PreTrainedTokenizerFast,
) -> None:
    first = byte_fallback_tokenizer.encode("a龍", add_special_tokens=False)
    tool = byte_fallback_tokenizer.convert_tokens_to_ids("<tool>")
    done = run(byte_fallback_tokenizer, [*first, tool, *first[-3:]], "龍<tool>")
    assert (done.token_ids, done.text, done.stop_reason) == ([*first, tool], " a龍", "龍<tool>")


def test_a_character_that_a_wrong_byte_undoes_stops_nothing_afterwards(
    byte_fallback_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokens = ["<0xC3>", "<0xA9>", "<0xE2>", "<0x61>", "a", "a"]
    ids = [byte_fallback_tokenizer.convert_tokens_to_ids(token) for token in tokens]
    done = run(byte_fallback_tokenizer, ids, "éa")
    assert done.text == byte_fallback_tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert done.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("stop", "is_found"), [("<tool>龍", False), ("龍<tool>b", True)])
def test_a_special_token_within_a_run_is_read_behind_what_came_before_it(
    byte_fallback_tokenizer: PreTrainedTokenizerFast, stop: str, is_found: bool
) -> None:
    first = byte_fallback_tokenizer.encode("a龍", add_special_tokens=False)
    tool, b = byte_fallback_tokenizer.convert_tokens_to_ids(["<tool>", "b"])
    done = run(byte_fallback_tokenizer, [*first, tool, b, b], stop)
    assert done.token_ids == ([*first, tool, b] if is_found else [*first, tool, b, b])
    assert done.stop_reason == (stop if is_found else None)
