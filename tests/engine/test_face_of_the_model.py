"""The attributes of a model that scripts for transformers use besides ``generate``."""

from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from hpu_duo import HPUDuoModel
from tests.engine.tiny import Tiny


@pytest.fixture(scope="module")
def served(tiny: Tiny) -> HPUDuoModel:
    return tiny.load()


def test_config_device_and_dtype_are_those_of_transformers(tiny: Tiny, served: HPUDuoModel) -> None:
    assert isinstance(served.config, PretrainedConfig)
    assert served.config.hidden_size == tiny.model.config.hidden_size
    assert served.config.model_type == tiny.model.config.model_type
    assert (served.device, served.dtype) == (tiny.model.device, tiny.model.dtype)
    assert tiny.load(dtype="bfloat16").dtype is torch.bfloat16


def test_a_model_can_generate_and_is_in_evaluation_mode(served: HPUDuoModel) -> None:
    assert served.can_generate()
    assert served.eval() is served


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (("cpu",), {}),
        ((torch.device("cpu"),), {}),
        (("cpu", torch.float32), {}),
        ((torch.float32,), {}),
        ((), {"device": "cpu", "dtype": torch.float32, "non_blocking": True}),
        ((), {"device": None}),
    ],
)
def test_a_model_stays_where_it_is(
    served: HPUDuoModel, wanted: tuple[Any, ...], named: dict[str, Any]
) -> None:
    assert served.to(*wanted, **named) is served


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (("cuda",), {}),
        (("cuda:1",), {}),
        (("cpu:3",), {}),
        ((torch.bfloat16,), {}),
        (("cpu", torch.float16), {}),
        ((), {"device": "hpu"}),
        ((), {"dtype": torch.float64}),
        (("no-such-device",), {}),
        ((True,), {}),
    ],
)
def test_a_model_is_neither_moved_nor_cast(
    served: HPUDuoModel, wanted: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"expected to\('cpu'\) or to\(torch.float32\)"):
        served.to(*wanted, **named)
