"""Blocks and rings of two ranks that go to the host and come back: the tokens of ranks that keep them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hpu_duo.cli.app import app
from hpu_duo.device import Member, run_processes
from hpu_duo.engine.engine import Engine
from hpu_duo.kv.tiers.policy import LoadPolicy
from hpu_duo.kv.tiers.segments import RECORD_START, folders_of, scan, segments_of
from hpu_duo.sampling import SamplingParams
from tests.modeling.families import BLOCK, Zoo, prompts_of
from tests.ranks.test_kv_budget import PATTERN
from tests.ranks.work import Answer, Case, serve

pytestmark = pytest.mark.usefixtures("forked_ranks")

TEXTS = prompts_of([5 * BLOCK + 1, 4 * BLOCK + 3, 5 * BLOCK, 4 * BLOCK] * 2, seed=3)


def serve_loading(member: Member, cases: dict[str, Case]) -> dict[str, Answer]:
    """Serve, and load whatever there is: this model computes a block faster than a thread copies one.

    An engine goes on to write to its disk until it is idle. Before the case "damaged" each record of rank 1
    is changed.
    """
    generate = Engine.generate

    def generate_and_write(engine: Engine, *given: Any) -> Any:
        found = generate(engine, *given)
        while engine.settle_idle():
            pass
        return found

    @contextmanager
    def damaged(name: str) -> Iterator[None]:
        if name == "damaged" and member.rank == 1:
            _change(folders_of(Path(cases[name].cache["kv_offloading_disk"]))[2])
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadPolicy, "loads", lambda *_: True)
        patch.setattr(Engine, "generate", generate_and_write)
        return serve(member, cases, damaged)


def _change(folder: Path) -> None:
    for segment in segments_of(folder):
        with (folder / segment.name).open("r+b") as file:
            for stored in scan(folder, segment.name):
                assert stored is not None
                file.seek(stored.offset + RECORD_START)
                [byte] = file.read(1)
                file.seek(stored.offset + RECORD_START)
                file.write(bytes([byte ^ 1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def answers(zoo: Zoo, folder: Path) -> dict[str, Answer]:
    """Texts that come back, by heads and by context, with and without a tier."""
    prompts = [*TEXTS] * 2
    params = [SamplingParams(max_tokens=4, temperature=0)] * len(prompts)
    cases: dict[str, Case] = {}
    for name, parallel in (("heads", {}), ("context", {"retrieval_parallel": "context"})):
        scheduler: dict[str, Any] = {"max_model_len": 56, "max_num_seqs": 1}
        case = Case(
            zoo.load("llama_mha")[1],
            prompts,
            params,
            heads={"pattern": PATTERN},
            cache={"num_blocks": 40, "num_prefix_snapshots": 8, "kv_offloading_size": 0.02},
            scheduler=scheduler,
            model={"attention": "reference"},
            parallel=parallel,
        )
        cases[name] = case
        cases[f"plain {name}"] = replace(case, cache={"num_blocks": 64})
    on_disk = {
        "kv_offloading_disk": folder,
        "kv_offloading_disk_size": 0.01,
        "kv_offloading_write_policy": "write_through",
    }
    heads = cases["heads"]
    for name in ("written", "restarted", "damaged"):
        cases[name] = replace(
            heads, cache={**heads.cache, **on_disk}, prompts=TEXTS, params=params[: len(TEXTS)]
        )
    too_small = {**heads.cache, **on_disk, "kv_offloading_disk_size": 1e-5}
    cases["too small"] = replace(heads, cache=too_small)
    swap = {"num_blocks": 24, "num_prefix_snapshots": 8, "kv_offloading_size": 0.02, "swap_space": 0.02}
    for name, cache in (("swapped", {**swap, "preemption_mode": "swap"}), ("roomy", {"num_blocks": 64})):
        cases[name] = replace(
            heads,
            prompts=[text[: 4 * BLOCK] for text in TEXTS],
            params=[SamplingParams(max_tokens=24, temperature=0)] * len(TEXTS),
            cache=cache,
            scheduler={**heads.scheduler, "max_num_seqs": 4},
        )
    return run_processes(serve_loading, (cases,), [{}] * 2, 600)[0]


@pytest.mark.parametrize("name", ["heads", pytest.param("context", marks=pytest.mark.slow)])
def test_ranks_load_what_they_have_stored(answers: dict[str, Answer], name: str) -> None:
    answer = answers[name]
    assert not answer.error
    assert answer.tokens == answers[f"plain {name}"].tokens
    assert answer.seen["loaded"] > 0


def test_ranks_find_on_disk_what_all_of_them_have_written(answers: dict[str, Answer], folder: Path) -> None:
    expected = answers["plain heads"].tokens[: len(TEXTS)]
    for name in ("written", "restarted", "damaged"):
        assert not answers[name].error
        assert answers[name].tokens == expected
        assert answers[name].seen["disk"]["num_failures"] == 0
    written, restarted, damaged = (answers[name].seen["disk"] for name in ("written", "restarted", "damaged"))
    assert written["num_written"] > 0
    assert restarted["num_hit_tokens"] > 0
    assert restarted["num_damaged"] == 0
    # Rank 0 has undamaged records, and uses none.
    assert damaged["num_damaged"] > 0
    assert damaged["num_read"] == damaged["num_hit_tokens"] == 0
    listed = CliRunner().invoke(app, ["kv-cache", "list", str(folder), "--json"]).output
    assert "rank-0-of-2/" in listed
    assert "rank-1-of-2/" in listed


def test_ranks_name_the_size_of_a_disk_that_is_too_small(answers: dict[str, Answer]) -> None:
    expected = r"expected kv_offloading_disk_size of one record or more, [\d,]+ bytes, got 5,\d+ bytes"
    assert re.fullmatch(f"{expected} for rank 0 of 2", answers["too small"].error)


def test_ranks_swap_preempted_requests(answers: dict[str, Answer]) -> None:
    swapped = answers["swapped"]
    assert not swapped.error
    assert swapped.tokens == answers["roomy"].tokens
    assert swapped.seen["swap"]["num_out"] == swapped.seen["swap"]["num_in"] > 0
