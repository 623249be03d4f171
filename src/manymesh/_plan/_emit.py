"""`emit`: from a program and its schedules to instructions over slots. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice
from typing import Any

import numpy as np

from .. import _compat
from .._program import Edge, Fragment, LoopPlan, Program
from ..schedules import Order, issue_order
from ..schedules._order_of import order_of
from ._alias import find_aliases
from ._check import check
from ._donation import donatable_inputs, slots_of_others
from ._instructions import Instruction, Plan, Ports, Receive, Run, Send, Tag
from ._number import value_of, variables_of

Var = _compat.Var
_Numbers = np.ndarray[Any, np.dtype[np.int32]]

# A larger plan repeats in more microbatches what a small one does, and checking it would take a quarter of its time.
CHECKED_SLOTS = 20_000
BLOCK = 8192  # instructions that are looked at together


def emit(program: Program, donated_inputs: frozenset[int]) -> Plan:
    """Lays out one call of a program.

    Args:
      program: the program.
      donated_inputs: positions of inputs whose buffers the call may reuse.

    Returns:
      Instructions in the order in which one thread issues them. A value is sent as soon as it is made;
      stages are interleaved as the schedule says, so that every submesh is fed early.
    """
    plan = _Emitter(program, donated_inputs).run()
    if plan.num_slots <= CHECKED_SLOTS:
        check(plan)
    return plan


def loop_sequence(program: Program, index: int) -> list[tuple[Fragment, int]]:
    """Fragments of a loop and their microbatches, in the order of issue."""
    loop = program.loops[index]
    body = list(program.body(index))
    if not loop.in_order:
        return [(f, m) for m in range(loop.num_microbatches) for f in body]
    groups: dict[tuple[str, int], list[Fragment]] = defaultdict(list)
    for f in body:
        groups[f.kind if _has_forward(body) else "F", f.stage or 0].append(f)
    order = loop_order(loop, body)
    sequence = [(f, a.microbatch) for a in issue_order(order) for f in groups[a.kind, a.stage]]
    made = {(v, f.submesh): f for f in body for v in f.outvars}

    def maker(v: Var, submesh: int) -> Fragment | None:
        """What makes the copy of a value that a submesh reads: its own fragment where the value is cloned."""
        return made.get((v, submesh)) or made.get((v, program.home.get(v, submesh)))

    weights = [f for f in body if f.kind == "W"]
    read = ((f, maker(v, f.submesh)) for f in weights for v in f.invars)
    if any(m is not None and _may_come_later(m, f) for f, m in read):
        return _after_what_it_reads(loop, sequence, maker)
    return sequence


def _may_come_later(maker: Fragment, weights: Fragment) -> bool:
    """Whether a schedule may run weight gradients before what they read of another stage, in the same microbatch.

    It puts them after the backward phase of their stage, and so of the stages after it.
    """
    made_in, read_in = maker.stage or 0, weights.stage or 0
    return (maker.kind == "W" and made_in != read_in) or (maker.kind == "B" and made_in < read_in)


def _after_what_it_reads(
    loop: LoopPlan, sequence: list[tuple[Fragment, int]], maker: Callable[[Var, int], Fragment | None]
) -> list[tuple[Fragment, int]]:
    """The sequence with each fragment put off until what it reads is there.

    To a schedule the weight gradients of a stage have nothing to do with other stages. Where a weight is used in
    several stages they are added up in one of them.
    """
    before = {inner: out for inner, out, _, _ in loop.carries}

    def needs(f: Fragment, m: int) -> list[tuple[int, int]]:
        same = [(made.index, m) for v in f.invars if (made := maker(v, f.submesh))]
        carried = [maker(before[v], f.submesh) for v in f.invars if m and v in before]
        return same + [(made.index, m - 1) for made in carried if made]

    done: set[tuple[int, int]] = set()
    result: list[tuple[Fragment, int]] = []
    waiting: list[tuple[Fragment, int]] = []
    for item in sequence:
        waiting.append(item)
        ready = True
        while ready:
            ready = False
            for f, m in list(waiting):
                if done.issuperset(needs(f, m)):
                    waiting.remove((f, m))
                    result.append((f, m))
                    done.add((f.index, m))
                    ready = True
    assert not waiting, "what a loop's fragments read is made in the loop or before it"
    return result


def loop_order(loop: LoopPlan, body: list[Fragment]) -> Order:
    """The schedule's order for a loop."""
    backward = _has_forward(body) and any(f.kind == "B" for f in body)
    return order_of(loop.schedule, loop.placement, loop.num_microbatches, backward=backward, accumulates=False)


