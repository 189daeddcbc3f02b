"""Planning for a Gaudi: requests that fit, predicted speed, and the limits that follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from hpu_duo.cli.options import changed, of_setting, option_in
from hpu_duo.config.limits import GRAPH_MEMORY_SHARE, HPU_LAYER_KINDS, CacheConfig, SchedulerConfig
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.config.speculation import SpeculativeConfig

if TYPE_CHECKING:
    from graphs import BatchShape
    from hpu_duo.kv.plan import LayerKV
    from hpu_duo.planning import Capacity, Deployment, KeptByHeads, ModelSize, Serving
    from hpu_duo.planning.model import TableMemory
    from kernels_ref import KVFormat

DEFAULT_SPARSITIES = [0.0, 0.5, 0.75]
DEFAULT_KV_FORMATS = ["bf16", "fp8"]
DEFAULT_CONTEXTS = (8_192, 32_768, 131_072, 524_288)


def default_contexts(max_positions: int) -> list[int]:
    """Return those of ``DEFAULT_CONTEXTS`` that the model serves, or else its number of positions."""
    return [context for context in DEFAULT_CONTEXTS if context <= max_positions] or [max_positions]


ACCEPTANCE = 0.8
"""Share of drafts that are accepted behind an accepted one, for the warning that drafts lose."""


class BreakEven(NamedTuple):
    """The tokens a step from which drafts pay, for a choice of heads and format.

    Attributes:
        sparsity, kv_format: of the choice.
        context: tokens of each request in the cache.
        num_rows: requests that decode.
        tokens: of each size of a verified row, the mean tokens that a step has to give to be as fast as plain
            decodes: its predicted time over theirs. With drafts of the model itself, that of the drafts is in
            it; other drafters take none here.
    """

    sparsity: float
    kv_format: KVFormat
    context: int
    num_rows: int
    tokens: dict[int, float]

    def loses(self, acceptance: float = ACCEPTANCE) -> bool:
        """Whether drafts of every size lose where each is accepted so often behind an accepted one."""
        expected = {size: (1 - acceptance**size) / (1 - acceptance) for size in self.tokens}
        return all(needed > expected[size] for size, needed in self.tokens.items())

    def fields(self) -> dict[str, Any]:
        """JSON values."""
        from hpu_duo.planning.kv_formats import name_of

        return {**self._asdict(), "kv_format": name_of(self.kv_format)}


def report_fields(model: ModelSize, serving: Serving, found: list[Capacity]) -> dict[str, Any]:
    """The report as JSON values: bytes, seconds, tokens per second."""
    from hpu_duo.planning import ERROR_FACTORS, FITTED, published_rows, split_rows
    from hpu_duo.planning.engine_work import UNKNOWN
    from hpu_duo.planning.fit import median_error
    from hpu_duo.planning.kv_formats import name_of

    hardware = asdict(serving.hardware)
    return {
        "model": {
            "name": model.name,
            "num_params": model.num_params,
            "weight_bytes": model.weight_bytes(serving.weights),
            "weight_bytes_of": serving.weights_by_place(model),
            "max_positions": model.max_positions,
        },
        "serving": {
            **asdict(replace(serving, pattern=None, kept=None, draft=None)),
            "offloaded": None if serving.offloaded is None else serving.offloaded._asdict(),
            "draft": None if serving.draft is None else serving.draft.name,
            "kept": None if serving.kept is None else serving.kept.name,
            "hardware": hardware,
            "weights": serving.weights.value,
            "pattern": None if serving.pattern is None else serving.pattern.source,
        },
        "kv_cache_bytes": serving.kv_budget_bytes(model),
        "capacities": [{**asdict(each), "kv_format": name_of(each.kv_format)} for each in found],
        "not_served": list(serving.not_served),
        "efficiency": asdict(FITTED),
        "held_out_median_error": median_error(split_rows(published_rows())[1], FITTED),
        "published_figures": dict(Counter(row.format.value for row in published_rows())),
        "error_factors": {each.value: factor for each, factor in ERROR_FACTORS.items()},
        "warm_up_unknown": UNKNOWN,
        "is_measured_by_this_project": False,
    }


HARDWARE = "Hardware"
_hardware_option = option_in(HARDWARE)
WEIGHTS = typer.Option(
    "--dtype",
    "--quantization",
    help="Format of the weights of layers: bf16, fp8, int8 or int4; with their scales.",
    rich_help_panel=HARDWARE,
)
"""Name of a panel of the help."""
SINK, RECENT = 128, 256
"""Window of streaming heads for which no pattern gives one."""


@dataclass(frozen=True)
class HardwareOptions:
    """Options of serving a model on some hardware, and the choices to compare; see ``hpu-duo capacity``.

    Plans are for the first sparsity and the first format of keys and values.
    """

    devices: Annotated[int, _hardware_option("Devices that share the model.")] = 1
    dtype: Annotated[str, WEIGHTS] = "bf16"
    context: Annotated[
        list[int] | None,
        _hardware_option(
            "Lengths of context to compare, in tokens.",
            show_default="8192 32768 131072 524288, as the model allows",
        ),
    ] = None
    sparsity: Annotated[
        list[float] | None,
        _hardware_option(
            "Shares of KV heads that stream, 0 is full attention; a table is planned for the first.",
            show_default="0 0.5 0.75",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        list[str] | None,
        _hardware_option(
            "Formats of keys and values in blocks, by the names of hpu-duo serve, or bf16; a table is "
            "planned for the first.",
            show_default="bf16 fp8",
        ),
    ] = None
    pattern: Annotated[
        Path | None,
        _hardware_option(
            "Directory of a head pattern: its heads stream by their scores, and its layers are counted.",
            show_default="heads that stream are spread evenly over the layers",
        ),
    ] = None
    max_layer_kinds: Annotated[int, of_setting("max_layer_kinds", panel=HARDWARE, unset=True)] = (
        HPU_LAYER_KINDS
    )
    sink: Annotated[int | None, of_setting("sink", panel=HARDWARE, unset=f"the pattern's, or {SINK}")] = None
    recent: Annotated[
        int | None, of_setting("recent", panel=HARDWARE, unset=f"the pattern's, or {RECENT}")
    ] = None
    retrieval_parallel: Annotated[
        str,
        _hardware_option(
            "What devices share of retrieval heads: heads, or the tokens of each of them (context); "
            "auto is context where heads would have to be promoted, else what is predicted to be faster.",
            metavar="heads|context|auto",
        ),
    ] = "auto"
    attention: Annotated[
        str, _hardware_option("Attention kernels: hpu for Gaudi's fused operators, or reference.")
    ] = "hpu"
    device_memory_utilization: Annotated[float, of_setting("device_memory_utilization")] = (
        CacheConfig.device_memory_utilization
    )
    graph_memory: Annotated[
        float, _hardware_option("Share of this memory without weights that graphs take.")
    ] = GRAPH_MEMORY_SHARE
    enable_prefix_caching: Annotated[bool, of_setting("enable_prefix_caching")] = (
        CacheConfig.enable_prefix_caching
    )
    num_prefix_snapshots: Annotated[int | None, of_setting("num_prefix_snapshots")] = None

    def on(
        self,
        hardware: str,
        scheduler: SchedulerConfig,
        block_size: int,
        kept: EngineOverrides | None = None,
    ) -> Serving:
        """Return the serving on some hardware, with the limits of a scheduler.

        Args:
            kept: by heads with a KV budget, a plan or an attention rule.

        Raises:
            ValueError: an unknown name, or a value out of range.
        """
        from hpu_duo.heads import HeadPattern
        from hpu_duo.planning import Format, Serving, find_hardware

        self._formats()
        pattern = None if self.pattern is None else HeadPattern.load(self.pattern)
        own = (SINK, RECENT) if pattern is None else (pattern.sink, pattern.recent)
        return Serving(
            find_hardware(hardware),
            num_devices=self.devices,
            retrieval_parallel=self.retrieval_parallel,
            weights=Format.parse(self.dtype),
            block_size=block_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            device_memory_utilization=self.device_memory_utilization,
            graph_memory=self.graph_memory,
            enable_prefix_caching=self.enable_prefix_caching,
            num_prefix_snapshots=self.num_prefix_snapshots,
            sink=own[0] if self.sink is None else self.sink,
            recent=own[1] if self.recent is None else self.recent,
            pattern=pattern,
            max_layer_kinds=self.max_layer_kinds,
            attention=self.attention,
            decode_len=scheduler.decode_len,
            draft_lens=scheduler.draft_lens,
            max_chunk_rows=scheduler.max_chunk_rows,
            kept=self._kept(scheduler, block_size, kept or {}),
        )

    def compare(self, size: ModelSize, serving: Serving, num_graphs: int = 64) -> list[Capacity]:
        """Return the capacity of every choice.

        Args:
            num_graphs: budget of the bucket table, which bounds the warm-up.

        Raises:
            ValueError: see ``hpu_duo.planning.capacities``.
        """
        from hpu_duo.planning import capacity

        contexts = self.context or default_contexts(size.max_positions)
        return [
            capacity(size, serving, share, one, contexts, num_graphs=num_graphs)
            for share in self._shares(serving)
            for one in self._formats(size)
        ]

    def graph_memories(
        self,
        model: Path,
        size: ModelSize,
        serving: Serving,
        speculation: SpeculativeConfig | None = None,
        drafted_by: Path | None = None,
    ) -> list[TableMemory | None]:
        """Memory of the graphs of the default table of every choice of ``compare``; None where nothing fits.

        Args:
            model: directory with a config.json, or the file.
            speculation: drafts that steps verify; those of a model have graphs of their own.
            drafted_by: as ``model``, of ``serving.draft``.
        """
        from graphs import BucketTable
        from hpu_duo.planning import Deployment, step_cost, step_limits

        longest = max(self.context or default_contexts(size.max_positions))
        found: list[TableMemory | None] = []
        for share in self._shares(serving):
            for one in self._formats(size):
                deployment = Deployment(size, serving, share, one, longest)
                if deployment.count_requests(longest) < 1:
                    found.append(None)
                    continue
                limits, cost = step_limits(deployment), step_cost(deployment)
                table, lens = BucketTable.exponential(limits, cost=cost), serving.draft_lens
                buckets = table.with_drafts(lens).buckets if lens else table.buckets
                chain = () if speculation is None else chain_buckets(buckets, speculation)
                if drafted_by is None:
                    buckets += chain
                parts, num_graphs = (
                    [graph_bytes_kept(model, deployment, buckets, draft_lens=lens)],
                    len(buckets),
                )
                if drafted_by is not None:
                    # Each step is computed by both.
                    draft, num_graphs = deployment.of_draft(longest), 2 * num_graphs + len(chain)
                    parts.append(graph_bytes_kept(drafted_by, draft, buckets, draft_lens=lens))
                    parts.append(graph_bytes_kept(drafted_by, draft, chain))
                portable, fused = (sum(each) for each in zip(*parts))
                found.append(deployment.graph_memory(num_graphs, portable, fused))
        return found

    def break_evens(
        self, size: ModelSize, serving: Serving, found: list[Capacity], speculation: SpeculativeConfig
    ) -> list[BreakEven]:
        """Tokens of a row in a step from which verifying drafts pays, of every choice and context.

        Args:
            found: what ``compare`` returned.
            speculation: the drafts; with a sparsity of their own, heads that read a window count as
                streaming ones.
        """
        from hpu_duo.planning import Deployment, Step

        plain, *longer = serving.draft_lens or (1,)
        evens = []
        for one in found:
            for point in one.points:
                if not point.num_running:
                    continue
                deployment = Deployment(size, serving, one.sparsity, one.kv_format, point.context)
                for rows in dict.fromkeys((1, point.num_running)):
                    bucket = deployment.shape_of(Step(rows, point.context - 1))
                    seconds = {}
                    for each in (plain, *longer):
                        shape = replace(bucket, query_len=rows * each)
                        seconds[each] = _longer(deployment, each).bucket_seconds(shape).value
                    draft = 0.0
                    if speculation.method == "duo":
                        share = max(one.sparsity, speculation.draft_sparsity or 0)
                        sparser = replace(deployment, sparsity=share)
                        read = point.context - 1
                        if speculation.draft_sparsity is None:
                            read = min(read, speculation.draft_sink + speculation.draft_recent)
                        draft = sparser.bucket_seconds(sparser.shape_of(Step(rows, read))).value
                    if serving.draft is not None:
                        other = deployment.of_draft(point.context)
                        draft = other.bucket_seconds(bucket).value
                        for each in longer:
                            seconds[each] += (
                                _longer(other, each)
                                .bucket_seconds(replace(bucket, query_len=rows * each))
                                .value
                            )
                    tokens = {each: (seconds[each] + (each - 1) * draft) / seconds[plain] for each in longer}
                    evens.append(BreakEven(one.sparsity, one.kv_format, point.context, rows, tokens))
        return evens

    def deployment(self, size: ModelSize, serving: Serving, max_len: int) -> Deployment:
        """The first choice, for requests of up to ``max_len`` tokens.

        Raises:
            ValueError: see ``hpu_duo.planning.Deployment``.
        """
        from hpu_duo.planning import Deployment

        return Deployment(size, serving, self._shares(serving)[0], self._formats(size)[0], max_len)

    def _kept(self, scheduler: SchedulerConfig, block_size: int, kept: EngineOverrides) -> KeptByHeads | None:
        """Return heads with a KV budget, KV plan or attention rule; None if no option sets one."""
        given = changed(kept)
        if not given:
            return None
        unused: dict[str, object] = {"--sink": self.sink, "--recent": self.recent}
        if kept.get("kv_plan") is not None or kept.get("attention_rule") is not None:
            unused |= {"--sparsity": self.sparsity, "--pattern": self.pattern}
        for name, value in unused.items():
            if value is not None:
                raise ValueError(f"{name} is of heads that keep rings: expected {given[0]} without it")
        from hpu_duo.config.engine import EngineConfig
        from hpu_duo.startup.heads import SizedHeads

        # A plan keeps to the requested bound, as the engine does, and not to the usual one.
        is_usual = self.max_layer_kinds == HPU_LAYER_KINDS
        config = EngineConfig.of(**kept).override(
            max_layer_kinds=None if is_usual else self.max_layer_kinds,
            block_size=block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            num_prefix_snapshots=self.num_prefix_snapshots,
            tensor_parallel_size=self.devices,
            retrieval_parallel=self.retrieval_parallel,
        )
        return SizedHeads(replace(config, scheduler=scheduler))

    def _shares(self, serving: Serving) -> list[float]:
        """Shares of heads that stream, or have a budget: all heads, unless a pattern says which ones."""
        if serving.kept is None:
            return self.sparsity or DEFAULT_SPARSITIES
        if serving.kept.is_plan:
            return [0.0]
        return self.sparsity or ([1.0] if serving.pattern is None else DEFAULT_SPARSITIES)

    def _formats(self, size: ModelSize | None = None) -> list[KVFormat]:
        """Formats of keys and values; ValueError for an unknown one.

        Args:
            size: of the model, on which the default depends.
        """
        from hpu_duo.planning.kv_formats import parse_kv_format

        # Latents have one format.
        has_latents = size is not None and any(layer.latent is not None for layer in size.layers)
        default = DEFAULT_KV_FORMATS[:1] if has_latents else DEFAULT_KV_FORMATS
        return [parse_kv_format(text) for text in self.kv_cache_dtype or default]


def _longer(deployment: Deployment, decode_len: int) -> Deployment:
    """The same with rows of so many tokens."""
    return replace(deployment, serving=replace(deployment.serving, decode_len=decode_len, draft_lens=()))


def read_draft(speculation: SpeculativeConfig | None, model: Path) -> tuple[ModelSize, Path] | None:
    """Return the sizes of what drafts over stores of its own, and where they are read; None without.

    Args:
        model: directory with the config.json of the model that is served, or the file.

    Raises:
        ValueError: it cannot be read, or the model has no layer that drafts.
    """
    if speculation is None or not speculation.has_own_stores:
        return None
    from hpu_duo.planning.read_model import read_model, read_mtp_layers

    if speculation.model is None:
        return read_mtp_layers(model, speculation.num_speculative_tokens), model
    return read_model(speculation.model), Path(speculation.model)


def graph_bytes(
    model: Path,
    size: ModelSize,
    kv_layers: tuple[LayerKV, ...],
    block_size: int,
    decode_len: int,
    memory_bytes: int | None = None,
    attention: str = "reference",
) -> Callable[[BatchShape], float]:
    """Bytes that the graph of a bucket keeps on HPU at worst: its results and intermediates of its own.

    Recurrences are counted with all their heads, of which several devices have a part each.

    Args:
        kv_layers: the groups of heads of each layer.
        memory_bytes: of the device, on which chunks of context depend; None where it is not known.
        attention: kernels, reference or hpu.
    """
    from hpu_duo.config.engine import ModelConfig
    from hpu_duo.kv.plan import ring_slack
    from hpu_duo.startup.tables import KEPT, GraphMemory, LayerHeads, StepSizes
    from kernels_ref import Implementation
    from kernels_ref.chunks import MOST_INLINE, ChunkBounds

    heads = [
        LayerHeads(kv.groups, layer.num_heads // layer.num_kv_heads, max(layer.head_dim, layer.value_dim))
        for layer, kv in zip(size.layers, kv_layers)
    ]
    config, score_bytes = _text_config(model), ModelConfig.score_bytes
    chunks = (
        ChunkBounds(score_bytes, mask_bytes=score_bytes, most_inline=MOST_INLINE)
        if memory_bytes is None
        else ChunkBounds.of_hpu(memory_bytes, score_bytes)
    )
    is_fused = Implementation(attention) is Implementation.HPU and not getattr(
        config, "attn_logit_softcapping", None
    )
    sizes = StepSizes.of_heads(
        heads, config, block_size, 2, decode_len=decode_len, chunks=chunks, is_fused=is_fused
    )
    slack = ring_slack(decode_len)
    recurrences = frozenset(replace(kind, slack=slack) for kinds in size.states for kind in kinds)
    sizes = replace(sizes, recurrences=recurrences)
    return GraphMemory(KEPT["hpu-compile"], 1, sizes).kept_bytes


def _text_config(model: Path) -> Any:
    """Sizes of a model, read without transformers where its file allows."""
    from hpu_duo.planning.read_model import CONFIG_FILE, read_plain

    plain = read_plain(model / CONFIG_FILE if model.is_dir() else model)
    if plain is not None:
        return plain
    from hpu_duo.modeling.config_file import read_config_file

    return read_config_file(model / CONFIG_FILE if model.is_dir() else model).get_text_config()


def served_graph_bytes(
    model: Path, deployment: Deployment, decode_len: int, attention: str = "reference"
) -> Callable[[BatchShape], float]:
    """``graph_bytes`` on one device of a deployment."""
    from hpu_duo.planning import busiest_rank

    serving, layers = deployment.serving, deployment.kv_layers
    if not serving.deals_blocks:
        layers = tuple(busiest_rank(kv, serving.num_devices) for kv in layers)
    memory = serving.hardware.memory_bytes
    # A device has a part of each block where they are dealt, which is as long as a block without.
    return graph_bytes(model, deployment.model, layers, serving.block_size, decode_len, memory, attention)


def chain_buckets(buckets: Sequence[BatchShape], speculation: SpeculativeConfig) -> tuple[BatchShape, ...]:
    """Buckets of the drafts that a model makes in front of longer rows; none of drafts of text.

    One for each number of rows where drafts read a window, else one for each bucket of longer rows.
    """
    from graphs import BatchShape, Phase
    from graphs.shape import row_len

    if not speculation.is_by_model:
        return ()
    longer = [bucket for bucket in buckets if row_len(bucket, 1, speculation.lens) > 1]
    if speculation.method != "duo" or speculation.draft_sparsity is not None:
        return tuple({replace(bucket, query_len=bucket.num_logits) for bucket in longer})
    numbers = sorted({bucket.num_logits for bucket in longer})
    return tuple(BatchShape(Phase(unique=True), rows, 0, 0, rows) for rows in numbers)


def graph_memory(
    model: Path,
    deployment: Deployment,
    buckets: Sequence[BatchShape],
    decode_len: int = 1,
    draft_lens: tuple[int, ...] = (),
) -> TableMemory:
    """Memory that the graphs of a table keep on one device, with either kernels.

    Args:
        decode_len, draft_lens: see ``StepLimits``.
    """
    return deployment.graph_memory(
        len(buckets), *graph_bytes_kept(model, deployment, buckets, decode_len, draft_lens)
    )


def graph_bytes_kept(
    model: Path,
    deployment: Deployment,
    buckets: Sequence[BatchShape],
    decode_len: int = 1,
    draft_lens: tuple[int, ...] = (),
) -> tuple[int, int]:
    """Bytes that the graphs of buckets keep on one device, with portable and with fused kernels."""
    from graphs.shape import row_len

    by_len: dict[int, list[BatchShape]] = {}
    for bucket in buckets:
        by_len.setdefault(row_len(bucket, decode_len, draft_lens), []).append(bucket)
    portable, fused = (
        round(
            sum(
                sum(map(served_graph_bytes(model, deployment, each, attention), alike))
                for each, alike in by_len.items()
            )
        )
        for attention in ("reference", "hpu")
    )
    return portable, fused
