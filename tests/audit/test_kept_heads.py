"""Audits of heads with a KV budget or a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpu_duo.cli.app import app
from hpu_duo.config.kv_plan import Keep, KVPlan

LIMITS = ["--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--block-size", "16", "--num-blocks", "64"]
PLAN = KVPlan(
    ((Keep("h2o", 20), Keep("ring:sink=4,recent=12")), (Keep("tova", 0.1), Keep()), (Keep(), Keep()))
)
H2O = "h2o 0.5, 20 slots, chunks of 16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "bucket", "kept"),
    [
        pytest.param(
            ("--kv-policy", "h2o", "--kv-budget", "20"),
            "csu/q32/s0/u0/l4",
            [H2O],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ("--kv-policy", "streaming-llm", "--kv-budget", "20"),
            "csu/q32/s0/u0/l4",
            ["streaming-llm 4, 20 slots, chunks of 16"],
            marks=pytest.mark.exhaustive,
        ),
        (("--kv-policy", "tova", "--kv-budget", "20"), "--u/q4/s0/u0/l4", ["tova 0, 20 slots, chunks of 16"]),
        pytest.param(
            ("--kv-policy", "h2o", "--kv-budget", "20", "--kv-prompt", "whole", "--no-enable-prefix-caching"),
            "csu/q32/s8/u0/l4",
            [f"{H2O} of whole prompts"],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ("--kv-plan", "PLAN"),
            "csu/q32/s8/u16/l4",
            [H2O, "tova 0, 103 slots, chunks of 16"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_steps_of_heads_with_a_budget_are_traced_and_named(
    config_dir: Path, tmp_path: Path, words: tuple[str, ...], bucket: str, kept: list[str]
) -> None:
    PLAN.save(tmp_path / "plan.yaml")
    given = [str(tmp_path / "plan.yaml") if word == "PLAN" else word for word in words]
    words = ("audit", "--model", str(config_dir), "--bucket", bucket, "--json")
    result = CliRunner().invoke(app, [*words, *LIMITS, *given])
    fields = json.loads(result.stdout)
    assert fields["violations"] == []
    recipes = fields["recipes"]
    assert sorted(budget["kept"] for recipe in recipes for budget in recipe["budgets"]) == kept


def test_policies_that_turn_queries_are_refused_without_weights(config_dir: Path) -> None:
    words = ["--kv-policy", "expected-attention", "--kv-budget", "20"]
    result = CliRunner().invoke(app, ["audit", "--model", str(config_dir), *LIMITS, *words])
    assert result.exit_code == 2
    assert "read from its weights, which are not there" in " ".join(result.output.split())
