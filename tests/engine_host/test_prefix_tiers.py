"""Prefixes that come back from the host, under random requests, failures, aborts and orders of transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from graphs import StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.kv.tiers.eviction import ORDERS
from hpu_duo.kv.tiers.host import HostTier
from hpu_duo.kv.tiers.link import Landed, Transfer, Transfers
from hpu_duo.kv.tiers.policy import WritePolicy
from hpu_duo.kv.tiers.prefix_tiers import PrefixTiers, RecordSizes
from hpu_duo.kv.tiers.stage import Stage
from hpu_duo.kv.tiers.swap import PreemptionMode, SwapSpace
from hpu_duo.kv.tiers.swapping import Swapping
from hpu_duo.scheduling import FirstComeFirstServed, MultiLevelFeedback, SchedulingPolicy
from tests.engine_host.prefix_draws import prefix_limits
from tests.engine_host.simulated_device import VOCAB_SIZE, SimulatedDevice, Slot, make_request
from tests.engine_host.test_prefix_loads import LoadMachine

POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "mlfq": partial(MultiLevelFeedback, quantum=8),
}

MOST_POLLS = 6
"""A transfer lands after so many polls at the latest."""


@dataclass(eq=False)
class Flight:
    """A transfer on its way."""

    transfer: Transfer
    is_load: bool
    num_polls: int = 0


class SlotLink:
    """Moves slots of a simulated device when told to; units of transfers on their way are empty."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.records: dict[tuple[int, ...], list[Slot]] = {}
        self.flying: list[Flight] = []
        self.next: list[int] = []
        self.fails = False

    def _units(self, transfer: Transfer) -> list[list[Slot]]:
        return self.device.rings if transfer.is_row else self.device.blocks

    def begin(self, transfers: Transfers) -> None:
        for is_load, each in ((False, transfers.stores), (True, transfers.loads)):
            for transfer in each:
                assert all(
                    transfer.unit != other.unit or transfer.is_row != other.is_row for other in self.open
                )
                self.flying.append(Flight(transfer, is_load))
                if is_load:
                    units = self._units(transfer)
                    units[transfer.unit] = [None] * len(units[transfer.unit])

    @property
    def open(self) -> list[Transfer]:
        return [each.transfer for each in self.flying]

    def poll(self) -> list[Landed]:
        if self.fails:
            self.fails = False
            raise OSError("a transfer")
        for each in self.flying:
            each.num_polls += 1
        wanted = [self.flying[number % len(self.flying)] for number in self.next if self.flying]
        self.next = []
        return self._land([each for each in self.flying if each in wanted or each.num_polls > MOST_POLLS])

    def _land(self, landed: list[Flight]) -> list[Landed]:
        found = []
        for each in landed:
            self.flying.remove(each)
            transfer, is_load = each.transfer, each.is_load
            units = self._units(transfer)
            if is_load:
                units[transfer.unit] = list(self.records[transfer.slots])
            else:
                self.records[transfer.slots] = list(units[transfer.unit])
                units[transfer.unit] = [None] * len(units[transfer.unit])
            found.append(Landed(transfer, is_load, 1.0))
        return found

    def wait(self, transfers: Sequence[Transfer]) -> None:
        assert not set(transfers) & set(self.open)

    def wait_any(self, others: Sequence[Future[Any]] = ()) -> None:
        for each in self.flying[:1]:
            each.num_polls = MOST_POLLS

    def drain(self) -> None:
        self._land(list(self.flying))

    def warm_up(self) -> None:
        raise AssertionError("nothing is compiled")


