"""Work of a step, computed and moved: the one noun of capacity, audit, plans and estimates of warm-ups."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace

from hpu_duo.kv.plan import LayerKV
from hpu_duo.planning.hardware import Format
from hpu_duo.planning.kernel_work import PUBLISHED_LAYER_LAUNCHES
from hpu_duo.planning.model import ModelSize

OPERATIONS_PER_SCORE = 15.0
"""Vector operations of one attention score: scale, mask, maximum, exponential, sum. An estimate, 10 to 20."""

ALL_REDUCES_PER_LAYER = 2
ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class Work:
    """Work of a step, all devices together; additive, and scaled by a number of steps.

    Attributes:
        bf16_ops, fp8_ops: matrix operations by format.
        vector_ops: operations of the vector engine on attention scores.
        weight_bytes: weights read.
        kv_bytes: keys and values read where they lie.
        moved_bytes: other operands and results of operators, as if nothing were fused; 0 where a figure is
            of software that fuses, whose constants absorb what it moves.
        reduced_bytes: activations that devices sum among each other, if there are several.
        num_launches: operators that are launched, on each device.
        sent_bytes: activations that a device sends to each other one beside those sums.
    """

    bf16_ops: float = 0.0
    fp8_ops: float = 0.0
    vector_ops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    moved_bytes: float = 0.0
    reduced_bytes: float = 0.0
    num_launches: float = 0.0
    sent_bytes: float = 0.0

    @property
    def matrix_ops(self) -> float:
        """Matrix operations of both formats."""
        return self.bf16_ops + self.fp8_ops

    @property
    def num_bytes(self) -> float:
        """Bytes of device memory in all."""
        return self.weight_bytes + self.kv_bytes + self.moved_bytes

    @property
    def fused(self) -> Work:
        """The same if everything between products were fused, so that only weights and cache are moved."""
        return replace(self, moved_bytes=0.0)

    def __add__(self, other: Work) -> Work:
        names = (field.name for field in fields(self))
        return Work(*(getattr(self, name) + getattr(other, name) for name in names))

    def __mul__(self, times: float) -> Work:
        return Work(*(getattr(self, field.name) * times for field in fields(self)))


@dataclass(frozen=True)
class Step:
    """Rows that all compute the same number of new tokens on top of the same context.

    Attributes:
        num_rows: requests.
        context: tokens of each that are in the cache already.
        new_tokens: tokens of each that the step computes, 1 for decoding.
    """

    num_rows: int
    context: int
    new_tokens: int = 1

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.context < 0 or self.new_tokens < 1:
            raise ValueError(f"expected num_rows >= 1, context >= 0 and new_tokens >= 1, got {self}")

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return self.num_rows * self.new_tokens

    def scores(self, window: int | None) -> int:
        """Query-key pairs of one head of one row, when a token sees ``window`` newest ones or all."""
        first, last = self.context + 1, self.context + self.new_tokens
        if window is None or last <= window:
            return (first + last) * self.new_tokens // 2
        rising = max(0, window - first + 1)
        return (first + first + rising - 1) * rising // 2 + window * (self.new_tokens - rising)

    def keys(self, window: int | None) -> int:
        """Tokens of one row whose keys and values a head reads."""
        last = self.context + self.new_tokens
        return last if window is None else min(last, window + self.new_tokens - 1)


@dataclass(frozen=True)
class Formats:
    """Formats of the weights of layers, and of keys and values."""

    weights: Format = Format.BF16
    kv: Format = Format.BF16


def step_work(model: ModelSize, kv_layers: tuple[LayerKV, ...], formats: Formats, step: Step) -> Work:
    """The work of one step of software that fuses; one row of logits is computed for each request.

    It is what published runs are compared by; ``EngineWork`` counts the engine's own steps.

    Attention is multiplied in the format of keys and values, the output head in bf16.

    Raises:
        ValueError: ``kv_layers`` is not one entry for each layer of the model.
    """
    if len(kv_layers) != len(model.layers):
        raise ValueError(f"expected {len(model.layers)} KV layers, got {len(kv_layers)}")
    tokens, experts = step.num_tokens, model.experts
    ops = {Format.BF16: 2.0 * model.head_params * step.num_rows, Format.FP8: 0.0}
    ops[formats.weights] += (
        2.0 * tokens * (model.matrix_params + experts.num_params * experts.share_per_token)
    )
    weights = formats.weights.num_bytes * (
        model.matrix_params + experts.num_params * experts.share_read(tokens)
    )
    scores = kv_bytes = 0.0
    for (layer, kv), count in Counter(zip(model.layers, kv_layers)).items():
        group = layer.num_heads // layer.num_kv_heads
        reaches = [(each.num_heads, each.kind.reach) for each in kv.groups]
        layer_scores = step.num_rows * group * sum(num * step.scores(reach) for num, reach in reaches)
        keys = step.num_rows * sum(num * step.keys(reach) for num, reach in reaches)
        # One product of head_dim for the score, one for the value it weighs.
        ops[formats.kv] += count * 2.0 * layer_scores * kv.elements_per_head
        scores += count * layer_scores
        kv_bytes += count * keys * kv.elements_per_head * formats.kv.num_bytes
    return Work(
        bf16_ops=ops[Format.BF16],
        fp8_ops=ops[Format.FP8],
        vector_ops=scores * OPERATIONS_PER_SCORE,
        weight_bytes=weights + model.head_params * Format.BF16.num_bytes,
        kv_bytes=kv_bytes,
        reduced_bytes=ALL_REDUCES_PER_LAYER
        * len(model.layers)
        * tokens
        * model.hidden_size
        * ACTIVATION_BYTES,
        num_launches=len(model.layers) * PUBLISHED_LAYER_LAUNCHES,
    )
