"""The rules that hold for the whole tree: who imports whom, what is optional, who reads the environment."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("hpu_duo", "graphs", "kernels_ref", "bias_builders")
OPTIONAL = (
    *("triton", "habana_frameworks", "optimum", "matplotlib", "ray", "lm_eval", "aiohttp", "llguidance"),
    *("jieba", "kvpress"),
    *("fastapi", "starlette", "uvicorn", "pydantic", "openai", "prometheus_client", "opentelemetry"),
)
SOURCES = (*PACKAGES, "benchmarks", "examples", "tests")
LEAVES = (
    *("kernels_ref.triton", "graphs.backends.hpu", "hpu_duo.lab.eval.lm_eval_adapter"),
    *("hpu_duo.lab.load.client", "hpu_duo.lab.load.measure", "hpu_duo.sampling.guidance"),
    *("hpu_duo.server.http", "hpu_duo.server.service", "hpu_duo.server.responding"),
    *("hpu_duo.server.telemetry", "hpu_duo.server.planning", "hpu_duo.server.protocol"),
    *("hpu_duo.fleet.replicas", "hpu_duo.fleet.ray_serve"),
)
"""The only modules that may need an optional package to be imported at all."""

READS_ENVIRONMENT = (
    "graphs.backends.hpu",
    "hpu_duo.device.habana_environment",
    "hpu_duo.device.ranks",
    "hpu_duo.device.loopback",
    "hpu_duo.device.processes",
    "kernels_ref.x86.library",
    "hpu_duo.modeling.quantised.inc",
    "hpu_duo.lab.selftest.machine",
)
"""The first reads where the vendor's bridge stores recipes; the last reports variables and obeys none."""
TORCH_INTERNALS = (
    "graphs.backends.base",
    "graphs.backends.inductor",
    "hpu_duo.lab.audit.fake_tensors",
    "hpu_duo.device.collectives",
    "hpu_duo.modeling.packed_linear",
    "hpu_duo.lab.rules",
    "hpu_duo.lab.sim.tensor",
    "kernels_ref.native",
    "kernels_ref.sdpa.prefill",
    "kernels_ref.x86.library",
)
"""One file of each part that cannot do without private names of torch; nobody else uses any."""

PRIVATE_TO_TORCH = {"_cdata", "_schema", "_op", "_parameters", "_buffers", "_modules"}
"""Attributes of torch's objects."""

INHERITED = ("forward", "extra_repr")
"""Methods of ``torch.nn.Module`` whose contract is torch's; the class says what it computes."""

ANSWERS_A_QUESTION = re.compile(r"(what|which|who|whose|whom|where|when|how)\b", re.IGNORECASE)
"""Beginning of a docstring that describes a thing by a question instead of naming it."""

MOST_LINES, MOST_FUNCTION_LINES = 600, 80

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def module_files() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


MODULES = dict(module_files())
SUBPACKAGES = {module.split(".")[1] for module in MODULES if module.startswith("hpu_duo.")}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a module, which several tests look through: to walk takes longer than to look."""
    return tuple(ast.walk(tree))


def statements(tree: ast.Module) -> list[Any]:
    """Statements of a module at any depth, without the nodes of their expressions."""
    found: list[Any] = [tree]
    for node in found:  # it grows meanwhile
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += getattr(node, name, ())
    return found


def is_leaf(module: str) -> bool:
    return any(module == leaf or module.startswith(leaf + ".") for leaf in LEAVES)


def definitions(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Public classes and functions, and the public methods of public classes."""
    for child in node.body:
        if isinstance(child, Definition) and not child.name.startswith("_"):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, f"{prefix}{child.name}.")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and texts of docstrings, those behind assignments included."""
    for node in statements(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str):
                yield node.lineno, text


def test_imports_follow_the_arrows_of_the_design() -> None:
    script = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_lower_packages_do_not_name_the_system_even_in_words() -> None:
    for module in (name for name in MODULES if not name.startswith("hpu_duo")):
        text = MODULES[module].read_text(encoding="utf-8")
        named = {name for name in re.findall(r"\bhpu_duo\.(\w+)", text) if name in SUBPACKAGES}
        assert not named, f"{module} names {named} of hpu_duo"


def test_every_module_can_be_imported_without_optional_packages() -> None:
    modules = [module for module in MODULES if not is_leaf(module) and not module.endswith("__main__")]
    script = f"""
import importlib, sys

class Hiding:
    # Finds what the finder finds, optional packages apart: as if they were not installed.
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        is_hidden = name.partition(".")[0] in {OPTIONAL!r}
        return None if is_hidden else self.finder.find_spec(name, path, target)

sys.meta_path = [Hiding(finder) for finder in sys.meta_path]
for module in {modules!r}:
    importlib.import_module(module)
loaded = set({OPTIONAL!r}) & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_found_without_importing_torch() -> None:
    script = """
import sys, hpu_duo
assert "torch" not in sys.modules
assert hpu_duo.HeadPattern.__name__ == "HeadPattern"
assert set(hpu_duo.__all__) >= {"HPUDuoModel", "HeadPattern", "SamplingParams"}
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_plan_imports_neither_torch_nor_transformers() -> None:
    script = """
