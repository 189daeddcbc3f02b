"""Start an engine whose model several ranks share: the first one, and those that follow it."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hpu_duo.config import EngineConfig
from hpu_duo.device import Member
from hpu_duo.device.exchange_check import check_exchanges
from hpu_duo.device.launched import TORCHRUN, Launched
from hpu_duo.device.ranks import MEETING_S, Followers, Membership, Ranks
from hpu_duo.engine.orders import follow
from hpu_duo.garbage import collector_paused
from hpu_duo.modeling.loading import build_without_weights, read_config, resolve_dtype
from hpu_duo.modeling.probe import DecoderLayer, probe, read_layers
from hpu_duo.sharded import (
    ExpertShare,
    RankHeads,
    Sums,
    narrowed_config,
)
from hpu_duo.sharded.config import check_plan
from hpu_duo.sharded.loading import load_share, make_cutter
from hpu_duo.sharded.share_check import check_share
from hpu_duo.startup.agreement import check_alike, check_same_pattern, check_same_plan
from hpu_duo.startup.blueprint import fix_served_len
from hpu_duo.startup.device_side import DeviceSide, Shared
from hpu_duo.startup.head_shares import Shares, check_dealt
from hpu_duo.startup.heads import ChosenHeads, choose_heads
from hpu_duo.startup.kv_plan import read_kv_plan
from hpu_duo.startup.launches import Launch, OwnLaunch, TorchrunLaunch
from hpu_duo.startup.native_code import native_code_built
from hpu_duo.startup.place import Place
from hpu_duo.startup.ranks import LedRanks, joined_as, lifeline_to_rank_0
from hpu_duo.startup.retrieval_choice import captures_exchanges
from hpu_duo.startup.rotary import request_len


class Followed(SystemExit):
    """The end of a process that has followed rank 0 until the order to stop: with exit code 0."""


def build_led(config: EngineConfig) -> DeviceSide:
    """Start the other ranks, or meet those that a launcher has started, and build the share of the first one.

    Raises:
        ValueError: the model cannot be shared by so many ranks, or the configuration does not fit it, or the
            launcher's variables do not.
        RankError: a rank could not be started.
        Followed: this process is another rank than the first, and all have come to their end.
    """
    _check_shared(config)
    size, timeout_s = config.parallel.tensor_parallel_size, config.parallel.timeout_s
    device = str(config.model.device)
    launch: Launch
    local_rank = 0
    if config.parallel.launcher == TORCHRUN:
        launched = Launched.here(size)
        launch, local_rank = TorchrunLaunch(device, launched, MEETING_S), launched.local_rank
        if launched.rank:
            _follow(Ranks(launched.rank, size), local_rank, launch.store, config)
            raise Followed(0)
    else:
        launch = OwnLaunch(device, size, follow_rank_0, (config,))
    ranks = LedRanks(launch, size, timeout_s)
    try:
        place = Place.of(config, local_rank)
        membership = ranks.join(place.runtime.collectives(), place.device)
        side = build_share(config, place, membership, ranks)
    except BaseException as error:
        cause = ranks.cause(error)
        ranks.stop()
        raise cause from error
    ranks.is_led = True
    weakref.finalize(side.runner.executor, ranks.stop)
    return side


def _check_shared(config: EngineConfig) -> None:
    """Refuse what cannot be shared before processes start."""
    path, ranks = config.model.path, Ranks(0, config.parallel.tensor_parallel_size)
    hf_config = read_config(path)
    check_plan(hf_config)
    whole = build_without_weights(path, hf_config, torch.float32)
    layers = read_layers(whole)
    call = layers[0].call
    # Before heads are counted: it names the number that ranks cannot share.
    experts = _experts(config, hf_config, ranks)
    narrowed_config(hf_config, call.head_dim, ranks.size, experts)
    # A pattern changes which heads a rank has, and not how many.
    heads = [RankHeads.of([range(each.call.num_kv_heads)], each.call.num_heads, ranks) for each in layers]
    check_share(path, hf_config, torch.float32, whole, layers, heads, ranks, experts)
    if config.cache.kv_policy is not None or config.cache.kv_plan is not None:
        choose_heads(config, layers, request_len(config, hf_config.get_text_config()), torch.device("cpu"))
    if config.parallel.deals_blocks:
        check_dealt(min(each.call.num_kv_heads for each in layers), ranks.size)
        if not captures_exchanges(config):
            raise ValueError(
                "expected graphs other than 'compile' on a CPU for retrieval_parallel='context': torch's "
                "compiler does not take gathers between ranks there"
            )


def _experts(config: EngineConfig, hf_config: Any, ranks: Ranks) -> ExpertShare | None:
    return ExpertShare.of(hf_config, ranks) if config.parallel.expert_parallel else None


def follow_rank_0(member: Member, config: EngineConfig) -> None:
    """Follow rank 0 in a process that it has started."""
    _follow(Ranks(member.rank, member.size), member.rank, member.store(), config)


def _follow(ranks: Ranks, local_rank: int, store: dist.Store, config: EngineConfig) -> None:
    """Build the share of any rank but 0, and do what rank 0 says, to the end."""
    timeout_s = config.parallel.timeout_s
    with lifeline_to_rank_0(ranks.rank, store, timeout_s) as lifeline:
        place = Place.of(config, local_rank)
        backend = place.runtime.collectives()
        # Told before the others can notice that this rank has left the group.
        with joined_as(ranks, backend, store, place.device, timeout_s) as membership, lifeline.reporting():
            side = build_share(config, place, membership, None)
            follow(membership.link, side.runner, lifeline.count)
            lifeline.close()


@collector_paused()
def build_share(
    config: EngineConfig, place: Place, membership: Membership, followers: Followers | None
) -> DeviceSide:
    """Build the share of one rank, while all others do so too.

    Args:
        followers: the others, on rank 0.

    Raises:
        ValueError: see ``load_rank``.
        RankError: ranks differ, or do not exchange data correctly.
    """
    path = config.model.path
    hf_config = read_config(path)
    check_alike(config, place.runtime, membership)
    check_same_plan(read_kv_plan(config), membership)
    dtype = resolve_dtype(config.model.dtype, hf_config, place.device.type)
    check_exchanges(membership, place.device, dtype, sends_to_each=config.parallel.deals_blocks)
    with native_code_built(config.model, place, dtype):
        share = load_rank(config, hf_config, dtype, place.device, membership.ranks, membership.group)
        check_same_pattern(share.chosen.pattern, membership)
        shared = Shared(membership, hf_config, share.sums, followers)
        return DeviceSide.build(share.model, share.layers, config, place, share.chosen, shared)


class RankShare(NamedTuple):
    """One rank's share of a model, loaded.

    Attributes:
        model: with heads in the order of their groups.
        layers: as probed.
        chosen: groups of heads.
        sums: where ranks sum.
    """

    model: PreTrainedModel
    layers: tuple[DecoderLayer, ...]
    chosen: ChosenHeads
    sums: Sums


def load_rank(
    config: EngineConfig,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    group: str,
) -> RankShare:
    """Load one rank's share of a model.

    Args:
        group: name of the ranks' process group.

    Raises:
        ValueError: see ``load_share``, ``probe`` and ``choose_heads``; or a share attends in another way.
    """
    path = config.model.path
    whole = build_without_weights(path, hf_config, dtype)
    whole_layers = read_layers(whole)
    max_len = request_len(config, hf_config.get_text_config())
    chosen = choose_heads(config, whole_layers, max_len, device)
    parallel, is_planned = config.parallel, config.cache.kv_plan is not None
    shares = Shares(ranks, group, deals_blocks=parallel.deals_blocks, is_planned=is_planned)
    heads = [
        shares.heads(index, each, layer)
        for index, (layer, each) in enumerate(zip(whole_layers, chosen.heads))
    ]
    experts = _experts(config, hf_config, ranks)
    check_share(path, hf_config, dtype, whole, whole_layers, heads, ranks, experts)
    model = load_share(path, hf_config, dtype, whole, whole_layers, heads, ranks, experts)
    fix_served_len(model, config)
    layers = probe(model)
    assigned = tuple(
        shares.assignment(index, each, layer) for index, (each, layer) in enumerate(zip(chosen.heads, layers))
    )
    own = None if chosen.pattern is None else chosen.pattern.of_heads([each.kv for each in heads])
    cutter = make_cutter(hf_config, whole, whole_layers, heads, ranks, experts)
    sums = Sums.of(cutter, whole, whole_layers)
    return RankShare(model, layers, chosen._replace(heads=assigned, own=own), sums)
