"""Scopes for NNX modules, so that `manymesh.register_task` knows them by their paths.

Linen opens a scope around every module; NNX opens none. While a program is traced and patterns are registered, the
methods of modules open one: that of a module called inside another is its path from there (``layers/0``), that of an
outermost one is its path from the argument of the step that it is in, or the name of its class. The methods are
wrapped in their classes once, and do nothing else.

NNX calls the functions that it transforms (``nnx.remat``, ``nnx.scan``, ``nnx.grad``) with new modules, equal to the ones
it was given in all but identity. So modules carry their path with them, as an attribute that is part of their
definition, for as long as the outermost call lasts.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.nnx as nnx
import jax

from .._shown import name_of
from .._types import PyTree
from .._wrapping import plain_name


class _Call:
    """A module that is being called, and the paths of those below it."""

    def __init__(self, module: nnx.Module) -> None:
        self.module = module
        self._paths: dict[int, str] | None = None

    def path_of(self, module: nnx.Module) -> str | None:
        if self._paths is None:
            self._paths = {id(m): "/".join(map(str, path)) for path, m in nnx.iter_modules(self.module) if path}
        return self._paths.get(id(module))


# The attribute by which a module carries its path from the root. What a bridge to Linen holds under a name of another
# beginning it takes for variables of Linen.
_PATH = "to_nnx__manymesh_path"

_calls: contextvars.ContextVar[tuple[_Call, ...] | None] = contextvars.ContextVar("manymesh_nnx_calls", default=None)


@contextlib.contextmanager
def naming() -> Iterator[None]:
    """Inside, modules open scopes."""
    pending: list[type] = [nnx.Module]
    while pending:
        cls = pending.pop()
        pending.extend(type.__subclasses__(cls))
        if cls is not nnx.Module and "_manymesh_task" not in vars(cls):
            _name_methods(cls)
    token = _calls.set(())
    try:
        yield
    finally:
        _calls.reset(token)


def _name_methods(cls: type) -> None:
    for name, method in list(vars(cls).items()):
        public = name == "__call__" or not name.startswith("_")
        if public and inspect.isfunction(method) and not hasattr(method, "_manymesh_named"):
            setattr(cls, name, _named(name, method))


def _named(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: PyTree, **kwargs: PyTree) -> PyTree:
        calls = _calls.get()
        if calls is None:
            return method(self, *args, **kwargs)
        with _carrying(() if calls else (self,)) as seen:
            token = _calls.set((*calls, _Call(self)))
            try:
                with jax.named_scope(_scope(self, name, calls)):
                    out = method(self, *args, **kwargs)
            finally:
                _calls.reset(token)
            seen.append(out)
            return out

    call._manymesh_named = True  # type: ignore[attr-defined]  # a mark, so that it is wrapped once
    return call


def rooted(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function of modules in which these know their paths from the arguments they are in."""

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _calls.get() is None:
            return fun(*args, **kwargs)
        roots = [x for x in jax.tree.leaves((args, kwargs), is_leaf=_is_module) if _is_module(x)]
        with _carrying(roots) as seen:
            out = fun(*args, **kwargs)
            seen.append(out)
            return out

    call.__name__ = name_of(fun)  # which a partial application does not have
    return call


def _is_module(x: object) -> bool:
    return isinstance(x, nnx.Module)


@contextlib.contextmanager
def _carrying(roots: Iterable[nnx.Module]) -> Iterator[list[Any]]:
    """Inside, modules below the roots carry their paths, and so do those that NNX makes of them.

    Yields:
      a list. What is in it in the end is cleared of paths too: results may be modules made inside.
    """
    seen: list[Any] = []
    for root in roots:
        if _PATH not in vars(root):  # else a root further out has named it
            seen.append(root)
            for path, module in nnx.iter_modules(root):
                vars(module).setdefault(_PATH, "/".join(map(str, path)))
    try:
        yield seen
    finally:
        if any(_is_module(x) and _PATH in vars(x) for x in seen):
            for x in jax.tree.leaves(seen, is_leaf=_is_module):
                for _, module in nnx.iter_modules(x) if _is_module(x) else ():
                    if _PATH in vars(module):
                        delattr(module, _PATH)


def _scope(module: nnx.Module, method: str, calls: tuple[_Call, ...]) -> str:
    path = next((path for around in reversed(calls) if (path := around.path_of(module)) is not None), None)
    if path is None:
        path = _carried_path(module, calls) or plain_name(type(module).__name__)
    return path if method == "__call__" else f"{path}.{method}"


def _carried_path(module: nnx.Module, calls: tuple[_Call, ...]) -> str:
    """The path that a module carries, from the innermost of the modules being called that it is in."""
    path: str = vars(module).get(_PATH, "")
    for around in reversed(calls):
        start = vars(around.module).get(_PATH)
        if start and path.startswith(f"{start}/"):
            return path[len(start) + 1 :]
    return path
