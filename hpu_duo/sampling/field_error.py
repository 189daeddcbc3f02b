"""A field of the sampling parameters that has a value it cannot have."""

from __future__ import annotations


class FieldError(ValueError):
    """A value is out of range, or does not fit another one.

    Attributes:
        field: name of the field that it is about, with a key where there is one: ``logit_bias[7]``.
        reason: what was expected, and what came.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field, self.reason = field, reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"
