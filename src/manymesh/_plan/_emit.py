"""`emit`: from a program and its schedules to instructions over slots. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .. import _compat
from .._program import Edge, Fragment, LoopPlan, Program
from ..schedules import Order, issue_order
from ._alias import find_aliases
from ._check import check
from ._donation import donatable_inputs, slots_of_others
from ._instructions import Instruction, Plan, Ports, Receive, Run, Send, Tag
from ._number import value_of, variables_of

Var = _compat.Var

UNKNOWN = -1
# A larger plan repeats in more microbatches what a small one does, and checking it would take a quarter of its time.
CHECKED_SLOTS = 20_000


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
    if any(m is not None and m.kind == "W" and m.stage != f.stage for f, m in read):
        return _after_what_it_reads(loop, sequence, maker)
    return sequence


def _after_what_it_reads(
    loop: LoopPlan, sequence: list[tuple[Fragment, int]], maker: Callable[[Var, int], Fragment | None]
) -> list[tuple[Fragment, int]]:
    """The sequence with each fragment put off until what it reads is there.

    To a schedule the weight gradients of different stages have nothing to do with each other. Where a weight is used
    in several stages they are added up in one of them.
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
    order: Order = loop.schedule.order(loop.placement, loop.num_microbatches, backward=backward)
    return order


def _has_forward(body: list[Fragment]) -> bool:
    return any(f.kind == "F" for f in body)


