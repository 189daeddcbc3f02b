"""A rank's part of a module with states: the rows of its tensors that the rank's share of results depends on.

The same trial tells how attention with gates in its queries orders them. Families order the rows of their
projections in many ways, under any name. So a module is run with projections that return numbers of their
own, scaled row by row, and gradients by the scales show the rows that the inputs of its output projection
depend on. Ranks have equal, neighbouring parts of these inputs: of whole heads where results have heads.
Heads of a state space that share vectors may be on several ranks, which have copies of these vectors.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import silu

from hpu_duo.device.ranks import Ranks
from hpu_duo.heads.permute import OUTPUTS
from hpu_duo.modeling.attention import LayerKind, Trial, attending
from hpu_duo.modeling.probe import DecoderLayer, refusing
from hpu_duo.modeling.recurrent import RecurrentLayer
from hpu_duo.parallel.cuts import Cut, MixerCuts, Span, merged
from kernels_ref import Recurrence
from kernels_ref.recurrent import StateSpace

_QUERIES = "q_proj"
_LIMITS = "time_step_limit"
"""Attribute of modules with state spaces that limit their steps."""
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


class _Gated(nn.Module):
    """Multiplies by a weight and a gate, as a norm of all ranks does, and leaves out the size of all."""

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        weighted = hidden * self.get_parameter("weight")
        return weighted if gate is None else weighted * silu(gate)


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
    norm = _norm_of_ranks(mixer, output, size, own)
    if mixer not in _trials:
        with torch.inference_mode(False):
            _trials[mixer] = _RowTrial(mixer, output, norm, width)
    cuts = {f"{output}.weight": Cut(1, (own,))}
    dims = {name: buffer.ndim - 1 for name, buffer in mixer.named_buffers()}
    for parameter, rows in _trials[mixer].rows(own).items():
        if not bool(rows.all()):
            cuts[parameter] = Cut(dims.get(parameter, 0), _spans(rows))
    numbers = tuple(number for kind in layer.kinds for number in _numbers(mixer, kind, ranks.size))
    return MixerCuts(children[id(mixer)], cuts, f"{output}.bias", norm, numbers)


def _numbers(mixer: nn.Module, kind: Recurrence, num_ranks: int) -> list[tuple[str, str, int]]:
    """Numbers of heads, and widths, that a module with a state space and its norms have in a share.

    Those of other recurrences follow from the configuration.
    """
    if not isinstance(kind, StateSpace):
        return []
    share = replace(
        kind, num_heads=kind.num_heads // num_ranks, num_groups=max(1, kind.num_groups // num_ranks)
    )
    widths, own_widths = _widths(kind), _widths(share)
    return [
        (path, name, own_widths[name])
        for path, module in mixer.named_modules()
        for name, width in widths.items()
        if getattr(module, name, None) == width
    ]


def _widths(kind: StateSpace) -> dict[str, int]:
    """Sizes of a state space by the names of families' attributes."""
    width, shared = kind.num_heads * kind.head_dim, kind.num_groups * kind.state_dim
    return {
        "num_heads": kind.num_heads,
        "n_groups": kind.num_groups,
        "intermediate_size": width,
        "conv_dim": width + 2 * shared,
        "groups_time_state_size": shared,
        "group_size": width // kind.num_groups,
    }


