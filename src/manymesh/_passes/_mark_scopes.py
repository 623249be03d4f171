"""Implicit tasks: equations of one scope become the one equation that an explicit task would have been.

All that a scope computed in one phase is taken together into an inner jit with a mark, so that every later pass sees
no difference. What differentiation computed in the name of a scope but outside the call that an explicit task would be
stays outside: sums of gradients that come from elsewhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from .. import _compat
from .._compat import Atom, Eqn, Var
from .._errors import TaskError
from .._implicit import Iteration, Matched
from .._mark import box_constraint_p, check_nested
from .._program._calls import call_body
from .._program._flat import FlatProgram
from .._program._nodes import Node, nodes_where
from .._program._rewrite import reading, rename, substitute
from .._task import Task
from ._contract import Group, Part, cut_convex
from ._flatten import cheap_chain, new_mark
from ._layers import layer_of
from ._numbered import numbers
from ._resolve import resolve_names
from ._scopes import is_backward, is_rematerialised

Matches = dict[Node, Matched]


def mark_scopes(flat: FlatProgram) -> FlatProgram:
    """Makes tasks of the scopes that `register_task` names.

    Raises:
      TaskError: an explicit task on another submesh inside; several meshes for a scope that is in no scan.
      AxisError: a constraint inside does not fit the mesh of the task.
    """
    if not flat.registered:
        return flat
    flat, matches = attach_box_constraints(flat, _match(flat))
    if not matches:
        return flat
    if any(is_rematerialised(n.stack) for n in flat.nodes):  # calls of a scope say nothing of which result is which
        flat = replace(flat, results={**numbers(flat.nodes), **flat.results})
    flat, groups = _leave_sums(flat, matches, _grouped(flat, matches))
    flat, parts = cut_convex(flat, groups)
    flat, made = _contract(flat, parts)
    return _repeat_cheap(flat, made)


def _group(node: Node, at: Matched) -> Group:
    return Group(at.scope, at.task, node.backward, is_rematerialised(node.stack), node.loop, node.guard)


def _grouped(flat: FlatProgram, matches: Matches) -> dict[Group, list[Node]]:
    groups: dict[Group, list[Node]] = defaultdict(list)
    for n in flat.nodes:
        if n in matches:
            groups[_group(n, matches[n])].append(n)
    return groups


def _match(flat: FlatProgram) -> Matches:
    """Finds each equation's task."""
    found = ((n, flat.registered.match(n.stack, is_backward(n.stack))) for n in flat.nodes if n.stack)
    matched = {n: at for n, at in found if at is not None}
    deepest: dict[
        tuple[str, ...], tuple[Iteration, ...]
    ] = {}  # scope -> the scans around it; the forward pass is first
    for at in matched.values():
        if at.task.meshes and len(at.iterations) > len(deepest.get(at.names, ())):
            deepest[at.names] = at.iterations
    matches: Matches = {}
    outside_scans: dict[str, Matched] = {}
    in_scans: set[str] = set()
    for n, at in matched.items():
        if at.task.meshes:
            name = at.task.name or "task"
            around = deepest.get(at.names, ())
            layer = layer_of(at.iterations, [x.length for x in around], around[-1].layers) if around else None
            if layer is None:  # differentiation took it out of the scan, because every iteration needs it alike
                outside_scans[name] = at
                continue
            in_scans.add(name)
            at = Matched(at.scope, at.task.at(*layer), at.pattern)
        if n.task is not None:
            check_nested(flat.tasks[n.task], at.task, at.pattern)
        matches[n] = at
    for name, at in outside_scans.items():
        if name not in in_scans:
            raise TaskError(
                f"task {name!r}, which register_task({at.pattern!r}) makes of a scope, has {len(at.task.meshes)} meshes "
                "to split the iterations of a scan over, but is not in the body of lax.scan; give it one mesh, or scan "
                "over its layers"
            )
    return matches


