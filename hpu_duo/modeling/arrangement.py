"""The arrangement of a traced step into fewer calls that compute the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphs.backends.trace import Call
from hpu_duo.modeling.joint_linears import join_linears
from hpu_duo.modeling.row_fusion import fuse_rows


def arrange(calls: Sequence[Call], outputs: Any) -> list[Call]:
    """Return the same step with products joined and small operators fused.

    Args:
        calls: the trace.
        outputs: the nest of values that it returns.
    """
    return fuse_rows(join_linears(calls), outputs)
