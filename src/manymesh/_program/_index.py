"""Who makes and who reads every variable of a flat program: the one index that knows loops.

A loop ties variables together: the initial value of a carry is read in the body under another name, a value that the
body collects is read after the loop as one value for each microbatch. `Index` answers for the equations and for these
ties. Each table is made when it is first asked for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from .. import _compat
from .._compat import Atom, Var
from ._nodes import Loop, Node


class Index:
    """The def-use index of a flat program.

    Args:
      outvars: results of the program.
      nodes: its nodes.
      loops: its loops.
    """

    def __init__(self, outvars: Sequence[Atom], nodes: Sequence[Node], loops: Sequence[Loop]) -> None:
        self._outvars, self._nodes, self._loops = outvars, nodes, loops

    @cached_property
    def producer(self) -> Mapping[Var, Node]:
        """Variable -> the node that makes it. What enters the program, a loop or its body has none."""
        return {v: n for n in self._nodes for v in n.outputs}

    @cached_property
    def readers(self) -> Mapping[Var, list[Node]]:
        """Variable -> the nodes that read it, each once, in order. What nobody reads is not listed."""
        found: dict[Var, list[Node]] = defaultdict(list)
        for n in self._nodes:
            for v in dict.fromkeys(n.inputs):
                found[v].append(n)
        return dict(found)

    @cached_property
    def position(self) -> Mapping[Node, int]:
        """Node -> its position in the program."""
        return {n: i for i, n in enumerate(self._nodes)}

    @cached_property
    def bodies(self) -> Mapping[int | None, list[Node]]:
        """Loop -> the nodes of its body, in order; None: the nodes outside every loop."""
        found: dict[int | None, list[Node]] = {None: [], **{i: [] for i in range(len(self._loops))}}
        for n in self._nodes:
            found[n.loop].append(n)
        return found

    @cached_property
    def results(self) -> frozenset[Var]:
        """Variables that are results of the program."""
        return frozenset(v for v in self._outvars if _compat.is_var(v))

    @cached_property
    def read_by_loops(self) -> frozenset[Var]:
        """Variables that a loop reads under another name: what carries start from and leave, pieces in and out."""
        return frozenset(self._reads_of_loops())

    @cached_property
    def leaving(self) -> frozenset[Var]:
        """Variables that are read by something besides equations: by the caller, or by a loop under another name."""
        return self.results | self.read_by_loops

    @cached_property
    def uses(self) -> Counter[Var]:
        """How often each variable is read: by operands of equations, by loops, by the caller."""
        found: Counter[Var] = Counter(v for n in self._nodes for v in n.inputs)
        found.update(v for v in self._outvars if _compat.is_var(v))
        found.update(self._reads_of_loops())
        return found

    def _reads_of_loops(self) -> Iterator[Var]:
        for loop in self._loops:
            for c in loop.carries:
                yield from (v for v in (c.out, c.init) if _compat.is_var(v))
            for p in loop.xs:
                yield from (v for v in p.outer if _compat.is_var(v))
            for p in loop.ys:
                yield p.inner

    @cached_property
    def scope(self) -> Mapping[Var, int]:
        """Variable of a loop's body -> the loop. What is outside every loop is not listed."""
        found = {v: n.loop for n in self._nodes if n.loop is not None for v in n.outputs}
        for i, loop in enumerate(self._loops):
            found.update({c.inner: i for c in loop.carries})
            found.update({p.inner: i for p in loop.xs})
        return found

    @cached_property
    def made_by_loop(self) -> Mapping[Var, int]:
        """Variable that a loop leaves (a carry's final value, a collected piece) -> the loop."""
        found: dict[Var, int] = {}
        for i, loop in enumerate(self._loops):
            found.update({c.final: i for c in loop.carries})
            found.update({v: i for p in loop.ys for v in p.outer if _compat.is_var(v)})
        return found

    @cached_property
    def enters_loop(self) -> Mapping[Var, int]:
        """Variable that a loop takes in under another name -> the first loop that does.

        Loops are in an order in which each may read what those before it leave: what is ready for the first of two is
        not to wait for what the second waits for.
        """
        found: dict[Var, int] = {}
        for i, loop in reversed(list(enumerate(self._loops))):
            found.update({v: i for p in loop.xs for v in p.outer if _compat.is_var(v)})
            found.update({c.init: i for c in loop.carries if _compat.is_var(c.init)})
        return found

    @cached_property
    def continues_as(self) -> Mapping[Var, list[Var]]:
        """Variable -> the names under which its value is read on the other side of a loop's border.

        An initial value is read inside, what a carry leaves is read after the loop, and so are pieces.
        """
        found: dict[Var, list[Var]] = defaultdict(list)
        for loop in self._loops:
            for c in loop.carries:
                found[c.out].append(c.final)
                if _compat.is_var(c.init):
                    found[c.init].append(c.inner)
            for p in loop.xs:
                for v in p.outer:
                    if _compat.is_var(v):
                        found[v].append(p.inner)
            for p in loop.ys:
                found[p.inner] += [v for v in p.outer if _compat.is_var(v)]
        return dict(found)

    @cached_property
    def comes_from(self) -> Mapping[Var, Var]:
        """Variable that a loop defines -> the variable of the body that decides where it is.

        For a carry, read inside or after the loop, that is what the body leaves; for a collected piece its original.
        """
        found: dict[Var, Var] = {}
        for loop in self._loops:
            for c in loop.carries:
                found[c.inner] = found[c.final] = c.out
            for p in loop.ys:
                found.update({v: p.inner for v in p.outer if _compat.is_var(v)})
        return found
