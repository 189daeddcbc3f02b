"""Cached prefixes under random requests, samples, steps, failures and aborts on a simulated device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphs import StepLimits
from hpu_duo.engine.batch import exact_shape
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.kv.prefix_tree import PrefixNode, PrefixRoot, PrefixTree
from hpu_duo.request import FinishReason, PrefixHold, Request
from tests.engine_host.prefix_draws import STEMS, prefix_limits
from tests.engine_host.simulated_device import VOCAB_SIZE, SimulatedDevice, make_request, outputs_alone


class PrefixMachine(RuleBasedStateMachine):
    most_waits = 1
    """Steps that a request may wait for transfers, by those that it runs in."""
    ends_have_snapshots = True
    """Ends within a block; one that is loaded from a tier has its snapshot later, or never."""

    @initialize(limits=prefix_limits())
    def create(self, limits: StepLimits) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.device = SimulatedDevice(
            limits.num_blocks,
            limits.block_size,
            limits.num_ring_rows,
            uses_blocks=limits.uses_blocks,
            uses_rows=limits.uses_rows,
        )
        self.unfinished: dict[str, Request] = {}
        self.texts: list[list[int]] = []
        self.open: list[PrefixHold] = []
        self.asked: dict[str, PrefixHold] = {}
        self.opening: dict[str, PrefixHold] = {}
        self.num_added = 0

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.sampled_from([0, 5, 8, 11, 12, 12, 12]),
        tail=st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=5),
        max_tokens=st.integers(1, 10),
        num_samples=st.sampled_from([1, 1, 1, 2, 3]),
        decoded_prompt_tokens=st.sampled_from([0, 0, 0, 1, 3]),
        salt=st.sampled_from([None, None, None, "a"]),
        old=st.none() | st.integers(0, 100),
        context=st.none() | st.integers(0, 100),
        opens=st.booleans(),
    )
    def add(
        self,
        stem: list[int],
        cut: int,
        tail: list[int],
        max_tokens: int,
        num_samples: int,
        decoded_prompt_tokens: int,
        salt: str | None,
        old: int | None,
        context: int | None,
        opens: bool,
    ) -> None:
        """Add a request that begins like a stem, like an earlier request, or with a context that is held."""
        if old is not None and self.texts:
            stem = self.texts[old % len(self.texts)]
        hold = None
        if context is not None and self.open:
            hold = self.open[context % len(self.open)]
            stem, cut, salt = hold.tokens.tolist(), len(hold.tokens), hold.namespace
            tail = tail[: 30 - cut]
        becomes = None
        if opens and len(stem[:cut]) + len(tail) >= self.limits.block_size:
            text = np.array([*stem[:cut], *tail], np.int32)
            becomes = PrefixHold(text, self.limits.block_size, salt)
            if hold is not None and len(becomes.tokens) == len(hold.tokens):
                return
            stem, cut, tail = becomes.tokens.tolist(), len(becomes.tokens), []
            num_samples, decoded_prompt_tokens, max_tokens = 1, 0, 1
            if not self._may_open(becomes):
                return
        name = f"r{self.num_added}"
        self.num_added += 1
        parent = make_request(
            name,
            [*stem[:cut], *tail],
            max_tokens=max_tokens,
            max_model_len=32,
            seed=self.num_added,
            decoded_prompt_tokens=decoded_prompt_tokens,
            cache_salt=salt,
        )
        siblings = [
            parent.sibling(f"{name}.{i}", sample_index=i, sampling_seed=100 * i)
            for i in range(1, num_samples)
        ]
        for request in [parent, *siblings]:
            request.context, request.opens = hold, becomes
        if not self._is_taken(parent):
            return
        for request in [parent, *siblings]:
            self.scheduler.add(request)
            self.unfinished[request.request_id] = request
            if hold is not None:
                self.asked[request.request_id] = hold
        if becomes is not None:
            self.opening[parent.request_id] = becomes

    def _is_taken(self, request: Request) -> bool:
        """Whether the scheduler takes a request; it must if that fits beside the contexts that are held."""
        allocations = self.scheduler.allocations
        needed = allocations.num_blocks_for(request.max_cached_tokens) + allocations.num_held_blocks
        if not self.limits.uses_blocks or needed <= self.limits.num_blocks:
            return True
        try:
            self.scheduler.check_fits(request)
        except ValueError:
            return False
        assert request.context is not None
        return True

    def _may_open(self, hold: PrefixHold) -> bool:
        try:
            if not self.scheduler.holding.open_cached(hold):
                return True
        except ValueError:
            return False
        self.open.append(hold)
        return False

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 100), is_later=st.booleans())
    def close(self, number: int, is_later: bool) -> None:
        hold = self.open.pop(number % len(self.open))
        if is_later:
            self.scheduler.holding.let_go_later(hold)
            self.scheduler.holding.sweep()
        else:
            self.scheduler.holding.let_go(hold)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            plan = self.scheduler.plan()
            self._check_plan(plan)
            if plan is not None:
                self._check_hits(plan)
                self._commit(plan, self.device.run(plan))

    def _check_plan(self, plan: StepPlan | None) -> None:
        assert (plan is None) == (not self.unfinished)

    @precondition(lambda self: self.unfinished)
    @rule(num_rows=st.integers(0, 5))
    def step_that_fails(self, num_rows: int) -> None:
        """Leave the stores as they are after some of the rows have been written, or none."""
        plan = self.scheduler.plan()
        assert plan is not None
        for block in self.device.blocks[:num_rows]:
            block[:] = [None] * len(block)
        for ring in self.device.rings[:num_rows]:
            ring[:] = [None] * len(ring)
        self.scheduler.discard()
        assert not self.scheduler.num_running

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def step_with_aborts_in_flight(self, data: st.DataObject) -> None:
        plan = self.scheduler.plan()
        assert plan is not None
        tokens = self.device.run(plan)
        for name in data.draw(st.sets(st.sampled_from(sorted(self.unfinished)), max_size=3)):
            self.abort_one(name)
        self._commit(plan, tokens)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.abort_one(data.draw(st.sampled_from(sorted(self.unfinished))))

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def run_one_alone(self, data: st.DataObject) -> None:
        request = self.unfinished[data.draw(st.sampled_from(sorted(self.unfinished)))]
        if request.parent is not None:
            return
        plan = self.scheduler.plan(alone=request)
        if plan is not None:
            self._commit(plan, self.device.run(plan))

    @precondition(lambda self: any(r.num_output_tokens for r in self.unfinished.values()))
    @rule(data=st.data())
    def finish_by_a_stop_string(self, data: st.DataObject) -> None:
        names = sorted(name for name, r in self.unfinished.items() if r.num_output_tokens)
        request = self.unfinished.pop(data.draw(st.sampled_from(names)))
        self._ended(request.request_id)
        self.scheduler.finish(request, FinishReason.STOP)
        self._remember(request)

    @rule()
    def forget(self) -> None:
        assert self.scheduler.allocations.prefixes is not None
        self.scheduler.allocations.prefixes.clear()
        assert self.scheduler.allocations.blocks.num_idle == 0

    def abort_one(self, name: str) -> None:
        request = self.unfinished.pop(name)
        self._ended(name)
        assert self.scheduler.abort(name) is request
        self._remember(request)

    def _ended(self, name: str) -> None:
        self.asked.pop(name, None)
        hold = self.opening.pop(name, None)
        if hold is not None and hold.is_there:
            self.open.append(hold)

    def _remember(self, request: Request) -> None:
        self.texts.append(request.tokens[: request.num_tokens].tolist())

    def _check_hits(self, plan: StepPlan) -> None:
        shape = exact_shape(plan, self.limits.block_size)
        assert self.limits.reaches(shape), f"no table holds {shape}"
        for row in plan.rows:
            request = row.request
            assert request.num_cached_tokens is None or request.num_cached_tokens < request.num_tokens
            hold = self.asked.get(request.request_id)
            if hold is not None and hold.is_there and len(hold.tokens) <= request.num_reusable_tokens:
                assert row.start >= len(hold.tokens), "a question does not begin with its context"
            tail = request.params.decoded_prompt_tokens
            if tail:
                assert row.end <= max(request.num_prompt_tokens - tail, row.start + 1)

    def _commit(self, plan: StepPlan, tokens: list[int]) -> None:
        for request, _, reason, *_ in self.scheduler.commit(plan, tokens):
            if reason is not None:
                del self.unfinished[request.request_id]
                opens = self.opening.get(request.request_id)
                assert opens is None or opens.is_there or opens.refusal is not None
                self._ended(request.request_id)
                self._remember(request)
                assert request.output_token_ids.tolist() == outputs_alone(request)

    @invariant()
    def blocks_are_held_by_running_requests_idle_in_the_tree_or_free(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        blocks, cache = self.scheduler.allocations.blocks, self.scheduler.allocations.prefixes
        assert cache is not None
        holders: Counter[int] = Counter()
        for request in self.unfinished.values():
            holders.update(request.block_table[: request.num_blocks].tolist())
        holds = {*self.open, *self.asked.values(), *self.opening.values()}
        held = {node for hold in holds if hold.node is not None for node in hold.node.path}
        for hold in holds:
            if hold.node is not None and self.limits.uses_blocks:
                holders.update(node.block for node in hold.node.path)
        for block in range(self.limits.num_blocks):
            assert blocks.num_holders(block) == holders[block]
        nodes = list(cache.tree)
        assert len(nodes) == len(cache.tree)
        kept = [node.block for node in nodes if self.limits.uses_blocks]
        assert len(set(kept)) == len(kept), "a block is in two places of the tree"
        idle = sum(blocks.is_idle(block) for block in range(self.limits.num_blocks))
        assert idle == blocks.num_idle == sum(not holders[block] for block in kept)
        assert blocks.num_free + blocks.num_idle + blocks.num_used == self.limits.num_blocks
        for node in nodes:
            assert node.depth == len(list(node.path))
            if cache.tree.is_partial(node):
                assert node.depth > 1
                assert node.snapshot is not None or not self.ends_have_snapshots
            if self.limits.uses_blocks and holders[node.block] and node.parent.depth:
                assert holders[node.parent.block], "a held block is behind one that may be evicted"
        assert held <= set(nodes), "a prefix that is held has been evicted"
        assert set(cache.holds) == {hold for hold in holds if hold.node is not None}
        assert cache.holds.num_nodes == len(held)
        for hold in holds:
            if hold.node is not None:
                assert b"".join(each.key for each in reversed(list(hold.node.path))) == hold.tokens.tobytes()
                assert hold.node.snapshot is not None or not self.limits.uses_rows
        snapshots = [node.snapshot for node in nodes if node.snapshot is not None]
        assert len(set(snapshots)) == len(snapshots) == cache.num_snapshots <= self.limits.num_snapshots
        assert all(self.limits.max_num_seqs <= each < self.limits.num_ring_rows for each in snapshots)
        if not self.limits.uses_blocks:
            running = sum(r.num_blocks == 0 for r in self.unfinished.values())
            assert all(node.children or node.snapshot is not None for node in nodes) or running

    @invariant()
    def a_match_is_the_longest_prefix_of_what_the_tree_holds(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        cache, size = self.scheduler.allocations.prefixes, self.limits.block_size
        assert cache is not None
        known = texts_of(cache.tree)
        for request in self.unfinished.values():
            hit, salt, num_known = cache.find(request), request.params.cache_salt, request.num_tokens
            # The last known token is always computed, and so is the tail that is decoded.
            tail = request.params.decoded_prompt_tokens
            most = max(0, min(num_known - 1, request.num_prompt_tokens - tail if tail else num_known))
            path: list[PrefixNode] = []
            for end in range(size, most + 1, size):
                node = known.get((salt, request.tokens[:end].tobytes()))
                if node is None:
                    break
                path.append(node)
            assert list(hit.path) == path
            usable = [
                len(tokens) // 4
                for (namespace, tokens), node in known.items()
                if (node.snapshot is not None or not self.limits.uses_rows)
                and namespace == salt
                and request.tokens[:most].tobytes().startswith(tokens)
            ]
            assert cache.num_tokens(hit) == max(usable, default=0)

    def teardown(self) -> None:
        """Every request ends, and nothing but the cache is held."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(self.most_waits * sum(2 * len(r.tokens) for r in self.unfinished.values())):
            if not self.unfinished:
                break
            self.step(1)
        assert not self.unfinished
        while self.open:
            self.close(0, False)
        assert not list(self.scheduler.allocations.prefixes.holds)
        assert self.scheduler.allocations.blocks.num_used == self.scheduler.allocations.rows.num_used == 0
        self.forget()
        assert self.scheduler.allocations.blocks.num_free == self.limits.num_blocks


def texts_of(tree: PrefixTree) -> dict[tuple[Hashable, bytes], PrefixNode]:
    """The nodes of a tree by their namespaces and tokens."""
    found: dict[tuple[Hashable, bytes], PrefixNode] = {}
    for node in tree:
        path = list(node.path)
        root = path[-1].parent
        assert isinstance(root, PrefixRoot)
        found[root.namespace, b"".join(each.key for each in reversed(path))] = node
    assert len(found) == len(tree)
    return found


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.exhaustive
class TestManyOperations(PrefixMachine.TestCase):  # type: ignore[misc, name-defined]
    """100,000 operations."""

    settings = settings(max_examples=1000, stateful_step_count=100, deadline=None)
