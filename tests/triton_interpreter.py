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
    """Within, each launch replaces the functions of a module once; older interpreters are only mended."""
    from triton.runtime import interpreter

    replace: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    scope_class = getattr(interpreter, "_LangPatchScope", None)
    if replace is None or scope_class is None:
        with _indices_of_one_element(interpreter):
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


@contextmanager
def _indices_of_one_element(interpreter: Any) -> Iterator[None]:
    """Within, bounds of loops are taken from arrays of one element by ``item``, as every numpy allows.

    Interpreters that replace functions without a scope, those of Triton 3.3 to 3.5 for example, use ``int``,
    which numpy refuses from 2.4 on.
    """
    replace_tensor: Callable[[Any], None] | None = getattr(interpreter, "_patch_lang_tensor", None)
    if replace_tensor is None:
        yield
        return

    def replace(tensor: Any) -> None:
        replace_tensor(tensor)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = replace
    try:
        yield
    finally:
        interpreter._patch_lang_tensor = replace_tensor