def _has_forward(body: list[Fragment]) -> bool:
    return any(f.kind == "F" for f in body)


class _Slots:
    """Numbers the slots of every value of a call.

    A value outside loops has one slot on each submesh, one of a body a row of them, a slot for each microbatch. A
    large plan has millions, so a row is found once, for all who read it.
    """

    def __init__(self, program: Program) -> None:
        self.count = 0
        self._home = program.home
        self._crosses = {(e.var, e.target) for e in program.edges}
        self._once: dict[tuple[Var, int], int] = {}  # (variable outside loops, submesh) -> slot
        # (variable read or made in a body, submesh, microbatches of the loop) -> slot of each microbatch
        self._rows: dict[tuple[Var, int, int], Sequence[int]] = {}
        self._pieces: dict[Var, tuple[Var, ...]] = {}
        self._carry: dict[Var, tuple[Var, Var]] = {}
        # result of a loop -> (variable of the body, microbatch, how many there are)
        self._alias: dict[Var, tuple[Var, int, int]] = {}
        for loop in program.loops:
            count = loop.num_microbatches
            for inner, out, init, final in loop.carries:
                self._alias[final] = (out, count - 1, count)
                self._carry[inner] = (init, out)
            self._pieces.update(dict(loop.xs))
            for inner, outer in loop.ys:
                self._alias.update({v: (inner, m, count) for m, v in enumerate(outer)})
        self._outside = set(program.invars) | {v for f in program.fragments if f.loop is None for v in f.outvars}
        self._outside |= set(self._alias)

    def one(self, v: Var, s: int) -> int:
        """The slot of a value on a submesh, outside loops."""
        if v in self._alias:
            body, m, count = self._alias[v]
            if s == self._home[v] or (body, s) in self._crosses:
                return self.row(body, s, count)[m]
        if (v, s) not in self._once:
            self._once[v, s] = self._new(1)[0]
        return self._once[v, s]

    def row(self, v: Var, s: int, count: int) -> Sequence[int]:
        """The slots of a value on a submesh, for each of the microbatches of the loop that reads or makes it."""
        if (v, s, count) not in self._rows:
            self._rows[v, s, count] = self._row(v, s, count)
        return self._rows[v, s, count]

    def columns(self, variables: Sequence[Var], s: int, count: int | None) -> list[tuple[int, ...]]:
        """The slots of several values, together: a tuple for each microbatch, or one outside loops."""
        if count is None:
            return [tuple([self.one(v, s) for v in variables])]
        rows = [self.row(v, s, count) for v in variables]
        return list(zip(*rows, strict=True)) if rows else [()] * count

    def _row(self, v: Var, s: int, count: int) -> Sequence[int]:
        if v in self._outside:
            return [self.one(v, s)] * count
        if v in self._pieces:
            return [self.one(piece, s) for piece in self._pieces[v]]
        if v in self._carry:
            init, out = self._carry[v]
            if out not in self._carry:
                return [self.one(init, s), *self.row(out, s, count)[:-1]]
            return [self._carried(v, s, m, count) for m in range(count)]
        return self._new(count)

    def _carried(self, v: Var, s: int, m: int, count: int) -> int:
        """What carries hand to each other without computing anything, say two that are swapped."""
        while v in self._carry:
            init, out = self._carry[v]
            if m == 0:
                return self.one(init, s)
            v, m = out, m - 1
        return self.row(v, s, count)[m]

    def _new(self, count: int) -> list[int]:
        self.count += count
        return list(range(self.count - count, self.count))


