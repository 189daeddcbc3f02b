"""Fused elementwise programs on a CPU: loaded, computed and stored row by row in the cache.

A program is interpreted, so a new one costs microseconds and needs no compiler; the interpreter itself is
built once per machine. ``is_available`` is False where it cannot be built.
"""

from kernels_ref.rowwise.program import (
    INDEX_TYPES,
    MAX_DIMS,
    MAX_WIDTH,
    TYPES,
    Builder,
    Code,
    Index,
    Register,
    RowProgram,
    Rows,
    is_available,
)

__all__ = [
    "INDEX_TYPES",
    "MAX_DIMS",
    "MAX_WIDTH",
    "TYPES",
    "Builder",
    "Code",
    "Index",
    "Register",
    "RowProgram",
    "Rows",
    "is_available",
]
