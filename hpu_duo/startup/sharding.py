"""Start an engine whose model several ranks share: the first one, and those that follow it."""

from __future__ import annotations

import platform
import weakref
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

from hpu_duo.config import EngineConfig
from hpu_duo.device import Member
from hpu_duo.device.ranks import Followers, Membership, Ranks
from hpu_duo.engine.orders import follow
from hpu_duo.modeling.loading import build_without_weights, read_config, resolve_dtype
from hpu_duo.modeling.model_files import model_fingerprint
from hpu_duo.modeling.probe import DecoderLayer, probe, read_layers
from hpu_duo.modeling.rope import served_len
from hpu_duo.sharded import RankHeads, load_share, narrowed_config, wide_norms
from hpu_duo.sharded.config import check_plan
from hpu_duo.startup.blueprint import fix_served_len
from hpu_duo.startup.device_side import DeviceSide, Shared
from hpu_duo.startup.head_shares import Shares, check_dealt
from hpu_duo.startup.heads import ChosenHeads, choose_heads
from hpu_duo.startup.place import Place
from hpu_duo.startup.ranks import RankProcesses, give_signs_of_life, joined_member
from hpu_duo.startup.retrieval_choice import captures_exchanges


def build_rank_0(config: EngineConfig) -> DeviceSide:
    """Start the other ranks, and build the share of the first one, which leads them.

    Raises:
        ValueError: the model cannot be shared by so many ranks, or the configuration does not fit it.
        RankError: a rank could not be started.
    """
    _check_shared(config)
    size, timeout_s = config.parallel.tensor_parallel_size, config.parallel.timeout_s
    processes = RankProcesses(str(config.model.device), size, timeout_s, follow_rank_0, (config,))
    try:
        place = Place.of(config)
        membership = processes.join(place.runtime.collectives(), place.device)
        side = build_share(config, place, membership, processes)
    except BaseException as error:
        processes.stop()
        raise processes.cause(error) from error
    weakref.finalize(side.runner.executor, processes.stop)
    return side


def _check_shared(config: EngineConfig) -> None:
    """Refuse what cannot be shared before processes start."""
    hf_config = read_config(config.model.path)
    check_plan(hf_config)
    call = read_layers(build_without_weights(config.model.path, hf_config, torch.float32))[0].call
    narrowed_config(hf_config, call.head_dim, config.parallel.tensor_parallel_size)
    if config.parallel.deals_blocks:
        check_dealt(call.num_kv_heads, config.parallel.tensor_parallel_size)
        if not captures_exchanges(config):
            raise ValueError(
                "expected graphs other than 'compile' on a CPU for retrieval_parallel='context': torch's "
                "compiler does not take gathers between ranks there"
            )


def follow_rank_0(member: Member, config: EngineConfig) -> None:
    """Build the share of any other rank, and do what rank 0 says; what the rank's process runs."""
    give_signs_of_life(member)
    place = Place.of(config, member.rank)
    backend = place.runtime.collectives()
    with joined_member(member, backend, place.device, config.parallel.timeout_s) as membership:
        side = build_share(config, place, membership, None)
        follow(membership.link, side.runner)


def build_share(
    config: EngineConfig, place: Place, membership: Membership, followers: Followers | None
) -> DeviceSide:
    """Build the share of one rank, while all others do so too.

    Args:
        followers: the others, on rank 0.

    Raises:
        ValueError: see ``load_rank``.
        RankError: ranks differ.
    """
    path = config.model.path
    hf_config = read_config(path)
    membership.compare("model and versions", (model_fingerprint(Path(path)), *_versions()))
    dtype = resolve_dtype(config.model.dtype, hf_config, place.device.type)
    share = load_rank(config, hf_config, dtype, place.device, membership.ranks, membership.group)
    shared = Shared(membership, hf_config.get_text_config().vocab_size, share.wide_norms, followers)
    return DeviceSide.build(share.model, share.layers, config, place, share.chosen, shared)


class RankShare(NamedTuple):
    """One rank's share of a model, loaded.

    Attributes:
        model: with heads in the order of their groups.
        layers: as probed.
        chosen: groups of heads.
        wide_norms: names of norms over the heads of all ranks.
    """

    model: PreTrainedModel
    layers: tuple[DecoderLayer, ...]
    chosen: ChosenHeads
    wide_norms: tuple[str, ...]


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
    max_len = served_len(hf_config.get_text_config(), config.scheduler.max_model_len)
    chosen = choose_heads(config, whole_layers, max_len, device)
    shares = Shares(ranks, group, deals_blocks=config.parallel.deals_blocks)
    heads = [shares.heads(each, layer) for layer, each in zip(whole_layers, chosen.heads)]
    narrow = narrowed_config(hf_config, whole_layers[0].call.head_dim, ranks.size)
    # Before weights are read.
    for number, layer in enumerate(read_layers(build_without_weights(path, narrow, dtype))):
        _check_same(type(whole).__name__, number, whole_layers[number], layer, heads[number])
    model = load_share(path, hf_config, dtype, whole, whole_layers, heads, ranks)
    fix_served_len(model, config)
    layers = probe(model)
    assigned = tuple(shares.assignment(each, layer) for each, layer in zip(chosen.heads, layers))
    return RankShare(model, layers, chosen._replace(heads=assigned), wide_norms(whole_layers[0]))


def _check_same(name: str, number: int, whole: DecoderLayer, share: DecoderLayer, heads: RankHeads) -> None:
    """Refuse a family whose attention depends on the number of heads in other ways than its sizes do."""
    first, second = whole.call, share.call
    expected = (
        len(heads.query),
        len(heads.kv),
        first.head_dim,
        first.scale,
        first.sliding_window,
        first.softcap,
    )
    got = (
        *(second.num_heads, second.num_kv_heads, second.head_dim),
        *(second.scale, second.sliding_window, second.softcap),
    )
    if expected != got or first.has_sinks:
        raise ValueError(
            f"{name}, layer {number}, cannot be served by several ranks: expected attention with (query "
            f"heads, key/value heads, head size, scale, window, soft cap) {expected} in a share, got {got}"
            + (" and attention sinks" if first.has_sinks else "")
        )


def _versions() -> tuple[str, ...]:
    return torch.__version__, transformers.__version__, version("hpu-duo"), platform.python_version()
