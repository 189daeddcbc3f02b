"""Results of a calibration: what each head keeps, and what that recovers."""

from __future__ import annotations

from dataclasses import dataclass

from hpu_duo.config.kv_plan import Keep, KVPlan


@dataclass(frozen=True)
class PlannedHead:
    """Choice for one KV head.

    Attributes:
        kind: the reason: FastGen's set, the policy's name, or the layer's own window.
        keep: the plan's entry.
        num_asked: tokens before they were rounded up; None where the head has no budget.
        recovered: share of the measured attention, averaged over prompts; None for a layer with a window.
    """

    kind: str
    keep: Keep
    num_asked: int | None = None
    recovered: float | None = None


@dataclass(frozen=True)
class CalibratedPlan:
    """Choices of all KV heads, by layer and head in the model's order."""

    layers: tuple[tuple[PlannedHead, ...], ...]

    @property
    def plan(self) -> KVPlan:
        """The plan that an engine takes."""
        return KVPlan(tuple(tuple(head.keep for head in heads) for heads in self.layers))

    @property
    def num_asked(self) -> int:
        """Tokens of all heads with a budget, before they were rounded up."""
        return sum(head.num_asked or 0 for heads in self.layers for head in heads)

    @property
    def num_kept(self) -> int:
        """Tokens of all heads with a budget."""
        return sum(size * count for size, count in self.heads_by_size.items())

    @property
    def heads_by_size(self) -> dict[int, int]:
        """Heads of each budget in tokens, smallest first."""
        sizes = [int(head.keep.budget) for heads in self.layers for head in heads if head.keep.budget]
        return {size: sizes.count(size) for size in sorted(set(sizes))}
