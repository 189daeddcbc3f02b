"""Capacity of heads with a KV budget or a plan: the bytes of the engine with the same options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, MistralConfig
from typer.testing import CliRunner

from graphs import BatchShape, Phase
from hpu_duo import HPUDuoModel
from hpu_duo.cli.app import app
from hpu_duo.cli.planning.hardware import HardwareOptions
from hpu_duo.config.kv_plan import Keep, KVPlan
from hpu_duo.config.limits import SchedulerConfig
from hpu_duo.heads import HeadPattern
from hpu_duo.planning import Deployment
from hpu_duo.planning.read_model import read_model
from tests.modeling.families import BASE, BLOCK, save_random

MAX_LEN, ROWS, TOKENS, NUM_BLOCKS = 80, 4, 64, 50
RING, H2O, SHARE, TOVA = Keep("ring:sink=2,recent=5"), Keep("h2o", 9), Keep("h2o", 0.3), Keep("tova", 9)
PLAN = KVPlan(((Keep(), RING), (H2O, SHARE), (TOVA, H2O), (RING, RING)))
SCORES = np.arange(8, dtype=np.float32).reshape(4, 2) / 8
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"kv_policy": "h2o", "kv_budget": 9}, {}),
    ("llama", {"kv_policy": "tova", "kv_budget": 0.2, "kv_chunk": 16}, {}),
    ("llama", {"kv_policy": "h2o:positions=cache", "kv_budget": 9}, {}),
    ("llama", {"kv_policy": "snapkv:window=4", "kv_budget": 12}, {"pattern": True, "sparsity": 0.5}),
    ("sliding", {"kv_policy": "h2o", "kv_budget": 9}, {}),
    ("llama", {"kv_plan": True}, {}),
    ("llama", {"kv_plan": True, "kv_chunk": 24}, {}),
    ("llama", {"kv_policy": "h2o", "kv_budget": 9, "kv_prompt": "whole"}, {}),
    ("llama", {"kv_policy": "snapkv:window=4", "kv_budget": 9, "kv_prompt": "whole", "kv_chunk": 16}, {}),
    ("llama", {"attention_rule": "quest:pages=4,every=1"}, {}),
    ("sliding", {"attention_rule": "quest:pages=4,every=4"}, {}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kept")
    configs = {"llama": LlamaConfig(**BASE), "sliding": MistralConfig(**BASE, sliding_window=11)}
    for name, config in configs.items():
        save_random(config, folder / name)
    HeadPattern(SCORES, sink=2, recent=5).save(folder / "pattern")
    PLAN.save(folder / "plan.yaml")
    return {name: folder / name for name in (*configs, "pattern", "plan.yaml")}


def deployed(model: Path, scheduler: SchedulerConfig, hardware: dict[str, Any], **kept: Any) -> Deployment:
    options = HardwareOptions(kv_cache_dtype=["bf16"], **hardware)
    serving = options.on("gaudi3", scheduler, BLOCK, kept)
    return options.deployment(read_model(model), serving, MAX_LEN)


@pytest.mark.parametrize(
    ("name", "kept", "heads", "caches_prefixes"),
    [
        (*case, caches_prefixes)
        for case in CASES
        for caches_prefixes in (False, True)
        if not (caches_prefixes and "kv_prompt" in case[1])  # whole prompts take up no cached prefix
    ],
)
def test_capacity_counts_the_bytes_of_the_engine_with_the_same_options(
    models: dict[str, Path], name: str, kept: dict[str, Any], heads: dict[str, Any], caches_prefixes: bool
) -> None:
    is_whole = kept.get("kv_prompt") == "whole"
    kept = {**kept, **({"kv_plan": models["plan.yaml"]} if "kv_plan" in kept else {})}
    pattern = {"pattern": models["pattern"]} if "pattern" in heads else {}
    scheduler = SchedulerConfig(
        max_num_seqs=ROWS, max_num_batched_tokens=MAX_LEN + ROWS if is_whole else TOKENS, max_chunk_rows=2
    )
    prefixes = {
        "enable_prefix_caching": caches_prefixes,
        "num_prefix_snapshots": 3 if caches_prefixes else None,
    }
    shares = {"sparsity": [heads["sparsity"]]} if "sparsity" in heads else {}
    deployment = deployed(
        models[name], scheduler, {**pattern, **shares, **prefixes, "max_layer_kinds": 8}, **kept
    )
    served = HPUDuoModel.from_pretrained(
        models[name],
        dtype="bfloat16",
        attention="reference",
        block_size=BLOCK,
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_LEN,
        **{key: getattr(scheduler, key) for key in ("max_num_seqs", "max_num_batched_tokens")},
        max_chunk_rows=scheduler.max_chunk_rows,
        **prefixes,
        **{**heads, **pattern},
        **kept,
    )
    store = served.engine.runner.store
    counted = deployment.plan(ROWS, NUM_BLOCKS)
    # Where a policy turns queries, the engine has read frequencies besides, which take no memory.
    assert replace(counted, layers=store.plan.layers, graph_bytes=store.plan.graph_bytes) == store.plan
    for bytes_of in ("total_bytes", "row_bytes", "block_bytes", "scratch_bytes"):
        assert getattr(counted, bytes_of) == getattr(store.plan, bytes_of)
    assert counted.total_bytes == store.num_bytes
    limits = served.engine.scheduler.limits
    assert (deployment.chunk_grid, deployment.last_chunk) == (limits.chunk_grid, limits.last_chunk)
    assert counted.num_regions == limits.num_regions == (2 if is_whole and "kv_chunk" in kept else 0)
    # Fewer requests take all, until one more would not fit.
    fits = deployment.count_requests(MAX_LEN)
    most = deployment.plan(fits, fits * -(-MAX_LEN // BLOCK)).total_bytes
    assert most <= deployment.kv_bytes < most + 2 * counted.bytes_per_request(MAX_LEN)


def test_devices_share_heads_and_only_tova_sums_scores(models: dict[str, Path]) -> None:
    scheduler = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=TOKENS)

    def served(policy: str, devices: int) -> Deployment:
        kept = {"kv_policy": policy, "kv_budget": 9, "kv_chunk": 16}
        return deployed(models["llama"], scheduler, {"devices": devices}, **kept)

    one, two = served("h2o", 1), served("h2o", 2)
    # Bytes are those of all devices together.
    assert two.plan(ROWS, NUM_BLOCKS) == one.plan(ROWS, NUM_BLOCKS)
    assert two.kv_bytes > one.kv_bytes
    decode, chunk = (BatchShape(Phase(unique=True), 3, 0, 0, 3), BatchShape(Phase(True, True), 16, 0, 0, 1))

    def summed(policy: str, bucket: BatchShape) -> float:
        return served(policy, 2).engine_work.of(bucket).reduced_bytes

    # A float32 score for each slot of 3 rows, or of 9 slots and 16 new tokens of a prompt, in 4 layers.
    assert summed("tova", decode) - summed("h2o", decode) == 4 * 4 * 3 * 9
    assert summed("tova", chunk) - summed("h2o", chunk) == 4 * 4 * (9 + 16) * scheduler.max_chunk_rows
    assert summed("local", chunk) == summed("h2o", chunk)


def test_the_commands_take_the_options_and_say_what_is_kept(models: dict[str, Path]) -> None:
    limits = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--block-size", "8")
    limits = (*limits, "--kv-cache-dtype", "bf16", "--no-enable-prefix-caching", "--json")

    def run(*words: object) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*map(str, words), "--model", str(models["llama"]), *limits])
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    plan, quick = ("--kv-plan", models["plan.yaml"]), ("--strategy", "thinned")
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    expected = deployed(
        models["llama"], scheduler, {"enable_prefix_caching": False}, kv_plan=models["plan.yaml"]
    ).plan(1, 1)
    (found,) = run("capacity", "--context", 80, *plan)["capacities"]
    assert found["points"][0]["bytes_per_request"] == expected.bytes_per_request(80)
    assert "plan.yaml" in found["kept"]
    planned = run("plan", "--hardware", "gaudi3", "--max-model-len", 80, "--context", 80, *plan, *quick)
    assert planned["hardware"]["capacities"][0]["points"] == [found["points"][0]]
    assert planned["limits"]["chunk_grid"] == 56
    (found,) = run("capacity", "--context", 80, "--kv-policy", "h2o", "--kv-budget", 0.2)["capacities"]
    # Keys and values of 8 in bfloat16, a position and a score, in 16 slots of 8 heads.
    assert found["points"][0]["bytes_per_request"] == 8 * 16 * (2 * 8 * 2 + 8)
    assert (found["sparsity"], found["kept"]) == (1.0, "0.2 of the longest request under h2o")
    rule = ("--attention-rule", "quest:pages=4,every=2")
    (found,) = run("capacity", "--context", 80, *rule)["capacities"]
    # Of every block of 8 tokens two slots more, for bounds and for a choice: 4 layers of 2 heads of 8.
    assert found["points"][0]["bytes_per_request"] == 10 * 8 * (8 + 2) * 2 * 8 * 2
    assert (found["kept"], found["not_served"]) == (
        "all tokens under " + rule[1],
        [f"attention_rule {rule[1]!r} on HPU"],
    )


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (
            "capacity",
            "--devices 2 --kv-policy tova --kv-budget 9 --retrieval-parallel context",
            "retrieval_parallel='heads' only",
        ),
        ("capacity", "--devices 2 --kv-plan PLAN", "those in layer 2 that keep tova 0, 9 slots, "),
        ("capacity", "--kv-plan PLAN --sparsity 0.5", "--sparsity is of heads that keep rings"),
        ("capacity", "--kv-policy h2o --kv-budget 9 --sink 2", "--sink is of heads that keep rings"),
        ("capacity", "--kv-policy h2o", "kv_policy and kv_budget or neither"),
        ("capacity", "--kv-plan PLAN --max-layer-kinds 3", "at most max_layer_kinds=3 kinds"),
        ("plan", "--kv-plan PLAN --num-blocks 9", "expected --hardware with --kv-plan, got none"),
    ],
)
def test_what_the_engine_refuses_is_refused_by_name(
    models: dict[str, Path], command: str, words: str, message: str
) -> None:
    given = words.replace("PLAN", str(models["plan.yaml"])).split()
    result = CliRunner().invoke(app, [command, "--model", str(models["llama"]), *given])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
