import pytest
import torch

from hpu_duo.lab import sim
from tests.engine.tiny import Tiny, make_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def device() -> sim.SimulatedHpu:
    reason = sim.problem()
    if reason is not None:
        pytest.skip(f"no simulated HPU here: {reason}")
    return sim.install()
