"""Equal blocks of a computation, one after another, as calls of one jaxpr, which JAX differentiates and transposes once.

A task of sixteen layers in a Python loop is traced to sixteen times the equations of a layer. `jax.jit` around the layer
would make calls of them; here they are found by what they compute, by the line of the user's that they come from, and by
their names within the layer, so that nothing that is said of an equation changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

from . import _compat
from ._compat import ClosedJaxpr, Eqn, Var
from ._key import Keys, content_of

# Equations of a block that is worth a call, which takes JAX as long as a few of them.
SHORTEST = 8
# Blocks that are worth it; the first one often differs from the others in what is differentiated.
FEWEST = 3
# What stands for an equation that occurs fewer times than that: one that draws with a number of its layer's own.
ODD = -1
# Distances between equal equations that are tried as the length of a block.
TRIED = 8


class Differentiable:
    """Makes jaxprs that JAX differentiates fast; the same object for the same object, for JAX does each object once.

    Args:
      keys: exact ones, for the jaxprs that equations hold.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys, self._apart = keys, _compat.Apart()
        self._made: dict[int, tuple[Any, Any]] = {}  # by id, with the jaxpr so that the id stays its own
        self._tokens: dict[Hashable, int] = {}
        self._bodies: dict[Hashable, ClosedJaxpr] = {}  # of blocks, by what makes them equal

    def __call__(self, jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        """A jaxpr that computes the same: equal blocks are calls, and so is what JAX would linearize by itself each time."""
        if id(jaxpr) not in self._made:
            self._made[id(jaxpr)] = jaxpr, self._with_calls(jaxpr)
        made: ClosedJaxpr = self._made[id(jaxpr)][1]
        return made

    def clear(self) -> None:
        """Lets go of the jaxprs."""
        self._made.clear()
        self._apart.clear()
        self._tokens.clear()
        self._bodies.clear()

    def _with_calls(self, jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        apart = self._apart(jaxpr)
        eqns = list(_compat.open_jaxpr(apart).eqns)
        tokens = [self._tokens.setdefault(_token(eqn, self._keys), len(self._tokens)) for eqn in eqns]
        often = Counter(tokens)
        blocks = list(_blocks(jaxpr, [token if often[token] >= FEWEST else ODD for token in tokens]))
        count = Counter(block.key for block in blocks)
        for block in reversed(blocks):
            if count[block.key] >= FEWEST:
                body = self._bodies.get(block.key) or self._bodies.setdefault(block.key, block.body())
                eqns[block.start : block.end] = [block.call(body)]
        with_calls: ClosedJaxpr = _compat.with_eqns(apart, eqns)
        return with_calls


class Run(NamedTuple):
    """Equal blocks one after another: where the first begins, where the last ends, how long each is.

    The last one may lack its end.
    """

    start: int
    end: int
    length: int


def find_runs(tokens: Sequence[int], weights: Sequence[int]) -> list[Run]:
    """Where a sequence repeats itself, in order; none overlaps another.

    Args:
      tokens: equal where members of the sequence are, and `ODD` for those that are like few others, which may stand
        within a block.
      weights: what each member is worth.
    """
    distances: Counter[int] = Counter()
    last: dict[int, int] = {}
    worth = [0]  # of all before
    for i, (token, weight) in enumerate(zip(tokens, weights, strict=True)):
        worth.append(worth[-1] + (weight if token != ODD else 0))
        if token != ODD:
            distances[i - last.get(token, i)] += weight
            last[token] = i
    del distances[0]
    candidates = [run for length, _ in distances.most_common(TRIED) for run in _runs_of(tokens, length)]
    found: list[Run] = []
    taken = [False] * len(tokens)
    # Most repeated first; of those that repeat as much, the shortest.
    for run in sorted(candidates, key=lambda run: (worth[run.start + run.length] - worth[run.end], run.length)):
        if worth[run.end] - worth[run.start] >= FEWEST * SHORTEST and not any(taken[run.start : run.end]):
            taken[run.start : run.end] = [True] * (run.end - run.start)
            found.append(run)
    return sorted(found)


def _runs_of(tokens: Sequence[int], length: int) -> Iterator[Run]:
    """The runs of blocks of one length."""
    start = 0
    for i in range(length, len(tokens) + 1):
        if i == len(tokens) or tokens[i] != tokens[i - length]:
            a, b = start, i
            while a < b and tokens[a] == ODD:
                a += 1
            while a < b and tokens[b - 1] == ODD:
                b -= 1
            if b - a >= FEWEST * length:
                yield Run(a, b, length)
            start = i - length + 1


def _token(eqn: Eqn, keys: Keys) -> Hashable:
    """Equal for equations that do the same to other operands and come from the same line."""
    if eqn.effects:
        return object()
    # What `_compat.Apart` made a call of is one object wherever it is the same.
    own = id(eqn.params["jaxpr"]) if _compat.is_put_in_place(eqn) else keys.params(eqn)
    operands = tuple([(v.aval, content_of(v.val)) if isinstance(v, _compat.Literal) else v.aval for v in eqn.invars])
    results = tuple([v.aval for v in eqn.outvars])
    return eqn.primitive, own, operands, results, eqn.ctx, eqn.source_info.traceback


def _blocks(jaxpr: ClosedJaxpr, tokens: Sequence[int]) -> Iterator[_Block]:
    """What may be equal blocks, in order."""
    parts = _compat.open_jaxpr(jaxpr)
    weights = [max(1, sum(len(_compat.open_jaxpr(j).eqns) for j in _compat.jaxprs_in(eqn))) for eqn in parts.eqns]
    names = [_compat.names_around(eqn) for eqn in parts.eqns]
    last = {v: len(tokens) for v in parts.outvars if _compat.is_var(v)}  # variable -> the equation that reads it last
    for i, eqn in reversed(list(enumerate(parts.eqns))):
        for v in filter(_compat.is_var, eqn.invars):
            last.setdefault(v, i)
    for run in find_runs(tokens, weights):
        depth = _depth(names, run)

        def block(i: int, run: Run = run, depth: int = depth) -> tuple[bool, Hashable]:
            # Layers that have names are the blocks, wherever the repetition was found to begin.
            return tokens[i] == ODD, names[i][:depth] if depth else (i - run.start) // run.length

        for (odd, _), members in groupby(range(run.start, run.end), block):
            own = list(members)
            start, end = own[0], own[-1] + 1
            if not odd and sum(weights[start:end]) >= SHORTEST:
                yield _Block(start, parts.eqns[start:end], tokens[start:end], depth, last)


def _depth(names: Sequence[Sequence[Hashable]], run: Run) -> int:
    """How many parts the names of blocks have; 0 if they are all called the same."""
    for i in range(run.start, run.end - run.length):
        here, there = names[i], names[i + run.length]
        if here != there:
            return next(k for k, (a, b) in enumerate(zip_longest(here, there)) if a != b) + 1
    return 0


class _Block:
    """Equations that are to be a call.

    Args:
      start: which equation is the first.
      eqns, tokens: all of them.
      depth: how many of the parts of their names are those of the block.
      last: the equation that reads a variable last.
    """

    def __init__(
        self, start: int, eqns: Sequence[Eqn], tokens: Sequence[int], depth: int, last: Mapping[Var, int]
    ) -> None:
        self.start, self.end = start, start + len(eqns)
        self._eqns, self._depth = eqns, depth
        self._reads: dict[Var, int] = {}
        made: dict[Var, int] = {}
        wires: list[int] = []  # each is a number of what is read, or the complement of that of what is made
        for eqn in eqns:
            for v in filter(_compat.is_var, eqn.invars):
                wires.append(~made[v] if v in made else self._reads.setdefault(v, len(self._reads)))
            for v in eqn.outvars:
                made[v] = len(made)
        self._results = [v for v in made if last.get(v, 0) >= self.end]
        inner = tuple([_compat.names_around(eqn)[depth:] for eqn in eqns])
        self.key = tuple(tokens), tuple(wires), tuple([made[v] for v in self._results]), inner

    def body(self) -> ClosedJaxpr:
        """The jaxpr that is called for this block and those like it."""
        env = {v: _compat.new_var(v.aval) for v in self._reads}
        operands, eqns = list(env.values()), []
        for eqn in self._eqns:
            invars = [env[v] if _compat.is_var(v) else v for v in eqn.invars]
            env |= {v: _compat.new_var(v.aval) for v in eqn.outvars}
            new = eqn.replace(invars=invars, outvars=[env[v] for v in eqn.outvars])
            eqns.append(_compat.with_names(new, _compat.names_around(eqn)[self._depth :]))
        return _compat.close(_compat.new_jaxpr(operands, [env[v] for v in self._results], eqns))

    def call(self, body: ClosedJaxpr) -> Eqn:
        """The equation that stands for the block."""
        first = self._eqns[0]
        call = _compat.call_eqn("block", body, list(self._reads), self._results)
        call = call.replace(source_info=first.source_info, ctx=first.ctx)
        return _compat.with_names(call, _compat.names_around(first)[: self._depth])
