"""A document that comes back from each tier; see ``benchmarks.offload --returning``."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.prefix_cache import Tokens, same_tokens
from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams


class Returned(NamedTuple):
    """A document that was served.

    Attributes:
        place: that its blocks came from.
        cpu, clock: seconds to its first token.
        num_hits: its tokens that were cached.
        tokens: further ones, of the same call.
    """

    place: str
    cpu: float
    clock: float
    num_hits: int
    tokens: list[int]


def serve_document(model: HPUDuoModel, place: str, text: list[int]) -> Returned:
    """Serve a document and 8 tokens behind it."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    before, began = time.process_time(), time.perf_counter()
    engine, found, first = model.engine, list[int](), (0.0, 0.0)
    own = engine.add_request(text, params)
    while len(found) < 8:
        for each in engine.step():
            if each.request_id == own:
                found += each.token_ids
        if found and not first[0]:
            first = time.process_time() - before, time.perf_counter() - began
    return Returned(place, *first, num_hits=0, tokens=found)


def serve_documents(
    path: Path, folder: Path | None, turns: Sequence[tuple[str, list[int]]]
) -> list[Returned]:
    """Serve documents in a process of its own; a folder is the tier on disk.

    Between two of them the device evicts all, and the host too where the next one comes from the disk.
    """
    common = {"max_model_len": 9_000, "max_num_seqs": 2, "max_num_batched_tokens": 2048, "graphs": "replay"}
    disk = {"kv_offloading_disk": folder, "kv_offloading_disk_size": 4.0, "kv_offloading_size": 2.0}
    tiers = {} if folder is None else {**disk, "kv_offloading_write_policy": "write_through"}
    model = HPUDuoModel.from_pretrained(path, num_blocks=128, **tiers, **common)
    model.warmup()
    allocations = model.engine.scheduler.allocations
    assert allocations.prefixes is not None
    found = []
    for place, text in turns:
        if folder is not None:
            while model.engine.settle_idle():
                pass
            allocations.prefixes.evict(allocations.blocks.num_idle, is_stored=False)
            if place.startswith("disk"):
                host = allocations.tiers.host
                for record in tuple(host):
                    host.drop(record, is_evicted=True)
                drop_page_cache(folder)
        before = model.stats().prefixes.num_hit_tokens
        served = serve_document(model, place, text)
        found.append(served._replace(num_hits=model.stats().prefixes.num_hit_tokens - before))
    while folder is not None and model.engine.settle_idle():
        pass
    return found


def drop_page_cache(folder: Path) -> None:
    """Make the system read files of a folder from the disk next time."""
    for path in folder.rglob("*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def returning(path: Path, folder: Path, rounds: int) -> str:
    """Serve a document from each place; returns rows of a table.

    Raises:
        ValueError: an answer has other tokens than that of an engine without tiers.
    """
    lines = [
        "| round | document | first token, CPU s | by the clock, s | cached tokens |",
        "| --- | --- | --- | --- | --- |",
    ]
    spawn = multiprocessing.get_context("spawn")
    for number in range(rounds):
        tokens = Tokens("returning", number)
        text = tokens.draw(8192)
        asks = [[*text, *tokens.draw(16)] for _ in range(4)]
        places = ("computed, with tiers", "host", "disk, page cache dropped", "disk, after a restart")
        turns, found = list(zip(places, asks)), list[Returned]()
        plain = [
            ("computed, without tiers" if not place else "device", ask) for place, ask in enumerate(asks)
        ]
        for of_folder, each in ((folder, turns[:3]), (folder, turns[3:]), (None, plain)):
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                found += process.submit(serve_documents, path, of_folder, each).result()
        same_tokens(*([each.tokens for each in some] for some in (found[: len(turns)], found[len(turns) :])))
        for each in found[: len(turns) + 1]:
            cells = f"{each.cpu:.2f} | {each.clock:.2f} | {each.num_hits:,} of {len(asks[0]):,}"
            lines.append(f"| {number + 1} | {each.place} | {cells} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)
