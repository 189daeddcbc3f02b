"""The prefix cache's tier in host memory on a random model of the 110M class: with it and without, in turn.

    OMP_NUM_THREADS=1 python -m benchmarks.offload --out benchmarks/results/offload.md

Both engines have equally many blocks for requests, too few for what comes back, and are timed in turn, a few
requests at a time. Every number is a ratio of CPU time, without over with, so that above 1 the tier is
faster; CPU time has that of its threads. Another token in an answer is an error in float32, the
default of --dtype, here and in the next three.

    OMP_NUM_THREADS=1 python -m benchmarks.offload --storm LAYERS --policy mlfq:quantum=4 --answers short

Requests that are preempted, with swapping and without.

    OMP_NUM_THREADS=1 python -m benchmarks.offload --many-chats LAYERS

64 chats of 20 turns, with room for 8 on the device, for 32 on the host and for all on disk, beside two
requests that decode all the time. Without the tiers, only every fifth turn is served.

    OMP_NUM_THREADS=1 python -m benchmarks.offload --returning

A document of 8,192 tokens that comes back from the host and, page cache dropped, from the disk, also to an
engine in a new process; and its computation by an engine without tiers.

    OMP_NUM_THREADS=1 python -m benchmarks.offload --attention --out benchmarks/results/host-attention.md

Decodes behind a context on the host, which a throttled link separates from the device: attention there, and
moving the context, in turn, by the clock, beside what the formula predicts.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from benchmarks.cpu_systems import HEADS, LAYERS, make_checkpoint, seconds
from benchmarks.offload_returning import returning
from benchmarks.offload_storm import STORMS, storms
from benchmarks.prefix_cache import NUM_KV_HEADS, Tokens, run, same_tokens
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.engine.on_host.attention import TILE_BYTES, HostAttention
from hpu_duo.engine.on_host.choice import HostContextSizes, HostRates
from hpu_duo.engine.on_host.runner import HostRunner
from hpu_duo.engine.on_host.worker import TimedWorker, Worker, WorkerThread
from hpu_duo.kv.tiers.host_link import HostLink
from hpu_duo.modeling.loading import read_config
from hpu_duo.sampling import SamplingParams
from kernels_ref.unified import ElsewherePartials

BLOCK, SEQS, STEP = 128, 16, 2048
FREE = 96
"""Blocks for requests: 12,288 tokens."""
NUM_CHATS, NUM_TURNS = 16, 3
CHAT_TURNS, CHAT_ASKS, CHAT_NEW, CHAT_BLOCK = 20, 36, 4, 32
CHAT_COLUMNS = ("first token", "steps before it", "steps behind it")
CONTEXT, LINKS = 16_384, (1e9, 8e9, 32e9)

PIECE = 4
"""Requests of ``mixed`` that are served together, before the other engine has its turn."""


class Served(NamedTuple):
    """Requests that were served: seconds, and the tokens of their answers."""

    seconds: float
    answers: list[list[int]]

    @classmethod
    def of(cls, model: HPUDuoModel, prompts: list[list[int]], num_new: int) -> Served:
        """Serve prompts at once, and wait for copies, with which another engine would be timed otherwise."""
        answers = list[list[int]]()

        def serve() -> None:
            answers.extend(run(model, prompts, num_new))
            if isinstance(link := model.engine.runner.executor.link, HostLink):
                wait(set(link._flying.values()))

        return cls(seconds(serve), answers)


Work = Callable[[HPUDuoModel, Tokens], Iterable[Served]]


def documents(model: HPUDuoModel, tokens: Tokens) -> list[Served]:
    """First tokens of documents of 8,192 tokens, two in turn, when they come back."""
    texts = [tokens.draw(8192) for _ in range(2)]
    times = [Served.of(model, [[*text, *tokens.draw(16)]], 1) for text in texts * 2]
    return times[len(texts) :]


def chats(model: HPUDuoModel, tokens: Tokens) -> list[Served]:
    """Turns of 512 tokens and 16 sampled ones, of chats in turn, from the second turn on."""
    texts: list[list[int]] = [[] for _ in range(NUM_CHATS)]
    found = []
    for turn in range(NUM_TURNS):
        for text in texts:
            text += tokens.draw(512)
            served = Served.of(model, [text], 16)
            text += served.answers[0]
            if turn:
                found.append(served)
    return found


def mixed(model: HPUDuoModel, tokens: Tokens) -> Iterator[Served]:
    """Yield 32 requests of 64 to 1,024 tokens that share nothing, some at a time."""
    prompts = [tokens.draw(64 + 31 * number) for number in range(32)]
    for begin in range(0, len(prompts), PIECE):
        yield Served.of(model, prompts[begin : begin + PIECE], 32)


WORKS: dict[str, Work] = {
    "a document of 8,192 tokens comes back, to its first token": documents,
    f"{NUM_CHATS} chats of {NUM_TURNS} turns, room for 7 at the end, a turn": chats,
    "32 mixed requests that share nothing": mixed,
}


@dataclass
class ChatTimes:
    """CPU seconds.

    Attributes:
        first: to the first token of each turn.
        steps: of steps before it, in which other requests decode.
        decodes: of steps behind it.
    """

    first: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    decodes: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        """The line of the table, in milliseconds."""
        parts = (self.first, self.steps, self.decodes)
        cells = [f"{1e3 * np.percentile(each, at):.1f}" for each in parts for at in (50, 99)]
        return f"| {name} | {len(self.first):,} | {' | '.join(cells)} |"


class ChatEngine:
    """An engine that serves turns beside two requests that decode."""

    def __init__(self, model: HPUDuoModel) -> None:
        self.model, self._others, self._tokens = model, set[str](), Tokens("others", 0)

    def turn(self, text: list[int], times: ChatTimes) -> list[int]:
        """Serve a turn; returns its answer."""
        engine = self.model.engine
        while len(self._others) < 2:
            params = SamplingParams(temperature=0.0, max_tokens=450, ignore_eos=True)
            self._others.add(engine.add_request(self._tokens.draw(32), params))
            self._step()
        answer: list[int] = []
        own = engine.add_request(text, SamplingParams(temperature=0.0, max_tokens=CHAT_NEW, ignore_eos=True))
        taken = 0.0
        while len(answer) < CHAT_NEW:
            began = time.process_time()
            found = self._step(own)
            spent = time.process_time() - began
            taken += spent
            (times.decodes if answer else times.steps).append(spent)
            if found and not answer:
                times.first.append(taken)
            answer += found
        return answer

    def _step(self, own: str = "") -> list[int]:
        """Run a step; returns the new tokens of a request."""
        found: list[int] = []
        for each in self.model.engine.step():
            if each.request_id == own:
                found += each.token_ids
            elif each.finish_reason is not None:
                self._others.discard(each.request_id)
        return found


def many_chats(path: Path, folder: Path, dtype: str) -> str:
    """Serve the chats with the tiers, and of every fifth turn without; returns rows of a table."""
    layers, per_chat = read_config(path).num_hidden_layers, CHAT_TURNS * (CHAT_ASKS + CHAT_NEW) // CHAT_BLOCK
    blocks = 8 * per_chat + 2 * (482 // CHAT_BLOCK + 1)
    record = layers * NUM_KV_HEADS * 64 * 2 * (4 if dtype == "float32" else 2) * CHAT_BLOCK
    common = {
        "dtype": dtype,
        "block_size": CHAT_BLOCK,
        "max_num_seqs": 4,
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "graphs": "replay",
    }
    tiered = ChatEngine(
        HPUDuoModel.from_pretrained(
            path,
            num_blocks=blocks + 32,  # of which 32 are reserved
            kv_offloading_blocks_per_step=16,
            kv_offloading_size=32 * per_chat * record / 2**30,
            kv_offloading_disk=folder,
            kv_offloading_disk_size=1.0,
            **common,
        )
    )
    plain = ChatEngine(HPUDuoModel.from_pretrained(path, num_blocks=blocks, **common))
    assert tiered.model.stats().total_blocks == plain.model.stats().total_blocks
    for engine in (tiered, plain):
        engine.model.warmup()
        engine.turn(Tokens("warm", 0).draw(CHAT_BLOCK), ChatTimes())
    texts: list[list[int]] = [[] for _ in range(64)]
    tokens, random = Tokens("chats", 0), np.random.default_rng(0)
    times, some, without = ChatTimes(), ChatTimes(), ChatTimes()
    num_tokens = num_same = 0
    for turn in range(1, CHAT_TURNS + 1):
        order = random.permutation(len(texts))
        for chat in order:
            text = texts[chat]
            text += tokens.draw(CHAT_ASKS)
            num_tokens += len(text)
            prompt = list(text)
            text += (answer := tiered.turn(prompt, some if not turn % 5 else times))
            if not turn % 5:
                num_same += same_tokens([answer], [plain.turn(prompt, without)], dtype)
    stats = tiered.model.stats()
    assert stats.offload is not None
    assert stats.offload.disk is not None
    assert stats.prefixes is not None
    hits, loaded = stats.prefixes.num_hit_tokens, stats.offload.num_hit_tokens
    from_disk = stats.offload.disk.counters.num_hit_tokens
    columns = (f"{name}, p{at}" for name in CHAT_COLUMNS for at in (50, 99))
    return "\n".join(
        (
            f"| engine | turns | {' | '.join(columns)} |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            some.row("tiers, turns 5, 10, 15 and 20"),
            without.row("no tiers, the same turns"),
            times.row("tiers, the other turns"),
            "",
            f"Of {num_tokens:,} prompt tokens {hits:,} hit: {hits - loaded:,} on the device, "
            f"{loaded - from_disk:,} on the host, {from_disk:,} on disk. {num_same} answers of both are "
            f"the same. {stats.offload}",
        )
    )


def timed_attention(host: HostAttention) -> list[float]:
    """Add seconds of attention on the host, from begin to result, to the number that is returned."""
    begin_part, spent = host.begin_part, [0.0]

    def timed_part(*args: Any) -> Callable[[], ElsewherePartials] | None:
        began, join = time.perf_counter(), begin_part(*args)

        def joined() -> ElsewherePartials:
            assert join is not None
            result = join()
            spent[0] += time.perf_counter() - began
            return result

        return None if join is None else joined

    setattr(host, "begin_part", timed_part)  # noqa: B010
    return spent


def attention_on_host(path: Path, rounds: int) -> str:
    """Decode behind a context on the host, both ways in turn; returns the page."""
    model = HPUDuoModel.from_pretrained(
        path,
        num_blocks=STEP // BLOCK + 4,
        max_num_seqs=1,
        max_model_len=CONTEXT + 2048,
        max_num_batched_tokens=STEP,
        enable_prefix_caching=False,
        cpu_attention=1.0,
        cpu_attention_mode="attend",
    )
    engine, runner, tokens = model.engine, model.engine.runner, Tokens("host", 0)
    assert isinstance(runner, HostRunner)
    host, text = runner.host, read_config(path)
    engine.add_request(
        tokens.draw(CONTEXT), SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
    )
    for _ in range(CONTEXT // STEP):
        engine.step()
    spent = timed_attention(host)

    def decode(worker: Worker, *, moves: bool) -> list[tuple[float, float]]:
        """Seconds of attention in all layers, and of the whole step, of some decodes."""
        host.worker, host.moves_decodes = worker, moves
        times = []
        for _ in range(6):
            spent[0], began = 0.0, time.perf_counter()
            engine.step()
            times.append((spent[0], time.perf_counter() - began))
        return times[1:]

    timed = TimedWorker(WorkerThread())
    found = {(link, moves): list[tuple[float, float]]() for link in LINKS for moves in (False, True)}
    for _ in range(rounds):
        for moves in (False, True):
            decode(timed, moves=moves)
        for (link, moves), times in found.items():
            times += decode(WorkerThread(link), moves=moves)
    rates = [each[0] / each[1] for each in (timed.host, timed.device, timed.link)]
    [request] = engine.scheduler._running
    held = len(request.host_blocks) * host.num_bytes / (host.num_blocks + 1)
    heads, dim = text.num_attention_heads, text.hidden_size // text.num_attention_heads
    of_layer = held / text.num_hidden_layers
    sizes = HostContextSizes.of(1, heads, dim, of_layer, math.ceil(of_layer / TILE_BYTES))
    lines = []
    for link in LINKS:
        there, moved = (np.median(found[link, moves], axis=0) for moves in (False, True))
        reached = min(link, rates[2])
        given = HostRates(reached, rates[0], rates[1])
        predicted = np.array([sizes.attended(given), sizes.moved(given)])
        predicted *= text.num_hidden_layers
        cells = f"{1e3 * there[0]:.1f} | {1e3 * predicted[0]:.1f} | {1e3 * moved[0]:.1f}"
        ratios = f"{moved[0] / there[0]:.2f} | {predicted[1] / predicted[0]:.2f} | {moved[1] / there[1]:.2f}"
        lines.append(f"| {link / 1e9:g} | {cells} | {1e3 * predicted[1]:.1f} | {ratios} |")
    tokens_there = len(request.host_blocks) * BLOCK
    return attention_page(rounds, text, (tokens_there, held), sizes, rates, lines)


def attention_page(
    rounds: int,
    text: Any,
    there: tuple[int, float],
    sizes: HostContextSizes,
    rates: list[float],
    lines: list[str],
) -> str:
    """Return the page of ``attention_on_host``.

    Args:
        text: configuration of the model.
        there: tokens on the host, and bytes of all layers.
        rates: bytes that the host attends to, the device attends to, and are copied, a second.
    """
    heads, dim = text.num_attention_heads, text.hidden_size // text.num_attention_heads
    return "\n".join(
        (
            "# Attention on the host, and moving the context",
            "",
            f"`python -m benchmarks.offload --attention --rounds {rounds}`, {date.today()}; "
            f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}, "
            f"{torch.get_num_threads()} thread for the device and one for the host.",
            "",
            f"Llama of {text.num_hidden_layers} layers, {heads} query and {heads} KV heads of size {dim}, "
            f"in bfloat16. One row decodes behind {CONTEXT:,} tokens, of which "
            f"{there[0]:,} lie on the host, {there[1] / 1e6:.0f} MB. A decode moves "
            f"{sizes.queries:,.0f} bytes of queries and {sizes.triples:,.0f} of triples a layer. Without a "
            f"link the host attends to {rates[0] / 1e9:.1f} GB/s, tiles are copied at {rates[2] / 1e9:.1f} "
            f"GB/s, which bounds the link, and the device attends to {rates[1] / 1e9:.1f} GB/s of them; the "
            "formula is given these rates. Milliseconds of attention in all layers of a "
            "decode, medians; variants were measured in turn.",
            "",
            "| link, GB/s | on the host | predicted | moved | predicted | moved : on the host | predicted | "
            "whole decode, moved : on the host |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *lines,
            "",
        )
    )


def main() -> None:
    """Run the workloads, and print a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--storm",
        type=int,
        metavar="LAYERS",
        help="only compare swapping with recomputing, on a model of so many layers",
    )
    parser.add_argument("--answers", choices=STORMS, default="long", help="of the requests of --storm")
    parser.add_argument("--policy", help="of --storm; mlfq with the quantum of --answers by default")
    dtypes = ("float32", "bfloat16")
    parser.add_argument(
        "--dtype",
        choices=dtypes,
        default=dtypes[0],
        help="of the models; --returning and --attention choose their own",
    )
    parser.add_argument("--requests", type=int, help="of --storm; as many as --answers has by default")
    parser.add_argument("--returning", action="store_true", help="only a document from host and disk")
    parser.add_argument("--many-chats", type=int, metavar="LAYERS", help="only 64 chats of 20 turns")
    parser.add_argument("--work", choices=range(len(WORKS)), type=int, help="only one of the workloads")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model of the workloads")
    parser.add_argument(
        "--attention", action="store_true", help="only attention on the host beside moving the context"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sparsity", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if given.storm:
            path, kind = make_checkpoint(Path(directory), NUM_KV_HEADS, given.storm), STORMS[given.answers]
            kind = kind._replace(num_requests=given.requests or kind.num_requests)
            storms(path, kind, given.policy or f"mlfq:quantum={kind.quantum}", given.dtype)
            return
        if given.returning:
            path = make_checkpoint(Path(directory), NUM_KV_HEADS, given.layers)
            print(returning(path, Path(directory) / "kv", given.rounds))
            return
        if given.many_chats:
            path = make_checkpoint(Path(directory), NUM_KV_HEADS, given.many_chats)
            print(many_chats(path, Path(directory) / "kv", given.dtype))
            return
        if given.attention:
            page = attention_on_host(make_checkpoint(Path(directory), HEADS, 4), given.rounds)
        else:
            path = make_checkpoint(Path(directory), NUM_KV_HEADS, given.layers)
            works = WORKS if given.work is None else dict([list(WORKS.items())[given.work]])
            page = measure(path, given.rounds, given.sparsity, works, given.dtype)
    print(page)
    if given.out is not None:
        given.out.write_text(page)


def pairs(first: Iterable[Served], second: Iterable[Served]) -> Iterator[tuple[Served, Served]]:
    """Yield the same work of two engines; which of them is first changes from time to time."""
    one, other = iter(first), iter(second)
    while (taken := next(one, None)) is not None:
        yield taken, next(other)
        if (taken := next(other, None)) is not None:
            yield next(one), taken


def measure(path: Path, rounds: int, sparsity: float, works: dict[str, Work], dtype: str) -> str:
    """Serve each workload by both engines in turn; returns the page."""
    layers = read_config(path).num_hidden_layers
    pattern = HeadPattern.random(layers, NUM_KV_HEADS, 0, sink=64, recent=256) if sparsity else None
    heads = {"pattern": pattern, "sparsity": sparsity} if sparsity else {}
    common = {
        "max_num_seqs": SEQS,
        "max_model_len": 12_000,
        "max_num_batched_tokens": STEP,
        "graphs": "replay",
        "dtype": dtype,
    }
    plain = HPUDuoModel.from_pretrained(
        path, num_blocks=FREE, **({"num_prefix_snapshots": 16} if heads else {}), **common
    )
    # Of 128 blocks, and of 20 snapshots, 32 and 4 are reserved.
    tiered = HPUDuoModel.from_pretrained(
        path,
        num_blocks=FREE + 32,
        kv_offloading_size=4.0,
        **({"num_prefix_snapshots": 20} if heads else {}),
        **common,
    )
    lines, num_served, num_same = [], 0, 0
    for name, work in works.items():
        ratios, rounds_found = list[float](), list[float]()
        for number in range(rounds + 1):
            found = list(pairs(work(tiered, Tokens(name, number)), work(plain, Tokens(name, number))))
            num_served += sum(len(each.answers) for each, _ in found)
            num_same += sum(same_tokens(one.answers, other.answers, dtype) for one, other in found)
            ratio = sum(each[1].seconds for each in found) / sum(each[0].seconds for each in found)
            print(f"round {number}: {ratio:.3f}", flush=True)
            if number:
                ratios += [without.seconds / with_tier.seconds for with_tier, without in found]
                rounds_found.append(ratio)
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        of_rounds = ", ".join(f"{each:.3f}" for each in rounds_found)
        lines.append(f"| {name} | {middle:.2f} | {low:.2f}-{high:.2f} | {of_rounds} |")
        print(lines[-1], tiered.stats().offload, flush=True)
    offload = tiered.stats().offload
    assert offload is not None
    rates = [
        num_bytes / took / 1e9 if took else 0.0
        for num_bytes, took in (
            (offload.stored_bytes, offload.stored_s),
            (offload.loaded_bytes, offload.loaded_s),
        )
    ]
    return "\n".join(
        (
            "# The tier of the prefix cache in host memory, on a CPU",
            "",
            f"`python -m benchmarks.offload --rounds {rounds} --sparsity {sparsity:g}`, {date.today()}; "
            f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}, "
            f"{torch.get_num_threads()} thread.",
            "",
            f"Llama of the 110M class with {layers} layers, random weights in {dtype}, {sparsity:.0%} of "
            "the heads streaming. "
            f"Both engines have {FREE} blocks of {BLOCK} tokens for requests. Ratios of CPU time, without "
            f"over with the tier: median, and range. {num_same} of {num_served} answers had the same tokens.",
            "",
            "| work | without : with | range | sums of each round |",
            "| --- | --- | --- | --- |",
            *lines,
            "",
            f"{offload.num_stored:,} records were stored at {rates[0]:.1f} GB/s, and {offload.num_loaded:,} "
            f"loaded at {rates[1]:.1f} GB/s, beside steps; {offload.num_busy:,} were lost.",
            "",
        )
    )


if __name__ == "__main__":
    main()
