"""Functions of the caller that run on the host: tokens that they choose, and errors that they raise."""

from typing import Any

import numpy as np
import pytest
import torch

from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import Tiny, assert_holds_nothing
from tests.modeling.families import VOCAB, greedy, prompts_of

PROMPTS = prompts_of([9, 1, 14], seed=2)
NUM_NEW = 10


@pytest.fixture(scope="module")
def served(tiny: Tiny) -> HPUDuoModel:
    return tiny.load()


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> list[list[int]]:
    """The tokens of each prompt without functions."""
    return [greedy(tiny.model, prompt, NUM_NEW) for prompt in PROMPTS]


class Fixed:
    """A host sampler that chooses given tokens, and ends after some of them."""

    chooses = True

    def __init__(self, index: int) -> None:
        self.index = index

    def choose(self, output_ids: np.ndarray, logits: torch.Tensor, uniform: float) -> int:
        assert logits.shape == (VOCAB,)
        assert 0.0 < uniform < 1.0
        return 10 * self.index + len(output_ids)

    def ends(self, output_ids: np.ndarray) -> bool:
        return len(output_ids) == 3 + self.index


def test_a_host_sampler_chooses_for_its_row_alone(
    tiny: Tiny, served: HPUDuoModel, plain: list[list[int]]
) -> None:
    greedy_params = SamplingParams(temperature=0, max_tokens=NUM_NEW, repetition_penalty=1.0, logprobs=1)
    host_sampled = SamplingParams(n=2, max_tokens=NUM_NEW, host_sampler=Fixed)
    done = served.engine.generate(PROMPTS, [greedy_params, host_sampled, greedy_params])
    assert [sample.token_ids for sample in done[1]] == [[0, 1, 2], [10, 11, 12, 13]]
    assert [str(sample.finish_reason) for sample in done[1]] == ["stop", "stop"]
    assert [done[0][0].token_ids, done[2][0].token_ids] == [plain[0], plain[2]]


@pytest.mark.parametrize("token", [-1, VOCAB, None])
def test_a_choice_outside_the_vocabulary_ends_its_request_with_an_error(
    served: HPUDuoModel, plain: list[list[int]], token: Any
) -> None:
    class Outside(Fixed):
        def choose(self, *_: Any) -> Any:
            return token

    engine = served.engine
    bad = engine.add_request(PROMPTS[0], SamplingParams(host_sampler=Outside))
    good = engine.add_request(PROMPTS[1], SamplingParams(temperature=0, max_tokens=3))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [str(one.finish_reason) for one in outputs if one.request_id == bad] == ["error"]
    assert [one.token_ids[0] for one in outputs if one.request_id == good] == plain[1][:3]
    assert_holds_nothing(served)


@pytest.mark.parametrize("changes", [{"logprobs": 1}, {"forced_token_ids": [3]}, {"host_sampler": 3}])
def test_parameters_that_a_host_sampler_cannot_honour_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        SamplingParams(**{"host_sampler": Fixed, **changes})


def raising(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("not today")


@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"])
def test_what_a_function_raises_reaches_the_caller_and_leaves_nothing_behind(
    served: HPUDuoModel, plain: list[list[int]], where: str
) -> None:
    given = raising if where == "prefix_allowed_tokens_fn" else [raising]
    with pytest.raises(RuntimeError, match="not today"):
        served.generate(PROMPTS, max_new_tokens=3, **{where: given})
    assert_holds_nothing(served)
    assert served.generate(PROMPTS[:1], max_new_tokens=3).tolist() == [PROMPTS[0] + plain[0][:3]]


@pytest.mark.parametrize("result", [None, torch.zeros(3)])
def test_a_processor_that_gives_no_scores_is_named(served: HPUDuoModel, result: Any) -> None:
    with pytest.raises(ValueError, match="logits_processor: expected scores of shape"):
        served.generate(PROMPTS, logits_processor=[lambda ids, scores: result])
    assert_holds_nothing(served)


@pytest.mark.parametrize("draws", [True, False])
def test_scores_without_a_token_to_choose_are_an_error(served: HPUDuoModel, draws: bool) -> None:
    with pytest.raises(ValueError, match="to allow a token"):
        served.generate(
            PROMPTS[:1], do_sample=draws, logits_processor=[lambda ids, scores: scores - torch.inf]
        )
