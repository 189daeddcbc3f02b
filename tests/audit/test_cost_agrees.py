"""The cost model counts what the audit traces, without tracing."""

from itertools import product
from pathlib import Path

import pytest
from transformers import LlamaConfig, MixtralConfig

from benchmarks.kernel_work import structure_of, work_of
from graphs import BatchShape
from hpu_duo.cli.planning.hardware import graph_bytes
from hpu_duo.lab.audit import audit_bucket
from hpu_duo.planning import FITTED, GAUDI3, Deployment, Serving, Step, kernels_of, predict_seconds
from hpu_duo.planning.read_model import read_model
from hpu_duo.startup.tables import KEPT, GraphMemory, StepSizes
from kernels_ref import PLAIN
from tests.modeling.families import IS_5
from tests.tiers import every

FACTOR = 1.2
"""Operators and bytes agree to within this factor; products are equal."""

NUM_LAYERS = 2
GROUPED = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
WITHOUT_GROUPS = {
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
BUCKETS = (
    *("--u/q1/s0/u64/l1", "--u/q16/s0/u300/l16", "--u/q64/s0/u512/l64", "c--/q100/s0/u0/l1"),
    *("c--/q2048/s0/u0/l4", "cs-/q256/s40/u0/l1", "cs-/q1200/s16/u0/l1", "-su/q16/s64/u16/l16"),
    *("c-u/q600/s0/u64/l9", "csu/q272/s64/u64/l17"),
)


def config_dir(path: Path, sizes: dict[str, int], num_layers: int = NUM_LAYERS) -> Path:
    LlamaConfig(
        **sizes,
        num_hidden_layers=num_layers,
        vocab_size=32_000,
        max_position_embeddings=131_072,
        dtype="bfloat16",
    ).save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "heads", "buckets"),
    [
        ("reference", (WITHOUT_GROUPS, 6), BUCKETS[1::3]),
        *(
            pytest.param(attention, heads, BUCKETS, marks=pytest.mark.exhaustive)
            for attention, heads in product(
                ("reference", "hpu"), ((GROUPED, 4), (WITHOUT_GROUPS, 6), (WITHOUT_GROUPS, 16), (GROUPED, 1))
            )
        ),
    ],
)
def test_the_cost_model_and_the_audit_agree_on_the_same_step(
    tmp_path: Path, attention: str, heads: tuple[dict[str, int], int], buckets: tuple[str, ...]
) -> None:
    sizes, num_retrieval = heads
    path = config_dir(tmp_path, sizes)
    structure = structure_of(path, attention, num_retrieval, sizes["num_key_value_heads"])
    work = work_of(structure, read_model(path), kernels_of(attention))
    for text in buckets:
        bucket = BatchShape.parse(text)
        counted, traced = work.of(bucket), audit_bucket(structure, bucket).total
        assert counted.matrix_ops == pytest.approx(traced.matrix_ops, rel=1e-3), text
        for name in ("num_launches", "num_bytes"):
            ratio = getattr(counted, name) / getattr(traced, name)
            assert 1 / FACTOR < ratio < FACTOR, f"{name} of {text}: {ratio:.2f} times the audit's"


@pytest.mark.slow
@pytest.mark.skipif(not IS_5, reason="before 5, experts have shapes that depend on the routing")
@pytest.mark.parametrize("num_experts", [8, pytest.param(32, marks=pytest.mark.exhaustive)])
def test_the_cost_model_and_the_audit_agree_on_experts(tmp_path: Path, num_experts: int) -> None:
    sizes = {**GROUPED, "num_hidden_layers": NUM_LAYERS, "vocab_size": 32_000, "dtype": "bfloat16"}
    MixtralConfig(**sizes, num_local_experts=num_experts, num_experts_per_tok=2).save_pretrained(tmp_path)
    structure = structure_of(tmp_path, "hpu", 2, GROUPED["num_key_value_heads"])
    work = work_of(structure, read_model(tmp_path), kernels_of("hpu"))
    # Two tokens gather the weights of their experts; more tokens meet all of them.
    for text in ("--u/q2/s0/u64/l2", "--u/q64/s0/u512/l64", "cs-/q256/s40/u0/l1"):
        bucket = BatchShape.parse(text)
        counted, traced = work.of(bucket), audit_bucket(structure, bucket).total
        assert counted.matrix_ops == pytest.approx(traced.matrix_ops, rel=1e-3), text
        for name in ("num_launches", "num_bytes"):
            ratio = getattr(counted, name) / getattr(traced, name)
            assert 1 / FACTOR < ratio < FACTOR, f"{name} of {text}: {ratio:.2f} times the audit's"


@pytest.mark.slow
@pytest.mark.parametrize("attention", every(2, ["hpu", "reference"]))
def test_the_seconds_of_a_long_prompt_contain_those_of_the_audit(tmp_path: Path, attention: str) -> None:
    """A prompt of 6,144 tokens in chunks of 2,048: the audit's bytes are within the capacity's range."""
    path = config_dir(tmp_path, GROUPED)
    structure = structure_of(path, attention, 4, 4)
    serving = Serving(GAUDI3, attention=attention, max_num_batched_tokens=2048)
    deployment = Deployment(read_model(path), serving, 0.0, PLAIN, 6_144)
    shapes = [deployment.shape_of(Step(1, start, 2048)) for start in range(0, 6_144, 2048)]
    traced = sum(
        predict_seconds(audit_bucket(structure, shape).total, GAUDI3, 1, FITTED).total for shape in shapes
    )
    found = deployment.first_token_s(6_144)
    assert found.low < traced < found.high
    # The slow end is what the audit counts, times the error of the model of speed.
    assert found.high / deployment.error_factor == pytest.approx(traced, rel=FACTOR - 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_retrieval", every(2, [1, 4]))
def test_graphs_are_planned_with_the_bytes_that_start_up_reserves(tmp_path: Path, num_retrieval: int) -> None:
    path = config_dir(tmp_path, GROUPED)
    structure = structure_of(path, "reference", num_retrieval, 4)
    block_size = structure.geometry.block_size
    layers, memory = structure.memory.layers, GAUDI3.memory_bytes
    planned = graph_bytes(path, read_model(path), layers, block_size, 1, memory)
    config = structure.model.model.config
    sizes = StepSizes.of(structure.model.specs, config, block_size, dtype_bytes=2)
    reserved = GraphMemory(KEPT["hpu-compile"], 1, sizes)
    for bucket in map(BatchShape.parse, BUCKETS):
        assert planned(bucket) == reserved.kept_bytes(bucket) > 0
