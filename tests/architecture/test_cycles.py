"""No module imports itself through others, imports for types and lazy ones included."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

from tests.house import PACKAGES


def test_imports_have_no_cycles() -> None:
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' <- '.join(error.args[1])}")
