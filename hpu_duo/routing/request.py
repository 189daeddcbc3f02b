"""Requests as routers see them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Units = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class RoutedRequest:
    """A request, as far as routers know it.

    Attributes:
        request_id: no other open request has it.
        units: of the prompt, by which prefixes are compared: token ids, or characters where nobody has
            tokenised it; int32 [n].
        user: who asks.
        namespace: requests of different ones share no prefix.
        tokens_per_unit: 1 for token ids, a guess for characters.
    """

    request_id: str
    units: Units
    user: str | None = None
    namespace: Hashable = None
    tokens_per_unit: float = 1.0

    @classmethod
    def of_tokens(
        cls,
        request_id: str,
        tokens: Sequence[int] | Units,
        user: str | None = None,
        namespace: Hashable = None,
    ) -> RoutedRequest:
        """A prompt of token ids."""
        return cls(request_id, np.asarray(tokens, np.int32), user, namespace)

    @classmethod
    def of_text(
        cls,
        request_id: str,
        text: str,
        user: str | None = None,
        namespace: Hashable = None,
        characters_per_token: float = 4.0,
    ) -> RoutedRequest:
        """A prompt of characters."""
        units = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)
        return cls(request_id, units, user, namespace, 1.0 / characters_per_token)

    @property
    def num_tokens(self) -> float:
        """Tokens of the prompt, as far as is known."""
        return len(self.units) * self.tokens_per_unit


@dataclass(eq=False)
class Dispatch:
    """A request at a replica.

    Attributes:
        request: that was sent.
        replica: where to.
        at: time at which it was sent.
        num_expected: leading units of its prompt that the replica was expected to have cached then.
        has_token: whether its first token has come.
    """

    request: RoutedRequest
    replica: str
    at: float
    num_expected: int = 0
    has_token: bool = False

    @property
    def num_new_tokens(self) -> float:
        """Tokens of the prompt that were expected to be computed."""
        return (len(self.request.units) - self.num_expected) * self.request.tokens_per_unit
