"""kvpress as a peer: the same questions, budgets and model, in an environment of its own.

Source: kvpress (github.com/NVIDIA/kvpress), 0.5.5.
"""

from hpu_duo.lab.eval.kvpress_peer.comparison import beside, comparison_table
from hpu_duo.lab.eval.kvpress_peer.model import KVPressModel
from hpu_duo.lab.eval.kvpress_peer.presses import Press, press_of
from hpu_duo.lab.eval.kvpress_peer.process import KVPressError, KVPressProcess

__all__ = [
    "KVPressError",
    "KVPressModel",
    "KVPressProcess",
    "Press",
    "beside",
    "comparison_table",
    "press_of",
]
