"""The choice between loading a prefix from the host and computing it."""

from hpu_duo.kv.tiers.policy import RETRY_AFTER, LoadPolicy


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


def test_a_rate_that_was_bad_once_is_measured_again() -> None:
    policy = LoadPolicy(prefill_s=1e-3, byte_s=1e-9)
    policy.read(num_bytes=10**6, seconds=10.0)
    tries = [policy.loads(1000, 10**6, 0, 10**6) for _ in range(2 * RETRY_AFTER)]
    assert sum(tries) == 2
    policy.read(num_bytes=10**6, seconds=1e-3)
    while policy.disk_byte_s is not None and policy.disk_byte_s > 1e-6:
        policy.read(num_bytes=10**6, seconds=1e-3)
    assert policy.loads(10**4, 10**6, 0, 10**6)
