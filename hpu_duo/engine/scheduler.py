"""The scheduler: plans steps, and takes in their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from graphs import StepLimits
from hpu_duo.engine.admission import Admission
from hpu_duo.engine.committing import append_tokens
from hpu_duo.engine.prefix_holding import PrefixHolding
from hpu_duo.engine.prefix_sharing import PrefixSharing
from hpu_duo.engine.siblings import Siblings
from hpu_duo.engine.step_plan import CommittedToken, StepDraft, StepPlan
from hpu_duo.kv.leases import KVLeases
from hpu_duo.kv.prefix_hit import PrefixHit
from hpu_duo.request import FinishReason, Request, RequestStatus
from hpu_duo.scheduling import ArrivalOrder, FirstComeFirstServed, SchedulingPolicy, Waiting


class Scheduler:
    """Plans steps and commits their results, one at a time.

    A step serves decodes first, then prompts that are under way, both in order of arrival, then waiting
    requests in the order of the policy while they can be admitted. Decodes always fit, so a long prompt takes
    only what they leave.

    A request is admitted if a row is free and, besides what every running request still needs for its
    known tokens and the next one, there are free blocks for all of its own known tokens and one more.
    Blocks are leased only as tokens are scheduled. When they run out, the policy names a running request to
    preempt: it gives everything back, keeps its outputs, and prefills prompt and outputs again in a later
    step. The earliest running request is never preempted for blocks, so it always makes progress. A policy
    may displace it for a waiting one, once for each token that it got. So everything that fits alone ends.

    Samples of one prompt wait for their parent's prompt and fork its cache (``Siblings``). One that cannot
    fork at that moment, or whose parent was preempted before, becomes an ordinary request.

    Args:
        limits: what a step may hold; a request has limits of its own for its length.
        num_postponed: number of tokens of its last row that a plan should leave to the next step, such as
            ``ChunkTrimming.num_postponed``; None = always 0. Not called while a request waits.
        policy: this scheduler's own; None = first come, first served.
    """

    def __init__(
        self,
        limits: StepLimits,
        num_postponed: Callable[[StepPlan], int] | None = None,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self.limits, self.policy = limits, FirstComeFirstServed() if policy is None else policy
        self._num_postponed = num_postponed
        self.leases = KVLeases.of(limits)
        self._unfinished: dict[str, Request] = {}
        self.holding = PrefixHolding(self.leases, self._unfinished)
        self._prefixes = PrefixSharing(limits, self.leases, self.holding)
        self._waiting = Waiting(self.policy, self.leases.find, self.leases.block_size)
        self._running = ArrivalOrder()
        self._siblings = Siblings(self.leases, limits.decode_len)
        self._num_arrived = 0
        self._admission = Admission(self.leases, self._running, self.policy)
        self._plan_in_flight: StepPlan | None = None

    @property
    def trims_chunks(self) -> bool:
        """Whether the end of a prompt may be left to the next step."""
        return self._num_postponed is not None

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._unfinished)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a row, siblings that wait for their parent included."""
        return len(self._unfinished) - len(self._running)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of running requests whose keys and values are in the cache."""
        return sum(request.num_computed_tokens for request in self._running)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of this id, if there is one."""
        return self._unfinished.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request; a sibling is added after its parent.

        Raises:
            ValueError: its id is in use, it was added before, or ``check_fits`` refuses it; nothing changes.
        """
        if request.request_id in self._unfinished:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request")
        if request.arrival >= 0:
            raise ValueError(f"{request} has been added before")
        self.check_fits(request)
        self.holding.enter(request)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._unfinished[request.request_id] = request
        parent = request.parent
        is_coming = parent is not None and self._unfinished.get(parent.request_id) is parent
        if parent is not None and is_coming and Siblings.may_wait_for(parent):
            request.status = RequestStatus.FOLLOWING
            self._siblings.add(request)
        else:
            self._enqueue(request)

    def check_fits(self, request: Request) -> None:
        """Refuse a request that could never run; see ``Admission.check``."""
        self._admission.check(request)

    def plan(self, alone: Request | None = None) -> StepPlan | None:
        """Decide the next step and lease what it needs; None when there is nothing to do.

        Args:
            alone: an unfinished request to run alone; other running requests are preempted.

        If ``num_postponed`` raises, every running request loses its cache, as in ``discard``, and the error
        goes on to the caller.

        Raises:
            ValueError: the previous plan has not been committed.
        """
        if self._plan_in_flight is not None:
            raise ValueError("the previous plan must be committed before the next one is made")
        step = StepDraft(self.limits)
        self.holding.sweep()
        self._waiting.begin_step()
        if alone is not None:
            self._restart_running(but=alone)
            if alone.status is RequestStatus.WAITING:
                self._open(alone, self.leases.find(alone))
        self._schedule_running(step, are_decodes=True)
        self._schedule_running(step, are_decodes=False)
        if alone is None:
            self._admit(step)
        if step.is_empty:  # those with a share were displaced, by one that did not fit after all
            self._schedule_running(step, are_decodes=False)
            if step.is_empty:
                assert not self._unfinished, f"nothing scheduled for {self._unfinished}"
                return None
        try:
            self._plan_in_flight = self._trim(step, step.finish(self.leases.take_copies()))
        except BaseException:
            # Copies that were taken are lost, and rows may lie where they would have put them.
            self.forget_cache()
            raise
        return self._plan_in_flight

    def commit(
        self,
        plan: StepPlan,
        token_ids: Sequence[int] | NDArray[np.integer],
        num_accepted: Sequence[int] | None = None,
    ) -> list[CommittedToken]:
        """Take in the results of a step: its tokens are cached, and the sampled ones are appended.

        Requests that finish give back what they hold; tokens of requests that were aborted or finished
        since the plan was made are dropped.

        Args:
            plan: the plan that ``plan`` returned last.
            token_ids: ``num_samples`` for each row of ``plan.sampled_rows``, row after row.
            num_accepted: number of its tokens that each of these rows takes, 1 or more; None = all. The
                cached tokens behind the last one are taken back.

        Raises:
            ValueError: another plan, or other numbers of tokens; nothing has changed then.
        """
        if plan is not self._plan_in_flight:
            raise ValueError("only the plan that was made last can be committed, and only once")
        accepted = plan.accepted(len(token_ids), num_accepted)
        self._plan_in_flight = None

        committed = append_tokens(plan, token_ids, accepted, self.policy)
        self._prefixes.keep(plan)
        ended = [(done.request, done.finish_reason) for done in committed if done.finish_reason is not None]
        forking = self._siblings.parents_prefilled_by(plan) if self._siblings.waiting else []
        # Room first, then forks, then the parents that ended: until then they hold what is forked.
        for request, reason in ended:
            if request not in forking:
                self._end(request, reason)
        for parent in forking:
            self._fork(parent)
        for request, reason in ended:
            if request in forking:
                self._end(request, reason)
        return committed

    def discard(self) -> None:
        """Take back the plan that was made last, if it has not been committed, because its step failed.

        How far the step came is unknown, so every running request loses its cache and prefills again.
        """
        if self._plan_in_flight is not None:
            self._plan_in_flight = None
            self.forget_cache()

    def abort(self, request_id: str) -> Request | None:
        """End a request early, at any time; returns it, or None if no unfinished request has this id.

        Siblings that wait for it become ordinary requests.
        """
        request = self._unfinished.get(request_id)
        if request is not None:
            self._end(request, FinishReason.ABORT)
        return request

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End an unfinished request for a reason found outside, such as a stop string.

        Raises:
            ValueError: the request is not an unfinished one of this scheduler.
        """
        if self._unfinished.get(request.request_id) is not request:
            raise ValueError(f"{request} is not an unfinished request of this scheduler")
        self._end(request, reason)

    def _schedule_running(self, step: StepDraft, *, are_decodes: bool) -> None:
        for request in [r for r in self._running if (r.num_uncomputed_tokens == 1) is are_decodes]:
            self._schedule(request, step)

    def _schedule(self, request: Request, step: StepDraft) -> None:
        """Give a running request its share of the step, preempting later arrivals for their blocks."""
        while request.status is RequestStatus.RUNNING:
            num_new = step.share_of(request)
            if not num_new or self.leases.grow(request, request.num_computed_tokens + num_new):
                step.add(request, num_new)
                return
            self._preempt(self._victim(), step)

    def _victim(self) -> Request:
        """The policy's choice among running requests, but for the earliest, which has to go on."""
        victim = self.policy.victim(others := list(self._running)[1:])
        assert victim in others, f"expected the policy to choose one of {others}, got {victim}"
        return victim

    def _preempt(self, victim: Request, step: StepDraft) -> None:
        step.preempt(victim)
        self._prefixes.keep_end(victim)
        self._restart(victim)

    def _restart(self, request: Request) -> None:
        """Take row and blocks from a running request, which keeps its tokens and waits again."""
        self._running.remove(request)
        self.leases.close(request)
        request.num_computed_tokens = 0
        self._enqueue(request)
        self._release(request)

    def forget_cache(self) -> None:
        """Take the cache from every request, because what the stores hold is unknown."""
        self._restart_running()
        self._prefixes.forget()

    def _restart_running(self, but: Request | None = None) -> None:
        for request in [r for r in self._running if r is not but]:
            self._restart(request)

    def _open(self, request: Request, hit: PrefixHit | None) -> None:
        """Give a waiting request a row, and what is cached of its beginning."""
        self._waiting.admit(request)
        request.num_computed_tokens = self.leases.open(request, hit)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
        self._run(request)

    def _admit(self, step: StepDraft) -> None:
        self._admission.begin_step()
        while self._waiting and self._admission.may_admit(step):
            request = self._waiting.next()
            if request in step.preempted:
                return
            hit = self.leases.find(request)
            if self._prefixes.comes_soon(request, hit, self._running, step):
                self._waiting.pass_over(request)
                continue
            for other in self._admission.displaced_for(request, hit, step):
                self._preempt(other, step)
                hit = self.leases.find(request)  # a snapshot of the other may have taken the room of the hit
            begin = self._prefixes.begin(request, hit, step, self._waiting.arrivals)
            if begin is None or not self._admission.has_room(request, begin.hit, step):
                return
            request.stops = begin.stops
            self._open(request, begin.hit)
            self._schedule(request, step)
            self._admission.admitted(request)

    def _trim(self, step: StepDraft, plan: StepPlan) -> StepPlan:
        # Waiting requests would take the tokens that are left free.
        if self._num_postponed is None or self._waiting.arrivals:
            return plan
        postponed = self._num_postponed(plan)
        if not postponed or not step.may_cut(plan.rows[-1].request):
            return plan
        step.shorten(plan.rows[-1].request, postponed)
        return step.finish(plan.moves)

    def _enqueue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self._waiting.add(request)

    def _run(self, request: Request) -> None:
        request.begin_running()
        self._running.add(request)
        self.policy.admitted(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        match request.status:
            case RequestStatus.RUNNING:
                if self._plan_in_flight is None:
                    self._prefixes.keep_end(request)
                self._running.remove(request)
                self.leases.close(request)
            case RequestStatus.WAITING:
                self._waiting.remove(request)
            case RequestStatus.FOLLOWING:
                self._siblings.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._unfinished[request.request_id]
        self.holding.leave(request)
        self.policy.ended(request)
        self._release(request)

    def _release(self, parent: Request) -> None:
        """Let siblings that wait for a request be ordinary ones."""
        for child in self._siblings.release(parent):
            self._enqueue(child)

    def _fork(self, parent: Request) -> None:
        for child, has_cache in self._siblings.fork(parent):
            if has_cache:
                self._run(child)
            else:
                self._enqueue(child)
