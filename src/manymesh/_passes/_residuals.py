"""What a forward pass keeps for its backward pass, in the fewest bytes.

Differentiation keeps whatever the backward pass reads: for one activation function five arrays of the size of the
activation, where one would do, from which the others are a multiplication away. Inside one executable XLA sorts this
out; between two executables nobody does, and a pipeline holds it all for every microbatch in flight.

So each task keeps the smallest set of values from which the backward pass can have the rest by cheap arithmetic, which
XLA fuses into whatever reads it. The set is a minimum cut: sources are what is expensive to compute (a matrix product,
a sum; on CPU an exponential, too), the sink is what the backward pass reads, and to keep a value costs its bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from .. import _compat
from .._compat import AbstractJaxpr, AbstractValue, Atom, Eqn, OpenJaxpr, Var
from .._mark import constraint_p
from .._program._calls import inlined
from .._program._flat import FlatProgram
from .._program._harmless import is_harmless
from .._program._nodes import Node, nbytes, shape_and_dtype
from .._program._rewrite import substitute, with_atoms
from .._task import mesh_devices
from ._hoist import invariants

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
    "reduce_precision", "reduce_prod", "reduce_sum", "scatter", "scatter-add",
}  # fmt: skip
_SMALL_POWER = 4
_LITTLE_MORE = 1.01
# Of the arithmetic of all products, what those of weights alone may be to be done again: a merged adapter of 8 rows is, where
# 64 rows of activations go through the layer.
_SMALL_PART = 1 / 8

_BEYOND = float("inf")


def minimise_residuals(flat: FlatProgram) -> FlatProgram:
    """Lets every task keep the fewest bytes for its backward pass. Tasks without a submesh stay as they are."""
    return Minimiser(flat).run()


Place = tuple[str, int]  # where an operand comes from, and its position there


@dataclass(eq=False)
class Consumer:
    """How a backward task changes: its jaxpr, and where its operands come from.

    An operand is ``("own", k)``, one it had, ``("kept", k)``, a result of the forward task, or ``("read", k)``, an
    operand of the forward task.
    """

    jaxpr: AbstractJaxpr
    operands: list[Place]


@dataclass(eq=False)
class Rewrite:
    """How a task and those that read what it keeps change; the same for all equal layers.

    ``results`` are positions among the results that the task had; a None is a value that it did not keep before,
    whose abstract value is in ``new``. ``used`` are the positions of the operands that it still needs.
    """

    jaxpr: AbstractJaxpr
    used: list[int]
    results: list[int | None]
    new: list[AbstractValue]
    consumers: list[Consumer]
    alive: tuple[AbstractJaxpr, ...]  # the jaxprs whose ids are the key


@dataclass(frozen=True, eq=False)
class Given:
    """A task that keeps something for its backward pass.

    Attributes:
      task: the task.
      kept: positions of results that are kept for the consumers alone.
      free_in, free_out: whether keeping an operand, or a result, costs nothing.
      lasting_in: whether an operand outlives the microbatch.
      consumers: the equations of later phases that read what is kept.
      jaxprs: those of all of them.
      cheap: names of the primitives whose results may be computed again.
    """

    task: Eqn
    kept: list[int]
    free_in: tuple[bool, ...]
    free_out: tuple[bool, ...]
    lasting_in: tuple[bool, ...]
    consumers: list[Eqn]
    jaxprs: tuple[AbstractJaxpr, ...]
    cheap: frozenset[str]


class Minimiser:
    """Goes through the tasks of a program; ``now`` has the nodes that changed.

    A task may keep values for a node that changed before, so that every node is looked at as it is now.
    """

    def __init__(self, flat: FlatProgram) -> None:
        self.flat, self.index = flat, flat.index
        self.now: dict[Node, Node] = {}
        # What every microbatch makes alike is made once: `hoist_loop_invariants`.
        self.invariant = {v for i in range(len(flat.loops)) for v, n in invariants(flat, i).items() if not n.guard}
        self.readers = {v: list(nodes) for v, nodes in flat.index.readers.items()}  # the nodes as they were
        self.rewritten: dict[Hashable, Rewrite] = {}

    def run(self) -> FlatProgram:
        """The program whose tasks keep less; the same where none does."""
        for n in self.flat.nodes:
            if n.task is not None and self.flat.tasks[n.task].mesh is not None:
                self.task(n)
        if not self.now:
            return self.flat
        return replace(self.flat, nodes=tuple(self.now.get(n, n) for n in self.flat.nodes), placement=None)

    def task(self, n: Node) -> None:
        """Lets one task keep less, if it keeps something that is cheap to have again."""
        eqn = self.now.get(n, n).eqn
        outs = eqn.outvars
        kept = [k for k, v in enumerate(outs) if _compat.is_var(v) and self._is_residual(v, n)]
        if not kept:
            return
        consumers = list(dict.fromkeys(r for k in kept for r in self.readers[outs[k]]))
        eqns = [self.now.get(c, c).eqn for c in consumers]
        read = {v for e in eqns for v in e.invars if _compat.is_var(v)}
        # What the consumers hold anyway, and what outlives the microbatch anyway, costs nothing.
        lasting_in = tuple(not _compat.is_var(v) or not self._is_in_scope(v, n) for v in eqn.invars)
        free_in = tuple(lasts or v in read for v, lasts in zip(eqn.invars, lasting_in, strict=True))
        free_out = tuple(k not in kept and _compat.is_var(v) and v in read for k, v in enumerate(outs))
        wiring = tuple(tuple(_positions(e.invars, outs, eqn.invars)) for e in eqns)
        jaxprs = (eqn.params["jaxpr"], *(e.params["jaxpr"] for e in eqns))
        dropped = tuple(not _compat.is_var(v) for v in outs)
        cheap = self._cheap(n)
        key = (tuple(map(id, jaxprs)), tuple(kept), free_in, free_out, lasting_in, wiring, dropped, cheap)
        if key not in self.rewritten:
            self.rewritten[key] = self.rewrite(Given(eqn, kept, free_in, free_out, lasting_in, eqns, jaxprs, cheap))
        how = self.rewritten[key]
        if not how.consumers:
            return
        new = iter([_compat.new_var(aval) for aval in how.new])
        results = [next(new) if k is None else outs[k] for k in how.results]
        self._change(n, _with_body(eqn, how.jaxpr, [eqn.invars[k] for k in how.used], results))
        for c, e, change in zip(consumers, eqns, how.consumers, strict=True):
            sources: dict[str, Sequence[Atom]] = {"own": e.invars, "kept": results, "read": eqn.invars}
            self._change(c, _with_body(e, change.jaxpr, [sources[kind][k] for kind, k in change.operands], e.outvars))

    def rewrite(self, given: Given) -> Rewrite:
        """How a task and its consumers change."""
        jaxprs = given.jaxprs
        same = Rewrite(jaxprs[0], [], [], [], [], jaxprs)
        parts = _compat.open_jaxpr(jaxprs[0])
        if parts.consts or any(_compat.open_jaxpr(j).consts for j in jaxprs[1:]):
            return same
        eqns, env = inlined(parts.eqns)
        outs = [env.get(v, v) if _compat.is_var(v) else v for v in parts.outvars]
        producer = {v: e for e in eqns for v in e.outvars if _compat.is_var(v)}
        wanted = list(dict.fromkeys(v for k in given.kept if _compat.is_var(v := outs[k]) and v in producer))
        known = zip([*parts.invars, *outs], [*given.free_in, *given.free_out], strict=True)
        free = {v for v, is_free in known if is_free and _compat.is_var(v)}
        lasting = [v for v, lasts in zip(parts.invars, given.lasting_in, strict=True) if lasts]
        saved = cheapest(wanted, free, parts.invars, eqns, given.cheap, lasting)
        if saved.issuperset(wanted) and all(_compat.is_var(outs[k]) for k in given.kept):
            return same
        return _Assembly(given.task, given.kept, given.consumers, parts, eqns, outs, producer, saved, jaxprs).result()

    def _cheap(self, n: Node) -> frozenset[str]:
        """The primitives that cost little where a task runs. Planned devices stand for accelerators."""
        mesh = self.flat.tasks[n.task].mesh if n.task is not None else None
        on_cpu = mesh is None or all(d.platform == "cpu" for d in mesh_devices(mesh))
        return cheap_on(on_cpu)

    def _is_residual(self, v: Var, n: Node) -> bool:
        """Whether only the later phases of the task itself read one of its results."""
        readers = self.readers.get(v)
        return (
            bool(readers)
            and v not in self.index.leaving
            and all(r.task == n.task and r.loop == n.loop and r.phase > n.phase for r in readers or ())
        )

    def _is_in_scope(self, v: Var, n: Node) -> bool:
        """Whether a value is made anew in every run of the scope that a node is in."""
        if n.loop is None:
            return v in self.index.producer and v not in self.index.scope
        return self.index.scope.get(v) == n.loop and v not in self.invariant

    def _change(self, n: Node, eqn: Eqn) -> None:
        before = self.now.get(n, n)
        self.now[n] = after = replace(before, eqn=eqn)
        for v in dict.fromkeys(before.inputs):
            self.readers[v].remove(n)
        for v in dict.fromkeys(after.inputs):
            self.readers.setdefault(v, []).append(n)


def cheap_on(cpu: bool) -> frozenset[str]:
    """The primitives that cost little on a CPU, or elsewhere."""
    return _CHEAP if cpu else _CHEAP | _FUNCTIONS


def _with_body(eqn: Eqn, jaxpr: AbstractJaxpr, invars: Sequence[Atom], outvars: Sequence[Var]) -> Eqn:
    new = _compat.call_eqn(eqn.params["name"], jaxpr, invars, outvars)
    changed: Eqn = new.replace(source_info=eqn.source_info)
    return changed


def _positions(atoms: Sequence[Atom], outs: Sequence[Atom], ins: Sequence[Atom]) -> list[Place | str | None]:
    """Where each operand of a consumer is among the results and operands of the producer."""
    found: dict[Var, Place] = {v: ("in", k) for k, v in enumerate(ins) if _compat.is_var(v)}
    found |= {v: ("out", k) for k, v in enumerate(outs) if _compat.is_var(v)}
    return [found.get(v) if _compat.is_var(v) else "literal" for v in atoms]


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


def looks_for(eqn: Eqn, v: Var, names: frozenset[str]) -> bool:
    """Whether an equation, or one in the call that it is, compares elements of a value with those of others.

    It finds its largest element, say, and what was picked before has to be equal to it to the last bit.
    """
    found, cheap = {v}, _Cheap(names)
    for e in inlined([eqn])[0]:
        if found.isdisjoint(filter(_compat.is_var, e.invars)):
            continue
        if e.primitive.name in ("eq", "eq_to") and all(map(_compat.is_var, e.invars)):
            return True
        if cheap(e):
            found.update(filter(_compat.is_var, e.outvars))
    return False


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
    """The first value that would be computed again of too many others; what comes after it is computed of it."""
    if most == _BEYOND:
        return set()
    of = {v: len(_made_of(v, saved, producer)) for v in wanted if v not in saved}
    return set(sorted((v for v in of if of[v] > most), key=of.__getitem__)[:1])


def _made_of(v: Var, saved: set[Var], producer: Mapping[Var, Eqn]) -> set[Var]:
    """What is kept or there, of which a value is computed again."""
    found, seen, todo = set[Var](), {v}, [v]
    while todo:
        w = todo.pop()
        if w in saved or w not in producer:
            found.add(w)
            continue
        new = {o for o in producer[w].invars if _compat.is_var(o)} - seen
        seen |= new
        todo += new
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


def cheap_way(v: Var, known: Collection[Var], eqns: Sequence[Eqn], names: frozenset[str]) -> list[Eqn]:
    """The cheap equations that make a value of others that are known; none if some other one is needed.

    None either if one of them looks for an element, or says names that only its task knows.
    """
    producer = {v: e for e in eqns for v in e.outvars if _compat.is_var(v)}
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
    network = _Network()
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
    behind = network.behind_minimum_cut(source, sink)
    return {v for v in seen if (v, "out") in behind and (v, "in") not in behind}


class _Network:
    """A flow network, for its minimum cut (Dinic's algorithm)."""

    def __init__(self) -> None:
        self.edges: dict[Hashable, dict[Hashable, float]] = defaultdict(
            dict
        )  # node -> neighbour -> what can still flow there

    def add(self, a: Hashable, b: Hashable, capacity: float) -> None:
        self.edges[a][b] = capacity
        self.edges[b].setdefault(a, 0)

    def behind_minimum_cut(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """The nodes from which the sink can be reached once the flow is maximal."""
        while (level := self._levels(source, sink)) is not None:
            untried = {node: list(neighbours) for node, neighbours in self.edges.items()}
            while self._augment(source, sink, level, untried):
                pass
        behind, queue = {sink}, deque([sink])
        while queue:
            node = queue.popleft()
            for other in self.edges[node]:
                if other not in behind and self.edges[other][node] > 0:
                    behind.add(other)
                    queue.append(other)
        return behind

    def _levels(self, source: Hashable, sink: Hashable) -> dict[Hashable, int] | None:
        level, queue = {source: 0}, deque([source])
        while queue:
            node = queue.popleft()
            for other, left in self.edges[node].items():
                if left > 0 and other not in level:
                    level[other] = level[node] + 1
                    queue.append(other)
        return level if sink in level else None

    def _augment(
        self, source: Hashable, sink: Hashable, level: dict[Hashable, int], untried: dict[Hashable, list[Hashable]]
    ) -> bool:
        """Sends flow along one path that goes up a level with each edge; whether there was one."""
        path = [source]
        while path[-1] is not sink:
            node, others = path[-1], untried[path[-1]]
            while others and not (self.edges[node][others[-1]] > 0 and level.get(others[-1]) == level[node] + 1):
                others.pop()
            if others:
                path.append(others[-1])
                continue
            path.pop()
            if not path:
                return False
            untried[path[-1]].pop()  # it leads nowhere
        flow = min(self.edges[a][b] for a, b in zip(path, path[1:], strict=False))
        for a, b in zip(path, path[1:], strict=False):
            self.edges[a][b] -= flow
            self.edges[b][a] += flow
        return True


class _Assembly:
    """Builds the jaxprs of a task and its consumers from the values to keep."""

    def __init__(
        self,
        task: Eqn,
        kept: list[int],
        consumers: list[Eqn],
        parts: OpenJaxpr,
        eqns: list[Eqn],
        outs: list[Atom],
        producer: Mapping[Var, Eqn],
        saved: Collection[Var],
        jaxprs: tuple[AbstractJaxpr, ...],
    ) -> None:
        self.task, self.kept, self.consumers = task, kept, consumers
        self.parts, self.eqns, self.outs, self.producer = parts, eqns, outs, producer
        self.saved, self.jaxprs = saved, jaxprs
        self.input = {v: k for k, v in enumerate(parts.invars)}

    def result(self) -> Rewrite:
        stay = [k for k, v in enumerate(self.task.outvars) if _compat.is_var(v) and k not in self.kept]
        named = [(v, k) for k, v in enumerate(self.outs) if _compat.is_var(self.task.outvars[k]) and _compat.is_var(v)]
        first = dict(reversed(named))
        # What a consumer reads and cannot compute, for it is handed through, stays as it is. A number it has itself.
        stay += [k for k in self.kept if _compat.is_var(v := self.outs[k]) and v not in self.producer]
        values = [v for v in dict.fromkeys(v for e in self.eqns for v in e.outvars) if v in self.saved]
        results: list[int | None] = list(stay)
        place: dict[Var, int] = {}  # saved value -> its position among the new results
        new: list[AbstractValue] = []
        for v in values:
            known = first.get(v)
            if known in stay:
                place[v] = results.index(known)
                continue
            place[v] = len(results)
            results.append(known)
            if known is None:
                new.append(v.aval)
        atoms = [self.outs[k] for k in stay]
        atoms += [v for v in values if first.get(v) not in stay]
        trimmed, used = _compat.dce(_compat.new_jaxpr(self.parts.invars, atoms, self.eqns), [True] * len(atoms))
        changes = [self._consumer(c, results, place) for c in self.consumers]
        return Rewrite(_compat.close(trimmed), [k for k, u in enumerate(used) if u], results, new, changes, self.jaxprs)

    def _consumer(self, c: Eqn, results: list[int | None], place: Mapping[Var, int]) -> Consumer:
        inner = _compat.open_jaxpr(c.params["jaxpr"])
        at = {v: k for k, v in enumerate(self.task.outvars) if _compat.is_var(v)}
        operands: list[Place] = []
        invars: list[Var] = []
        env: dict[Var, Atom] = {}  # variable of the producer -> variable here
        again: list[Eqn] = []  # equations computed again
        alias: dict[Var, Atom] = {}

        def take(kind: str, k: int, aval: AbstractValue) -> Var:
            invars.append(_compat.new_var(aval))
            operands.append((kind, k))
            return invars[-1]

        def value(result: Atom) -> Atom:
            """A variable of the producer, made available here."""

            def here(v: Var) -> Var | None:
                if v in place:
                    return take("kept", place[v], v.aval)
                return take("read", self.input[v], v.aval) if v in self.input else None

            compute_again(result, self.producer, env, here, again)
            return env.get(result, result) if _compat.is_var(result) else result

        for k, (outer, v) in enumerate(zip(c.invars, inner.invars, strict=True)):
            position = at.get(outer) if _compat.is_var(outer) else None
            if position is None or position not in self.kept or position in results:
                invars.append(v)
                operands.append(("own", k))
            else:
                alias[v] = value(self.outs[position])
        eqns = [with_atoms(e, alias) for e in inner.eqns]
        outs = [alias.get(o, o) if _compat.is_var(o) else o for o in inner.outvars]
        return Consumer(_compat.close(_compat.new_jaxpr(invars, outs, again + eqns)), operands)
