"""Operators and bytes of attention kernels, fitted to audits of steps.

    python -m benchmarks.kernel_work

Prints the constants of ``hpu_duo/planning/work.py`` and how close they come to the audit. Steps of a few
layers of several models are traced on tensors without data, which takes some minutes; nothing is measured.

Decodes are one pass in these buckets, and with fused operators shared blocks are one chunk. So only the sum
of ``unique_alone`` and ``unique_chunks``, or of ``shared`` and ``shared_chunks``, is found; the constants
keep the operators of a chunk that fits with several of them had found.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import LlamaConfig

from graphs import BatchShape
from hpu_duo.config.engine import CacheConfig, EngineConfig, HeadConfig, ModelConfig, SchedulerConfig
from hpu_duo.heads import HeadPattern
from hpu_duo.lab.audit import Structure, audit_bucket, build_structure
from hpu_duo.planning import GAUDI3, EngineWork, ModelSize
from hpu_duo.planning.attention_counts import AttentionCounts, AttentionRuns
from hpu_duo.planning.read_model import read_model
from hpu_duo.planning.work import KernelWork

NUM_LAYERS = 2
_COMMON = {"vocab_size": 32_000, "max_position_embeddings": 262_144}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "of 1 billion": {
        **{"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
    "of 8 billion": {
        **{"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 6},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
    "without groups": {
        **{"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 4},
        **{"num_attention_heads": 32, "num_key_value_heads": 32},
    },
}
"""Models differ in layers, so that the fit can separate operators per step from operators per layer."""

BUCKETS = (
    *("--u/q1/s0/u64/l1", "--u/q1/s0/u512/l1", "--u/q16/s0/u64/l16", "--u/q16/s0/u512/l16"),
    *("--u/q64/s0/u1024/l64", "c--/q128/s0/u0/l1", "c--/q512/s0/u0/l4", "c--/q2048/s0/u0/l1"),
    *("c--/q8192/s0/u0/l1", "cs-/q256/s64/u0/l1", "cs-/q2048/s16/u0/l1", "cs-/q2048/s64/u0/l1"),
    *("-su/q16/s64/u16/l16", "-su/q64/s128/u64/l64", "csu/q272/s64/u64/l17", "csu/q2048/s32/u256/l32"),
)


@dataclass(frozen=True)
class Point:
    """An audited step: what it counts, and the operators and bytes that the audit has found."""

    runs: NDArray[np.float64]
    counts: NDArray[np.float64]
    known_bytes: float
    num_launches: float
    num_bytes: float


def points(attention: str) -> Iterator[Point]:
    """Audit steps of every model with an attention."""
    for config in MODELS.values():
        with tempfile.TemporaryDirectory() as folder:
            LlamaConfig(**_COMMON, **config, dtype="bfloat16").save_pretrained(folder)
            num_kv = config["num_key_value_heads"]
            for num_retrieval in (num_kv, num_kv // 2, num_kv // 4):
                num_layers = config["num_hidden_layers"]
                structure = structure_of(Path(folder), attention, num_retrieval, num_kv, num_layers)
                for text in BUCKETS:
                    yield _point(structure, read_model(folder), attention, BatchShape.parse(text))


def structure_of(
    path: Path, attention: str, num_retrieval: int, num_kv: int, num_layers: int = NUM_LAYERS
) -> Structure:
    """Build a model with that many retrieval heads in each layer, for an HPU."""
    retrieval = np.zeros((num_layers, num_kv), np.bool_)
    retrieval[:, :num_retrieval] = True
    pattern = HeadPattern(retrieval.astype(np.float32), sink=128, recent=256, retrieval=retrieval)
    config = EngineConfig(
        model=ModelConfig(path=path, attention=attention),
        heads=HeadConfig(pattern=None if num_retrieval == num_kv else pattern),
        cache=CacheConfig(block_size=128, num_blocks=4096, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8192),
    )
    return build_structure(config, GAUDI3)


def work_of(structure: Structure, size: ModelSize, kernels: KernelWork) -> EngineWork:
    """The cost model's work of the steps of a model that is built."""
    return EngineWork(
        size,
        structure.memory.layers,
        kernels=kernels,
        block_size=structure.geometry.block_size,
        max_chunk_rows=structure.geometry.max_chunk_rows,
        decode_len=structure.geometry.decode_len,
        chunks=structure.model.specs[0].chunks,
    )


def _point(structure: Structure, size: ModelSize, attention: str, bucket: BatchShape) -> Point:
    step = audit_bucket(structure, bucket)
    work = work_of(structure, size, _counting(attention))
    counts, runs = np.zeros(len(AttentionCounts._fields)), np.zeros(len(AttentionRuns._fields))
    for each in work.attention_of(bucket):
        counts += np.array(each[0]) * each[2]
        runs += np.array(each[1]) * each[2]
    tokens, num_layers = bucket.query_len, len(size.layers)
    linear = [tokens * num_layers * size.hidden_size, tokens * size.matrix_params / size.hidden_size]
    known = work.of(bucket)
    return Point(
        np.array([1.0, float(work.has_rings), num_layers, *runs]),
        np.array([*linear, *counts]),
        known.weight_bytes + known.kv_bytes,
        step.total.num_launches,
        step.total.num_bytes,
    )


def _counting(attention: str) -> KernelWork:
    """Kernels that cost nothing, so that only what is known without them is left."""
    none = AttentionRuns(), AttentionCounts()
    return KernelWork(attention != "reference", 0.0, 0.0, *none, 0.0, 0.0)


def solve(features: NDArray[np.float64], wanted: NDArray[np.float64], scale: NDArray[np.float64]) -> Any:
    """Coefficients of 0 or more with the least squares of errors over ``scale``, by coordinate descent."""
    rows = features / scale[:, None]
    target, found = wanted / scale, np.zeros(features.shape[1])
    norms = (rows**2).sum(axis=0)
    rest = target.copy()
    for _ in range(20_000):
        for column in np.flatnonzero(norms):
            new = max(0.0, found[column] + rows[:, column] @ rest / norms[column])
            rest -= rows[:, column] * (new - found[column])
            found[column] = new
    return found


def main() -> None:
    """Fit both implementations and print them."""
    for attention in ("reference", "hpu"):
        found = list(points(attention))
        launches = np.array([each.num_launches for each in found])
        runs = np.array([each.runs for each in found])
        of_runs = solve(runs, launches, launches)
        num_bytes = np.array([each.num_bytes for each in found])
        known = np.array([each.known_bytes for each in found])
        counts = np.array([each.counts for each in found])
        of_counts = solve(counts, num_bytes - known, num_bytes)
        print(attention)
        _print_fields(("step", "step with rings", "layer", *AttentionRuns._fields), of_runs)
        _print_ratio("operators", runs @ of_runs / launches)
        _print_fields(("hidden", "width", *AttentionCounts._fields), of_counts)
        _print_ratio("bytes", (counts @ of_counts + known) / num_bytes)


def _print_fields(names: tuple[str, ...], values: NDArray[np.float64]) -> None:
    print("  " + ", ".join(f"{name}={value:.3g}" for name, value in zip(names, values)))


def _print_ratio(name: str, ratio: NDArray[np.float64]) -> None:
    print(f"  {name}: {ratio.min():.2f} to {ratio.max():.2f} times the audit's")


if __name__ == "__main__":
    main()
