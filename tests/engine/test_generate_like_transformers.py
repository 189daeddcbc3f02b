"""``generate`` in transformers' habits: the same arguments give the same tensor."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    TextIteratorStreamer,
    TextStreamer,
)

from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import Tiny, assert_holds_nothing, text_of
from tests.modeling.families import VOCAB, greedy, prompts_of

pytestmark = pytest.mark.instruction_set

PAD = 0
LENGTHS = [12, 3, 9, 1]


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    tokens = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return tokens, mask


@pytest.fixture(scope="module")
def served(tiny: Tiny) -> HPUDuoModel:
    return tiny.load()


def both(tiny: Tiny, served: HPUDuoModel, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ours = served.generate(*args, **kwargs)
    assert_holds_nothing(served)
    theirs = tiny.model.generate(*args, **kwargs)
    assert ours.dtype == torch.int64
    return ours, theirs


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_new_tokens": 7},
        {},
        {"max_length": 15},
        {"max_length": 20},
        {"max_length": 40, "max_new_tokens": 5},
        {"max_new_tokens": 18, "eos_token_id": list(range(30, 50))},
        {"max_new_tokens": 18, "eos_token_id": list(range(30, 50)), "min_new_tokens": 6},
        {"max_new_tokens": 18, "eos_token_id": list(range(30, 50)), "min_length": 20},
        {"max_new_tokens": 18, "eos_token_id": list(range(10, 80)), "pad_token_id": 2},
        {"max_new_tokens": 9, "repetition_penalty": 1.8},
        {"max_new_tokens": 9, "num_beams": 1, "use_cache": True, "return_dict_in_generate": False},
        {"generation_config": GenerationConfig(max_new_tokens=6, eos_token_id=[40, 41, 42], pad_token_id=5)},
        {"generation_config": GenerationConfig(max_length=20, field_of_its_own=3)},
    ],
    ids=lambda kwargs: "-".join(kwargs) or "defaults",
)
@pytest.mark.parametrize("with_mask", [True, False])
def test_left_padded_batches_give_the_tensor_that_transformers_gives(
    tiny: Tiny, served: HPUDuoModel, kwargs: dict[str, Any], with_mask: bool
) -> None:
    tokens, mask = left_padded(prompts_of(LENGTHS, seed=2))
    if with_mask:
        kwargs = {**kwargs, "attention_mask": mask}
    ours, theirs = both(tiny, served, tokens, **kwargs)
    assert ours.tolist() == theirs.tolist()


def test_pad_ids_are_not_guessed_to_be_padding_when_they_may_end_a_text(
    tiny: Tiny, served: HPUDuoModel
) -> None:
    tokens, _ = left_padded(prompts_of(LENGTHS, seed=2))
    ours, theirs = both(tiny, served, tokens, max_new_tokens=5, eos_token_id=PAD)
    assert ours.tolist() == theirs.tolist()
    ours, theirs = both(tiny, served, tokens, max_new_tokens=5, eos_token_id=[5, PAD], pad_token_id=None)
    assert ours.tolist() == theirs.tolist()


def test_what_a_tokenizer_returns_can_be_passed_on(tiny: Tiny, served: HPUDuoModel) -> None:
    batch = AutoTokenizer.from_pretrained(tiny.path)(
        ["abc", "xyz"], return_tensors="pt", return_token_type_ids=False
    )
    assert served.generate(**batch, max_new_tokens=4).tolist() == (
        tiny.model.generate(**batch, max_new_tokens=4, do_sample=False).tolist()
    )


def test_lists_of_different_lengths_are_padded_on_the_right(tiny: Tiny, served: HPUDuoModel) -> None:
    prompts = prompts_of(LENGTHS)
    output = served.generate(prompts, max_new_tokens=6, pad_token_id=9)
    assert output.shape == (4, 12 + 6)
    for row, prompt in zip(output.tolist(), prompts):
        assert row == prompt + greedy(tiny.model, prompt, 6) + [9] * (12 - len(prompt))


def test_num_return_sequences_repeats_each_prompt_with_draws_of_its_own(served: HPUDuoModel) -> None:
    prompts = prompts_of([6, 6])
    kwargs: dict[str, Any] = {
        "do_sample": True,
        "num_return_sequences": 3,
        "max_new_tokens": 8,
        "seed": 1,
        "temperature": 1.5,
    }
    output = served.generate(torch.tensor(prompts), **kwargs)
    assert output.shape == (6, 14)
    assert [row[:6] for row in output.tolist()] == [prompts[0]] * 3 + [prompts[1]] * 3
    assert len({tuple(row) for row in output.tolist()}) == 6
    assert torch.equal(output, served.generate(torch.tensor(prompts), **kwargs))


def test_sampling_follows_the_distribution_that_transformers_samples_from(
    tiny: Tiny, served: HPUDuoModel
) -> None:
    """Frequencies of 400 first tokens, with top_k's default of 50 cut to 4 by the caller."""
    prompt = prompts_of([5])[0]
    output = served.generate(
        [prompt], do_sample=True, temperature=2.0, top_k=4, num_return_sequences=400, max_new_tokens=1, seed=2
    )
    counts = torch.bincount(output[:, -1], minlength=VOCAB) / 400
    with torch.no_grad():
        logits = tiny.model(torch.tensor([prompt])).logits[0, -1] / 2.0
    kept = logits.topk(4).indices
    expected = torch.zeros(VOCAB).index_copy(0, kept, logits[kept].softmax(0))
    # Four standard deviations of the least certain frequency.
    assert (counts - expected).abs().max() < 4 * 0.5 / 400**0.5
    assert counts[expected == 0].sum() == 0


