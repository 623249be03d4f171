"""What is cheap to compute again, and which values to keep so that the rest is.

The values to keep are a minimum cut: sources are what is expensive to compute (a matrix product, a sum; on CPU an
exponential, too), the sink is what is read later, and to keep a value costs its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import jax.numpy as jnp
from jax.sharding import Mesh

from .. import _compat
from .._compat import Atom, Eqn, Var
from .._mark import constraint_p
from .._program._calls import inlined
from .._program._harmless import is_harmless
from .._program._nodes import nbytes, shape_and_dtype
from .._program._rewrite import substitute
from .._task import mesh_devices
from ._cut import Network

# Elementwise, without a function that takes more than a few instructions; and what only moves or names elements.
_CHEAP = frozenset({
    "abs", "add", "add_any", "and", "bitcast_convert_type", "broadcast_in_dim", "clamp", "clz", "complex", "conj",
    "convert_element_type", "copy", "dynamic_slice", "eq", "ge", "gt", "imag", "iota", "le", "lt", "max", "min", "mul", "name", "ne",
    "neg",
    "not", "one_minus_square", "or", "population_count", "real", "reshape", "reshard", "rev", "select_n", "sharding_constraint",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "slice", "split", "square", "squeeze", "stop_gradient",
    "sub", "tile", "transpose", "unstack", "xor", constraint_p.name,
})  # fmt: skip
# On an accelerator the arithmetic of one element costs nothing beside reading it from memory, whatever the function.
_FUNCTIONS = {
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "cos", "cosh", "div", "erf", "erf_inv", "erfc",
    "exp", "exp2", "expm1", "floor", "integer_pow", "is_finite", "log", "log1p", "log2", "logistic", "polynomial", "pow", "rem",
    "round", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh",
}  # fmt: skip
# Those that only move or name elements.
_MOVES = {
    "broadcast_in_dim", "copy", "name", "reshape", "reshard", "sharding_constraint", "squeeze", "stop_gradient", constraint_p.name,
}  # fmt: skip
_SAME = _MOVES | {"convert_element_type"}
_COMPARES = {"eq", "eq_to", "ge", "gt", "le", "le_to", "lt", "lt_to", "ne"}
# What gives some of the elements that it reads as they are.
_PICKS = {
    "cummax", "cummin", "gather", "reduce_max", "reduce_min", "reduce_window_max", "reduce_window_min", "sort", "top_k",
}  # fmt: skip
# What gives one of the elements that it reads at each place, and is computed on the way.
_CHOOSES = {"clamp", "max", "min"}
_SUMS = {"add", "add_any"}
# What is expensive and reads what is computed on the way.
_FUSED = {
    "argmax", "argmin", "concatenate", "cumsum", "gather", "pad", "reduce", "reduce_and", "reduce_max", "reduce_min", "reduce_or",
    "reduce_precision", "reduce_prod", "reduce_sum", "scatter", "scatter-add", "stack",
}  # fmt: skip
_SMALL_POWER = 4
_LITTLE_MORE = 1.01
# Of the arithmetic of all products, what those of weights alone may be to be done again: a merged adapter of 8 rows is, where
# 64 rows of activations go through the layer.
_SMALL_PART = 1 / 8

_BEYOND = float("inf")


def cheap_on(mesh: Mesh | None) -> frozenset[str]:
    """The primitives that cost little on a submesh. Planned devices stand for accelerators."""
    on_cpu = mesh is None or all(d.platform == "cpu" for d in mesh_devices(mesh))
    return _CHEAP if on_cpu else _CHEAP | _FUNCTIONS


def compute_again(
    result: Atom,
    producer: Mapping[Var, Eqn],
    env: dict[Var, Atom],
    here: Callable[[Var], Var | None],
    again: list[Eqn],
) -> None:
    """Makes a value available elsewhere: adds to ``again`` the equations that make it of what is there, and it to ``env``.

    Args:
      result: the value.
      producer: variable -> the equation that makes it.
      env: variable -> what it is called there.
      here: what a variable is called there that is kept or read; None for one that is to be computed.
      again: equations that are computed there.
    """
    stack: list[Atom] = [result]  # no recursion: a chain of cheap equations may be as long as the task
    while stack:
        v = stack[-1]
        if not _compat.is_var(v) or v in env:
            stack.pop()
        elif (there := here(v)) is not None:
            env[v] = there
        else:
            eqn = producer[v]
            missing = [o for o in eqn.invars if _compat.is_var(o) and o not in env]
            stack += missing
            if not missing:
                again.append(substitute(eqn, env))


@dataclass(frozen=True)
class _Cheap:
    """What costs little to compute again.

    Attributes:
      names: the primitives that do.
      products: ids of equations that do, besides.
    """

    names: frozenset[str]
    products: frozenset[int] = frozenset()

    def __call__(self, eqn: Eqn) -> bool:
        if eqn.primitive.name == "integer_pow" and 0 < eqn.params["y"] <= _SMALL_POWER:
            return True
        # What is made of nothing, but for what the host or a loop makes of it.
        constant = is_harmless(eqn) and not any(_compat.is_var(v) for v in eqn.invars)
        return (constant or eqn.primitive.name in self.names or id(eqn) in self.products) and not eqn.effects

    def or_picks(self) -> _Cheap:
        """And what gives some of the elements that it reads."""
        return replace(self, names=self.names | _PICKS)


def _small_products(lasting: Iterable[Var], eqns: Sequence[Eqn]) -> frozenset[int]:
    """The products of weights alone, if they are a small part of all: a merged adapter, which is as large as a weight."""
    made = set(lasting)
    alone, others = dict[int, int](), 0
    for e in eqns:
        is_alone = made.issuperset(filter(_compat.is_var, e.invars))
        made.update(filter(_compat.is_var, e.outvars) if is_alone else ())
        if e.primitive.name == "dot_general":
            (contracted, _), _ = e.params["dimension_numbers"]
            left, result = shape_and_dtype(e.invars[0])[0], shape_and_dtype(e.outvars[0])[0]
            work = math.prod([*result, *(left[d] for d in contracted)])
            if is_alone:
                alone[id(e)] = work
            else:
                others += work
    return frozenset(alone if sum(alone.values()) <= _SMALL_PART * others else ())


def _dearer(invars: Sequence[Var], eqns: Sequence[Eqn], cheap: _Cheap) -> dict[Var, float]:
    """What it costs to keep a value that is in memory only if it is kept: a little more than another one of its size.

    XLA fuses arithmetic into what reads it. What it writes anyway are what is expensive, what that reads unless it is fused,
    too, and sums of these: a product with its bias, what goes around a layer.
    """
    there, spread = set(invars), set[Var]()
    found: dict[Var, float] = {}
    for e in eqns:
        made = [v for v in e.outvars if _compat.is_var(v)]
        spread.update(made if e.primitive.name == "broadcast_in_dim" else ())
        read = {v for v in e.invars if _compat.is_var(v)} - spread
        is_sum = e.primitive.name in _SUMS | _MOVES and read <= there
        if is_sum or not cheap(e):
            there.update(made)
        else:
            found.update((v, _LITTLE_MORE * nbytes(v.aval)) for v in made)
        if not cheap(e) and e.primitive.name not in _FUSED:
            for v in filter(_compat.is_var, e.invars):
                found.pop(v, None)
    return found


def _looks_for_element(eqn: Eqn, producer: Mapping[Var, Eqn], cheap: _Cheap) -> bool:
    """Whether it compares elements with what was picked among them, their maximum, say, as the derivative of that does.

    One of them has to be equal to the last bit. In another executable, where they are computed again, none may be: the
    derivative is 0/0 then, and what keeps the largest keeps none.
    """
    if eqn.primitive.name not in _COMPARES or not jnp.issubdtype(_compat.dtype(eqn.invars[0]), jnp.inexact):
        return False
    here, picks = _computed_again(eqn.invars, producer, cheap)
    return any(not here.isdisjoint(_computed_again(e.invars, producer, cheap.or_picks())[0]) for e in picks)


def compared(eqns: Sequence[Eqn], names: frozenset[str]) -> set[Var]:
    """The values that equations, or the calls that they are, compare with others, as they are or after cheap arithmetic.

    What looks for the largest element of a value, say, has to find one that is equal to the last bit to what was picked before.
    """
    found, cheap = set[Var](), _Cheap(names)
    for e in reversed(inlined(list(eqns))[0]):
        picks = e.primitive.name in ("eq", "eq_to") and all(map(_compat.is_var, e.invars))
        if picks or (cheap(e) and not found.isdisjoint(filter(_compat.is_var, e.outvars))):
            found.update(filter(_compat.is_var, e.invars))
    return found


def _torn(wanted: Iterable[Var], saved: set[Var], producer: Mapping[Var, Eqn], cheap: _Cheap) -> set[Var]:
    """The comparisons of an element that would be computed again with one that was kept, and chosen of it and others.

    The larger of two, say. As above none of the two may be equal to it; if both are computed again, one is.
    """
    again = _computed_again(wanted, producer, cheap, saved)[0]
    found = set[Var]()
    for v in again:
        eqn = producer[v]
        if eqn.primitive.name not in _COMPARES or not jnp.issubdtype(_compat.dtype(eqn.invars[0]), jnp.inexact):
            continue
        here = [_computed_again([x], producer, cheap, saved)[0] for x in eqn.invars]
        for x, own, others in zip(eqn.invars, here, here[::-1], strict=True):
            read = [x, *(o for w in own for o in producer[w].invars)]
            kept = [o for o in read if _compat.is_var(o) and o in saved]
            if _chosen_of(_computed_again(kept, producer, cheap)[0], others, producer):
                found.add(v)
    return found


def _far(wanted: Iterable[Var], saved: set[Var], producer: Mapping[Var, Eqn], most: float) -> set[Var]:
    """Values that would be computed again of too many others; what comes after one of them is computed of it."""
    if most == _BEYOND:
        return set()
    lost = {v for v in wanted if v not in saved}
    needed, todo = set(lost), list(lost)
    while todo:
        made = producer.get(todo.pop())
        for o in made.invars if made is not None else ():
            if _compat.is_var(o) and o not in saved and o not in needed:
                needed.add(o)
                todo.append(o)
    found: set[Var] = set()
    made_of: dict[Var, set[Var]] = {}  # what is kept or there, of which a value is computed again: as many as count
    for v, e in producer.items():
        if v not in needed or v in saved:
            continue
        of: set[Var] = set()
        for o in e.invars:
            if _compat.is_var(o):
                of |= made_of.get(o, {o})
        if len(of) > most and v in lost:
            found.add(v)
        else:
            made_of[v] = set(islice(of, int(most) + 1))
    return found


def _chosen_of(values: set[Var], others: set[Var], producer: Mapping[Var, Eqn]) -> bool:
    """Whether some of the values are chosen among others, as these are or cast."""
    for e in (producer[v] for v in values):
        for v in e.invars if e.primitive.name in _CHOOSES else ():
            while _compat.is_var(v) and (made := producer.get(v)) is not None and made.primitive.name in _SAME:
                v = made.invars[0]
            if _compat.is_var(v) and v in others:
                return True
    return False


def _computed_again(
    values: Iterable[Atom], producer: Mapping[Var, Eqn], cheap: _Cheap, saved: Collection[Var] = ()
) -> tuple[set[Var], list[Eqn]]:
    """What is cheap to compute on the way to values, from what is saved on, and the equations before it that pick elements."""
    found: set[Var] = set()
    picks: list[Eqn] = []
    todo = list(values)
    while todo:
        v = todo.pop()
        if not _compat.is_var(v) or v in found or v in saved or (made := producer.get(v)) is None:
            continue
        if cheap(made):
            found.add(v)
            todo += made.invars
        elif made.primitive.name in _PICKS:
            picks.append(made)
    return found, picks


def cheap_way(v: Var, known: Collection[Var], producer: Mapping[Var, Eqn], names: frozenset[str]) -> list[Eqn]:
    """The cheap equations that make a value of others that are known; none if some other one is needed.

    None either if one of them looks for an element, or says names that only its task knows.
    """
    cheap = _Cheap(names)
    found: dict[Eqn, None] = {}
    stack = [v]
    while stack:
        w = stack.pop()
        eqn = producer.get(w)
        if eqn is None or eqn.primitive is constraint_p or not cheap(eqn) or _looks_for_element(eqn, producer, cheap):
            if w is v or w not in known:
                return []
        elif eqn not in found:
            found[eqn] = None
            stack += filter(_compat.is_var, eqn.invars)
    return list(found)


def cheapest(
    wanted: Sequence[Var],
    free: Collection[Var],
    invars: Sequence[Var],
    eqns: Sequence[Eqn],
    names: frozenset[str],
    lasting: Iterable[Var] = (),
    never: Collection[Var] = (),
    most: float = _BEYOND,
) -> set[Var]:
    """The values to keep: the minimum cut between what is expensive to compute and what is wanted.

    Among cuts of equal cost the one closest to what is wanted, which computes least again.

    Args:
      wanted: what is read later.
      free: what costs nothing to keep.
      invars, eqns: what the values are made of.
      names: the primitives that cost little.
      lasting: those of ``invars`` that outlive the microbatch.
      never: what cannot be kept.
      most: of how many others a value may be computed again; a sum over many layers is not.
    """
    cheap = _Cheap(names, _small_products(lasting, eqns))
    producer = {v: e for e in eqns for v in e.outvars if _compat.is_var(v)}
    cost = {} if names is _CHEAP else _dearer(invars, eqns, cheap)
    cost |= dict.fromkeys(free, 0) | dict.fromkeys(never, _BEYOND)
    kept = set[Var]()
    while True:
        saved = _cut(wanted, kept, cost, producer, cheap)
        if not (torn := _torn(wanted, saved, producer, cheap) or _far(wanted, saved, producer, most)):
            return saved
        kept |= torn


def _cut(
    wanted: Sequence[Var], kept: set[Var], cost: Mapping[Var, float], producer: Mapping[Var, Eqn], cheap: _Cheap
) -> set[Var]:
    """The same, where some values are not computed again whatever it costs to keep them."""
    network = Network()
    source, sink = object(), object()
    stack, seen = list(wanted), set(wanted)
    while stack:
        v = stack.pop()
        network.add((v, "in"), (v, "out"), cost.get(v, nbytes(v.aval)))
        eqn = producer.get(v)
        if eqn is None or v in kept or not cheap(eqn) or _looks_for_element(eqn, producer, cheap):
            network.add(source, (v, "in"), _BEYOND)
            continue
        for operand in eqn.invars:
            if _compat.is_var(operand):
                network.add((operand, "out"), (v, "in"), _BEYOND)
                if operand not in seen:
                    seen.add(operand)
                    stack.append(operand)
    for v in wanted:
        network.add((v, "out"), sink, _BEYOND)
    network.fill(source, sink)
    behind = network.behind(sink)
    return {v for v in seen if (v, "out") in behind and (v, "in") not in behind}
