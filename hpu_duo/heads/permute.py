"""Reorder the heads inside the weights of attention modules, once, in place.

A layer computes the same function before and after, because the query, key and value heads and the input
columns of the output projection move together. The caller must move data by head outside of the module
(position biases by head, for instance). Legend: H query heads, K KV heads, D channels of a head.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from hpu_duo.heads.pattern import HeadLayout

FusedRows: TypeAlias = Literal["qkv"]

# Set on a permuted module, to prevent a second permutation.
ORDER_ATTRIBUTE = "_hpu_duo_kv_order"

# Rows of the one fused projection that is [all q | all k | all v] wherever it stands next to an `o_proj`.
FUSED_KNOWN = "qkv_proj"
# The same names have per-head interleaved rows in other families, with the same shapes.
FUSED_UNKNOWN = ("Wqkv", "query_key_value")
SEPARATE = ("q_proj", "k_proj", "v_proj")
EXPANDING = "kv_b_proj"
"""Projection from a latent to the keys, without rotary part, and values of each head."""
LATENT_QUERIES = ("q_b_proj", "q_proj")
OF_LATENTS = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
"""Modules beside it that all heads share."""
OUTPUTS = ("o_proj", "out_proj", "dense", "Wo")
QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm")
KV_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "v_norm")
# Functions of the position only, the same for all heads.
SHARED_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.original_inv_freq")


@runtime_checkable
class QuantisedProjection(Protocol):
    """A linear layer of codes, which reorders its own outputs and inputs."""

    in_features: int
    out_features: int

    def select(self, dim: int, index: Tensor) -> None:
        """Reorder the outputs (``dim`` 0, of the bias too) or inputs (1) in place."""
        ...


@dataclass(frozen=True)
class _QuantisedMove:
    """A permutation of the outputs (``dim`` 0) or inputs (1) of a projection."""

    projection: QuantisedProjection
    dim: int
    order: Tensor

    def apply(self) -> None:
        self.projection.select(self.dim, self.order)


@dataclass(frozen=True)
class _Move:
    """A permutation of ``tensor`` along ``dim``: index i of the result is ``order[i]`` before."""

    tensor: Tensor
    dim: int
    order: Tensor

    def apply(self) -> None:
        with torch.no_grad():
            self.tensor.copy_(self.tensor.index_select(self.dim, self.order.to(self.tensor.device)))


@dataclass(frozen=True)
class _Orders:
    """The orders of one layer: of heads, of their channels, and of the rows of a fused projection.

    Attributes:
        query_heads, kv_heads: numbers of heads.
        head_dim, value_dim: channels of a query or key, and of a value or result.
    """

    query_heads: Tensor
    kv_heads: Tensor
    head_dim: int
    value_dim: int

    def query_rows(self, module: nn.Module, name: str) -> Tensor:
        """The rows of a projection to queries; some families have a gate behind each head's."""
        rows: int = vars(module.get_submodule(name))["out_features"]
        is_gated = rows == 2 * self.query_channels.numel()
        return _channels(self.query_heads, 2 * self.head_dim) if is_gated else self.query_channels

    @property
    def query_channels(self) -> Tensor:
        return _channels(self.query_heads, self.head_dim)

    @property
    def key_channels(self) -> Tensor:
        return _channels(self.kv_heads, self.head_dim)

    @property
    def value_channels(self) -> Tensor:
        return _channels(self.kv_heads, self.value_dim)

    @property
    def output_channels(self) -> Tensor:
        return _channels(self.query_heads, self.value_dim)

    @property
    def fused_rows(self) -> Tensor:
        query, key = self.query_channels, self.key_channels
        return torch.cat([query, query.numel() + key, query.numel() + key.numel() + self.value_channels])


def _channels(heads: Tensor, dim: int) -> Tensor:
    return (heads[:, None] * dim + torch.arange(dim)).reshape(-1)


