"""Numbers of a front process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

DEPARTED = "departed"
"""Name under which replicas are counted together once they are no more."""


@dataclass
class FrontCounts:
    """Totals since the start; those of replicas by their names.

    Attributes:
        num_open: calls that are being answered.
        num_retries: calls that were sent to another replica.
        num_broken: answers whose replica was lost.
        num_failed: streams that a replica has ended with an error.
        requests, prompt_tokens: that were sent, the tokens as far as is known.
        expected_tokens: those of them that the router expected to be cached.
        cached_tokens: those of answers that were, as far as the answers tell.
        responses: of the front, by method, path and status.
    """

    num_open: int = 0
    num_retries: int = 0
    num_broken: int = 0
    num_failed: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: dict[str, float] = field(default_factory=dict)
    expected_tokens: dict[str, float] = field(default_factory=dict)
    cached_tokens: dict[str, float] = field(default_factory=dict)
    responses: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def responded(self, method: str, path: str, status: int) -> None:
        """Count a response."""
        self.responses[method, path, str(status)] += 1

    def depart(self, name: str) -> None:
        """Count a replica with all others that are no more: names of new ones would be more and more."""
        self.requests[DEPARTED] += self.requests.pop(name, 0)
        for totals in (self.prompt_tokens, self.expected_tokens, self.cached_tokens):
            add(totals, DEPARTED, totals.pop(name, 0.0))

    def joined(self, routed: FrontCounts) -> FrontCounts:
        """Return these numbers with those of replicas from elsewhere."""
        return replace(
            self,
            requests=routed.requests,
            prompt_tokens=routed.prompt_tokens,
            expected_tokens=routed.expected_tokens,
            cached_tokens=routed.cached_tokens,
        )


def add(totals: dict[str, float], name: str, value: float) -> None:
    """Add to the total of a name."""
    totals[name] = totals.get(name, 0.0) + value