def attach_box_constraints(flat: FlatProgram, matches: Matches) -> tuple[FlatProgram, Matches]:
    """Gives what the box of an argument says to the tasks that read the argument or make its gradient.

    A box around an argument is opened before any task is known, so its constraint belongs to no scope. What reads the
    argument outside these tasks goes on reading the constrained one.

    Returns:
      The program, and the task of each of its equations that has one.
    """
    boxes = [n for n in flat.nodes if n not in matches and n.eqn.primitive is box_constraint_p]
    if not boxes:
        return flat, matches
    matches = dict(matches)
    index = flat.index
    alias: dict[Var, Atom] = {}
    kept: set[Node] = set()
    moved: dict[Node, Node] = {}
    clones: dict[Node, list[Node]] = defaultdict(list)
    reads: dict[Node, dict[Var, Atom]] = defaultdict(dict)
    for box in boxes:
        operand, result = box.eqn.invars[0], box.eqn.outvars[0]
        maker = index.producer.get(operand) if _compat.is_var(operand) else None
        maker = moved.get(maker, maker) if maker is not None else None
        if is_backward(box.stack) and maker is not None and maker in matches and maker.primitive != "add_any":
            moved[box] = replace(box, stack=maker.stack, loop=maker.loop, guard=maker.guard)
            matches[moved[box]] = matches[maker]
            continue
        origin = alias.get(operand, operand) if _compat.is_var(operand) else operand
        readers = index.readers.get(result, ())
        wanted = result in index.leaving or any(
            r not in matches and r.eqn.primitive is not box_constraint_p for r in readers
        )
        if wanted:
            kept.add(box)
        else:
            alias[result] = origin
        own: dict[Group, Var] = {}
        for reader in readers:
            at = matches.get(reader)
            if at is None or reader.eqn.primitive is box_constraint_p:
                continue
            group = _group(reader, at)
            if group not in own:
                own[group] = _compat.new_var(result.aval)
                eqn = box.eqn.replace(invars=[origin], outvars=[own[group]])
                clone = Node(eqn, None, reader.backward, reader.loop, stack=reader.stack, guard=reader.guard)
                matches[clone] = at
                clones[reader].append(clone)
            reads[reader][result] = own[group]
    changed: dict[Node, list[Node]] = {box: [moved[box]] if box in moved else [] for box in boxes if box not in kept}
    for reader, env in reads.items():
        new = reading(reader, env)
        matches[new] = matches.pop(reader)
        changed[reader] = [*clones[reader], new]
    flat = replace(flat, nodes=nodes_where(flat.nodes, changed), placement=None)
    return _renamed_with(flat, alias, matches)


def _renamed_with(flat: FlatProgram, alias: Mapping[Var, Atom], matches: Matches) -> tuple[FlatProgram, Matches]:
    """The program under other names, and the task of each equation."""
    new = rename(flat, alias)
    return new, {
        after: matches[before] for before, after in zip(flat.nodes, new.nodes, strict=True) if before in matches
    }


def _leave_sums(
    flat: FlatProgram, matches: Matches, groups: dict[Group, list[Node]]
) -> tuple[FlatProgram, dict[Group, list[Node]]]:
    """Takes out of each group of a gradient what adds gradients of other tasks to its own.

    Differentiation adds up the gradients of a value that several tasks read in the scope of the one it comes to last.
    A gradient from outside that only additions read is such a one; the sum of the group's own terms stays.
    """
    reads = Counter(v for n in flat.nodes for v in n.inputs)
    reads.update(flat.index.leaving)
    replaced: dict[Node, list[Node]] = {}
    left: dict[Group, list[Node]] = {}
    for group, members in groups.items():
        sums = _sums_of(members, reads) if any(is_backward(n.stack) for n in members) else {}
        inside = {n for _, kept in sums.values() for n in kept}
        left[group] = [m for n in members for m in (sums[n][0] if n in sums else [n]) if n not in sums or m in inside]
        replaced.update({n: new for n, (new, _) in sums.items()})
    if not replaced:
        return flat, left
    return replace(flat, nodes=nodes_where(flat.nodes, replaced), placement=None), left


def _sums_of(members: list[Node], everywhere: Counter[Var]) -> dict[Node, tuple[list[Node], list[Node]]]:
    """The additions of a group to replace, by what, and which of that stays in the group.

    Args:
      everywhere: how often each variable is read in the whole program.
    """
    made = {v for n in members for v in n.outputs}
    adds = {n.outputs[0]: n for n in members if n.primitive == "add_any" and len(n.inputs) == 2 and n.outputs}
    reads = Counter(v for n in members for v in n.inputs)
    replaced: dict[Node, tuple[list[Node], list[Node]]] = {}
    for root in list(adds.values())[::-1]:
        if reads[root.outputs[0]] or root in replaced:
            continue
        terms: list[Var] = []
        chain = [root]
        stack = list(root.inputs[::-1])
        while stack:
            v = stack.pop()
            if v in adds and everywhere[v] == 1:
                chain.append(adds[v])
                stack += adds[v].inputs[::-1]
            else:
                terms.append(v)
        in_chain = Counter(terms)
        foreign = [v for v in terms if v not in made and reads[v] == in_chain[v]]
        own = [v for v in terms if v not in foreign]
        if foreign:
            replaced.update({n: ([], []) for n in chain})
            replaced[root] = _two_sums(root, own, foreign)
    return replaced


