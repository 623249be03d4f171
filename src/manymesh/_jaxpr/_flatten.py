"""One jaxpr with marks, nested anyhow, to one flat list of equations.

Only what holds a task or a loop is opened: jit, remat and custom-derivative calls are inlined, scans
are unrolled, the scan of a microbatch loop becomes a `Loop` whose body appears once. Everything else
stays one opaque equation.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType

from .. import _compat
from .._errors import PlacementError, TaskError
from .._implicit import Iteration
from .._mark import MARK, Recording
from .._task import Task
from ._nodes import Carry, Flat, Loop, Node, Pieces, rename, substitute, trace_nodes
from ._scopes import is_backward, jaxprs_of, matched_inside

_CALL_JAXPR = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# Calls that mean no more than their body once everything is traced. A jitted update of all parameters, such as
# Optax has, would otherwise pull them all to one submesh. Not remat: it keeps XLA from undoing it.
_TRANSPARENT = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
_CHEAP = {"sharding_constraint", "convert_element_type", "transpose", "reshape", "squeeze", "copy", "expand_dims"}


def flatten(closed: Any, record: Recording) -> Flat:
    """Brings a traced program into flat form.

    Args:
      closed: the closed jaxpr of the whole step.
      record: what its marks mean.

    Raises:
      PlacementError: a task inside control flow that cannot be opened.
      TaskError: a task with several meshes that is in no scan.
    """
    parts = _compat.open_jaxpr(closed)
    worker = _Flattener(record)
    env: dict[Any, Any] = {}
    worker.inline(parts.eqns, env, "", None, None)
    worker.check_split()
    out = [_lookup(env, v) for v in parts.outvars]
    consts = {**dict(zip(parts.constvars, parts.consts, strict=True)), **worker.consts}
    return Flat([*consts, *parts.invars], out, worker.nodes, worker.loops, consts, worker.stacked)


def open_conditional(flat: Flat, node: Node, record: Recording) -> None:
    """Replaces a conditional, in place, by its branches and a selection between their results."""
    worker = _Flattener(record)
    env: dict[Any, Any] = {}
    worker.select(node.eqn, env, node.stack, node.loop)
    at = flat.nodes.index(node)
    flat.nodes[at : at + 1] = worker.nodes
    flat.invars[len(flat.consts) : len(flat.consts)] = worker.consts
    flat.consts.update(worker.consts)
    rename(flat, env)


def _lookup(env: dict[Any, Any], atom: Any) -> Any:
    return env.get(atom, atom) if _compat.is_var(atom) else atom


class _Flattener:
    def __init__(self, record: Recording) -> None:
        self.record = record
        self.nodes: list[Node] = []
        self.loops: list[Loop] = []
        self.consts: dict[Any, Any] = {}  # constants of nested jaxprs, which become inputs
        self._marked: dict[int, bool] = {}
        self._keep: list[Any] = []  # jaxprs whose ids are in _marked
        self._varying: set[Any] = set()
        self._layers: dict[Any, Any] = {}  # (stacked value, index, loop) -> its slice
        self._split: dict[Task, bool] = {}  # tasks with several meshes -> whether a scan ran them
        self._iteration: tuple[int, int] | None = None  # of the scans around, as one: index and number
        self.stacked: dict[Any, list[Any]] = {}  # results of `_stack`, to take apart again without a copy

    def inline(self, eqns: list[Any], env: dict[Any, Any], stack: str, loop: Loop | None, spec: Any) -> None:
        """Appends equations to the flat program; ``env`` maps their variables to flat ones.

        Args:
          stack: name stack of what encloses them.
          loop: the loop whose body they are, or None.
          spec: what `microbatch` said, where the equations are directly those of a marked loop.
        """
        for eqn in eqns:
            mark = eqn.params.get("name") if _compat.is_jit(eqn) else None
            inner_stack = f"{stack}/{_compat.name_stack(eqn)}"
            if mark in self.record.tasks:
                self._task(eqn, env, mark, inner_stack, loop)
            elif mark in self.record.loops and loop is None:
                self._call(eqn, env, inner_stack, loop, self.record.loops[mark])
            elif eqn.primitive.name in _TRANSPARENT and spec is None and mark not in self.record.loops:
                self._call(eqn, env, inner_stack, loop, None)
            elif not self._is_opened(eqn, inner_stack) and not (spec is not None and eqn.primitive.name == "scan"):
                self._plain(eqn, env, inner_stack, loop)
            elif eqn.primitive.name == "scan":
                if spec is not None:
                    self._loop(eqn, env, inner_stack, spec)
                else:
                    self._unroll(eqn, env, inner_stack, loop)
            elif eqn.primitive.name == "cond":
                self.select(eqn, env, inner_stack, loop)
            elif any(_compat.is_jaxpr(eqn.params.get(k)) for k in _CALL_JAXPR):
                self._call(eqn, env, inner_stack, loop, None)
            else:
                raise PlacementError(_control_flow_message(eqn, self._tasks_in(eqn, inner_stack)))

    def _plain(self, eqn: Any, env: dict[Any, Any], stack: str, loop: Loop | None) -> None:
        if eqn.primitive.name == "reshard" and _is_empty_reshard(eqn):
            env[eqn.outvars[0]] = _lookup(env, eqn.invars[0])
            return
        self._append(Node(substitute(eqn, env), None, is_backward(stack), loop, stack=stack))

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        if node.loop is not None:
            self._varying.update(node.outputs)

    def _task(self, eqn: Any, env: dict[Any, Any], mark: str, stack: str, loop: Loop | None) -> None:
        part = self._of_iteration(mark)
        if part is None:
            return self._call(eqn, env, stack, loop, None)
        inner = _compat.open_jaxpr(eqn.params["jaxpr"])
        new = substitute(eqn, env)
        self._append(Node(new, part, is_backward(stack), loop, stack=stack))
        actual = dict(zip(inner.invars, new.invars, strict=True))
        producer = {v: e for e in inner.eqns for v in e.outvars}
        for outer, result in zip(eqn.outvars, inner.outvars, strict=True):
            if not _compat.is_var(outer):
                continue
            if not _compat.is_var(result):
                continue
            if result in actual:  # handed through unchanged
                env[outer] = actual[result]
                continue
            chain = cheap_chain(result, producer, actual) if loop is not None else []
            # A weight's cast or constraint, kept for the backward pass: recompute it there instead of
            # storing a copy of the weight for every microbatch in flight.
            if chain and actual[chain[0].invars[0]] not in self._varying:
                sub = {chain[0].invars[0]: actual[chain[0].invars[0]]}
                for e in chain:
                    self.nodes.append(Node(substitute(e, sub), None, True, loop, beside=part))
                env[outer] = sub[result]

    def _of_iteration(self, mark: str) -> str | None:
        """The mark of a task, or of its part that runs on the submesh of the scan's iteration under way.

        None for what differentiation took out of the scan because every iteration needs it alike.
        """
        task = self.record.tasks[mark]
        if not task.meshes:
            return mark
        self._split.setdefault(task, False)
        if self._iteration is None:
            return None
        self._split[task] = True
        part = task.at(*self._iteration)
        assert part.mesh is not None, "each of the meshes is one"
        of_part = f"{mark}_{task.meshes.index(part.mesh)}"
        self.record.tasks[of_part] = part
        return of_part

    def check_split(self) -> None:
        """Refuses a task with several meshes that no scan ever ran."""
        for task, in_scan in self._split.items():
            if not in_scan:
                raise TaskError(
                    f"task {task.name!r} has {len(task.meshes)} meshes to split the iterations of a scan over, but is not "
                    "in the body of lax.scan; give it one mesh, or scan over its layers"
                )

    def _call(self, eqn: Any, env: dict[Any, Any], stack: str, loop: Loop | None, spec: Any) -> None:
        jaxpr = next(eqn.params[k] for k in _CALL_JAXPR if _compat.is_jaxpr(eqn.params.get(k)))
        self._inline_jaxpr(jaxpr, [_lookup(env, v) for v in eqn.invars], eqn.outvars, env, stack, loop, spec)

    def _inline_jaxpr(
        self, jaxpr: Any, operands: list[Any], outvars: list[Any], env: dict[Any, Any], stack: str,
        loop: Loop | None, spec: Any = None,
    ) -> None:  # fmt: skip
        inner = _compat.open_jaxpr(jaxpr)
        sub = dict(zip(inner.invars, operands, strict=True))
        for v, c in zip(inner.constvars, inner.consts, strict=True):
            sub[v] = _compat.new_var(v.aval)
            self.consts[sub[v]] = c
        self.inline(inner.eqns, sub, stack, loop, spec)
        for outer, result in zip(outvars, inner.outvars, strict=True):
            if _compat.is_var(outer):
                env[outer] = _lookup(sub, result)

    def _unroll(self, eqn: Any, env: dict[Any, Any], stack: str, loop: Loop | None) -> None:
        scan = _compat.scan_parts(eqn)
        operands = [_lookup(env, v) for v in eqn.invars]
        n = scan.num_consts + scan.num_carry
        consts, carry, stacked = operands[: scan.num_consts], operands[scan.num_consts : n], operands[n:]
        inner = _compat.open_jaxpr(scan.jaxpr)
        collected: list[list[Any]] = [[None] * scan.length for _ in inner.outvars[scan.num_carry :]]
        steps = range(scan.length)
        outer = self._iteration
        for i in reversed(steps) if scan.reverse else steps:
            self._iteration = (
                (i, scan.length) if outer is None else (outer[0] * scan.length + i, outer[1] * scan.length)
            )
            # What no microbatch changes, such as stacked weights, is taken apart once, outside their loop.
            pieces = [self._layer(x, i, loop if x in self._varying else None) for x in stacked]
            results = [_compat.new_var(v.aval) for v in inner.outvars]
            sub: dict[Any, Any] = {}
            inner_stack = f"{stack}/{Iteration(i, scan.length)}"
            self._inline_jaxpr(scan.jaxpr, [*consts, *carry, *pieces], results, sub, inner_stack, loop)
            values = [sub[r] for r in results]
            carry = values[: scan.num_carry]
            for column, y in zip(collected, values[scan.num_carry :], strict=True):
                column[i] = y
        self._iteration = outer
        outs = carry + [self._stack(column, loop) for column in collected]
        env.update({v: o for v, o in zip(eqn.outvars, outs, strict=True) if _compat.is_var(v)})

    def select(self, eqn: Any, env: dict[Any, Any], stack: str, loop: Loop | None) -> None:
        """A conditional that holds tasks: every branch runs, where its tasks are, and the results are selected.

        Which submesh has work then never depends on data, and no device waits for the host.
        """
        index, *operands = [_lookup(env, v) for v in eqn.invars]
        branches = []
        for branch in eqn.params["branches"]:
            results = [_compat.new_var(v.aval) for v in _compat.open_jaxpr(branch).outvars]
            sub: dict[Any, Any] = {}
            self._inline_jaxpr(branch, operands, results, sub, stack, loop)
            branches.append([sub[r] for r in results])
        for outer, cases in zip(eqn.outvars, zip(*branches, strict=True), strict=True):
            if not _compat.is_var(outer):
                continue
            if all(c is cases[0] for c in cases):
                env[outer] = cases[0]
                continue
            given = [v for v in (index, *cases) if _compat.is_var(v)]

            def select(*arrays: Any, atoms: Any = (index, *cases)) -> Any:
                it = iter(arrays)
                return lax.select_n(
                    *[next(it) if _compat.is_var(v) else lax.full((), v.val, v.aval.dtype) for v in atoms]
                )

            nodes, (env[outer],) = trace_nodes(select, given, loop=loop, backward=is_backward(stack))
            for node in nodes:
                self._append(node)

    def _layer(self, x: Any, i: int, loop: Loop | None) -> Any:
        """A layer's slice, the same for the forward and the backward pass."""
        if (x, i, loop) not in self._layers:
            self._layers[x, i, loop] = self._index(x, i, loop)
        return self._layers[x, i, loop]

    def _index(self, x: Any, i: int, loop: Loop | None) -> Any:
        if x in self.stacked:
            return self.stacked[x][i]
        nodes, (out,) = trace_nodes(lambda a: lax.index_in_dim(a, i, 0, keepdims=False), [x], loop=loop, apart=True)
        for node in nodes:
            self._append(node)
        return out

    def _literal(self, literal: Any) -> Any:
        """A variable that holds a literal, for an accumulator to start from."""
        aval, value = literal.aval, literal.val
        nodes, (out,) = trace_nodes(
            lambda: lax.optimization_barrier(lax.full(aval.shape, value, aval.dtype)), [], deferred=True
        )
        for node in nodes:
            self._append(node)
        return out

    def _stack(self, column: list[Any], loop: Loop | None) -> Any:
        operands = [v for v in column if _compat.is_var(v)]

        def stack(*arrays: Any) -> Any:
            it = iter(arrays)
            return jax.numpy.stack([next(it) if _compat.is_var(v) else v.val for v in column])

        nodes, (out,) = trace_nodes(stack, operands, loop=loop)
        for node in nodes:
            self._append(node)
        self.stacked[out] = column
        return out

    def _loop(self, eqn: Any, env: dict[Any, Any], stack: str, spec: Any) -> None:
        scan = _compat.scan_parts(eqn)
        operands = [_lookup(env, v) for v in eqn.invars]
        n = scan.num_consts + scan.num_carry
        loop = Loop(spec)
        inner = _compat.open_jaxpr(scan.jaxpr)
        order = list(reversed(range(scan.length))) if scan.reverse else list(range(scan.length))
        for k in range(scan.num_consts, n):
            if not _compat.is_var(operands[k]):
                operands[k] = self._literal(operands[k])
        body_in = list(operands[: scan.num_consts])
        for v in inner.invars[scan.num_consts : n]:
            body_in.append(_compat.new_var(v.aval))
        for v, stacked in zip(inner.invars[n:], operands[n:], strict=True):
            body_in.append(_compat.new_var(v.aval))
            start = len(self.nodes)
            pieces = [self._index(stacked, i, None) for i in order]
            for node in self.nodes[start:]:
                node.deferred = True
            loop.cut.append(Pieces(body_in[-1], tuple(pieces)))
        self._varying.update(body_in[scan.num_consts :])
        results = [_compat.new_var(v.aval) for v in inner.outvars]
        sub: dict[Any, Any] = {}
        self._inline_jaxpr(scan.jaxpr, body_in, results, sub, stack, loop)
        first = slice(scan.num_consts, n)
        values = self._settle_unchanged(loop, body_in[first], operands[first], [sub[r] for r in results])
        read = {v for node in self.nodes if node.loop is loop for v in node.inputs}
        read |= {v for v in values[scan.num_carry :] if _compat.is_var(v)}
        cut = {p.inner: p for p in loop.cut}
        for k in range(scan.num_carry):
            inner, init = body_in[scan.num_consts + k], operands[scan.num_consts + k]
            final = self._carry(
                loop, inner, init, values[k], cut, inner in read or inner in values[:k] + values[k + 1 :]
            )
            if _compat.is_var(eqn.outvars[k]):
                env[eqn.outvars[k]] = final
        for outer, y in zip(eqn.outvars[scan.num_carry :], values[scan.num_carry :], strict=True):
            if not _compat.is_var(outer):
                continue
            if y in cut if _compat.is_var(y) else False:
                pieces = list(cut[y].outer)
            elif not _compat.is_var(y) or y not in self._varying:
                pieces = [y] * scan.length
            else:
                pieces = [_compat.new_var(y.aval) for _ in order]
                loop.collected.append(Pieces(y, tuple(pieces)))
            by_index = [pieces[order.index(i)] for i in range(scan.length)]
            env[outer] = self._stack(by_index, None)
        self.loops.append(loop)

    def _settle_unchanged(self, loop: Loop, inner: list[Any], init: list[Any], values: list[Any]) -> list[Any]:
        """Carries that every microbatch hands on as they came are read from outside; the values with that done."""
        outside = {v: o for v, o, value in zip(inner, init, values, strict=False) if value is v}
        if outside:
            for node in self.nodes:
                if node.loop is loop and not outside.keys().isdisjoint(node.inputs):
                    invars = [outside.get(v, v) if _compat.is_var(v) else v for v in node.eqn.invars]
                    node.eqn = node.eqn.replace(invars=invars)
        return [outside.get(v, v) if _compat.is_var(v) else v for v in values]

    def _carry(self, loop: Loop, inner: Any, init: Any, value: Any, cut: dict[Any, Pieces], read: bool) -> Any:
        """The value of a carry after the loop.

        Args:
          read: whether the body reads what the microbatch before left, so that it has to be kept.
        """
        varies = _compat.is_var(value) and value in self._varying
        if not read and not varies:
            return value  # the same after every microbatch
        if not read and value in cut:
            return cut[value].outer[-1]
        if not varies or value in cut or value in {c.out for c in loop.carries}:
            value = self._copy(value, loop)
        final = _compat.new_var(value.aval)
        loop.carries.append(Carry(inner, value, init, final))
        return final

    def _copy(self, value: Any, loop: Loop) -> Any:
        """A variable of the body that holds a value from elsewhere."""
        operands = [value] if _compat.is_var(value) else []
        nodes, (out,) = trace_nodes(
            lambda *xs: lax.optimization_barrier(xs[0] if xs else value.val), operands, loop=loop
        )
        for node in nodes:
            self._append(node)
        return out

    def _holds_mark(self, eqn: Any) -> bool:
        return any(self._jaxpr_holds_mark(j) for j in jaxprs_of(eqn))

    def _jaxpr_holds_mark(self, jaxpr: Any) -> bool:
        key = id(jaxpr)
        if key not in self._marked:
            self._keep.append(jaxpr)
            self._marked[key] = any(
                (_compat.is_jit(e) and (e.params["name"] in self.record.tasks or e.params["name"] in self.record.loops))
                or self._holds_mark(e)
                for e in _compat.open_jaxpr(jaxpr).eqns
            )
        return self._marked[key]

    def _is_opened(self, eqn: Any, stack: str) -> bool:
        if not jaxprs_of(eqn):
            return False
        return self._holds_mark(eqn) or bool(matched_inside(eqn, stack, self.record.implicit))

    def _tasks_in(self, eqn: Any, stack: str) -> list[str]:
        return sorted({*self._marks_in(eqn), *matched_inside(eqn, stack, self.record.implicit)})

    def _marks_in(self, eqn: Any) -> list[str]:
        found = []
        for j in jaxprs_of(eqn):
            for e in _compat.open_jaxpr(j).eqns:
                name = e.params.get("name") if _compat.is_jit(e) else None
                if name in self.record.tasks:
                    found.append(self.record.tasks[name].name or name.split(MARK)[0])
                else:
                    found += self._marks_in(e)
        return sorted(set(found))


