"""Scores that are read off attention, against plain formulas."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.lab.identify import (
    Band,
    BuiltinHaystack,
    DatasetSettings,
    Encoder,
    Form,
    GatedModel,
    PasskeyDataset,
    Workers,
)
from hpu_duo.lab.identify.attention import Weighing
from hpu_duo.lab.identify.measure import (
    MEAN_QK_TOKENS,
    distant_mass,
    mean_qk_score,
    mean_qk_scores,
    measured,
    profile_scores,
    retrieval_scores,
)
from tests.identify.conftest import CPU
from tests.identify.induction import INDUCTION_HEAD
from tests.modeling.dense_oracle import sees
from tests.modeling.families import Zoo


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -0.5, 1.0, 0.0])])
def test_distant_mass_is_what_a_streaming_head_would_not_see(
    softcap: float | None, sinks: torch.Tensor | None
) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 90, 8), torch.randn(1, 2, 90, 8)
    positions = torch.tensor([3, 40, 41, *range(50, 90)])
    weighing, band = Weighing(0.4, softcap, sinks), Band(5, 12)
    got = distant_mass(q[:, :, positions], k, positions, weighing, band)
    for head in range(4):
        masses = []
        for place in positions.tolist():
            scores = q[0, head, place] @ k[0, head // 2, : place + 1].T * 0.4
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            total = scores.exp().sum() + (0 if sinks is None else sinks[head].exp())
            far = [not sees(place, key, 5, 12) for key in range(place + 1)]
            masses.append((scores.exp()[far].sum() / total).item())
        assert got[head].item() == pytest.approx(np.mean(masses), rel=1e-5)


def test_reach_is_one_half_for_even_attention_and_small_for_near_attention() -> None:
    even = mean_qk_score(torch.zeros(1, 2, 100, 4), torch.zeros(1, 2, 100, 4), Weighing(1.0))
    torch.testing.assert_close(even, torch.full((2,), 0.505, dtype=torch.float64))
    near = torch.zeros(1, 1, 100, 4)
    near[0, 0, -3:, 0] = 1.0
    assert mean_qk_score(torch.full((1, 1, 100, 4), 20.0), near, Weighing(1.0)).item() < 0.03


def test_the_hand_built_induction_head_has_the_largest_distant_mass(
    induction_model: GatedModel, small_dataset: PasskeyDataset
) -> None:
    scores = profile_scores(induction_model, small_dataset, 0, Band(4, 24))
    assert scores[INDUCTION_HEAD] > 0.9
    assert np.sort(scores.ravel())[-2] < 0.1


def test_retrieval_scores_are_those_of_decode_steps_with_eager_attention(
    small_dataset: PasskeyDataset,
) -> None:
    """The paper's definition: what a step attends to most, if it is the needle's token that the step says."""
    gated = GatedModel.load(MODEL_DIR, "float32", CPU)
    model = LlamaForCausalLM.from_pretrained(MODEL_DIR, attn_implementation="eager").float().eval()
    sample = small_dataset.sample(0)
    ids = sample.ids.tolist()
    hits = torch.zeros(gated.num_layers, model.config.num_attention_heads)
    num_tokens = 0
    for start, end, (first, last) in zip(sample.questions, sample.answer_ends, sample.needles):
        assert all(token in ids[first:last] for token in ids[start:end])
        for step in range(start, end):
            num_tokens += 1
            with torch.no_grad():
                out = model(torch.tensor([ids[:step]]), output_attentions=True, use_cache=False)
            if int(out.logits[0, -1].argmax()) != ids[step]:
                continue
            for layer, weights in enumerate(out.attentions):
                for head, key in enumerate(weights[0, :, -1].argmax(dim=-1).tolist()):
                    hits[layer, head] += first <= key < last and ids[key] == ids[step]
    expected = (hits / num_tokens).unflatten(1, (gated.num_kv_heads, -1)).amax(dim=2)
    got = retrieval_scores(gated, small_dataset, 0)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    # The model was trained with four heads that may retrieve.
    assert got.max() > 0.5
    assert (got < 0.1).sum() >= 8


def test_a_token_that_the_model_does_not_say_is_not_copied(
    small_dataset: PasskeyDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = GatedModel.load(MODEL_DIR, "float32", CPU)
    monkeypatch.setattr(GatedModel, "next_tokens", lambda self, hidden: torch.full(hidden.shape[:1], -1))
    assert not retrieval_scores(gated, small_dataset, 0).any()


def test_mean_query_and_key_are_those_before_rotation(encoder: Encoder) -> None:
    """The published recipe step by step, on a model of the kind it was written for."""
    dataset = PasskeyDataset(DatasetSettings(form=Form.NAMES), BuiltinHaystack(), encoder)
    got = mean_qk_scores(GatedModel.load(MODEL_DIR, "float32", CPU), dataset, 0)
    model = LlamaForCausalLM.from_pretrained(MODEL_DIR).float().eval()
    ids = torch.from_numpy(dataset.filler(0, MEAN_QK_TOKENS))[None]
    length = ids.shape[1]
    with torch.no_grad():
        states = model(ids, output_hidden_states=True, use_cache=False).hidden_states[:-1]
        for index, hidden in enumerate(states):
            layer = model.model.layers[index]
            normed = layer.input_layernorm(hidden)
            q, k = (
                project(normed)
                .view(1, length, -1, 64)
                .mean(1, keepdim=True)
                .repeat(1, length, 1, 1)
                .transpose(1, 2)
                for project in (layer.self_attn.q_proj, layer.self_attn.k_proj)
            )
            rotation = model.model.rotary_emb(normed, torch.arange(length)[None])
            q, k = apply_rotary_pos_emb(q, k, *rotation)
            weights = (q[:, :, -1:] @ k.repeat_interleave(2, 1).transpose(2, 3) / 8).softmax(-1)[0, :, 0]
            expected = weights.cumsum(1).mean(1).view(4, 2).mean(1)
            np.testing.assert_allclose(got[index], expected, rtol=1e-3)


@pytest.mark.parametrize("name", ["phi3", "qwen3", "gpt_neox", "gemma2"])
def test_both_measures_work_whatever_a_family_does_to_queries_and_keys(
    zoo: Zoo, encoder: Encoder, name: str
) -> None:
    gated = GatedModel.load(zoo.load(name)[1], "float32", CPU)
    ids = torch.arange(60) % 90 + 3

    class Numbered(PasskeyDataset):
        """The same documents in a small vocabulary."""

        def filler(self, index: int, length: int) -> np.ndarray:
            return ids.numpy()

    dataset = Numbered(DatasetSettings(form=Form.NAMES), BuiltinHaystack(), encoder)
    scores = mean_qk_scores(gated, dataset, 0)
    gated_layers = np.array(gated.gated_layers(1000))
    assert ((scores[gated_layers] > 0) & (scores[gated_layers] < 1)).all()
    assert not scores[~gated_layers].any()


def test_samples_are_averaged_and_counted() -> None:
    steps = list(measured(lambda index: np.full((2, 2), float(index)), 4, Workers()))
    assert [done for done, _ in steps] == [1, 2, 3, 4]
    assert [scores is None for _, scores in steps] == [True, True, True, False]
    np.testing.assert_array_equal(steps[-1][1], np.full((2, 2), 1.5))
