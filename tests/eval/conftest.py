"""The built-in model, loaded once per pattern, with a few rows."""

from collections.abc import Callable
from functools import cache

import pytest

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.lab.eval import Subject


@pytest.fixture(scope="session")
def builtin() -> Callable[[float | None], Subject]:
    """The built-in model with this share of streaming heads; None is full attention."""

    @cache
    def load(sparsity: float | None) -> Subject:
        pattern = None if sparsity is None else PATTERN_DIR
        return Subject(
            HPUDuoModel.from_pretrained(
                MODEL_DIR,
                pattern=pattern,
                sparsity=sparsity,
                max_num_seqs=8,
                enable_prefix_caching=False,
            )
        )

    return load