class TieredMachine(LoadMachine):
    @initialize(
        limits=prefix_limits(),
        staged=st.sampled_from([2, 4, 10]),
        num_slots=st.sampled_from([2, 10, 200, 200]),
        policy=st.sampled_from(WritePolicy),
        num_swap_slots=st.sampled_from([0, 3, 40]),
        eviction=st.sampled_from(sorted(ORDERS)),
        order=st.sampled_from(sorted(POLICIES)),
    )
    def create(
        self,
        limits: StepLimits,
        staged: int,
        num_slots: int,
        policy: WritePolicy,
        num_swap_slots: int = 0,
        eviction: str = "lru",
        order: str = "fcfs",
    ) -> None:
        super().create(limits)
        blocks, rows = staged if limits.uses_blocks else 0, staged if limits.uses_rows else 0
        larger = replace(
            limits,
            num_blocks=limits.num_blocks + blocks,
            num_snapshots=limits.num_snapshots + rows,
            num_staged_blocks=blocks,
            num_staged_rows=rows,
        )
        self.scheduler = Scheduler(larger, policy=POLICIES[order]())
        device = self.device = SimulatedDevice(
            larger.num_blocks,
            limits.block_size,
            larger.num_ring_rows,
            uses_blocks=limits.uses_blocks,
            uses_rows=limits.uses_rows,
        )
        self.link = link = SlotLink(device)
        allocations = self.scheduler.allocations
        sizes = RecordSizes(8 * limits.uses_blocks, 12 * limits.uses_rows, 8, 2 if limits.uses_blocks else 1)
        self.tiers = PrefixTiers(
            HostTier(num_slots, limits.block_size, ORDERS[eviction](num_slots)),
            Stage(link, allocations.staged_units, allocations.add_copy),
            sizes,
            policy,
            min_tokens=6,
        )
        allocations.attach(self.tiers)
        if num_swap_slots:
            room = range(num_slots, num_slots + num_swap_slots)
            self.tiers.swap = SwapSpace(
                self.tiers.stage, room, sizes.slots_per_row * limits.uses_rows, sizes.slot_bytes
            )
            self.scheduler.swapping = Swapping(
                allocations, self.tiers.swap, PreemptionMode.SWAP, self.tiers.load_policy
            )
        run = device.run

        def run_with_transfers(plan: StepPlan) -> list[int]:
            tokens = run(plan)
            if plan.transfers is not None:
                link.wait(plan.transfers.landed)
                link.begin(plan.transfers)
            if not plan.rows:
                link.wait_any()
            return tokens

        device.run = run_with_transfers  # type: ignore[method-assign]

    @rule(numbers=st.lists(st.integers(0, 20), max_size=6))
    def land(self, numbers: list[int]) -> None:
        """Let some transfers land before the next step, in whatever order."""
        self.link.next += numbers

    @rule()
    def fail_a_transfer(self) -> None:
        self.link.fails = True

    @rule(is_fast=st.booleans())
    def price_the_link(self, *, is_fast: bool) -> None:
        """Load whatever there is, or compute it from now on."""
        policy = self.tiers.load_policy
        policy.prefill_s, policy.byte_s = 1.0, 0.0 if is_fast else 1e9

    @precondition(lambda self: self.texts)
    @rule(old=st.integers(0, 100), tail=st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=3))
    def come_back(self, old: int, tail: list[int]) -> None:
        """Add the next turn of a text that has ended."""
        text = self.texts[old % len(self.texts)][: 30 - len(tail)]
        self.add_text([*text, *tail])

    def add_text(self, text: list[int], max_tokens: int = 1) -> str:
        name = f"r{self.num_added}"
        self.num_added += 1
        request = make_request(name, text, max_tokens=max_tokens, max_model_len=32, seed=self.num_added)
        if self._is_taken(request):
            self.scheduler.add(request)
            self.unfinished[name] = request
        return name

    @invariant()
    def no_slot_is_in_two_records(self) -> None:
        if not hasattr(self, "tiers"):
            return
        slots = [slot for record in self.tiers.host for slot in record.slots]
        assert len(set(slots)) == len(slots) == self.tiers.host.num_used_slots <= self.tiers.host.num_slots

    def _check_plan(self, plan: StepPlan | None) -> None:
        """Without requests a plan may store what was cached or evicted."""
        assert not self.unfinished if plan is None else self.unfinished or not plan.rows

    def _check_hits(self, plan: StepPlan) -> None:
        if plan.rows:
            super()._check_hits(plan)

    def teardown(self) -> None:
        """Nothing is on its way, or needed, once every request has ended and everything has landed."""
        super().teardown()
        if not hasattr(self, "tiers"):
            return
        assert not self.tiers.has_loads
        assert not any(record.num_readers for record in self.tiers.host)
        if self.tiers.swap is not None:
            assert not self.tiers.swap.num_used_slots


