"""The arrangement of a traced step into fewer calls that compute the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphs.backends.trace import Call
from hpu_duo.modeling.joint_linears import join_linears
from hpu_duo.modeling.row_fusion import fuse_rows
from kernels_ref import rowwise


def arrange(calls: Sequence[Call], outputs: Any) -> list[Call]:
    """Return the same step with products joined and, where row programs can be run, small operators fused.

    Their interpreter is asked for here, when a step is traced: until then it may be under way.

    Args:
        calls: the trace.
        outputs: the nest of values that it returns.
    """
    joined = join_linears(calls)
    return fuse_rows(joined, outputs) if rowwise.is_available() else joined
