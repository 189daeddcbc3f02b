"""Several engines on one virtual clock, behind a router; replicas may be lost and come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hpu_duo.fleet.routing import RoutedRequest, Router
from hpu_duo.planning.simulation import Arrivals, SimulatedEngine, SimulatedStep
from hpu_duo.request import Request

_NEVER = float("inf")


@dataclass(frozen=True)
class Loss:
    """The loss of a replica: its steps, requests and cache are gone.

    Attributes:
        replica: its number.
        at: time of the loss.
        back_after: time until it serves again, with nothing cached.
    """

    replica: int
    at: float
    back_after: float

    @classmethod
    def parse(cls, text: str, back_after: float) -> Loss:
        """Read ``NUMBER@SECONDS``.

        Raises:
            ValueError: it is written in another way.
        """
        number, _, at = text.partition("@")
        try:
            found = cls(int(number), float(at), back_after)
        except ValueError:
            raise ValueError(f"expected a lost replica as NUMBER@SECONDS, got {text!r}") from None
        if not (found.replica >= 0 and found.at >= 0):
            raise ValueError(f"expected a replica and a time of 0 or more, got {text!r}")
        return found


@dataclass(eq=False)
class _Replica:
    """An engine, or None while it is lost, and the step that is under way."""

    name: str
    engine: SimulatedEngine | None
    step: SimulatedStep | None = None
    back_at: float = _NEVER


class ReplicatedSimulation:
    """Engines with a router before them, on one virtual clock.

    Each engine's steps follow each other without a gap while it has a request, as with ``Simulation``, which
    is this with one replica. A request whose replica is lost is sent again, from the start, by whoever sent
    it. While no replica is there, requests wait.

    Args:
        make_engine: a new engine, with nothing cached.
        num_replicas: at least 1.
        router: without replicas so far; they are called ``0``, ``1`` and so on.
        arrivals: the requests, without siblings.
        losses: of replicas; one that is lost already is not lost again.
        tells_hits: whether the router gets how much of each prompt was cached; without, its beliefs are
            only as good as its ``capacity``.

    Raises:
        ValueError: no replica, or a loss of one that there is not.

    Attributes:
        now: time on the clock, from 0 on.
        lost: requests that were sent again so far, in order; one as often as it was lost.
        num_expected_tokens, num_sent_tokens: prompt tokens that the router expected to be cached when it sent
            them, and all that it sent.
    """

    def __init__(
        self,
        make_engine: Callable[[], SimulatedEngine],
        num_replicas: int,
        router: Router,
        arrivals: Arrivals,
        losses: Sequence[Loss] = (),
        *,
        tells_hits: bool = True,
    ) -> None:
        if num_replicas < 1:
            raise ValueError(f"expected 1 replica or more, got {num_replicas}")
        wrong = [each.replica for each in losses if each.replica >= num_replicas]
        if wrong:
            raise ValueError(f"expected replicas below {num_replicas} to be lost, got {wrong[0]}")
        self.now, self.lost = 0.0, list[Request]()
        self.num_expected_tokens = self.num_sent_tokens = 0
        self._make_engine, self._router, self._arrivals = make_engine, router, arrivals
        self._tells_hits = tells_hits
        self._losses = deque(sorted(losses, key=lambda each: each.at))
        self._replicas = [_Replica(str(number), make_engine()) for number in range(num_replicas)]
        self._waiting: deque[Request] = deque()
        self._at: dict[str, Request] = {}
        for replica in self._replicas:
            router.join(replica.name, 0.0)

    def steps(self, until: float = _NEVER) -> Iterator[SimulatedStep]:
        """Serve steps that begin before ``until``, and give each when it has ended.

        Raises:
            ValueError: an engine cannot hold a request, a bucket takes no time.
            GraphMissError: no bucket holds a step.
        """
        while (coming := self._next_time(until)) is not None:
            self.now = max(self.now, coming)
            for replica in self._replicas:
                if replica.step is not None and replica.step.end <= self.now:
                    yield self._ended(replica, replica.step)
            self._lose_and_return()
            self._send()
            if self.now < until:
                self._begin_steps()

    def _next_time(self, until: float) -> float | None:
        """The time of the next thing to happen; None when nobody is served, and nobody is to come."""
        ends = [each.step.end for each in self._replicas if each.step is not None]
        arrival = self._arrivals.next_time()
        if not ends and not self._waiting and (arrival is None or arrival >= until):
            return None
        others = [each.back_at for each in self._replicas] + [each.at for each in self._losses]
        times = [each for each in [*others, _NEVER if arrival is None else arrival] if each < until]
        return min([*ends, *times], default=None)

    def _ended(self, replica: _Replica, step: SimulatedStep) -> SimulatedStep:
        replica.step = None
        for done in step.committed:
            request = done.request
            self._router.first_token(request.request_id, step.end)
            if done.finish_reason is not None:
                hits = request.num_cached_tokens if self._tells_hits else None
                self._router.finished(request.request_id, step.end, request.num_output_tokens, hits)
                del self._at[request.request_id]
                self._arrivals.ended(request, step.end)
        return step

    def _lose_and_return(self) -> None:
        while self._losses and self._losses[0].at <= self.now:
            loss = self._losses.popleft()
            replica = self._replicas[loss.replica]
            if replica.engine is not None:
                replica.engine, replica.step = None, None
                replica.back_at = self.now + loss.back_after
                lost = self._router.leave(replica.name, self.now)
                self._waiting += [self._again(each.request.request_id) for each in lost]
        for replica in self._replicas:
            if replica.back_at <= self.now:
                replica.engine, replica.back_at = self._make_engine(), _NEVER
                self._router.join(replica.name, self.now)

    def _again(self, request_id: str) -> Request:
        """A lost request as it was when it came."""
        lost = self._at.pop(request_id)
        self.lost.append(lost)
        prompt = lost.tokens[: lost.num_prompt_tokens]
        again = Request(request_id, prompt, lost.params, lost.limits, sampling_seed=lost.sampling_seed)
        again.score = lost.score
        return again

    def _send(self) -> None:
        """Send the requests that have come, and those that wait for a replica."""
        self._waiting += self._arrivals.due(self.now)
        while self._waiting and self._router.replicas:
            request = self._waiting.popleft()
            prompt = request.tokens[: request.num_prompt_tokens]
            asked = RoutedRequest.of_tokens(request.request_id, prompt, request.params.user)
            sent = self._router.route(asked, self.now)
            self.num_expected_tokens += sent.num_expected
            self.num_sent_tokens += request.num_prompt_tokens
            self._at[request.request_id] = request
            engine = self._replicas[int(sent.replica)].engine
            assert engine is not None, f"replica {sent.replica} was chosen and is lost"
            engine.add(request)

    def _begin_steps(self) -> None:
        for replica in self._replicas:
            if replica.step is None and replica.engine is not None and replica.engine.has_unfinished:
                replica.step = replica.engine.step(self.now)
