"""Buckets that a model is loaded with: by whose cost they are ranked."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphs import BucketTable, SkippingCost, StepCost
from graphs.backends.compile import CompileBackend
from graphs.bucket_file import write_table
from tests.engine.tiny import PATTERN, Tiny

TABLE = BucketTable.from_strings(["csu/q16/s64/u64/l4", "csu/q8/s64/u64/l4"])


@pytest.mark.parametrize(("attention", "kind"), [("reference", StepCost), ("sdpa", SkippingCost)])
def test_buckets_from_a_file_are_ranked_as_the_default_table_of_the_model(
    tiny: Tiny, tmp_path: Path, attention: str, kind: type
) -> None:
    write_table(tmp_path / "buckets.txt", TABLE)
    options = {"attention": attention, "pattern": PATTERN, "num_blocks": 64}
    given = tiny.load(**options, buckets=tmp_path / "buckets.txt").engine.runner.graphs.table
    default = tiny.load(**options, graphs=CompileBackend(compiler="eager")).engine.runner.graphs.table
    assert given.buckets == TABLE.buckets
    assert given.cost == default.cost
    assert isinstance(given.cost, kind)


def test_a_manifest_gives_buckets_without_a_cost(tiny: Tiny, tmp_path: Path) -> None:
    options = {
        "num_blocks": 64,
        "max_num_seqs": 1,
        "on_miss": "capture",
        "graphs": CompileBackend(compiler="eager"),
    }
    first = tiny.load(**options, buckets=TABLE.from_strings(["csu/q16/s64/u64/l1"]))
    first.warmup(manifest=tmp_path / "warm.json")
    table = tiny.load(**options, buckets=tmp_path / "warm.json").engine.runner.graphs.table
    assert table.buckets == first.engine.runner.graphs.table.buckets
    assert table.cost == tiny.load(**options).engine.runner.graphs.table.cost != StepCost(block_size=8)


def test_a_table_with_a_cost_of_its_own_keeps_it(tiny: Tiny) -> None:
    table = BucketTable(TABLE.buckets, lambda bucket: 1.0 + bucket.query_len)
    assert tiny.load(num_blocks=64, buckets=table).engine.runner.graphs.table is table
