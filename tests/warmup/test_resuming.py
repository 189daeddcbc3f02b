"""However a warm-up is cut into pieces, each bucket is captured once and the file is right at any moment."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphs import BucketTable, MissPolicy, Phase
from graphs.backends.compile import CompileBackend, cpu_compile_problem
from graphs.backends.hpu import HpuCompileBackend, HpuGraphBackend
from graphs.compile_cache import CompileCache
from graphs.manifest import GraphRecord, read_manifest, write_manifest
from hpu_duo import HPUDuoModel
from tests.engine.tiny import PATTERN, Tiny, tokens_of
from tests.warmup.killed import GREEDY, PROMPTS
from tests.warmup.killed import TABLE as TABLE_OF_KILLED

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


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(cpu_compile_problem() is not None, reason="needs a C++ compiler")
def test_a_killed_warm_up_is_resumed_by_another_process(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one captures the rest only, and a server finds the code of all in the compiler's cache."""
    path = tmp_path / "manifest.json"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "tests.warmup.killed", str(tiny.path), str(path)]
    assert subprocess.run([*command, "2"], check=False).returncode == -signal.SIGKILL
    done = measured(path)
    assert len(done) == 2
    resumed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = json.loads(resumed.splitlines()[-1])
    assert (set(found["captured"]), found["num_skipped"]) == ({str(b) for b in TABLE_OF_KILLED} - done, 2)
    assert read_manifest(path).is_complete
    # All three are captured, none is compiled or captured late.
    assert found["served"] == [3, 0, 0]
    assert found["tokens"] == tokens_of(tiny.load(pattern=PATTERN).engine.generate(PROMPTS, GREEDY))

    def load() -> HPUDuoModel:
        return tiny.load(graphs="compile", pattern=PATTERN, buckets=path)

    # An emptied cache has nothing of what the manifest means, and costs of other software are no code.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    emptied = load().prepare_warmup(manifest=path, resume=True)
    assert (len(emptied.buckets), emptied.skipped) == (3, ())
    assert any("another one than theirs" in note for note in emptied.notes)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    manifest = read_manifest(path)
    write_manifest(path, replace(manifest, versions={**manifest.versions, "torch": "1.0"}))
    older = load().prepare_warmup(manifest=path, resume=True)
    assert (len(older.buckets), older.skipped) == (3, ())
    assert any("torch 1.0 then" in note for note in older.notes)


def test_nothing_is_skipped_where_graphs_end_with_their_process(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    tiny.load(graphs="eager", buckets=TABLE).warmup(manifest=path)
    again = tiny.load(graphs="eager", buckets=TABLE).prepare_warmup(manifest=path, resume=True)
    assert (len(again.buckets), again.skipped) == (len(TABLE), ())
    assert again.notes == ("graphs of eager end with their process: the manifest's are captured again",)


def test_a_manifest_of_another_configuration_is_named_and_replaced(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    tiny.load(graphs="eager", buckets=TABLE).warmup(manifest=path)
    other = tiny.load(graphs="eager", buckets=TABLE, pattern=PATTERN)
    (note,) = other.warmup(manifest=path, resume=True).notes
    assert note.startswith(f"{path} is for another configuration, 3 of its entries differ: attention.layer_0")
    assert note.endswith("it is replaced, and nothing of it is used")


def test_a_cache_is_known_by_its_content(tmp_path: Path) -> None:
    first = CompileCache.at(tmp_path / "cache")
    assert CompileCache.at(tmp_path / "cache") == first
    (tmp_path / "cache").rename(tmp_path / "moved")
    assert CompileCache.at(tmp_path / "moved").identifier == first.identifier
    assert CompileCache.at(tmp_path / "cache").identifier != first.identifier
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot use the compiler's cache in .*file: File exists"):
        CompileCache.at(tmp_path / "file")


@pytest.mark.parametrize(
    ("config", "directory"),
    [
        ("/r,false,1024", "/r"),
        ("/r,true,1024", None),
        ("/r,False,0,true", "/r"),
        ("/r,true,0,true", "/r"),
        (",false,1024", None),
        ("", None),
    ],
)
def test_recipes_outlive_a_process_unless_the_bridge_clears_them(
    monkeypatch: pytest.MonkeyPatch, config: str, directory: str | None
) -> None:
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", config)
    expected = None if directory is None else Path(directory)
    assert HpuCompileBackend().cache_directory() == HpuGraphBackend().cache_directory() == expected
    assert CompileBackend("eager").cache_directory() is None
