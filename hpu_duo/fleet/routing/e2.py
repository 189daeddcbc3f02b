"""Preble's E2: exploit what is cached, or explore where it costs least."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hpu_duo.fleet.routing.prefix_map import RadixNode, WindowSums
from hpu_duo.fleet.routing.prefix_router import CAPACITY, MIN_CACHED, PrefixRouter, longest
from hpu_duo.fleet.routing.router import Dispatch, RoutedRequest


class HotPrefixes:
    """Times to the first token of the requests of each prefix, which show that it needs more replicas.

    Args:
        window_s: seconds for which times are remembered.
        growth: a prefix is hot if the mean of the later half is this many times that of the earlier half.
        num_least: fewest times for a decision.
    """

    def __init__(self, window_s: float, growth: float, num_least: int = 16) -> None:
        self._window_s, self._growth, self._num_least = window_s, growth, num_least

    def add(self, node: RadixNode, now: float, ttft: float) -> None:
        """Note the time to the first token of a request."""
        if node.first_tokens is None:
            node.first_tokens = WindowSums()
        node.first_tokens.drop(now - self._window_s)
        node.first_tokens.add(now, ttft)

    def take(self, node: RadixNode, now: float) -> bool:
        """Return whether a prefix is hot; if it is, it has to become so anew to be hot again."""
        times = node.first_tokens
        if times is None:
            return False
        times.drop(now - self._window_s)
        if times.num() < self._num_least:
            return False
        half = len(times) // 2
        is_hot = _mean(times[half:]) >= self._growth * _mean(times[:half]) > 0
        if is_hot:
            node.first_tokens = None
        return is_hot


def _mean(groups: list[tuple[float, int, float]]) -> float:
    num = sum(each[1] for each in groups)
    return sum(each[2] for each in groups) / num if num else 0.0


@dataclass(eq=False)
class Charge:
    """Work of one request; seconds, from a time on."""

    at: float
    seconds: float


class WindowLoad:
    """Seconds of work assigned to each replica within a window of time.

    Args:
        window_s: length of the window.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._loads: dict[str, WindowSums] = {}

    def join(self, replica: str, now: float) -> None:
        """Add a replica, with the load of the least loaded one.

        Without that, a replica that is new would be sent everything until it had as much within the window as
        the others.
        """
        least = min((self.seconds(each, now) for each in self._loads), default=0.0)
        self._loads[replica] = WindowSums()
        if least:
            self.charge(replica, now, least)

    def leave(self, replica: str) -> None:
        """Forget a replica."""
        del self._loads[replica]

    def charge(self, replica: str, now: float, seconds: float) -> Charge:
        """Add work; what is returned can be corrected."""
        self._loads[replica].add(now, seconds)
        return Charge(now, seconds)

    def correct(self, replica: str, charge: Charge, seconds: float) -> None:
        """Replace the seconds of a charge, by 0 if the work was not done."""
        if self._loads[replica].correct(charge.at, seconds - charge.seconds):
            charge.seconds = seconds

    def seconds(self, replica: str, now: float) -> float:
        """Return the work of a replica within the window that ends now."""
        load = self._loads[replica]
        load.drop(now - self._window_s)
        return max(0.0, load.total())

    def num_charges(self, replica: str) -> int:
        """Return the number of charges in the window at its last update."""
        return self._loads[replica].num()


_NUM_REMEMBERED = 200
_FIRST_DECODE_S = 0.15
"""Seconds of a decoded token before any has been timed."""
_FIRST_NUM_OUTPUTS = 32
_DELAY = 0.15
"""Share of an output's time by which one open request delays another: they decode in the same steps."""
_PATIENCE = 8.0
"""Factor on the time that a prefix saves, for which a request may wait: recomputing it delays others."""


