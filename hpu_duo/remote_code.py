"""Python code that a checkpoint brings is never run, and nobody is asked whether to."""

from __future__ import annotations

from typing import Any

NO_REMOTE_CODE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of each ``from_pretrained`` of transformers: without them it may ask, and go online."""


def refuse_remote_code(trust_remote_code: bool) -> None:
    """Accept the value by which transformers runs no code of a checkpoint; ValueError for any other."""
    if trust_remote_code is not False:
        raise ValueError(
            f"expected trust_remote_code=False, got {trust_remote_code!r}: code of a checkpoint is never run"
        )


def refusal(what: str, error: Exception) -> ValueError:
    """Return an error with a sentence about one of transformers: ``what`` failed, and why."""
    if "trust_remote_code=True" in str(error):
        return ValueError(
            f"{what}: it needs Python code that the checkpoint brings (auto_map), and such code is "
            "never run; expected a model and a tokenizer that the installed transformers has itself"
        )
    # A KeyError is nothing but its key.
    reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
    return ValueError(f"{what}: {reason or type(error).__name__}")
