"""Capture backends, by name."""

from pkgutil import resolve_name

from graphs.backends.base import CaptureBackend, EagerBackend, Inputs

__all__ = [
    "BACKEND_NAMES",
    "CHOSEN_LATER",
    "CaptureBackend",
    "EagerBackend",
    "Inputs",
    "best_name",
    "chosen_name",
    "make_backend",
]

_CLASSES = {
    "eager": "graphs.backends.base:EagerBackend",
    "replay": "graphs.backends.replay:ReplayBackend",
    "compile": "graphs.backends.compile:CompileBackend",
    "cuda": "graphs.backends.cuda:CudaBackend",
    "hpu-compile": "graphs.backends.hpu:HpuCompileBackend",
    "hpu-graph": "graphs.backends.hpu:HpuGraphBackend",
}
"""Classes by name, as ``module:class``: a module is imported when its backend is selected."""

BACKEND_NAMES = tuple(_CLASSES)

CHOSEN_LATER = ("auto", "default")
"""Aliases that depend on the device, see ``chosen_name``."""


def chosen_name(name: str, device_type: str, is_lazy: bool) -> str:
    """Resolve the name of a backend for a kind of device.

    "auto" is the best one. So is "default" on an HPU, where a step run operator by operator is thousands of
    launches; elsewhere it is "eager", which needs no warm-up.
    """
    if name == "auto" or (name == "default" and device_type == "hpu"):
        return best_name(device_type, is_lazy)
    return "eager" if name == "default" else name


def best_name(device_type: str, is_lazy: bool) -> str:
    """Return the backend of "auto" for a kind of device.

    A CPU replays lists of operators, which needs no compiler; compiling layers pays off only for long-running
    servers, and has to be selected by name. CUDA records whole steps. HPU compiles layers, or in lazy mode,
    where its compiler does not work, records whole steps.
    """
    match device_type:
        case "cuda":
            return "cuda"
        case "hpu":
            return "hpu-graph" if is_lazy else "hpu-compile"
        case "cpu":
            return "replay"
        case _:
            return "eager"


def make_backend(name: str) -> CaptureBackend:
    """Build a capture backend; its imports happen now, or at its first use.

    Its ``problem`` returns why it cannot capture steps on a device, if so.

    Raises:
        ValueError: an unknown name.
    """
    if name not in _CLASSES:
        raise ValueError(f"expected a capture backend out of {', '.join(BACKEND_NAMES)}, got {name!r}")
    backend: CaptureBackend = resolve_name(_CLASSES[name])()
    return backend