def permute_heads(
    attentions: Sequence[nn.Module],
    layouts: Sequence[HeadLayout],
    head_dim: int | Sequence[int],
    value_dim: int | Sequence[int] | None = None,
    *,
    fused_rows: FusedRows | None = None,
) -> None:
    """Reorder the heads of transformers attention modules to their layouts, in place.

    All modules are checked before the first is changed, so an error leaves every weight as it was. A module
    with the identity as layout is not changed.

    Understood are separate ``q_proj``, ``k_proj``, ``v_proj`` or one fused projection, an output projection,
    their biases, norms of q and k over one head (left alone) or over the whole projection, and ``sinks``, an
    attention-sink logit for each query head; or ``kv_b_proj``, which expands latents, with the projections
    and norms of latents beside it (left alone). A layer that reads the keys and values of an earlier one has
    queries and outputs only; the caller gives both layers the same layout.

    Args:
        attentions: the self-attention modules, one per layer, on any device but ``meta``.
        layouts: as many, with the query heads, KV heads and their order in that layer.
        head_dim: channels D of a head, or of a head of each module.
        value_dim: channels of a value, or of a value of each module; None = ``head_dim``.
        fused_rows: declares that the rows of a fused projection named ``Wqkv`` or ``query_key_value`` are
            ``[all q | all k | all v]``. Without it these names are refused: some families interleave the rows
            by head. ``qkv_proj`` beside an ``o_proj`` is known to have this order.

    Raises:
        ValueError: for an unknown parameter or buffer (an unpermuted per-head tensor would be silently
            wrong), a wrapped projection, a wrong shape, weights shared between modules, KV
            shared between layers, or a module that is permuted already.
    """
    parts = _pair(attentions, layouts, head_dim, head_dim if value_dim is None else value_dim)
    for module, _, _, _ in parts:
        if hasattr(module, ORDER_ATTRIBUTE):
            raise ValueError(f"expected {_name(module)} in its original head order, got one permuted before")
    moving = [part for part in parts if not part[1].is_identity]
    if moving:
        _check_not_shared(attentions)
    moves: list[_Move | _QuantisedMove] = []
    for module, layout, *dims in moving:
        moves += _plan(module, _orders(layout.query_order, layout.kv_order, *dims), fused_rows)
    for move in moves:
        move.apply()
    for module, layout, _, _ in moving:
        setattr(module, ORDER_ATTRIBUTE, layout.kv_order)


def _pair(
    attentions: Sequence[nn.Module],
    layouts: Sequence[HeadLayout],
    head_dim: int | Sequence[int],
    value_dim: int | Sequence[int],
) -> list[tuple[nn.Module, HeadLayout, int, int]]:
    """Each module with its layout, and the channels of its keys and values."""
    if len(attentions) != len(layouts):
        raise ValueError(
            f"expected one layout per attention module, got {len(layouts)} for {len(attentions)}"
        )
    dims = [[dim] * len(layouts) if isinstance(dim, int) else list(dim) for dim in (head_dim, value_dim)]
    for sizes in dims:
        if len(sizes) != len(layouts):
            raise ValueError(
                f"expected one head_dim per attention module, got {len(sizes)} for {len(attentions)}"
            )
    return list(zip(attentions, layouts, *dims))


def _orders(query: tuple[int, ...], kv: tuple[int, ...], head_dim: int, value_dim: int) -> _Orders:
    if head_dim < 1 or value_dim < 1:
        raise ValueError(f"expected head_dim >= 1, got {min(head_dim, value_dim)}")
    return _Orders(torch.tensor(query), torch.tensor(kv), head_dim, value_dim)


def _plan(module: nn.Module, orders: _Orders, fused_rows: FusedRows | None) -> list[_Move | _QuantisedMove]:
    """Every move of one module; ValueError unless all of its tensors are understood."""
    head_dim = getattr(module, "head_dim", orders.head_dim)
    has_latents = hasattr(module, EXPANDING)
    # Some families with latents name the size of the rotary part so.
    if not has_latents and head_dim != orders.head_dim:
        raise ValueError(f"expected head_dim={head_dim} as in {_name(module)}, got {orders.head_dim}")
    rows = _row_orders(module, orders, fused_rows)
    output = _output_name(module)
    for name in (*rows, output):
        _check_linear(module, name)
    moves: list[_Move | _QuantisedMove] = []
    quantised = {name for name in (*rows, output) if _is_quantised(module.get_submodule(name))}
    for name in quantised:
        dim, order = (1, orders.output_channels) if name == output else (0, rows[name])
        moves.append(_quantised_move(module, name, dim, order))
    unknown: list[str] = []
    for name, tensor in _tensors(module):
        if name.rpartition(".")[0] in quantised:
            continue
        # A name with another leaf (a scale, an adapter) matches none of the branches below.
        owner = name.removesuffix(".weight").removesuffix(".bias")
        if owner in rows:
            moves.append(_move(module, name, tensor, 0, rows[owner]))
        elif name == f"{output}.weight":
            moves.append(_move(module, name, tensor, 1, orders.output_channels))
        elif owner in QUERY_NORMS:
            moves += _norm_moves(module, name, tensor, orders.query_heads, orders)
        elif owner in KV_NORMS:
            moves += _norm_moves(module, name, tensor, orders.kv_heads, orders)
        elif name == "sinks":
            moves.append(_move(module, name, tensor, 0, orders.query_heads))
        elif has_latents and owner in OF_LATENTS:
            continue
        elif name != f"{output}.bias" and name not in SHARED_BUFFERS:
            unknown.append(name)
    if unknown:
        raise ValueError(f"expected only known tensors in {_name(module)}, got {', '.join(unknown)}")
    return moves


