import subprocess
import sys
from pathlib import Path

import pytest

import graphs
from graphs import BatchShape, EagerBackend, make_backend

SHAPE = BatchShape.parse("c--/q4/s0/u0/l1")


def test_the_eager_backend_returns_steps_and_regions_unchanged() -> None:
    backend = EagerBackend()
    assert backend.capture(len, SHAPE) is len
    assert backend.region(SHAPE, "layer", len) is len


def test_a_backend_is_made_by_its_name() -> None:
    assert make_backend("eager").name == "eager"


@pytest.mark.parametrize("name", ["", "Eager", "inductor"])
def test_an_unknown_backend_is_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(ValueError, match=f"out of eager, compile, got '{name}'"):
        make_backend(name)


def test_importing_graphs_loads_neither_siblings_nor_compiled_backends() -> None:
    code = (
        "import sys, graphs; "
        "bad = {'hpu_duo', 'kernels_ref', 'graphs.backends.compile', 'triton', 'habana_frameworks'}; "
        "print(*sorted(bad & set(sys.modules)))"
    )
    root = Path(graphs.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""
