"""Cores are dealt out evenly, and no process has cores of two nodes."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.device import run_processes
from hpu_duo.device.processes import read_list, shares
from hpu_duo.startup.ranks import OwnLaunch
from tests.device.work import cores_of


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 16), st.randoms(use_true_random=False))
def test_shares_are_equal_disjoint_and_of_one_node(
    num_nodes: int, per_node: int, num_processes: int, rng: object
) -> None:
    nodes = [range(node * per_node, (node + 1) * per_node) for node in range(num_nodes)]
    cores = set(range(num_nodes * per_node))
    found = shares(cores, nodes, num_processes)
    assert len(found) == num_processes
    assert all(found)
    if found[0] == cores:
        return
    assert len({len(share) for share in found}) == 1
    assert sum(map(len, found)) == len(set().union(*found))
    for share in found:
        assert any(share <= set(node) for node in nodes)


def test_eight_cards_of_two_nodes_take_four_a_node() -> None:
    nodes = [[*range(0, 16), *range(32, 48)], [*range(16, 32), *range(48, 64)]]
    found = shares(range(64), nodes, 8)
    assert [min(share) for share in found] == [0, 8, 32, 40, 16, 24, 48, 56]
    assert all(len(share) == 8 for share in found)


def test_fewer_cores_than_processes_are_shared_by_all() -> None:
    assert shares({3, 4}, [[0, 1, 2, 3, 4]], 3) == [{3, 4}] * 3


def test_a_container_with_cores_of_one_node_uses_that_node() -> None:
    assert shares({4, 5, 6, 7}, [range(4), range(4, 8)], 2) == [{4, 5}, {6, 7}]


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8\n", [0, 1, 2, 3, 8]), ("5", [5]), ("\n", [])])
def test_lists_of_the_kernel(text: str, numbers: list[int]) -> None:
    assert read_list(text) == numbers


@pytest.mark.slow
def test_processes_run_where_they_are_bound() -> None:
    own = sorted(os.sched_getaffinity(0))
    wanted = [{own[0]}, {own[-1]}]
    assert run_processes(cores_of, (), [{}, {}], cores=wanted) == [sorted(cores) for cores in wanted]


def test_the_rank_that_serves_is_bound_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    wanted = [{min(before)}, {max(before)}]
    monkeypatch.setattr("hpu_duo.startup.ranks.cores_by_device", lambda kind, size: wanted[:size])
    launch = OwnLaunch("cpu", 2, cores_of, ())
    try:
        assert os.sched_getaffinity(0) == wanted[0]
    finally:
        launch.close()
    assert os.sched_getaffinity(0) == before
