"""Drafts that are not accepted leave no trace in states."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.modeling.recurrent import Cut, step_of
from kernels_ref import Convolution, Recurrence, Step
from kernels_ref.recurrent import DeltaRule, StateSpace, causal_convolution
from tests.recurrent import test_state_space
from tests.recurrent.test_delta_rule import inputs_of, token_by_token

CPU = torch.device("cpu")
SLACK = 3
DELTA = DeltaRule(num_heads=2, key_dim=4, value_dim=3, slack=SLACK)
SPACE = StateSpace(num_heads=2, num_groups=1, head_dim=4, state_dim=5, slack=SLACK)
CONVOLUTION = Convolution(26, 4, torch.float32, slack=SLACK)
WEIGHT = torch.linspace(-1, 1, 26 * 4).view(26, 4)
STEPS = st.lists(st.tuples(st.integers(1, SLACK + 1), st.integers(1, SLACK + 1), st.booleans()), max_size=8)


def states_of(kind: Recurrence) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((3, *each.shape), 7, dtype=each.dtype) for each in kind.tensors)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), STEPS)
def test_outputs_are_those_of_accepted_tokens_only(
    prompt_len: int, drawn: list[tuple[int, int, bool]]
) -> None:
    """Steps have up to four tokens of a row; prompts, and others beside it, are in steps without drafts."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randn(50, 2, 13, generator=generator)
    delta, space, inputs = states_of(DELTA), states_of(SPACE), states_of(CONVOLUTION)
    kinds: list[Recurrence] = [DELTA, SPACE, CONVOLUTION]

    def run(step: Step, x: torch.Tensor) -> list[torch.Tensor]:
        windows = CONVOLUTION.windows(x.flatten(1), *inputs, step)
        scanned = SPACE.attend(test_state_space.inputs_of(SPACE, x.flatten(1)), space, step)
        read = DELTA.attend(inputs_of(x), delta, step)
        return [read.flatten(1), scanned.flatten(1), causal_convolution(windows, WEIGHT)]

    found, start = [], 0
    if prompt_len > 1:
        cuts = [Cut(0, prompt_len), Cut(0, 2)]
        outputs = run(step_of(cuts, kinds, CPU), torch.cat([text[:prompt_len], text[:2]]))
        found.append([each[:prompt_len] for each in outputs])
        start = prompt_len
    for num_new, num_accepted, is_mixed in drawn:
        num_new = 1 if is_mixed else num_new
        num_accepted = min(num_new, num_accepted)
        drafts = torch.randn(num_new - num_accepted, 2, 13, generator=generator)
        tokens = torch.cat([text[start : start + num_accepted], drafts])
        cuts = [Cut(start, num_new), Cut(0, 9 if is_mixed else 1)]
        step = step_of(cuts, kinds, CPU, decode_len=1 if is_mixed else SLACK + 1)
        outputs = run(step, torch.cat([tokens, text[: cuts[1].num_new]]))
        found.append([each[:num_accepted] for each in outputs])
        start += num_accepted
    if not start:
        return
    of_delta, of_space, of_convolution = (torch.cat(pieces) for pieces in zip(*found))
    torch.testing.assert_close(of_delta, token_by_token(text[:start]).flatten(1), rtol=1e-4, atol=1e-4)
    expected = test_state_space.token_by_token(SPACE, text[:start].flatten(1)).flatten(1)
    torch.testing.assert_close(of_space.double(), expected, rtol=1e-4, atol=1e-4)
    alone = torch.nn.functional.pad(text[:start].flatten(1), (0, 0, 3, 0)).unfold(0, 4, 1)
    torch.testing.assert_close(of_convolution, (alone * WEIGHT).sum(dim=-1), rtol=1e-4, atol=1e-4)


def test_drafts_over_states_change_nothing_that_a_decode_begins_with() -> None:
    """A chain of drafts, of which the next decode accepts some, and a decode without any."""
    kind = replace(DELTA, drafts=True)
    generator = torch.Generator().manual_seed(2)
    text, state = torch.randn(30, 2, 13, generator=generator), states_of(kind)
    expected, start = token_by_token(text), 4
    kind.attend(inputs_of(text[:4]), state, step_of([Cut(0, 4)], [kind], CPU))
    for num_drafts, num_accepted in ((3, 4), (3, 1), (0, 1), (2, 3), (3, 2)):
        for number in range(num_drafts):
            step = step_of([Cut(start + number, 1)], [kind], CPU)._replace(is_draft=True)
            drafted = kind.attend(inputs_of(text[start + number, None]), state, step)
            torch.testing.assert_close(drafted[0], expected[start + number], rtol=1e-4, atol=1e-4)
        tokens = text[start : start + num_drafts + 1]
        step = step_of([Cut(start, len(tokens))], [kind], CPU, decode_len=SLACK + 1 if num_drafts else 1)
        found = kind.attend(inputs_of(tokens), state, step)
        torch.testing.assert_close(found, expected[start : start + len(tokens)], rtol=1e-4, atol=1e-4)
        start += num_accepted
