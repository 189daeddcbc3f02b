"""Processors, criteria and scores of transformers' ``generate``, compared with it token by token."""

from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    WatermarkingConfig,
)
from transformers.generation import GenerateDecoderOnlyOutput

from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.generation.arguments import read_generation
from hpu_duo.generation.call import GenerateCall, Questions
from hpu_duo.generation.processing import Hooks, WholeModel
from tests.engine.test_generate_like_transformers import LENGTHS, left_padded
from tests.engine.tiny import Tiny, assert_holds_nothing
from tests.modeling.families import VOCAB, greedy, prompts_of

PROMPTS = prompts_of(LENGTHS, seed=2)
NUM_NEW = 10
SCORED: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.fixture(scope="module")
def served(tiny: Tiny) -> HPUDuoModel:
    return tiny.load()


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> list[list[int]]:
    """The tokens of each prompt without processors."""
    return [greedy(tiny.model, prompt, NUM_NEW) for prompt in PROMPTS]


def both(tiny: Tiny, served: HPUDuoModel, **kwargs: Any) -> tuple[Any, Any]:
    tokens, mask = left_padded(PROMPTS)
    kwargs = {"attention_mask": mask, "max_new_tokens": NUM_NEW, **kwargs}
    ours = served.generate(tokens, **kwargs)
    assert_holds_nothing(served)
    return ours, tiny.model.generate(tokens, **kwargs)


