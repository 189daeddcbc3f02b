"""Modules and policies of a rank that exchange data with the others inside a step.

A rank weighs tokens by its own query heads. That is a policy's whole measure if each rank has key/value heads
of its own and the policy scores them separately. It is a part of it if ranks have copies of one key/value
head with some of its query heads each, and if a policy averages over all heads of a layer.

Shapes: X rows, K key/value heads of the group on this rank, S slots or candidates for them, t ranks, H
key/value heads of the layer if ranks have copies of them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import silu

from hpu_duo.device.collectives import sum_over_ranks
from hpu_duo.device.ranks import Ranks
from hpu_duo.heads.permute import KV_NORMS, QUERY_NORMS
from hpu_duo.modeling.probe import DecoderLayer, layers_besides, refusing
from hpu_duo.modeling.recurrent import number_of, recurrent_layers
from hpu_duo.parallel.cuts import Cutter
from kernels_ref import FutureQueries, KVPolicy, SlotView

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""Names of the epsilon in families."""
_OFFSETS = (0.0, 1.0)
_NUM_TOKENS = 16
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
"""Relative errors of a formula: roundings of the mean and of the product."""


@dataclass(frozen=True)
class NormFormula:
    """A root-mean-square norm: ``(offset + weight) * x / sqrt(mean(x ** 2) + epsilon)``.

    A gate, if there is one, multiplies inputs or results by its SiLU.

    Attributes:
        epsilon: added to the mean.
        offset: added to the weight.
        rounds_first: whether ``x`` is rounded to its dtype before the product with the weight, not after.
        gates_first: whether a gate multiplies inputs, not results.
    """

    epsilon: float
    offset: float = 0.0
    rounds_first: bool = False
    gates_first: bool = False

    @classmethod
    def of(cls, norm: nn.Module) -> NormFormula:
        """Find the formula of a module by a trial with random weights; its own need not be there.

        Raises:
            ValueError: it has none of this kind, or no epsilon by a usual name; the message names its class.
        """
        epsilon = next((x for name in _EPSILONS if (x := getattr(norm, name, None)) is not None), None)
        if epsilon is None:
            raise _refused(norm, f"an epsilon by one of the names {', '.join(_EPSILONS)}, got none")
        formulas = [cls(float(epsilon), *each) for each in product(_OFFSETS, (False, True))]
        for dtype, most in _TOLERANCE.items():
            errors = _errors(norm, formulas, dtype)
            formulas = [formula for formula in formulas if errors[formula] <= most]
            if not formulas:
                raise _refused(
                    norm, "weight * x or (1 + weight) * x of a root-mean-square norm, got another formula"
                )
        # In bfloat16 the formulas that are left differ in what is rounded.
        found = min(formulas, key=errors.__getitem__)
        return replace(found, gates_first=_gates_first(norm))

    def mean(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean square of a part, ``[..., 1]`` in float32; see ``apply``."""
        return self._inputs(x, gate).float().square().mean(dim=-1, keepdim=True)

    def apply(
        self, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the norm of a part of a dimension.

        Args:
            x: the part, ``[..., W]``.
            weight: of the part, ``[W]``.
            mean: mean square over the whole dimension, ``[..., 1]`` in float32.
            gate: of the part, ``[..., W]``.
        """
        normed = self._inputs(x, gate).float() * torch.rsqrt(mean + self.epsilon)
        if self.rounds_first:
            normed = normed.to(x.dtype)
        factor = weight.to(normed.dtype) + self.offset if self.offset else weight
        result = factor * normed
        if gate is not None and not self.gates_first:
            result = result * silu(gate.float())
        return result.to(x.dtype)

    def _inputs(self, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        return x if gate is None or not self.gates_first else x.float() * silu(gate.float())


def _gates_first(norm: nn.Module) -> bool:
    """Whether the gate of a norm, if it takes one, multiplies its inputs."""
    if "gate" not in inspect.signature(norm.forward).parameters:
        return False
    generator = torch.Generator().manual_seed(0)
    trial = copy.deepcopy(norm)
    width = len(norm.get_parameter("weight"))
    trial.weight = nn.Parameter(torch.rand(width, generator=generator), requires_grad=False)
    x, gate = (torch.randn(1, _NUM_TOKENS, width, generator=generator) for _ in range(2))
    with torch.inference_mode(), refusing(norm):
        got = trial(x, gate)
        errors = [(got - each).abs().max() for each in (trial(x * silu(gate)), trial(x) * silu(gate))]
    if not min(errors) <= _TOLERANCE[torch.float32] * got.abs().max():
        raise _refused(norm, "a gate whose SiLU multiplies inputs or results, got another one")
    return bool(errors[0] <= errors[1])


def _errors(norm: nn.Module, formulas: list[NormFormula], dtype: torch.dtype) -> dict[NormFormula, float]:
    """The largest relative error of each formula in a run of the module on the host, in one type."""
    generator = torch.Generator().manual_seed(0)
    trial = copy.deepcopy(norm)
    for name, parameter in norm.named_parameters():
        owner, _, leaf = name.rpartition(".")
        drawn = torch.rand(parameter.shape, generator=generator).add_(0.25).to(dtype)
        setattr(trial.get_submodule(owner), leaf, nn.Parameter(drawn, requires_grad=False))
    weight = trial.get_parameter("weight")
    # From values that the epsilon outweighs to those that outweigh it.
    sizes = torch.logspace(-1, 2, _NUM_TOKENS) * formulas[0].epsilon ** 0.5
    x = (torch.randn(_NUM_TOKENS, len(weight), generator=generator) * sizes[:, None]).to(dtype)
    with torch.inference_mode(), refusing(norm):
        expected = trial(x).float()
        mean = x.float().square().mean(dim=-1, keepdim=True)
        return {
            each: float(((each.apply(x, weight, mean).float() - expected) / expected).abs().max())
            for each in formulas
        }


def _refused(norm: nn.Module, what: str) -> ValueError:
    name = type(norm).__name__
    return ValueError(f"{name} over all heads together cannot be served by several ranks: expected {what}")


_TABLES = "embed_tokens"
"""Beginning of the names of further tables of tokens."""


class LayerSums(NamedTuple):
    """Names in one decoder layer.

    Attributes:
        path: of the layer.
        norms: norms over all heads together in its attention, or in its module with states, by their paths in
            the layer, and their formulas.
        children: its modules that add a partial sum on each rank: attention, modules with states, MLP and
            experts.
    """

    path: str
    norms: dict[str, NormFormula]
    children: tuple[str, ...]


@dataclass(frozen=True)
class Sums:
    """Names of the modules of a model at which ranks sum.

    Attributes:
        layers: of each layer that attends, then of the others.
        tables: paths of tables of tokens.
    """

    layers: tuple[LayerSums, ...]
    tables: tuple[str, ...]

    @classmethod
    def of(cls, cutter: Cutter, whole: PreTrainedModel, layers: Sequence[DecoderLayer]) -> Sums:
        """Read them off a whole model, weights apart.

        Raises:
            ValueError: a norm over all heads has an unknown formula, see ``NormFormula``.
        """
        names = {id(parameter): name for name, parameter in whole.named_parameters()}
        paths = {id(module): path for path, module in whole.named_modules()}
        attending = {id(layer.module): layer for layer in layers}
        modules = [layer.module for layer in layers]
        with_states = {id(each.module): each.module for each in recurrent_layers(whole)}
        modules += [module for key, module in with_states.items() if key not in attending]
        modules += layers_besides(whole, modules)
        found = []
        for module in modules:
            layer, path = attending.get(id(module)), paths[id(module)]
            norms: dict[str, NormFormula] = {}
            if layer is not None:
                attention = paths[id(layer.attention)].rpartition(".")[2]
                norms |= {f"{attention}.{name}": each for name, each in wide_norms(layer).items()}
            if id(module) in with_states:
                mixer = cutter.mixers[number_of(type(whole).__name__, path)]
                if mixer.norm:
                    name = f"{mixer.name}.{mixer.norm}"
                    norms[name] = NormFormula.of(module.get_submodule(name))
            found.append(LayerSums(path, norms, _shared_children(cutter, module, names)))
        return cls(tuple(found), token_tables(whole))


def token_tables(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the paths of the tables with a row for each token, that of the embeddings among them."""
    table = model.get_input_embeddings()
    return tuple(
        path
        for path, module in model.named_modules()
        if module is table or (isinstance(module, nn.Embedding) and path.split(".")[-1].startswith(_TABLES))
    )


def wide_norms(layer: DecoderLayer) -> dict[str, NormFormula]:
    """Return a layer's norms of queries and keys over all heads together, by their names.

    Args:
        layer: of the whole model; its weights need not be there.

    Raises:
        ValueError: one of them has an unknown formula, see ``NormFormula``.
    """
    wide = {}
    for name, norm in layer.attention.named_children():
        # Without a weight there is nothing to cut: it is a norm of each head.
        weight = getattr(norm, "weight", None) if name in (*QUERY_NORMS, *KV_NORMS) else None
        if weight is not None and weight.ndim == 1 and tuple(weight.shape) != (layer.call.head_dim,):
            wide[name] = NormFormula.of(norm)
    return wide


def _shared_children(cutter: Cutter, layer: nn.Module, names: dict[int, str]) -> tuple[str, ...]:
    """The children that are sharded; others are replicated."""
    return tuple(
        name
        for name, child in layer.named_children()
        if any(cutter.cut(names[id(each)], each.shape) is not None for each in child.parameters())
    )


class SummedOverRanks(nn.Module):
    """A row-parallel module: its first output is summed over all ranks; inputs are replicated.

    Args:
        inner: the rank's share.
        group: name of the ranks' process group.
    """

    def __init__(self, inner: nn.Module, group: str) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        if isinstance(output, tuple):
            return sum_over_ranks(output[0], self.group), *output[1:]
        return sum_over_ranks(output, self.group)


class VocabParallelEmbedding(nn.Module):
    """Token embeddings, sharded by vocabulary.

    Args:
        inner: the rank's rows ``[first, first + V / ranks)``.
        first: first token of the rank.
        group: name of the ranks' process group.
    """

    def __init__(self, inner: nn.Embedding, first: int, group: str) -> None:
        super().__init__()
        self.inner, self.first, self.group = inner, first, group

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        size = self.inner.num_embeddings
        own = token_ids - self.first
        is_own = (own >= 0) & (own < size)
        rows = self.inner(torch.clamp(own, min=0, max=size - 1))
        return sum_over_ranks(torch.where(is_own[..., None], rows, torch.zeros_like(rows)), self.group)


class RMSNormOverRanks(nn.Module):
    """A root-mean-square norm over a dimension that is sharded evenly.

    Args:
        weight: the rank's share.
        formula: of the norm.
        num_ranks: number of ranks.
        group: name of their process group.
    """

    def __init__(self, weight: nn.Parameter, formula: NormFormula, num_ranks: int, group: str) -> None:
        super().__init__()
        self.weight, self.formula = weight, formula
        self.num_ranks, self.group = num_ranks, group

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        mean = sum_over_ranks(self.formula.mean(x, gate), self.group) / self.num_ranks
        return self.formula.apply(x, self.weight, mean, gate)


def connect(model: PreTrainedModel, sums: Sums, ranks: Ranks, group: str) -> None:
    """Insert the exchanges between ranks into a rank's shard of a model, in place.

    All-reduces of each layer, after its attention, its module with states, and its MLP or experts, and one
    for each embedding table; two more of one number per token if queries and keys have norms over all heads
    together, and one if results of states have. Logits stay the rank's own: its columns of the vocabulary.

    Args:
        sums: where ranks sum.
        group: name of the ranks' process group.
    """
    for own in sums.layers:
        layer = model.get_submodule(own.path)
        for path, formula in own.norms.items():
            above, _, name = path.rpartition(".")
            weight = layer.get_submodule(path).get_parameter("weight")
            norm = RMSNormOverRanks(weight, formula, ranks.size, group)
            setattr(layer.get_submodule(above), name, norm)
        for name in own.children:
            setattr(layer, name, SummedOverRanks(layer.get_submodule(name), group))
    for path in sums.tables:
        table = model.get_submodule(path)
        assert isinstance(table, nn.Embedding), "tokens are embedded by a table"
        parent, _, name = path.rpartition(".")
        first = ranks.rank * table.num_embeddings
        setattr(model.get_submodule(parent), name, VocabParallelEmbedding(table, first, group))


@dataclass(frozen=True)
class ScoreExchange:
    """All-reduces over the ranks of a layer, with equally many heads each; all of them participate.

    Backends return the same sum on every rank, bit for bit, so that choices are equal.

    Attributes:
        num_ranks: t.
        num_copies: neighbouring ranks with copies of the same key/value head, with a share of its query heads
            each; 1 if each has heads of its own.
        rank: this one; equal on all ranks is what does not depend on it.
        group: name of the ranks' process group.
    """

    num_ranks: int
    num_copies: int
    rank: int = field(compare=False)
    group: str

    @classmethod
    def of(cls, num_kv_heads: int, ranks: Ranks, group: str) -> ScoreExchange:
        """Return the exchange of a layer with a number of key/value heads; see ``RankHeads.of``."""
        return cls(ranks.size, max(1, ranks.size // num_kv_heads), ranks.rank, group)

    @property
    def num_summed(self) -> int:
        """Number of heads in a sum over copies (H)."""
        return self.num_ranks // self.num_copies

    def mean_of_heads(self, mass: torch.Tensor) -> torch.Tensor:
        """Average weights over the key/value heads of all ranks.

        Args:
            mass: of the query heads of this rank, ``[X, K, S]``.

        Returns:
            ``[X, 1, S]``, the same on all ranks.
        """
        own = mass.mean(dim=1, keepdim=True)
        return sum_over_ranks(own, self.group) * (self.num_copies / self.num_ranks)

    def sum_of_copies(self, own_X1S: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks with copies of this rank's one head, ``[X, 1, S]``.

        One sum over all ranks carries all heads, each in its place.
        """
        if self.num_summed == 1:
            return sum_over_ranks(own_X1S, self.group)
        head = self.rank // self.num_copies
        nothing = torch.zeros_like(own_X1S)
        every = [own_X1S if number == head else nothing for number in range(self.num_summed)]
        return sum_over_ranks(torch.cat(every, dim=1), self.group)[:, head : head + 1]


@dataclass(frozen=True)
class SharedPolicy(KVPolicy):
    """A policy with scores over the heads of all ranks, as if one rank had them.

    Attributes:
        policy: that of one rank.
        exchange: of the layer.
    """

    policy: KVPolicy
    exchange: ScoreExchange

    @classmethod
    def of(cls, policy: KVPolicy, exchange: ScoreExchange) -> KVPolicy:
        """Return a policy for ranks: the same one where scores need no exchange."""
        looks = policy.num_observed != 0 or policy.num_ahead > 0
        needs_others = policy.pools_heads or exchange.num_copies > 1
        return cls(policy, exchange) if looks and needs_others else policy

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the policy."""
        return self.policy.name

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The policy's, and copies of heads if there are any, in which layers may differ."""
        copies = self.exchange.num_copies
        return self.policy.key if copies == 1 else (*self.policy.key, f"{copies} copies")

    @property
    def num_observed(self) -> int | None:
        """See the wrapped policy."""
        return self.policy.num_observed

    @property
    def weighs_decodes(self) -> bool:
        """See the wrapped policy."""
        return self.policy.weighs_decodes

    @property
    def marks_tokens(self) -> bool:
        """See the wrapped policy."""
        return self.policy.marks_tokens

    @property
    def has_scores(self) -> bool:
        """See the wrapped policy."""
        return self.policy.has_scores

    def first_score(self, token_class: torch.Tensor) -> torch.Tensor:
        """Return the result of the wrapped policy."""
        return self.policy.first_score(token_class)

    @property
    def pools_heads(self) -> bool:
        """See the wrapped policy."""
        return self.policy.pools_heads

    @property
    def num_ahead(self) -> int:
        """See the wrapped policy."""
        return self.policy.num_ahead

    @property
    def first_query(self) -> int:
        """See the wrapped policy."""
        return self.policy.first_query

    @property
    def positions_in_cache(self) -> bool:
        """See the wrapped policy."""
        return self.policy.positions_in_cache

    @property
    def needs_rotary(self) -> bool:
        """See the wrapped policy."""
        return self.policy.needs_rotary

    @property
    def num_summed(self) -> int:
        """Numbers of each slot that ranks sum."""
        return 1 if self.pools_heads else self.exchange.num_summed

    def check(self, num_slots: int) -> None:
        """Check as the policy does."""
        self.policy.check(num_slots)

    def num_needed(self, max_len: int) -> int:
        """Return the result of the wrapped policy."""
        return self.policy.num_needed(max_len)

    def observe(self, slots: SlotView, mass: torch.Tensor) -> torch.Tensor:
        """Return the policy's scores by the weights of all heads that count."""
        if slots.is_chunk or self.weighs_decodes:
            if self.pools_heads:
                mass = self.exchange.mean_of_heads(mass).expand_as(mass)
            else:
                mass = self.exchange.sum_of_copies(mass)
        return self.policy.observe(slots, mass)

    def expect(
        self, slots: SlotView, queries: FutureQueries, k_PKSD: torch.Tensor, v_PKSD: torch.Tensor
    ) -> torch.Tensor:
        """Return the average of the policy's scores by the query heads of each rank."""
        own = self.policy.expect(slots, queries, k_PKSD, v_PKSD)
        return self.exchange.sum_of_copies(own) / self.exchange.num_copies

    def protects(self, slots: SlotView) -> torch.Tensor | None:
        """Return the result of the wrapped policy."""
        return self.policy.protects(slots)
