"""Prefixes that come back from the host, under random requests, failures, aborts and orders of transfers."""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from graphs import StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.kv.tiers.disk import DiskTier, SegmentFolder
from hpu_duo.kv.tiers.eviction import ORDERS
from hpu_duo.kv.tiers.host import HostTier
from hpu_duo.kv.tiers.link import Transfers
from hpu_duo.kv.tiers.policy import WritePolicy
from hpu_duo.kv.tiers.prefix_tiers import PrefixTiers, RecordSizes
from hpu_duo.kv.tiers.records import RecordMemory
from hpu_duo.kv.tiers.segments import PAGE
from hpu_duo.kv.tiers.stage import Stage
from hpu_duo.kv.tiers.swap import PreemptionMode, SwapSpace
from hpu_duo.kv.tiers.swapping import Swapping
from hpu_duo.scheduling import FirstComeFirstServed, MultiLevelFeedback, SchedulingPolicy
from tests.engine_host.prefix_draws import prefix_limits
from tests.engine_host.simulated_device import VOCAB_SIZE, SimulatedDevice, make_request
from tests.engine_host.simulated_tiers import SLOT_BYTES, SlotDisk, SlotLink
from tests.engine_host.test_prefix_loads import LoadMachine

POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "mlfq": partial(MultiLevelFeedback, quantum=8),
}

RARELY = st.sampled_from([False] * 15 + [True])
"""For what empties the tiers, which would be empty most of the time."""


