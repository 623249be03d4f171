"""What every flat program promises, asserted. Tests run it between any two passes."""

from __future__ import annotations

from .. import _compat
from .._compat import Atom, Var
from ._flat import FlatProgram
from ._nodes import Loop, Node
from ._text import short


def check(flat: FlatProgram) -> None:
    """Asserts what every flat program promises; a failure is a bug in ManyMesh."""
    worker = _Checker(flat)
    worker.inputs()
    for i, loop in enumerate(flat.loops):
        worker.loop(i, loop)
    for node in flat.nodes:
        worker.node(node)
    worker.results()
    _check_placement(flat)


class _Checker:
    """Walks over a program once, with the variables that are defined so far in each scope."""

    def __init__(self, flat: FlatProgram) -> None:
        self.flat = flat
        self.defined: dict[Var, int | None] = {}  # variable -> the loop in whose body it is, None outside
        bodies = flat.index.bodies if all(n.loop in (None, *range(len(flat.loops))) for n in flat.nodes) else {}
        assert bodies, "a node is in a loop that the program does not have"
        self.rest = {i: len(bodies[i]) for i in range(len(flat.loops))}  # nodes of the body still to come
        self.waiting = [i for i, left in self.rest.items() if not left]  # bodies without nodes

    def define(self, v: Var, loop: int | None, what: str) -> None:
        """A variable gets its one definition."""
        assert v not in self.defined, f"{what} {short(v)} is defined twice"
        self.defined[v] = loop

    def read(self, v: Atom, loop: int | None, what: str) -> None:
        """A variable is read in a scope: the body of a loop, or outside (None)."""
        if not _compat.is_var(v):
            return
        assert v in self.defined, f"{what} reads {short(v)} before it is defined, or it never is"
        assert self.defined[v] in (None, loop), f"{what} reads {short(v)}, which is a variable of a loop's body"

    def inputs(self) -> None:
        """The program's inputs, constants first."""
        for v in self.flat.invars:
            self.define(v, None, "input")
        constants = tuple(self.flat.consts)
        assert self.flat.invars[: len(constants)] == constants, "constants are the first inputs, in their order"
        assert set(self.flat.pins.inputs) <= set(self.flat.invars), "a pinned input is no input"
        positions = [*self.flat.pins.outputs, *(o for _, o in self.flat.pins.states)]
        assert all(0 <= o < len(self.flat.outvars) for o in positions), "a pinned result is no result"

    def loop(self, index: int, loop: Loop) -> None:
        """The variables that a loop gives its body, and that their values agree."""
        count = loop.spec.num_microbatches
        for c in loop.carries:
            self.define(c.inner, index, "carry")
            for v in (c.out, c.init, c.final):
                assert _alike(v, c.inner), f"a carry of {short(c.inner)} becomes {short(v)}"
        for p in (*loop.xs, *loop.ys):
            assert len(p.outer) == count, f"{len(p.outer)} pieces for {count} microbatches"
            assert all(_alike(v, p.inner) for v in p.outer), f"a piece of {short(p.inner)} has another shape or dtype"
        for p in loop.xs:
            self.define(p.inner, index, "piece")
        assert all(_compat.is_var(v) for p in loop.ys for v in p.outer), "a loop makes the pieces that it collects"

    def node(self, n: Node) -> None:
        """A node, in its scope; after the last one of a body what the loop leaves is there."""
        self.finish_empty()
        what = f"{n.task or n.primitive}"
        for v in n.inputs:
            self.read(v, n.loop, what)
        for v in n.outputs:
            self.define(v, n.loop, what)
        for mark in (n.task, n.colocated_with):
            assert mark is None or mark in self.flat.tasks, f"no task is known for the mark {mark!r}"
        assert n.task is None or _compat.is_jit(n.eqn), f"task {n.task!r} is {n.primitive}, and no call of its body"
        assert not n.weight or (n.backward and n.task is not None), f"{what} makes weight gradients, but is forward"
        assert not (n.task is not None and (n.unstacks or n.layout_follows_loop)), f"task {n.task!r} only moves values"
        assert not (n.layout_follows_loop and n.loop is not None), f"{what} prepares a loop, but is inside one"
        if n.loop is not None:
            self.rest[n.loop] -= 1
            if not self.rest[n.loop]:
                self.finish(n.loop)

    def finish_empty(self) -> None:
        """Loops without nodes leave what they leave as soon as what they read is there."""
        for i in list(self.waiting):
            loop = self.flat.loops[i]
            before = [c.init for c in loop.carries] + [v for p in loop.xs for v in p.outer]
            if all(not _compat.is_var(v) or v in self.defined for v in before):
                self.waiting.remove(i)
                self.finish(i)

    def finish(self, index: int) -> None:
        """The end of a loop: what it reads is there, and what it leaves is defined."""
        loop = self.flat.loops[index]
        what = f"loop {index}"
        for c in loop.carries:
            self.read(c.init, None, what)
            self.read(c.out, index, what)
            assert self.defined[c.out] == index, f"{what} carries {short(c.out)}, which its body does not make"
        for p in loop.xs:
            for v in p.outer:
                self.read(v, None, what)
        for p in loop.ys:
            self.read(p.inner, index, what)
            assert self.defined[p.inner] == index, f"{what} collects {short(p.inner)}, which its body does not make"
        for c in loop.carries:
            self.define(c.final, None, "final value of a carry")
        for p in loop.ys:
            for v in p.outer:
                if _compat.is_var(v):
                    self.define(v, None, "collected piece")

    def results(self) -> None:
        """Every result is there, outside all loops."""
        self.finish_empty()
        for v in self.flat.outvars:
            self.read(v, None, "the caller")


def _alike(a: Atom, b: Atom) -> bool:
    return (getattr(a.aval, "shape", None), getattr(a.aval, "dtype", None)) == (
        getattr(b.aval, "shape", None), getattr(b.aval, "dtype", None),
    )  # fmt: skip


def _check_placement(flat: FlatProgram) -> None:
    """A placement, where there is one, is that of these nodes."""
    placement = flat.placement
    if placement is None:
        return
    count = len(placement.submeshes)
    for n in flat.nodes:
        assert placement.node.get(n), (
            f"{n.task or n.primitive} is placed nowhere: the placement is that of another program"
        )
        assert all(0 <= s < count for s in placement.node[n]), (
            f"{n.task or n.primitive} is on a submesh that is not there"
        )
        mesh = flat.submesh_of(n)
        there = [placement.submeshes[s] for s in placement.node[n]]
        assert mesh is None or there == [mesh], f"{n.task or n.primitive} is not where it has to be"
    for v in (*flat.invars, *(v for n in flat.nodes for v in n.outputs), *flat.index.made_by_loop):
        assert v in placement.home, f"{short(v)} has no home"
