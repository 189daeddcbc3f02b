"""Choose the limits of a deployment by the cost model behind ``hpu-duo capacity``, and say why.

Prints ``NAME=value`` lines and, as comments, the reasons. The longest request is the longest length, the
model's own or a half of it again and again, of which ``--long-num-seqs`` requests fit at the same time. As
many requests run as fit of ``--typical-len`` tokens each. Blocks are those that fit beside them, or fewer
where fewer can be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from hpu_duo.heads import HeadPattern
from hpu_duo.modeling.hub import find_checkpoint, is_id, split_revision
from hpu_duo.planning import Deployment, Serving, find_hardware
from hpu_duo.planning.kv_formats import parse_kv_format
from hpu_duo.planning.read_model import read_model

_GIB = 1 << 30
_SHORTEST = 512


def main() -> int:
    """Print the limits; returns 2 with a sentence where nothing fits."""
    asked = _parse(sys.argv[1:])
    try:
        print("\n".join(choose(asked)))
    except (ValueError, OSError) as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2
    return 0


def choose(asked: argparse.Namespace) -> list[str]:
    """The lines to print.

    Raises:
        ValueError: the model cannot be read, or what is asked for does not fit.
    """
    size = read_model(_directory(asked.model))
    pattern = None if asked.pattern is None else HeadPattern.load(asked.pattern)
    serving = Serving(
        find_hardware(asked.hardware),
        num_devices=asked.num_devices,
        retrieval_parallel=asked.retrieval_parallel,
        block_size=asked.block_size,
        max_num_seqs=asked.most_num_seqs,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        device_memory_utilization=asked.device_memory_utilization,
        pattern=pattern,
        enable_prefix_caching=asked.keeps_prefixes,
        sink=Serving.sink if pattern is None else pattern.sink,
        recent=Serving.recent if pattern is None else pattern.recent,
    )

    def served(length: int) -> Deployment:
        return Deployment(size, serving, asked.sparsity, parse_kv_format(asked.kv_cache_dtype), length)

    title = f"{'one' if asked.num_devices == 1 else asked.num_devices} {serving.hardware.title}"
    length, why = _longest(served, size.max_positions, asked, title)
    deployment = served(length)
    typical = min(asked.typical_len, length)
    fitting = deployment.count_requests(typical)
    fit = f"{fitting:,} requests of {typical:,} tokens fit"
    if asked.max_num_seqs is None:
        num_seqs = max(1, min(asked.most_num_seqs, fitting))
        why_seqs = f"{fit}, and MOST_NUM_SEQS is {asked.most_num_seqs}"
    else:
        num_seqs, why_seqs = asked.max_num_seqs, f"as asked for; {fit}"
    blocks, why_blocks = _blocks(deployment, num_seqs, length, asked)
    shared, why_shared = _sharing(deployment, length)
    speed = deployment.decode_tokens_per_s(min(num_seqs, max(1, fitting)), typical)
    return [
        f"# {size.name} on {title}: {deployment.kv_bytes / _GIB:.1f} GiB for keys and values, computed",
        f"# MAX_MODEL_LEN={length}: {why}",
        f"# MAX_NUM_SEQS={num_seqs}: {why_seqs}",
        f"# NUM_BLOCKS={blocks}: {why_blocks}",
        *(f"# {why}" for why in why_shared),
        f"# predicted, measured by nobody: {speed.low:,.0f} to {speed.high:,.0f} tokens/s while they decode",
        f"MAX_MODEL_LEN={length}",
        f"MAX_NUM_SEQS={num_seqs}",
        f"NUM_BLOCKS={blocks}",
        f"RETRIEVAL_PARALLEL={shared}",
    ]


def _sharing(deployment: Deployment, length: int) -> tuple[str, list[str]]:
    """The value of RETRIEVAL_PARALLEL, and the sentences that explain it."""
    choice, chosen = deployment.choice, deployment.serving.retrieval_parallel
    said = [] if choice is None else [f"RETRIEVAL_PARALLEL={chosen}: {choice}"]
    if deployment.serving.num_devices > 1 and deployment.num_promoted:
        said.append(
            f"warning: {deployment.num_promoted:,} promoted heads take "
            f"{deployment.promoted_bytes(length) / _GIB:.2f} GiB of each request of {length:,} tokens beyond "
            "what they would take while they stream; RETRIEVAL_PARALLEL=auto avoids that where it can"
        )
    return chosen, said


def _longest(
    served: Callable[[int], Deployment], most: int, asked: argparse.Namespace, title: str
) -> tuple[int, str]:
    if asked.max_model_len is not None:
        fitting = served(asked.max_model_len).count_requests(asked.max_model_len)
        if not fitting:
            raise ValueError(
                f"not one request of MAX_MODEL_LEN={asked.max_model_len} tokens fits on {title}: take a "
                "shorter one, leave it out, or let heads stream with PATTERN and SPARSITY"
            )
        return asked.max_model_len, f"as asked for; {fitting:,} such requests fit"
    length, refused = most, ""
    while length >= min(_SHORTEST, most):
        fitting = served(length).count_requests(length)
        if fitting >= asked.long_num_seqs:
            limit = (
                "all that the model serves"
                if length == most
                else "the longest that fits, halving from the model's own"
            )
            return length, f"{limit}; {fitting:,} such requests fit{refused}"
        refused = f", and of {length:,} tokens {fitting:,}, where LONG_NUM_SEQS is {asked.long_num_seqs}"
        length //= 2
    raise ValueError(
        f"not even {asked.long_num_seqs} requests of {length * 2:,} tokens fit on {title}: take a smaller "
        "model, lower LONG_NUM_SEQS, or let heads stream with PATTERN and SPARSITY"
    )


def _blocks(deployment: Deployment, num_seqs: int, length: int, asked: argparse.Namespace) -> tuple[int, str]:
    if asked.num_blocks is not None:
        return asked.num_blocks, "as asked for"
    # Where cards share the tokens of retrieval heads, a block has a part on each of them.
    fitting, each = deployment.count_blocks(num_seqs), -(-length // deployment.serving.engine_block_size)
    useful = num_seqs * each
    if fitting < each:
        raise ValueError(
            f"{num_seqs} requests leave room for {fitting} blocks, one of {length:,} tokens takes {each}: "
            "lower MAX_NUM_SEQS or MAX_MODEL_LEN"
        )
    if useful <= fitting and not asked.keeps_prefixes:
        return useful, f"all that {num_seqs} such requests can use; {fitting:,} would fit"
    return (
        fitting,
        f"what fits beside the weights and graphs; {num_seqs} requests of full length could use {useful:,}",
    )


def _directory(model: str) -> Path:
    path = Path(model)
    name, revision = split_revision(model)
    if path.is_absolute() or path.exists() or not is_id(name):
        return path
    return find_checkpoint(name, revision, needs_weights=False)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--pattern", type=Path)
    # No defaults: those of a deployment stand in settings.sh.
    parser.add_argument("--kv-cache-dtype", required=True)
    parser.add_argument("--retrieval-parallel", required=True)
    for name in ("sparsity", "device-memory-utilization"):
        parser.add_argument(f"--{name}", type=float, required=True)
    for name in (
        "num-devices",
        "block-size",
        "max-num-batched-tokens",
        "typical-len",
        "long-num-seqs",
        "most-num-seqs",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--keeps-prefixes", action="store_true")
    for name in ("max-model-len", "max-num-seqs", "num-blocks"):
        parser.add_argument(f"--{name}", type=int)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