def _is_empty_reshard(eqn: Any) -> bool:
    sharding = eqn.params.get("dst_sharding")
    # Along Auto axes, the only ones of a trace, there is nothing that a reshard could say.
    return sharding is None or all(t == AxisType.Auto for t in getattr(sharding.mesh, "axis_types", ()) or ())


def cheap_chain(result: Any, producer: dict[Any, Any], actual: dict[Any, Any]) -> list[Any]:
    """The unary equations that lead from an operand of the task to ``result``, in order; else none."""
    chain = []
    while result not in actual:
        eqn = producer.get(result)
        if eqn is None or eqn.primitive.name not in _CHEAP or len(eqn.invars) != 1 or not _compat.is_var(eqn.invars[0]):
            return []
        chain.append(eqn)
        result = eqn.invars[0]
    if not _compat.is_var(actual[result]):
        return []
    return chain[::-1]


def _control_flow_message(eqn: Any, tasks: list[str]) -> str:
    kind = {"while": "lax.while_loop (or fori_loop with a traced bound)"}
    name = kind.get(eqn.primitive.name, eqn.primitive.name)
    remedy = {
        "while": "use a loop of fixed length (lax.scan, a Python loop, mm.microbatch), or put the whole loop into one task",
    }.get(eqn.primitive.name, "put the whole construct into one task")
    where = _compat.source_line(eqn)
    at = f" ({where})" if where else ""
    return f"{name}{at} holds the tasks {tasks}: which submesh runs when would depend on data; {remedy}"