import sys
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.cli.app import main
limits = "--max-model-len 512 --num-blocks 64 --max-num-seqs 4 --max-num-batched-tokens 128 --graphs-budget 4"
sys.argv = ["hpu-duo", "plan", "--model", str(MODEL_DIR), *limits.split()]
try:
    main()
except SystemExit as ending:
    assert not ending.code, ending.code
loaded = {"torch", "transformers"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_the_named_modules_read_the_environment() -> None:
    for module in MODULES:
        tree = tree_of(module)
        names = {node.attr for node in nodes_of(tree) if isinstance(node, ast.Attribute)}
        names |= {
            alias.name for node in nodes_of(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        reads = names & {"environ", "environb", "getenv", "getenvb"}
        assert not reads or module in READS_ENVIRONMENT, f"{module} reads {reads}"


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.expr) -> str:
    """``torch._C.x`` as it is written; empty for anything but names with dots."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def private_names_of_torch(tree: ast.Module) -> Iterator[str]:
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node), f"torch.{node.attr}" if node.attr in PRIVATE_TO_TORCH else ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value, f"torch.{node.value}" if node.value in PRIVATE_TO_TORCH else ""]
        else:
            names = []
        yield from (name for name in names if name.startswith("torch.") and is_private(name))


def test_private_names_of_torch_are_in_one_file_of_each_part() -> None:
    for module in MODULES:
        found = sorted(set(private_names_of_torch(tree_of(module))))
        assert bool(found) is (module in TORCH_INTERNALS), f"{module} uses {found}"


def names_of_torch(tree: ast.Module) -> set[str]:
    """Names that a module has for torch, and for what it imports of torch."""
    aliases = [
        (getattr(node, "module", None) or alias.name, alias.asname or alias.name.partition(".")[0])
        for node in nodes_of(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    return {name for module, name in aliases if module.partition(".")[0] == "torch"}


def test_nothing_patches_torch() -> None:
    for module in MODULES:
        tree = tree_of(module)
        imports = [node for node in nodes_of(tree) if isinstance(node, ast.ImportFrom)]
        imported = {alias.name for node in imports for alias in node.names}
        of_torch = names_of_torch(tree)
        stored = [
            ast.unparse(node)
            for node in nodes_of(tree)
            if isinstance(node, ast.Attribute)
            and not isinstance(node.ctx, ast.Load)
            and dotted(node).partition(".")[0] in of_torch
        ]
        set_by_name = [
            ast.unparse(node)
            for node in nodes_of(tree)
            if isinstance(node, ast.Call)
            and dotted(node.func) in ("setattr", "delattr")
            and dotted(node.args[0]).partition(".")[0] in of_torch
        ]
        assert not stored + set_by_name, f"{module} changes torch for the whole process"
        assert not imported & {"patch", "mock"}, f"{module} imports what patches"


def test_every_module_and_public_name_says_what_it_is() -> None:
    for module in MODULES:
        tree = tree_of(module)
        silent = [
            name
            for name, node in definitions(tree)
            if not ast.get_docstring(node) and name.rpartition(".")[2] not in INHERITED
        ]
        assert ast.get_docstring(tree), f"{module} has no docstring"
        assert not silent, f"{module}: {', '.join(silent)} have no docstring"


@pytest.mark.parametrize("text", ["What a step gave.", "which heads stream", "Where\nit is"])
def test_docstrings_that_answer_a_question_are_found(text: str) -> None:
    tree = ast.parse(f"X = 1\n{text!r}\nclass A:\n    def f(self):\n        {text!r}\n")
    assert [line for line, found in docstrings(tree) if ANSWERS_A_QUESTION.match(found)] == [2, 5]


@pytest.mark.parametrize("package", SOURCES)
def test_docstrings_begin_with_a_verb_or_with_what_the_thing_is(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if ANSWERS_A_QUESTION.match(text.strip())
    ]
    assert not found, "\n".join(found)


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    for module in MODULES:
        assert module.rpartition(".")[2] not in ("utils", "util", "helpers", "common", "misc")


def num_statement_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement behind the docstring to the end."""
    first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
    return (node.end_lineno or node.lineno) - first.lineno + 1


@pytest.mark.parametrize("package", SOURCES)
def test_files_fit_into_one_head(package: str) -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / package).rglob("*.py")
    }
    too_long = {str(path): length for path, length in lengths.items() if length > MOST_LINES}
    assert not too_long, f"expected files of at most {MOST_LINES} lines, got {too_long}"


@pytest.mark.parametrize("package", SOURCES)
def test_functions_fit_on_a_screen_or_two_behind_parameters_and_docstring(package: str) -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in statements(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and num_statement_lines(node) > MOST_FUNCTION_LINES
    ]
    assert not too_long, "\n".join(too_long)


@pytest.mark.parametrize(("arguments", "is_run"), [((), False), (("-m", "slow"), True)])
def test_slow_tests_run_only_when_they_are_asked_for(
    tmp_path: Path, arguments: tuple[str, ...], is_run: bool
) -> None:
    test = tmp_path / "test_example.py"
    test.write_text("import pytest\n\n@pytest.mark.slow\ndef test_it(): pass\ndef test_other(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    done = subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), *arguments, str(test)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("::test_it" in done.stdout) is is_run
    assert ("::test_other" in done.stdout) is not is_run
