"""Everything at once: random requests, samples, steps and aborts on a simulated device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphs import BatchShape, BucketTable, Phase, StepLimits
from hpu_duo.engine.scheduler import ChunkTrimming, Scheduler
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.request import NO_ROW, FinishReason, Request, RequestStatus
from hpu_duo.scheduling import SchedulingPolicy
from tests.engine_host.simulated_device import VOCAB_SIZE, SimulatedDevice, make_request, outputs_alone


@st.composite
def _limits(draw: st.DrawFn) -> StepLimits:
    max_num_seqs = draw(st.integers(1, 5))
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 8)),
        max_model_len=64,
        block_size=draw(st.integers(1, 4)),
        num_blocks=draw(st.integers(2, 14)),
        decode_len=1,
        max_chunk_rows=draw(st.integers(1, 3)),
        uses_blocks=draw(st.sampled_from([True, True, True, False])),
    )


def _table(borders: set[int]) -> BucketTable:
    """Buckets that hold any step, of a few query sizes; query tokens decide what they cost."""
    whole = Phase(causal=True, shared=True, unique=True)
    return BucketTable(
        tuple(BatchShape(whole, query_len, 64, 64, 8) for query_len in {*borders, 13}),
        lambda bucket: 4.0 + bucket.query_len,
    )


FIELDS = st.fixed_dictionaries(
    {
        "max_tokens": st.none() | st.integers(1, 10),
        "min_tokens": st.integers(0, 1),
        "ignore_eos": st.booleans(),
        "decoded_prompt_tokens": st.sampled_from([0, 0, 1, 3, 20]),
        "priority": st.integers(-2, 2),
        "user": st.sampled_from([None, "ann", "bob"]),
        "expected_tokens": st.none() | st.integers(0, 12),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """First come, first served; other policies derive from it."""

    most_wasted = 1

    def make_policy(self) -> SchedulingPolicy | None:
        return None

    @initialize(limits=_limits(), borders=st.none() | st.sets(st.integers(2, 12), min_size=1))
    def create(self, limits: StepLimits, borders: set[int] | None) -> None:
        self.limits = limits
        self.is_trimming = borders is not None
        trimming = None if borders is None else ChunkTrimming(_table(borders), limits.block_size)
        self.num_postponed = trimming.num_postponed if trimming else lambda plan: 0
        self.is_interrupted = False
        self.scheduler = Scheduler(limits, self._num_postponed, self.make_policy())
        self.device = SimulatedDevice(
            limits.num_blocks, limits.block_size, limits.max_num_seqs, uses_blocks=limits.uses_blocks
        )
        self.unfinished: dict[str, Request] = {}
        self.ended: list[Request] = []
        self.computed: dict[str, int] = {}
        self.num_added = 0

    # What may happen

    @rule(
        prompt=st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=14),
        fields=FIELDS,
        num_samples=st.sampled_from([1, 1, 2, 3]),
    )
    def add(self, prompt: list[int], fields: dict[str, Any], num_samples: int) -> None:
        name = f"r{self.num_added}"
        self.num_added += 1
        if not self.scheduler.policy.honours_priority:
            fields = {**fields, "priority": 0}
        parent = make_request(name, prompt, max_model_len=24, seed=self.num_added, **fields)
        siblings = [
            parent.sibling(f"{name}.{i}", sample_index=i, sampling_seed=100 * i)
            for i in range(1, num_samples)
        ]
        capacity = self.limits.num_blocks * self.limits.block_size
        if self.limits.uses_blocks and parent.max_cached_tokens > capacity:
            with pytest.raises(ValueError, match="may cache up to"):
                self.scheduler.add(parent)
            assert self.scheduler.get(name) is None
            return
        for request in [parent, *siblings]:
            self.scheduler.add(request)
            self.unfinished[request.request_id] = request

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            plan = self._plan()
            if plan is not None:
                self._commit(plan, self.device.run(plan))

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def step_with_aborts_in_flight(self, data: st.DataObject) -> None:
        plan = self._plan()
        assert plan is not None
        tokens = self.device.run(plan)
        for name in data.draw(st.sets(st.sampled_from(sorted(self.unfinished)), max_size=3)):
            self._abort(name)
        self._commit(plan, tokens)

    @precondition(lambda self: self.unfinished)
    @rule()
    def step_that_is_interrupted_while_it_is_trimmed(self) -> None:
        self.is_interrupted = True
        try:
            self.step(1)
        except KeyboardInterrupt:
            assert not self.scheduler.num_running
            self.computed.clear()
        finally:
            self.is_interrupted = False

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._abort(data.draw(st.sampled_from(sorted(self.unfinished))))

    @precondition(lambda self: any(r.num_output_tokens for r in self.unfinished.values()))
    @rule(data=st.data())
    def finish_by_a_stop_string(self, data: st.DataObject) -> None:
        names = sorted(name for name, r in self.unfinished.items() if r.num_output_tokens)
        request = self.unfinished.pop(data.draw(st.sampled_from(names)))
        self.scheduler.finish(request, FinishReason.STOP)
        assert request.finish_reason is FinishReason.STOP

    # How it is done, and checked

    def _num_postponed(self, plan: StepPlan) -> int:
        if self.is_interrupted:
            raise KeyboardInterrupt
        return self.num_postponed(plan)

    def _abort(self, name: str) -> None:
        assert self.scheduler.abort(name) is self.unfinished.pop(name)
        assert self.scheduler.abort(name) is None

    def _plan(self) -> StepPlan | None:
        before = {r: (r.status, r.num_uncomputed_tokens) for r in self.unfinished.values()}
        plan = self.scheduler.plan()
        assert (plan is None) == (not self.unfinished)
        if plan is None:
            return None
        self._check_budgets_and_order(plan)
        self._check_that_running_requests_were_served_first(plan, before)
        self._check_admissions(plan, before)
        self._check_that_every_token_is_computed_once(plan)
        return plan

    def _check_budgets_and_order(self, plan: StepPlan) -> None:
        limits = self.limits
        kinds = [(row.num_new_tokens > 1) + (row.num_new_tokens > 1 and row.start == 0) for row in plan.rows]
        order = [(kind, row.request.arrival) for kind, row in zip(kinds, plan.rows)]
        assert order == sorted(order)
        assert len({row.request for row in plan.rows}) == len(plan.rows)
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert kinds.count(1) <= limits.max_chunk_rows
        running = [r for r in self.unfinished.values() if r.status is RequestStatus.RUNNING]
        assert sorted(r.row for r in running) == list(range(len(running)))
        for row in plan.rows:
            assert row.ring_row == row.request.row
            assert row.start == row.request.num_computed_tokens
            assert row.num_new_tokens >= 1
            if row.request.params.decoded_prompt_tokens:
                first = row.request.num_prompt_tokens - row.request.params.decoded_prompt_tokens
                assert row.end <= max(first, row.start + 1)
            assert row.wants_token == (row.end == row.request.num_tokens)
            if limits.uses_blocks:
                # A prompt that was cut short keeps the blocks of its end.
                end = row.request.num_tokens if self.is_trimming else row.end
                assert (row.request.num_blocks - 1) * limits.block_size < end

    def _check_that_running_requests_were_served_first(
        self, plan: StepPlan, before: dict[Request, tuple[RequestStatus, int]]
    ) -> None:
        served = {row.request: row.num_new_tokens for row in plan.rows}
        running = sorted(
            (r for r, (status, _) in before.items() if status is RequestStatus.RUNNING),
            key=lambda r: r.arrival,
        )
        kept = [r for r in running if r not in plan.preempted]
        self._check_preemptions(kept, plan.preempted, running)
        if running:
            assert running[0] in served, "the earliest running request must make progress"
        left_over = self.limits.max_num_batched_tokens - plan.num_tokens
        num_chunks = sum(row.num_new_tokens > 1 and row.start > 0 for row in plan.rows)
        for request in kept:
            known = before[request][1]
            if known == 1:
                assert served[request] == 1, "no decode may be skipped"
            elif served.get(request, 0) < (most := self._most_at_once(request, known)):
                is_cut = self.is_trimming and request is plan.rows[-1].request
                assert (
                    left_over == 0
                    or num_chunks == self.limits.max_chunk_rows
                    or (is_cut and 2 * served[request] >= most)
                )

    def _check_preemptions(
        self, kept: list[Request], preempted: Sequence[Request], running: list[Request]
    ) -> None:
        assert kept + list(reversed(preempted)) == running

    @staticmethod
    def _most_at_once(request: Request, known: int) -> int:
        tail = request.params.decoded_prompt_tokens
        computed = request.num_tokens - known
        return max(1, request.num_prompt_tokens - tail - computed) if tail else known

    def _check_admissions(self, plan: StepPlan, before: dict[Request, tuple[RequestStatus, int]]) -> None:
        admitted = [row.request for row in plan.rows if before[row.request][0] is RequestStatus.WAITING]
        waiting = [r for r in self.unfinished.values() if r.status is RequestStatus.WAITING]
        self._check_order(admitted, [w for w in waiting if w not in plan.preempted])
        assert not set(plan.preempted) & {row.request for row in plan.rows}
        if not waiting or plan.num_tokens == self.limits.max_num_batched_tokens:
            return
        running = [r for r in self.unfinished.values() if r.status is RequestStatus.RUNNING]
        if len(running) == self.limits.max_num_seqs:
            return
        head = self._next_of(waiting)
        if head in plan.preempted:
            return
        owed = sum(self._blocks_owed(r) for r in [*running, head])
        assert owed > self.scheduler.allocations.blocks.num_free, f"{head} could have been admitted"

    def _check_order(self, admitted: list[Request], waiting: list[Request]) -> None:
        assert all(a.arrival < w.arrival for a in admitted for w in waiting)

    def _next_of(self, waiting: list[Request]) -> Request:
        return min(waiting, key=lambda r: r.arrival)

    def _blocks_owed(self, request: Request) -> int:
        if not self.limits.uses_blocks:
            return 0
        last_cached = min(request.num_tokens + 1, len(request.tokens) - 1) - 1
        needed = last_cached // self.limits.block_size + 1 if last_cached >= 0 else 0
        return max(0, needed - request.num_blocks)

    def _check_that_every_token_is_computed_once(self, plan: StepPlan) -> None:
        for request in plan.preempted:
            self.computed[request.request_id] = 0
        for row in plan.rows:
            request = row.request
            start = self.computed.get(request.request_id, 0)
            is_fork = request.parent is not None and row.start == request.num_prompt_tokens - 1
            assert row.start == start or (start == 0 and is_fork)
            self.computed[request.request_id] = row.end

    def _commit(self, plan: StepPlan, tokens: list[int]) -> None:
        expected = [
            (row.request, token)
            for row, token in zip(plan.sampled_rows, tokens)
            if row.request.request_id in self.unfinished
        ]
        committed = self.scheduler.commit(plan, tokens)
        assert [(c.request, c.token) for c in committed] == expected
        for request, _, reason, *_ in committed:
            if reason is None:
                continue
            del self.unfinished[request.request_id]
            assert request.finish_reason is reason
            assert request.output_token_ids.tolist() == outputs_alone(request)

    # What always holds

    @invariant()
    def blocks_and_rows_belong_to_running_requests_only(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        allocations = self.scheduler.allocations
        holders: Counter[int] = Counter()
        for request in self.unfinished.values():
            table = request.block_table[: request.num_blocks].tolist()
            assert len(set(table)) == len(table)
            assert (request.row != NO_ROW) == (request.status is RequestStatus.RUNNING)
            assert not table or request.status is RequestStatus.RUNNING
            if request.row != NO_ROW:
                assert allocations.rows.owner(request.row) is request
            holders.update(table)
        assert [allocations.blocks.num_holders(b) for b in range(self.limits.num_blocks)] == [
            holders[b] for b in range(self.limits.num_blocks)
        ]
        num_rows = sum(r.row != NO_ROW for r in self.unfinished.values())
        assert allocations.rows.num_used == num_rows == self.scheduler.num_running
        assert self.scheduler.num_waiting == len(self.unfinished) - num_rows
        assert self.scheduler.has_unfinished == bool(self.unfinished)

    @invariant()
    def only_the_block_where_siblings_part_is_ever_private_to_one_of_them(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        families: dict[Request, list[Request]] = {}
        for request in self.unfinished.values():
            families.setdefault(request.parent or request, []).append(request)
        tables = [
            {int(b) for r in members for b in r.block_table[: r.num_blocks]} for members in families.values()
        ]
        assert sum(map(len, tables)) == len(set().union(*tables)), "two prompts share a block"
        for members in families.values():
            shareable = (members[0].num_prompt_tokens - 1) // self.limits.block_size
            tails = [int(b) for r in members for b in r.block_table[shareable : r.num_blocks]]
            assert len(set(tails)) == len(tails), "siblings share a block that one of them writes to"

    def teardown(self) -> None:
        """Every request ends, in no more steps than all of them would take one after the other."""
        if not hasattr(self, "scheduler"):
            return
        most_steps = self.most_wasted * sum(2 * len(r.tokens) for r in self.unfinished.values())
        for _ in range(most_steps):
            if not self.unfinished:
                break
            self.step(1)
        assert not self.unfinished
        assert self._plan() is None
        assert self.scheduler.allocations.blocks.num_used == 0
        assert self.scheduler.allocations.rows.num_used == 0
