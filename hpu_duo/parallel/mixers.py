"""A rank's part of a module with states: the rows of its tensors that the rank's share of results depends on.

The same trial tells how attention with gates in its queries orders them. Families order the rows of their
projections in many ways, under any name. So a module is run with projections that return numbers of their
own, scaled row by row, and gradients by the scales show the rows that the inputs of its output projection
depend on. Ranks have equal, neighbouring parts of these inputs: of whole heads where results have heads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from hpu_duo.device.ranks import Ranks
from hpu_duo.heads.permute import OUTPUTS
from hpu_duo.modeling.attention import LayerKind, Trial, attending
from hpu_duo.modeling.probe import DecoderLayer, refusing
from hpu_duo.modeling.recurrent import RecurrentLayer
from hpu_duo.parallel.cuts import Cut, MixerCuts, Span, merged
from kernels_ref.recurrent import StateSpace

_QUERIES = "q_proj"
NUM_TOKENS = 5
"""Tokens of a trial: the first one's results do not depend on what earlier states lose."""


class _Read(Exception):
    """Raised to end a run where its results are read."""


class _Rows(nn.Module):
    """A projection whose outputs are random numbers times a scale of each row."""

    def __init__(self, num_rows: int, generator: torch.Generator) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_rows))
        self.numbers = torch.randn(NUM_TOKENS, num_rows, generator=generator)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (self.numbers * self.scale)[None]


