"""Functions of ours that JAX traces in place of a user's, and that its errors are not to name."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

_BY_POSITION = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


def stands_for(body: Any, fun: Callable[..., Any], arguments: Sequence[Any] | None = None) -> None:
    """Lets JAX's errors about a traced value name a user's function and its line, in place of one of ours that calls it.

    Args:
      body: our function, which JAX traces.
      fun: the user's.
      arguments: where in ``(args, kwargs)`` of the user's function each argument of ours comes from, as the key paths of
        `jax.tree_util`: the names that errors then give. Left out, ours keep their names.
    """
    body.__signature__ = inspect.signature(body) if arguments is None else _named_after(fun, arguments)
    body.__wrapped__ = fun


def _named_after(fun: Callable[..., Any], arguments: Sequence[Any]) -> inspect.Signature:
    """Arguments called ``x`` and ``params_w`` that are ``x`` and ``params['w']`` of a function."""
    try:
        known = [p.name for p in inspect.signature(fun).parameters.values() if p.kind in _BY_POSITION]
    except (TypeError, ValueError):  # a builtin
        known = []
    names: dict[str, inspect.Parameter] = {}
    for _, of, *rest in arguments:
        position = getattr(of, "idx", None)  # a keyword has a name
        name = of.key if position is None else known[position] if position < len(known) else f"args_{position}"
        name = re.sub(r"\W+", "_", f"{name}{jax.tree_util.keystr(tuple(rest))}").strip("_")
        while name in names or not name.isidentifier() or keyword.iskeyword(name):
            name = f"{name}_" if name.isidentifier() else f"a_{name}"
        names[name] = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    return inspect.Signature(list(names.values()))
