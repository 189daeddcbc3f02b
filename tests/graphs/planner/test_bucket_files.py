from pathlib import Path

import pytest

from graphs import BatchShape, StepCost
from graphs.bucket_file import GaudiBucket, from_shape, read_table, write_gaudi_buckets, write_table
from graphs.table import PlannedPadding

GAUDI_FILE = """# prompts
(1, 2048, 0)
(1, [256, 512], [0, 4, 8])   # six buckets

(64, 1, 1024)
(1, 1, range(256, 512, 128))
"""


def test_a_table_survives_being_written_and_read(tmp_path: Path) -> None:
    shapes = tuple(map(BatchShape.parse, ["--u/q1/s0/u8/l1", "csu/q64/s8/u16/l4"]))
    path = tmp_path / "table.txt"
    write_table(path, shapes, "planned for\ntwo shapes")
    table = read_table(path, StepCost(block_size=16))
    assert table.buckets == shapes
    assert table.cost == StepCost(block_size=16)
    assert path.read_text().startswith("# planned for\n# two shapes\n--u/q1")


def test_a_table_keeps_the_padding_that_it_was_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    planned_padding = PlannedPadding.by(StepCost(), 0.064)
    write_table(path, [BatchShape.parse("--u/q1/s0/u8/l1")], "planned", planned_padding)
    assert read_table(path).planned_padding == planned_padding
    assert path.read_text().splitlines()[:2] == ["# planned", "# padding: 0.064 by StepCost"]
    write_table(path, [BatchShape.parse("--u/q1/s0/u8/l1")], "planned")
    assert read_table(path).planned_padding is None


@pytest.mark.parametrize("padding", ["-0.5", "much", "nan", "inf"])
def test_a_promise_of_no_padding_is_refused_with_its_line(tmp_path: Path, padding: str) -> None:
    path = tmp_path / "table.txt"
    path.write_text(f"# planned\n# padding: {padding} by StepCost\n--u/q1/s0/u8/l1\n")
    with pytest.raises(ValueError, match=f"line 2: expected a padding of 0 or more, got '{padding}'"):
        read_table(path)


def test_the_three_spellings_of_the_gaudi_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "buckets.txt"
    path.write_text(GAUDI_FILE)
    prompts = [(1, 2048, 0), *((1, q, n) for q in (256, 512) for n in (0, 4, 8))]
    sizes = [*prompts, (64, 1, 1024), (1, 1, 256), (1, 1, 384)]
    buckets = [GaudiBucket(*each) for each in sizes]
    table = read_table(path).buckets
    assert set(table) == {bucket.to_shape() for bucket in buckets}
    write_gaudi_buckets(path, [*buckets, buckets[0]], "again")
    assert path.read_text().splitlines() == ["# again", *map(str, sizes)]
    assert read_table(path).buckets == table


def test_a_gaudi_file_is_a_table(tmp_path: Path) -> None:
    path = tmp_path / "buckets.txt"
    path.write_text("(2, 256, 4)\n(1, 128, 0)\n(64, 1, 1024)")
    assert set(map(str, read_table(path))) == {
        "cs-/q512/s8/u0/l2",
        "c--/q128/s0/u0/l1",
        "--u/q64/s0/u1024/l64",
    }


@pytest.mark.parametrize(
    ("shape", "buckets"),
    [
        ("--u/q8/s0/u64/l8", [(8, 1, 64)]),
        ("c--/q128/s0/u0/l4", [(1, 128, 0)]),
        ("cs-/q128/s7/u0/l4", [(1, 128, 7)]),
        ("csu/q128/s7/u64/l4", [(1, 128, 7), (4, 1, 64)]),
        ("-su/q8/s7/u64/l8", [(8, 1, 71)]),
    ],
)
def test_shapes_go_back_to_the_buckets_that_serve_their_parts(
    shape: str, buckets: list[tuple[int, int, int]]
) -> None:
    assert list(from_shape(BatchShape.parse(shape))) == [GaudiBucket(*bucket) for bucket in buckets]


@pytest.mark.parametrize(
    "line",
    [
        "(1, 2)",
        "(1, 2, 3, 4)",
        "(1, 2, 'x')",
        "(1, 2, 3",
        "(1, 2.5, 3)",
        "(True, 2, 3)",
        "(0, 1, 2)",
        "(1, 1, -1)",
        "(1, [], 2)",
        "(1, 1, range(5, 5))",
        "(1, 1, range(0, 5, 0))",
        "(1, 1, range(10**9))",
        "(1, 1, range(100000000))",
        "(1, 1, range(1, 10000000000000000000000000))",
        "(range(1, 2000), range(1, 2000), 1)",
        "(1, 1, __import__('os').getpid())",
        "(1, 1, open)",
        "(1, 1, [range(3)])",
    ],
)
def test_nonsense_in_a_gaudi_file_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "buckets.txt"
    path.write_text(f"# comment\n(1, 1, 1)\n{line}\n")
    with pytest.raises(ValueError, match=r"buckets\.txt, line 3: expected"):
        read_table(path)


def test_a_bad_line_of_a_table_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    path.write_text("\n--u/q1/s0/u8/l1\n--u/q1/s2/u8/l1\n")
    with pytest.raises(ValueError, match=r"table\.txt, line 3: .*no shared part"):
        read_table(path)


def test_files_without_buckets_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    with pytest.raises(ValueError, match=r"cannot read buckets from .*No such file"):
        read_table(path)
    path.write_text("# nothing\n")
    with pytest.raises(ValueError, match="at least one bucket"):
        read_table(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="it is not text"):
        read_table(path)
