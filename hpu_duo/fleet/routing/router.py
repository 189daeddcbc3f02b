"""The interface of routers, requests for them, and routers without prefixes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Units = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class RoutedRequest:
    """The data of a request for routers.

    Attributes:
        request_id: no other open request has it.
        units: of the prompt, by which prefixes are compared: token ids, or characters if it is not tokenised;
            int32 [n].
        user: of the request.
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
        """Number of tokens of the prompt, if known."""
        return len(self.units) * self.tokens_per_unit


@dataclass(eq=False)
class Dispatch:
    """A request at a replica.

    Attributes:
        request: that was sent.
        replica: where to.
        at: time at which it was sent.
        num_expected: leading units of its prompt that the replica was expected to have cached then.
        has_token: whether it has its first token.
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


class NoReplicaError(RuntimeError):
    """No replica can be sent a request."""


class Router(ABC):
    """Chooses a replica for each request, and is notified of its progress.

    A caller calls ``choose``, sends the request, and calls ``dispatched``; then ``first_token``, and at the
    end ``finished`` or ``failed``. ``route`` does the first two in one. Times are seconds of any monotonic
    clock. With a lost replica its requests, its load and its assumed cache are removed. ``finished`` or
    ``failed`` is called for these requests as well, or they are sent again; it only frees what is stored of
    them.

    Assumptions about caches may be wrong in either direction, which costs time only: a replica computes what
    it has not cached.

    ``_pick`` is the only method that a policy has to implement; those after it are callbacks.
    """

    name: str = "of its own"

    def __init__(self) -> None:
        self._open: dict[str, Dispatch] = {}
        self._at: dict[str, dict[str, Dispatch]] = {}
        self._num_open_tokens: dict[str, float] = {}

    @property
    def replicas(self) -> Collection[str]:
        """Replicas that may be chosen, in the order in which they joined."""
        return self._at.keys()

    @property
    def num_open_requests(self) -> int:
        """Requests that were sent and have not ended."""
        return sum(map(len, self._at.values()))

    def num_open(self, replica: str) -> int:
        """Return the requests that are open at a replica."""
        return len(self._at[replica])

    def num_open_tokens(self, replica: str) -> float:
        """Return the prompt tokens of the requests that are open at a replica."""
        return self._num_open_tokens[replica]

    def load(self, replica: str, now: float) -> float:
        """Return how busy a replica is, in a measure of the policy's own; 0 is idle."""
        return float(self.num_open(replica))

    def num_expected(self, request: RoutedRequest, replica: str) -> int:
        """Return the leading units of a prompt that a replica is expected to have cached."""
        return 0

    def join(self, replica: str, now: float = 0.0) -> None:
        """Add a replica, with an empty cache.

        Raises:
            ValueError: it is there.
        """
        if replica in self._at:
            raise ValueError(f"expected a replica that is not there yet, got {replica!r}")
        self._joins(replica, now)
        self._at[replica], self._num_open_tokens[replica] = {}, 0.0

    def leave(self, replica: str, now: float = 0.0) -> list[Dispatch]:
        """Remove a replica that is lost or stopping; returns its open requests.

        Raises:
            ValueError: it is not there.
        """
        if replica not in self._at:
            raise ValueError(f"expected one of {', '.join(self._at) or 'no'} replicas, got {replica!r}")
        lost = self._at.pop(replica)
        del self._num_open_tokens[replica]
        self._leaves(replica)
        return list(lost.values())

    def choose(self, request: RoutedRequest, now: float, without: Collection[str] = ()) -> str:
        """Choose a replica.

        Args:
            without: replicas not to choose, such as those that were tried in vain.

        Raises:
            NoReplicaError: there is no other one.
        """
        offered = [replica for replica in self._at if replica not in without]
        if not offered:
            raise NoReplicaError(f"expected a replica, got none of {len(self._at)} that may be chosen")
        return self._pick(request, offered, now)

    def dispatched(self, request: RoutedRequest, replica: str, now: float) -> Dispatch:
        """Called when a request is sent to a replica, by whatever choice.

        Raises:
            ValueError: the request is open, or the replica is not there.
        """
        earlier = self._open.get(request.request_id)
        if earlier is not None and not self._is_lost(earlier):
            raise ValueError(f"request {request.request_id!r} is open, at {earlier.replica}")
        if replica not in self._at:
            raise ValueError(f"expected one of {', '.join(self._at) or 'no'} replicas, got {replica!r}")
        if earlier is not None:
            self.failed(request.request_id, now)
        sent = Dispatch(request, replica, now, self.num_expected(request, replica))
        self._open[request.request_id] = self._at[replica][request.request_id] = sent
        self._num_open_tokens[replica] += request.num_tokens
        self._begins(sent)
        return sent

    def route(self, request: RoutedRequest, now: float) -> Dispatch:
        """Choose a replica, and count the request as sent."""
        return self.dispatched(request, self.choose(request, now), now)

    def first_token(self, request_id: str, now: float) -> None:
        """Called at the first token of a request."""
        sent = self._open.get(request_id)
        if sent is not None and not sent.has_token and not self._is_lost(sent):
            sent.has_token = True
            self._answers(sent, now)

    def finished(
        self, request_id: str, now: float, num_outputs: int, num_cached_tokens: float | None = None
    ) -> None:
        """Called at the end of a completed request.

        Args:
            num_outputs: tokens of the response.
            num_cached_tokens: tokens of its prompt that the replica had cached; None if unknown.
        """
        sent = self._close(request_id)
        if sent is not None:
            self._ends(sent, now, num_outputs, num_cached_tokens)

    def failed(self, request_id: str, now: float) -> None:
        """Called at the end of a failed or cancelled request."""
        sent = self._close(request_id)
        if sent is not None:
            self._fails(sent, now)

    def evicted(self, replica: str, request: RoutedRequest, num_kept: int) -> None:  # noqa: B027
        """Called when a replica has at most the first ``num_kept`` units of a prompt cached."""

    def _is_lost(self, sent: Dispatch) -> bool:
        """Whether the replica of an open request has left since, and may have joined again."""
        return self._at.get(sent.replica, {}).get(sent.request.request_id) is not sent

    def _close(self, request_id: str) -> Dispatch | None:
        """Remove an open request; returns None for one that is not open, or was lost with its replica."""
        sent = self._open.pop(request_id, None)
        if sent is None:
            return None
        if self._is_lost(sent):
            self._loses(sent)
            return None
        here = self._at[sent.replica]
        del here[request_id]
        left = self._num_open_tokens[sent.replica] - sent.request.num_tokens
        self._num_open_tokens[sent.replica] = left if here else 0.0  # what rounding has left
        return sent

    # The policy's own

    @abstractmethod
    def _pick(self, request: RoutedRequest, offered: Sequence[str], now: float) -> str:
        """Choose one of the replicas that are offered, of which there is at least one."""

    def _joins(self, replica: str, now: float) -> None:  # noqa: B027
        """Add a replica."""

    def _leaves(self, replica: str) -> None:  # noqa: B027
        """Forget a replica, in bounded time: requests that are open there end in ``_loses``, one by one."""

    def _begins(self, sent: Dispatch) -> None:  # noqa: B027
        """Called for a sent request."""

    def _answers(self, sent: Dispatch, now: float) -> None:  # noqa: B027
        """Called at the first token."""

    def _ends(self, sent: Dispatch, now: float, num_outputs: int, num_cached_tokens: float | None) -> None:  # noqa: B027
        """Called at the end of a completed request."""

    def _fails(self, sent: Dispatch, now: float) -> None:  # noqa: B027
        """Called at the end of a failed request."""

    def _loses(self, sent: Dispatch) -> None:  # noqa: B027
        """Forget a request whose replica has left before; one of the same name may have joined since."""


class RoundRobin(Router):
    """Sends each request to the replica that was sent one the longest ago."""

    def __init__(self) -> None:
        super().__init__()
        self._num_sent = 0
        self._turns: dict[str, int] = {}

    def _pick(self, request: RoutedRequest, offered: Sequence[str], now: float) -> str:
        return min(offered, key=self._turns.__getitem__)

    def _joins(self, replica: str, now: float) -> None:
        self._turns[replica] = 0

    def _leaves(self, replica: str) -> None:
        del self._turns[replica]

    def _begins(self, sent: Dispatch) -> None:
        self._num_sent += 1
        self._turns[sent.replica] = self._num_sent


class LeastLoaded(RoundRobin):
    """Sends each request to the replica with the fewest open ones, then fewest prompt tokens, in turn."""

    def _pick(self, request: RoutedRequest, offered: Sequence[str], now: float) -> str:
        return min(
            offered, key=lambda each: (self.num_open(each), self.num_open_tokens(each), self._turns[each])
        )
