"""Stand-in of ``habana_frameworks.torch.utils.internal``: the mode is read once."""

import os
from functools import cache

DEFAULT = "STANDIN_LAZY_DEFAULT"
"""Tests: the default of the version, 1 in older ones and 0 in newer ones."""


@cache
def is_lazy() -> bool:
    """Nobody should rely on the default."""
    return os.environ.get("PT_HPU_LAZY_MODE", os.environ.get(DEFAULT, "0")) != "0"
