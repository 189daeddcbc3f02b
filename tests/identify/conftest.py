"""The built-in model with gates, and a model with one hand-built induction head."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.lab.identify import BuiltinHaystack, DatasetSettings, Encoder, Form, GatedModel, PasskeyDataset
from tests.identify.induction import save_induction_model

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    return Encoder(AutoTokenizer.from_pretrained(MODEL_DIR))


@pytest.fixture(scope="session")
def induction_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("induction")
    save_induction_model(directory)
    return directory


@pytest.fixture(scope="session")
def induction_model(induction_dir: Path) -> GatedModel:
    return GatedModel.load(induction_dir, "float32", CPU)


@pytest.fixture(scope="session")
def small_dataset(encoder: Encoder) -> PasskeyDataset:
    settings = DatasetSettings(
        min_length=160, max_length=224, num_passkeys=3, passkey_words=4, form=Form.NAMES, seed=1
    )
    return PasskeyDataset(settings, BuiltinHaystack(), encoder)
