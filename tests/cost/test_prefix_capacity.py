"""Capacity counts what cached prefixes keep of rings."""

from tests.cost.test_capacity import report


def test_rings_of_cached_prefixes_take_room_from_requests() -> None:
    """As many snapshots as requests run, and no slot more in any ring; none without rings."""
    cold, warm = (report(enable_prefix_caching=cached).points[0] for cached in (False, True))
    assert warm.bytes_per_request == cold.bytes_per_request
    assert warm.num_requests < cold.num_requests
    assert report(num_prefix_snapshots=0).points[0].num_requests > warm.num_requests
    full = (report(0.0, enable_prefix_caching=cached).points for cached in (False, True))
    assert next(full) == next(full)
