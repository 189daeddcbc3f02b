"""The longest that a router keeps a front process from everything else, with many prompts in its map.

python -m benchmarks.router_leave --num-prompts 100000
"""

from __future__ import annotations

import argparse
import gc
from time import thread_time

from hpu_duo.routing import RoutedRequest, make_router

REPLICAS = [str(number) for number in range(4)]


def main() -> None:
    """Print the longest call of each kind, in milliseconds of CPU time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=100_000)
    parser.add_argument("--router", default="e2:capacity=1e9")
    args = parser.parse_args()
    for kind in ("one namespace", "a namespace for each"):
        router, longest = make_router(args.router), dict[str, float]()
        for replica in REPLICAS:
            router.join(replica)
        gc.collect()
        gc.freeze()
        gc.disable()

        def timed(what: str, call, *given):  # type: ignore[no-untyped-def]
            begin = thread_time()
            found = call(*given)
            longest[what] = max(longest.get(what, 0.0), thread_time() - begin)  # noqa: B023
            return found

        for number in range(args.num_prompts * 3 // 2):
            tokens = [number % args.num_prompts, *range(300)]
            salt = number % args.num_prompts if kind == "a namespace for each" else None
            request = RoutedRequest.of_tokens(str(number), tokens, namespace=salt)
            chosen = timed("choose", router.choose, request, float(number))
            timed("dispatched", router.dispatched, request, chosen, float(number))
            timed("first_token", router.first_token, str(number), float(number))
            timed("finished", router.finished, str(number), float(number), 3, 0.0)
            if number == args.num_prompts:
                timed("leave", router.leave, REPLICAS[0])
                timed("join", router.join, REPLICAS[0], float(number))
        gc.enable()
        figures = ", ".join(f"{what} {1000 * seconds:.2f}" for what, seconds in longest.items())
        print(f"{args.num_prompts:,} prompts, {kind}: longest in ms: {figures}", flush=True)


if __name__ == "__main__":
    main()
