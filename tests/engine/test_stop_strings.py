"""Stop strings made of special tokens, and those that begin in the prompt."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hpu_duo.engine.outputs import Completion
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import Tiny, make_tiny, serve, text_of
from tests.modeling.families import greedy, prompts_of

PROMPT = prompts_of([11], seed=1)[0]
NUM_NEW = 12
END, TURN = "<|im_end|>", "<s>"


@pytest.fixture(scope="module")
def new(tiny: Tiny) -> list[int]:
    """The output when nothing stops it."""
    return greedy(tiny.model, PROMPT, NUM_NEW)


@pytest.fixture(scope="module")
def special(tiny: Tiny, new: list[int], tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The same weights; the last token of the prompt and the fifth of the output are special."""
    path: Path = tmp_path_factory.mktemp("special")
    return make_tiny(path, {PROMPT[-1]: TURN, new[4]: END})


def run(tiny: Tiny, **changes: Any) -> Completion:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, **changes)
    return serve(tiny.load(), [PROMPT], params)[0][0]


@pytest.mark.parametrize("kind", ["whole", "behind text", "before text", "part"])
@pytest.mark.parametrize("skips", [True, False])
def test_stop_strings_of_special_tokens_end_the_output(
    special: Tiny, new: list[int], kind: str, skips: bool
) -> None:
    stop, length = {
        "whole": (END, 5),
        "behind text": (text_of(new[3:4]) + END, 5),
        "before text": (END + text_of(new[5:6]), 6),
        "part": (END[-6:], 5),
    }[kind]
    done = run(special, stop=stop, skip_special_tokens=skips)
    assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, stop)
    assert done.token_ids == new[:length]
    whole = text_of(new[:4]) + END + text_of(new[5:length])
    shown = whole[: whole.index(stop)]
    assert done.text == (shown[:4] if skips else shown)


def test_special_tokens_that_stop_nothing_stay_out_of_the_text(special: Tiny, new: list[int]) -> None:
    done = run(special, stop=["never", END + "never"])
    assert done.token_ids == new
    assert done.text == text_of(new[:4] + [token for token in new[5:] if token not in (new[4], PROMPT[-1])])


def generate(special: Tiny, stop: list[str], **changes: Any) -> tuple[list[int], list[int]]:
    """Our tokens and those of transformers for one prompt."""
    kwargs: dict[str, Any] = {
        "stop_strings": stop,
        "max_new_tokens": NUM_NEW,
        **changes,
        "tokenizer": AutoTokenizer.from_pretrained(special.path),
    }
    prompt = torch.tensor([PROMPT])
    ours = special.load().generate(prompt, **kwargs)[0].tolist()
    theirs = special.model.generate(prompt, attention_mask=torch.ones_like(prompt), **kwargs)[0].tolist()
    return ours, theirs


@pytest.mark.parametrize("kind", ["special", "across", "special across", "prompt only"])
def test_generate_stops_at_the_strings_that_stop_transformers(
    special: Tiny, new: list[int], kind: str
) -> None:
    stop, length = {
        "special": (END, 5),
        "across": (TURN[-1] + text_of(new[:2]), 2),
        "special across": (text_of(PROMPT[-2:-1]) + TURN + text_of(new[:1]), 1),
        "prompt only": (text_of(PROMPT[-2:-1]) + TURN, NUM_NEW),
    }[kind]
    ours, theirs = generate(special, [stop])
    assert ours == theirs == PROMPT + new[:length]


def test_a_stop_string_may_span_a_special_token_that_is_not_shown(special: Tiny, new: list[int]) -> None:
    stop = text_of(new[3:4]) + text_of(new[5:6])
    done = run(special, stop=stop)
    assert (done.token_ids, done.stop_reason, done.text) == (new[:6], stop, text_of(new[:3]))
    assert run(special, stop=stop, skip_special_tokens=False).token_ids == new
    ours, theirs = generate(special, [stop])
    assert ours == theirs == PROMPT + new


def test_stop_strings_of_generate_do_not_wait_for_a_minimum_of_tokens(special: Tiny, new: list[int]) -> None:
    ours, theirs = generate(special, [text_of(new[1:3])], min_new_tokens=8)
    assert ours == theirs == PROMPT + new[:3]
    assert run(special, stop=text_of(new[1:3]), min_tokens=8).token_ids == new


def test_an_engine_looks_for_stop_strings_in_the_output_alone(special: Tiny, new: list[int]) -> None:
    across = TURN + text_of(new[:1])
    assert run(special, stop=across).token_ids == new
    done = run(special, stop=across, stop_like_transformers=True)
    assert (done.token_ids, done.text, done.stop_reason) == (new[:1], "", across)
