from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.sampling import PenaltyState, SamplingParams

TOKENS = st.lists(st.integers(0, 40), max_size=60)


def _codes(state: PenaltyState | None) -> dict[int, float]:
    assert state is not None
    return dict(zip(state.token_ids.tolist(), state.codes.tolist()))


@given(TOKENS, TOKENS)
def test_codes_count_the_output_and_mark_the_prompt(prompt: list[int], output: list[int]) -> None:
    state = PenaltyState.from_token_ids(SamplingParams(repetition_penalty=1.2), prompt, output)
    counts = Counter(output)
    assert _codes(state) == {token: 2 * counts[token] + 1 for token in {*prompt, *output}}


@given(TOKENS, TOKENS)
def test_presence_alone_does_not_need_the_prompt(prompt: list[int], output: list[int]) -> None:
    state = PenaltyState.from_token_ids(SamplingParams(presence_penalty=0.5), prompt, output)
    assert _codes(state) == {token: 2 * count + 1 for token, count in Counter(output).items()}


@given(TOKENS, TOKENS, st.integers(0, 60))
def test_rebuilding_after_a_preemption_gives_the_state_that_was_appended_to(
    prompt: list[int], output: list[int], at: int
) -> None:
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1)
    grown = PenaltyState.from_token_ids(params, prompt, output[:at])
    assert grown is not None
    for token in output[at:]:
        grown.append(token)
    rebuilt = PenaltyState.from_token_ids(params, prompt, output)
    assert _codes(grown) == _codes(rebuilt)
    assert len(set(grown.token_ids.tolist())) == len(grown.token_ids)


def test_no_state_without_penalties() -> None:
    assert PenaltyState.from_token_ids(SamplingParams(), [1, 2, 3]) is None
