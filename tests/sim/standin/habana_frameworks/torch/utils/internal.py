"""Stand-in of ``habana_frameworks.torch.utils.internal``: the mode is read once."""

import os
from functools import cache


@cache
def is_lazy() -> bool:
    """Lazy mode was the default of older versions; here nobody should rely on a default."""
    return os.environ["PT_HPU_LAZY_MODE"] != "0"
