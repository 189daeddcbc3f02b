"""A pinned prefix, which stays cached as long as it has references."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt


class PrefixHold:
    """A pinned prefix, which stays cached as long as it has references.

    It refers to a node of the tree, not to blocks, whose ids may change.

    Attributes:
        tokens: int32, whole blocks of them.
        num_blocks: blocks of the prefix.
        namespace: see ``Request.namespace``.
        node: the ``PrefixNode`` at its end; None before it is cached, and after it is released or lost.
        refusal: the reason why it did not get there, None without one.
        num_holders: references, of its owner and of the requests that begin with it; the last one releases
            it.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], block_size: int, namespace: Hashable) -> None:
        self.num_blocks = len(tokens) // block_size
        self.tokens, self.namespace = tokens[: self.num_blocks * block_size].copy(), namespace
        self.node: Any = None
        self.refusal: str | None = None
        self.num_holders = 1

    @property
    def is_there(self) -> bool:
        """Whether the prefix is cached, and will be."""
        return self.node is not None

    @property
    def is_lost(self) -> bool:
        """Whether it is lost: neither released nor cached, since the cache was cleared."""
        return self.num_blocks > 0 and self.num_holders > 0 and self.node is None

    def check(self, name: str, prompt: npt.NDArray[np.int32], namespace: Hashable) -> None:
        """Raise ValueError unless a request of this name, prompt and namespace can begin with it."""
        if self.num_holders < 1:
            raise ValueError(f"{name}: expected an open context, got a closed one")
        size = len(self.tokens)
        is_prefix = np.array_equal(prompt[:size], self.tokens)
        if not is_prefix or namespace != self.namespace:
            raise ValueError(
                f"{name}: expected a prompt that begins with the {size} tokens of its context, under "
                "its cache_salt, got another one"
            )
