"""One jaxpr with marks, nested anyhow, to one flat list of equations.

Only what holds a task or a loop is opened: jit, remat and custom-derivative calls are inlined, scans
are unrolled unless they are long and of one submesh, the scan of a microbatch loop becomes a `Loop` whose
body appears once. Everything else stays one opaque equation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType

from .. import _compat
from .._compat import AbstractJaxpr, Atom, Eqn, Var
from .._errors import PlacementError, TaskError
from .._findings import Finding
from .._implicit import Iteration, Matcher
from .._mark import MARK, Recording, border_p
from .._microbatch import LoopSpec
from .._program._calls import call_body, is_transparent, leaf_by_leaf
from .._program._flat import FlatProgram, Result
from .._program._nodes import Carry, Loop, Node, Pieces, shape_and_dtype
from .._program._rewrite import reading, substitute, trace_nodes, with_atoms
from .._task import Task
from ._borders import Entered, results_of
from ._held import Held
from ._known import Known
from ._layers import NONE, Layers
from ._pieces import Views, in_pieces
from ._refused import control_flow_message
from ._resolve import resolve_names
from ._scopes import is_backward, matched_inside, tasks_inside

# A scan of more iterations is no layers one after the other. It stays a loop where one submesh has all tasks in it: as many
# equations, and fragments to launch, would take long to compile and to run.
UNROLLED = 32
_CHEAP = {"sharding_constraint", "convert_element_type", "transpose", "reshape", "squeeze", "copy"}

Env = dict[Var, Atom]  # variable of a nested jaxpr -> what stands for it in the flat program


class AcrossError(PlacementError):
    """A loop of unknown length, which no one program can run, around tasks of several submeshes."""


def runs_across(record: Recording) -> Callable[[Eqn, bool], bool]:
    """A function that tells whether a ``while`` equation, with its whole name stack, is one that `flatten` refuses.

    Its second argument is whether the equation is in a scan, whose iterations may be on submeshes of their own.
    """
    worker = Flattener(record.tasks, record.loops, record.implicit)

    def across(eqn: Eqn, in_scan: bool) -> bool:
        stack = f"/{_compat.name_stack(eqn)}"
        if not worker.is_opened(eqn, stack) or worker.whole(eqn, stack, None) is not None:
            return False
        return not (in_scan and worker.is_split(eqn, stack))

    return across


def flatten(closed: AbstractJaxpr, record: Recording) -> FlatProgram:
    """Brings a traced program into flat form.

    Args:
      closed: the closed jaxpr of the whole step.
      record: what its marks mean.

    Raises:
      PlacementError: a task inside control flow that cannot be opened; an `AcrossError` for a loop that the host can run.
      TaskError: a task with several meshes that is in no scan.
    """
    parts = _compat.open_jaxpr(closed)
    worker = Flattener(record.tasks, record.loops, record.implicit, closed)
    env: Env = {}
    for v, c in zip(parts.constvars, parts.consts, strict=True):
        env[v] = worker.hold(v, c)
    worker.inline(parts.eqns, env, "", None, None)
    worker.check_split()
    if (leak := _compat.escaped(list(worker.held.values.values()))) is not None:
        leak.add_note(
            "a function with a derivative of its own (jax.custom_vjp), inside a loop over microbatches or a jit that is "
            "differentiated, closes over this value; JAX cannot have that: pass it to the function as an argument"
        )
        raise leak
    return FlatProgram(
        invars=(*worker.held.values, *parts.invars),
        outvars=tuple(_lookup(env, v) for v in parts.outvars),
        nodes=worker.as_read(),
        loops=tuple(worker.loops),
        tasks=worker.tasks,
        consts=worker.held.values,
        stacked=worker.stacked,
        results=worker.results,
        registered=record.implicit,
        findings=tuple({**dict.fromkeys(record.findings), **worker.findings}),
    )


def new_mark(tasks: Mapping[str, Task], name: str) -> str:
    """A mark for a task that a pass makes: a name that no other mark of the program has."""
    clean = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    number = len(tasks)
    while f"{clean}{MARK}_{number}" in tasks:
        number += 1
    return f"{clean}{MARK}_{number}"


def _lookup(env: Env, atom: Atom) -> Atom:
    return env.get(atom, atom) if _compat.is_var(atom) else atom


class Flattener:
    """Makes flat nodes of equations; `hold` and `inline` are asked for them, or `select` and `unroll` for one."""

    def __init__(
        self,
        tasks: Mapping[str, Task],
        specs: Mapping[str, LoopSpec],
        registered: Matcher,
        program: AbstractJaxpr | None = None,
    ) -> None:
        self.tasks, self.specs, self.registered = dict(tasks), specs, registered
        self.nodes: list[Node] = []
        self.loops: list[Loop] = []
        self.held = Held()  # constants, of nested jaxprs, too; they become inputs
        self.stacked: dict[Var, tuple[Atom, ...]] = {}  # results of `_stack`, to take apart again without a copy
        self._marked: dict[int, bool] = {}
        self._bodies: dict[int, AbstractJaxpr] = {}
        self._keep: list[AbstractJaxpr] = []  # jaxprs whose ids are in _marked and _bodies
        self._entered: Entered = {}
        self._again: set[Node] = set()  # what makes something of a weight again, for backward passes
        self._views = Views()
        self._known = Known()
        self.selected: dict[Var, Eqn] = {}  # what is selected from branches -> the selection
        self._varying: set[Var] = set()
        self._layers: dict[tuple[Atom, int, int | None], Atom] = {}  # (stacked value, index, loop) -> its slice
        self._split: dict[Task, bool] = {}  # tasks with several meshes -> whether a scan ran them
        self._iterations: tuple[Iteration, ...] = ()  # of the scans around, the outermost first
        split = registered or any(task.meshes for task in tasks.values())
        self._layers_of = Layers(program, tasks, specs) if split and program is not None else NONE
        self.guard: tuple[tuple[Atom, int], ...] = ()  # the branches around
        self.findings: dict[Finding, None] = {}
        self.results: dict[Var, Result] = {}
        self._wholes: dict[tuple[object, ...], str] = {}  # what control flow that stays whole holds -> its mark

    def hold(self, v: Var, const: object) -> Var:
        """Takes a constant in, and says what stands for it."""
        held = self.held.take(v, const)
        if held is v:
            self._known.hold(v, const)
        return held

    def inline(self, eqns: Sequence[Eqn], env: Env, stack: str, loop: int | None, spec: LoopSpec | None) -> None:
        """Appends equations to the flat program; ``env`` maps their variables to flat ones.

        Args:
          stack: name stack of what encloses them.
          loop: the loop whose body they are, or None.
          spec: what `microbatch` said, where the equations are directly those of a marked loop.
        """
        for eqn in eqns:
            mark = str(eqn.params.get("name")) if _compat.is_jit(eqn) else ""
            inner_stack = f"{stack}/{_compat.name_stack(eqn)}"
            if mark in self.tasks:
                self._task(eqn, env, mark, inner_stack, loop)
            elif mark in self.specs and loop is None:
                self._call(eqn, env, inner_stack, loop, self.specs[mark])
            elif is_transparent(eqn) and spec is None and mark not in self.specs:
                self._call(eqn, env, inner_stack, loop, None)
            elif not self.is_opened(eqn, inner_stack) and not (spec is not None and eqn.primitive.name == "scan"):
                if solver := _compat.solver(eqn):  # which is all that is left of it: derivatives are taken
                    self._solve(solver, eqn, env, inner_stack, loop)
                else:
                    for leaf in leaf_by_leaf(eqn):
                        self._plain(leaf, env, inner_stack, loop)
            elif eqn.primitive.name == "scan":
                if spec is not None:
                    self._loop(eqn, env, inner_stack, spec)
                elif whole := self.whole_scan(eqn, inner_stack, loop):
                    self._keep_whole(eqn, env, inner_stack, loop, whole)
                else:
                    self.unroll(eqn, env, inner_stack, loop)
            elif eqn.primitive.name in ("cond", "while") and (whole := self.whole(eqn, inner_stack, loop)):
                self._keep_whole(eqn, env, inner_stack, loop, whole)
            elif eqn.primitive.name == "cond":
                self.select(eqn, env, inner_stack, loop)
            elif call_body(eqn) is not None:
                self._call(eqn, env, inner_stack, loop, None)
            elif whole := self.whole(eqn, inner_stack, loop):
                self._keep_whole(eqn, env, inner_stack, loop, whole)
            elif solver := _compat.solver(eqn):
                self._solve(solver, eqn, env, inner_stack, loop)
            else:
                message = control_flow_message(eqn, self._tasks_in(eqn, inner_stack))
                raise (AcrossError if eqn.primitive.name == "while" else PlacementError)(message)

    def _solve(self, solver: tuple[AbstractJaxpr, list[Any]], eqn: Eqn, env: Env, stack: str, loop: int | None) -> None:
        operands = [_lookup(env, v) for v in solver[1]]
        self._inline_jaxpr(solver[0], operands, eqn.outvars, env, stack, loop)

    def _plain(self, eqn: Eqn, env: Env, stack: str, loop: int | None) -> None:
        if eqn.primitive is border_p or (eqn.primitive.name == "reshard" and _is_empty_reshard(eqn)):
            env[eqn.outvars[0]] = _lookup(env, eqn.invars[0])
            return
        new, backward = substitute(eqn, env), is_backward(stack)
        apart = in_pieces(new, self._known)
        if apart is None:
            nodes, made = [Node(new, None, backward, loop, stack=stack, guard=self.guard)], new.outvars
        else:
            nodes, made = trace_nodes(apart.fun, [new.invars[apart.operand]], loop=loop, backward=backward)
            nodes = [replace(node, stack=stack, guard=self.guard) for node in nodes]
        seen: Env = {}
        for node in nodes:
            node = reading(node, seen)
            view = self._views.known(node)
            if view is None:
                self._append(node)
            else:
                seen[node.eqn.outvars[0]] = view
        env.update((v, _lookup(seen, new)) for v, new in zip(eqn.outvars, made, strict=True) if _compat.is_var(v))

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        if node.task is None:
            self._known.learn(node.eqn)
        if node.loop is not None:
            self._varying.update(node.outputs)

    def _task(self, eqn: Eqn, env: Env, mark: str, stack: str, loop: int | None) -> None:
        part = self._of_iteration(mark)
        if part is None:
            return self._call(eqn, env, stack, loop, None)
        marked = _compat.open_jaxpr(eqn.params["jaxpr"])
        eqn = eqn.replace(params={**eqn.params, "jaxpr": self._without_borders(eqn.params["jaxpr"])})
        inner = _compat.open_jaxpr(eqn.params["jaxpr"])
        new = substitute(eqn, env)
        self._append(Node(new, part, is_backward(stack), loop, stack=stack, guard=self.guard))
        self.results.update(results_of(marked, new, (part, self._iterations), self._entered))
        actual: Env = dict(zip(inner.invars, new.invars, strict=True))
        producer = {v: e for e in inner.eqns for v in e.outvars}
        for outer, result in zip(eqn.outvars, inner.outvars, strict=True):
            if not (_compat.is_var(outer) and _compat.is_var(result)):
                continue
            if result in actual:  # handed through unchanged
                env[outer] = actual[result]
                continue
            start, chain = cheap_chain(result, producer, actual) if loop is not None else (None, [])
            # A weight's cast or constraint, kept for the backward pass: recompute it there instead of
            # storing a copy of the weight for every microbatch in flight.
            if start is not None and actual[start] not in self._varying:
                sub: Env = {start: actual[start]}
                for e in chain:
                    self._append(Node(substitute(e, sub), None, True, loop, colocated_with=part))
                    self._again.add(self.nodes[-1])
                env[outer] = sub[result]

    def as_read(self) -> tuple[Node, ...]:
        """The nodes; what is made again of a weight is part of a forward pass where one reads it, as rounds of a scan do."""
        forward: set[Var] = set()
        found: list[Node] = []
        for node in reversed(self.nodes):
            if node in self._again and not forward.isdisjoint(node.outputs):
                node = replace(node, backward=False)
            if not node.backward:
                forward.update(node.inputs)
            found.append(node)
        return tuple(found[::-1])

    def _without_borders(self, jaxpr: AbstractJaxpr) -> AbstractJaxpr:
        """What a task computes, without the ends of tasks, which say nothing any more; one jaxpr for all that share it."""
        if id(jaxpr) not in self._bodies:
            parts = _compat.open_jaxpr(jaxpr)
            alias: Env = {}
            eqns = []
            # What enters is what is behind the border, on no mesh: a cotangent may come on that of another task.
            borders = [e for e in parts.eqns if e.primitive is border_p and _compat.is_var(e.invars[0])]
            behind = {e.invars[0]: e.outvars[0] for e in borders}
            alias |= {v: behind[v] for v in parts.invars if v in behind}
            for e in parts.eqns:
                if e.primitive is border_p:
                    alias.setdefault(e.outvars[0], _lookup(alias, e.invars[0]))
                else:
                    eqns.append(with_atoms(e, alias) if any(v in alias for v in e.invars if _compat.is_var(v)) else e)
            invars = [behind.get(v, v) for v in parts.invars]
            outvars = [_lookup(alias, v) for v in parts.outvars]
            self._keep.append(jaxpr)
            self._bodies[id(jaxpr)] = _compat.with_body(jaxpr, invars, outvars, eqns) if alias else jaxpr
        return self._bodies[id(jaxpr)]

    def _of_iteration(self, mark: str) -> str | None:
        """The mark of a task, or of its part that runs on the submesh of the scan's iteration under way.

        None for what differentiation took out of the scan because every iteration needs it alike.
        """
        task = self.tasks[mark]
        if not task.meshes:
            return mark
        self._split.setdefault(task, False)
        if (layer := self._layers_of.of_task(mark, self._iterations)) is None:
            return None
        self._split[task] = True
        part = task.at(*layer)
        assert part.mesh is not None, "each of the meshes is one"
        of_part = f"{mark}_{task.meshes.index(part.mesh)}"
        self.tasks[of_part] = part
        return of_part

    def check_split(self) -> None:
        """Refuses a task with several meshes that no scan ever ran."""
        for task, in_scan in self._split.items():
            if not in_scan:
                raise TaskError(
                    f"task {task.name!r} has {len(task.meshes)} meshes to split the iterations of a scan over, but is not "
                    "in the body of lax.scan; give it one mesh, or scan over its layers"
                )

    def _call(self, eqn: Eqn, env: Env, stack: str, loop: int | None, spec: LoopSpec | None) -> None:
        jaxpr = call_body(eqn)
        assert jaxpr is not None, "only calls are inlined"
        self._inline_jaxpr(jaxpr, [_lookup(env, v) for v in eqn.invars], eqn.outvars, env, stack, loop, spec)

    def _inline_jaxpr(
        self, jaxpr: AbstractJaxpr, operands: Sequence[Atom], outvars: Sequence[Atom], env: Env, stack: str,
        loop: int | None, spec: LoopSpec | None = None,
    ) -> None:  # fmt: skip
        inner = _compat.open_jaxpr(jaxpr)
        sub: Env = dict(zip(inner.invars, operands, strict=True))
        for v, c in zip(inner.constvars, inner.consts, strict=True):
            sub[v] = self.hold(_compat.new_var(v.aval), c)
        self.inline(inner.eqns, sub, stack, loop, spec)
        for outer, result in zip(outvars, inner.outvars, strict=True):
            if _compat.is_var(outer):
                env[outer] = _lookup(sub, result)

    def unroll(self, eqn: Eqn, env: Env, stack: str, loop: int | None) -> None:
        """A scan, as its iterations one after the other."""
        scan = _compat.scan_parts(eqn)
        operands = [_lookup(env, v) for v in eqn.invars]
        n = scan.num_consts + scan.num_carry
        consts, carry, stacked = operands[: scan.num_consts], operands[scan.num_consts : n], operands[n:]
        inner = _compat.open_jaxpr(scan.jaxpr)
        collected: list[list[Any]] = [[None] * scan.length for _ in inner.outvars[scan.num_carry :]]
        steps = range(scan.length)
        outer = self._iterations
        levels = self._layers_of.levels(eqn)
        for i in reversed(steps) if scan.reverse else steps:
            self._iterations = (*outer, Iteration(i, scan.length, levels))
            pieces = [self._layer(x, i, loop) for x in stacked]
            results = [_compat.new_var(v.aval) for v in inner.outvars]
            sub: Env = {}
            inner_stack = f"{stack}/{self._iterations[-1]}"
            self._inline_jaxpr(scan.jaxpr, [*consts, *carry, *pieces], results, sub, inner_stack, loop)
            values = [sub[r] for r in results]
            carry = values[: scan.num_carry]
            for column, y in zip(collected, values[scan.num_carry :], strict=True):
                column[i] = y
        self._iterations = outer
        # What hands on its layers as they came, such as weights that go through `nnx.remat`, is the stack that it took apart.
        whole = {tuple(id(self._layer(x, i, loop)) for i in steps): x for x in stacked}
        outs = carry + (
            [whole.get(tuple(map(id, column))) or self._stack(column, loop) for column in collected]
            if scan.length
            else [self._empty(v) for v in inner.outvars[scan.num_carry :]]
        )
        env.update({v: o for v, o in zip(eqn.outvars, outs, strict=True) if _compat.is_var(v)})

    def select(self, eqn: Eqn, env: Env, stack: str, loop: int | None) -> None:
        """A conditional that holds tasks: every branch is there, where its tasks are, and the results are selected.

        Which submesh has a fragment then never depends on data, and no device waits for the host: what a fragment has
        of a branch that is not taken, it skips.
        """
        index, *operands = [_lookup(env, v) for v in eqn.invars]
        if (known := self._known(index)) is not None:
            possible = eqn.params["branches"]
            taken = possible[min(max(int(known), 0), len(possible) - 1)]
            return self._inline_jaxpr(taken, operands, eqn.outvars, env, stack, loop)
        around = self.guard
        branches = []
        for number, branch in enumerate(eqn.params["branches"]):
            self.guard = (*around, (index, number))
            results = [_compat.new_var(v.aval) for v in _compat.open_jaxpr(branch).outvars]
            sub: Env = {}
            given = [self._in_branch(v, index, number) for v in operands]
            self._inline_jaxpr(branch, given, results, sub, stack, loop)
            branches.append([sub[r] for r in results])
        self.guard = around
        for outer, cases in zip(eqn.outvars, zip(*branches, strict=True), strict=True):
            if not _compat.is_var(outer):
                continue
            if all(c is cases[0] for c in cases):
                env[outer] = cases[0]
                continue
            reads = [v for v in (index, *cases) if _compat.is_var(v)]

            def select(*arrays: jax.Array, atoms: Any = (index, *cases)) -> Any:
                it = iter(arrays)
                return lax.select_n(
                    *[next(it) if _compat.is_var(v) else lax.full((), v.val, v.aval.dtype) for v in atoms]
                )

            nodes, (env[outer],) = trace_nodes(select, reads, loop=loop, backward=is_backward(stack))
            for node in nodes:
                self._append(node)
            self.selected[nodes[-1].eqn.outvars[0]] = nodes[-1].eqn

    def _in_branch(self, atom: Atom, index: Atom, number: int) -> Atom:
        """What a value is in a branch: of what the same condition selected, that branch's own.

        What the forward pass of a branch keeps for its backward pass need not go where the branches meet and back.
        """
        while _compat.is_var(atom) and atom in self.selected and self.selected[atom].invars[0] is index:
            atom = self.selected[atom].invars[1 + number]
        return atom

    def whole(self, eqn: Eqn, stack: str, loop: int | None) -> str | None:
        """The mark of the task that a conditional or a loop becomes where one submesh has all tasks in it; else None."""
        marks = self._explicit(eqn)
        if self._iterations and not self._scans_tasks(eqn, stack):  # of one layer
            marks = [self._of_iteration(mark) or mark for mark in marks]
        tasks = self._tasks(marks, eqn, stack)
        conditional = eqn.primitive.name == "cond"
        if any(t.meshes for t in tasks) or len({t.mesh for t in tasks} - {None}) > 1:
            return None
        names = list(dict.fromkeys(t.name or "task" for t in tasks))
        if not tasks or (conditional and self._holds_loop(eqn)):
            return None
        # In the body of a microbatch loop each task may be a stage. Tasks whose place is inferred may end up apart.
        if conditional and len(names) > 1 and (loop is not None or tasks[0].mesh is None):
            return None
        if len(marks) == 1 and len(tasks) == 1:
            return marks[0]
        key = (*marks, *tasks)
        if key not in self._wholes:
            first = next((t for t in tasks if t.mesh is not None), tasks[0])
            joined = first.joined(t for t in tasks if t is not first)
            self._wholes[key] = new_mark(self.tasks, joined.name or "task")
            self.tasks[self._wholes[key]] = joined
        return self._wholes[key]

    def whole_scan(self, eqn: Eqn, stack: str, loop: int | None) -> str | None:
        """The mark of the task that a long scan becomes where one submesh has all tasks in it: a rollout, the cell of an RNN."""
        if _compat.scan_parts(eqn).length <= UNROLLED or self._holds_loop(eqn):
            return None
        if any(t.mesh is None for t in self._tasks_in(eqn, stack)) or matched_inside(eqn, stack, self.registered):
            return None
        return self.whole(eqn, stack, loop)

    def _keep_whole(self, eqn: Eqn, env: Env, stack: str, loop: int | None, mark: str) -> None:
        """Makes one task of a conditional or a loop; the tasks in it are calls like any other."""
        inner: Env = {}
        given = list(dict.fromkeys(v for v in eqn.invars if _compat.is_var(v)))
        inner.update({v: _compat.new_var(v.aval) for v in given})
        body = substitute(eqn, inner)
        outs = [v for v in eqn.outvars if _compat.is_var(v)]
        eqns, found = resolve_names([body], self.tasks[mark])
        self.findings.update(dict.fromkeys(found))
        jaxpr = _compat.new_jaxpr([inner[v] for v in given], [inner[v] for v in outs], eqns)  # type: ignore[misc]
        new = _compat.call_eqn(mark, jaxpr, [_lookup(env, v) for v in given], outs)
        self._append(Node(substitute(new, env), mark, is_backward(stack), loop, stack=stack, guard=self.guard))

    def _layer(self, x: Atom, i: int, loop: int | None) -> Atom:
        """A layer's slice, one for both passes; what no microbatch changes, such as weights, is taken apart once, outside its loop."""
        loop = loop if x in self._varying else None
        if (x, i, loop) not in self._layers:
            (self._layers[x, i, loop],) = self._slices(x, [i], loop)
        return self._layers[x, i, loop]

    def _slices(
        self, x: Atom, indices: Sequence[int], loop: int | None, layout_follows_loop: bool = False
    ) -> tuple[Atom, ...]:
        """The slices at some indices. Many are traced together, which takes a tenth of the time."""
        if _compat.is_var(x) and x in self.stacked:
            return tuple(self.stacked[x][i] for i in indices)
        nodes, pieces = trace_nodes(
            lambda a: [lax.index_in_dim(a, i, 0, keepdims=False) for i in indices],
            [x],
            loop=loop,
            unstacks=True,
            layout_follows_loop=layout_follows_loop,
        )
        for node in nodes:
            self._append(node)
        return tuple(pieces)

    def _literal(self, literal: Any) -> Var:
        """A variable that holds a literal, for an accumulator to start from."""
        aval, value = literal.aval, literal.val
        nodes, (out,) = trace_nodes(
            lambda: lax.optimization_barrier(lax.full(aval.shape, value, aval.dtype)), [], layout_follows_loop=True
        )
        for node in nodes:
            self._append(node)
        made: Var = out
        return made

    def _empty(self, one: Atom) -> Var:
        """The stack of no values."""
        shape, dtype = shape_and_dtype(one)
        nodes, (out,) = trace_nodes(lambda: lax.empty((0, *shape), dtype), [])
        for node in nodes:
            self._append(node)
        made: Var = out
        return made

    def _stack(self, column: Sequence[Any], loop: int | None) -> Var:
        operands = [v for v in column if _compat.is_var(v)]

        def stack(*arrays: jax.Array) -> Any:
            it = iter(arrays)
            return jax.numpy.stack([next(it) if _compat.is_var(v) else v.val for v in column])

        nodes, (out,) = trace_nodes(stack, operands, loop=loop)
        for node in nodes:
            self._append(node)
        made: Var = out
        self.stacked[made] = tuple(column)
        return made

    def _loop(self, eqn: Eqn, env: Env, stack: str, spec: LoopSpec) -> None:
        scan = _compat.scan_parts(eqn)
        operands = [_lookup(env, v) for v in eqn.invars]
        n = scan.num_consts + scan.num_carry
        loop = len(self.loops)
        self.loops.append(Loop(spec))
        inner = _compat.open_jaxpr(scan.jaxpr)
        order = list(reversed(range(scan.length))) if scan.reverse else list(range(scan.length))
        for k in range(scan.num_consts, n):
            if not _compat.is_var(operands[k]):
                operands[k] = self._literal(operands[k])
        carried = [_compat.new_var(v.aval) for v in inner.invars[scan.num_consts : n]]
        xs = []
        for v, stacked in zip(inner.invars[n:], operands[n:], strict=True):
            pieces = self._slices(stacked, order, None, layout_follows_loop=True)
            xs.append(Pieces(_compat.new_var(v.aval), pieces))
        body_in = [*operands[: scan.num_consts], *carried, *(p.inner for p in xs)]
        self._varying.update(carried, (p.inner for p in xs))
        results = [_compat.new_var(v.aval) for v in inner.outvars]
        start = len(self.nodes)
        sub: Env = {}
        self._inline_jaxpr(scan.jaxpr, body_in, results, sub, stack, loop)
        if is_backward(stack):  # so is all in it: the slices of layers that a scan in it takes, too
            self.nodes[start:] = [n if n.loop != loop else replace(n, backward=True) for n in self.nodes[start:]]
        init = operands[scan.num_consts : n]
        values = self._replace_unchanged_carries(start, carried, init, [sub[r] for r in results])
        read = {v for node in self.nodes[start:] if node.loop == loop for v in node.inputs}
        read |= {v for v in values[scan.num_carry :] if _compat.is_var(v)}
        pieces_of = {p.inner: p for p in xs}
        carries: list[Carry] = []
        for k, (v, first) in enumerate(zip(carried, init, strict=True)):
            is_read = v in read or v in values[:k] + values[k + 1 :]
            final = self._carry(loop, v, first, values[k], pieces_of, carries, is_read)
            if _compat.is_var(eqn.outvars[k]):
                env[eqn.outvars[k]] = final
        ys: list[Pieces] = []
        wanted = [self._copy(y, loop) if y in carried else y for y in values[scan.num_carry :]]
        for outer, y in zip(eqn.outvars[scan.num_carry :], wanted, strict=True):
            if _compat.is_var(outer):
                by_step = self._collected(y, pieces_of, ys, scan.length)
                env[outer] = self._stack([by_step[order.index(i)] for i in range(scan.length)], None)
        self.loops[loop] = replace(self.loops[loop], carries=tuple(carries), xs=tuple(xs), ys=tuple(ys))

    def _collected(self, y: Atom, xs: Mapping[Var, Pieces], ys: list[Pieces], length: int) -> tuple[Atom, ...]:
        """What a value of the body is after each microbatch; ``ys`` grows where the loop has to collect it."""
        if not _compat.is_var(y) or y not in self._varying:
            return (y,) * length
        if y in xs:
            return xs[y].outer
        pieces = tuple(_compat.new_var(y.aval) for _ in range(length))
        ys.append(Pieces(y, pieces))
        return pieces

    def _replace_unchanged_carries(
        self, start: int, inner: Sequence[Var], init: Sequence[Atom], values: Sequence[Atom]
    ) -> list[Atom]:
        """Carries that every microbatch hands on as they came are read from outside; the values with that done.

        Args:
          start: position of the body's first node.
        """
        outside = {v: o for v, o, value in zip(inner, init, values, strict=False) if value is v}
        if outside:
            self.nodes[start:] = [reading(node, outside) for node in self.nodes[start:]]
            self.stacked = {v: tuple(_lookup(outside, x) for x in column) for v, column in self.stacked.items()}
        return [_lookup(outside, v) for v in values]

    def _carry(
        self, loop: int, inner: Var, init: Atom, value: Atom, xs: Mapping[Var, Pieces], carries: list[Carry], read: bool
    ) -> Atom:
        """The value of a carry after the loop; ``carries`` grows where it has to be handed on.

        Args:
          read: whether the body reads what the microbatch before left, so that it has to be kept.
        """
        if not read and not (_compat.is_var(value) and value in self._varying):
            return value  # the same after every microbatch
        if not read and _compat.is_var(value) and value in xs:
            return xs[value].outer[-1]
        if not _compat.is_var(value) or value not in self._varying or value in xs or value in {c.out for c in carries}:
            value = self._copy(value, loop)
        carries.append(Carry(inner, value, init, _compat.new_var(value.aval)))
        return carries[-1].final

    def _copy(self, value: Atom, loop: int) -> Var:
        """A variable of the body that holds a value from elsewhere."""
        operands = [value] if _compat.is_var(value) else []
        literal = None if isinstance(value, Var) else value.val
        nodes, (out,) = trace_nodes(lambda *xs: lax.optimization_barrier(xs[0] if xs else literal), operands, loop=loop)
        for node in nodes:
            self._append(node)
        made: Var = out
        return made

    def _holds_mark(self, eqn: Eqn) -> bool:
        return any(self._jaxpr_holds_mark(j) for j in _compat.jaxprs_in(eqn))

    def _jaxpr_holds_mark(self, jaxpr: AbstractJaxpr) -> bool:
        key = id(jaxpr)
        if key not in self._marked:
            self._keep.append(jaxpr)
            self._marked[key] = any(
                (_compat.is_jit(e) and (e.params["name"] in self.tasks or e.params["name"] in self.specs))
                or self._holds_mark(e)
                for e in _compat.open_jaxpr(jaxpr).eqns
            )
        return self._marked[key]

    def is_opened(self, eqn: Eqn, stack: str) -> bool:
        if not _compat.jaxprs_in(eqn):
            return False
        return self._holds_mark(eqn) or bool(matched_inside(eqn, stack, self.registered))

    def is_split(self, eqn: Eqn, stack: str) -> bool:
        """Whether all tasks in an equation are on one submesh in each iteration of the scan around it."""
        tasks = self._tasks_in(eqn, stack)
        return (
            all(t.meshes for t in tasks) and len({t.meshes for t in tasks}) == 1 and not self._scans_tasks(eqn, stack)
        )

    def _scans_tasks(self, eqn: Eqn, stack: str) -> bool:
        """Whether there is a scan in an equation with tasks in it."""
        inside = [e for j in _compat.jaxprs_in(eqn) for e in _compat.open_jaxpr(j).eqns]
        stacks = [f"{stack}/{_compat.name_stack(e)}" for e in inside]
        return any(
            (e.primitive.name == "scan" and self.is_opened(e, s)) or self._scans_tasks(e, s)
            for e, s in zip(inside, stacks, strict=True)
        )

    def _tasks_in(self, eqn: Eqn, stack: str) -> list[Task]:
        """The tasks in an equation, marked or registered, each once."""
        return self._tasks(self._explicit(eqn), eqn, stack)

    def _tasks(self, marks: Iterable[str], eqn: Eqn, stack: str) -> list[Task]:
        """The tasks of marks and those that are registered for scopes in an equation, each once."""
        found = [self.tasks[mark].named(mark.split(MARK)[0]) for mark in marks]
        return list(dict.fromkeys(found + tasks_inside(eqn, stack, self.registered)))

    def _explicit(self, eqn: Eqn) -> list[str]:
        """The marks of the tasks that an equation holds, each once, in order."""
        found: dict[str, None] = {}
        for j in _compat.jaxprs_in(eqn):
            for e in _compat.open_jaxpr(j).eqns:
                name = str(e.params.get("name")) if _compat.is_jit(e) else ""
                found.update(dict.fromkeys([name] if name in self.tasks else self._explicit(e)))
        return list(found)

    def _holds_loop(self, eqn: Eqn) -> bool:
        """Whether there is a microbatch loop in an equation."""
        return any(
            (_compat.is_jit(e) and e.params["name"] in self.specs) or self._holds_loop(e)
            for j in _compat.jaxprs_in(eqn)
            for e in _compat.open_jaxpr(j).eqns
        )


def _is_empty_reshard(eqn: Eqn) -> bool:
    sharding = eqn.params.get("dst_sharding")
    # Along Auto axes, the only ones of a trace, there is nothing that a reshard could say.
    return sharding is None or all(t == AxisType.Auto for t in getattr(sharding.mesh, "axis_types", ()) or ())


def cheap_chain(result: Atom, producer: Mapping[Var, Eqn], actual: Mapping[Var, Atom]) -> tuple[Var | None, list[Eqn]]:
    """The operand of a task from which cheap unary equations lead to ``result``, and these in order; else none."""
    chain: list[Eqn] = []
    while _compat.is_var(result) and result not in actual:
        eqn = producer.get(result)
        if eqn is None or eqn.primitive.name not in _CHEAP or len(eqn.invars) != 1:
            return None, []
        chain.append(eqn)
        (result,) = eqn.invars
    if not chain or not _compat.is_var(result) or not _compat.is_var(actual[result]):
        return None, []
    return result, chain[::-1]
