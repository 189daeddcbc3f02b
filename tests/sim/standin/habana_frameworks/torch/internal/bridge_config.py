"""Stand-in of ``habana_frameworks.torch.internal.bridge_config``."""

from collections.abc import Iterator
from contextlib import contextmanager

SETTINGS: dict[str, object] = {}


@contextmanager
def env_setting(name: str, value: object) -> Iterator[None]:
    """A setting of the bridge inside the context, such as ``PT_COMPILE_ONLY_MODE``."""
    before = dict(SETTINGS)
    SETTINGS[name] = value
    try:
        yield
    finally:
        SETTINGS.clear()
        SETTINGS.update(before)
