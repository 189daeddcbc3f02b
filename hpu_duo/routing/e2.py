"""Preble's E2: exploit what is cached, or explore where it costs least."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from hpu_duo.routing.hot_prefixes import HotPrefixes
from hpu_duo.routing.prefix_router import CAPACITY, PrefixRouter, longest
from hpu_duo.routing.radix_tree import RadixNode
from hpu_duo.routing.request import Dispatch, RoutedRequest
from hpu_duo.routing.window_load import Charge, WindowLoad

_NUM_REMEMBERED = 200
_FIRST_DECODE_S = 0.15
"""Seconds of a decoded token before any has been timed."""
_FIRST_NUM_OUTPUTS = 32


class E2(PrefixRouter):
    """Sends a request to where more than half of it is cached, else to where it costs least.

    The cost is the work that a replica was given within a window, the prefixes that it would evict, and the
    prompt. Work is seconds: of prompt tokens that were computed, and of outputs by the medians of the last
    200 requests. What an evicted prefix costs is the time to compute it again, times the share of the
    window's requests that used it. Of several replicas with the same prefix, the one with the least work is
    taken.

    Two rules spread what is popular. Where the chosen replica has the most work, ``imbalance`` times the
    least, the replica with the least is taken instead, and holds the prefix as well from then on. And when
    the time to the first token of a prefix has grown ``growth`` times within the window, its next request
    goes to the replica with the least work that does not hold it.

    Args:
        window_s: seconds for which work and uses of prefixes count.
        imbalance, growth: see above; infinite turns a rule off.
        min_requests: of the window, per replica, before ``imbalance`` is looked at.
        prefill_s: seconds that one prompt token takes.
        capacity: units (tokens, or characters) that a replica is taken to cache.

    Source: Preble, Srivatsa et al. 2024 (arXiv:2407.00023). Differences: the time of a prefill is linear, a
    replica that joins begins with the work of the one with the least, and the cost of an explored replica
    includes the prompt's, which the published code leaves at 0. The two rules redirect the request at hand
    and nothing else: the published code moves large nodes of its tree from the replica with the most work to
    the one with the least, the cheapest first, as long as the first stays ahead. Here no prefix moves; the
    other replica computes it and holds it as well.
    """

    def __init__(
        self,
        window_s: float = 180.0,
        imbalance: float = 1.5,
        growth: float = 2.0,
        min_requests: int = 50,
        prefill_s: float = 1e-4,
        capacity: float = CAPACITY,
    ) -> None:
        if not (window_s > 0 and prefill_s > 0):
            raise ValueError(f"expected window_s and prefill_s above 0, got {window_s} and {prefill_s}")
        if not (imbalance >= 1 and growth >= 1 and min_requests >= 0):
            raise ValueError(
                "expected imbalance and growth of 1 or more and min_requests of 0 or more, got "
                f"{imbalance}, {growth} and {min_requests}"
            )
        super().__init__(capacity, hits_s=window_s)
        self._window_s, self._imbalance, self._min_requests = window_s, imbalance, min_requests
        self._prefill_s = prefill_s
        self._work, self._hot = WindowLoad(window_s), HotPrefixes(window_s, growth)
        self._charges: dict[Dispatch, Charge] = {}
        self._first_tokens: dict[Dispatch, float] = {}
        self._decode_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._num_outputs: deque[int] = deque(maxlen=_NUM_REMEMBERED)

    def load(self, replica: str, now: float) -> float:
        """Return the seconds of work that a replica was given within the window."""
        return self._work.seconds(replica, now)

    def _pick(self, request: RoutedRequest, offered: Sequence[str], now: float) -> str:
        held = self.prefixes.held(request)
        num_cached, holders = longest(held, offered)
        if num_cached > len(request.units) - num_cached:
            return self._exploit(request, holders, offered, now)

        def cost(replica: str) -> tuple[float, int]:
            num_new = len(request.units) - held.get(replica, 0)
            return self._cost_s(request, replica, num_new, now), self.num_open(replica)

        return min(offered, key=cost)

    def _exploit(
        self, request: RoutedRequest, holders: Sequence[str], offered: Sequence[str], now: float
    ) -> str:
        work = {each: self._work.seconds(each, now) for each in offered}
        lightest, most = min(offered, key=work.__getitem__), max(work.values())
        chosen = min(holders, key=work.__getitem__)
        others = [each for each in offered if each not in holders]
        node = self._largest_node(request)
        if others and node is not None and self._hot.take(node, now):
            return min(others, key=work.__getitem__)
        is_settled = sum(map(self._work.num_charges, offered)) >= self._min_requests * len(offered)
        if is_settled and work[chosen] == most > self._imbalance * work[lightest]:
            return lightest
        return chosen

    def _cost_s(self, request: RoutedRequest, replica: str, num_new: int, now: float) -> float:
        """Seconds that a request would cost at a replica, and that others have cost there of late."""
        prompt_s = self._prefill_s * num_new * request.tokens_per_unit
        return self._work.seconds(replica, now) + prompt_s + self.eviction_s(replica, request, num_new, now)

    def eviction_s(self, replica: str, request: RoutedRequest, num_units: float, now: float) -> float:
        """Return the seconds that making room for units costs, by the uses of what would be evicted."""
        excess = self.prefixes.size(replica) + num_units - self.prefixes.capacity
        num_requests = sum(self._work.num_charges(each) for each in self.replicas)
        if excess <= 0 or not num_requests:
            return 0.0
        second_s = self._prefill_s * request.tokens_per_unit
        return sum(
            second_s * num * self._num_hits(node, now) / num_requests
            for node, num in self.prefixes.least_used(replica, excess)
        )

    def _num_hits(self, node: RadixNode, now: float) -> int:
        return sum(at > now - self._window_s for at in node.hits)

    def _largest_node(self, request: RoutedRequest) -> RadixNode | None:
        """The node that most of what is known of a prompt lies in."""
        path = self.prefixes.tree.match(request.namespace, request.units)
        return max(path, key=lambda each: each[1])[0] if path else None

    # What happens

    def _joins(self, replica: str, now: float) -> None:
        self._work.join(replica, now)

    def _leaves(self, replica: str) -> None:
        super()._leaves(replica)
        self._work.leave(replica)

    def _begins(self, sent: Dispatch) -> None:
        super()._begins(sent)
        decode_s = median(self._decode_s) if self._decode_s else _FIRST_DECODE_S
        num_outputs = median(self._num_outputs) if self._num_outputs else _FIRST_NUM_OUTPUTS
        seconds = self._prefill_s * sent.num_new_tokens + decode_s * num_outputs
        self._charges[sent] = self._work.charge(sent.replica, sent.at, seconds)

    def _answers(self, sent: Dispatch, now: float) -> None:
        self._first_tokens[sent] = now
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
        decode_s = median(self._decode_s) if self._decode_s else _FIRST_DECODE_S
        seconds = self._prefill_s * num_new + decode_s * num_outputs
        self._work.correct(sent.replica, self._charges.pop(sent), seconds)

    def _fails(self, sent: Dispatch, now: float) -> None:
        self._first_tokens.pop(sent, None)
        self._work.correct(sent.replica, self._charges.pop(sent), 0.0)