def _row_orders(module: nn.Module, orders: _Orders, fused_rows: FusedRows | None) -> dict[str, Tensor]:
    """The projections into heads, by name, with the order of their rows."""
    present = {name for name, _ in module.named_children()}
    if EXPANDING in present:
        query = next((name for name in LATENT_QUERIES if name in present), "q_proj")
        # Every head has rows for its key and its value, side by side.
        rows: int = vars(module.get_submodule(EXPANDING))["out_features"]
        size = rows // orders.kv_heads.numel()
        return {query: orders.query_channels, EXPANDING: _channels(orders.kv_heads, size)}
    fused = present & {FUSED_KNOWN, *FUSED_UNKNOWN}
    separate = present & set(SEPARATE)
    if getattr(module, "is_kv_shared_layer", False) and separate == {"q_proj"} and not fused:
        return {"q_proj": orders.query_channels}
    if separate == set(SEPARATE) and not fused:
        query_rows = orders.query_rows(module, SEPARATE[0])
        return dict(zip(SEPARATE, (query_rows, orders.key_channels, orders.value_channels)))
    if len(fused) != 1 or separate:
        raise ValueError(
            f"expected {', '.join(SEPARATE)} or one fused projection in {_name(module)}, "
            f"got {sorted(present)}"
        )
    (name,) = fused
    if fused_rows not in (None, "qkv"):
        raise ValueError(f"expected fused_rows 'qkv' or None, got {fused_rows!r}")
    is_known = name == FUSED_KNOWN and "o_proj" in present
    if fused_rows is None and not is_known:
        raise ValueError(
            f"expected fused_rows='qkv' to declare that the rows of {name} in {_name(module)} are "
            "[all q | all k | all v], got nothing; other row orders are not supported"
        )
    return {name: orders.fused_rows}


def _output_name(module: nn.Module) -> str:
    names = [name for name, _ in module.named_children() if name in OUTPUTS]
    if len(names) != 1:
        raise ValueError(f"expected one of {', '.join(OUTPUTS)} in {_name(module)}, got {names or 'none'}")
    return names[0]


def _check_linear(module: nn.Module, name: str) -> None:
    """Raise ValueError for all but a plain Linear, ``x W^T + b``, or a quantised one.

    Subclasses pack, scale, adapt or shard.
    """
    projection = module.get_submodule(name)
    kind = type(projection)
    if kind is not nn.Linear and not _is_quantised(projection):
        found = f"{kind.__module__}.{kind.__qualname__}"
        raise ValueError(f"expected torch.nn.Linear as {name} of {_name(module)}, got {found}")


def _is_quantised(projection: nn.Module) -> bool:
    return isinstance(projection, QuantisedProjection)


def _quantised_move(module: nn.Module, name: str, dim: int, order: Tensor) -> _QuantisedMove:
    projection = module.get_submodule(name)
    assert isinstance(projection, QuantisedProjection), "only those are moved as a whole"
    size = projection.in_features if dim else projection.out_features
    if size != order.numel():
        raise ValueError(
            f"expected size {order.numel()} in dimension {dim} of {name} of {_name(module)}, got {size}"
        )
    return _QuantisedMove(projection, dim, order)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the module by dotted name: parameters, buffers, and plain attributes."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for prefix, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor):
                yield (f"{prefix}.{name}" if prefix else name), value


def _norm_moves(module: nn.Module, name: str, tensor: Tensor, heads: Tensor, orders: _Orders) -> list[_Move]:
    """Moves of a norm: none for one shared by the heads, a scalar or [D]; else [heads * D] or [heads, D]."""
    num_heads = heads.numel()
    head_dim = orders.value_dim if "v_norm" in name else orders.head_dim
    shape = tuple(tensor.shape)
    if shape in ((), (head_dim,)):
        return []
    if shape == (num_heads * head_dim,):
        return [_move(module, name, tensor, 0, _channels(heads, head_dim))]
    if shape == (num_heads, head_dim):
        return [_move(module, name, tensor, 0, heads)]
    raise ValueError(
        f"expected {name} of {_name(module)} of shape [{head_dim}], [{num_heads * head_dim}] or "
        f"[{num_heads}, {head_dim}], got {list(shape)}"
    )


def _move(module: nn.Module, name: str, tensor: Tensor, dim: int, order: Tensor) -> _Move:
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_floating_point() or tensor.is_meta:
        kind = f"{type(tensor).__name__} of {tensor.dtype} on {tensor.device}"
        raise ValueError(
            f"expected a plain, loaded floating-point tensor as {name} of {_name(module)}, got {kind}"
        )
    if tensor.ndim <= dim or tensor.shape[dim] != order.numel():
        raise ValueError(
            f"expected size {order.numel()} in dimension {dim} of {name} of {_name(module)}, "
            f"got {list(tensor.shape)}"
        )
    return _Move(tensor, dim, order)


def _check_not_shared(attentions: Sequence[nn.Module]) -> None:
    """Raise ValueError for a tensor with two users, which would be permuted twice."""
    parameters = [
        (module, *pair) for module in attentions for pair in module.named_parameters(remove_duplicate=False)
    ]
    users = Counter(id(parameter) for _, _, parameter in parameters)
    for module, name, parameter in parameters:
        if users[id(parameter)] > 1:
            raise ValueError(
                f"expected weights of its own in {_name(module)}, got {name} shared with another user"
            )


def _name(module: nn.Module) -> str:
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ if layer is None else f"{type(module).__name__} of layer {layer}"
