"""The pieces from which the built-in model is trained: attention plans, batches, tokenizer."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from builtin_training.attention import HeadPlan, banded, causal
from builtin_training.batches import IGNORE, BatchMaker, Task
from builtin_training.export import export, load
from builtin_training.initialisation import Shape, build_model
from builtin_training.tokenizer import build_tokenizer
from builtin_training.training import CURRICULUM, Stage, Trainer, draw_plan, retrieval_plans

from hpu_duo.builtin import MODEL_DIR


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, seen: torch.Tensor
) -> torch.Tensor:
    """Reference for [B, K, G, T, D] queries: one head at a time, all scores, one boolean mask [T, T]."""
    out = torch.empty_like(q)
    for batch, head, group in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])):
        scores = q[batch, head, group] @ k[batch, head].T * scale
        out[batch, head, group] = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[batch, head]
    return out


@settings(max_examples=15, deadline=None)
@given(
    chunks=st.integers(1, 5), sink=st.integers(1, 12), recent=st.integers(1, 12), seed=st.integers(0, 2**31)
)
def test_banded_attention_obeys_the_streaming_rule(chunks: int, sink: int, recent: int, seed: int) -> None:
    torch.manual_seed(seed)
    num_tokens = chunks * recent
    q, k, v = torch.randn(1, 2, 2, num_tokens, 4), *torch.randn(2, 1, 2, num_tokens, 4)
    seen = torch.tensor(
        [[key < sink or p - recent < key for key in range(num_tokens)] for p in range(num_tokens)]
    ).tril()
    torch.testing.assert_close(banded(q, k, v, 0.5, sink, recent), dense(q, k, v, 0.5, seen))


@pytest.mark.parametrize("num_tokens", [64, 520])
def test_causal_attention_sees_every_earlier_token_on_both_of_its_paths(num_tokens: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 2, num_tokens, 8), *torch.randn(2, 1, 2, num_tokens, 8)
    seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    torch.testing.assert_close(causal(q, k, v, 0.3), dense(q, k, v, 0.3, seen))


def test_a_plan_with_all_heads_full_changes_nothing_and_one_without_any_does() -> None:
    model = build_model(seed=0).eval()
    ids = torch.randint(3, 1000, (1, 256), generator=torch.Generator().manual_seed(0))
    everything = HeadPlan(((0, 1, 2, 3),) * 4, sink=16, recent=64)
    nothing = HeadPlan(((),) * 4, sink=16, recent=64)
    with torch.inference_mode():
        plain, full, streaming = (
            model.model(ids, head_plan=plan).last_hidden_state for plan in (None, everything, nothing)
        )
    assert torch.equal(full, plain)
    torch.testing.assert_close(streaming[:, :64], plain[:, :64], msg="the first 64 tokens are in the window")
    assert not torch.allclose(streaming[:, 128:], plain[:, 128:])


def test_answer_targets_spell_the_answers_of_the_documents() -> None:
    tokenizer = build_tokenizer()
    batch = BatchMaker(tokenizer).make(Task(256, 4, (2, 3), (3, 5)), seed=1)
    assert batch.num_answers == int(batch.answer.max()) + 1
    for answer in range(batch.num_answers):
        row = int((batch.answer == answer).any(dim=1).nonzero())
        told = tokenizer.decode(batch.targets[row][batch.answer[row] == answer].tolist())
        text = tokenizer.decode(batch.ids[row].tolist())
        assert told.endswith(".")
        assert text.count(told + " Remember it.") == 1
        assert text.count(told) == 2, "once in the document, once behind the question"
    shifted = batch.targets[:, :-1]
    assert torch.equal(shifted[shifted != IGNORE], batch.ids[:, 1:][shifted != IGNORE])


def test_equal_seeds_make_equal_batches_and_fill_the_asked_length() -> None:
    maker = BatchMaker(build_tokenizer())
    for stage in CURRICULUM[:2]:
        first, second, other = (maker.make(stage.task, seed=seed) for seed in (5, 5, 6))
        assert torch.equal(first.ids, second.ids)
        assert not torch.equal(first.ids, other.ids)
        assert first.ids.shape == (stage.task.batch_size, stage.task.num_tokens)


def test_every_stage_trains_with_and_without_masks_in_its_own_window() -> None:
    rng = torch.Generator().manual_seed(0)
    for stage in CURRICULUM:
        plans = [draw_plan(stage, rng) for _ in range(50)]
        masked = {plan for plan in plans if plan is not None}
        assert None in plans
        assert {(plan.sink, plan.recent) for plan in masked} == {(stage.sink, stage.recent)}
        assert stage.task.num_tokens % stage.recent == 0


def test_the_shipped_tokenizer_is_the_one_that_training_builds() -> None:
    assert (MODEL_DIR / "tokenizer.json").read_text() == build_tokenizer().to_str(pretty=True)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training takes an optimiser of torch 2.9")
def test_a_model_of_other_sizes_is_trained_exported_and_scored_by_the_same_script(tmp_path: Path) -> None:
    shape = Shape(
        num_layers=8, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=4, head_dim=32
    )
    trainer = Trainer(BatchMaker(build_tokenizer()), 0, tmp_path / "state.pt", shape, lr=0.5)
    before = trainer.model.model.layers[3].mlp.up_proj.weight.clone()
    trainer.run((Stage(Task(64, 2, (1, 1), (1, 4)), 2, 1.0, masked=1.0, sink=4, recent=16),))
    assert not torch.equal(trainer.model.model.layers[3].mlp.up_proj.weight, before)
    export(trainer.model, tmp_path / "model", shape)
    loaded = load(tmp_path / "model", torch.bfloat16)
    assert (loaded.config.num_hidden_layers, loaded.config.hidden_size) == (8, 64)
    assert plan_layers(8) == {2: (0, 2), 4: (1, 3)}
    assert plan_layers(4) == {1: (0, 2), 2: (1, 3)}


def plan_layers(num_layers: int) -> dict[int, tuple[int, ...]]:
    """The layers with retrieval heads in the plan that has both pairs."""
    return {layer: heads for layer, heads in enumerate(retrieval_plans(num_layers)[0]) if heads}


@pytest.mark.parametrize("fields", [{"num_layers": 3}, {"num_kv_heads": 2}, {"head_dim": 24}])
def test_sizes_without_room_for_the_pairs_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Shape(**fields)


def test_training_attention_makes_its_masks_where_its_inputs_are() -> None:
    """The meta device stands for any that is not the default one: mixing devices fails on it."""
    q = torch.empty(1, 2, 2, 64, 8, device="meta")
    k = torch.empty(1, 2, 64, 8, device="meta")
    assert causal(q, k, k, 0.3).device == banded(q, k, k, 0.3, 4, 16).device == torch.device("meta")
