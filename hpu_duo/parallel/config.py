"""The configuration and the sizes of one rank's share of a model.

Expert parallel: each rank has some whole routed experts, instead of a part of the width of each.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from hpu_duo.device.ranks import Ranks
from hpu_duo.modeling.experts import HELD, NUM_EXPERTS

_NUMBER = re.compile(r"(\.experts\.)(\d+)(?=\.)")
_ROUTED, _BLOCK = "experts", "block_sparse_moe"


@dataclass(frozen=True)
class ExpertShare:
    """The routed experts of one rank: as many on each, the first ones on rank 0.

    Args:
        num_experts: of the model.
        first: the rank's first one.
        size: number of its experts.
    """

    num_experts: int
    first: int
    size: int

    @classmethod
    def of(cls, config: Any, ranks: Ranks) -> ExpertShare:
        """Return the experts of a rank.

        Args:
            config: transformers' configuration of the whole model.

        Raises:
            ValueError: transformers has no expert-parallel plan for the family, or ranks cannot share the
                experts evenly; the message names the family.
        """
        text = config.get_text_config()
        if not getattr(text, "base_model_ep_plan", None):
            raise ValueError(
                f"{text.model_type!r} cannot be served with expert_parallel: transformers has no "
                "expert-parallel plan for it (base_model_ep_plan)"
            )
        found = (number for name in NUM_EXPERTS if (number := getattr(text, name, None)))
        num_experts = next(found, 0)
        if not num_experts or num_experts % ranks.size:
            raise ValueError(
                f"expected a number of experts of {text.model_type!r} that is a multiple of "
                f"tensor_parallel_size={ranks.size} for expert_parallel, got {num_experts}"
            )
        size = num_experts // ranks.size
        return cls(num_experts, ranks.rank * size, size)

    @property
    def numbers(self) -> tuple[tuple[str, int], ...]:
        """Attributes of a share's module of routed experts, for ``run_experts``: their names and values."""
        return ("first_expert", self.first), ("num_experts", self.size)

    def are_in(self, path: Sequence[str], shape: Sequence[int]) -> bool:
        """Whether a tensor of a checkpoint is of one routed expert, or of all of them.

        Args:
            path: its name, split at dots.
        """
        return _ROUTED in path or (_BLOCK in path and len(shape) == 3)

    def span(self, path: Sequence[str], shape: Sequence[int]) -> tuple[int, int] | None:
        """Return ``[begin, end)`` of the rank's experts in such a tensor; None if it is of one expert.

        True if a tensor has a number for each expert, which routes tokens on every rank.
        """
        behind = path[path.index(_ROUTED) :] if _ROUTED in path else ()
        has_all = len(shape) > 1 and shape[0] == self.num_experts and not any(map(str.isdigit, behind))
        return (self.first, self.first + self.size) if has_all else None

    def name(self, key: str) -> str | None:
        """Return the name in the share of a checkpoint's tensor; None if another rank has its expert."""
        found = _NUMBER.search(key)
        if found is None:
            return key
        number = int(found[2]) - self.first
        is_own = 0 <= number < self.size
        return f"{key[: found.start()]}{found[1]}{number}{key[found.end() :]}" if is_own else None


def routed_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that have all routed experts of a layer, by name.

    Raises:
        ValueError: there are none, or they do not follow transformers' interface of experts.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and any(x.ndim == 3 for x in module.parameters(recurse=False))
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} cannot be served with expert_parallel: expected experts in one tensor "
            "for each projection, as transformers 5 has them, got none"
        )
    return found


_STATE_WIDTH = "mamba_d_ssm"
_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    _STATE_WIDTH,
)
"""Names of the widths of MLPs and experts, and of results of all heads of a state space."""
_HEADS = (
    "num_attention_heads",
    "num_attention_heads_per_layer",
    "linear_num_value_heads",
    "mamba_n_heads",
    "mamba_num_heads",
)
"""Names of numbers of query heads, one or one for each layer, and of heads of recurrences."""
_KV_HEADS = ("num_key_value_heads", "linear_num_key_heads", "mamba_n_groups")
"""Names of numbers of what several heads share; ranks have copies of few."""
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
"""Names of numbers of tokens, of which tables have a row each."""
_BY_LAYER = "per_layer_config"
"""Name of what single layers have instead of a value of all layers."""
NARROWED = (*_WIDTHS, *_HEADS, *_KV_HEADS, *_VOCABULARIES, _BY_LAYER, "head_dim", "pad_token_id")
"""Names of what a share has another value of than the whole model."""


def check_plan(config: Any) -> None:
    """Raise ValueError for a family without a tensor-parallel plan of transformers; the message names it."""
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise ValueError(
            f"{text.model_type!r} cannot be served by several ranks: transformers has no tensor-parallel "
            "plan for it (base_model_tp_plan)"
        )


