"""What a step may hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerLimits:
    """The limits a step must respect.

    Attributes:
        max_num_batched_tokens: query tokens of a step; at least ``max_num_seqs``, so that every running
            request can decode in every step.
        max_num_seqs: requests that run at the same time.
        block_size: tokens per KV block.
        num_blocks: KV blocks that can be leased.
        max_chunk_rows: rows of a step with several new tokens and older context.
        uses_blocks: False for a model without retrieval heads.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    max_chunk_rows: int = 4
    uses_blocks: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "block_size", "max_chunk_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs={self.max_num_seqs}, "
                f"got {self.max_num_batched_tokens}"
            )
        if self.num_blocks < (1 if self.uses_blocks else 0):
            raise ValueError(f"num_blocks must hold at least one block, got {self.num_blocks}")