def test_a_stop_string_ends_the_row_with_the_token_that_completes_it(tiny: Tiny, served: HPUDuoModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.path)
    prompt = prompts_of([11], seed=1)[0]
    new = greedy(tiny.model, prompt, 12)
    kwargs: dict[str, Any] = {
        "stop_strings": [text_of(new[4:6])],
        "max_new_tokens": 12,
        "tokenizer": tokenizer,
    }
    ours, theirs = both(tiny, served, torch.tensor([prompt]), **kwargs)
    assert ours.tolist() == theirs.tolist() == [prompt + new[:6]]


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_a_text_streamer_prints_what_it_prints_for_transformers(
    tiny: Tiny, served: HPUDuoModel, capsys: pytest.CaptureFixture[str], skip_prompt: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.path)
    prompt = torch.tensor(prompts_of([7]))
    printed = []
    for model in (served, tiny.model):
        model.generate(prompt, streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt), max_new_tokens=9)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


def test_a_streamer_prints_nothing_of_other_requests(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    served = tiny.load()
    tokenizer = AutoTokenizer.from_pretrained(tiny.path)
    prompt = torch.tensor(prompts_of([7]))
    served.generate(prompt, streamer=TextStreamer(tokenizer), max_new_tokens=9)
    alone = capsys.readouterr().out
    served.engine.add_request(prompts_of([20], seed=5)[0])
    served.generate(prompt, streamer=TextStreamer(tokenizer), max_new_tokens=9)
    assert capsys.readouterr().out == alone


class Recorder:
    """A streamer that notes what it gets, and may fail at the n-th thing."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.got: list[Any] = []
        self._fails_at = fails_at

    def put(self, value: torch.Tensor) -> None:
        if len(self.got) == self._fails_at:
            raise RuntimeError("the reader is gone")
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


def test_a_streamer_gets_the_prompt_then_each_token_then_the_end(tiny: Tiny, served: HPUDuoModel) -> None:
    prompt, streamer = prompts_of([7])[0], Recorder()
    served.generate([prompt], streamer=streamer, max_new_tokens=3)
    assert streamer.got == [[prompt], *([token] for token in greedy(tiny.model, prompt, 3)), "end"]


@pytest.mark.parametrize("prompt", [[5, VOCAB], list(range(5, 90)) * 2, []], ids=["unknown", "long", "empty"])
def test_a_streamer_gets_nothing_of_a_refused_prompt_but_the_end(
    served: HPUDuoModel, prompt: list[int]
) -> None:
    streamer = Recorder()
    with pytest.raises(ValueError):
        served.generate([prompt], streamer=streamer, max_new_tokens=3)
    assert streamer.got == ["end"]
    assert_holds_nothing(served)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_streamer_is_ended_when_generation_is_interrupted(served: HPUDuoModel, fails_at: int) -> None:
    streamer = Recorder(fails_at)
    with pytest.raises(RuntimeError, match="the reader is gone"):
        served.generate(prompts_of([7]), streamer=streamer, max_new_tokens=3)
    assert len(streamer.got) == fails_at + 1
    assert streamer.got[-1] == "end"
    assert_holds_nothing(served)


def test_the_reader_of_a_text_iterator_is_let_go_when_the_prompt_is_refused(
    tiny: Tiny, served: HPUDuoModel
) -> None:
    streamer = TextIteratorStreamer(AutoTokenizer.from_pretrained(tiny.path), timeout=20)
    with pytest.raises(ValueError, match="temperature"):
        served.generate(prompts_of([7]), streamer=streamer, temperature=-1.0)
    assert "".join(streamer) == ""


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": 4},
        {"num_beams": 2, "num_beam_groups": 2},
        {"assistant_model": object()},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"inputs_embeds": torch.zeros(1, 2, 3)},
        {"past_key_values": ()},
        {"guidance_scale": 1.5},
        {"logits_processor": [3]},
        {"logits_processor": print},
        {"stopping_criteria": ["stop"]},
        {"prefix_allowed_tokens_fn": 3},
        {"synced_gpus": True},
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"custom_generate": "someone/code"},
        {"max_time": 0},
        {"max_time": True},
        {"stop_strings": [""]},
        {"eos_token_id": VOCAB},
        {"eos_token_id": [1, 1.5]},
        {"eos_token_id": torch.tensor([VOCAB])},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [VOCAB]},
        {"bad_words_ids": 4},
        {"sequence_bias": {4: 1.0}},
        {"prompt_lookup_num_tokens": -1},
        {"nonsense": 1},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_unsupported_arguments_are_refused_by_name(served: HPUDuoModel, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        served.generate(prompts_of([4]), **kwargs)
    assert_holds_nothing(served)


def test_unsupported_fields_of_a_generation_config_are_refused_by_name(served: HPUDuoModel) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        served.generate(prompts_of([4]), generation_config=GenerationConfig(num_beams=3))


def test_arguments_that_ask_for_nothing_are_accepted(tiny: Tiny, served: HPUDuoModel) -> None:
    prompt = prompts_of([4])
    nothing: dict[str, Any] = {
        "streamer": None,
        "assistant_model": None,
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "synced_gpus": False,
        "logits_processor": LogitsProcessorList(),
        "stopping_criteria": [],
        "bad_words_ids": [],
        "early_stopping": True,
        "length_penalty": 2.0,
        "negative_prompt_ids": None,
    }
    output = served.generate(prompt, max_new_tokens=3, **nothing)
    assert output.tolist() == [prompt[0] + greedy(tiny.model, prompt[0], 3)]


@pytest.mark.parametrize(
    "form", [-1, [-1], torch.tensor(-1), [-1, 40], torch.tensor([40, 41]), torch.tensor(40)]
)
def test_eos_ids_come_in_every_form_that_transformers_takes(
    tiny: Tiny, served: HPUDuoModel, form: Any
) -> None:
    prompt = torch.tensor(prompts_of([12], seed=2))
    kwargs = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "max_new_tokens": 18}
    ours, theirs = both(tiny, served, prompt, eos_token_id=form, **kwargs)
    assert ours.tolist() == theirs.tolist()


def test_an_eos_id_of_the_checkpoint_beyond_the_vocabulary_disturbs_nobody(
    tiny: Tiny, tmp_path: Path
) -> None:
    for file in tiny.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    GenerationConfig(eos_token_id=[VOCAB + 3], pad_token_id=0).save_pretrained(tmp_path)
    odd = Tiny(tmp_path, tiny.model).load()
    prompt = prompts_of([9])[0]
    params = SamplingParams(temperature=0, max_tokens=5, min_tokens=3)
    assert odd.engine.generate([prompt], params)[0][0].token_ids == greedy(tiny.model, prompt, 5)
    assert odd.generate([prompt], max_new_tokens=5)[0, 9:].tolist() == greedy(tiny.model, prompt, 5)


def test_arguments_come_in_the_order_of_transformers(tiny: Tiny, served: HPUDuoModel) -> None:
    ours = list(inspect.signature(served.generate).parameters)
    theirs = list(inspect.signature(tiny.model.generate).parameters)
    assert ours[:8] == theirs[:8]


def test_equal_prompts_of_one_batch_draw_differently_and_reproducibly(served: HPUDuoModel) -> None:
    prompts = torch.tensor(prompts_of([6]) * 4)
    kwargs: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 8}
    drawn = served.generate(prompts, seed=5, **kwargs)
    assert len({tuple(row) for row in drawn.tolist()}) == 4
    assert torch.equal(drawn, served.generate(prompts, seed=5, **kwargs))
    assert not torch.equal(drawn, served.generate(prompts, seed=6, **kwargs))


def test_the_seed_of_torch_fixes_draws_without_a_seed(tiny: Tiny, served: HPUDuoModel) -> None:
    prompts = torch.tensor(prompts_of([6]) * 2)
    kwargs: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 8}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = (served.generate(prompts, **kwargs) for _ in range(2))
        torch.manual_seed(3)
        assert torch.equal(tiny.load().generate(prompts, **kwargs), first)
        assert not torch.equal(first, second)
        state = torch.get_rng_state()
        served.generate(prompts, max_new_tokens=3)
        served.generate(prompts, seed=1, **kwargs)
        assert torch.equal(torch.get_rng_state(), state)
