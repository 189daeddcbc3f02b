"""Every variable that a file sets is in the list with its source, and the list says what the files say."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples.gaudi.gaudi_server import GAUDI

LIST = GAUDI / "env" / "variables.yaml"
VARIABLES: list[dict[str, Any]] = yaml.safe_load(LIST.read_text(encoding="utf-8"))
BY_NAME = {one["name"]: one for one in VARIABLES}
SETTINGS = (GAUDI / "lib" / "settings.sh").read_text(encoding="utf-8")
ASSIGNED = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.MULTILINE)
ENV_FILES = sorted(GAUDI.glob("env/*.env"))


def bash_list(name: str) -> list[str]:
    found = re.search(rf"^readonly {name}=\((.*?)\)", SETTINGS, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1].split()


def containers(node: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a YAML document that is a container or a service."""
    if isinstance(node, dict):
        if "env" in node or "environment" in node:
            yield node
        for value in node.values():
            yield from containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from containers(value)


def set_in(path: Path) -> set[str]:
    """Names of the variables that a file sets."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".env":
        return {name for name, _ in ASSIGNED.findall(text)}
    if path.name == "Dockerfile":
        found = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
        for block in re.findall(r"^ENV ((?:.*\\\n)*.*)$", text, re.MULTILINE):
            found |= set(re.findall(r"(\w+)=", block))
        return found
    if path.suffix == ".service":
        return set(re.findall(r"^Environment=(\w+)=", text, re.MULTILINE))
    if path.suffix == ".sh":
        return set(re.findall(r"^\s*export (\w+)", text, re.MULTILINE))
    found = set(re.findall(r"\$\{(\w+)", text))
    for document in yaml.safe_load_all(text):
        for each in containers(document):
            for environment in (each.get("env"), each.get("environment")):
                if isinstance(environment, dict):
                    found |= set(environment)
                for item in environment if isinstance(environment, list) else ():
                    found.add(item["name"] if isinstance(item, dict) else item.partition("=")[0])
    return found


def files() -> list[Path]:
    suffixes = {".env", ".sh", ".service", ".yaml"}
    every = [path for path in GAUDI.rglob("*") if path.suffix in suffixes or path.name == "Dockerfile"]
    return sorted(path for path in every if path not in (LIST, GAUDI / "operate" / "alerts.yaml"))


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(GAUDI)))
def test_every_variable_that_is_set_is_in_the_list(path: Path) -> None:
    unknown = set_in(path) - set(BY_NAME)
    assert not unknown, f"{path.name} sets {unknown}, which env/variables.yaml does not explain"


def test_a_name_stands_once_with_reader_meaning_and_source() -> None:
    assert len(BY_NAME) == len(VARIABLES)
    for one in VARIABLES:
        assert set(one) >= {"name", "reader", "meaning", "source"}, one
        assert set(one) <= {"name", "reader", "meaning", "source", "default"}, one
        assert all(isinstance(value, str) for value in one.values()), one
        assert one["source"] == "here" or one["source"].startswith("https://"), one


def test_what_others_read_has_a_public_source() -> None:
    ours = {"launch.sh", "compose.yaml", "Dockerfile"}
    for one in VARIABLES:
        assert one["source"] != "here" or one["reader"] in ours, one


def test_the_defaults_of_launch_are_those_of_the_list() -> None:
    defaults = dict(pair.split("=", 1) for pair in bash_list("DEFAULTS"))
    listed = {one["name"]: one["default"] for one in VARIABLES if one["reader"] == "launch.sh"}
    listed.pop("SYSTEM_ROOT")
    assert defaults == listed


def test_what_launch_passes_on_is_in_the_list() -> None:
    assert set(bash_list("PASSED_ON")) <= set(BY_NAME)


@pytest.mark.parametrize("path", ENV_FILES, ids=lambda path: path.name)
def test_an_env_file_sets_only_what_launch_reads(path: Path) -> None:
    known = {pair.split("=", 1)[0] for pair in bash_list("DEFAULTS")} | set(bash_list("PASSED_ON"))
    assert set_in(path) <= known


def test_the_options_that_meanings_name_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in GAUDI.glob("lib/*"))
    for one in VARIABLES:
        if one["reader"] == "launch.sh":
            assert all(option in sources for option in re.findall(r"`(--[\w-]+)`", one["meaning"])), one


def test_the_page_is_made_of_the_list() -> None:
    spec = importlib.util.spec_from_file_location("table", GAUDI / "env" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (GAUDI / "variables.md").read_text(encoding="utf-8") == module.table(LIST)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("gaudi2.env", "gaudi3.env", {"HARDWARE"}),
        ("gaudi2-8.env", "gaudi3-8.env", {"HARDWARE"}),
        ("gaudi2-replicas.env", "gaudi3-replicas.env", {"HARDWARE"}),
        ("gaudi3.env", "gaudi3-8.env", {"TENSOR_PARALLEL_SIZE", "RETRIEVAL_PARALLEL"}),
        ("gaudi3.env", "gaudi3-replicas.env", {"TENSOR_PARALLEL_SIZE", "REPLICAS", "ROUTER"}),
    ],
)
def test_env_files_differ_in_what_the_cards_differ_in(first: str, second: str, expected: set[str]) -> None:
    settings = [
        dict(ASSIGNED.findall((GAUDI / "env" / name).read_text(encoding="utf-8"))) for name in (first, second)
    ]
    both = settings[0] | settings[1]
    assert {name for name in both if settings[0].get(name) != settings[1].get(name)} == expected
    assert settings[1].get("TENSOR_PARALLEL_SIZE", "1") == ("8" if "-8" in second else "1")
    assert settings[1].get("REPLICAS", "1") == ("8" if "-replicas" in second else "1")
