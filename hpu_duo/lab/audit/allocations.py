"""Measure the memory of torch's CPU allocator while a function runs."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_allocated_bytes(run: Callable[[], object]) -> int:
    """Return the peak of bytes allocated by ``run``, beyond those allocated before.

    Workspaces inside operators are included; memory that does not come from torch's allocator is not.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler.kineto_results
    events = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    live = peak = 0
    for _, num_bytes in sorted(events, key=lambda event: event[0]):
        live += num_bytes
        peak = max(peak, live)
    return peak
