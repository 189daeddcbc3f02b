"""Texts that are read once and asked many times."""

from hpu_duo.context.prefix_context import ContextModel, PrefixContext

__all__ = ["ContextModel", "PrefixContext"]
