"""Size and shape of the code, and the calls of one decode step.

``python -m tests.house`` prints the table that a redesign is measured by.
"""

from __future__ import annotations

import ast
import gc
import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import Any

import grimp

from hpu_duo import HPUDuoModel, SamplingParams
from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.engine.scheduler import Scheduler

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it.

ROOT = Path(__file__).parent.parent
PACKAGES = ("hpu_duo", "graphs", "bias_builders", "kernels_ref")
SERVING = ("hpu_duo.cli.text.generate", "hpu_duo.cli.serving.serve", "hpu_duo.server", "hpu_duo.llm")
"""Modules that a request starts from."""

LAB_CONTRACT = "What serves knows nothing that measures"
"""Beginning of the name of the contract that keeps the laboratory apart."""


def contract_of(beginning: str) -> dict[str, Any]:
    """The contract of import-linter whose name begins so."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        contracts: list[dict[str, Any]] = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (found,) = [each for each in contracts if each["name"].startswith(beginning)]
    return found


LAB = tuple(contract_of(LAB_CONTRACT)["forbidden_modules"])
"""Modules that measure and do not serve."""

COMMANDS = ("hpu_duo.cli.app", "hpu_duo.cli.__main__")
"""The list of all commands, which names those that measure too."""

GRAPHS = ("eager", "replay")
"""Capture backends of the decode step."""

_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_PREFIXES = tuple(f"{ROOT / package}/" for package in PACKAGES)


@dataclass(frozen=True)
class StepCount:
    """Calls of the project's functions from one plan to the next.

    Attributes:
        calls: number of calls by file, first line and name of the function.
    """

    calls: Counter[tuple[str, int, str]]

    @property
    def num_calls(self) -> int:
        """Number of calls."""
        return self.calls.total()

    @property
    def num_functions(self) -> int:
        """Number of distinct functions."""
        return len(self.calls)

    @property
    def num_files(self) -> int:
        """Number of files that the step enters."""
        return len({path for path, _, _ in self.calls})


def count_decode_step(graphs: str) -> StepCount:
    """Count one decode step of one request: the built-in model, half of its heads streaming.

    Frames of comprehensions and of generators are not counted.

    Args:
        graphs: the capture backend.
    """
    model = HPUDuoModel.from_pretrained(MODEL_DIR, pattern=PATTERN_DIR, sparsity=0.5, graphs=graphs)
    engine, steps = model.engine, list[Counter[tuple[str, int, str]]]()
    of_plan = Scheduler.plan.__code__

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code is of_plan:
            steps.append(Counter())
        is_function = code.co_name not in _COMPREHENSIONS and not code.co_flags & inspect.CO_GENERATOR
        if steps and is_function and code.co_filename.startswith(_PREFIXES):
            path = str(Path(code.co_filename).relative_to(ROOT))
            steps[-1][path, code.co_firstlineno, code.co_name] += 1

    engine.add_request(list(range(5, 45)), SamplingParams(max_tokens=16, ignore_eos=True))
    for _ in range(4):
        engine.step()
    gc.collect()
    gc.disable()  # finalisers of earlier objects are no part of the step
    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(6):
            engine.step()
    finally:
        sys.setprofile(previous)
        gc.enable()
    while engine.has_unfinished:
        engine.step()
    # A token that ends no character takes fewer calls; which ones are sampled depends on the CPU's rounding.
    whole = steps[:-1]
    alike = [step for step, after in pairwise(whole) if step == after]
    assert alike, "expected two decode steps in turn to make the same calls"
    return StepCount(max(alike, key=lambda step: step.total()))


def python_files() -> list[Path]:
    """The modules of the product."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def serving_files() -> list[Path]:
    """The modules that ``SERVING`` reaches by imports, lazy ones included, without the laboratory."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    left = [name for name in graph.modules if is_within(name, SERVING)]
    reached = set[str]()
    while left:
        name = left.pop()
        if name in reached or is_within(name, (*LAB, *COMMANDS)):
            continue
        reached.add(name)
        left += graph.find_modules_directly_imported_by(name)
        left += [name.rpartition(".")[0]] if "." in name else []  # the package's own file runs first
    return [path for path in python_files() if module_of(path) in reached]


def is_within(module: str, packages: Sequence[str]) -> bool:
    """Whether a module is one of these, or within one of them."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def module_of(path: Path) -> str:
    """The name by which a file of the product is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def num_lines(paths: Sequence[Path]) -> int:
    """Lines of files, blank ones included."""
    return sum(len(_lines_of(path)) for path in paths)


@cache
def _lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _nodes() -> Iterator[ast.AST]:
    for path in python_files():
        yield from ast.walk(ast.parse("\n".join(_lines_of(path))))


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any(ast.unparse(each).startswith("dataclass") for each in node.decorator_list)


def table() -> Iterator[tuple[str, str]]:
    """Names and values of all rows."""
    files, serving = python_files(), serving_files()
    yield "files / lines", f"{len(files)} / {num_lines(files)}"
    yield "what serves a request: files / lines", f"{len(serving)} / {num_lines(serving)}"
    folders = Counter(path.parent for path in files).values()
    yield "files per folder, median / most", f"{median(folders):g} / {max(folders)}"
    nodes = list(_nodes())
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    fields = [
        sum(isinstance(each, ast.AnnAssign) for each in node.body) for node in classes if _is_dataclass(node)
    ]
    yield "classes / one-field dataclasses", f"{len(classes)} / {fields.count(1)}"
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    yield (
        "lines of a function, median / p90 / max",
        f"{median(lengths):g} / {quantiles(lengths, n=10)[8]:g} / {max(lengths)}",
    )
    for graphs in GRAPHS:
        step = count_decode_step(graphs)
        yield (
            f"decode step, {graphs}: calls / functions / files",
            f"{step.num_calls} / {step.num_functions} / {step.num_files}",
        )


if __name__ == "__main__":
    for name, value in table():
        print(f"{name:52} {value}")
