"""What every program of fragments promises, asserted."""

from __future__ import annotations

from collections import defaultdict

from .. import _compat
from .._compat import Atom, Var
from ._fragments import Fragment, LoopPlan, Program
from ._nodes import shape_and_dtype
from ._text import short


def check(program: Program) -> None:
    """Asserts what every program promises; a failure is a bug in ManyMesh."""
    worker = _Checker(program)
    _check_order(program)
    for item in program.order:
        if item >= 0:
            worker.fragment(program.fragments[item])
        else:
            worker.loop(-1 - item)
    worker.edges()
    worker.outputs()


def _check_order(program: Program) -> None:
    """Every fragment is in one place, and says which."""
    outside = [i for i in program.order if i >= 0]
    inside = [f.index for i in range(len(program.loops)) for f in program.body(i)]
    assert sorted([*outside, *inside]) == list(range(len(program.fragments))), "a fragment is in no scope, or in two"
    assert [f.index for f in program.fragments] == list(range(len(program.fragments))), "a fragment's index is wrong"
    assert sorted(-1 - i for i in program.order if i < 0) == list(range(len(program.loops))), "a loop runs once"
    count = len(program.submeshes)
    assert all(0 <= f.submesh < count for f in program.fragments), "a fragment is on a submesh that is not there"


class _Checker:
    """Goes through a program in order, with the copies of values that are there so far."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made = {(v, s) for v, places in program.input_submeshes.items() for s in places}
        self.crossing = {(e.var, e.target): e.source for e in program.edges}
        # Where the body of a loop brings what it makes, that is still there after the loop, under its name there.
        self.sent_to: dict[Atom, list[int]] = defaultdict(list)
        for e in program.edges:
            self.sent_to[e.var].append(e.target)

    def has(self, v: object, s: int) -> bool:
        """Whether a value is on a submesh: made there, or sent there from where it was made. Literals are everywhere."""
        if not _compat.is_var(v):
            return True
        return (v, s) in self.made or ((v, s) in self.crossing and (v, self.crossing[v, s]) in self.made)

    def fragment(self, f: Fragment) -> None:
        """What a fragment reads is there, and what it makes is new."""
        for v in f.invars:
            assert self.has(v, f.submesh), f"fragment {f.name!r} reads {short(v)}, which is not on its submesh"
        for v in f.outvars:
            assert (v, f.submesh) not in self.made, f"fragment {f.name!r} makes {short(v)}, which is there already"
            self.made.add((v, f.submesh))

    def loop(self, index: int) -> None:
        """What the body reads by the loop's ties is there wherever it reads it, and so is what the loop leaves."""
        loop = self.program.loops[index]
        reads = {(v, f.submesh) for f in self.program.body(index) for v in f.invars}
        reads |= self._handed_on(loop, reads)
        self._enter(loop, reads)
        for f in self.program.body(index):
            assert f.stage is not None and loop.placement[f.stage] == f.submesh, f"{f.name!r} is in a stage elsewhere"
            self.fragment(f)
        read_on: dict[Var, set[int]] = defaultdict(set)
        for v, s in reads:
            read_on[v].add(s)
        for inner, out, _, final in loop.carries:
            home = self.program.home[final]
            assert self.has(out, home), f"a carry leaves {short(out)} elsewhere than its final value is"
            missing = sorted(s for s in read_on[inner] if not self.has(out, s))
            assert not missing, f"a carry of {short(inner)} is read on submeshes {missing}, but not sent there"
            self.made.update((final, s) for s in (home, *self.sent_to[out]))
        for inner, outer in loop.ys:
            assert len(outer) == loop.num_microbatches, f"{len(outer)} copies of {short(inner)} are collected"
            for v in outer:
                assert self.has(inner, self.program.home[v]), f"{short(inner)} is collected where it is not"
                self.made.update((v, s) for s in (self.program.home[v], *self.sent_to[inner]))

    def _handed_on(self, loop: LoopPlan, reads: set[tuple[Var, int]]) -> set[tuple[Var, int]]:
        """Where a carry has to be that only becomes another one, or leaves the loop."""
        inners = {inner for inner, _, _, _ in loop.carries}
        found = {(out, self.program.home[final]) for _, out, _, final in loop.carries if out in inners}
        pending = [*reads, *found]
        becomes: dict[Var, list[Var]] = defaultdict(list)
        for inner, out, _, _ in loop.carries:
            if out in inners:
                becomes[inner].append(out)
        while pending:
            v, s = pending.pop()
            new = {(out, s) for out in becomes.get(v, ())} - found
            found |= new
            pending += new
        return found

    def _enter(self, loop: LoopPlan, reads: set[tuple[Var, int]]) -> None:
        starts = {inner: (init,) for inner, _, init, _ in loop.carries}
        starts.update(dict(loop.xs))
        for inner, out, init, final in loop.carries:
            for v in (out, init, final):
                assert shape_and_dtype(v) == shape_and_dtype(inner), f"a carry of {short(inner)} becomes {short(v)}"
        for inner, outer in loop.xs:
            assert len(outer) == loop.num_microbatches, f"{short(inner)} has {len(outer)} pieces"
        for v, s in reads:
            if v in starts:
                assert all(self.has(w, s) for w in starts[v]), f"what {short(v)} begins with is not on submesh {s}"
                self.made.add((v, s))

    def edges(self) -> None:
        """Every edge begins where its value is."""
        for e in self.program.edges:
            assert e.source != e.target, f"an edge of {short(e.var)} ends where it begins"
            assert (e.var, e.source) in self.made, f"an edge of {short(e.var)} begins where nothing makes it"

    def outputs(self) -> None:
        """Every result is where the program says."""
        for v, s in self.program.outputs:
            assert self.has(v, s), f"a result of {short(v) if _compat.is_var(v) else v} is not on submesh {s}"