TestTieredPrefixes = TieredMachine.TestCase
TestTieredPrefixes.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.slow
@pytest.mark.exhaustive
class TestManyTieredPrefixes(TieredMachine.TestCase):  # type: ignore[misc, name-defined, valid-type]
    """100,000 operations."""

    settings = settings(max_examples=1_300, stateful_step_count=100)


LIMITS = StepLimits(
    max_num_seqs=2,
    max_num_batched_tokens=40,
    max_model_len=64,
    block_size=4,
    num_blocks=8,
    decode_len=1,
    max_chunk_rows=2,
    caches_prefixes=True,
    num_snapshots=8,
    max_block_moves=4,
)


@pytest.fixture
def evicted() -> TieredMachine:
    """A text of 10 tokens, its end within a block, is on the host only."""
    machine = TieredMachine()
    machine.create(LIMITS, staged=10, num_slots=200, policy=WritePolicy.WRITE_BACK)
    for text in (TEXT, *([number] * 17 for number in range(2, 8))):
        machine.add_text(text)
        while machine.unfinished:
            machine.step(1)
    return machine


TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]


def test_a_loaded_end_within_a_block_is_no_hit_before_its_snapshot_is_there(evicted: TieredMachine) -> None:
    prefixes = evicted.scheduler.allocations.prefixes
    assert prefixes is not None
    tree = prefixes.tree
    first = evicted.add_text([*TEXT, 3])
    while not any(map(tree.is_partial, tree)) or all(node.snapshot for node in tree if tree.is_partial(node)):
        for place, flight in enumerate(evicted.link.flying):
            flight.num_polls = 0
            evicted.link.next += [] if flight.transfer.is_row else [place]
        evicted.step(1)
    evicted.abort_one(first)
    evicted.add_text([*TEXT, 3])
    while evicted.unfinished:
        evicted.step(1)
    assert any(tree.is_partial(node) and node.snapshot for node in tree)


def test_a_unit_that_is_stored_later_is_not_counted_as_lost() -> None:
    machine = TieredMachine()
    machine.create(LIMITS, staged=2, num_slots=200, policy=WritePolicy.WRITE_THROUGH)
    machine.add_text([*TEXT, *TEXT])
    while machine.unfinished:
        machine.step(1)
    assert machine.tiers.counters.num_busy == 0
    assert len(machine.tiers.host) < 4


def test_a_request_waits_for_a_load_a_bounded_number_of_steps(evicted: TieredMachine) -> None:
    """Also if what is evicted for it cannot leave, because others keep the link busy."""
    evicted.add_text([*TEXT, 3])
    for _ in range(100):
        for flight in evicted.link.flying:
            flight.num_polls = flight.num_polls if flight.is_load else -100
        evicted.step(1)
    assert not evicted.unfinished


def stormed(num_requests: int, num_swap_slots: int, order: str = "fcfs") -> tuple[TieredMachine, int, int]:
    """Serve more requests than blocks, with a link of one step; returns tokens computed, and needed."""
    machine, random = TieredMachine(), np.random.default_rng(7)
    limits = replace(LIMITS, max_num_seqs=8, num_blocks=24, max_num_batched_tokens=64, num_snapshots=16)
    machine.create(*(limits, 8, 200, WritePolicy.WRITE_BACK), num_swap_slots=num_swap_slots, order=order)
    scheduler, num_computed, num_needed = machine.scheduler, 0, 0
    for number in range(num_requests):
        text = random.integers(1, VOCAB_SIZE, random.integers(8, 20)).tolist()
        scheduler.add(make_request(f"r{number}", text, max_tokens=40, ignore_eos=True, seed=number))
        num_needed += len(text) + 39
    while scheduler.has_unfinished:
        machine.link.next = list(range(len(machine.link.flying)))
        plan = scheduler.plan()
        assert plan is not None
        num_computed += plan.num_tokens
        scheduler.commit(plan, machine.device.run(plan))
    return machine, num_computed, num_needed


