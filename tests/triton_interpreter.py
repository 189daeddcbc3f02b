"""Making Triton's interpreter fast enough for tests.

The interpreter replaces the functions of ``triton.language`` anew for every call of a device function, of
``tl.max`` too, and puts them back once, when the launch ends. That is most of its time. Here a module that
is already replaced is left alone until then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replacing_once() -> Iterator[None]:
    """Within, each launch replaces the functions of a module once. Does nothing for unknown interpreters."""
    from triton.runtime import interpreter

    replace: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    scope_class = getattr(interpreter, "_LangPatchScope", None)
    if replace is None or scope_class is None:
        yield
        return
    done: set[str] = set()
    scopes: list[Any] = []

    def restore_all() -> None:
        done.clear()
        while scopes:
            scope_class.restore(scopes.pop())

    def replace_once(fn: Any) -> Any:
        used = {module.__name__ for module in fn.__globals__.values() if inspect.ismodule(module)}
        used &= {"triton.language", "triton.language.core"}
        if used <= done:
            return scope_class()
        is_launch = not done
        done.update(used)
        scopes.append(replace(fn))
        if is_launch:
            scopes[0].restore = restore_all
        return scopes[-1]

    interpreter._patch_lang = replace_once
    try:
        yield
    finally:
        interpreter._patch_lang = replace
