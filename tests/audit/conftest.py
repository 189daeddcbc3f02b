import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from graphs import BatchShape, BucketTable
from hpu_duo.config.engine import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    HeadConfig,
    ModelConfig,
    SchedulerConfig,
)
from hpu_duo.heads import HeadPattern
from hpu_duo.lab import sim
from hpu_duo.lab.audit import Structure, build_structure
from hpu_duo.planning import GAUDI2

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 1024,
    "dtype": "float32",
}
BUCKETS = ("--u/q4/s0/u16/l4", "csu/q32/s8/u16/l4", "c--/q16/s0/u0/l1")


@pytest.fixture(scope="session", autouse=True)
def _needs_fake_hpu() -> None:
    torch.set_num_threads(1)
    if not hasattr(torch, "hpu") and (reason := sim.problem()) is not None:
        pytest.skip(f"no tensors of device hpu here: {reason}")


@pytest.fixture(scope="session")
def config_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("config-only")
    LlamaConfig(**TINY).save_pretrained(directory)
    assert [path.name for path in directory.iterdir() if path.suffix == ".safetensors"] == []
    return directory


@pytest.fixture(scope="session")
def pattern() -> HeadPattern:
    retrieval = np.array([[True, True], [True, False], [True, False]])
    return HeadPattern(retrieval.astype(np.float32), sink=8, recent=24, retrieval=retrieval)


def engine_config(
    path: Path, pattern: HeadPattern | None = None, *, table: str | None = None
) -> EngineConfig:
    """Sixteen-token blocks, four requests, steps of 32 tokens."""
    shapes = (table,) if table else BUCKETS
    return EngineConfig(
        model=ModelConfig(path=path),
        heads=HeadConfig(pattern=pattern),
        cache=CacheConfig(block_size=16, num_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=512),
        graph=GraphConfig(table=BucketTable(tuple(map(BatchShape.parse, shapes)))),
    )


@pytest.fixture(scope="session")
def structure(config_dir: Path, pattern: HeadPattern) -> Structure:
    return build_structure(engine_config(config_dir, pattern), GAUDI2)


def edit_config(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a configuration with other values."""
    target.mkdir(exist_ok=True)
    fields = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**fields, **changes}))
    return target
