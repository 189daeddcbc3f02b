"""Models of several families with gates: against transformers, and against one dense mask per head."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from hpu_duo import HeadPattern
from hpu_duo.lab.identify import Band, FullFrom, GatedModel, training_memory
from hpu_duo.planning.read_model import read_model
from tests.identify.live_bytes import LiveBytes
from tests.modeling.dense_oracle import oracle_logits
from tests.modeling.families import FAMILIES, VOCAB, Zoo, save_random
from tests.tiers import crossed

CPU = torch.device("cpu")
LENGTH = 40
SLIDING = ["mistral_sliding", "gemma2", "gemma3", "gpt_oss"]
WHOLE = ["llama", "llama_mqa", "llama_biases_tied", "qwen3", "phi3", "olmo2", "mixtral", "gpt_neox"]


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed))


def load(zoo: Zoo, name: str) -> tuple[Any, GatedModel]:
    if name not in FAMILIES:
        pytest.skip(f"the installed transformers does not have {name}")
    model, directory = zoo.load(name)
    return model, GatedModel.load(directory, "float32", CPU)


def run(
    gated: GatedModel, gates: torch.Tensor, band: Band, full_from: FullFrom
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of the gated and of the unchanged model at every position."""
    positions, has_gates = torch.arange(LENGTH), gated.gated_layers(LENGTH)
    taught = gated.teach(tokens(), positions, has_gates, full_from)
    attention = taught.attention if full_from is FullFrom.TEACHER else None
    hidden = gated.gated_hidden(tokens(), positions, gates, has_gates, band, attention)
    return hidden, taught.hidden


@pytest.mark.parametrize(("name", "full_from"), crossed([*WHOLE, *SLIDING], list(FullFrom)))
def test_with_all_gates_at_one_the_model_is_unchanged(zoo: Zoo, name: str, full_from: FullFrom) -> None:
    model, gated = load(zoo, name)
    gates = torch.ones(gated.num_layers, gated.num_kv_heads, requires_grad=True)
    hidden, taught = run(gated, gates, Band(2, 5), full_from)
    assert torch.equal(hidden, taught)
    with torch.no_grad():
        outputs = model(tokens()[None], use_cache=False, output_hidden_states=True)
        expected = outputs.hidden_states[-1][0]
    torch.testing.assert_close(taught, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", WHOLE)
def test_gates_of_zero_and_one_mask_heads_as_a_pattern_does(zoo: Zoo, name: str) -> None:
    model, gated = load(zoo, name)
    mask = np.random.default_rng(1).random((gated.num_layers, gated.num_kv_heads)) < 0.5
    pattern = HeadPattern(mask.astype(np.float32), 2, 7, retrieval=mask)
    hidden, _ = run(gated, torch.from_numpy(mask).float(), Band(2, 7), FullFrom.OWN)
    expected = oracle_logits(model, pattern, tokens().tolist())
    torch.testing.assert_close(model.get_output_embeddings()(hidden), expected, atol=2e-4, rtol=1e-3)


def test_a_window_that_holds_the_whole_text_makes_gates_meaningless(zoo: Zoo) -> None:
    _, gated = load(zoo, "llama")
    gates = torch.full((gated.num_layers, gated.num_kv_heads), 0.3, requires_grad=True)
    hidden, taught = run(gated, gates, Band(0, LENGTH), FullFrom.TEACHER)
    torch.testing.assert_close(hidden, taught, atol=1e-5, rtol=1e-4)
    # Of some error that is none: only rounding reaches the gates.
    (gradient,) = torch.autograd.grad(hidden.sum(), [gates])
    assert gradient.abs().max() < 1e-3


@pytest.mark.parametrize("full_from", FullFrom)
def test_gradients_are_those_of_finite_differences(zoo: Zoo, full_from: FullFrom) -> None:
    _, gated = load(zoo, "llama")
    gated.model.double()
    torch.manual_seed(0)
    start = torch.rand(gated.num_layers, gated.num_kv_heads, dtype=torch.float64)

    def loss(gates: torch.Tensor) -> torch.Tensor:
        hidden, taught = run(gated, gates, Band(2, 5), full_from)
        return (hidden - taught).square().mean()

    gates = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(gates), [gates])
    for layer, head in ((0, 0), (1, 1), (3, 0)):
        step = torch.zeros_like(start)
        # Norms compute in float32, which shorter steps would drown in.
        step[layer, head] = 1e-2
        with torch.no_grad():
            slope = (loss(start + step) - loss(start - step)) / 2e-2
        torch.testing.assert_close(gradient[layer, head], slope, rtol=3e-2, atol=1e-5)


