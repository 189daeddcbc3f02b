"""Choice of the heads that retrieve and of those that stream: an engine's pattern and groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from bias_builders import Window
from hpu_duo.config.engine import EngineConfig
from hpu_duo.config.kv_plan import KVPlan
from hpu_duo.device.ranks import Ranks
from hpu_duo.heads import HeadLayout, HeadPattern
from hpu_duo.kv.plan import (
    LayerKV,
    budget_groups,
    head_groups,
    ring_slack,
    shared_source,
    sparse_groups,
    with_latents,
)
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.parallel import (
    ContextParallelBlocks,
    ContextParallelLatents,
    HeadExchange,
    RankHeads,
    ScoreExchange,
    SharedPolicy,
    placed,
)
from hpu_duo.planning import ModelSize
from hpu_duo.startup.head_choice import drafting_heads, has_window, resolve_pattern
from hpu_duo.startup.kv_budget import (
    HeadRules,
    check_shared,
    planned_groups,
    pools_heads,
    resolve_attention_rules,
    resolve_kv_budget,
    resolve_kv_plan,
    resolve_max_ring_window,
    rules_by_head,
)
from kernels_ref import Blocks, Budget, GroupKind, HeadGroup, LatentBlocks, LayerSpec, Owner, QuestBlocks


class HeadAssignment(NamedTuple):
    """Order and groups of the heads of one layer.

    Attributes:
        layout: order of the heads.
        groups: groups of heads, in this order.
    """

    layout: HeadLayout
    groups: tuple[HeadGroup, ...]


class Kinds(NamedTuple):
    """Kinds of the heads that do not see all tokens.

    Attributes:
        slack: slots of a ring beyond its window.
        budget: kind of the heads that would stream under the pattern, or of all heads without one.
        rules: kinds of the same heads, which store all tokens then; under a pattern ``QuestBlocks`` are those
            that retrieve.
        max_ring_window: longest window of a layer that is stored in rings; None = any.
        planned: instead of budget and rules, the kind of each head of each layer.
        drafting: heads that read all blocks in drafts of the model itself, where other retrieval heads read a
            window, bool ``[layers, KV heads]``; None = drafts do not tell them apart.
    """

    slack: int
    budget: Budget | None = None
    rules: HeadRules | None = None
    max_ring_window: int | None = None
    planned: tuple[tuple[GroupKind, ...], ...] | None = None
    drafting: np.ndarray | None = None

    @property
    def are_of_all_heads(self) -> bool:
        """Whether all heads are of such a kind where there is no pattern."""
        return self.budget is not None or self.rules is not None

    def of(
        self, index: int, sliding_window: int | None, streams: np.ndarray, window: Window | None
    ) -> tuple[np.ndarray, tuple[HeadGroup, ...]]:
        """Return the number of each head's group, and the groups, of a layer.

        A layer with a sliding window streams with all heads and no sink, whatever other settings are.

        Args:
            index: of the layer.
            sliding_window: of all its heads, None where requests are no longer than that.
            streams: heads that do not see all tokens, bool ``[KV heads]``.
            window: of the pattern.
        """
        if sliding_window is not None:
            return np.zeros(len(streams), np.int32), self.of_window(len(streams), sliding_window)
        if self.planned is not None:
            return planned_groups(self.planned[index])
        if self.drafting is not None:
            windowed = ~(streams | self.drafting[index])
            num_streaming, num_windowed = int(streams.sum()), int(windowed.sum())
            counts = len(streams) - num_streaming, num_streaming
            return 2 * streams + windowed, head_groups(*counts, window, self.slack, num_windowed)
        return self.of_layer(streams, window)

    def of_window(self, num_heads: int, length: int) -> tuple[HeadGroup, ...]:
        """Return the one group of a layer with a sliding window."""
        window = Window(0, length)
        if self.max_ring_window is not None and length > self.max_ring_window:
            return sparse_groups([Blocks(window)] * num_heads)[1]
        return head_groups(0, num_heads, window, self.slack)

    def of_layer(
        self, streams: np.ndarray, window: Window | None
    ) -> tuple[np.ndarray, tuple[HeadGroup, ...]]:
        """Return the number of each head's group, and the groups, of another layer.

        Args:
            streams: heads that do not see all tokens, bool ``[KV heads]``.
            window: of the pattern.
        """
        numbers, num_streaming = streams.astype(np.int32), int(streams.sum())
        num_retrieval = len(streams) - num_streaming
        if self.budget is not None:
            return numbers, budget_groups(num_retrieval, num_streaming, self.budget)
        if self.rules is None:
            return numbers, head_groups(num_retrieval, num_streaming, window, self.slack)
        of_heads = rules_by_head(self.rules, len(streams))
        if window is not None and any(isinstance(kind, QuestBlocks) for kind in of_heads):
            return numbers, self._with_pages(num_retrieval, num_streaming, window)
        found, groups = sparse_groups(
            [kind if is_sparse else Blocks() for kind, is_sparse in zip(of_heads, streams)]
        )
        return np.array(found, np.int32), groups

    def _with_pages(self, num_retrieval: int, num_streaming: int, window: Window) -> tuple[HeadGroup, ...]:
        """Return the groups of a layer of a pattern whose retrieval heads choose pages."""
        assert self.rules is not None
        if len(self.rules) > 1:
            raise ValueError(
                "under a pattern all retrieval heads choose pages: expected one attention_rule, got "
                f"{len(self.rules)} of which one or more is quest"
            )
        groups = head_groups(num_retrieval, num_streaming, window, self.slack)
        return tuple(
            replace(group, kind=self.rules[0]) if group.kind.owner is Owner.BLOCK else group
            for group in groups
        )


class ChosenHeads(NamedTuple):
    """The heads of a model.

    Attributes:
        pattern: the binarised head pattern; None if all heads retrieve.
        heads: order and groups of the heads of each layer.
        own: the pattern of the heads of one rank, if several share them.
    """

    pattern: HeadPattern | None
    heads: tuple[HeadAssignment, ...]
    own: HeadPattern | None = None


def choose_heads(
    config: EngineConfig, layers: tuple[DecoderLayer, ...], max_len: int, device: torch.device
) -> ChosenHeads:
    """Choose the groups of heads of all layers of a whole model.

    Args:
        max_len, device: see ``resolve_pattern``.

    Raises:
        ValueError: see ``resolve_pattern``.
    """
    parallel, budget = config.parallel, resolve_kv_budget(config, max_len)
    num_ranks = 1 if parallel.deals_blocks else parallel.tensor_parallel_size
    pattern = resolve_pattern(config.heads, layers, max_len, device, num_ranks)
    slack, rules = ring_slack(config.scheduler.decode_len), resolve_attention_rules(config, device, max_len)
    kinds = Kinds(
        slack,
        budget,
        rules,
        resolve_max_ring_window(config),
        resolve_kv_plan(config, [layer.call.num_kv_heads for layer in layers], max_len, slack, device),
        drafting_heads(config, pattern, layers, max_len, device),
    )
    assigned = tuple(assign_heads(layers, pattern, max_len, kinds))
    if kinds.planned is not None:
        check_shared(parallel, [each.groups for each in assigned])
    return ChosenHeads(pattern, assigned)


def assign_heads(
    layers: tuple[DecoderLayer, ...],
    pattern: HeadPattern | None,
    max_len: int,
    kinds: Kinds,
) -> list[HeadAssignment]:
    """The groups of heads of each layer, and their order.

    A sliding-window layer streams with all heads and no sink, whatever the pattern; unless its window is no
    shorter than any request, for then it is a layer of full attention.
    """
    assigned: list[HeadAssignment] = []
    for index, layer in enumerate(layers):
        call = layer.call
        streams, window = np.full(call.num_kv_heads, kinds.are_of_all_heads), None
        if pattern is not None:
            streams = ~pattern.mask[index]
            window = Window(pattern.sink, pattern.recent).validate().clipped(max_len)
        sliding_window = call.sliding_window if has_window(layer, max_len) else None
        group_of, groups = kinds.of(index, sliding_window, streams, window)
        groups = with_latents(groups, call.latent)
        assigned.append(HeadAssignment(HeadLayout.by_group(group_of, call.num_heads), groups))
    return assigned


def latent_note(
    layers: Sequence[DecoderLayer], specs: Iterable[LayerSpec], text_config: Any
) -> tuple[str, ...]:
    """Return a sentence on what it costs to store latent keys and values expanded; nothing where none are.

    Args:
        specs: of the same layers.
    """
    rank = getattr(text_config, "kv_lora_rank", None)
    if not rank or all(spec.stores_latents for spec in specs):
        return ()
    size = rank + (getattr(text_config, "qk_rope_head_dim", None) or 0)
    most = max(
        layer.call.num_kv_heads * (layer.call.head_dim + layer.call.value_head_dim) for layer in layers
    )
    return (
        f"latent keys and values are stored expanded: {most} elements for each token and layer, where the "
        f"latent and its rotary part have {size} ({most / size:.1f} times as much memory)",
    )


def kv_layers(layers: Sequence[DecoderLayer], heads: Sequence[HeadAssignment]) -> tuple[LayerKV, ...]:
    """Return the keys and values, and further states, of each layer.

    A layer that attends to the keys and values of an earlier one reads its stores; see ``shared_source``.

    Args:
        heads: of each layer.

    Raises:
        ValueError: they cannot share stores.
    """
    of_layers = [each.groups for each in heads]
    return tuple(
        LayerKV(
            each.groups,
            layer.call.head_dim,
            layer.call.value_head_dim,
            rows=layer.rows,
            source=shared_source(layer.call.source, each.groups, of_layers),
        )
        for layer, each in zip(layers, heads)
    )


def check_context_parallel(num_kv_heads: int, num_ranks: int) -> None:
    """Raise ValueError for context-parallel blocks over more ranks than a layer has key/value heads.

    Raises:
        ValueError: it has fewer.
    """
    if num_kv_heads < num_ranks:
        raise ValueError(
            "retrieval_parallel='context' needs a key/value head for each rank: expected at least "
            f"{num_ranks} of them in every layer, got {num_kv_heads}"
        )


@dataclass(frozen=True)
class Shares:
    """The way in which ranks share the heads of a layer.

    Attributes:
        ranks: this rank among all.
        group: name of the ranks' process group.
        deals_blocks: whether blocks are context-parallel: each rank stores a part of the tokens of all heads.
            Ranks then have equally many heads of a layer, and not equally many of each group.
        is_planned: whether a KV plan sets the kind of each head; the same applies to it.
    """

    ranks: Ranks
    group: str
    deals_blocks: bool
    is_planned: bool = False

    def heads(self, index: int, whole: HeadAssignment, layer: DecoderLayer) -> RankHeads:
        """Return the heads of the rank by their numbers in the checkpoint.

        Args:
            index: of the layer.
            whole: groups of all ranks.
            layer: of the whole model.

        Raises:
            ValueError: ranks cannot share them.
        """
        num_heads, num_kv_heads = layer.call.num_heads, layer.call.num_kv_heads
        if self.deals_blocks:
            check_context_parallel(num_kv_heads, self.ranks.size)
        order, groups = list(whole.layout.kv_order), []
        for group in whole.groups:
            groups.append(order[: group.num_heads])
            del order[: group.num_heads]
        ranks = self._ranks(index, num_kv_heads)
        return RankHeads.of(groups, num_heads, ranks, is_even=self._is_even)

    def assignment(self, index: int, whole: HeadAssignment, layer: DecoderLayer) -> HeadAssignment:
        """Return the groups of the rank, with heads in loaded order.

        Args:
            index: of the layer.
            whole: groups of all ranks.
            layer: of the rank's share.
        """
        layout = HeadLayout(tuple(range(layer.call.num_kv_heads)), layer.call.num_heads)
        num_kv_heads = whole.layout.num_kv_heads
        if num_kv_heads < self.ranks.size:
            # Neighbours have copies of the same one.
            nums = [1] * len(whole.groups)
        else:
            sizes = [each.num_heads for each in whole.groups]
            places = placed(sizes, self._ranks(index, num_kv_heads), is_even=self._is_even)
            nums = [place.stop - place.start for place in places]
        shares = (self._share(each, num, num_kv_heads) for each, num in zip(whole.groups, nums))
        return HeadAssignment(layout, tuple(each for each in shares if each is not None))

    @property
    def _is_even(self) -> bool:
        return not (self.deals_blocks or self.is_planned)

    def _ranks(self, index: int, num_kv_heads: int) -> Ranks:
        """This rank among all, as heads of a layer are dealt: under a plan another one is first each time.

        So that no rank has the heads with most tokens of all layers, if they are not shared evenly.
        """
        rank, size = self.ranks.rank, self.ranks.size
        is_turned = self.is_planned and not self.deals_blocks and num_kv_heads >= size
        return Ranks((rank + index) % size, size) if is_turned else self.ranks

    def _share(self, group: HeadGroup, num_own: int, num_kv_heads: int) -> HeadGroup | None:
        if self.deals_blocks and group.kind.owner is Owner.BLOCK:
            exchange = HeadExchange(group.num_heads, self.ranks.size, self.ranks.rank, self.group)
            if isinstance(group.kind, LatentBlocks):
                return HeadGroup(num_own, ContextParallelLatents(exchange, group.kind.latent))
            return HeadGroup(num_own, ContextParallelBlocks(exchange))
        return HeadGroup(num_own, self._kind(group.kind, num_kv_heads)) if num_own else None

    def _kind(self, kind: GroupKind, num_kv_heads: int) -> GroupKind:
        if not isinstance(kind, Budget):
            return kind
        exchange = ScoreExchange.of(num_kv_heads, self.ranks, self.group)
        return replace(kind, policy=SharedPolicy.of(kind.policy, exchange))


@dataclass(frozen=True)
class SizedHeads:
    """Keys and values of heads by an engine's options, with the rules of the engine.

    Attributes:
        config: with a KV policy, a KV plan or an attention rule; the model's files are not read.
    """

    config: EngineConfig

    @property
    def is_plan(self) -> bool:
        """Whether what each head keeps is named, so that no share of them streams."""
        return self.config.cache.kv_plan is not None or self.rule is not None

    @property
    def rule(self) -> str | None:
        """The attention rule of all heads; None with a budget or a plan."""
        return self.config.heads.attention_rule

    @property
    def name(self) -> str:
        """The policy and its budget, the plan or the rule, for reports."""
        cache = self.config.cache
        if self.rule is not None:
            return f"all tokens under {self.rule}"
        if cache.kv_plan is not None:
            return f"what a plan says{'' if isinstance(cache.kv_plan, KVPlan) else f': {cache.kv_plan}'}"
        assert cache.kv_budget is not None
        if cache.kv_budget <= 1:
            return f"{cache.kv_budget:.3g} of the longest request under {cache.kv_policy}"
        return f"{int(cache.kv_budget):,} tokens under {cache.kv_policy}"

    @property
    def pools_heads(self) -> bool:
        """Whether a policy averages over the heads of a layer, which ranks do by heads only."""
        return pools_heads(self.config)

    def shared_by(self, retrieval_parallel: str) -> SizedHeads:
        """The same where ranks share retrieval heads by ``"heads"`` or by ``"context"``."""
        return replace(self, config=self.config.override(retrieval_parallel=retrieval_parallel))

    def kv_layers(self, model: ModelSize, counts: Sequence[int], max_len: int) -> tuple[LayerKV, ...]:
        """Keys and values that each layer stores.

        Args:
            counts: heads of each layer that see all tokens, if no plan names them.
            max_len: tokens of the longest request, of which a budget may be a share.

        Raises:
            ValueError: as the engine.
        """
        config = self.config
        slack = ring_slack(config.scheduler.decode_len)
        num_kv_heads = [layer.num_kv_heads for layer in model.layers]
        planned = resolve_kv_plan(config, num_kv_heads, max_len, slack, torch.device("cpu"))
        rules = resolve_attention_rules(config, torch.device("cpu"), max_len)
        kinds = Kinds(slack, resolve_kv_budget(config, max_len), rules, planned=planned)
        kept: list[LayerKV] = []
        for index, (layer, count) in enumerate(zip(model.layers, counts, strict=True)):
            sliding_window = layer.window if layer.has_window(max_len) else None
            streams = np.arange(layer.num_kv_heads) >= (0 if rules else count)
            groups = with_latents(kinds.of(index, sliding_window, streams, None)[1], layer.latent)
            source = shared_source(layer.source, groups, [each.groups for each in kept])
            kept.append(LayerKV(groups, layer.head_dim, layer.value_head_dim, source=source))
        if planned is not None:
            check_shared(config.parallel, [each.groups for each in kept])
        return tuple(kept)