def padded_vocab(vocab_size: int, size: int) -> int:
    """Rows of the vocabulary of each of ``size`` ranks, padding included."""
    return -(-vocab_size // size)


def narrowed_config(config: Any, head_dim: int, size: int, experts: ExpertShare | None = None) -> Any:
    """Return a copy of a configuration for a model with one rank's share of heads, widths and vocabulary.

    Args:
        config: transformers' configuration.
        head_dim: channels of a head, for configurations without it: families derive it from the number of
            heads.
        size: number of ranks.
        experts: whole experts of a rank; None = a part of the width of each.

    Raises:
        ValueError: ranks cannot share heads or widths evenly, or transformers has no plan for the family.
    """
    check_plan(config)
    narrow = copy.deepcopy(config)
    text = narrow.get_text_config()
    values = text.to_dict()
    differing = values.get(_BY_LAYER)
    if getattr(text, _STATE_WIDTH, 0) is None:
        # It follows from the hidden size, which ranks do not share.
        setattr(text, _STATE_WIDTH, int(text.mamba_expand * text.hidden_size))
    for name in (*_WIDTHS, *_HEADS, *_KV_HEADS, *_VOCABULARIES):
        # Where layers differ, only the dictionary has what those have that are not named.
        value = values.get(name) if differing else getattr(text, name, None)
        if value:
            setattr(text, name, _narrowed(name, value, size))
    if differing:
        text.per_layer_config = {
            layer: {name: _narrowed(name, value, size) for name, value in own.items()}
            for layer, own in differing.items()
        }
    elif getattr(text, "head_dim", None) is None:
        text.head_dim = head_dim
    if experts is not None:
        setattr(text, HELD, experts.size)
    # Tables are built with a row of this token, which is zero before training, and is another token's here.
    text.pad_token_id = None
    return narrow


def _narrowed(name: str, value: Any, size: int) -> Any:
    """One rank's share of a value of a configuration; all of what ranks do not share."""
    if isinstance(value, list):
        # Other lists are unknown: slices that do not fit fail by the shapes of parameters.
        return [_narrowed(name, each, size) for each in value] if name in _HEADS else value
    if name in (*_WIDTHS, *_HEADS):
        return _share(name, value, size)
    if name in _KV_HEADS:
        return _share(name, value, min(size, value))
    return padded_vocab(value, size) if name in _VOCABULARIES else value


def _share(name: str, value: int, size: int) -> int:
    if value % size:
        raise ValueError(f"expected {name} to be a multiple of tensor_parallel_size={size}, got {value}")
    return value // size


@dataclass(frozen=True)
class RankHeads:
    """Heads of one layer on one rank, by their numbers in the checkpoint.

    Attributes:
        kv: key/value heads, in the order of the rank.
        query: query heads, those of a key/value head side by side.
    """

    kv: tuple[int, ...]
    query: tuple[int, ...]

    @classmethod
    def of(
        cls, groups: Sequence[Sequence[int]], num_heads: int, ranks: Ranks, *, is_even: bool = True
    ) -> RankHeads:
        """Return the rank's share of each group of key/value heads.

        With fewer key/value heads than ranks, neighbouring ranks have copies of the same one, and each of
        them a share of its query heads.

        Args:
            groups: key/value heads of each group.
            num_heads: query heads of the layer.
            is_even: whether ranks have equally many of each group, or only of all groups together.

        Raises:
            ValueError: ranks cannot share a group, or the query heads, evenly.
        """
        num_kv_heads = sum(map(len, groups))
        group_size = num_heads // num_kv_heads
        if ranks.size <= num_kv_heads:
            places = placed([len(group) for group in groups], ranks, is_even=is_even)
            kv = tuple(head for group, place in zip(groups, places) for head in group[place])
            return cls(kv, tuple(head * group_size + i for head in kv for i in range(group_size)))
        copies, rest = divmod(ranks.size, num_kv_heads)
        if rest or group_size % copies or len(groups) > 1:
            raise ValueError(
                f"expected {ranks.size} ranks to share {num_heads} query heads and {num_kv_heads} key/value "
                f"heads in {len(groups)} group(s) evenly"
            )
        head, copy = groups[0][ranks.rank // copies], ranks.rank % copies
        num_query = group_size // copies
        first = head * group_size + copy * num_query
        return cls((head,), tuple(range(first, first + num_query)))


def placed(sizes: Sequence[int], ranks: Ranks, *, is_even: bool) -> tuple[slice, ...]:
    """Return the part of each group of heads that a rank has; neighbours of a group lie side by side.

    Args:
        sizes: heads of each group.
        is_even: see ``RankHeads.of``. Else ranks have as many of a group as others, or one more or less.

    Raises:
        ValueError: ranks cannot share them so.
    """
    for size in sizes if is_even else (sum(sizes),):
        if size % ranks.size:
            raise ValueError(f"expected a group of heads that {ranks.size} ranks share evenly, got {size}")
    # As if heads were dealt one by one, group after group, the last rank first.
    own, following = (
        [
            first_head(num_context_parallel, rank, ranks.size)
            for num_context_parallel in accumulate(sizes, initial=0)
        ]
        for rank in (ranks.rank, ranks.rank + 1)
    )
    begins, ends = ([upto - before for before, upto in pairwise(each)] for each in (own, following))
    return tuple(map(slice, begins, ends))


def first_head(num_heads: int, rank: int, size: int) -> int:
    """Return the first of ``num_heads`` that a rank has; the last ranks have one more if need be."""
    each, rest = divmod(num_heads, size)
    return rank * each + max(0, rank - (size - rest))