def test_layers_with_a_window_shorter_than_the_text_have_no_gates(zoo: Zoo) -> None:
    _, gated = load(zoo, "gemma2")
    assert gated.gated_layers(LENGTH) == (False, True, False, True)
    assert gated.gated_layers(8) == (True, True, True, True)
    gates = torch.full((gated.num_layers, gated.num_kv_heads), 0.4, requires_grad=True)
    hidden, _ = run(gated, gates, Band(1, 3), FullFrom.TEACHER)
    (gradient,) = torch.autograd.grad(hidden.square().sum(), [gates])
    assert gradient[[1, 3]].abs().min() > 0
    assert gradient[[0, 2]].abs().max() == 0


def test_layers_run_as_before_once_the_gates_are_gone(zoo: Zoo) -> None:
    _, gated = load(zoo, "llama")
    run(gated, torch.ones(gated.num_layers, gated.num_kv_heads), Band(1, 3), FullFrom.TEACHER)
    assert not any("forward" in vars(layer.module) for layer in gated.layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "full_from", "changes"),
    [
        pytest.param("float32", FullFrom.TEACHER, {"intermediate_size": 1024}, marks=pytest.mark.exhaustive),
        ("float32", FullFrom.OWN, {"head_dim": 128}),
        pytest.param("bfloat16", FullFrom.TEACHER, {"hidden_size": 512}, marks=pytest.mark.exhaustive),
        ("bfloat16", FullFrom.TEACHER, {}),
        pytest.param("bfloat16", FullFrom.OWN, {"intermediate_size": 1024}, marks=pytest.mark.exhaustive),
    ],
)
def test_memory_grows_with_the_text_as_computed(
    tmp_path: Path, dtype: str, full_from: FullFrom, changes: dict[str, int]
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, **changes}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    save_random(LlamaConfig(vocab_size=32, num_hidden_layers=3, **heads, **sizes), tmp_path)
    gated, size = GatedModel.load(tmp_path, dtype, CPU), read_model(tmp_path)
    peaks = {length: _peak(gated, length, full_from) for length in (512, 1024)}
    for length, peak in peaks.items():
        told = training_memory(size, length, full_from, 4 if dtype == "float32" else 2)
        assert peak <= told.total - told.weights <= 1.6 * peak, length
    # No part of it is quadratic.
    assert peaks[1024] / peaks[512] == pytest.approx(2, rel=0.02)


def _peak(gated: GatedModel, length: int, full_from: FullFrom) -> int:
    ids, positions, has_gates = torch.zeros(length, dtype=torch.long), torch.arange(20), (True,) * 3
    gates = torch.full((3, 2), 0.5, requires_grad=True)
    with LiveBytes() as live:
        taught = gated.teach(ids, positions, has_gates, full_from)
        attention = taught.attention if full_from is FullFrom.TEACHER else None
        hidden = gated.gated_hidden(ids, positions, gates, has_gates, Band(16, 64), attention)
        torch.autograd.grad((hidden.float() - taught.hidden.float()).square().mean(), [gates])
    return live.peak


def test_an_8b_model_with_32k_tokens_fits_one_80_gb_device(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("8b")
    LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    ).save_pretrained(directory)
    told = training_memory(read_model(directory), 33_000)
    assert told.weights == pytest.approx(16.06e9, rel=0.01)
    assert 35e9 < told.total < 50e9
