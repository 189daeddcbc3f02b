"""The sorted queue against a list that is looked through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.scheduling.policy import SortedQueue

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["put", "put", "put", "discard", "refuse first", "refuse first", "refuse", "next step"]
        ),
        st.integers(0, 11),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(operations=OPERATIONS)
def test_the_first_accepted_item_is_that_of_a_list_looked_through(
    operations: list[tuple[str, int, int]],
) -> None:
    queue: SortedQueue[int, tuple[int, int]] = SortedQueue()
    keys: dict[int, tuple[int, int]] = {}
    refused: set[int] = set()
    step = 0
    for operation, item, rank in operations:
        if operation == "put":
            queue.put(item, (rank, item))
            keys[item] = (rank, item)
            refused.discard(item)
        elif operation == "discard":
            assert queue.discard(item) is (keys.pop(item, None) is not None)
        elif operation == "refuse":
            refused.add(item)
        elif operation == "next step":
            step += 1
            refused.clear()
        order = sorted(keys, key=keys.__getitem__)
        accepted = [each for each in order if each not in refused]
        assert list(queue.accepted(lambda each: each not in refused, step)) == accepted
        assert queue.first_accepted(lambda each: each not in refused, step) == next(iter(accepted), None)
        assert list(queue) == order
        assert len(queue) == len(order)
        assert (item in queue) is (item in keys)
        if order:
            assert (queue.first, queue.last, queue.least) == (order[0], order[-1], keys[order[0]])
        if operation == "refuse first" and accepted:
            refused.add(accepted[0])


@given(num=st.integers(1, 40))
def test_refusing_all_one_after_the_other_looks_at_each_three_times_at_most(num: int) -> None:
    queue: SortedQueue[int, int] = SortedQueue()
    for item in range(num):
        queue.put(item, item)
    looks, refused = 0, set[int]()

    def accepts(item: int) -> bool:
        nonlocal looks
        looks += 1
        return item not in refused

    while (item := queue.first_accepted(accepts, 0)) is not None:
        refused.add(item)
    assert len(refused) == num
    assert looks <= 3 * num
    assert queue.first_accepted(accepts, 0) is None
    assert looks <= 3 * num
    refused.clear()
    assert queue.first_accepted(accepts, 1) == 0
