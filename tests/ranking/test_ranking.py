"""Rankers: their loss, their measure, what they learn, and their files."""

from __future__ import annotations

from itertools import permutations
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.lab.ranker_training import Examples, TrainingPlan, kendall_tau, list_mle, train
from hpu_duo.lab.traces import Arrival
from hpu_duo.scheduling.ranker import EncoderRanker, LinearRanker, Ranker, load_ranker, save_ranker
from tests.ranking.traffic import VOCAB_SIZE, traffic

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": VOCAB_SIZE}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "intermediate_size": 32, "max_position_embeddings": 48, **SMALL},
    "opt": {
        "model_type": "opt",
        "ffn_dim": 32,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": 48,
        **SMALL,
    },
}
MAKERS = {
    "linear": lambda: LinearRanker(1 << 12),
    **{name: lambda config=config: EncoderRanker(config) for name, config in CONFIGS.items()},
}


@settings(max_examples=50, deadline=None)
@given(scores=st.lists(st.floats(-4, 4), min_size=1, max_size=6), data=st.data())
def test_the_loss_is_that_of_drawing_the_shortest_first(scores: list[float], data: st.DataObject) -> None:
    lengths = data.draw(st.permutations(range(len(scores))))
    left, expected = [scores[lengths.index(place)] for place in range(len(scores))], 0.0
    while left:
        expected -= log(exp(-left[0]) / sum(exp(-score) for score in left)) / len(scores)
        left.pop(0)
    found = list_mle(torch.tensor(scores), torch.tensor(lengths), torch.Generator())
    assert float(found) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_loss_is_least_for_scores_in_the_order_of_lengths() -> None:
    lengths = torch.tensor([4, 1, 9, 2])
    losses = {
        order: float(list_mle(torch.tensor(order), lengths, torch.Generator()))
        for order in permutations([0.0, 1.0, 2.0, 3.0])
    }
    assert min(losses, key=losses.__getitem__) == (2.0, 0.0, 3.0, 1.0)


@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=20))
def test_tau_counts_pairs(pairs: list[tuple[int, int]]) -> None:
    one, other = zip(*pairs)
    agree = disagree = one_differs = other_differs = 0
    for i in range(len(pairs)):
        for j in range(i):
            product = (one[i] - one[j]) * (other[i] - other[j])
            agree, disagree = agree + (product > 0), disagree + (product < 0)
            one_differs += one[i] != one[j]
            other_differs += other[i] != other[j]
    scale = (one_differs * other_differs) ** 0.5
    assert kendall_tau(one, other) == pytest.approx((agree - disagree) / scale if scale else 0.0)


def test_tau_of_many_is_counted_in_slices() -> None:
    values = np.random.default_rng(0).permutation(1300)
    assert kendall_tau(values, values) == 1
    assert kendall_tau(values, -values) == -1
    with pytest.raises(ValueError, match="expected two lists of the same length, 2 or more"):
        kendall_tau([1.0], [1.0])


@pytest.mark.parametrize(
    ("name", "epochs", "rate"), [("linear", 8, 0.05), ("bert", 6, 3e-3), ("opt", 6, 3e-3)]
)
def test_a_ranker_learns_what_prompts_tell(name: str, epochs: int, rate: float) -> None:
    torch.manual_seed(0)
    ranker = MAKERS[name]()
    report = train(ranker, traffic(600), TrainingPlan(epochs, learning_rate=rate))
    fresh = traffic(300, seed=1)
    assert kendall_tau(ranker.score(fresh.prompts), fresh.lengths) > 0.5
    assert (report.num_examples, report.num_held_out) == (540, 60)
    assert report.held_out_tau > 0.45
    assert report.losses[-1] < report.losses[0]


def test_nothing_is_learned_where_prompts_tell_nothing() -> None:
    examples = traffic(600)
    shuffled = Examples(examples.prompts, np.random.default_rng(0).permutation(examples.lengths))
    assert abs(train(LinearRanker(1 << 12), shuffled).held_out_tau) < 0.25


@pytest.mark.parametrize("name", MAKERS)
def test_a_ranker_comes_back_from_its_files(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ranker, examples = MAKERS[name](), traffic(40)
    train(ranker, examples, TrainingPlan(epochs=1))
    save_ranker(ranker, tmp_path / "ranker")
    loaded = load_ranker(tmp_path / "ranker")
    assert type(loaded) is type(ranker)
    assert loaded.score(examples.prompts) == ranker.score(examples.prompts)
    with pytest.raises(ValueError, match="expected a directory without a model"):
        save_ranker(ranker, tmp_path / "ranker")


@pytest.mark.parametrize("name", MAKERS)
def test_a_score_depends_on_no_other_prompt_of_the_batch(name: str) -> None:
    torch.manual_seed(1)
    ranker: Ranker = MAKERS[name]().eval()
    with torch.no_grad():
        for parameter in ranker.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    prompts = [*traffic(6).prompts, np.arange(10, 60, dtype=np.int32).repeat(20)]
    together = ranker.score(prompts)
    assert together == pytest.approx([ranker.score([prompt])[0] for prompt in prompts], rel=1e-4, abs=1e-5)
    assert len(set(together)) == len(prompts)


def test_weights_beside_a_configuration_are_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = EncoderRanker(CONFIGS["bert"])
    first.model.save_pretrained(tmp_path)
    read = EncoderRanker.of(tmp_path, max_tokens=30)
    for name, each in first.model.state_dict().items():
        assert torch.equal(each, read.model.state_dict()[name])
    with pytest.raises(ValueError, match="expected a configuration of a model in"):
        EncoderRanker.of(tmp_path / "nothing")


@pytest.mark.parametrize("damage", ["no file", "kind", "weights", "settings"])
def test_files_that_are_no_ranker_are_refused(damage: str, tmp_path: Path) -> None:
    save_ranker(LinearRanker(1 << 12), tmp_path)
    settings_file, weights = tmp_path / "ranker.json", tmp_path / "model.safetensors"
    if damage == "no file":
        settings_file.unlink()
    elif damage == "weights":
        weights.write_bytes(b"none")
    else:
        text = settings_file.read_text()
        settings_file.write_text(text.replace("linear", "magic") if damage == "kind" else "[1]")
    with pytest.raises(ValueError, match="expected a ranker of hpu-duo train-ranker in"):
        load_ranker(tmp_path)


def test_tokens_that_an_encoder_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match=f"below vocab_size={VOCAB_SIZE} of the ranker, got {VOCAB_SIZE}"):
        EncoderRanker(CONFIGS["opt"]).score([[VOCAB_SIZE]])


def test_traces_without_texts_give_tokens_by_their_blocks() -> None:
    arrivals = [Arrival(0, 8, 5, block_ids=(block,), block_size=4) for block in (1, 2, 1)]
    first, second, third = Examples.of(arrivals).prompts
    assert first[:4].tolist() == third[:4].tolist() != second[:4].tolist()
    with pytest.raises(ValueError, match="expected a tokenizer for a trace with texts"):
        Examples.of([Arrival(0, 8, 5, text="hi")])


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"list_len": 1}, {"learning_rate": 0.0}, {"learning_rate": float("nan")}]
)
def test_wrong_plans_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected epochs of 1 or more"):
        TrainingPlan(**wrong)


def test_too_few_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 4 requests to learn from, got 3"):
        train(LinearRanker(), traffic(3))
    with pytest.raises(ValueError, match="expected a share above 0 and below 1"):
        train(LinearRanker(), traffic(9), TrainingPlan(held_out=1.0))