class _Emitter:
    """Numbers the slots of every value of a call, and lists what reads and fills them.

    A large plan has millions of slots, so what does not depend on the microbatch is found once for each
    variable and submesh: the slots of a body's variable are a row, one entry a microbatch, filled as they
    are met.
    """

    def __init__(self, program: Program, donated_inputs: frozenset[int]) -> None:
        self.program = program
        self.donated_inputs = donated_inputs
        self.variables = variables_of(program)
        self.number = {v: k for k, v in enumerate(self.variables)}
        self.num_slots = 0
        self.once: dict[tuple[Var, int], int] = {}  # (variable outside loops, submesh) -> slot
        self.rows: dict[tuple[Var, int], list[int]] = {}  # (variable of a body, submesh) -> slot of each microbatch
        self.longest = max((loop.num_microbatches for loop in program.loops), default=0)
        self.code: list[tuple[Any, ...]] = []
        self.drafts: dict[int, _Draft] = {}
        self.edges: dict[Var, list[Edge]] = defaultdict(list)
        for e in program.edges:
            self.edges[e.var].append(e)
        self.alias: dict[Var, tuple[Var, int]] = {}  # result of a loop -> (variable of the body, microbatch)
        self.cut: dict[Var, tuple[Var, ...]] = {}
        self.carry: dict[Var, tuple[Var, Var]] = {}
        self.finals: dict[Var, list[Var]] = defaultdict(list)
        self.copies: dict[Var, list[tuple[Var, ...]]] = defaultdict(list)
        for loop in program.loops:
            for inner, out, init, final in loop.carries:
                self.alias[final] = (out, loop.num_microbatches - 1)
                self.carry[inner] = (init, out)
                self.finals[out].append(final)
            self.cut.update(dict(loop.xs))
            for inner, outer in loop.ys:
                self.copies[inner].append(outer)
                self.alias.update({v: (inner, m) for m, v in enumerate(outer)})
        self.last = [loop.num_microbatches - 1 for loop in program.loops]
        self.outside = set(program.invars) | {v for f in program.fragments if f.loop is None for v in f.outvars}
        self.outside |= set(self.alias)

    def run(self) -> Plan:
        program = self.program
        inputs = tuple(
            (i, s, self._slot(v, s, None)) for i, v in enumerate(program.invars) for s in program.input_submeshes[v]
        )
        for item in program.order:
            if item >= 0:
                self._run(program.fragments[item], None)
            else:
                for fragment, m in loop_sequence(program, -1 - item):
                    self._run(fragment, m)
        outputs = tuple(self._slot(v, s, None) if _compat.is_var(v) else None for v, s in program.outputs)
        instructions = self._with_frees({s for s in outputs if s is not None})
        aliases = find_aliases(program.submeshes, inputs, instructions)
        lent = [slot for i, _, slot in inputs if i not in self.donated_inputs]
        lent += slots_of_others(program.submeshes, instructions)
        ports = tuple(Ports(self._numbers(f.invars), self._numbers(f.outvars)) for f in program.fragments)
        return Plan(
            instructions, self.num_slots, inputs, outputs, tuple(value_of(v) for v in self.variables), ports, aliases,
            donatable_inputs(instructions, lent, aliases),
        )  # fmt: skip

    def _numbers(self, variables: Iterable[Var]) -> tuple[int, ...]:
        return tuple([self.number[v] for v in variables])

    def _slot(self, v: Var, s: int, m: int | None) -> int:
        """The slot of a value on a submesh, in one microbatch or outside loops."""
        if m is None or v in self.outside:
            if v in self.alias and s == self.program.home[v]:
                v, m = self.alias[v]
            else:
                return self._new(self.once, (v, s))
        while v in self.carry:
            init, out = self.carry[v]
            if m == 0:
                return self._slot(init, s, None)
            v, m = out, m - 1
        if v in self.cut:
            return self._slot(self.cut[v][m], s, None)
        row = self._row(v, s)
        if row[m] == UNKNOWN:
            row[m] = self.num_slots
            self.num_slots += 1
        return row[m]

    def _new(self, known: dict[tuple[Var, int], int], key: tuple[Var, int]) -> int:
        if key not in known:
            known[key] = self.num_slots
            self.num_slots += 1
        return known[key]

    def _row(self, v: Var, s: int) -> list[int]:
        row = self.rows.get((v, s))
        if row is None:
            row = self.rows[v, s] = [UNKNOWN] * self.longest
        return row

    def _slots(self, variables: list[Var], rows: list[list[int]], s: int, m: int, new: bool) -> tuple[int, ...]:
        """The slots of a body's variables in one microbatch; `new` if none of them has another name."""
        slots = [row[m] for row in rows]
        if new and slots.count(UNKNOWN) == len(slots):
            slots = list(range(self.num_slots, self.num_slots + len(slots)))
            self.num_slots += len(slots)
            for row, slot in zip(rows, slots, strict=True):
                row[m] = slot
        elif UNKNOWN in slots:
            for k, v in enumerate(variables):
                if slots[k] == UNKNOWN:
                    slots[k] = rows[k][m] = self._slot(v, s, m)
        return tuple(slots)

    def _run(self, f: Fragment, m: int | None) -> None:
        draft = self.drafts.get(f.index)
        if draft is None:
            draft = self.drafts[f.index] = self._draft(f)
        s = f.submesh
        if m is None:
            ins = tuple([self._slot(v, s, None) for v in draft.reads])
            outs = tuple([self._slot(v, s, None) for v in draft.makes])
        else:
            ins = self._slots(draft.reads, draft.read_rows, s, m, False)
            outs = self._slots(draft.makes, draft.made_rows, s, m, draft.new)
        self.code.append((Run, ins + outs, f.index, s, m, ins, outs))
        if not draft.leaves:
            return
        sends: dict[int, list[tuple[Var, int | None]]] = defaultdict(list)
        for v in draft.leaves:
            self._sends_of(v, s, m, sends)
            if m is not None and m == self.last[f.loop or 0]:
                for final in self.finals.get(v, ()):
                    self._sends_of(final, s, None, sends)
            for outer in self.copies.get(v, ()):
                self._sends_of(outer[m or 0], s, None, sends)
        for target, values in sends.items():
            tag = Tag(f.index, target, m)
            numbers = self._numbers([v for v, _ in values])
            given = tuple([self._slot(v, s, k) for v, k in values])
            filled = tuple([self._slot(v, target, k) for v, k in values])
            self.code.append((Send, given, s, target, tag, numbers, given))
            self.code.append((Receive, filled, target, s, tag, numbers, filled))

    def _draft(self, f: Fragment) -> _Draft:
        reads, makes = f.invars, f.outvars
        rows = [[] if f.loop is None else [self._row(v, f.submesh) for v in each] for each in (reads, makes)]
        leaves = [v for v in makes if v in self.edges or v in self.finals or v in self.copies]
        new = not any(v in self.outside or v in self.carry or v in self.cut for v in makes)
        return _Draft(reads, makes, rows[0], rows[1], leaves, new)

    def _sends_of(self, v: Var, source: int, m: int | None, sends: dict[int, list[tuple[Var, int | None]]]) -> None:
        for e in self.edges.get(v, ()):
            if e.source == source:
                sends[e.target].append((v, m))

    def _with_frees(self, kept: set[int]) -> tuple[Instruction, ...]:
        """The instructions, each with the slots that nobody reads after it."""
        needed = bytearray(self.num_slots)
        for slot in kept:
            needed[slot] = 1
        instructions: list[Instruction] = []
        for make, touched, *fields in reversed(self.code):
            free = []
            for slot in touched:
                if not needed[slot]:
                    needed[slot] = 1
                    free.append(slot)
            instructions.append(make(*fields, tuple(free)))
        instructions.reverse()
        return tuple(instructions)


@dataclass(eq=False, slots=True)
class _Draft:
    """What a fragment reads and makes, found once for all its runs."""

    reads: list[Var]
    makes: list[Var]
    read_rows: list[list[int]]
    made_rows: list[list[int]]
    leaves: list[Var]  # what it makes that crosses, or that has another name outside its loop
    new: bool  # whether what it makes has no other name inside its loop
