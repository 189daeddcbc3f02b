"""Collected attention against transformers' own, whole matrices of it."""

import pytest
import torch

from hpu_duo.lab.identify import GatedModel
from hpu_duo.lab.kv_calibration import (
    AdaKV,
    CalibrationMethod,
    FastGen,
    TokenClasses,
    choose_kinds,
    head_budgets,
)
from hpu_duo.lab.kv_calibration.calibrated import PlannedHead
from hpu_duo.lab.kv_calibration.collect import LayerAttention, collect
from tests.identify.live_bytes import LiveBytes
from tests.modeling.families import FAMILIES, VOCAB, Zoo
from tests.tiers import crossed

CPU = torch.device("cpu")
NAMES = ["llama", "llama_mha", "llama_mqa", "qwen3", "gemma2", "gpt_oss", "phi", "qwen2_partly_sliding"]
LENGTHS = (70, 45)


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in LENGTHS]


def dense(zoo: Zoo, name: str, ids: torch.Tensor) -> list[torch.Tensor]:
    """Weights ``[K, T, T]`` of each layer, by transformers, averaged over the query heads of a KV head."""
    model, _ = zoo.load(name)
    with torch.no_grad():
        found = model(ids[None], output_attentions=True, use_cache=False).attentions
    num_kv_heads = model.config.num_key_value_heads
    return [weights[0].unflatten(0, (num_kv_heads, -1)).mean(dim=1) for weights in found]


def loaded(zoo: Zoo, name: str) -> GatedModel:
    return GatedModel.load(zoo.load(name)[1], "float32", CPU)


@pytest.mark.parametrize(
    ("num_queries", "name"),
    crossed([None, 1, 40, 500], [name for name in NAMES if name in FAMILIES]),
)
def test_weights_are_those_of_transformers(zoo: Zoo, name: str, num_queries: int | None) -> None:
    model, found = loaded(zoo, name), {}
    for ids in texts():
        expected = dense(zoo, name, ids)

        def take(layer: int, attention: LayerAttention) -> None:
            rows = torch.cat([weights for weights, _ in attention.tiles()], dim=1)
            places = torch.cat([at for _, at in attention.tiles()])
            found[layer] = places.tolist(), rows, attention.received()

        found.clear()
        collect(model, ids, num_queries, take)
        windows = [layer.call.sliding_window for layer in model.layers]
        assert list(found) == [number for number, window in enumerate(windows) if window is None]
        first = 0 if num_queries is None else max(0, len(ids) - num_queries)
        for number, (places, rows, received) in found.items():
            assert places == list(range(first, len(ids)))
            torch.testing.assert_close(rows, expected[number][:, first:], rtol=1e-3, atol=2e-5)
            mean = expected[number][:, first:].double().mean(dim=1)
            torch.testing.assert_close(received, mean, rtol=1e-3, atol=2e-5)


def planned(
    zoo: Zoo, name: str, method: CalibrationMethod, classes: list[TokenClasses]
) -> list[list[PlannedHead]]:
    model = loaded(zoo, name)
    measurement = method.measurement(len(model.layers), LENGTHS)
    for ids, each in zip(texts(), classes):
        collect(
            model,
            ids,
            method.num_queries,
            lambda layer, found, each=each: measurement.take(layer, found, each),
        )
    return [list(heads) for heads in measurement.planned(num_sizes=100)]


def random_classes() -> list[TokenClasses]:
    generator = torch.Generator().manual_seed(2)
    return [TokenClasses(*(torch.rand(2, length, generator=generator) < 0.2).unbind()) for length in LENGTHS]


@pytest.mark.parametrize("name", ["llama", "llama_mha", "llama_mqa"])
@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.97])
def test_kinds_are_those_of_whole_matrices(zoo: Zoo, name: str, threshold: float) -> None:
    classes = random_classes()
    found = planned(zoo, name, FastGen(threshold), classes)
    matrices = [dense(zoo, name, ids) for ids in texts()]
    for layer, heads in enumerate(found):
        weights = [each[layer] for each in matrices]
        expected = choose_kinds(weights, [torch.arange(length) for length in LENGTHS], classes, threshold)
        assert [head.kind for head in heads] == [choice.kind.name.lower() for choice in expected]
        assert [head.num_asked for head in heads if head.num_asked] == [
            max(2, choice.budget) for choice in expected if choice.kind.name != "FULL"
        ]
        assert [head.recovered for head in heads] == pytest.approx(
            [each.recovered for each in expected], abs=1e-4
        )


@pytest.mark.parametrize("name", ["llama", "llama_mha", "llama_mqa"])
@pytest.mark.parametrize("policy", ["h2o", "tova", "snapkv:window=6,kernel=3", "expected-attention"])
def test_budgets_and_shares_are_those_of_whole_matrices(zoo: Zoo, name: str, policy: str) -> None:
    """Written with loops over tokens; SnapKV's newest tokens are kept by each head and the others chosen."""
    method = AdaKV(budget=14, policy=policy, safeguard=0.3)
    found = planned(zoo, name, method, random_classes())
    matrices = [dense(zoo, name, ids) for ids in texts()]
    queries = 6 if policy.startswith("snapkv") else 32
    newest = 6 if policy.startswith("snapkv") else 0
    for layer, heads in enumerate(found):
        scores, masses = [], []
        for each in matrices:
            mass = each[layer][:, -queries:].double().mean(dim=1)
            masses.append(mass)
            if newest:
                wide = torch.cat([torch.zeros(len(mass), 1), mass, torch.zeros(len(mass), 1)], dim=1)
                smooth = [
                    (wide[:, at] + wide[:, at + 1] + wide[:, at + 2]) / 3 for at in range(mass.shape[1])
                ]
                scores.append(torch.stack(smooth, dim=1)[:, :-newest])
            else:
                scores.append(mass)
        budgets = head_budgets(scores, (14 - newest) * len(heads), 0.3)
        assert [head.num_asked for head in heads] == [newest + budget for budget in budgets]
        assert sum(head.num_asked or 0 for head in heads) == 14 * len(heads)
        for number, head in enumerate(heads):
            shares = []
            for score, mass in zip(scores, masses):
                order = sorted(range(score.shape[1]), key=lambda key: -float(score[number, key]))
                kept = [
                    *order[: (head.num_asked or 0) - newest],
                    *range(mass.shape[1] - newest, mass.shape[1]),
                ]
                shares.append(float(mass[number, kept].sum() / mass[number].sum()))
            assert head.recovered == pytest.approx(sum(shares) / 2, abs=1e-4)


def peak_bytes(model: GatedModel, length: int) -> int:
    """Most bytes alive at once while a text is measured for FastGen, all its queries."""
    ids = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(0))
    classes = TokenClasses(*torch.zeros(2, length, dtype=torch.bool).unbind())
    measurement = FastGen().measurement(len(model.layers), [length])
    with LiveBytes() as live:
        collect(model, ids, None, lambda layer, found: measurement.take(layer, found, classes))
    return live.peak


def test_memory_grows_with_the_text_and_not_with_its_square(zoo: Zoo) -> None:
    model = loaded(zoo, "llama")
    short, long = (peak_bytes(model, length) for length in (512, 1024))
    assert long / short < 2.1
    # Less than one float32 matrix of all pairs for each query head of one layer.
    assert long < model.layers[0].call.num_heads * 1024 * 1024 * 4
