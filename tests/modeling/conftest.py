from pathlib import Path

import pytest
import torch

from tests.modeling.families import Zoo


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(Path(tmp_path_factory.mktemp("zoo")))
