"""The choice of what ranks share of retrieval heads, left to the cost model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphs import BucketTable
from hpu_duo.config.engine import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    HeadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from hpu_duo.device import habana_environment
from hpu_duo.engine.stats import EngineStats
from hpu_duo.heads import HeadPattern
from hpu_duo.llm import HPUDuoModel
from hpu_duo.planning import GAUDI3, Deployment, Serving
from hpu_duo.planning.read_model import read_model
from hpu_duo.planning.retrieval_choice import SharedHeads, choose_retrieval
from hpu_duo.startup import sharding
from hpu_duo.startup.sharding import settle
from kernels_ref import PLAIN
from tests.modeling.families import Zoo, make_config
from tests.vendor import importable

EIGHT = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1 << 17,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("eight")
    make_config("LlamaConfig", **EIGHT).save_pretrained(found)
    return found


def chosen(
    path: Path, size: int, context: int | None, *, streams: bool = True, policy: str | None = None
) -> str:
    scores = np.tile(np.arange(8, dtype=np.float32) / 8, (EIGHT["num_hidden_layers"], 1))
    pattern = HeadPattern(scores, sink=64, recent=256, retrieval=scores >= 0.5)
    config = EngineConfig(
        model=ModelConfig(path=path, device="cpu"),
        heads=HeadConfig(pattern=pattern if streams else None),
        cache=CacheConfig(kv_policy=policy, kv_budget=None if policy is None else 320),
        scheduler=SchedulerConfig(max_num_seqs=16),
        parallel=ParallelConfig(
            tensor_parallel_size=size, retrieval_parallel="auto", retrieval_parallel_context=context
        ),
    )
    found, _ = settle(config)
    assert settle(found) == (found, ())
    assert found.parallel.deals_blocks == (found.parallel.retrieval_parallel == "context")
    assert found.block_size == config.cache.block_size * (size if found.parallel.deals_blocks else 1)
    return found.parallel.retrieval_parallel


def test_long_contexts_are_dealt_and_short_ones_are_not_worth_the_exchanges(path: Path) -> None:
    assert chosen(path, 8, None) == "context"
    assert chosen(path, 8, 100_000) == "context"
    assert chosen(path, 2, 300, streams=False) == "heads"


@pytest.mark.parametrize(
    ("num_ranks", "length", "sparsity", "expected"),
    [
        (8, 1 << 17, 0.5, "context"),
        (8, 4096, 0.5, "context"),
        (2, 300, 0.0, "heads"),
        (8, 1 << 17, 0.0, "heads"),
    ],
)
def test_capacity_predicts_what_the_engine_chooses_and_both_say_why(
    path: Path, num_ranks: int, length: int, sparsity: float, expected: str
) -> None:
    scores = np.tile(np.arange(8, dtype=np.float32) / 8, (EIGHT["num_hidden_layers"], 1))
    pattern = HeadPattern(scores, sink=64, recent=256)
    config = EngineConfig(
        model=ModelConfig(path=path, device="cpu"),
        heads=HeadConfig(pattern=pattern, sparsity=sparsity),
        scheduler=SchedulerConfig(max_num_seqs=16, max_model_len=length),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks, retrieval_parallel_context=length),
    )
    found, (note,) = settle(config)
    serving = Serving(
        GAUDI3,
        num_ranks,
        max_num_seqs=16,
        sink=64,
        recent=256,
        block_size=config.cache.block_size,
        max_layer_kinds=None,
        pattern=pattern,
        decode_len=config.scheduler.decode_len,
        max_chunk_rows=config.scheduler.max_chunk_rows,
    )
    deployment = Deployment(read_model(path), serving, sparsity, PLAIN, length)
    assert found.parallel.retrieval_parallel == deployment.serving.retrieval_parallel == expected
    assert note == str(deployment.choice)
    way = "by context" if expected == "context" else "by heads"
    assert note.startswith(f"{num_ranks} ranks, 8 KV heads: retrieval heads are shared {way}, 0 promoted (")


def test_context_is_chosen_where_it_is_predicted_to_be_faster() -> None:
    """No model of today is: without promoted heads both ways read equally many bytes."""
    shared, asked = SharedHeads((), 3), []

    def faster(by_heads: SharedHeads, by_context: SharedHeads) -> tuple[str, str]:
        asked.append((by_heads, by_context))
        return "context", "faster"

    choice = choose_retrieval(4, 8, lambda _: shared, faster, None)
    assert asked == [(shared, shared)]
    assert str(choice) == "4 ranks, 8 KV heads: retrieval heads are shared by context, 3 promoted (faster)"
    assert choose_retrieval(4, 8, lambda _: shared, faster, "an obstacle").chosen == "heads"
    assert len(asked) == 1


def test_what_keeps_heads_by_head_is_said(path: Path) -> None:
    config = EngineConfig(
        model=ModelConfig(path=path, device="cpu"),
        graph=GraphConfig(backend="compile"),
        parallel=ParallelConfig(tensor_parallel_size=2),
    )
    found, (note,) = settle(config)
    assert found.parallel.retrieval_parallel == "heads"
    assert "(torch's compiler for CPUs supports no gathers" in note
    assert settle(replace(config, parallel=ParallelConfig()))[1] == ()


def test_a_model_without_predictions_is_served_by_heads_unless_some_were_promoted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise ValueError("'strange' has state layers, which the cost model does not cover")

    monkeypatch.setattr("hpu_duo.startup.sharding.read_model", refuse)
    assert chosen(path, 8, None, streams=False) == "heads"
    assert chosen(path, 8, None) == "context"
    for length, reason in (
        (300, "nothing is predicted: 'strange' has state layers"),
        (None, "nothing is predicted for cpu without retrieval_parallel_context"),
    ):
        config = EngineConfig(
            model=ModelConfig(path=path, device="cpu"),
            parallel=ParallelConfig(tensor_parallel_size=2, retrieval_parallel_context=length),
        )
        assert f"({reason}" in settle(config)[1][0]


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


@pytest.mark.usefixtures("vendor")
@pytest.mark.parametrize("device", ["auto", "hpu"])
def test_on_a_gaudi_the_choice_acquires_no_card_and_keeps_the_mode_of_the_graphs(
    path: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in knows no name of a device, which the vendor's package would acquire a card for."""
    (tmp_path / "accel0" / "device").mkdir(parents=True)
    (tmp_path / "accel0" / "device" / "device_type").write_text("GAUDI2\n", encoding="utf-8")
    assert habana_environment.card_type(tmp_path) == "GAUDI2"
    monkeypatch.setattr(sharding, "card_type", partial(habana_environment.card_type, tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = EngineConfig(
        model=ModelConfig(path=path, device=device),
        graph=GraphConfig(backend="hpu-graph"),
        parallel=ParallelConfig(tensor_parallel_size=2),
    )
    assert "on Gaudi 2, not measured" in settle(config)[1][0]
    assert os.environ["PT_HPU_LAZY_MODE"] == "1"


def test_budgets_are_dealt_beside_blocks_but_for_those_that_average_over_heads(path: Path) -> None:
    assert chosen(path, 8, 100_000, policy="h2o") == "context"
    assert chosen(path, 8, 100_000, policy="tova") == "heads"


def test_one_rank_and_models_with_fewer_heads_than_ranks_stay_by_head(path: Path, zoo: Zoo) -> None:
    assert chosen(path, 1, None) == "heads"
    config = EngineConfig(
        model=ModelConfig(path=zoo.load("llama_mqa")[1], device="cpu"),
        parallel=ParallelConfig(tensor_parallel_size=2, retrieval_parallel="auto"),
    )
    assert settle(config)[0].parallel.retrieval_parallel == "heads"


def test_what_cannot_be_dealt_is_refused_before_processes_start(zoo: Zoo) -> None:
    with pytest.raises(ValueError, match="a key/value head for each rank: expected at least 2 of them"):
        HPUDuoModel.from_pretrained(
            zoo.load("llama_mqa")[1], tensor_parallel_size=2, retrieval_parallel="context"
        )
    with pytest.raises(ValueError, match="graphs other than 'compile' on a CPU"):
        HPUDuoModel.from_pretrained(
            zoo.load("llama")[1],
            tensor_parallel_size=2,
            retrieval_parallel="context",
            graphs="compile",
            device="cpu",
        )
    with pytest.raises(ValueError, match="heads, context, auto, got 'tokens'"):
        ParallelConfig(retrieval_parallel="tokens")
    with pytest.raises(ValueError, match="retrieval_parallel_context=5 needs retrieval_parallel='auto'"):
        ParallelConfig(retrieval_parallel="context", retrieval_parallel_context=5)


@pytest.mark.usefixtures("forked_ranks")
def test_a_manifest_is_of_the_chosen_way_and_serves_without_naming_it(zoo: Zoo, tmp_path: Path) -> None:
    """Two KV heads on two ranks, one of them streaming: by heads it would be promoted."""
    path, file = zoo.load("llama")[1], tmp_path / "warm.json"
    scores = np.tile(np.array([0.1, 0.9], np.float32), (len(read_model(path).layers), 1))
    common: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "device": "cpu",
        "graphs": "replay",
        "block_size": 16,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "pattern": HeadPattern(scores, sink=4, recent=8),
        "sparsity": 0.5,
    }

    def warmed_up() -> EngineStats:
        table = BucketTable.from_strings(["csu/q32/s4/u8/l2"])
        limits: dict[str, Any] = {"num_blocks": 8, "max_model_len": 96, "buckets": table}
        model = HPUDuoModel.from_pretrained(path, **limits, **common)
        model.prepare_warmup().run(manifest=file)
        return model.stats()

    told, served = warmed_up(), HPUDuoModel.from_pretrained(path, buckets=file, **common).stats()
    assert (told.resolved.retrieval_parallel, told.resolved.num_promoted_heads) == ("context", 0)
    line = "2 ranks, 2 KV heads: retrieval heads are shared by context, 0 promoted"
    assert any(note.startswith(line) for note in told.notes)
    assert (served.resolved, served.notes) == (told.resolved, told.notes)
