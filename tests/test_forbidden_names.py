"""Names that modules may not use: private ones of transformers, and what runs code when it is read."""

import ast
import re
from collections.abc import Iterator

from tests.test_architecture import MODULES, dotted, nodes_of, tree_of

TRANSFORMERS_INTERNALS = "hpu_duo.modeling.transformers_internals"
"""The file with all private names of transformers, and the versions that they were tried with."""

NOT_TRANSFORMERS = {"_replace", "_fingerprint", "_hpu_duo_kv_order", "_bias"}
"""Of named tuples, of our own files and modules, and the end of a public name."""

SPAWNS = ("hpu_duo.device.processes", "hpu_duo.startup.ranks", "hpu_duo.startup.warm_up_jobs")
"""Modules whose processes are spawned, with arguments that are pickled by the process that starts them. Ray
pickles too, see docs/security.md."""
RUNS_CODE_WHEN_READ = {"pickle", "marshal", "shelve", "cloudpickle", "dill", "joblib"}
EXCHANGES_OBJECTS = ("gather_object", "all_gather_object", "scatter_object_list", "broadcast_object_list")


def private_names_of_transformers(tree: ast.Module) -> Iterator[str]:
    """Private attributes of other objects, and words like them, in a module that uses transformers.

    Those of the module's own classes are not counted: an object may use another one of its class.
    """
    nodes = nodes_of(tree)
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    if not any("transformers" in ast.unparse(node) for node in imports):
        return
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    own |= {node.attr for node in stored if dotted(node.value) == "self"}
    for node in nodes:
        if isinstance(node, ast.Attribute) and dotted(node.value) not in ("self", "cls"):
            name = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        else:
            continue
        if re.fullmatch(r"_[a-z][a-z_]+", name) and name not in NOT_TRANSFORMERS | own:
            yield name


def test_private_names_of_transformers_are_in_one_file() -> None:
    found = {module: set(private_names_of_transformers(tree_of(module))) for module in MODULES}
    assert {module for module, names in found.items() if names} == {TRANSFORMERS_INTERNALS}, found


def test_nothing_is_read_that_may_run_code() -> None:
    for module in MODULES:
        tree = tree_of(module)
        imported = {
            name.partition(".")[0]
            for node in nodes_of(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        }
        assert not imported & RUNS_CODE_WHEN_READ, module
        assert "multiprocessing" not in imported or module in SPAWNS, module
        for call in (node for node in nodes_of(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            options = {each.arg: ast.unparse(each.value) for each in call.keywords}
            assert name.rpartition(".")[2] not in EXCHANGES_OBJECTS, module
            assert name != "torch.load" or options.get("weights_only") == "True", module
            assert options.get("allow_pickle", "False") == "False", module