class TieredMachine(LoadMachine):
    most_waits = 4
    ends_have_snapshots = False

    @initialize(
        limits=prefix_limits(),
        staged=st.sampled_from([2, 4, 10]),
        num_slots=st.sampled_from([2, 10, 30, 200]),
        policy=st.sampled_from(WritePolicy),
        num_swap_slots=st.sampled_from([0, 3, 40]),
        eviction=st.sampled_from(sorted(ORDERS)),
        order=st.sampled_from(sorted(POLICIES)),
        disk_pages=st.sampled_from([0, 2, 30, 300, 300]),
        most_polls=st.sampled_from([1, 2, 6, 12]),
        most_disk_polls=st.sampled_from([1, 4, 16]),
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
        disk_pages: int = 0,
        most_polls: int = 6,
        most_disk_polls: int = 4,
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
        slots = np.zeros((num_slots + num_swap_slots, SLOT_BYTES), np.uint8)
        allocations = self.scheduler.allocations
        sizes = RecordSizes(
            *(SLOT_BYTES * limits.uses_blocks, 160 * limits.uses_rows, SLOT_BYTES),
            2 if limits.uses_blocks else 1,
        )
        self.link = link = SlotLink(device, RecordMemory(slots, sizes[:2]), most_polls)
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
        self.disk_bytes, self.most_disk_polls = PAGE * disk_pages, most_disk_polls
        if disk_pages:
            self.folder = tempfile.TemporaryDirectory()
            self._open_disk()
        self.taken: Counter[tuple[bool, bool]] = Counter()
        take = self.tiers.take

        def take_counted() -> Transfers | None:
            transfers = take()
            for is_load, each in (
                () if transfers is None else ((False, transfers.stores), (True, transfers.loads))
            ):
                for transfer in each:
                    self.taken[is_load, transfer.slots[0] >= num_slots] += len(transfer.slots)
            return transfers

        self.tiers.take = take_counted  # type: ignore[method-assign]
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

    def _open_disk(self) -> None:
        folder = SegmentFolder(
            Path(self.folder.name), hashlib.sha256(b"model").digest(), self.disk_bytes, 2 * SLOT_BYTES
        )
        self.disk = self.link.disk = SlotDisk(folder, self.link.memory, self.most_disk_polls)
        self.tiers.disk = DiskTier(self.disk, self.tiers.host, SLOT_BYTES, self.limits.block_size)

    @property
    def has_disk(self) -> bool:
        return self.link.disk is not None

    @precondition(lambda self: self.has_disk)
    @rule(numbers=st.lists(st.integers(0, 20), max_size=6))
    def end_work_of_the_disk(self, numbers: list[int]) -> None:
        self.disk.next += numbers

    @rule(is_from_host=st.booleans())
    def evict(self, is_from_host: bool) -> None:
        """Evict what requests may need again from the device, as for other texts, or from the host too."""
        allocations = self.scheduler.allocations
        assert allocations.prefixes is not None
        allocations.prefixes.evict(allocations.blocks.num_idle)
        for record in tuple(self.tiers.host) if is_from_host and self.has_disk else ():
            if record.is_present and not record.num_readers:
                self.tiers.host.drop(record, is_evicted=True)

    @precondition(lambda self: self.has_disk)
    @rule(number=st.integers(0, 100_000), is_dropped=st.booleans())
    def damage_the_folder(self, number: int, is_dropped: bool) -> None:
        """Change a byte, or drop a segment as another process does."""
        if is_dropped:
            self.disk.drop_a_segment(number)
        else:
            self.disk.damage(number)

    @rule(slot=st.integers(0, 300), byte=st.integers(0, SLOT_BYTES - 1), is_now=RARELY)
    def damage_the_host(self, slot: int, byte: int, is_now: bool) -> None:
        """Change a bit of a slot, of a record or of a preempted request."""
        self.link.slots[slot % len(self.link.slots), byte] ^= 16 * is_now

    @precondition(lambda self: self.has_disk)
    @rule(is_now=RARELY)
    def fail_the_disk(self, is_now: bool) -> None:
        self.disk.error = OSError("a disk") if is_now else self.disk.error

    @precondition(lambda self: self.has_disk and not self.tiers.disk.futures)
    @rule()
    def read_the_folder_anew(self) -> None:
        """As a process does that is started."""
        self.disk.close()
        self._open_disk()

    @rule()
    def leave_idle_contexts(self) -> None:
        """Pins of contexts without requests end."""
        prefixes = self.scheduler.allocations.prefixes
        assert prefixes is not None
        prefixes.holds.idle_s = 0.0
        self.scheduler.holding.sweep()
        prefixes.holds.idle_s = None
        assert all(hold.num_requests for hold in prefixes.holds)

    @precondition(lambda self: any(hold.is_lost for hold in self.open))
    @rule()
    def pin_an_idle_context(self) -> None:
        """Its next question does so, with what is cached of it or, by a request, with the rest."""
        hold = next(hold for hold in self.open if hold.is_lost)
        try:
            if self.scheduler.holding.open_cached(hold):
                return
        except ValueError:
            return
        if hold in self.opening.values():
            return
        name = f"r{self.num_added}"
        self.num_added += 1
        request = make_request(
            name, hold.tokens.tolist(), max_tokens=1, max_model_len=32, cache_salt=hold.namespace
        )
        request.opens = hold
        if self._is_taken(request):
            self.open.remove(hold)
            self.scheduler.add(request)
            self.unfinished[name] = request
            self.opening[name] = hold

    @rule(numbers=st.lists(st.integers(0, 20), max_size=6))
    def land(self, numbers: list[int]) -> None:
        """Let some transfers land before the next step, in whatever order."""
        self.link.next += numbers

    @rule(is_now=RARELY)
    def fail_a_transfer(self, is_now: bool) -> None:
        self.link.fails = is_now

    @precondition(lambda self: self.unfinished)
    @rule(num_rows=st.integers(0, 5), is_now=RARELY)
    def step_that_fails(self, num_rows: int, is_now: bool = True) -> None:
        if is_now:
            super().step_that_fails(num_rows)

    @rule(is_now=RARELY)
    def forget(self, is_now: bool = True) -> None:
        if is_now:
            super().forget()

    @rule(is_slow=RARELY)
    def price_the_link(self, *, is_slow: bool) -> None:
        """Load whatever there is, or compute it from now on."""
        policy = self.tiers.load_policy
        policy.prefill_s, policy.byte_s = 1.0, 1e9 if is_slow else 0.0

    @rule(
        stems=st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=2, max_size=4), num_steps=st.integers(1, 16)
    )
    def serve(self, stems: list[int], num_steps: int) -> None:
        """Add texts that come again, and of which the device has room for a few."""
        for number in stems:
            self.add_text([number] * (3 + number), max_tokens=12)
        self.step(num_steps)

    @precondition(lambda self: self.texts)
    @rule(
        olds=st.lists(st.integers(0, 100), min_size=1, max_size=3),
        tail=st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=3),
    )
    def come_back(self, olds: list[int], tail: list[int]) -> None:
        """Add the next turns of texts that have ended."""
        for old in olds:
            text = self.texts[old % len(self.texts)][: 30 - len(tail)]
            self.add_text([*text, *tail])
        self.step(1)

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

    @invariant()
    def what_loads_need_is_not_evicted(self) -> None:
        if not hasattr(self, "tiers"):
            return
        for load in self.tiers._loads.values():
            for piece in load.pieces:
                assert piece.record is None or (
                    piece.record.num_readers > 0 and self.tiers.host.has(piece.record)
                )

    @invariant()
    def bytes_are_units_times_the_size_of_a_record(self) -> None:
        """Also those that counters count, and those of the folder."""
        if not hasattr(self, "taken"):
            return
        tiers, counters, landed = self.tiers, self.tiers.counters, self.link.num_landed
        for is_load, found in ((False, counters.stored_bytes), (True, counters.loaded_bytes)):
            assert found == sum(
                number * tiers.sizes[is_row]
                for (of_load, is_row, slot), number in landed.items()
                if of_load is is_load and slot < tiers.host.num_slots
            )
        if (swap := tiers.swap) is not None:
            assert swap.counters.out_bytes == SLOT_BYTES * self.taken[False, True]
            assert swap.counters.in_bytes == SLOT_BYTES * self.taken[True, True]
        if tiers.disk is not None:
            folder = Path(self.folder.name)
            assert sum(path.stat().st_size for path in folder.glob("*.kv")) <= self.disk_bytes
            if not tiers.disk.futures:
                assert tiers.disk.counters.written_bytes == self.disk.written_bytes
                assert tiers.disk.counters.read_bytes <= self.disk.read_bytes

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
        if self.has_disk:
            assert not self.tiers.disk.futures
            self.disk.close()
            self.folder.cleanup()