class _Emitter:
    """Lists what reads and fills the slots of a call, in the order of issue."""

    def __init__(self, program: Program, donated_inputs: frozenset[int]) -> None:
        self.program = program
        self.donated_inputs = donated_inputs
        self.variables = variables_of(program)
        self.number = {v: k for k, v in enumerate(self.variables)}
        self.slots = _Slots(program)
        self.code: list[tuple[Any, ...]] = []  # constructor, its ports, its other arguments
        self.drafts: dict[int, _Draft] = {}
        self.edges: dict[Var, list[Edge]] = defaultdict(list)
        for e in program.edges:
            self.edges[e.var].append(e)
        self.finals: dict[Var, list[Var]] = defaultdict(list)
        self.copies: dict[Var, list[tuple[Var, ...]]] = defaultdict(list)
        self.handed: dict[tuple[int, int], list[Var]] = defaultdict(list)  # (fragment, microbatch) -> finals
        for loop in program.loops:
            for _, out, _, final in loop.carries:
                self.finals[out].append(final)
            for inner, outer in loop.ys:
                self.copies[inner].append(outer)

    def run(self) -> Plan:
        program, slots = self.program, self.slots
        inputs = tuple(
            (i, s, slots.one(v, s)) for i, v in enumerate(program.invars) for s in program.input_submeshes[v]
        )
        for item in program.order:
            if item >= 0:
                self._run(program.fragments[item], None)
            else:
                sequence = loop_sequence(program, -1 - item)
                self._find_handed(program.loops[-1 - item], sequence)
                for fragment, m in sequence:
                    self._run(fragment, m)
        outputs = tuple(slots.one(v, s) if _compat.is_var(v) else None for v, s in program.outputs)
        instructions = self._with_frees([s for s in outputs if s is not None])
        aliases = find_aliases(program.submeshes, inputs, instructions)
        lent = [slot for i, _, slot in inputs if i not in self.donated_inputs]
        lent += slots_of_others(program.submeshes, instructions)
        ports = tuple(Ports(self._numbers(f.invars), self._numbers(f.outvars)) for f in program.fragments)
        return Plan(
            instructions, slots.count, inputs, outputs, tuple(value_of(v) for v in self.variables), ports, aliases,
            donatable_inputs(instructions, slots.count, lent, aliases),
        )  # fmt: skip

    def _numbers(self, variables: Iterable[Var]) -> tuple[int, ...]:
        return tuple([self.number[v] for v in variables])

    def _find_handed(self, loop: LoopPlan, sequence: Sequence[tuple[Fragment, int]]) -> None:
        """What a carry leaves that was another one before leaves with the last run on its submesh: no run makes it."""
        inner = {v for v, *_ in loop.carries}
        handed = [final for _, out, _, final in loop.carries if out in inner and final in self.edges]
        last = {f.submesh: (f.index, m) for f, m in sequence} if handed else {}
        for v in handed:
            self.handed[last[self.program.home[v]]].append(v)

    def _run(self, f: Fragment, m: int | None) -> None:
        draft = self.drafts.get(f.index)
        if draft is None:
            draft = self.drafts[f.index] = self._draft(f)
        k, s = m or 0, f.submesh
        ins, outs = draft.reads[k], draft.makes[k]
        self.code.append((Run, (ins, outs), f.index, s, m, ins, outs))
        leaves = draft.final or draft.copied or (f.index, m) in self.handed
        results = self._results(f, m, draft) if m is not None and leaves else {}
        for target in dict.fromkeys((*draft.sends, *results)) if results else draft.sends:
            numbers: tuple[int, ...] = ()
            given: tuple[int, ...] = ()
            filled: tuple[int, ...] = ()
            if target in draft.sends:
                crossing = draft.sends[target]
                numbers, given, filled = crossing.numbers, crossing.given[k], crossing.filled[k]
            if target in results:
                more = results[target]
                numbers += self._numbers(more)
                given += self.slots.columns(more, s, None)[0]
                filled += self.slots.columns(more, target, None)[0]
            tag = Tag(f.index, target, m)
            self.code.append((Send, (given,), s, target, tag, numbers, given))
            self.code.append((Receive, (filled,), target, s, tag, numbers, filled))

    def _draft(self, f: Fragment) -> _Draft:
        s = f.submesh
        count = None if f.loop is None else self.program.loops[f.loop].num_microbatches
        columns = self.slots.columns
        sends = {
            target: _Crossing(self._numbers(values), columns(values, s, count), columns(values, target, count))
            for target, values in self._leaving(f.outvars, s).items()
        }
        final = [v for v in f.outvars if v in self.finals]
        copied = [v for v in f.outvars if v in self.copies]
        last = None if count is None else count - 1
        return _Draft(columns(f.invars, s, count), columns(f.outvars, s, count), sends, final, copied, last)

    def _leaving(self, variables: Iterable[Var], source: int) -> dict[int, list[Var]]:
        """Submesh -> those of the variables that go there from a submesh."""
        sends: dict[int, list[Var]] = defaultdict(list)
        for v in variables:
            for e in self.edges.get(v, ()):
                if e.source == source:
                    sends[e.target].append(v)
        return sends

    def _results(self, f: Fragment, m: int, draft: _Draft) -> dict[int, list[Var]]:
        """What leaves a loop with this run, by submesh."""
        results = [outer[m] for v in draft.copied for outer in self.copies[v]]
        if m == draft.last:
            results += [final for v in draft.final for final in self.finals[v]]
        results += self.handed.get((f.index, m), ())
        return self._leaving(results, f.submesh)

    def _with_frees(self, kept: Sequence[int]) -> tuple[Instruction, ...]:
        """The instructions, each with the slots that nobody touches after it."""
        touched = [entry[1] for entry in self.code]
        # Block by block: a large plan touches slots five million times, and several arrays of that length would be its peak.
        blocks = [_Block(k, touched[k : k + BLOCK]) for k in range(0, len(touched), BLOCK)]
        last, first = np.full((2, self.slots.count), -1, np.int32)
        for block in blocks:
            last[block.slots] = block.instructions()
        last[list(kept)] = -1
        self.code.reverse()
        instructions: list[Instruction] = []
        for block in blocks:
            numbers = block.instructions()
            dying = last[block.slots] == numbers
            # One instruction may touch a slot twice; it frees it once, where it stands first.
            position = np.flatnonzero(dying)
            first[block.slots[position][::-1]] = position[::-1]
            dying[position] = first[block.slots[position]] == position
            frees = compress(_flat(block.touched), dying.tobytes())
            counts = np.bincount(numbers[dying] - block.begin, minlength=len(block.touched)).tolist()
            instructions += [self._finished(tuple(islice(frees, n))) for n in counts]
        return tuple(instructions)

    def _finished(self, free: tuple[int, ...]) -> Instruction:
        """The next instruction, whose draft is dropped: of millions there are not both."""
        make, _, *fields = self.code.pop()
        instruction: Instruction = tuple.__new__(make, (*fields, free))  # at a third of the cost of calling it
        return instruction


