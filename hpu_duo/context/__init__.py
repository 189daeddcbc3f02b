"""Contexts: texts that are computed once, for many questions."""

from hpu_duo.context.prefix_context import ContextModel, PrefixContext

__all__ = ["ContextModel", "PrefixContext"]
