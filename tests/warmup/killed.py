"""``python -m tests.warmup.killed``: a warm-up that kills its own process, or is resumed and serves.

Arguments: directory of the model, manifest, and optionally a number of graphs after which it kills itself, or
"unserved" for a warm-up of two graphs only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from torch._dynamo.utils import counters

from graphs import BucketTable
from graphs.manifest import GraphRecord
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, tokens_of
from tests.modeling.families import prompts_of

TABLE = BucketTable.from_strings(["csu/q16/s30/u48/l4", "--u/q4/s0/u48/l4", "c--/q16/s0/u0/l4"])
TABLE_OF_TWO = BucketTable(tuple(TABLE)[1:])
PROMPTS = prompts_of([1, 7, 20], seed=3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def main() -> None:
    """Warm up until the process is killed, or print what was captured now and what a server finds."""
    tiny, manifest = Tiny(Path(sys.argv[1]), None), Path(sys.argv[2])

    def progress(done: int, total: int, record: GraphRecord) -> None:
        if sys.argv[3:] == [str(done)]:
            os.kill(os.getpid(), signal.SIGKILL)

    buckets = TABLE_OF_TWO if sys.argv[3:] == ["unserved"] else TABLE
    first = tiny.load(graphs="compile", pattern=PATTERN, buckets=buckets)
    report = first.warmup(progress, manifest=manifest, resume=True)
    num_misses = counters["inductor"]["fxgraph_cache_miss"]
    if sys.argv[3:] == ["unserved"]:
        print(json.dumps({"misses": num_misses}))
        return
    counters["inductor"].clear()
    served = tiny.load(graphs="compile", pattern=PATTERN, buckets=manifest)
    num_served = served.warmup().num_captured
    tokens = tokens_of(served.engine.generate(PROMPTS, GREEDY))
    late = served.engine.runner.graphs.counters.late_captures
    found = {
        "captured": [str(record.shape) for record in report.records],
        "misses": num_misses,
        "num_skipped": report.num_skipped,
        "served": [num_served, counters["inductor"]["fxgraph_cache_miss"], late],
        "tokens": tokens,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