class NoEvenTokens(LogitsProcessor):
    """Forbids even tokens, from the third new one on."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < max(LENGTHS) + 2:
            return scores
        scores = scores.clone()
        scores[:, ::2] = -torch.inf
        return scores


EOS = list(range(10, 60, 3))
PROCESSED: list[dict[str, Any]] = [
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 0.4},
    {"bad_words_ids": [[int(token)] for token in range(3, 90, 2)]},
    {"bad_words_ids": [[5, 6], [7]], "eos_token_id": EOS},
    {"suppress_tokens": list(range(20, 70))},
    {"begin_suppress_tokens": list(range(20, 70))},
    {"sequence_bias": {(30,): 7.0, (30, 31): 12.0}},
    {"sequence_bias": [[[30], 7.0], [[31], -9.0]]},
    {"suppress_tokens": [3], "eos_token_id": EOS, "min_new_tokens": 4},
    {"suppress_tokens": [3], "eos_token_id": EOS, "min_length": 15},
    {"suppress_tokens": [3], "repetition_penalty": 1.7},
    {"encoder_repetition_penalty": 2.0},
    {"encoder_no_repeat_ngram_size": 1},
    {"forced_bos_token_id": 7, "forced_eos_token_id": 8},
    {"exponential_decay_length_penalty": (2, 1.9), "eos_token_id": 40},
    {"remove_invalid_values": True, "renormalize_logits": True},
    {"watermarking_config": WatermarkingConfig(bias=9.0)},
    {"logits_processor": LogitsProcessorList([NoEvenTokens()])},
    {"logits_processor": [SuppressTokensLogitsProcessor([5, 6])], "suppress_tokens": [7]},
    {"prefix_allowed_tokens_fn": lambda batch_id, ids: [3 + 9 * batch_id, 4 + len(ids) % 5, 50 + batch_id]},
    {"generation_config": GenerationConfig(suppress_tokens=[41, 42, 43], max_new_tokens=6)},
]


@pytest.mark.parametrize("kwargs", PROCESSED, ids=lambda kwargs: "-".join(kwargs))
def test_processed_tokens_and_scores_are_those_of_transformers(
    tiny: Tiny, served: HPUDuoModel, plain: list[list[int]], kwargs: dict[str, Any]
) -> None:
    ours, theirs = both(tiny, served, **kwargs, **SCORED)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert_scores_agree(ours, theirs)
    without, _ = both(tiny, served, **kwargs)
    assert torch.equal(without, ours.sequences)


def assert_scores_agree(ours: GenerateDecoderOnlyOutput, theirs: GenerateDecoderOnlyOutput) -> None:
    """Equal where a row has not ended; those that have are zero."""
    assert type(ours) is type(theirs)
    new = ours.sequences.shape[1] - max(LENGTHS)
    for name in ("scores", "logits"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert len(mine) == len(other) == new
        for step, (a, b) in enumerate(zip(mine, other)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            is_live = torch.tensor([bool(row.any()) for row in ours.logits[step]])
            assert step or is_live.all()
            torch.testing.assert_close(a[is_live], b[is_live], atol=1e-4, rtol=1e-4)
            assert not a[~is_live].any()


WARPED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 7, "top_p": 0.8, "min_p": 0.05},
    {"typical_p": 0.4},
    {"epsilon_cutoff": 0.05},
    {"eta_cutoff": 0.1, "top_k": 0},
    {"top_h": 0.5},
    {"typical_p": 0.6, "no_repeat_ngram_size": 2, "renormalize_logits": True, "min_p": 0.01},
]


@pytest.mark.parametrize("kwargs", WARPED, ids=lambda kwargs: "-".join(kwargs) or "plain")
def test_scores_that_tokens_are_drawn_from_are_those_of_transformers(
    tiny: Tiny, served: HPUDuoModel, kwargs: dict[str, Any]
) -> None:
    if "top_h" in kwargs and not hasattr(GenerationConfig(), "top_h"):
        with pytest.raises(ValueError, match="top_h"):
            served.generate(PROMPTS, do_sample=True, **kwargs)
        return
    # Their first step has our input; the others depend on what was drawn.
    ours, theirs = both(tiny, served, do_sample=True, max_new_tokens=1, **kwargs, **SCORED)
    for mine, other in zip((*ours.scores, *ours.logits), (*theirs.scores, *theirs.logits)):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    assert torch.isfinite(ours.scores[0].gather(1, ours.sequences[:, -1:])).all()


def test_draws_on_the_host_are_those_of_the_device(served: HPUDuoModel) -> None:
    kwargs: dict[str, Any] = {
        "do_sample": True,
        "top_k": 9,
        "top_p": 0.9,
        "seed": 4,
        "max_new_tokens": NUM_NEW,
    }
    kwargs |= {"num_return_sequences": 3, "logit_bias": {7: 4.0}, "presence_penalty": 1.5}
    kwargs |= {"frequency_penalty": 0.5, "repetition_penalty": 1.2}
    on_device = served.generate(PROMPTS[:2], **kwargs)
    on_host = served.generate(PROMPTS[:2], **kwargs, **SCORED)
    assert torch.equal(on_host.sequences, on_device)
    assert on_host.scores[0].shape == (6, VOCAB)


def test_the_prefix_function_gets_the_number_of_the_prompt(tiny: Tiny, served: HPUDuoModel) -> None:
    kwargs: dict[str, Any] = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 2}
    kwargs["prefix_allowed_tokens_fn"] = lambda batch_id, ids: [11 + batch_id]
    ours, theirs = both(tiny, served, **kwargs)
    assert ours.tolist() == theirs.tolist()
    assert ours[:, -1].tolist() == [11 + row // 2 for row in range(len(ours))]


@pytest.mark.slow
def test_drawn_tokens_follow_the_processed_distribution(tiny: Tiny, served: HPUDuoModel) -> None:
    kwargs: dict[str, Any] = {"do_sample": True, "typical_p": 0.5, "temperature": 2.0, "top_k": 0}
    many = served.generate(
        PROMPTS[:1], num_return_sequences=300, max_new_tokens=1, seed=2, **kwargs, **SCORED
    )
    expected = many.scores[0][0].softmax(-1)
    counts = torch.bincount(many.sequences[:, -1], minlength=VOCAB) / 300
    assert (counts - expected).abs().max() < 4 * 0.5 / 300**0.5
    assert counts[expected == 0].sum() == 0


@pytest.mark.parametrize("flags", [{}, {"output_scores": True}, {"output_logits": True}])
def test_a_dictionary_holds_what_was_asked_for(
    tiny: Tiny, served: HPUDuoModel, plain: list[list[int]], flags: dict[str, bool]
) -> None:
    ours, theirs = both(tiny, served, return_dict_in_generate=True, **flags)
    assert set(ours.keys()) == set(theirs.keys()) - {"past_key_values", "cache"}
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    only, _ = both(tiny, served, **flags)
    assert torch.equal(only, ours.sequences)


def test_returned_scores_may_be_changed(served: HPUDuoModel) -> None:
    scores = served.generate(PROMPTS, max_new_tokens=2, **SCORED).scores
    scores[0][0, 0] = 1.0
    assert not scores[0].is_inference()


class AtLength(StoppingCriteria):
    """Ends a row at a token, and notes what it was called with."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: list[tuple[torch.Size, int | None]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids.shape, None if scores is None else len(scores)))
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("is_scored", [True, False])
def test_a_stopping_criterion_ends_its_row(
    tiny: Tiny, served: HPUDuoModel, plain: list[list[int]], is_scored: bool
) -> None:
    prompt, new = torch.tensor(PROMPTS[:1]), plain[0]
    seen = []
    for model in (served, tiny.model):
        criterion = AtLength(new[4])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_NEW,
            stopping_criteria=StoppingCriteriaList([criterion]),
            **(SCORED if is_scored else {}),
        )
        sequences = output.sequences if is_scored else output
        assert sequences.tolist() == [PROMPTS[0] + new[: new.index(new[4]) + 1]]
        seen.append(criterion.seen)
    assert seen[0] == seen[1]


