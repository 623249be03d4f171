"""States that mirror a parameter: moments, averages and master copies, by the arithmetic that ties them to it.

An optimizer's update is elementwise: the first element of a moment meets the first element of its parameter and
no other. Where such a state is laid out like its parameter nothing has to move, and it takes as little memory on
each device as the parameter does. So whatever elementwise arithmetic outside the microbatch loops ties together is
found here, by union of the variables of each elementwise equation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from .. import _compat
from .._compat import Atom, Eqn, Jaxpr, Var
from .._mark import MARK
from .._program import Program
from .._program._groups import Groups
from .._program._updates import of_gradients

_ELEMENTWISE = frozenset(
    (
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
        "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp",
        "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max",
        "min", "mul", "ne", "neg", "nextafter", "not", "optimization_barrier", "or", "pow", "reduce_precision", "rem",
        "round", "rsqrt", "select_n", "sharding_constraint", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan",
        "tanh", "xor",
    )
)  # fmt: skip


def mirrors(program: Program, states: Iterable[Var]) -> list[tuple[Var, ...]]:
    """Sets of states that elementwise arithmetic ties together, each in the order of ``states``.

    Args:
      program: the program.
      states: the inputs that a result replaces, here or in another program.
    """
    groups: Groups[Var] = Groups()
    ties = _Ties()
    for f in program.fragments:
        if f.loop is None:
            ties.join(groups, _compat.open_jaxpr(f.jaxpr).eqns)
    known = [v for v in dict.fromkeys(states) if _compat.shape(v)]
    _join_lonely(program, groups, known)
    found: dict[Var, list[Var]] = {}
    for v in known:
        found.setdefault(groups.find(v), []).append(v)
    return [tuple(members) for members in found.values() if len(members) > 1]


def _join_lonely(program: Program, groups: Groups[Var], states: Sequence[Var]) -> None:
    """Joins a state that nothing is tied to with the only other one that it has a part in, if that has its shape.

    Muon multiplies its momentum with itself before it adds it to the parameter. What has a part in what a task computes is
    a parameter itself.
    """
    count = Counter(groups.find(v) for v in states)
    lonely = [v for v in states if count[groups.find(v)] == 1]
    reach = _Reach(lonely)
    parameters: set[Var] = set()
    updated = of_gradients(program) if lonely else set()  # which a step that trains twice reads the second time
    for f in program.fragments if lonely else ():
        for eqn in _compat.open_jaxpr(f.jaxpr).eqns:
            if f.loop is not None or (_compat.is_jit(eqn) and MARK in eqn.params["name"]):
                parameters.update(*(reach.of(v) for v in eqn.invars if _compat.is_var(v) and v not in updated))
            else:
                reach.follow(eqn)
    results: dict[Var, set[Var]] = {v: set() for v in lonely if v not in parameters}
    for out, _ in program.outputs:
        for v in reach.of(out) & results.keys():
            results[v].add(groups.find(out))
    homes = {groups.find(v): v for v in states}
    for v, found_in in results.items():
        others = [homes.get(group) for group in found_in if group != groups.find(v)]
        if len(others) == 1 and others[0] is not None and _compat.shape(others[0]) == _compat.shape(v):
            groups.join(v, others[0])


class _Reach:
    """Which states have a part in each value; of a stack of several, which of them in each layer.

    Args:
      states: those that are followed.
    """

    def __init__(self, states: Iterable[Var]) -> None:
        self._whole: dict[Atom, frozenset[Var]] = {v: frozenset((v,)) for v in states}
        # Value -> what has a part in each place of its first dimension.
        self._layers: dict[Atom, list[frozenset[Var]]] = {}

    def of(self, atom: Atom) -> frozenset[Var]:
        """The states that have a part in a value."""
        return self._whole.get(atom, frozenset()) if _compat.is_var(atom) else frozenset()

    def read(self, eqn: Eqn) -> frozenset[Var]:
        """The states that have a part in what an equation reads."""
        return frozenset().union(*map(self.of, eqn.invars))

    def follow(self, eqn: Eqn) -> None:
        """Notes what an equation makes. What is done to a stack is taken to be done to each of its layers."""
        found = self.read(eqn)
        for v in eqn.outvars if found else ():
            if _compat.is_var(v):
                layers = self._layers_of(eqn, v)
                self._whole[v] = found if layers is None else frozenset().union(*layers)
                if layers is not None and len(layers) == _length(v):
                    self._layers[v] = layers

    def _layers_of(self, eqn: Eqn, v: Var) -> list[frozenset[Var]] | None:
        """What has a part in each layer of a result; None where it is no stack, and no layers of one."""
        name, params = eqn.primitive.name, eqn.params
        if name == "stack" and params["axis"] == 0:
            return [self.of(x) for x in eqn.invars]
        if name == "concatenate" and params["dimension"] == 0:
            return [self.of(x) for x in eqn.invars for _ in range(_length(x))]
        given = self._layers.get(eqn.invars[0]) if _compat.is_var(eqn.invars[0]) else None
        if given is not None and name == "unstack" and params["axis"] == 0:
            return [given[eqn.outvars.index(v)]]
        if given is not None and name == "slice":
            return given[params["start_indices"][0] : params["limit_indices"][0]]
        layers = [self._layers.get(x, []) if _compat.is_var(x) else [] for x in eqn.invars]
        stacks = [each for each in layers if len(each) == _length(v)]
        if not any(stacks):
            return None
        others = frozenset[Var]().union(
            *(self.of(x) for x, each in zip(eqn.invars, layers, strict=True) if len(each) != _length(v))
        )
        return [others.union(*each) for each in zip(*stacks, strict=True)]


def _length(atom: Atom) -> int:
    return next(iter(_compat.shape(atom)), 0)


class _Ties:
    """What each jaxpr ties together, found once for all its calls."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Jaxpr, list[list[int]]]] = {}

    def join(self, groups: Groups[Var], eqns: Sequence[Eqn]) -> None:
        """Joins the variables that each equation works on element by element."""
        spread: set[Var] = set()  # one number for all elements ties nothing, though several updates may share it
        for eqn in eqns:
            if eqn.primitive.name == "broadcast_in_dim":
                spread.update(v for v in eqn.outvars if _compat.is_var(v))
            elif eqn.primitive.name in _ELEMENTWISE:
                self._join_alike(groups, eqn, spread)
            elif eqn.primitive.name == "cond":
                for branch in eqn.params["branches"]:
                    self._join_call(groups, branch, eqn.invars[1:], eqn.outvars)
            elif not (_compat.is_jit(eqn) and MARK in eqn.params["name"]):
                body = _compat.called_jaxpr(eqn)
                if body is not None:
                    self._join_call(groups, body, eqn.invars, eqn.outvars)

    @staticmethod
    def _join_alike(groups: Groups[Var], eqn: Eqn, spread: set[Var]) -> None:
        each = eqn.primitive.name == "optimization_barrier"  # each of its operands has a result of its own
        for k, out in enumerate(eqn.outvars):
            operands: list[Any] = eqn.invars[k : k + 1] if each else eqn.invars
            for v in operands:
                alike = _compat.is_var(v) and _compat.is_var(out) and _compat.shape(v) == _compat.shape(out)
                if alike and v not in spread:
                    groups.join(v, out)

    def _join_call(self, groups: Groups[Var], jaxpr: Jaxpr, invars: Sequence[Atom], outvars: Sequence[Atom]) -> None:
        atoms = [*invars, *outvars]
        for together in self._of(jaxpr):
            variables: list[Any] = [atoms[k] for k in together if _compat.is_var(atoms[k])]
            for v in variables[1:]:
                groups.join(v, variables[0])

    def _of(self, jaxpr: Jaxpr) -> list[list[int]]:
        """Positions among the inputs and results of a jaxpr that are tied together."""
        if id(jaxpr) not in self._known:
            parts = _compat.open_jaxpr(jaxpr)
            own: Groups[Var] = Groups()
            self.join(own, parts.eqns)
            sets: dict[Var, list[int]] = {}
            for k, v in enumerate([*parts.invars, *parts.outvars]):
                if _compat.is_var(v):
                    sets.setdefault(own.find(v), []).append(k)
            self._known[id(jaxpr)] = jaxpr, [s for s in sets.values() if len(s) > 1]
        return self._known[id(jaxpr)][1]
