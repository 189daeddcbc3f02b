"""What an engine has done and what it holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineStats:
    """A snapshot.

    Attributes:
        steps: number of steps by phase string of the exact shape.
        num_prompt_tokens, num_output_tokens: tokens computed for prompts (again after a preemption), and
            tokens sampled.
        num_padded_tokens, num_query_tokens: query tokens that were padding, and all that ran.
        num_preemptions: requests that lost their place for lack of blocks.
        num_graph_misses: steps whose shape no bucket held.
        num_late_captures: planned buckets captured only when a request needed them.
        num_uncaptured_steps: steps of buckets that are too long to be captured.
        num_running, num_waiting: requests now.
        used_blocks, total_blocks, used_rows, total_rows: leases now.
        kv_bytes: bytes that the stores take.
        graph_bytes: bytes of device memory that were set aside for graphs.
        held_bytes: bytes of the leased blocks and rows.
        full_attention_bytes: bytes that the cached tokens would take with every head in blocks.
        peak_held_bytes, peak_full_attention_bytes: both at the step with the most cached tokens.
        host_s, device_s: seconds spent planning and building steps, and running them.
        bytes_copied: bytes of staged step inputs.
    """

    steps: dict[str, int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_padded_tokens: int
    num_query_tokens: int
    num_preemptions: int
    num_graph_misses: int
    num_late_captures: int
    num_uncaptured_steps: int
    num_running: int
    num_waiting: int
    used_blocks: int
    total_blocks: int
    used_rows: int
    total_rows: int
    kv_bytes: int
    graph_bytes: int
    held_bytes: int
    full_attention_bytes: int
    peak_held_bytes: int
    peak_full_attention_bytes: int
    host_s: float
    device_s: float
    bytes_copied: int

    @property
    def num_steps(self) -> int:
        """Steps of all phases."""
        return sum(self.steps.values())

    @property
    def padding(self) -> float:
        """Share of the query tokens that were padding."""
        return self.num_padded_tokens / max(1, self.num_query_tokens)


@dataclass
class StepCounters:
    """Running totals; the engine is their only writer."""

    steps: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_padded_tokens: int = 0
    num_query_tokens: int = 0
    num_preemptions: int = 0
    peak_cached_tokens: int = 0
    peak_held_bytes: int = 0
    peak_full_attention_bytes: int = 0
    host_s: float = 0.0
    device_s: float = 0.0
