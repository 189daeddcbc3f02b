"""Stand-in of ``habana_frameworks.torch.core``."""

from habana_frameworks.torch.calls import CALLS
from habana_frameworks.torch.utils.internal import is_lazy


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """Launches what lazy mode has collected; without effect in eager mode."""
    CALLS["mark_step" if is_lazy() else "mark_step without effect"] += 1


def hpu_inference_set_env() -> None:
    """The newest name of the switch to inference."""
    CALLS["inference"] += 1
