"""Texts that are read once and asked many times."""

from hpu_duo.context.model import ContextModel
from hpu_duo.context.prefix_context import PrefixContext

__all__ = ["ContextModel", "PrefixContext"]
