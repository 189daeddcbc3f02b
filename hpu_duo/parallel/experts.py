"""Expert parallel: each rank has some whole routed experts, instead of a part of the width of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hpu_duo.device.ranks import Ranks
from hpu_duo.modeling.experts import NUM_EXPERTS

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
