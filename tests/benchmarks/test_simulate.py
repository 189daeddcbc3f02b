"""Parts of the benchmarks of the simulator that can be wrong without anybody seeing it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulate_claims import CLAIMS, COLUMNS, LLAMA, example, growth
from hpu_duo.scheduling import make_policy


def test_the_example_of_ltr_comes_out_as_in_the_paper() -> None:
    assert "Repeated: 6.67 s and 1.27 s." in example()


def test_growth_is_read_between_points() -> None:
    assert growth({"largest_service_difference_by_time": [[0, 0], [10, 4], [20, 8]]}, 0.25) == 2.0


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim.name for claim in CLAIMS])
def test_every_claim_names_policies_and_columns_that_there_are(claim) -> None:  # type: ignore[no-untyped-def]
    assert set(claim.columns) <= set(COLUMNS)
    assert all(make_policy(policy).name == policy for policy in claim.policies)


def test_a_short_claim_runs_and_makes_its_section(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    claim = next(each for each in CLAIMS if each.name == "starving")
    arguments = claim.arguments.replace("--until 60", "--until 1").replace("700", "20")
    short = replace(claim, arguments=arguments, policies=claim.policies[:2])
    picture = tmp_path / "picture.svg"
    runs = short.run(tmp_path, picture)
    section = "\n".join(replace(short, verdict=lambda runs: "so it is").page(runs, picture))
    assert short.command in section
    assert "so it is" in section
    assert "| lpm:patience=inf |" in section
    assert picture.exists()
