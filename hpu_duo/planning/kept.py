"""The interface for keys and values of heads with a KV budget, a plan or an attention rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hpu_duo.kv.plan import LayerKV
from hpu_duo.planning.model import ModelSize


class KeptByHeads(Protocol):
    """Keys and values of heads that have a KV budget, a plan or an attention rule, instead of rings."""

    @property
    def is_plan(self) -> bool:
        """Whether what each head keeps is named, so that no share of them streams."""

    @property
    def rule(self) -> str | None:
        """The attention rule of all heads; None with a budget or a plan."""

    @property
    def name(self) -> str:
        """The policy and its budget, the plan or the rule, for reports."""

    @property
    def pools_heads(self) -> bool:
        """Whether a policy averages over the heads of a layer, which devices do by heads only."""

    def shared_by(self, retrieval_parallel: str) -> KeptByHeads:
        """The same where devices share retrieval heads by ``"heads"`` or by ``"context"``."""

    def kv_layers(self, model: ModelSize, counts: Sequence[int], max_len: int) -> tuple[LayerKV, ...]:
        """Keys and values that each layer stores.

        Args:
            counts: heads of each layer that see all tokens, if no plan names them.
            max_len: tokens of the longest request.
        """
