"""``hpu-duo table``: tables shown, compared, merged, imported from vllm-gaudi and exported to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from graphs import BatchShape, Phase
from graphs.bucket_file import GaudiBucket, read_gaudi_buckets, read_table, write_shapes, write_table
from graphs.table import Miss

Run = Callable[..., Result]
SMALL, LARGE, PROMPT = map(BatchShape.parse, ("--u/q4/s0/u16/l4", "--u/q8/s0/u64/l8", "c--/q64/s0/u0/l1"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.txt"
    write_table(path, [SMALL, LARGE, PROMPT])
    return path


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.jsonl"
    steps = {"--u/q4/s0/u16/l4": 5, "--u/q2/s0/u60/l2": 2, "c--/q65/s0/u0/l1": 3}
    write_shapes(path, {BatchShape.parse(text): count for text, count in steps.items()})
    return path


def fields(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_show_counts_the_steps_of_each_bucket(hpu_duo: Run, table: Path, recording: Path) -> None:
    found = fields(hpu_duo("table", "show", table, "--from-shapes", recording, "--json"))
    steps = {one["bucket"]: one["num_steps"] for one in found["buckets"]}
    assert steps == {str(SMALL): 5, str(LARGE): 2, str(PROMPT): 0}
    padding = found["padding"]
    assert (padding["num_steps"], padding["num_missed"]) == (10, 3)
    assert 0 < padding["mean"] < padding["worst"]
    shown = hpu_duo("table", "show", table, "--from-shapes", recording).stdout
    assert "3 buckets: 2 of --u, 1 of c--" in shown
    assert "10 recorded steps, 3 without a bucket; padding " in shown


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_without_tokens_is_refused(hpu_duo: Run, table: Path, size: int) -> None:
    refused = hpu_duo("table", "show", table, "--block-size", size)
    assert refused.exit_code == 2
    assert "greater than or equal to 1" in " ".join(refused.stderr.split())


def test_diff_and_merge(hpu_duo: Run, table: Path, recording: Path, tmp_path: Path) -> None:
    other, out = tmp_path / "other.txt", tmp_path / "merged.txt"
    longer = BatchShape.parse("c--/q128/s0/u0/l1")
    write_table(other, [SMALL, LARGE, longer])
    shown = hpu_duo("table", "diff", table, other, "--from-shapes", recording).stdout.splitlines()
    assert shown[:2] == [f"- {PROMPT}", f"+ {longer}"]
    assert shown[2] == f"1 only in {table}, 1 only in {other}, 2 in both"
    found = fields(hpu_duo("table", "diff", table, other, "--from-shapes", recording, "--json"))
    assert [one["num_missed"] for one in found["padding"]] == [3, 0]
    assert hpu_duo("table", "merge", table, other, "--out", out).exit_code == 0
    assert set(read_table(out)) == {SMALL, LARGE, PROMPT, longer}
    assert "expected two tables or more" in hpu_duo("table", "merge", table, "--out", out).stderr


def test_import_adds_buckets_for_every_mixed_step(hpu_duo: Run, tmp_path: Path) -> None:
    theirs, out = tmp_path / "theirs.txt", tmp_path / "table.txt"
    theirs.write_text("([1, 4], 1, [16, 64])\n(1, [32, 64], [0, 8])\n", encoding="utf-8")
    result = hpu_duo("table", "import", theirs, "--out", out)
    assert result.exit_code == 0, result.stderr
    found = read_table(out)
    given = {bucket.to_shape() for bucket in read_gaudi_buckets(theirs)}
    added = set(found) - given
    assert given < set(found)
    assert result.stdout.splitlines()[0] == f"{out}: 8 buckets of the file, {len(added)} mixed ones added:"
    assert {line[2:] for line in result.stdout.splitlines()[1:]} == set(map(str, added))
    assert {str(shape.phase) for shape in added} == {"c-u", "csu", "-su"}
    for (chunk, shared), (rows, blocks) in product([(60, 0), (1, 8), (32, 0)], [(1, 64), (4, 3)]):
        phase = Phase(causal=True, shared=shared > 0, unique=True)
        mixed = BatchShape(phase, chunk + rows, shared, blocks, min(1 + rows, 4))
        assert not isinstance(found.fit(mixed), Miss), mixed
        cached = BatchShape(Phase(shared=True, unique=True), rows, blocks, blocks, rows)
        assert not isinstance(found.fit(cached), Miss), cached
    # Nothing exceeds the sizes of the file: larger tables than the limits are refused.
    assert max(shape.query_len for shape in found) == 64
    assert max(shape.num_logits for shape in found) == 4


def test_import_adds_small_mixed_buckets_for_small_decodes(hpu_duo: Run, tmp_path: Path) -> None:
    theirs, out = tmp_path / "theirs.txt", tmp_path / "table.txt"
    theirs.write_text("([1, 4], 1, [16, 64, 256])\n(1, 64, 0)\n", encoding="utf-8")
    assert hpu_duo("table", "import", theirs, "--out", out, "--max-num-batched-tokens", 68).exit_code == 0
    added = {str(shape) for shape in read_table(out) if shape.phase != Phase(unique=True)}
    beside = {f"c-u/q68/s0/u{blocks}/l4" for blocks in (256, 64, 16)}
    sharing = {
        f"-su/q4/s{blocks // 2}/u{unique}/l4" for blocks in (16, 64, 256) for unique in (blocks, blocks // 4)
    }
    assert added == {"c--/q64/s0/u0/l1", *beside, *sharing, "-su/q4/s256/u256/l4"}
    few = hpu_duo("table", "import", theirs, "--out", out, "--decode-sizes", 1)
    assert sum(line.startswith("+ c-u/") for line in few.stdout.splitlines()) == 1


def test_import_says_what_a_file_lacks(hpu_duo: Run, tmp_path: Path) -> None:
    theirs, out = tmp_path / "theirs.txt", tmp_path / "table.txt"
    theirs.write_text("(1, 64, 0)\n", encoding="utf-8")
    result = hpu_duo("table", "import", theirs, "--out", out)
    assert result.exit_code == 0
    assert "no bucket of --u (decodes, so that no mixed bucket was added)" in result.stderr
    assert "no bucket of cs- (prompts that continue in chunks" in result.stderr
    theirs.write_text("q4\n", encoding="utf-8")
    refused = hpu_duo("table", "import", theirs, "--out", out)
    assert refused.exit_code == 2
    assert "line 1: expected (batch, query_len, num_context_blocks)" in refused.stderr


def test_export_splits_mixed_buckets(hpu_duo: Run, tmp_path: Path) -> None:
    table, out = tmp_path / "table.txt", tmp_path / "theirs.txt"
    write_table(table, [BatchShape.parse("csu/q40/s8/u16/l4")])
    assert hpu_duo("table", "export", table, "--out", out).exit_code == 0
    assert read_gaudi_buckets(out) == (GaudiBucket(1, 40, 8), GaudiBucket(4, 1, 16))
