"""Device memory of the optimisation of gates, computed from sizes alone.

For a text of T tokens each layer keeps two tensors until the backward pass reaches it: its input, and the
teacher's attention output. The layer that is run again and differentiated comes on top. All of it grows
linearly with T. The counts for that layer are upper bounds, measured in runs at small sizes; a test
counts live tensors against them.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpu_duo.lab.identify.gated_model import FullFrom
from hpu_duo.planning import ModelSize


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes while the gates of one text are differentiated.

    Attributes:
        weights: of the frozen model.
        stored: inputs of all layers, and the teacher's attention outputs.
        layer: the layer that is run again, at its peak.
    """

    weights: int
    stored: int
    layer: int

    @property
    def total(self) -> int:
        """Bytes in all; allocators and libraries come on top."""
        return self.weights + self.stored + self.layer


def training_memory(
    model: ModelSize, num_tokens: int, full_from: FullFrom = FullFrom.TEACHER, num_bytes: int = 2
) -> TrainingMemory:
    """Memory for texts of ``num_tokens`` tokens, one at a time, at ``num_bytes`` per number."""
    hidden = model.hidden_size
    from_teacher = full_from is FullFrom.TEACHER
    stored = sum(
        hidden + (layer.num_heads * layer.head_dim if from_teacher and layer.window is None else 0)
        for layer in model.layers
    )
    layer_bytes = max(
        _layer_bytes(model, index, from_teacher, num_bytes) for index in range(len(model.layers))
    )
    return TrainingMemory(
        weights=model.num_params * num_bytes,
        stored=num_tokens * (stored + 2 * hidden) * num_bytes,
        layer=num_tokens * layer_bytes,
    )


def _layer_bytes(model: ModelSize, index: int, from_teacher: bool, num_bytes: int) -> int:
    """Bytes for each token of the layer that is run again: the largest of its three phases."""
    layer, hidden = model.layers[index], model.hidden_size
    query, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    mlp_phase = 6 * _mlp_width(model, index) + 4 * hidden + 3 * query + 3 * kv
    attention_phase = 3 * hidden + 4 * query + 6 * kv
    # Norms work on float32 copies whatever the weights are.
    norm_phase = 32 * hidden // num_bytes + 2 * query + 3 * kv
    # Differentiating full attention too keeps its queries, output and their gradients.
    own = 0 if from_teacher else 4 * query
    return num_bytes * (max(mlp_phase, attention_phase, norm_phase) + own + 4 * layer.head_dim)


def _mlp_width(model: ModelSize, index: int) -> int:
    """Channels of the MLP, from its weights, as if it were gated; of experts, those that a token uses."""
    attention = sum(2 * (one.num_heads + one.num_kv_heads) * one.head_dim for one in model.layers)
    in_mlp = model.matrix_params - attention * model.hidden_size
    experts = model.experts.num_params * model.experts.share_per_token
    return round((in_mlp + experts) / (3 * model.hidden_size * len(model.layers)))
