"""Deficit longest prefix match: cached prefixes first, among the users who have credit left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from itertools import islice
from math import floor, inf

from hpu_duo.request import Request, RequestStatus
from hpu_duo.scheduling.cache_aware import WINDOW, num_cached_blocks
from hpu_duo.scheduling.policy import SchedulingPolicy
from hpu_duo.scheduling.shortest import PATIENCE
from hpu_duo.scheduling.users import User, UserQueues
from hpu_duo.scheduling.vtc import check_prices
from hpu_duo.scheduling.waiting import Waiting


class DeficitLongestPrefixMatch(SchedulingPolicy):
    """Admits the request of which most is cached, among those of users whose credit is above 0.

    Users pay for tokens of prompts that are computed, not for those that the prefix cache has, and for tokens
    of outputs. When no user who waits has credit, all get ``quantum`` more, as often as it takes. The service
    of two users who both always have a request waiting differs by ``2 * (quantum + input_price * longest
    prompt + output_price * tokens that run at a time)`` at most. A small quantum is like ``vtc``; an infinite
    one is ``lpm``.

    A user without requests keeps no credit, and pays off debts with the quanta that others get meanwhile.

    Args:
        quantum: credit that is given out at a time, above 0.
        input_price, output_price: of a token.
        window: requests that are looked up in the prefix cache in one step, the earliest of each user.
        patience: times that the earliest request of a user is overtaken by others of the same user.

    Source: Cao et al. 2025, Locality-aware Fair Scheduling in LLM Serving (arXiv:2501.14312); what becomes of
    a user who leaves is not stated there.
    """

    def __init__(
        self,
        quantum: float = 4096.0,
        input_price: float = 1.0,
        output_price: float = 2.0,
        window: int = WINDOW,
        patience: float = PATIENCE,
    ) -> None:
        check_prices(input_price, output_price)
        if not quantum > 0:
            raise ValueError(f"expected quantum to be above 0, got {quantum}")
        if window < 1 or not patience >= 0:
            raise ValueError(
                f"expected window to be 1 or more and patience 0 or more, got {window} and {patience}"
            )
        self._quantum, self._window, self._patience = quantum, window, patience
        self._input_price, self._output_price = input_price, output_price
        self._queues = UserQueues()
        self._credits: dict[User, float] = {}
        # Requests of each user that have not ended, and those of them that were queued and never admitted.
        self._unfinished: dict[User, set[Request]] = {}
        self._new: set[Request] = set()
        # Admissions since the earliest request of a user became so, of its later ones.
        self._num_overtakes: Counter[User] = Counter()
        # Of this step: requests in the order to admit them, and the cached blocks of those looked up.
        self._order: list[Request] = []
        self._num_cached: dict[Request, int] = {}

    def credit(self, user: User) -> float:
        """Return the credit of a user; debts are negative."""
        return self._credits.get(user, 0.0)

    def begin_step(self) -> None:
        """Order anew when somebody is to be admitted: the cache may hold something else."""
        self._order = []
        self._num_cached.clear()

    def next(self, waiting: Waiting) -> Request:
        """Return the request of which most is cached, of users with credit; all get some if none has."""
        choices = self._choices(waiting)
        users = {each.params.user for each in choices}
        most = max(map(self.credit, users))
        if most <= 0:
            self._give(1 if self._quantum == inf else floor(-most / self._quantum) + 1, users)
        chosen = next(each for each in choices if self.credit(each.params.user) > 0)
        user = chosen.params.user
        if self._num_overtakes[user] < self._patience:
            return chosen
        return next(filter(waiting.is_offered, self._queues.of(user)))

    def victim(self, running: Sequence[Request]) -> Request:
        """Return the latest request of the user who has the least credit."""
        return min(running, key=lambda each: (self.credit(each.params.user), -each.arrival))

    def queued(self, request: Request) -> None:
        """Queue the request; a user who comes back has no credit left."""
        user = request.params.user
        if request.admitted_at is None:
            self._new.add(request)
        if user not in self._unfinished:
            self._credits[user] = min(0.0, self.credit(user))
        self._unfinished.setdefault(user, set()).add(request)
        self._queues.add(request)

    def admitted(self, request: Request) -> None:
        """Let the user pay for the tokens of the prompt that are not cached, the first time."""
        user = request.params.user
        self._unfinished.setdefault(user, set()).add(request)
        if request in self._new:
            self._pay(user, self._input_price * (request.num_prompt_tokens - request.num_computed_tokens))
        self._leave(request)

    def charge(self, request: Request, num_computed: int, num_sampled: int) -> None:
        """Let the user pay for tokens of the output."""
        self._pay(request.params.user, self._output_price * num_sampled)

    def ended(self, request: Request) -> None:
        """Forget the request, and the user's credit if it was the last one."""
        user = request.params.user
        self._leave(request)
        requests = self._unfinished[user]
        requests.discard(request)
        if not requests:
            del self._unfinished[user]
            if self.credit(user) >= 0:
                self._credits.pop(user, None)

    def _pay(self, user: User, cost: float) -> None:
        self._credits[user] = self.credit(user) - cost

    def _give(self, num_quanta: int, waiting: Container[User]) -> None:
        """Give quanta to the users who wait, and let the others pay off debts with theirs."""
        for user, credit in list(self._credits.items()):
            raised = credit + num_quanta * self._quantum
            if user in waiting:
                self._credits[user] = raised
            elif user in self._unfinished:
                self._credits[user] = max(credit, min(0.0, raised))
            elif raised >= 0:
                del self._credits[user]
            else:
                self._credits[user] = raised

    def _leave(self, request: Request) -> None:
        """Take a request from the queue, if it is there."""
        self._new.discard(request)
        user = request.params.user
        if request not in self._queues:
            return
        is_first = request is self._queues.first_of(user)
        self._num_overtakes[user] = 0 if is_first else self._num_overtakes[user] + 1
        if self._queues.discard(request):
            del self._num_overtakes[user]

    def _choices(self, waiting: Waiting) -> list[Request]:
        """Return the requests that may be chosen, some of each user, those of which most is cached first."""
        left = _offered(self._order, waiting)
        # A user whose requests in the order are all gone may have more.
        if len({each.params.user for each in left}) < len(self._queues):
            num_each = max(1, self._window // len(self._queues))
            requests = [
                request
                for user in self._queues
                for request in islice(filter(waiting.is_offered, self._queues.of(user)), num_each)
            ]
            for request in requests:
                if request not in self._num_cached:
                    self._num_cached[request] = num_cached_blocks(request, waiting)
            self._order = left = sorted(requests, key=lambda each: (-self._num_cached[each], each.arrival))
        return left


def _offered(requests: Sequence[Request], waiting: Waiting) -> list[Request]:
    return [r for r in requests if r.status is RequestStatus.WAITING and waiting.is_offered(r)]
