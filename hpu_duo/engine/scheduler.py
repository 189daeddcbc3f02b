"""The scheduler: plans steps and commits their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graphs import BatchShape, BucketTable, Miss, Phase, StepLimits
from hpu_duo.engine.admission import Admission
from hpu_duo.engine.batch import exact_shape
from hpu_duo.engine.prefixes import PrefixHolding, PrefixSharing
from hpu_duo.engine.step_plan import CommittedToken, ParallelSamples, StepDraft, StepPlan, append_tokens
from hpu_duo.kv.allocations import KVAllocations
from hpu_duo.kv.prefix import PrefixHit
from hpu_duo.request import FinishReason, Request, RequestStatus
from hpu_duo.scheduling import ArrivalOrder, FirstComeFirstServed, SchedulingPolicy, Waiting

if TYPE_CHECKING:
    from hpu_duo.engine.drafts import MakesDrafts
    from hpu_duo.kv.tiers.swapping import Swapping


class Scheduler:
    """Plans steps and commits their results, one at a time.

    A step serves decodes first, then partially computed prompts, both in order of arrival, then waiting
    requests in the order of the policy while they can be admitted. Decodes always fit; prompts share the
    remaining tokens.

    A request is admitted if a row is free and, besides what every running request still needs for its known
    tokens and the next one, there are free blocks for all of its own known tokens and one more. Blocks are
    allocated only as tokens are scheduled. When they run out, the policy chooses a running request to
    preempt: its row and blocks are freed, and its prompt and outputs are recomputed in a later step. The
    earliest running request is never preempted for blocks, so it always progresses. A policy may preempt it
    for a waiting one, once for each token that it got. So every request that fits alone ends.

    Samples of one prompt wait for their parent's prompt and fork its cache (``ParallelSamples``). A sample
    that cannot fork at that moment, or with a parent that was preempted before, becomes an ordinary request.

    Args:
        limits: of steps; each request has its own limit of length.
        num_postponed: returns how many tokens of its last row a plan should postpone to the next step, such
            as ``ChunkTrimming.num_postponed``; None = always 0. Not called while a request waits.
        policy: this scheduler's own; None = first come, first served.

    Attributes:
        drafting: makes the drafts of decodes; None where nobody drafts.
        swapping: copies preempted requests to host memory; None where they are computed again.
    """

    def __init__(
        self,
        limits: StepLimits,
        num_postponed: Callable[[StepPlan], int] | None = None,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self.limits, self.policy = limits, FirstComeFirstServed() if policy is None else policy
        self._num_postponed = num_postponed
        self.allocations = KVAllocations.of(limits)
        self._unfinished: dict[str, Request] = {}
        self.holding = PrefixHolding(self.allocations, self._unfinished)
        self._prefixes = PrefixSharing(limits, self.allocations, self.holding)
        self._waiting = Waiting(self.policy, self.allocations.find, self.allocations.num_cached_tokens)
        self._running = ArrivalOrder()
        self._parallel_samples = ParallelSamples(self.allocations, limits.decode_len)
        self._num_arrived = 0
        self._admission = Admission(self.allocations, self._running, self.policy)
        self._plan_in_flight: StepPlan | None = None
        self.drafting: MakesDrafts | None = None
        self.swapping: Swapping | None = None

    @property
    def trims_chunks(self) -> bool:
        """Whether the end of a prompt may be postponed to the next step."""
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
        """Queue a request; further samples of a prompt are added after the first.

        Raises:
            ValueError: its id is in use, it was added before, or ``check_fits`` raises; nothing changes.
        """
        if request.request_id in self._unfinished:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request")
        if request.arrival >= 0:
            raise ValueError(f"{request} has been added before")
        self.holding.sweep()
        self.check_fits(request)
        self.holding.enter(request)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._unfinished[request.request_id] = request
        parent = request.parent
        is_coming = parent is not None and self._unfinished.get(parent.request_id) is parent
        if parent is not None and is_coming and ParallelSamples.may_wait_for(parent):
            request.status = RequestStatus.FOLLOWING
            self._parallel_samples.add(request)
        else:
            self._enqueue(request)

    def check_fits(self, request: Request) -> None:
        """Reject a request that could never run; see ``Admission.check``."""
        self._admission.check(request)

    def plan(self, alone: Request | None = None) -> StepPlan | None:
        """Plan the next step and allocate what it needs; None when there is nothing to do.

        A plan without rows has copies and transfers only: all requests wait for records of their prefixes, or
        there are none, and the last step has cached what is copied to the host.

        Args:
            alone: an unfinished request to run alone; other running requests are preempted.

        If ``num_postponed`` raises, every running request loses its cache, as in ``discard``, and the error
        is raised.

        Raises:
            ValueError: the previous plan has not been committed.
        """
        if self._plan_in_flight is not None:
            raise ValueError("the previous plan must be committed before the next step is planned")
        step = StepDraft(self.limits)
        self.holding.sweep()
        tiers = self.allocations.tiers
        if tiers is not None:
            if alone is not None and self.swapping is not None:
                tiers.forget()
            self.allocations.restore_prefixes()
            self._swap()
        self._waiting.begin_step()
        if alone is not None:
            self._restart_running(but=alone)
            if alone.status is RequestStatus.WAITING:
                self._open(alone, self.allocations.find(alone))
        prompts = []
        for request in tuple(self._running):
            if request.num_tokens - request.num_computed_tokens == 1:
                self._schedule(request, step)
            else:
                prompts.append(request)
        for request in prompts:
            self._schedule(request, step)
        if alone is None:
            self._admit(step)
        if self.drafting is not None or self.limits.draft_lens:
            self._add_drafts(step)
        if step.is_empty:  # those with a share were preempted for one that did not fit after all
            for request in [each for each in self._running if each.num_uncomputed_tokens != 1]:
                self._schedule(request, step)
            if step.is_empty and (tiers is None or not (tiers.has_loads or tiers.has_stores)):
                assert not self._unfinished, f"nothing scheduled for {self._unfinished}"
                return None
        try:
            copies = self.allocations.take_copies()
            plan = step.finish(copies, None if tiers is None else tiers.take())
            self._plan_in_flight = plan if step.is_empty else self._trim(step, plan)
        except BaseException:
            # Copies of this plan are lost, so rows may not be where the tables have them.
            self.forget_cache()
            raise
        return self._plan_in_flight

    def commit(
        self,
        plan: StepPlan,
        token_ids: Sequence[int] | NDArray[np.integer],
        num_accepted: Sequence[int] | None = None,
    ) -> list[CommittedToken]:
        """Commit the results of a step: count its tokens as cached, and append the sampled ones.

        Finished requests are released; tokens of requests that were aborted or finished since planning are
        dropped.

        Args:
            plan: the plan that ``plan`` returned last.
            token_ids: ``num_samples`` for each row of ``plan.sampled_rows``, row after row.
            num_accepted: number of accepted tokens of each of these rows, 1 or more; None = all. Cached
                tokens after the last accepted one are rolled back.

        Raises:
            ValueError: another plan, or other numbers of tokens; nothing changes then.
        """
        if plan is not self._plan_in_flight:
            raise ValueError("only the latest plan can be committed, and only once")
        accepted = plan.accepted(len(token_ids), num_accepted)
        self._plan_in_flight = None

        committed = append_tokens(plan, token_ids, accepted, self.policy)
        if plan.num_samples > len(accepted):
            for row in plan.sampled_rows:
                if row.request.status is RequestStatus.RUNNING:
                    self.allocations.shrink(row.request)
        self._prefixes.keep(plan)
        ended = [(done.request, done.finish_reason) for done in committed if done.finish_reason is not None]
        forking = self._parallel_samples.parents_prefilled_by(plan) if self._parallel_samples.waiting else []
        # Rows and blocks are freed first, then forks, then ended parents: forks need the parents' blocks.
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
        """Roll back the latest plan, if it is not committed, because its step failed.

        It is unknown what the step has written, so every running request loses its cache and is recomputed.
        """
        if self._plan_in_flight is not None:
            self._plan_in_flight = None
            self.forget_cache()

    def abort(self, request_id: str) -> Request | None:
        """End a request early, at any time; returns it, or None if no unfinished request has this id.

        Samples that wait for it become ordinary requests.
        """
        request = self._unfinished.get(request_id)
        if request is not None:
            self._end(request, FinishReason.ABORT)
        return request

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End an unfinished request for a reason outside the scheduler, such as a stop string.

        Raises:
            ValueError: the request is not an unfinished one of this scheduler.
        """
        if self._unfinished.get(request.request_id) is not request:
            raise ValueError(f"{request} is not an unfinished request of this scheduler")
        self._end(request, reason)

    def _schedule(self, request: Request, step: StepDraft) -> None:
        """Schedule a running request in the step, preempting later arrivals for their blocks."""
        while request.status is RequestStatus.RUNNING:
            num_new, is_cut = step.share_of(request)
            if not num_new or self.allocations.grow(request, request.num_computed_tokens + num_new):
                step.add(request, num_new, is_cut)
                return
            if self.swapping is not None:
                if self.swapping.is_leaving:
                    return  # blocks are freed in a later step
                if (other := self.swapping.stop()) is not None:
                    self._enqueue(other)
                    continue
            self._preempt(self._victim(), step)

    def _victim(self) -> Request:
        """Return the policy's choice among running requests other than the earliest."""
        victim = self.policy.victim(others := list(self._running)[1:])
        assert victim in others, f"expected the policy to choose one of {others}, got {victim}"
        return victim

    def _swap(self) -> None:
        """Go on with requests that leave to host memory, or come back from there."""
        if self.swapping is None:
            return
        for request in self.swapping.lost():
            request.num_computed_tokens = 0
            if request.status is RequestStatus.MOVING:
                self.allocations.close(request)
                self._enqueue(request)
        for request in self.swapping.arrived():  # the policy has admitted them
            request.begin_running()
            self._running.add(request)
        for request in self.swapping.left():
            self._enqueue(request)

    def _preempt(self, victim: Request, step: StepDraft) -> None:
        step.preempt(victim)
        if self.swapping is not None and self.swapping.begin(victim):
            self._running.remove(victim)
            self._release(victim)
            for request in self.swapping.left():
                self._enqueue(request)
            return
        self._prefixes.keep_end(victim, is_preempted=True)
        self._restart(victim)

    def _restart(self, request: Request) -> None:
        """Free row and blocks of a running request and queue it again, with its tokens."""
        self._running.remove(request)
        self.allocations.close(request)
        request.num_computed_tokens = 0
        self._enqueue(request)
        self._release(request)

    def forget_cache(self) -> None:
        """Free the cache of every request, because the content of the stores is unknown."""
        self._restart_running()
        self._prefixes.forget()

    def _restart_running(self, but: Request | None = None) -> None:
        for request in [r for r in self._running if r is not but]:
            self._restart(request)

    def _open(self, request: Request, hit: PrefixHit | None) -> None:
        """Admit a waiting request: allocate a row and its cached prefix."""
        self._waiting.admit(request)
        self._prefixes.loads_no_more(request)
        request.num_computed_tokens = self.allocations.open(request, hit)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
        self._run(request)

    def _admit(self, step: StepDraft) -> None:
        if not self._waiting:
            return
        self._admission.begin_step()
        while self._waiting and self._admission.may_admit(step):
            request = self._waiting.next()
            if request in step.preempted:
                return
            if self.swapping is not None and self.swapping.has(request):
                if not self.swapping.is_there(request):
                    self._waiting.pass_over(request)
                    continue
                self._displace_for(request, None, step)
                if not self._admission.has_room(request, None, step):
                    return
                self._waiting.admit(request)
                self.policy.admitted(request)
                self.swapping.come(request)
                continue
            hit = self.allocations.find(request)
            if self._prefixes.comes_soon(request, hit, self._running, step):
                self._waiting.pass_over(request)
                continue
            if self.allocations.tiers is not None and self._prefixes.loads(
                request, hit, self._admission.has_room(request, hit, step)
            ):
                self._waiting.pass_over(request)
                continue
            if self._displace_for(request, hit, step):
                hit = self.allocations.find(request)  # a snapshot of another one may have evicted the hit
            begin = self._prefixes.begin(request, hit, step, self._waiting.arrivals)
            if begin is None or not self._admission.has_room(request, begin.hit, step):
                return
            request.stops = begin.stops
            self._open(request, begin.hit)
            self._schedule(request, step)
            self._admission.admitted(request)

    def _displace_for(self, request: Request, hit: PrefixHit | None, step: StepDraft) -> bool:
        """Preempt running requests for a waiting one, if the policy does; says whether any was."""
        if self.swapping is not None and self.swapping.is_leaving:
            return False  # those before free their blocks in a later step
        displaced = self._admission.displaced_for(request, hit, step)
        for other in displaced:
            self._preempt(other, step)
        return bool(displaced)

    def _add_drafts(self, step: StepDraft) -> None:
        """Schedule drafts of decodes with unused tokens of the step and free blocks.

        Blocks of rejected drafts are freed when the step is committed, so no request waits or is preempted,
        and nothing is evicted, for a draft.
        """
        drafting, lens = self.drafting, self.limits.draft_lens
        if step.has_prompts:
            if drafting is not None:
                drafting.skip("prompts")
            return
        found = dict[Request, Sequence[int] | NDArray[np.int32]]()
        for request in self._running:
            most = min(step.num_draftable(request), self.allocations.num_free_slots(request))
            if most <= 0:
                continue
            if request.num_drafts:  # forced tokens
                drafts: Any = request.tokens[request.num_tokens :][: min(most, request.num_drafts)]
            else:
                drafts = () if drafting is None else drafting.propose(request, most)
            if len(drafts):
                found[request] = drafts
        longest = lens[-1] if lens else self.limits.decode_len
        if drafting is not None:
            longest = drafting.choose(found, step.num_rows, longest)
        for request, drafts in found.items():
            # Others may have taken tokens and blocks meanwhile.
            most = min(step.num_draftable(request), self.allocations.num_free_slots(request), longest - 1)
            if most > 0:
                step.add_drafts(request, drafts[:most])
                self.allocations.grow(request, request.num_tokens + len(drafts[:most]))

    def _trim(self, step: StepDraft, plan: StepPlan) -> StepPlan:
        # Waiting requests would get the postponed tokens of the budget.
        if self._num_postponed is None or self._waiting.arrivals:
            return plan
        postponed = self._num_postponed(plan)
        if not postponed or not step.may_cut(plan.rows[-1].request):
            return plan
        step.shorten(plan.rows[-1].request, postponed)
        return step.finish(plan.moves, plan.transfers)

    def _enqueue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self._waiting.add(request)

    def _run(self, request: Request) -> None:
        request.begin_running()
        self._running.add(request)
        self.policy.admitted(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if self.swapping is not None:
            self.swapping.drop(request)
        match request.status:
            case RequestStatus.MOVING:
                self.allocations.close(request)
            case RequestStatus.RUNNING:
                if self._plan_in_flight is None:
                    self._prefixes.keep_end(request)
                self._running.remove(request)
                self.allocations.close(request)
            case RequestStatus.WAITING:
                self._waiting.remove(request)
                self._prefixes.loads_no_more(request)
            case RequestStatus.FOLLOWING:
                self._parallel_samples.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._unfinished[request.request_id]
        self.holding.leave(request)
        self.policy.ended(request)
        self._release(request)

    def _release(self, parent: Request) -> None:
        """Turn samples that wait for a request into ordinary requests."""
        for child in self._parallel_samples.release(parent):
            self._enqueue(child)

    def _fork(self, parent: Request) -> None:
        for child, has_cache in self._parallel_samples.fork(parent):
            if has_cache:
                self._run(child)
            else:
                self._enqueue(child)


@dataclass(frozen=True)
class ChunkTrimming:
    """Postpones the last tokens of a prompt to the next step when both steps then cost less.

    A step with a few more query tokens than a bucket has is padded to the next larger bucket. Two choices are
    compared by the cost of their buckets: the step as planned and a decode of all others after it, or the
    step cut to the query tokens of a smaller bucket and the same decodes with the rest of the prompt after
    it. Both compute the same tokens. The shape of the step itself is exact; that of the step after it is an
    estimate, for which no request ends or arrives.

    Only a chunk that ends its prompt is cut, only while no request waits for admission, and at least half of
    it remains, so that a prompt of ``n`` tokens takes at most ``log2(n)`` steps more. The tokens are the same
    whichever steps compute them.

    Args:
        table: the buckets that steps are padded to.
        block_size: tokens of one KV block.
    """

    table: BucketTable
    block_size: int

    def num_postponed(self, plan: StepPlan) -> int:
        """Return how many tokens of a plan's last row to postpone; 0 if that saves nothing."""
        last = plan.rows[-1]
        # Half of it must not be a decode, which would be in a step of another phase.
        if last.num_new_tokens < 2 * plan.decode_len + 1 or not last.wants_token:
            return 0
        shape = exact_shape(plan, self.block_size)
        best, least = 0, self._cost(shape) + self._following_cost(plan, shape, 0)
        if least == float("inf"):
            return 0
        for query_len in self._borders:
            postponed = shape.query_len - query_len
            if not 0 < postponed <= last.num_new_tokens // 2:
                continue
            cost = self._cost(replace(shape, query_len=query_len)) + self._following_cost(
                plan, shape, postponed
            )
            if cost < least:
                best, least = postponed, cost
        return best

    @property
    def _borders(self) -> tuple[int, ...]:
        """Query tokens of the buckets that prompts run in."""
        return tuple(sorted({bucket.query_len for bucket in self.table if bucket.phase.causal}))

    def _cost(self, shape: BatchShape) -> float:
        bucket = self.table.fit(shape)
        return float("inf") if isinstance(bucket, Miss) else self.table.cost(bucket)

    def _following_cost(self, plan: StepPlan, shape: BatchShape, postponed: int) -> float:
        """Cost of the next step: a decode of every other row, and the rest of the last row's prompt."""
        last = plan.rows[-1]
        others = sum(row.wants_token for row in plan.rows[:-1])
        query_len = others + postponed
        if not query_len:
            return 0.0
        is_chunk = postponed > plan.decode_len
        shared = 0
        if last.request.num_blocks:
            shared = max(0, shape.num_shared_blocks - self._num_blocks(last.start))
            shared += self._num_blocks(last.end - postponed) if is_chunk else 0
        has_singles = others > 0 or not is_chunk
        following = BatchShape(
            Phase(is_chunk, is_chunk or shared > 0, has_singles),
            query_len,
            shared,
            shape.num_unique_blocks if has_singles else 0,
            shape.num_logits,
        )
        return self._cost(following)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
