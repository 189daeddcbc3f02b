"""However a warm-up is cut into pieces, each bucket is captured once and the file is right at any moment."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphs import BucketTable, MissPolicy, Phase
from graphs.manifest import GraphRecord, read_manifest
from hpu_duo import HPUDuoModel
from tests.engine.tiny import PATTERN, Tiny

TABLE = BucketTable.from_strings(
    [
        "csu/q16/s30/u48/l4",
        "csu/q8/s4/u8/l2",
        "--u/q4/s0/u48/l4",
        "--u/q1/s0/u8/l1",
        "c--/q16/s0/u0/l4",
    ]
)


class InterruptedHere(Exception):
    """Stands for whatever may end a warm-up."""


@pytest.fixture(scope="module")
def served(tiny: Tiny) -> HPUDuoModel:
    return tiny.load(graphs="eager", pattern=PATTERN, buckets=TABLE)


_phases = st.none() | st.sets(st.sampled_from(["csu", "--u", "c--"]), min_size=1)
_pieces = st.lists(st.tuples(_phases, st.none() | st.integers(1, len(TABLE))), max_size=5)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=_pieces)
def test_pieces_of_a_warm_up_add_up_to_a_whole_one(
    served: HPUDuoModel, tmp_path: Path, pieces: list[tuple[set[str] | None, int | None]]
) -> None:
    path = tmp_path / "manifest.json"
    path.unlink(missing_ok=True)
    runner = served.engine.runner.executor
    runner.graphs = runner.graphs.with_table(TABLE, MissPolicy.ERROR)
    captured: set[str] = set()
    for phases, stop_after in [*pieces, (None, None)]:

        def note(done: int, total: int, record: GraphRecord, stop_after: int | None = stop_after) -> None:
            captured.add(str(record.shape))
            assert measured(path) == captured
            if done == stop_after:
                raise InterruptedHere

        chosen = None if phases is None else ",".join(sorted(phases))
        try:
            served.warmup(note, phases=chosen, manifest=path)
        except InterruptedHere:
            continue
        wanted = {str(b) for b in TABLE if phases is None or str(b.phase) in phases}
        assert wanted <= captured
    assert runner.graphs.counters.captures == len(TABLE)
    assert read_manifest(path).is_complete
    assert read_manifest(path).phases == {
        str(Phase.parse(p)): n for p, n in (("--u", 2), ("c--", 1), ("csu", 2))
    }


def measured(path: Path) -> set[str]:
    """The buckets whose cost the file tells."""
    return {str(record.shape) for record in read_manifest(path).graphs if record.seconds is not None}
