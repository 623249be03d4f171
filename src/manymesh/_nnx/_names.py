"""Scopes for NNX modules, so that `manymesh.register_task` knows them by their paths.

Linen opens a scope around every module; NNX opens none. While a program is traced and patterns are registered, the
methods of modules open one: that of a module called inside another is its path from there (``layers/0``), that of an
outermost one is the name of its class. The methods are wrapped in their classes once, and do nothing else.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import flax.nnx as nnx
import jax

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
        token = _calls.set((*calls, _Call(self)))
        try:
            with jax.named_scope(_scope(self, name, calls)):
                return method(self, *args, **kwargs)
        finally:
            _calls.reset(token)

    call._manymesh_named = True  # type: ignore[attr-defined]  # a mark, so that it is wrapped once
    return call


def _scope(module: nnx.Module, method: str, calls: tuple[_Call, ...]) -> str:
    for around in reversed(calls):
        path = around.path_of(module)
        if path is not None:
            break
    else:
        path = plain_name(type(module).__name__)
    return path if method == "__call__" else f"{path}.{method}"