@dataclass(eq=False, slots=True)
class _Draft:
    """What the runs of a fragment read, make and send, found once; an entry for each microbatch."""

    reads: list[tuple[int, ...]]
    makes: list[tuple[int, ...]]
    sends: dict[int, _Crossing]
    final: list[Var]  # what has another name outside its loop, after the last microbatch
    copied: list[Var]  # what has one after each
    last: int | None  # the last microbatch


@dataclass(eq=False, slots=True)
class _Crossing:
    """Values that go to one submesh: their numbers, and the slots that are given and filled in each microbatch."""

    numbers: tuple[int, ...]
    given: list[tuple[int, ...]]
    filled: list[tuple[int, ...]]


class _Block:
    """What instructions that follow each other read and fill: their slots, one instruction after the other.

    Args:
      begin: the number of the first one.
      touched: the slots of each.
    """

    def __init__(self, begin: int, touched: Sequence[Iterable[Sequence[int]]]) -> None:
        self.begin, self.touched = begin, touched
        self._lengths = np.fromiter((sum(map(len, ports)) for ports in touched), np.int32, len(touched))
        self.slots: _Numbers = np.fromiter(_flat(touched), np.int32, int(self._lengths.sum()))

    def instructions(self) -> _Numbers:
        """The number of the instruction that each of the slots belongs to."""
        numbers = np.arange(self.begin, self.begin + len(self.touched), dtype=np.int32)
        return np.repeat(numbers, self._lengths)


def _flat(touched: Iterable[Iterable[Iterable[int]]]) -> Iterator[int]:
    """The slots that instructions read and fill."""
    return chain.from_iterable(chain.from_iterable(touched))
