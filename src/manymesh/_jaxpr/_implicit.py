"""Implicit tasks: equations of one scope become the one equation that an explicit task would have been.

Runs on the flat program. All that a scope computed in one phase is taken together into an inner jit with a
mark, so that every later pass sees no difference. What differentiation computed in the name of a scope but
outside the call that an explicit task would be stays outside: sums of gradients that come from elsewhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from .. import _compat
from .._errors import TaskError
from .._implicit import Matched
from .._mark import Recording, box_constraint_p, check_nested
from ._contract import Item, cut_convex
from ._dead import remove_dead
from ._flatten import cheap_chain
from ._nodes import Flat, Loop, Node, rename, substitute
from ._resolve import resolve_names
from ._scopes import is_rematerialised


def mark_scopes(flat: Flat, record: Recording) -> None:
    """Makes tasks, in place, of the scopes that `register_task` names.

    Args:
      flat: the program, without dead code.
      record: what its marks mean; the tasks made here are added.

    Raises:
      TaskError: an explicit task on another submesh inside; several meshes for a scope that is in no scan.
      AxisError: a constraint inside does not fit the mesh of the task.
    """
    if record.implicit:
        _Marker(flat, record).run()


class _Marker:
    def __init__(self, flat: Flat, record: Recording) -> None:
        self.flat, self.record = flat, record
        self.place: dict[Node, Matched] = {}
        self.marks: dict[Any, str] = {}

    def run(self) -> None:
        self._match()
        self._settle_boxes()
        if not self.place:
            return
        groups: dict[Any, list[Node]] = defaultdict(list)
        for n in self.flat.nodes:
            if n in self.place:
                at = self.place[n]
                groups[at.scope, at.task, n.backward, is_rematerialised(n.stack), n.loop].append(n)
        self._leave_sums([members for (_, _, backward, _, _), members in groups.items() if backward])
        parts = cut_convex(self.flat, groups)
        made = self._contract(parts)
        self._repeat_cheap(made)
        remove_dead(self.flat)

    def _match(self) -> None:
        """Finds each equation's task."""
        outside_scans: dict[str, Matched] = {}
        in_scans: set[str] = set()
        for n in self.flat.nodes:
            at = self.record.implicit.match(n.stack, n.backward) if n.stack else None
            if at is None:
                continue
            if at.task.meshes:
                name = at.task.name or "task"
                if (
                    at.iteration is None
                ):  # differentiation took it out of the scan, because every iteration needs it alike
                    outside_scans[name] = at
                    continue
                in_scans.add(name)
                at = Matched(at.scope, at.task.at(*at.iteration), at.pattern)
            if n.task is not None:
                check_nested(self.record.tasks[n.task], at.task, at.pattern)
            self.place[n] = at
        for name, at in outside_scans.items():
            if name not in in_scans:
                raise TaskError(
                    f"task {name!r}, which register_task({at.pattern!r}) makes of a scope, has {len(at.task.meshes)} meshes "
                    "to split the iterations of a scan over, but is not in the body of lax.scan; give it one mesh, or scan "
                    "over its layers"
                )

    def _settle_boxes(self) -> None:
        """What the box of an argument says goes to the tasks that read the argument or make its gradient; else it is dropped."""
        flat = self.flat
        boxes = [n for n in flat.nodes if n not in self.place and n.eqn.primitive is box_constraint_p]
        if not boxes:
            return
        producer = {v: n for n in flat.nodes for v in n.outputs}
        readers: dict[Any, list[Node]] = defaultdict(list)
        for n in flat.nodes:
            for v in dict.fromkeys(n.inputs):
                readers[v].append(n)
        alias: dict[Any, Any] = {}
        clones: dict[Node, list[Node]] = defaultdict(list)
        for box in boxes:
            operand, result = box.eqn.invars[0], box.eqn.outvars[0]
            maker = producer.get(operand) if _compat.is_var(operand) else None
            if box.backward and maker is not None and maker in self.place and maker.eqn.primitive.name != "add_any":
                box.stack, box.loop, self.place[box] = maker.stack, maker.loop, self.place[maker]
                continue
            alias[result] = alias.get(operand, operand) if _compat.is_var(operand) else operand
            own: dict[Any, Any] = {}
            for reader in readers[result]:
                at = self.place.get(reader)
                if at is None or reader.eqn.primitive is box_constraint_p:
                    continue
                key = (at.scope, at.task, reader.backward, is_rematerialised(reader.stack), reader.loop)
                if key not in own:
                    own[key] = _compat.new_var(result.aval)
                    eqn = box.eqn.replace(invars=[alias[result]], outvars=[own[key]])
                    clone = Node(eqn, None, reader.backward, reader.loop, stack=reader.stack)
                    self.place[clone] = at
                    clones[reader].append(clone)
                reader.eqn = reader.eqn.replace(invars=[own[key] if v is result else v for v in reader.eqn.invars])
        dropped = {b for b in boxes if b not in self.place}
        flat.nodes = [m for n in flat.nodes if n not in dropped for m in [*clones.get(n, ()), n]]
        rename(flat, alias)

    def _leave_sums(self, groups: list[list[Node]]) -> None:
        """Takes out of each backward group what adds gradients of other tasks to its own.

        Differentiation adds up the gradients of a value that several tasks read in the scope of the one it comes to
        last. A gradient from outside that only additions read is such a one; the sum of the group's own terms stays.
        """
        reads = Counter(v for n in self.flat.nodes for v in n.inputs)
        reads.update({v for v in self.flat.outvars if _compat.is_var(v)} | _tied(self.flat))
        replaced: dict[Node, list[Node]] = {}
        for members in groups:
            new = self._sums_of(members, reads)
            if new:
                members[:] = [m for n in members for m in new.get(n, [n]) if m in self.place]
                replaced.update(new)
        self.flat.nodes = [m for n in self.flat.nodes for m in replaced.get(n, [n])]

    def _sums_of(self, members: list[Node], everywhere: Counter[Any]) -> dict[Node, list[Node]]:
        """The additions of a group to replace, and by what. ``everywhere``: how often each variable is read."""
        made = {v for n in members for v in n.outputs}
        adds = {
            n.outputs[0]: n for n in members if n.eqn.primitive.name == "add_any" and len(n.inputs) == 2 and n.outputs
        }
        reads = Counter(v for n in members for v in n.inputs)
        replaced: dict[Node, list[Node]] = {}
        for root in list(adds.values())[::-1]:
            if reads[root.outputs[0]] or root in replaced:
                continue
            terms: list[Any] = []
            chain = [root]
            stack = root.inputs[::-1]
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
            if not foreign:
                continue
            replaced.update(dict.fromkeys(chain, []))
            replaced[root] = self._two_sums(root, own, foreign)
        return replaced

    def _two_sums(self, root: Node, own: list[Any], foreign: list[Any]) -> list[Node]:
        """The sum of a task's own terms inside it, and outside it the others and that."""
        nodes: list[Node] = []
        at = self.place.pop(root)

        def add(a: Any, b: Any, inside: bool) -> Any:
            out = _compat.new_var(root.outputs[0].aval)
            eqn = root.eqn.replace(invars=[a, b], outvars=[out])
            nodes.append(Node(eqn, None, root.backward, root.loop, stack=root.stack if inside else ""))
            if inside:
                self.place[nodes[-1]] = at
            return out

        inner = own[:1]
        for v in own[1:]:
            inner = [add(inner[0], v, True)]
        total, *rest = [*foreign, *inner]
        for v in rest:
            total = add(total, v, False)
        nodes[-1].eqn = nodes[-1].eqn.replace(outvars=[root.outputs[0]])
        return nodes

    def _contract(self, parts: list[tuple[Any, int, int, Item]]) -> list[Node]:
        """Makes one node of each part. Returns the new nodes."""
        flat = self.flat
        inside = {n for *_, item in parts for n in item.nodes}
        # What a part makes and somebody else reads: another part, an equation of none, a loop, the caller.
        leaving = {v for v in flat.outvars if _compat.is_var(v)} | _tied(flat)
        leaving.update(v for *_, item in parts for v in item.reads)
        leaving.update(v for n in flat.nodes if n not in inside for v in n.inputs)
        replaced: dict[Node, list[Node]] = {}
        made = []
        for (scope, task, backward, again, loop), number, count, item in parts:
            # The backward pass comes to the last call of a scope first.
            nth = count - 1 - number if backward and not again else number
            mark = self._mark(scope, task, loop, nth)
            outvars = [v for v in item.writes if v in leaving]
            env = {v: _compat.new_var(v.aval) for v in (*item.reads, *outvars)}
            eqns = [_renamed(n.eqn, env) for n in resolve_names(item.nodes, self.record, mark)]
            jaxpr = _compat.new_jaxpr([env[v] for v in item.reads], [env[v] for v in outvars], eqns)
            eqn = _compat.call_eqn(mark, jaxpr, item.reads, outvars)
            node = Node(eqn, mark, backward, loop, stack=item.nodes[0].stack)
            made.append(node)
            replaced.update(dict.fromkeys(item.nodes, []))
            replaced[item.nodes[-1]] = [node]
        flat.nodes = [m for n in flat.nodes for m in replaced.get(n, [n])]
        return made

    def _mark(self, scope: Any, task: Any, loop: Loop | None, number: int) -> str:
        key = (scope, task, loop, number)
        if key not in self.marks:
            self.marks[key] = self.record.new_mark(task.name or "task")
            self.record.tasks[self.marks[key]] = task
        return self.marks[key]

    def _repeat_cheap(self, made: list[Node]) -> None:
        """A weight's cast or constraint that the backward pass reads is computed there again, as for explicit tasks."""
        flat = self.flat
        varying = {loop: {c.inner for c in loop.carries} | {p.inner for p in loop.cut} for loop in flat.loops}
        readers: dict[Any, list[Node]] = defaultdict(list)
        for n in flat.nodes:
            if n.loop is not None:
                varying[n.loop].update(n.outputs)
            if n.backward:
                for v in dict.fromkeys(n.inputs):
                    readers[v].append(n)
        after: dict[Node, list[Node]] = {}
        for node in made:
            if node.backward or node.loop is None:
                continue
            inner = _compat.open_jaxpr(node.eqn.params["jaxpr"])
            producer = {v: e for e in inner.eqns for v in e.outvars}
            actual = dict(zip(inner.invars, node.eqn.invars, strict=True))
            for outer, result in zip(node.eqn.outvars, inner.outvars, strict=True):
                chain = cheap_chain(result, producer, actual) if readers[outer] else []
                if not chain or actual[chain[0].invars[0]] in varying[node.loop]:
                    continue
                sub = {chain[0].invars[0]: actual[chain[0].invars[0]]}
                again = [Node(substitute(e, sub), None, True, node.loop, beside=node.task) for e in chain]
                after.setdefault(node, []).extend(again)
                for reader in readers[outer]:
                    invars = [sub[result] if v is outer else v for v in reader.eqn.invars]
                    reader.eqn = reader.eqn.replace(invars=invars)
        flat.nodes = [m for n in flat.nodes for m in [n, *after.get(n, ())]]


def _renamed(eqn: Any, names: dict[Any, Any]) -> Any:
    """The equation with the variables that it shares with others under other names; its own stay its own."""
    if not any(_compat.is_var(v) and v in names for v in (*eqn.invars, *eqn.outvars)):
        return eqn
    return eqn.replace(
        invars=[names.get(v, v) if _compat.is_var(v) else v for v in eqn.invars],
        outvars=[names.get(v, v) for v in eqn.outvars],
    )


def _tied(flat: Flat) -> set[Any]:
    """Variables that loops read under another name."""
    found = set()
    for loop in flat.loops:
        found |= {v for c in loop.carries for v in (c.out, c.init)} | {p.inner for p in loop.collected}
        found |= {v for p in loop.cut for v in p.outer}
    return {v for v in found if _compat.is_var(v)}
