"""A structural key of a jaxpr: equal for computations that compile to the same executable.

Variables are numbered in order of appearance, the marks of tasks are dropped, nested jaxprs are
walked, constants go in by content. Two layers of a model that differ only in name share one key.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from . import _compat

# Parameters that never change what is computed: names, and the rules for its derivatives.
IGNORED = {"name", "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "fwd_jaxpr_fun", "bwd", "jvp_jaxpr_thunk", "num_consts_thunk"}

PLAIN = frozenset({int, str, bool, float, type(None)})  # values that are what they say


class Key:
    """What a jaxpr computes, hashed once."""

    __slots__ = ("_content", "_hash")

    def __init__(self, content: Any) -> None:
        self._content = content
        self._hash = hash(content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Key) and self._hash == other._hash and self._content == other._content
        )


class Keys:
    """Makes keys of jaxprs, and remembers those of the jaxprs that they hold, which often are the same object.

    Args:
      exact: whether computations with other rules for their derivatives, or other names, are other computations.
    """

    def __init__(self, exact: bool = False) -> None:
        self._exact = exact
        self._known: dict[int, tuple[Any, Key]] = {}  # by id, with the jaxpr so that the id stays its own

    def __call__(self, jaxpr: Any) -> Key:
        """The key of an open or closed jaxpr."""
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = jaxpr, Key(self._content(jaxpr))
        return self._known[id(jaxpr)][1]

    def clear(self) -> None:
        """Lets go of the jaxprs."""
        self._known.clear()

    def _content(self, jaxpr: Any) -> Any:
        parts = _compat.open_jaxpr(jaxpr)
        number: dict[Any, int] = {}

        def atom(v: Any) -> Any:
            if not isinstance(v, _compat.Var):
                return ("lit", _aval(v.aval), content_of(v.val))
            return number.setdefault(v, len(number))

        head = tuple((atom(v), _aval(v.aval)) for v in [*parts.constvars, *parts.invars])
        eqns = []
        for e in parts.eqns:
            ins = tuple([atom(v) for v in e.invars])
            params = self.params(e)
            outs = tuple([(atom(v), _aval(v.aval)) if _compat.is_var(v) else None for v in e.outvars])
            eqns.append((e.primitive.name, ins, params, outs, _compat.eqn_context(e)))
        return (head, tuple(eqns), tuple(atom(v) for v in parts.outvars), tuple(content_of(c) for c in parts.consts))

    def params(self, eqn: _compat.Eqn) -> tuple[Any, ...]:
        """The key of what an equation does with its operands."""
        return tuple([(k, self._param(v)) for k, v in sorted(eqn.params.items()) if self._exact or k not in IGNORED])

    def _param(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return value
        if _compat.is_jaxpr(value):
            return self(value)
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, tuple([self._param(v) for v in value]))
        if isinstance(value, dict):
            return tuple(sorted((str(k), self._param(v)) for k, v in value.items()))
        if isinstance(value, np.ndarray):
            return content_of(value)
        if callable(value) and not isinstance(value, type):
            return Kept(value)
        try:
            hash(value)
        except TypeError:
            return Kept(value)
        return value


def _aval(aval: Any) -> Any:
    return (aval.shape, aval.dtype, getattr(aval, "weak_type", False), _compat.is_in_host_memory(aval))


def content_of(value: Any) -> Any:
    """What equal constants have in common; the object itself where it is no array."""
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # also while something is traced
            words = jax.random.key_data(value)
        return ("key", str(value.dtype), content_of(words))
    array = np.asarray(value)
    if array.dtype == object:
        return Kept(value)
    return (
        array.shape,
        str(array.dtype),
        hashlib.sha256(array.tobytes()).hexdigest() if array.size > 4 else array.tobytes(),
    )


class Kept:
    """An object compared by identity that stays alive as long as the key does."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
