"""Suggestions to install an extra work without an index that has this package."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hpu_duo.extras import install_command

ROOT = Path(__file__).parent.parent


def test_a_checkout_suggests_itself() -> None:
    assert install_command("serve") == f"pip install -e '{ROOT}[serve]'"


@pytest.mark.parametrize(("extra", "some"), [("plot", {"matplotlib"}), ("ray", {"ray", "fastapi", "openai"})])
def test_a_wheel_suggests_the_packages_of_the_extra(extra: str, some: set[str], tmp_path: Path) -> None:
    said = re.findall(r"'(.*?)'", install_command(extra, tmp_path))
    names = {Requirement(one).name for one in said}
    assert some <= names
    assert not names & {"hpu-duo", "torch", "ruff"}


def test_nothing_suggests_the_name_that_an_index_may_have() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*")]
    for package in ("hpu_duo", "graphs", "kernels_ref", "bias_builders"):
        files += (ROOT / package).rglob("*.py")
    suggests = re.compile(rb"""install (-\S+ )?['"]?hpu-duo""")
    found = [str(file) for file in files if file.is_file() and suggests.search(file.read_bytes())]
    assert not found
