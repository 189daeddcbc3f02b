"""Capture backends, by name."""

from graphs.backends.base import CaptureBackend, Inputs
from graphs.backends.eager import EagerBackend

__all__ = ["BACKEND_NAMES", "CaptureBackend", "EagerBackend", "Inputs", "make_backend"]

BACKEND_NAMES = ("eager", "compile")


def make_backend(name: str) -> CaptureBackend:
    """Build a capture backend; what it needs is imported only now.

    Raises:
        ValueError: an unknown name.
    """
    match name:
        case "eager":
            return EagerBackend()
        case "compile":
            from graphs.backends.compile import CompileBackend

            return CompileBackend()
        case _:
            raise ValueError(f"expected a capture backend out of {', '.join(BACKEND_NAMES)}, got {name!r}")