@torch.inference_mode(False)
def _norm_of_ranks(mixer: nn.Module, output: str, size: int, own: Span) -> str:
    """Return the name of the norm of a module's results that divides by the size of all; empty for none.

    Raises:
        ValueError: it divides by that of a part, which several ranks would have.
    """
    for name, norm in mixer.named_children():
        weight = getattr(norm, "weight", None)
        if name == output or weight is None or tuple(weight.shape) != (size,):
            continue
        trial = copy.deepcopy(norm)
        trial.weight = nn.Parameter(torch.ones(size))
        x = torch.randn(1, 1, size, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.enable_grad(), refusing(mixer):
            trial(x)[..., slice(*own)].sum().backward()
        assert x.grad is not None, "results depend on inputs"
        seen = x.grad.flatten() != 0
        if seen.all():
            return name
        begin, end = own
        if seen[:begin].any() or seen[end:].any():
            raise ValueError(
                f"{type(mixer).__name__} cannot be served by several ranks: expected a norm of all results, "
                f"or of groups of which each rank has whole ones, got a norm of {int(seen.sum())} results "
                f"where a rank has {end - begin}"
            )
    return ""


class _RowTrial:
    """A forward pass of a module with states, whose gradients show which rows its results depend on.

    Args:
        mixer: possibly without weights.
        output: name of its output projection.
        norm: name of the norm of its results over all ranks; empty if it has none.
        width: hidden size.
    """

    def __init__(self, mixer: nn.Module, output: str, norm: str, width: int) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.name = type(mixer).__name__
        self._buffer_names = frozenset(name for name, _ in mixer.named_buffers())
        self._names: dict[str, tuple[str, ...]] = {}
        self._found: dict[Span, dict[str, torch.Tensor]] = {}
        self._trial, results = copy.deepcopy(mixer), _Results()
        if norm:
            _set(self._trial, norm, _Gated())
        if hasattr(mixer, _LIMITS):
            # What a limit clamps has no gradient.
            setattr(self._trial, _LIMITS, (0.0, float("inf")))
        for path, module in mixer.named_modules():
            if path != output:
                self._replace(path, module)
        _set(self._trial, output, results)
        try:
            with torch.enable_grad(), refusing(mixer):
                self._trial(torch.zeros(1, NUM_TOKENS, width))
        except _Read:
            pass
        self._seen = results.seen

    def _replace(self, path: str, module: nn.Module) -> None:
        """Draw the parameters and buffers of a module, or the results of a projection."""
        if isinstance(module, nn.Linear):
            _set(self._trial, path, _Rows(module.out_features, self.generator))
            self._names[f"{path}.scale"] = tuple(f"{path}.{leaf}" for leaf, _ in module.named_parameters())
            return
        for leaf, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            drawn = torch.randn(tensor.shape, generator=self.generator)
            setattr(self._trial.get_submodule(path), leaf, nn.Parameter(drawn))
            full = f"{path}.{leaf}".lstrip(".")
            self._names[full] = (full,)

    @torch.inference_mode(False)
    def rows(self, own: Span) -> dict[str, torch.Tensor]:
        """Return the rows of each parameter that some of a rank's results depend on, bool ``[rows]``.

        Buffers count as parameters, and have their rows in the last dimension.

        Args:
            own: the rank's inputs of the output projection.
        """
        if own in self._found:
            return self._found[own]
        self._trial.zero_grad()
        seen = self._seen[..., slice(*own)]
        seen.backward(torch.randn(seen.shape, generator=self.generator), retain_graph=True)
        depends: dict[str, torch.Tensor] = {}
        for name, owners in self._names.items():
            gradient = self._trial.get_parameter(name).grad
            if gradient is None and name in self._buffer_names:
                continue
            if gradient is None or not bool(gradient.any()):
                raise ValueError(
                    f"{self.name} cannot be served by several ranks: expected results that depend on all of "
                    f"its parameters, got others without {name}"
                )
            size = 1 if gradient.ndim == 0 else gradient.shape[-1 if name in self._buffer_names else 0]
            of_rows = (
                gradient.reshape(-1, size).T if name in self._buffer_names else gradient.reshape(size, -1)
            )
            depends |= dict.fromkeys(owners, (of_rows != 0).any(1))
        self._found[own] = depends
        return depends


_trials: WeakKeyDictionary[nn.Module, _RowTrial] = WeakKeyDictionary()
"""Cached trials by module: the shares of all ranks come from one forward pass."""


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
