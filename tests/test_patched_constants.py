"""Tests pass sizes and bounds as arguments; they set no constant of ours."""

import ast
import re
from collections.abc import Iterator

from tests.test_architecture import PACKAGES, ROOT, dotted

PATCHING = ("setattr", "object", "patch")
IS_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]{2,}")


def patched_constants(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and names of upper-case attributes that a test sets on something of ours."""
    ours = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] in PACKAGES
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for owner, _, name in (dotted(target).rpartition(".") for target in targets):
                if owner.partition(".")[0] in ours and IS_CONSTANT.fullmatch(name):
                    yield node.lineno, name
        if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in PATCHING:
            first, *others = node.args or [ast.Constant(None)]
            text = first.value if isinstance(first, ast.Constant) else dotted(first)
            if others and isinstance(others[0], ast.Constant) and not isinstance(first, ast.Constant):
                text = f"{text}.{others[0].value}"
            owner, _, name = str(text).rpartition(".")
            if owner.partition(".")[0] in {*ours, *PACKAGES} and IS_CONSTANT.fullmatch(name):
                yield node.lineno, name


def test_patches_of_constants_are_found() -> None:
    text = """
import kernels_ref.chunks
from huggingface_hub import constants
from hpu_duo.lab.load import sse
monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 3)
monkeypatch.setattr("hpu_duo.lab.load.sse._MAX_BYTES", 3)
mock.patch.object(kernels_ref.chunks, "KEY_SLOTS", 3)
sse.MAX_EVENT_BYTES = 3
monkeypatch.setattr(constants, "HF_TOKEN_PATH", "")
monkeypatch.setattr(sse, "feed", None)
monkeypatch.setattr("hpu_duo.lab.load.sse.feed", None)
"""
    assert sorted(line for line, _ in patched_constants(ast.parse(text))) == [5, 6, 7, 8]


def test_tests_patch_no_constants() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in patched_constants(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "expected arguments instead of patches\n" + "\n".join(found)