def test_a_criterion_of_one_row_leaves_the_others(served: HPUDuoModel, plain: list[list[int]]) -> None:
    output = served.generate(
        PROMPTS, max_new_tokens=NUM_NEW, pad_token_id=9, stopping_criteria=[AtLength(plain[0][4])]
    )
    for row, prompt, new in zip(output.tolist(), PROMPTS, plain):
        kept = new[: new.index(plain[0][4]) + 1] if plain[0][4] in new else new
        assert row == prompt + kept + [9] * (len(row) - len(prompt) - len(kept))


def test_time_that_is_up_ends_every_row_with_its_first_token(
    served: HPUDuoModel, plain: list[list[int]]
) -> None:
    output = served.generate(PROMPTS, max_new_tokens=NUM_NEW, max_time=1e-9)
    assert [row[len(prompt)] for row, prompt in zip(output.tolist(), PROMPTS)] == [new[0] for new in plain]
    assert output.shape == (len(PROMPTS), max(LENGTHS) + 1)


def test_transition_scores_are_those_of_transformers(tiny: Tiny, served: HPUDuoModel) -> None:
    ours, theirs = both(tiny, served, suppress_tokens=[41], **SCORED)
    for normalizes in (True, False):
        mine, other = (
            model.compute_transition_scores(output.sequences, output.scores, normalize_logits=normalizes)
            for model, output in ((served, ours), (tiny.model, theirs))
        )
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"num_blocks": 9, "max_model_len": 60}, {"graphs": CompileBackend("eager")}, {"dtype": "bfloat16"}],
)
def test_scores_do_not_depend_on_how_steps_run(tiny: Tiny, options: dict[str, Any]) -> None:
    """Preempted requests, compiled steps, and logits of another type."""
    other = tiny.load(**options)
    prompts = prompts_of([13, 5, 22, 9])
    kwargs: dict[str, Any] = {"max_new_tokens": 30, "no_repeat_ngram_size": 2, **SCORED}
    done = other.generate(prompts, **kwargs)
    assert_holds_nothing(other)
    if "num_blocks" in options:
        assert other.stats().num_preemptions > 0
    expected = tiny.load(**({"dtype": "bfloat16"} if "dtype" in options else {})).generate(prompts, **kwargs)
    assert done.sequences.tolist() == expected.sequences.tolist()
    for mine, theirs in zip((*done.scores, *done.logits), (*expected.scores, *expected.logits), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_a_step_that_is_computed_again_leaves_one_score_per_token(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tiny.load()
    expected = served.generate(PROMPTS, max_new_tokens=5, **SCORED)
    call = GenerateCall(
        WholeModel(served.config),
        read_generation(GenerationConfig(), None, {"max_new_tokens": 5, **SCORED}, VOCAB),
        Questions(PROMPTS, PROMPTS, PROMPTS),
        Hooks.read(None, None, None),
    )
    runner, num_runs = served.engine.runner, 0
    launch, finish = runner.launch, runner.finish

    def launch_twice(*args: Any) -> Any:
        nonlocal num_runs
        num_runs += 1
        launch(*args)
        return launch(*args)

    def finish_twice(handle: Any) -> Any:
        finish(handle)
        return finish(handle)

    monkeypatch.setattr(runner, "launch", launch_twice)
    monkeypatch.setattr(runner, "finish", finish_twice)
    done: Any = call.run(served.engine)
    assert num_runs >= 5
    assert done.sequences.tolist() == expected.sequences.tolist()
    for mine, theirs in zip((*done.scores, *done.logits), (*expected.scores, *expected.logits), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_a_streamer_gets_tokens_that_are_chosen_on_the_host(served: HPUDuoModel) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.got: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.got.append(-1)

    streamer = Streamer()
    output = served.generate(PROMPTS[:1], streamer=streamer, max_new_tokens=5, suppress_tokens=[41])
    assert streamer.got == [*output[0].tolist(), -1]


def test_an_end_token_that_a_processor_insists_on_ends_the_row_before_its_minimum(
    tiny: Tiny, served: HPUDuoModel
) -> None:
    """A processor may undo what forbids the token."""

    def insists(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(VOCAB) == 40, 99.0) if ids.shape[1] > 14 else scores

    ours, theirs = both(tiny, served, logits_processor=[insists], eos_token_id=40, min_new_tokens=8)
    assert ours.tolist() == theirs.tolist()
    assert ours.shape[1] == max(LENGTHS) + 4