class E2(PrefixRouter):
    """Sends a request to the replica with more than half of it cached, else to the one with the least cost.

    The cost is the time that the request waits for the open ones, the prefixes that it would evict, and its
    prompt; of equal costs, the replica with the least assigned work within the window is chosen. The wait is
    the time of prompts without a first token, and 0.15 of an output's time for each open request. What an
    evicted prefix costs is the time to compute it again, times the share of the window's requests that used
    it. Work is seconds: of prompt tokens that were computed, and of outputs by the medians of the last 200
    requests. Of several replicas with the same prefix, the one with the shortest wait is chosen.

    Three rules spread what is popular. In each of these cases the request is sent to the replica with the
    shortest wait without its prefix, which is replicated by that:

    - the wait at the holder is ``imbalance`` times as long, and longer by 8 times what the prefix saves;
    - each replica with the prefix has more than half of an even share of the window's requests by this prefix
      alone, and ``imbalance`` times the work of the other one after computing the prefix;
    - the time to the first token of the prefix has grown ``growth`` times within the window.

    Args:
        window_s: seconds for which work and uses of prefixes count.
        imbalance, growth: see above; infinite disables a rule.
        prefill_s: seconds per prompt token.
        capacity: assumed units (tokens, or characters) of a replica's cache.
        min_cached: tokens of a prefix below which it counts as not cached.

    Source: Preble, Srivatsa et al. 2024 (arXiv:2407.00023). Differences: the time of a prefill is linear. The
    cost of an explored replica is the wait for what is open there, where Preble counts all work of the
    window, and includes the prompt's, which the published code leaves at 0. Rebalancing counts from the first
    request on, one prefix at a time. It redirects only the current request: the published code moves large
    nodes of its tree from the replica with the most work to the one with the least, the cheapest first, as
    long as the first stays ahead. Here no prefix moves; the other replica computes and caches it as well.
    """

    def __init__(
        self,
        window_s: float = 180.0,
        imbalance: float = 1.5,
        growth: float = 2.0,
        prefill_s: float = 1e-4,
        capacity: float = CAPACITY,
        min_cached: float = MIN_CACHED,
    ) -> None:
        if not (window_s > 0 and prefill_s > 0):
            raise ValueError(f"expected window_s and prefill_s above 0, got {window_s} and {prefill_s}")
        if not (imbalance >= 1 and growth >= 1):
            raise ValueError(f"expected imbalance and growth of 1 or more, got {imbalance} and {growth}")
        super().__init__(capacity, min_cached, hits_s=window_s)
        self._window_s, self._imbalance, self._prefill_s = window_s, imbalance, prefill_s
        self._work, self._hot = WindowLoad(window_s), HotPrefixes(window_s, growth)
        self._prompts_s: dict[str, float] = {}
        self._charges: dict[Dispatch, Charge] = {}
        self._first_tokens: dict[Dispatch, float] = {}
        self._decode_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._num_outputs: deque[int] = deque(maxlen=_NUM_REMEMBERED)
        self._token_s, self._output_s = _FIRST_DECODE_S, _FIRST_DECODE_S * _FIRST_NUM_OUTPUTS

    def load(self, replica: str, now: float) -> float:
        """Return the seconds of work assigned to a replica within the window."""
        return self._work.seconds(replica, now)

    def wait_s(self, replica: str) -> float:
        """Return the estimated seconds by which the open requests of a replica delay one more."""
        return self._prompts_s[replica] + _DELAY * self._output_s * self.num_open(replica)

    def _pick(self, request: RoutedRequest, offered: Sequence[str], now: float) -> str:
        held = self.held(request)
        num_cached, holders = longest(held, offered)
        work = {each: (self.wait_s(each), self._work.seconds(each, now)) for each in offered}
        if num_cached > len(request.units) - num_cached:
            return self._exploit(request, num_cached, holders, work, now)

        def cost(replica: str) -> tuple[float, float]:
            num_new = len(request.units) - held.get(replica, 0)
            wait_s, work_s = work[replica]
            return wait_s + self._computed_s(request, num_new) + self.eviction_s(
                replica, request, num_new, now
            ), work_s

        return min(offered, key=cost)

    def _exploit(
        self,
        request: RoutedRequest,
        num_cached: int,
        holders: Sequence[str],
        work: Mapping[str, tuple[float, float]],
        now: float,
    ) -> str:
        """Choose a replica with the prefix, or one to replicate it to.

        Args:
            work: of each replica that is offered its wait and its work, in seconds.
        """
        others = [each for each in work if each not in holders]
        chosen = min(holders, key=work.__getitem__)
        if not others:
            return chosen
        other, node = min(others, key=work.__getitem__), self._largest_node(request)
        assert node is not None, "expected a replica with some of it"
        saved_s = self._computed_s(request, num_cached)
        (wait_s, work_s), (other_wait_s, other_work_s) = work[chosen], work[other]
        is_late = wait_s > self._imbalance * other_wait_s + _PATIENCE * saved_s
        is_ahead = work_s > self._imbalance * (other_work_s + saved_s)
        if is_late or (is_ahead and self._is_popular(node, now)) or self._hot.take(node, now):
            return other
        return chosen

    def _is_popular(self, node: RadixNode, now: float) -> bool:
        """Whether its holders have more than half of an even share of requests by this prefix alone."""
        even = sum(map(self._work.num_charges, self.replicas)) / len(self.replicas)
        return self._num_hits(node, now) > 0.5 * even * self.prefixes.num_holders(node)

    def _computed_s(self, request: RoutedRequest, num_units: float) -> float:
        return self._prefill_s * num_units * request.tokens_per_unit

    def eviction_s(self, replica: str, request: RoutedRequest, num_units: float, now: float) -> float:
        """Return the cost of evictions for a number of units in seconds, by the uses of evicted prefixes."""
        excess = self.prefixes.size(replica) + num_units - self.prefixes.capacity
        num_requests = sum(self._work.num_charges(each) for each in self.replicas)
        if excess <= 0 or not num_requests:
            return 0.0
        found = self.prefixes.least_used(replica, excess)
        lost_s = sum(self._computed_s(request, num) * self._num_hits(node, now) for node, num in found)
        num_seen = sum(num for _, num in found)
        return lost_s / num_requests * max(1.0, min(excess, self.prefixes.size(replica)) / max(1, num_seen))

    def _num_hits(self, node: RadixNode, now: float) -> int:
        return node.hits.num(now - self._window_s)

    def _largest_node(self, request: RoutedRequest) -> RadixNode | None:
        """The node with most of the known units of a prompt."""
        path = self.prefixes.tree.match(request.namespace, request.units)
        return max(path, key=lambda each: each[1])[0] if path else None

    # What happens

    def _joins(self, replica: str, now: float) -> None:
        self._work.join(replica, now)
        self._prompts_s[replica] = 0.0

    def _leaves(self, replica: str) -> None:
        super()._leaves(replica)
        self._work.leave(replica)
        del self._prompts_s[replica]

    def _begins(self, sent: Dispatch) -> None:
        super()._begins(sent)
        prompt_s = self._prefill_s * sent.num_new_tokens
        self._prompts_s[sent.replica] += prompt_s
        self._charges[sent] = self._work.charge(sent.replica, sent.at, prompt_s + self._output_s)

    def _answers(self, sent: Dispatch, now: float) -> None:
        self._first_tokens[sent] = now
        self._has_read(sent)
        node = self._largest_node(sent.request)
        if node is not None:
            self._hot.add(node, now, now - sent.at)

    def _ends(self, sent: Dispatch, now: float, num_outputs: int, num_cached_tokens: float | None) -> None:
        super()._ends(sent, now, num_outputs, num_cached_tokens)
        num_new, first = sent.num_new_tokens, self._first_tokens.pop(sent, None)
        if num_cached_tokens is not None:
            num_new = max(0.0, sent.request.num_tokens - num_cached_tokens)
        if num_outputs:
            self._num_outputs.append(num_outputs)
        if first is not None and num_outputs > 1:
            self._decode_s.append((now - first) / (num_outputs - 1))
        self._renew_medians()
        self._close_charge(sent, self._prefill_s * num_new + self._token_s * num_outputs)

    def _renew_medians(self) -> None:
        if self._decode_s:
            self._token_s = median(self._decode_s)
        num_outputs = median(self._num_outputs) if self._num_outputs else _FIRST_NUM_OUTPUTS
        self._output_s = self._token_s * num_outputs

    def _fails(self, sent: Dispatch, now: float) -> None:
        self._first_tokens.pop(sent, None)
        self._close_charge(sent, 0.0)

    def _loses(self, sent: Dispatch) -> None:
        del self._charges[sent]
        self._first_tokens.pop(sent, None)

    def _close_charge(self, sent: Dispatch, seconds: float) -> None:
        self._work.correct(sent.replica, self._charges.pop(sent), seconds)
        if not sent.has_token:
            self._has_read(sent)

    def _has_read(self, sent: Dispatch) -> None:
        """Count the end of a prompt's computation."""
        left = self._prompts_s[sent.replica] - self._prefill_s * sent.num_new_tokens
        self._prompts_s[sent.replica] = left if self.num_open(sent.replica) else 0.0  # what rounding has left