TestTieredPrefixes = TieredMachine.TestCase
TestTieredPrefixes.settings = settings(max_examples=30, stateful_step_count=30)


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


def test_the_front_of_an_expensive_text_is_stored_again_when_the_device_evicts_it() -> None:
    """The host has evicted it before, and what made the text long has left the device."""
    machine = TieredMachine()
    machine.create(LIMITS, staged=10, num_slots=200, policy=WritePolicy.WRITE_THROUGH_COST)
    host, allocations = machine.tiers.host, machine.scheduler.allocations
    machine.add_text([1, 2, 3, 4, 5, 6, 7, 8, 9])
    machine.add_text([2] * 5)

    def stored() -> list[int]:
        while machine.unfinished or machine.tiers.has_stores or machine.link.flying:
            machine.step(1)
        return sorted(each.num_tokens for each in host if not each.key.is_row)

    for _ in range(2):
        before = stored()
        assert before[:2] == [4, 8]
        for record in tuple(host):
            host.drop(record, is_evicted=True)
        assert allocations.prefixes is not None
        for _ in range(allocations.blocks.num_idle):
            allocations.prefixes.evict(1)
            stored()
        assert stored() == before
        machine.add_text([1, 2, 3, 4, 5, 6, 7, 8, 9, 1])  # brings them back
        stored()
        assert machine.tiers.counters.num_loaded > 0


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