def _two_sums(root: Node, own: list[Var], foreign: list[Var]) -> tuple[list[Node], list[Node]]:
    """The sum of a task's own terms, and outside of the task the others and that. Second, which of the nodes are inside."""
    nodes: list[Node] = []
    inside: list[Node] = []

    def add(a: Var, b: Var, is_inside: bool, out: Var) -> Var:
        eqn = root.eqn.replace(invars=[a, b], outvars=[out])
        stack = root.stack if is_inside else ""
        nodes.append(Node(eqn, None, root.backward, root.loop, stack=stack, guard=root.guard))
        if is_inside:
            inside.append(nodes[-1])
        return out

    (result,) = root.outputs
    inner = own[:1]
    for v in own[1:]:
        inner = [add(inner[0], v, True, _compat.new_var(result.aval))]
    total, *rest = [*foreign, *inner]
    for k, v in enumerate(rest, 1):
        total = add(total, v, False, result if k == len(rest) else _compat.new_var(result.aval))
    return nodes, inside


def _contract(flat: FlatProgram, parts: list[Part]) -> tuple[FlatProgram, list[Node]]:
    """Makes one node of each part. Returns the program and the new nodes."""
    inside = {n for part in parts for n in part.item.nodes}
    # What a part makes and somebody else reads: another part, an equation of none, a loop, the caller.
    leaving = set(flat.index.leaving)
    leaving.update(v for part in parts for v in part.item.reads)
    leaving.update(v for n in flat.nodes if n not in inside for v in n.inputs)
    tasks, findings = dict(flat.tasks), dict.fromkeys(flat.findings)
    marks: dict[tuple[object, ...], str] = {}
    replaced: dict[Node, list[Node]] = {}
    made = []
    for group, number, count, item in parts:
        # The backward pass comes to the last call of a scope first.
        nth = count - 1 - number if group.backward and not group.again else number
        mark = _mark(marks, tasks, group, nth)
        outvars = [v for v in item.writes if v in leaving]
        env = {v: _compat.new_var(v.aval) for v in (*item.reads, *outvars)}
        eqns, found = resolve_names([n.eqn for n in item.nodes], group.task)
        findings.update(dict.fromkeys(found))
        jaxpr = _compat.new_jaxpr(
            [env[v] for v in item.reads], [env[v] for v in outvars], [_renamed(e, env) for e in eqns]
        )
        eqn = _compat.call_eqn(mark, jaxpr, item.reads, outvars)
        made.append(Node(eqn, mark, group.backward, group.loop, stack=item.nodes[0].stack, guard=group.guard))
        replaced.update(dict.fromkeys(item.nodes, []))
        replaced[item.nodes[-1]] = [made[-1]]
    nodes = nodes_where(flat.nodes, replaced)
    return replace(flat, nodes=nodes, tasks=tasks, findings=tuple(findings), placement=None), made


def _mark(marks: dict[tuple[object, ...], str], tasks: dict[str, Task], group: Group, number: int) -> str:
    """The mark of a part, the same in all phases."""
    key = (group.scope, group.task, group.loop, group.guard, number)
    if key not in marks:
        marks[key] = new_mark(tasks, group.task.name or "task")
        tasks[marks[key]] = group.task
    return marks[key]


def _repeat_cheap(flat: FlatProgram, made: list[Node]) -> FlatProgram:
    """A weight's cast or constraint that the backward pass reads is computed there again, as for explicit tasks."""
    index = flat.index
    after: dict[Node, list[Node]] = defaultdict(list)
    reads: dict[Node, dict[Var, Atom]] = defaultdict(dict)
    for node in made:
        body = call_body(node.eqn)
        if node.backward or node.loop is None or body is None:
            continue
        inner = _compat.open_jaxpr(body)
        producer = {v: e for e in inner.eqns for v in e.outvars}
        actual: dict[Var, Atom] = dict(zip(inner.invars, node.eqn.invars, strict=True))
        for outer, result in zip(node.eqn.outvars, inner.outvars, strict=True):
            readers = [r for r in index.readers.get(outer, ()) if r.backward]
            start, chain = cheap_chain(result, producer, actual) if readers else (None, [])
            if start is None or index.scope.get(actual[start]) == node.loop:  # type: ignore[arg-type]
                continue
            sub: dict[Var, Atom] = {start: actual[start]}
            after[node] += [Node(substitute(e, sub), None, True, node.loop, colocated_with=node.task) for e in chain]
            for reader in readers:
                reads[reader][outer] = sub[result]
    if not after:
        return flat
    now = {n: reading(n, reads[n]) if n in reads else n for n in flat.nodes}
    nodes = tuple(m for n in flat.nodes for m in (now[n], *after.get(n, ())))
    return replace(flat, nodes=nodes, placement=None)


def _renamed(eqn: Eqn, names: Mapping[Var, Var]) -> Eqn:
    """The equation with the variables that it shares with others under other names; its own stay its own."""
    if not any(_compat.is_var(v) and v in names for v in (*eqn.invars, *eqn.outvars)):
        return eqn
    new: Eqn = eqn.replace(
        invars=[names.get(v, v) if _compat.is_var(v) else v for v in eqn.invars],
        outvars=[names.get(v, v) for v in eqn.outvars],
    )
    return new
