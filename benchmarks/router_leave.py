"""CPU time of each call of a router, which keeps a front process from everything else, with a large map.

Collections of cyclic garbage are part of them, as ``hpu-duo serve`` sets the collector.

python -m benchmarks.router_leave --num-prompts 100000
"""

from __future__ import annotations

import argparse
import gc
from collections import defaultdict
from contextlib import nullcontext
from statistics import quantiles
from time import thread_time

from hpu_duo.fleet.routing import RoutedRequest, make_router
from hpu_duo.garbage import short_collections

REPLICAS = [str(number) for number in range(4)]


def main() -> None:
    """Print p50, p99 and the longest call of each kind, in milliseconds of CPU time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=100_000)
    parser.add_argument("--router", default="e2:capacity=1e9")
    parser.add_argument("--no-gc", action="store_true", help="without the collector of cyclic garbage")
    args = parser.parse_args()
    if args.no_gc:
        gc.disable()
    for kind in ("one namespace", "a namespace for each", "one system prompt"):
        with nullcontext() if args.no_gc else short_collections():
            taken = _serve(kind, args.router, args.num_prompts)
        figures = ", ".join(f"{what} {_summary(taken[what])}" for what in taken)
        print(f"{args.num_prompts:,} prompts, {kind}: p50/p99/longest in ms: {figures}", flush=True)


def _serve(kind: str, name: str, num_prompts: int) -> dict[str, list[float]]:
    """Serve half as many requests again as there are prompts; returns the milliseconds of the calls."""
    router, taken = make_router(name), defaultdict[str, list[float]](list)
    for replica in REPLICAS:
        router.join(replica)

    def timed(what: str, call, *given):  # type: ignore[no-untyped-def]
        begin = thread_time()
        found = call(*given)
        taken[what].append(1000 * (thread_time() - begin))
        return found

    for number in range(num_prompts * 3 // 2):
        own, now = number % num_prompts, number / 100
        tokens = [*range(300), own] if kind == "one system prompt" else [own, *range(300)]
        request = RoutedRequest.of_tokens(
            str(number), tokens, namespace=own if kind == "a namespace for each" else None
        )
        cached = 300.0 if kind == "one system prompt" and number % 1000 else 0.0
        chosen = timed("choose", router.choose, request, now)
        timed("dispatched", router.dispatched, request, chosen, now)
        timed("first_token", router.first_token, str(number), now)
        timed("finished", router.finished, str(number), now, 3, cached)
        if number == num_prompts:
            timed("leave", router.leave, REPLICAS[0])
            timed("join", router.join, REPLICAS[0], now)
    return taken


def _summary(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    cuts = quantiles(values, n=100)
    return f"{cuts[49]:.3f}/{cuts[98]:.3f}/{max(values):.2f}"


if __name__ == "__main__":
    main()
