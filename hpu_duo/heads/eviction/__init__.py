"""Eviction policies of heads with a KV budget."""

from collections.abc import Callable

from hpu_duo.heads.eviction.by_attention import TOVA, ExpectedAttention, HeavyHitters, SnapKV
from hpu_duo.heads.eviction.by_position import Fixed, Local, StreamingLLM, Strided
from hpu_duo.heads.eviction.fastgen import FastGenSet
from hpu_duo.option_spec import call_with_options
from kernels_ref import KVPolicy

__all__ = [
    "KV_POLICIES",
    "TOVA",
    "ExpectedAttention",
    "FastGenSet",
    "Fixed",
    "HeavyHitters",
    "Local",
    "SnapKV",
    "StreamingLLM",
    "Strided",
    "make_kv_policy",
]

KV_POLICIES: dict[str, Callable[..., KVPolicy]] = {
    "expected-attention": ExpectedAttention,
    "fastgen": FastGenSet,
    "fixed": Fixed,
    "h2o": HeavyHitters,
    "local": Local,
    "snapkv": SnapKV,
    "streaming-llm": StreamingLLM,
    "strided": Strided,
    "tova": TOVA,
}
"""Policies by name."""


def make_kv_policy(name: str) -> KVPolicy:
    """Create a policy from its name and options, such as ``h2o:recent=0.25``.

    Raises:
        ValueError: there is none of this name, or it has no such option or not with this value.
    """
    return call_with_options("kv_policy", name, KV_POLICIES)