class _Results(nn.Module):
    """Keeps what an output projection gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.empty(0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen = hidden
        raise _Read


def mixer_cuts(layers: Sequence[RecurrentLayer], width: int, ranks: Ranks) -> list[MixerCuts]:
    """Return a rank's part of the module with states of each layer.

    Args:
        layers: of a model, possibly without weights.
        width: its hidden size.

    Raises:
        ValueError: ranks cannot share a module evenly.
    """
    found: dict[LayerKind, MixerCuts] = {}
    for layer in layers:
        kind = LayerKind(layer.mixer, layer.kinds)
        if kind not in found:
            found[kind] = _cuts(layer, width, ranks)
    return [found[LayerKind(layer.mixer, layer.kinds)] for layer in layers]


def _cuts(layer: RecurrentLayer, width: int, ranks: Ranks) -> MixerCuts:
    mixer, name = layer.mixer, type(layer.mixer).__name__
    if any(isinstance(kind, StateSpace) for kind in layer.kinds):
        raise ValueError(f"{name} cannot be served by several ranks: state spaces (Mamba 2) are not split")
    children = {id(module): child for child, module in layer.module.named_children()}
    outputs = [child for child, _ in mixer.named_children() if child in OUTPUTS]
    if len(outputs) != 1 or id(mixer) not in children:
        raise ValueError(
            f"{name} cannot be served by several ranks: expected one output projection "
            f"({', '.join(OUTPUTS)}) in a child of its layer, got {outputs or 'none'}"
        )
    (output,) = outputs
    size = vars(mixer.get_submodule(output))["in_features"]
    if size % ranks.size:
        raise ValueError(
            f"{name} cannot be served by several ranks: expected inputs of {output} that {ranks.size} ranks "
            f"share evenly, got {size}"
        )
    part = size // ranks.size
    own = (ranks.rank * part, (ranks.rank + 1) * part)
    cuts = {f"{output}.weight": Cut(1, (own,))}
    for parameter, rows in _rows(mixer, output, width, own).items():
        if not bool(rows.all()):
            cuts[parameter] = Cut(0, _spans(rows))
    return MixerCuts(children[id(mixer)], cuts, f"{output}.bias")


@torch.inference_mode(False)
def _rows(mixer: nn.Module, output: str, width: int, own: Span) -> dict[str, torch.Tensor]:
    """Rows of each parameter that some of the inputs of the output projection depend on, bool ``[rows]``."""
    generator = torch.Generator().manual_seed(0)
    trial, results = copy.deepcopy(mixer), _Results()
    names: dict[str, tuple[str, ...]] = {}
    for path, module in mixer.named_modules():
        if isinstance(module, nn.Linear) and path != output:
            rows = _Rows(module.out_features, generator)
            _set(trial, path, rows)
            names[f"{path}.scale"] = tuple(f"{path}.{leaf}" for leaf, _ in module.named_parameters())
        elif not isinstance(module, nn.Linear):
            for leaf, parameter in module.named_parameters(recurse=False):
                drawn = torch.randn(parameter.shape, generator=generator)
                setattr(trial.get_submodule(path), leaf, nn.Parameter(drawn))
                full = f"{path}.{leaf}".lstrip(".")
                names[full] = (full,)
    _set(trial, output, results)
    try:
        with torch.enable_grad(), refusing(mixer):
            trial(torch.zeros(1, NUM_TOKENS, width))
    except _Read:
        pass
    seen = results.seen[..., slice(*own)]
    seen.backward(torch.randn(seen.shape, generator=generator))
    depends: dict[str, torch.Tensor] = {}
    for name, owners in names.items():
        gradient = trial.get_parameter(name).grad
        if gradient is None:
            raise ValueError(
                f"{type(mixer).__name__} cannot be served by several ranks: expected results that depend on "
                f"all of its parameters, got others without {name}"
            )
        depends |= dict.fromkeys(
            owners, (gradient != 0).flatten(1).any(1) if gradient.ndim > 1 else gradient != 0
        )
    return depends


class _Sum(Trial):
    """Attention of a single token in place of any."""

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        values = v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return (values + q.sum(dim=-1, keepdim=True)).transpose(1, 2).contiguous()


def check_gates(layers: Sequence[DecoderLayer]) -> None:
    """Check that each head's gate, if queries have gates, is behind its query.

    Args:
        layers: whose heads are reordered.

    Raises:
        ValueError: the rows of the projection are in another order.
    """
    kinds = {LayerKind(layer.attention, layer.call.num_heads): layer for layer in layers}
    for layer in kinds.values():
        _check_gates(layer)


@torch.inference_mode()
def _check_gates(layer: DecoderLayer) -> None:
    call, attention = layer.call, layer.attention
    projection, size = getattr(attention, _QUERIES, None), call.num_heads * call.head_dim
    if not isinstance(projection, nn.Linear) or projection.out_features != 2 * size:
        return
    output = next(name for name, _ in attention.named_children() if name in OUTPUTS)
    generator = torch.Generator().manual_seed(0)
    trial, results, rows = copy.deepcopy(attention).float().cpu(), _Results(), _Rows(2 * size, generator)
    for name, module in (
        (output, results),
        (_QUERIES, rows),
        ("k_proj", _Rows(call.num_kv_heads * call.head_dim, generator)),
        ("v_proj", _Rows(call.num_kv_heads * call.value_head_dim, generator)),
    ):
        setattr(trial, name, module)
    angles = torch.zeros(1, NUM_TOKENS, call.head_dim)
    hidden = torch.zeros(1, NUM_TOKENS, projection.in_features)
    seen = []
    for factor in (1.0, 2.0):
        # Norms of heads undo a common factor.
        rows.scale.data[: 2 * call.head_dim] = torch.linspace(1, factor, 2 * call.head_dim)
        try:
            with refusing(trial), attending(trial, _Sum()):
                trial(hidden, attention_mask=None, position_embeddings=(angles.cos(), angles.sin()))
        except _Read:
            seen.append(results.seen)
    changed = (seen[0] != seen[1]).any(dim=(0, 1)).nonzero().flatten().tolist()
    if not changed or changed[-1] >= call.value_head_dim:
        raise ValueError(
            f"expected {_QUERIES} of {type(attention).__name__} to have each head's gate behind its query, "
            "got another order: its heads cannot be reordered for a head pattern"
        )


def _set(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)


def _spans(rows: torch.Tensor) -> tuple[Span, ...]:
    return merged([(row, row + 1) for row in rows.nonzero().flatten().tolist()])