def test_a_storm_of_preemptions_computes_no_token_again() -> None:
    """The device checks what each row reads. Recomputed requests load prefixes while no block is free."""
    machine, num_computed, num_needed = stormed(320, num_swap_slots=400)
    assert num_computed == num_needed
    assert machine.tiers.swap is not None
    found = machine.tiers.swap.counters
    assert found.num_out == found.num_in >= 600
    assert found.num_recomputed == found.num_lost == 0
    machine, num_recomputing, num_needed = stormed(40, num_swap_slots=0)
    assert machine.tiers.counters.num_loaded > 0
    assert num_recomputing > 1.5 * num_needed


def test_texts_that_are_cheap_to_compute_are_not_copied() -> None:
    """Blocks of four tokens; a text is copied whole as it gets six tokens."""
    machine = TieredMachine()
    machine.create(LIMITS, staged=10, num_slots=200, policy=WritePolicy.WRITE_THROUGH_COST)

    def stored(text: list[int]) -> list[int]:
        machine.add_text(text)
        while machine.unfinished or machine.tiers.has_stores:
            machine.step(1)
        return sorted(each.num_tokens for each in machine.tiers.host if not each.key.is_row)

    assert stored([1, 2, 3, 4, 5]) == []
    assert stored([1, 2, 3, 4, 5, 6, 7, 8, 9]) == [4, 8, 9]
    for number in range(2, 12):
        assert stored([number] * 5) == [4, 8, 9]


def test_writing_through_ends_where_a_block_and_its_snapshot_do_not_fit_on_the_host() -> None:
    machine = TieredMachine()
    limits = replace(LIMITS, block_size=2, num_blocks=24, num_snapshots=3, uses_rows=True)
    machine.create(limits, staged=2, num_slots=2, policy=WritePolicy.WRITE_THROUGH)
    for number in range(2, 8):
        machine.add_text([number] * 5)
    for _ in range(200):
        machine.step(1)
    assert not machine.unfinished
    assert not machine.tiers.has_stores


def test_a_request_that_is_swapped_leaves_before_blocks_are_written_through() -> None:
    machine, num_slots, num_waits = TieredMachine(), 200, 0
    limits = replace(LIMITS, block_size=2, num_blocks=24, max_num_seqs=4, uses_rows=True)
    machine.create(limits, staged=2, num_slots=num_slots, policy=WritePolicy.WRITE_THROUGH, num_swap_slots=80)
    scheduler, swap = machine.scheduler, machine.tiers.swap
    assert swap is not None
    for number in range(2, 12):
        scheduler.add(make_request(f"r{number}", [number] * 13, max_tokens=9, max_model_len=32, seed=number))
    while scheduler.has_unfinished:
        was_leaving = bool(swap.leaving)
        plan = scheduler.plan()
        assert plan is not None
        if was_leaving and swap.leaving and plan.transfers is not None:
            blocks = [each for each in plan.transfers.stores if not each.is_row]
            num_waits += len(blocks)
            assert all(each.slots[0] >= num_slots for each in blocks)
        scheduler.commit(plan, machine.device.run(plan))
    assert num_waits > 0


def test_requests_that_a_policy_displaces_are_swapped() -> None:
    """Those of a lower level leave for those of an upper one, and displace others when they come back."""
    machine, num_computed, num_needed = stormed(40, num_swap_slots=400, order="mlfq")
    assert num_computed == num_needed
    assert machine.tiers.swap is not None
    assert machine.tiers.swap.counters.num_out >= 100
