"""Long prompts in one step: chunks in groups on a device, and graphs that do not grow."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from graphs import BatchShape, BucketTable, EagerBackend
from hpu_duo.cli.planning.hardware import graph_bytes
from hpu_duo.config.engine import CacheConfig, EngineConfig, GraphConfig, ModelConfig, SchedulerConfig
from hpu_duo.lab import sim
from hpu_duo.lab.audit import audit_bucket, build_structure, lower_bucket
from hpu_duo.lab.rules import REGION_NODES
from hpu_duo.modeling.recurrent import Cut, step_of
from hpu_duo.planning import GAUDI2, GAUDI3
from hpu_duo.planning.read_model import read_model
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.tables import KEPT, GraphMemory, StepSizes, staged_bytes
from kernels_ref.recurrent import DeltaInputs, DeltaRule, StateSpace
from kernels_ref.recurrent.matrix_state import MatrixState
from tests.modeling.families import BASE, greedy, make_config, prompts_of
from tests.recurrent.hybrids import HYBRIDS, load, saved
from tests.tiers import every

DELTA = DeltaRule(num_heads=2, key_dim=4, value_dim=3)
SPACE = StateSpace(num_heads=4, num_groups=2, head_dim=3, state_dim=5)
CUTS = (Cut(0, 1100), Cut(5, 1), Cut(70, 200), Cut(3, 0), Cut(0, 64))
"""18, 1, 4, no and 1 chunks of 64 tokens."""


class NamedBackend(EagerBackend):
    """One whose graphs have memory of their own, by its name."""

    name = "hpu-compile"


def inputs_of(kind: MatrixState[Any], x: torch.Tensor) -> Any:
    """The inputs of tokens ``[Q, 40]``."""
    if isinstance(kind, StateSpace):
        x, b, c, step = x[:, :36].split([12, 10, 10, 4], dim=-1)
        decay = torch.tensor([-0.01, -0.1, -1.0, -4.0])
        return kind.inputs(
            x.unflatten(1, (4, 3)), step, decay, b.unflatten(1, (2, 5)), c.unflatten(1, (2, 5))
        )
    q, k, v, g, beta = x[:, :26].unflatten(1, (2, 13)).split([4, 4, 3, 1, 1], dim=-1)
    decay = -0.001 * torch.nn.functional.softplus(g[..., 0])
    # A head that forgets little, and one with strengths up to 2, as where eigenvalues may be negative.
    strength = torch.tensor([0.02, 2.0]) * beta[..., 0].sigmoid()
    return DeltaInputs.of(q, k, v, decay, strength, normalises=True)


@pytest.mark.parametrize("slack", [0, 2])
@pytest.mark.parametrize("kind", [DELTA, SPACE], ids=["delta", "space"])
def test_chunks_in_groups_are_those_one_by_one(
    kind: MatrixState[Any], slack: int, simulated_hpu: sim.SimulatedHpu
) -> None:
    kind = type(kind)(**{**vars(kind), "slack": slack})
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(cut.num_new for cut in CUTS), 40, generator=generator)
    before = [torch.randn(8, *each.shape, generator=generator).to(each.dtype) for each in kind.tensors]
    if slack:
        before[1] = torch.tensor([0, 4, 69, 1, 0, 0, 0, 0], dtype=torch.int32)
    results = []
    for device in map(torch.device, ("cpu", "hpu")):
        state = tuple(each.clone().to(device) for each in before)
        step = step_of(CUTS, [kind], device)
        inputs = inputs_of(kind, x)
        output = kind.attend(type(inputs)(*(each.to(device) for each in inputs)), state, step)
        results.append([output.cpu(), *(each.cpu() for each in state)])
    for found, expected in zip(results[1], results[0]):
        torch.testing.assert_close(found[:-1], expected[:-1], rtol=1e-5, atol=1e-5)
    assert torch.equal(results[1][1][[3, 5, 6]], before[0][[3, 5, 6]]), "rows without new tokens"


@pytest.mark.parametrize("kind", [DELTA, SPACE], ids=["delta", "space"])
def test_a_row_without_numbers_leaves_others_alone(
    kind: MatrixState[Any], simulated_hpu: sim.SimulatedHpu
) -> None:
    device, cuts = torch.device("hpu"), (Cut(0, 700), Cut(0, 100))
    x = torch.randn(800, 40, generator=torch.Generator().manual_seed(0))
    x[50] = torch.nan
    inputs = inputs_of(kind, x)
    state = tuple(torch.zeros(3, *each.shape, dtype=each.dtype).to(device) for each in kind.tensors)
    output = kind.attend(
        type(inputs)(*(each.to(device) for each in inputs)), state, step_of(cuts, [kind], device)
    )
    assert output[:700].cpu().isnan().any()
    assert not output[700:].cpu().isnan().any()
    assert not state[0][1].cpu().isnan().any()


REAL: dict[str, dict[str, Any]] = {
    "Qwen3NextConfig": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mlp_only_layers": [0, 1],
    },
    "NemotronHConfig": {
        "layers_block_type": ["linear_attention", "full_attention"],
        "ssm_state_size": 128,
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "n_groups": 1,
        "moe_intermediate_size": 16,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
    },
}
"""An eighth of the heads of a layer of the published models, beside a small one that attends."""
CHEAP, *DEAR = product(
    REAL, ("c--/q512/s0/u0/l1", "c--/q2048/s0/u0/l1", "csu/q512/s8/u8/l17", "--u/q32/s0/u32/l32")
)


@pytest.mark.parametrize(
    ("name", "shape"), [CHEAP, *(pytest.param(*case, marks=pytest.mark.slow) for case in DEAR)]
)
def test_graphs_have_memory_for_the_intermediates_of_recurrences(
    name: str, shape: str, tmp_path: Path
) -> None:
    config = make_config(name, **{**BASE, **HYBRIDS[name], "num_hidden_layers": 2, **REAL[name]})
    config.save_pretrained(tmp_path)
    bucket = BatchShape.parse(shape)
    structure = build_structure(
        EngineConfig(
            model=ModelConfig(path=tmp_path, dtype="bfloat16"),
            cache=CacheConfig(block_size=16, num_blocks=64),
            scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2048),
            graph=GraphConfig(table=BucketTable((bucket,))),
        ),
        GAUDI2,
    )
    sizes = StepSizes.of(structure.model.specs, config, 16, 2)
    peak = audit_bucket(structure, bucket).peak_transient_bytes
    assert sizes.transient_bytes(bucket) < peak, "more than attention needs"
    sizes = replace(sizes, recurrences=frozenset(structure.model.recurrences))
    assert peak <= sizes.transient_bytes(bucket) <= 2 * peak
    reserved = GraphMemory(KEPT["hpu-compile"], 1, sizes)
    tables, memory = structure.tables, structure.memory
    tables.backend = NamedBackend()
    staged = staged_bytes(structure.geometry, tables.largest(memory))
    assert tables.graph_bytes(memory, 2) == staged + reserved.total_bytes([bucket])
    layers = memory.layers[: len(structure.model.specs)]
    planned = graph_bytes(tmp_path, read_model(tmp_path), layers, 16, 1, GAUDI2.memory_bytes)
    assert planned(bucket) == reserved.kept_bytes(bucket)


SHAPES = ("c--/q4096/s0/u0/l1", "csu/q8192/s64/u64/l17")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), every(3, product(("Qwen3NextConfig", "NemotronHConfig"), SHAPES)))
def test_no_graph_of_states_grows_with_tokens(name: str, shape: str, tmp_path: Path) -> None:
    config = make_config(name, **{**BASE, **HYBRIDS[name], "max_position_embeddings": 8192})
    config.save_pretrained(tmp_path)
    structure = build_structure(
        EngineConfig(
            model=ModelConfig(path=tmp_path, attention="hpu"),
            cache=CacheConfig(block_size=128, num_blocks=128),
            scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=8192),
        ),
        GAUDI3,
    )
    graphs = lower_bucket(structure, BatchShape.parse(shape))
    assert max(graph.num_nodes for graph in graphs) <= REGION_NODES, graphs
    assert not any(graph.store_copies for graph in graphs)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated_hpu")
@pytest.mark.parametrize("name", every(2, ["Qwen3NextConfig", "NemotronHConfig"]))
def test_a_simulated_hpu_serves_long_steps_with_nothing_compiled_late(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path, name, max_position_embeddings=1024)
    table = BucketTable.from_strings(("c-u/q768/s0/u96/l3", "--u/q3/s0/u96/l3", "csu/q768/s96/u96/l3"))
    served = load(
        tmp_path,
        device="hpu-sim",
        dtype="float32",
        max_model_len=768,
        max_num_batched_tokens=768,
        buckets=table,
        num_blocks=96,
        fail_on_recompile=True,
    )
    served.warmup()
    prompts = prompts_of([701, 3, 30])
    with sim.watch() as seen:
        done = served.engine.generate(prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    report = seen.report()
    assert (report.new_graphs, report.new_recipes) == (0, 0)
    assert not report.excused
    assert [sample.token_ids for [sample] in done] == [greedy(model, each, 5) for each in prompts]
