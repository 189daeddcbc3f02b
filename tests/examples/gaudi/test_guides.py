"""The guides: every file, variable and option in them exists; ``tests/docs`` reads their commands."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml

from hpu_duo import HPUDuoModel
from tests.docs.commands import options_of, shown_commands
from tests.examples.gaudi.gaudi_server import GAUDI, ROOT

GUIDES = sorted(path for path in GAUDI.glob("*.md") if path.name != "variables.md")
COMPARISONS = [GAUDI / "from-vllm-gaudi.md", GAUDI / "from-optimum-habana.md"]
VARIABLES = {one["name"] for one in yaml.safe_load((GAUDI / "env" / "variables.yaml").read_text("utf-8"))}
VERDICTS = {"same", "other name", "not needed", "missing"}
LAUNCH = {"--env", "--dry-run", "--again", "check", "limits", "plan", "warmup", "verify", "serve", "FILE"}


def guides() -> list[str]:
    return [path.name for path in GUIDES]


def text_of(name: str) -> str:
    return (GAUDI / name).read_text(encoding="utf-8")


def here(name: str) -> list[tuple[str, str, str]]:
    """Rows of the comparison: theirs, ours, verdict."""
    rows = []
    for line in text_of(name).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] != "---" and cells[2]:
            rows.append((cells[0], cells[1], cells[2]))
    return rows


def test_commands_are_found_in_the_guides_at_all() -> None:
    """``tests/docs`` has their parsers read them."""
    found = {one.words[1:2] for one in shown_commands() if one.page in GUIDES}
    assert {("selftest",), ("plan",), ("warmup",), ("serve",), ("bench",)} <= found


@pytest.mark.parametrize("name", guides())
def test_every_call_of_launch_in_a_guide_is_one_it_understands(name: str) -> None:
    calls = re.findall(r"launch\.sh((?: [-\w./]+)+)", text_of(name))
    for call in calls:
        words = [word for word in call.split() if "/" not in word]
        named = [word for word in words if word in LAUNCH]
        assert named == words[: len(named)], f"{name}: launch.sh{call}"


@pytest.mark.parametrize("name", guides())
def test_every_file_that_a_guide_names_exists(name: str) -> None:
    text = text_of(name)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    for link in filter(None, links):
        assert (GAUDI / link).exists(), f"{name}: {link}"
    for file in re.findall(
        r"(?<![\w/])(?:operate|env|systemd|lib)/[\w.-]+\.(?:sh|env|service|yaml|py)", text
    ):
        assert file == "env/my.env" or (GAUDI / file).exists(), f"{name}: {file}"
    for file in re.findall(r"examples/gaudi/[\w./-]+", text):
        assert (ROOT / file).exists(), f"{name}: {file}"


@pytest.mark.parametrize("name", guides())
def test_links_within_a_guide_lead_to_a_heading(name: str) -> None:
    text = text_of(name)
    headings = {
        re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in re.findall(r"^#+ (.*)$", text, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


@pytest.mark.parametrize("name", guides())
def test_every_guide_says_that_no_card_has_run_it(name: str) -> None:
    assert "never run on a card" in " ".join(text_of(name).split()).replace(
        "ever run on a card", "never run on a card"
    )


def test_the_way_to_the_first_token_has_ten_commands_at_most() -> None:
    section = text_of("README.md").partition("## Ten commands")[2].partition("\n## ")[0]
    assert re.findall(r"^(\d+)\. ", section, re.MULTILINE) == [str(number) for number in range(1, 11)]


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.name)
def test_a_comparison_judges_every_row_and_names_what_there_is(path: Path) -> None:
    rows = [row for row in here(path.name) if row[2] in VERDICTS]
    assert len(rows) == len(here(path.name))
    assert len(rows) > 30
    known = options_of(("serve",)) | options_of(("generate",)) | options_of(("plan",))
    arguments = set(inspect.signature(HPUDuoModel.from_pretrained).parameters)
    for theirs, ours, verdict in rows:
        assert bool(ours) is (verdict in ("same", "other name")) or "GRAPHS_BUDGET" in ours, theirs
        for code in re.findall(r"`([^`]+)`", ours):
            first = code.split()[0]
            if first.startswith("--"):
                assert first in known, f"{theirs}: {first}"
            elif first.isupper() and not first.startswith("HPUDUO"):
                assert first in VARIABLES, f"{theirs}: {first}"
            elif (
                "from_pretrained`" in ours and f"`{first}`" in ours and ours.startswith(f"`{first}` of `from")
            ):
                assert first in arguments, f"{theirs}: {first}"


def test_what_is_the_same_has_the_same_name() -> None:
    for path in COMPARISONS:
        for theirs, ours, verdict in here(path.name):
            named = re.findall(r"`([^`\s]+)", ours)
            if verdict == "same" and named[0].startswith("--") and theirs.startswith("`"):
                assert named[0] in theirs.replace("_", "-"), theirs


def test_the_versions_of_the_table_have_those_of_the_dockerfile_first() -> None:
    dockerfile = (GAUDI / "Dockerfile").read_text(encoding="utf-8")
    names = ("SYNAPSE_VERSION", "OS", "INSTALLER", "PT_VERSION")
    values = [re.search(rf"^ARG {name}=(.*)$", dockerfile, re.MULTILINE) for name in names]
    row = "| " + " | ".join(value[1] for value in values if value is not None) + " |"
    table = text_of("README.md").partition("| SYNAPSE_VERSION |")[2].splitlines()
    assert table[2] == row


def test_the_table_of_upgrades_names_settings_that_exist() -> None:
    first = [line.split("|")[1] for line in text_of("upgrade.md").splitlines() if line.startswith("| `")]
    for name in re.findall(r"`([A-Z_]+)`", " ".join(first)):
        assert name in VARIABLES, name
