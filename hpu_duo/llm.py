"""``HPUDuoModel``: load a checkpoint and generate, with the interface of transformers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from typing_extensions import Unpack

from graphs import BucketTable
from graphs.bucket_file import ShapeRecorder
from graphs.manifest import read_manifest
from hpu_duo.config.engine import EngineConfig
from hpu_duo.config.overrides import LoadOverrides
from hpu_duo.context import ContextModel
from hpu_duo.engine.outputs import ContinuationScore
from hpu_duo.engine.stats import EngineStats
from hpu_duo.generation import as_eos_ids
from hpu_duo.generation.offline import OfflineBatch, OfflinePrompt, OfflineResult
from hpu_duo.modeling.hub import find_checkpoint
from hpu_duo.modeling.loading import (
    LoadingArguments,
    described,
    load_tokenizer,
    read_config,
    read_generation_config,
)
from hpu_duo.not_picklable import NotPicklable
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.assembly import assemble
from hpu_duo.startup.placement import placed
from hpu_duo.startup.recorded_steps import StepRecorder, origin_of
from hpu_duo.startup.sharding import settle
from hpu_duo.startup.warm_up import GivenBuckets, Progress, WarmUp, WarmUpReport, parse_phases
from hpu_duo.startup.warm_up_estimate import WarmUpBudget, configuration_of


class HPUDuoModel(ContextModel, NotPicklable):
    """A checkpoint, loaded and ready to generate.

    Threads may share it: one lock orders their steps, each step serves the requests of all of them, and each
    call receives its own outputs. Streamers and callbacks may call it too.

    Attributes:
        engine_config: the arguments of ``from_pretrained``, checked.
    """

    @classmethod
    @described
    def from_pretrained(
        cls, path: str | Path, config: EngineConfig | None = None, **overrides: Unpack[LoadOverrides]
    ) -> HPUDuoModel:
        """Load any decoder-only transformers checkpoint, from a directory or from the hub.

        Args:
            path: directory with config.json, safetensors and, for text, a tokenizer; or the id of such a
                model on the Hugging Face hub, which is downloaded to its cache, with its token.
            config: settings; None = the defaults. Its path is replaced by ``path``.
            overrides: settings that replace those of ``config``; see the classes of ``hpu_duo.config``.
                Besides ``torch_dtype`` (``dtype``), ``revision`` of a model of the hub,
                ``trust_remote_code``, which can only be False, and transformers' ``device_map`` (one device),
                ``cache_dir``, ``token`` and ``local_files_only``; others of transformers and vLLM are an
                error that names ours.

        Raises:
            ValueError: a file is missing or unreadable, the architecture cannot be served, or an
                argument is out of range or does not fit the others.
            TypeError: there is no such argument; the message has the most similar one.
        """
        loading = LoadingArguments.read(overrides)
        config = loading.config(path, config)
        given = GivenBuckets.read(config.graph.table, config.cache.block_size)
        path = find_checkpoint(path, loading.revision, access=loading.access)
        config = given.with_length(replace(config, model=replace(config.model, path=path)))
        config, chosen = placed(config)
        config, notes = settle(config)
        config = given.complete(config)
        generation_config = read_generation_config(path, read_config(path))
        eos = as_eos_ids(generation_config.eos_token_id)
        tokenizer = load_tokenizer(path)
        engine = assemble(config, frozenset(eos), tokenizer, config.run.seed, chosen + notes)
        given.check(engine)
        if config.run.record_shapes is not None:
            engine.recorder = ShapeRecorder(config.run.record_shapes)
        if config.run.record_steps is not None:
            # An engine that refers to itself would be freed late.
            origin = partial(origin_of, cast(Any, weakref.proxy(engine)), config)
            engine.step_recorder = StepRecorder(config.run.record_steps, origin)
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
        resume: bool = False,
        num_jobs: int = 1,
    ) -> WarmUpReport:
        """Capture the buckets of the table now, the most expensive first.

        Args:
            progress: called after each graph with (done, total, ``graphs.manifest.GraphRecord``).
            table: buckets that replace those of the model; nothing may be captured yet.
            budget: limit of the estimated warm-up.
            phases: only the buckets of these phases, such as ``"--u,cs-"``. Those left out are captured when
                they are needed, and counted as late.
            manifest: file to write the table, the cost of each graph, and their configuration to. If it is a
                manifest of this configuration, its costs improve the estimate.
            replay: manifest whose table is warmed up, exactly; it must be of this configuration.
            compile_only: build graphs without launching them, on HPU.
            dry_run: estimate and check only.
            resume: skip buckets that were captured by the warm-up of ``manifest`` or ``replay``, if the
                compiler's cache on disk still has their code. For a process that fills the cache and ends:
                skipped buckets are captured when they are needed, and counted as late.
            num_jobs: processes that compile side by side into the compiler's cache on disk, with this one.

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
            resume=resume,
            num_jobs=num_jobs,
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
        resume: bool = False,
        num_jobs: int = 1,
    ) -> WarmUp:
        """Check and estimate a warm-up without doing it; its ``run`` does it. See ``warmup``.

        Raises:
            ValueError: see ``warmup``; both a table and a manifest to replay are set.
        """
        if table is not None and replay is not None:
            raise ValueError("expected a table or a manifest to replay, got both")
        earlier, differing = None, ""
        if replay is not None:
            earlier = read_manifest(replay)
            table = earlier.table(self.engine.runner.graphs.table.cost)
        elif manifest is not None and Path(manifest).exists():
            earlier = read_manifest(manifest)
            differing = earlier.differing(configuration_of(self.engine))
            earlier = None if differing else earlier
        prepared = WarmUp(
            self.engine,
            table=table,
            on_miss=self.engine_config.graph.on_miss,
            budget=budget,
            phases=None if phases is None else parse_phases(phases),
            earlier=earlier,
            compile_only=compile_only,
            resume=resume,
            num_jobs=num_jobs,
            config=self.engine_config,
        )
        if differing:
            prepared.note(f"{manifest} is {differing}; it is replaced, and nothing of it is used")
        return prepared

    def generate_offline(
        self,
        prompts: Sequence[OfflinePrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_result: Callable[[OfflineResult], None] | None = None,
    ) -> list[OfflineResult]:
        """Generate from many prompts, by the same steps as ``generate``, and with the same tokens.

        With ``from_pretrained(..., offload_policy="auto")``, the policy search has chosen where weights lie
        and in how many groups rows pass through a layer, if the model does not fit the device.

        Args:
            prompts: texts or token ids.
            params: one for all prompts, or one each; None = the defaults of ``SamplingParams``.
            on_result: called with each result as soon as it is there, in any order; what has been computed
                stays known if the call is interrupted.

        Returns:
            A result for each prompt, in order. One that cannot be served has its error, which names its
            index, and an error of one request ends no other.

        Raises:
            ValueError: the numbers of prompts and params differ, or there is no prompt.
        """
        one = SamplingParams() if params is None else params
        return OfflineBatch(self.engine, self.tokenizer, prompts, one).run(on_result)

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[ContinuationScore]]:
        """Log-probabilities of given continuations, computed by decoding them from the cache.

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
        """Steps by phase string, padding, allocated bytes and those of a full cache, used blocks and rows."""
        return self.engine.stats()
