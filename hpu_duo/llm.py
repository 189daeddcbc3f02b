"""``HPUDuoModel``: load a checkpoint and generate, with the interface of transformers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from graphs import BucketTable, CaptureBackend, MissPolicy
from graphs.bucket_file import ShapeRecorder
from graphs.manifest import read_manifest
from hpu_duo.config.engine import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    HeadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from hpu_duo.context import ContextModel
from hpu_duo.engine.outputs import ContinuationScore
from hpu_duo.engine.stats import EngineStats
from hpu_duo.generation import as_eos_ids
from hpu_duo.modeling.hub import find_checkpoint
from hpu_duo.modeling.loading import choose_dtype, load_tokenizer, read_config, read_generation_config
from hpu_duo.modeling.loading_arguments import LoadingArguments
from hpu_duo.not_picklable import NotPicklable
from hpu_duo.startup.assembly import assemble
from hpu_duo.startup.recorded_steps import StepRecorder, origin_of
from hpu_duo.startup.sharding import settled
from hpu_duo.startup.warm_up import GivenBuckets, Progress, WarmUp, WarmUpReport, parse_phases
from hpu_duo.startup.warm_up_estimate import WarmUpBudget, configuration_of

if TYPE_CHECKING:
    from hpu_duo.config.kv_plan import KVPlan
    from hpu_duo.heads import HeadPattern


class HPUDuoModel(ContextModel, NotPicklable):
    """A checkpoint, loaded and ready to generate.

    Threads may share it: one lock orders their steps, each step serves the requests of all of them, and each
    call gets its own outputs. Streamers and callbacks may call it too.

    Attributes:
        engine_config: the arguments of ``from_pretrained``, checked.
    """

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        pattern: HeadPattern | str | Path | None = None,
        sparsity: float | None = None,
        threshold: float | None = None,
        sink: int | None = None,
        recent: int | None = None,
        max_layer_kinds: int | None = None,
        tie_break: Literal["stable", "reference"] = "stable",
        balance: Literal["global", "per_layer"] = "global",
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        torch_dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        attention: str = "auto",
        softmax: str = "exact",
        score_bytes: int = ModelConfig.score_bytes,
        pack_weights: bool | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = SchedulerConfig.max_num_seqs,
        max_num_batched_tokens: int = SchedulerConfig.max_num_batched_tokens,
        max_chunk_rows: int = SchedulerConfig.max_chunk_rows,
        trim_chunks: bool = False,
        decode_len: int = SchedulerConfig.decode_len,
        scheduling_policy: str = SchedulerConfig.scheduling_policy,
        ranker: str | Path | None = None,
        block_size: int = CacheConfig.block_size,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        enable_prefix_caching: bool = CacheConfig.enable_prefix_caching,
        num_prefix_snapshots: int | None = None,
        device_memory_utilization: float = CacheConfig.device_memory_utilization,
        kv_policy: str | None = None,
        kv_budget: float | None = None,
        kv_plan: KVPlan | str | Path | None = None,
        kv_prompt: str = CacheConfig.kv_prompt,
        kv_chunk: int | None = None,
        attention_rule: str | None = None,
        max_ring_window: int | None = None,
        graphs: str | CaptureBackend = "default",
        buckets: BucketTable | str | Path | None = None,
        on_miss: str = "error",
        max_captured_tokens: int | None = None,
        graph_memory_bytes: int | None = None,
        fail_on_recompile: bool = False,
        tensor_parallel_size: int = ParallelConfig.tensor_parallel_size,
        expert_parallel: bool = ParallelConfig.expert_parallel,
        retrieval_parallel: str = ParallelConfig.retrieval_parallel,
        retrieval_parallel_context: int | None = None,
        rank_timeout_s: float = ParallelConfig.timeout_s,
        rank_launcher: str = ParallelConfig.launcher,
        record_shapes: str | Path | None = None,
        record_steps: str | Path | None = None,
        seed: int = 0,
        **elsewhere: Any,
    ) -> HPUDuoModel:
        """Load any decoder-only transformers checkpoint, from a directory or from the hub.

        Args:
            path: directory with config.json, safetensors and, for text, a tokenizer; or the id of such a
                model on the Hugging Face hub, which is downloaded to its cache, with its token.
            pattern: a ``HeadPattern``, a directory in DuoAttention's published format, or None: all heads
                retrieve.
            sparsity, threshold: cut of the pattern's scores; one of the two.
            sink, recent: window of the streaming heads instead of the pattern's own.
            max_layer_kinds: most kinds of layers that the pattern may make; see ``HeadConfig``. None = 4 on
                HPU, no bound elsewhere.
            tie_break, balance: see ``HeadPattern.binarise``.
            device: "auto", "cpu", "cuda", "hpu" or "hpu-sim" (see ``hpu_duo.lab.sim``).
            dtype, torch_dtype: "auto", "float32", "bfloat16", "float16" or a short name such as "bf16".
            revision: branch, tag or commit of a model of the hub.
            trust_remote_code: False; code of a checkpoint is never run.
            attention: "auto", "reference", "sdpa", "triton" or "hpu".
            softmax, pack_weights, score_bytes: see ``ModelConfig``.
            max_model_len: tokens of prompt and output; None = what model and cache hold. Rotary frequencies
                that depend on a text's length are those of this length.
            attention_rule, max_ring_window: see ``HeadConfig``; others up to ``ranker``: see
                ``SchedulerConfig``; from ``block_size`` to ``kv_chunk``: see ``CacheConfig``.
            graphs: "eager", "replay", "compile", "cuda", "hpu-compile", "hpu-graph", "auto", or a capture
                backend of your own; "default" is "auto" on HPU and "eager" elsewhere. None of them falls
                back to another one.
            buckets: table of shapes, or a file with one, such as ``hpu-duo plan`` writes; None = the
                default for ``graphs``. A manifest of ``hpu-duo warmup`` is accepted too, if it was written
                for this configuration; ``max_model_len`` and the number of blocks are then the manifest's if
                they are not given.
            on_miss: "error", "capture" or "eager".
            max_captured_tokens: buckets with more query tokens, long prefills that is, run uncaptured.
            graph_memory_bytes: device memory to set aside for graphs; None = as estimated.
            fail_on_recompile: a step outside of warm-up that compiles or captures anything raises
                ``RecompileError``, which names it.
            tensor_parallel_size: ranks that share the model, each a process with a device of its own; a
                program that asks for more than one has its main part under ``if __name__ == "__main__"``.
            expert_parallel, retrieval_parallel, retrieval_parallel_context, rank_timeout_s, rank_launcher:
                see ``ParallelConfig``.
            record_shapes: file to which the exact shape of every step is appended, to plan from.
            record_steps: file to which every step is written, replacing older recordings: a debugging tool,
                see ``hpu_duo.startup.recorded_steps``.
            seed: base of the seeds of requests of ``engine`` without one.
            elsewhere: transformers' ``device_map`` (one device), ``cache_dir``, ``token`` and
                ``local_files_only``; others of transformers and vLLM are refused with ours in their place.

        Raises:
            ValueError: a file is missing or unreadable, the architecture cannot be served, or an
                argument is out of range or does not fit the others.
        """
        given = GivenBuckets.read(buckets, block_size)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"expected seed to be an integer, got {seed!r}")
        loading = LoadingArguments.read(elsewhere, device, trust_remote_code)
        config = EngineConfig(
            model=ModelConfig(
                path=path,
                device=loading.device,
                dtype=choose_dtype(dtype, torch_dtype),
                attention=attention,
                softmax=softmax,
                score_bytes=score_bytes,
                pack_weights=pack_weights,
            ),
            heads=HeadConfig(
                pattern=pattern,
                sparsity=sparsity,
                threshold=threshold,
                sink=sink,
                recent=recent,
                max_layer_kinds=max_layer_kinds,
                attention_rule=attention_rule,
                max_ring_window=max_ring_window,
                tie_break=tie_break,
                balance=balance,
            ),
            cache=CacheConfig(
                block_size=block_size,
                num_blocks=num_blocks,
                kv_cache_bytes=kv_cache_bytes,
                enable_prefix_caching=enable_prefix_caching,
                num_prefix_snapshots=num_prefix_snapshots,
                device_memory_utilization=device_memory_utilization,
                kv_policy=kv_policy,
                kv_budget=kv_budget,
                kv_plan=kv_plan,
                kv_prompt=kv_prompt,
                kv_chunk=kv_chunk,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                max_chunk_rows=max_chunk_rows,
                trim_chunks=trim_chunks,
                decode_len=decode_len,
                scheduling_policy=scheduling_policy,
                ranker=ranker,
            ),
            graph=GraphConfig(
                backend=graphs,
                table=given.table,
                on_miss=MissPolicy.parse(on_miss),
                max_captured_tokens=max_captured_tokens,
                memory_bytes=graph_memory_bytes,
                fail_on_recompile=fail_on_recompile,
            ),
            parallel=ParallelConfig(
                tensor_parallel_size=tensor_parallel_size,
                expert_parallel=expert_parallel,
                retrieval_parallel=retrieval_parallel,
                retrieval_parallel_context=retrieval_parallel_context,
                timeout_s=rank_timeout_s,
                launcher=rank_launcher,
            ),
        )
        path = find_checkpoint(path, revision, access=loading.access)
        config = given.complete(settled(replace(config, model=replace(config.model, path=path))))
        generation_config = read_generation_config(path, read_config(path))
        eos = as_eos_ids(generation_config.eos_token_id)
        tokenizer = load_tokenizer(path)
        engine = assemble(config, frozenset(eos), tokenizer, seed)
        given.check(engine)
        if record_shapes is not None:
            engine.recorder = ShapeRecorder(record_shapes)
        if record_steps is not None:
            # An engine that refers to itself would be freed late.
            origin = partial(origin_of, cast(Any, weakref.proxy(engine)), config)
            engine.step_recorder = StepRecorder(record_steps, origin)
        return cls(engine, tokenizer, generation_config, config)

    def warmup(
        self,
        progress: Progress | None = None,
        *,
        table: BucketTable | None = None,
        budget: WarmUpBudget | None = None,
        phases: str | None = None,
        manifest: str | Path | None = None,
        replay: str | Path | None = None,
        compile_only: bool = False,
        dry_run: bool = False,
    ) -> WarmUpReport:
        """Capture the buckets of the table now, the most expensive first.

        Args:
            progress: called after each graph with (done, total, ``graphs.manifest.GraphRecord``).
            table: take these buckets in place of those that the model was loaded with; nothing may have been
                captured yet.
            budget: refuse a warm-up that may exceed it.
            phases: only the buckets of these phases, such as ``"--u,cs-"``. Those left out are captured when
                they are needed, and counted as late.
            manifest: file to write the table, the cost of each graph, and their configuration to. If it
                holds a manifest of this configuration, its costs improve the estimate.
            replay: manifest whose table is warmed up, exactly; it must be of this configuration.
            compile_only: build graphs without launching them, on HPU.
            dry_run: estimate and check only.

        Raises:
            ValueError: see ``startup.warm_up``; or a manifest cannot be read or written, or a file that
                is none would be overwritten.
        """
        prepared = self.prepare_warmup(
            table=table,
            budget=budget,
            phases=phases,
            manifest=manifest,
            replay=replay,
            compile_only=compile_only,
        )
        return prepared.dry_run() if dry_run else prepared.run(progress, manifest)

    def prepare_warmup(
        self,
        *,
        table: BucketTable | None = None,
        budget: WarmUpBudget | None = None,
        phases: str | None = None,
        manifest: str | Path | None = None,
        replay: str | Path | None = None,
        compile_only: bool = False,
    ) -> WarmUp:
        """Check and estimate a warm-up without doing it; its ``run`` does it. See ``warmup``.

        Raises:
            ValueError: see ``warmup``; a table and a manifest to replay were given.
        """
        if table is not None and replay is not None:
            raise ValueError("expected a table or a manifest to replay, got both")
        earlier = None
        if replay is not None:
            earlier = read_manifest(replay)
            table = earlier.table(self.engine.runner.graphs.table.cost)
        elif manifest is not None and Path(manifest).exists():
            earlier = read_manifest(manifest)
            if earlier.configuration != configuration_of(self.engine):
                earlier = None
        return WarmUp(
            self.engine,
            table=table,
            on_miss=self.engine_config.graph.on_miss,
            budget=budget,
            phases=None if phases is None else parse_phases(phases),
            earlier=earlier,
            compile_only=compile_only,
        )

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[ContinuationScore]]:
        """Log-probabilities of given continuations, found by decoding them from the cache.

        Args:
            prompts: token ids of each prompt.
            continuations: for each prompt one or more continuations, as token ids; they share its prefill.

        Returns:
            For each prompt the scores of its continuations, in order.

        Raises:
            ValueError: a prompt or continuation that is empty, too long or outside the vocabulary.
        """
        return self.engine.score(prompts, continuations)

    def stats(self) -> EngineStats:
        """Steps by phase string, padding, bytes held and bytes of a full cache, blocks and rows in use."""
        return self.engine.stats()
