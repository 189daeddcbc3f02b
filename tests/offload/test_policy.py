"""The choice between loading a prefix from the host and computing it, and of records that are evicted."""

import numpy as np
import pytest

from hpu_duo.kv.tiers.eviction import ORDERS
from hpu_duo.kv.tiers.host import HostTier, RecordKey
from hpu_duo.kv.tiers.policy import RETRY_AFTER, LoadPiece, LoadPolicy


def test_a_prefix_is_loaded_where_the_link_is_faster_than_the_computation() -> None:
    policy = LoadPolicy()
    assert policy.loads(1, 10**9, 0)
    policy.computed(num_tokens=100, seconds=0.1)
    assert policy.loads(1, 10**9, 0)
    policy.loaded(num_bytes=10**6, seconds=0.01)
    # 1 ms a token, and 10 ns a byte: 100 kB a token.
    assert policy.loads(10, 999_999, 0)
    assert not policy.loads(10, 999_999, 2)
    assert not policy.loads(10, 1_000_001, 0)
    for _ in range(20):
        policy.loaded(num_bytes=10**6, seconds=0.1)
    assert not policy.loads(10, 200_000, 0)


def test_the_front_of_a_prefix_is_loaded_and_its_tail_computed_where_that_is_faster() -> None:
    policy = LoadPolicy(prefill_s=1e-3, byte_s=1e-9)

    def front(*is_on_disk: bool, has_ends: bool = True) -> int:
        """Of records of 100 tokens and 10 MB, with 10 MB ahead."""
        last = len(is_on_disk) - 1
        pieces = [
            LoadPiece(100 * place + 100, 10**7, each, has_ends or place == last)
            for place, each in enumerate(is_on_disk)
        ]
        return policy.front(pieces, 10**7)

    assert front(False, False, True, True) == 4  # nothing is known of the disk
    policy.read(num_bytes=10**7, seconds=1.0)
    assert front(False, False, True, True) == 2
    assert front(*[False] * 2, True, *[False] * 20) == 23  # what is behind makes up for it
    assert front(True, True) == 0
    assert front(False, False, True, True, has_ends=False) == 0


def test_a_rate_that_was_bad_once_is_measured_again() -> None:
    policy = LoadPolicy(prefill_s=1e-3, byte_s=1e-9)
    policy.read(num_bytes=10**6, seconds=10.0)
    tries = [policy.loads(1000, 10**6, 0, 10**6) for _ in range(2 * RETRY_AFTER)]
    assert sum(tries) == 2
    policy.read(num_bytes=10**6, seconds=1e-3)
    while policy.disk_byte_s is not None and policy.disk_byte_s > 1e-6:
        policy.read(num_bytes=10**6, seconds=1e-3)
    assert policy.loads(10**4, 10**6, 0, 10**6)


def test_a_bad_rate_of_the_disk_is_measured_again_behind_a_front_on_the_host() -> None:
    policy = LoadPolicy(prefill_s=1e-3, byte_s=1e-9)
    policy.read(num_bytes=10**6, seconds=10.0)
    pieces = [LoadPiece(100 * (n + 1), 10**6, is_on_disk=n >= 2, is_end=True) for n in range(4)]
    tries = [policy.front(pieces, 0) for _ in range(2 * RETRY_AFTER)]
    assert sorted(set(tries)) == [2, 4]
    assert tries.count(4) == 2


def ask(host: HostTier, number: int, *, num_tokens: int = 4, num_slots: int = 1) -> bool:
    """Use a record, or add it; whether it was there. A record of several slots is a snapshot."""
    key = RecordKey(number.to_bytes(32, "big"), is_row=num_slots > 1)
    if host.get(key) is not None:
        host.use((key,))
        return True
    record = host.reserve(key, bytes(32), 4, num_tokens, num_slots)
    assert record is not None
    record.is_present = True
    return False


@pytest.mark.parametrize(("name", "num_kept"), [("lru", 0), ("arc", 4), ("value", 0)])
def test_a_scan_of_new_texts_evicts_what_was_used_again_unless_arc_keeps_it(name: str, num_kept: int) -> None:
    host = HostTier(8, 4, ORDERS[name](8))
    for number in (0, 1, 2, 3) * 2:
        ask(host, number)
    for number in range(100, 120):
        ask(host, number)
    assert sum(ask(host, number) for number in range(4)) == num_kept


def test_arc_learns_that_recent_records_return() -> None:
    """The list of records used again has all slots at first; hits on evicted keys enlarge the other list."""
    host = HostTier(4, 4, ORDERS["arc"](4))
    for number in (0, 1, 2, 3) * 2:
        ask(host, number)
    hits = [ask(host, number) for number in (10, 11, 10, 11, 12, 10, 11, 12)]
    assert hits == [False, False, False, False, False, True, True, True]


def test_a_snapshot_that_saves_few_tokens_a_byte_goes_before_older_blocks() -> None:
    found = {}
    for name in ORDERS:
        host = HostTier(12, 4, ORDERS[name](12))
        for number in range(3):
            ask(host, number)
        ask(host, 9, num_tokens=8, num_slots=8)  # one token a slot, where blocks save four
        ask(host, 3)
        ask(host, 4)
        found[name] = ask(host, 0)
    assert found == {"lru": False, "arc": False, "value": True}


@pytest.mark.parametrize("name", ORDERS)
def test_orders_have_each_record_once(name: str) -> None:
    random, host = np.random.default_rng(1), HostTier(16, 4, ORDERS[name](16))
    for number in random.integers(0, 30, 300).tolist():
        ask(host, number, num_tokens=4 * number + 4, num_slots=1 + 2 * (number % 5 == 0))
        assert host.num_used_slots == sum(len(record.slots) for record in host)
        order = host._order
        assert sorted(map(id, order)) == sorted(map(id, host))
    host.drop(next(iter(host)))
    assert sorted(map(id, host._order)) == sorted(map(id, host))
