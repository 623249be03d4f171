"""Which submesh each equation runs on.

Tasks say where they run. Unmarked equations follow the bytes: the submesh that already holds most of
what they read, else the one that reads most of what they make. Small values that depend on nothing
large are computed wherever they are needed.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from jax.sharding import Mesh

from .. import _compat
from .._compat import Atom, Var
from .._errors import MeshError
from .._program._flat import FlatProgram
from .._program._nodes import Node, nbytes
from .._program._placement import Placement
from ._beside import beside
from ._branches import Branches
from ._roles import NUMBER, after_gradients, is_number, latest_tasks, shrinks, small_nodes, summed_up
from ._states_apart import states_apart
from ._together import Together

ROUNDS = 8  # after which states that cannot agree stay as they are
VOTED = ("reads", "read by", "state", "default")  # why something is where it is that could be elsewhere


class NothingPlacedError(Exception):
    """Nothing in a program says where anything runs. Caught by `build`; users never see it."""


def place(flat: FlatProgram) -> FlatProgram:
    """Places every node: the program with its placement.

    Small values that a loop starts from are found on the way; they take the layout that the loop wants.

    Raises:
      MeshError: submeshes on devices of several backends, or that overlap without being equal.
      NothingPlacedError: nothing says where anything runs.
    """
    if not flat.pins.inputs and not flat.pins.outputs and all(flat.submesh_of(n) is None for n in flat.nodes):
        raise NothingPlacedError
    small = small_nodes(flat)
    inits = {c.init for loop in flat.loops for c in loop.carries if _compat.is_var(c.init)}
    starts = {n for n in small if not n.layout_follows_loop and any(v in inits for v in n.outputs)}
    if starts:
        changed = {n: replace(n, layout_follows_loop=True) for n in starts}
        flat = replace(flat, nodes=tuple(changed.get(n, n) for n in flat.nodes))
        small = {changed.get(n, n) for n in small}
    sums, after = summed_up(flat), latest_tasks(flat)
    placer = _Placer(flat, small, sums, after)
    placement = placer.run()
    states, results = beside(flat, placement)
    late: dict[Var, int] = {}
    found = {**states_apart(flat, placement), **states}
    rounds = ROUNDS if found or results else 0
    while rounds:  # what moves may draw the home of another state after it, or what reads it elsewhere
        late |= found
        if results or not placer.move_alone(found):
            placer = _Placer(flat, small, sums, after)
            placement = placer.run(late, results)
        else:
            placement = placer.with_homes(found)
        found = {v: at for v, at in states_apart(flat, placement).items() if late.get(v) != at}
        rounds = rounds - 1 if found else 0
    return replace(flat, placement=placement)


class _Placer:
    def __init__(self, flat: FlatProgram, small: set[Node], sums: set[Node], after: dict[Node, int]) -> None:
        self.flat, self.small, self.index, self.sums, self.after = flat, small, flat.index, sums, after
        self.home: dict[Var, int] = {}
        self.submeshes: list[Mesh] = []
        self.number: dict[Mesh, int] = {}
        self.at: dict[Node, int] = {}
        self.reason: dict[Node, str] = {}
        self.producer, self.position, self.consumers = self.index.producer, self.index.position, self.index.readers
        # What a microbatch leaves -> its names in the next one.
        self.next_read_as: dict[Var, list[Var]] = defaultdict(list)
        for c in (c for loop in flat.loops for c in loop.carries):
            self.next_read_as[c.out].append(c.inner)
        self.carried = set(self.next_read_as)
        for n in sorted(flat.nodes, key=lambda n: n.task is None):  # submeshes are numbered as tasks follow each other
            mesh = flat.submesh_of(n)
            if mesh is not None:
                self.at[n] = self._submesh(mesh)
                self.reason[n] = "task" if n.task or n.colocated_with else "its submesh"
        self.branches = Branches()
        self.trained = {self.at[n] for n in flat.nodes if n.backward and n in self.at}
        self.updates: dict[Node, int] = {}  # of states -> where the state is
        self.pinned = {v: self._submesh(m) for v, m in flat.pins.inputs.items()}
        self.asked: dict[Var, int] = {}  # by who calls the step
        # A state stays where it is, though it is wanted elsewhere as another result, too: there it is sent.
        states = {
            flat.outvars[o]
            for _, o in flat.pins.states
            if o not in flat.pins.outputs and _compat.is_var(flat.outvars[o])
        }
        for i, mesh in flat.pins.outputs.items():
            wanted, result = self._submesh(mesh), flat.outvars[i]
            if _compat.is_var(result) and result not in states:
                self.asked[result] = wanted
        self.wanted = dict(self.asked)
        self.fed_back = self._find_fed_back()
        _check_submeshes(self.submeshes)

    def _find_fed_back(self) -> dict[Var, int]:
        """What tasks make for the next call or microbatch, and no task reads there as it is: its name, where it is made."""
        again = [(v, self.flat.outvars[o]) for v, o in self.flat.pins.states if v not in self.pinned]
        again += [(c.inner, c.out) for loop in self.flat.loops for c in loop.carries]
        made = {v: self._near_task(out) for v, out in again}
        read = {v for n in self.at for v in n.inputs}
        return {v: at for v, at in made.items() if at is not None and v not in read}

    def _near_task(self, v: Atom) -> int | None:
        """Where the task is that makes a value, or what the value is computed from and nothing else."""
        seen: set[Var] = set()
        while _compat.is_var(v) and v not in seen:  # a counter comes from itself
            seen.add(v)
            v = self.index.comes_from.get(v, v)
            node = self.producer.get(v)
            if node is None or node in self.at:
                return None if node is None else self.at[node]
            if len(node.inputs) != 1:
                return None
            (v,) = node.inputs
        return None

    def _submesh(self, mesh: Mesh) -> int:
        if mesh not in self.number:
            self.number[mesh] = len(self.submeshes)
            self.submeshes.append(mesh)
        return self.number[mesh]

    def run(self, late: Mapping[Var, int] | None = None, results: Mapping[Var, int] | None = None) -> Placement:
        """Places everything; ``late`` and ``results`` are homes that the program itself says nothing about."""
        home = self.home = {**(late or {}), **self._input_homes()}
        self.asked = {**(results or {}), **self.asked}
        self._want_at_home()
        for v, o in self.flat.pins.states:
            if v in home:
                made = self._update_of(v, self.flat.outvars[o])
                self.updates.update({n: home[v] for n in made if not self._repeats(n)})
        open_nodes = [
            n for n in self.flat.nodes if n not in self.at and n not in self.small and not n.layout_follows_loop
        ]
        self._vote(open_nodes, home)
        if self._start_early():
            self._vote_again(open_nodes, home)
        self._go_on()
        self._draw_together(home)
        if self._turn_back():
            self._vote_again([n for n in open_nodes if not n.backward], home)
        return self._finish(home)

    def move_alone(self, states: Iterable[Var]) -> bool:
        """Whether only what runs wherever it is read is about these states, such as a count: their homes decide nothing else."""
        following = {v: self.flat.outvars[o] for v, o in self.flat.pins.states}
        made = {v for n in self.small for v in n.outputs}
        return all(
            self.small.issuperset(self.consumers.get(v, ()))
            and _compat.is_var(following[v])
            and following[v] in made
            and v not in self.index.continues_as
            for v in states
        )

    def with_homes(self, states: Mapping[Var, int]) -> Placement:
        """Where everything is once these states are elsewhere, which move alone."""
        self.home.update(states)
        self._want_at_home()
        return self._finish(self.home)

    def _want_at_home(self) -> None:
        """The next value of a state that has a home is wanted there, unless somebody asked for it elsewhere."""
        self.wanted = dict(self.asked)
        for v, o in self.flat.pins.states:
            if v in self.home:
                for out in self._leads_to(self.flat.outvars[o]):
                    self.wanted.setdefault(out, self.home[v])

    def _forward(self) -> set[Node]:
        """What loops compute without gradients. An accumulator adds them up."""
        found: set[Node] = set()
        for n in self.flat.nodes:
            made = (self.producer[v] for v in n.inputs if v in self.producer)
            if n.loop is not None and not n.backward and all(p in found for p in made if p.loop == n.loop):
                found.add(n)
        return found

    def _vote_again(self, nodes: Sequence[Node], home: dict[Var, int]) -> None:
        """Places what follows others that were moved after it was placed."""
        forward = self._forward()
        again = [n for n in nodes if n not in forward and self.reason[n] in VOTED]
        for n in again:
            del self.at[n]
        self._vote(again, home)

    def _vote(self, open_nodes: list[Node], home: dict[Var, int]) -> None:
        """Places nodes: results that the caller wants somewhere decide first, then what is already placed, then readers."""
        while open_nodes:
            rest = self._sweep(open_nodes, self._vote_made, "reads")
            if len(rest) == len(open_nodes):
                home.update(self._input_homes(besides=home))
                rest = self._sweep(open_nodes, lambda n: self._vote_states(n, home), "state")
            if len(rest) == len(open_nodes):  # what is added up goes with what it is made of, once that is somewhere
                rest = self._sweep(
                    open_nodes[::-1], lambda n: None if n in self.sums else self._vote_outputs(n), "read by"
                )[::-1]
            if len(rest) == len(open_nodes):
                rest = self._sweep(open_nodes[::-1], self._vote_outputs, "read by")[::-1]
            if len(rest) == len(open_nodes):
                rest = self._sweep(open_nodes, lambda n: self._vote_inputs(n, home), "state")
            if len(rest) == len(open_nodes):
                for n in rest:
                    self.at[n], self.reason[n] = 0, "default"
                rest = []
            open_nodes = rest

    def _draw_together(self, home: dict[Var, int]) -> None:
        """Moves unmarked equations between tasks to where least crosses, and what becomes of gradients after them."""
        ours = [n for n in self.flat.nodes if self.reason.get(n) in VOTED]
        updates = after_gradients(self.flat).intersection(ours)
        held = (self.index.leaving - self.carried) | self.wanted.keys()
        free = [
            n
            for n in ours
            if n not in updates
            and (self._repeats(n) or self.reason[n] in ("reads", "read by"))
            and held.isdisjoint(n.outputs)
        ]
        before = {n: self.at.pop(n) for n in updates}  # which say nothing of what they read
        together = Together(self.flat, self.at, free, self._comes_from, self._readers, self._stages())
        moved = together.run()
        if not moved:
            self.at.update(before)
            return
        self.reason.update(dict.fromkeys(moved, "least crosses"))
        self._vote([n for n in self.flat.nodes if n in updates], home)

    def _turn_back(self) -> bool:
        """Lets backward passes go from each stage to earlier ones only; whether something was moved.

        Around a skip connection a gradient may have been drawn to a later stage, by as many bytes as there are on its own:
        what an earlier one made would go there and come back, and no schedule has an order for that. A node is not after
        the stages that make what it reads, and not before those whose tasks need what comes of it.
        """
        stages = self._stages()
        order = {k: i for i, k in enumerate(stages)}
        nodes = [n for n in self.flat.nodes if n.backward and n.loop is not None] if stages else []
        needed: dict[Node, int] = {}
        for n in reversed(nodes):
            readers = [r for v in n.outputs for r in self.consumers.get(v, ()) if r.backward and r.loop == n.loop]
            tasks = [order.get(self.at[r], 0) for r in readers if r.task is not None]
            needed[n] = max([*tasks, *(needed.get(r, 0) for r in readers if r.task is None)], default=0)
        moved = False
        for n in nodes:
            if self.flat.submesh_of(n) is not None or self.at.get(n) not in order:
                continue
            made = [self.at.get(self.producer[v]) for v in n.inputs if v in self.producer and self.producer[v].backward]
            latest = min((order[k] for k in made if k in order), default=len(stages))
            at = stages[max(min(order[self.at[n]], latest), needed[n])]
            if at != self.at[n] and not any(v in self.wanted for v in n.outputs):
                self.at[n], self.reason[n] = at, "reads"
                moved = True
        return moved

    def _start_early(self) -> bool:
        """Lets forward passes start at the first stage that needs what comes of them; whether something was moved.

        Noise that the loss reads, too, would be made with the loss, a stage before the first one.
        """
        stages = self.stages_of_tasks
        order = {k: i for i, k in enumerate(stages)}
        forward = [n for n in self.flat.nodes if n.loop is not None and not n.backward] if stages else []
        nodes = [n for n in forward if self.at.get(n) in order]
        latest: dict[Node, int] = {}  # of the tasks that it reads from
        for n in nodes:
            made = [latest.get(p, 0) for p in self._makers(n)]
            latest[n] = max(made, default=0) if self.reason[n] in VOTED else order[self.at[n]]
        first: dict[Node, int] = {}
        moved = False
        for n in reversed(nodes):
            read = [first[r] for v in n.outputs for r in self.consumers.get(v, ()) if r in first and r.loop == n.loop]
            first[n] = order[self.at[n]]
            start = max(latest[n], min(read, default=first[n]))
            if start < first[n] and self.reason[n] in VOTED and not self._is_held(n):
                first[n], self.at[n], self.reason[n] = start, stages[start], "read by"
                moved = True
        return moved

    def _go_on(self) -> None:
        """Lets forward passes go from each stage to later ones only, as far as nobody says where something is.

        Metrics of several stages in one array, say, have most of their numbers from early ones. There they would be a stage
        behind the last one.
        """
        stages = self.stages_of_tasks
        order = {k: i for i, k in enumerate(stages)}
        for n in self.flat.nodes if stages else ():
            if n.backward or n.loop is None or self.reason.get(n) not in VOTED or self.at[n] not in order:
                continue
            made = [order.get(self.at[p], 0) for p in self._makers(n) if p in self.at]
            latest = max(made, default=0)
            if latest > order[self.at[n]] and not self._is_held(n):
                self.at[n], self.reason[n] = stages[latest], "reads"

    def _is_held(self, n: Node) -> bool:
        """Whether what a node makes has its place from elsewhere."""
        return any(v in self.wanted or v in self.carried for v in n.outputs)

    def _makers(self, n: Node) -> list[Node]:
        """What a node of a forward pass reads from in its loop."""
        made = (self.producer.get(v) for v in n.inputs)
        return [p for p in made if p is not None and p.loop == n.loop and not p.backward]

    @functools.cached_property
    def stages_of_tasks(self) -> list[int]:
        """The submeshes in the order in which tasks of forward passes need each other; empty where there is none.

        Of two that do not need each other the frozen one is first, or the one that is first in the program.
        """
        forward = [n for n in self.flat.nodes if n.loop is not None and not n.backward]
        tasks = [n for n in forward if n.task is not None and n in self.at]
        needs: dict[int, set[int]] = {self.at[n]: set() for n in tasks}
        comes_from: dict[Node, set[int]] = {}
        for n in forward:
            comes_from[n] = set().union(*(comes_from[p] for p in self._makers(n)))
            if n.task is not None and n in self.at:
                needs[self.at[n]] |= comes_from[n] - {self.at[n]}
                comes_from[n] = comes_from[n] | {self.at[n]}
        left = sorted(needs, key=self.trained.__contains__)
        found: list[int] = []
        while left:
            ready = next((k for k in left if needs[k] <= set(found)), None)
            if ready is None:
                return []
            left.remove(ready)
            found.append(ready)
        return found

    def _stages(self) -> list[int]:
        """The same, of everything in loops: empty too where a forward pass comes to one of them again."""
        stages = self.stages_of_tasks
        order = {k: i for i, k in enumerate(stages)}
        for n in self.flat.nodes if stages else ():
            if n.loop is None or n.backward or n not in self.at:
                continue
            made = [order.get(self.at[p], 0) for p in self._makers(n) if p in self.at]
            if max(made, default=0) > order.get(self.at[n], 0):
                return []
        return stages

    def _leads_to(self, out: Atom) -> list[Var]:
        """The next value of a state, and what is nothing but this value: before a mean's division, the stack that is divided.

        Empty where it is a part of something, or its sum: it stays with that, and is sent.
        """
        found: list[Var] = []
        while _compat.is_var(out) and out in self.producer:
            node = self.producer[out]
            if shrinks(node):
                return []
            found.append(out)
            before = node.inputs
            if len(before) != 1 or len(self.consumers.get(before[0], ())) != 1 or node.task is not None:
                break
            (out,) = before
        return found

    def _sweep(self, nodes: list[Node], vote: Callable[[Node], int | None], reason: str) -> list[Node]:
        rest = []
        for n in nodes:
            choice = vote(n)
            if choice is None:
                rest.append(n)
            else:
                self.at[n], self.reason[n] = choice, reason
        return rest

    def _place_of(self, v: Var, seen: int = 0) -> int | None:
        """Where a variable is made, looking through the links of loops."""
        node = self.producer.get(v)
        if node is not None:
            return self.at.get(node)
        if seen < 4 and v in self.index.comes_from:
            return self._place_of(self.index.comes_from[v], seen + 1)
        return self.pinned.get(v)

    def _comes_from(self, v: Var) -> int | None:
        """Where a variable is made; of a state that a task makes for the next call, where that is."""
        at = self._place_of(v)
        return self.fed_back.get(v) if at is None else at

    def _vote_made(self, n: Node) -> int | None:
        """Where most of what a node reads is made.

        An update is not drawn to the number that scales it, a loss or a norm: the weight that it reads has its place
        from elsewhere. In loops and backward passes a weight comes to activations that are made there, once a call, but
        not to a number either.
        """
        return self._vote_inputs(n, {}, waits=n.backward, surely=True)

    def _vote_states(self, n: Node, home: dict[Var, int]) -> int | None:
        """The same, where inputs of the program count.

        A weight's cast or transpose inside a loop or a backward pass goes with what reads it: the weight itself then
        crosses once a call, not its copy once a microbatch. A norm of it is made where it is.
        """
        if self._repeats(n) and n not in self.sums:
            return None
        return self._vote_inputs(n, home, surely=True)

    def _vote_inputs(self, n: Node, home: dict[Var, int], waits: bool = False, surely: bool = False) -> int | None:
        """Where most of what a node reads is.

        Args:
          n: the node.
          home: where inputs of the program are, if they count.
          waits: whether it is left to those who read it where as much is in one place as in another, what is brought
            there for others included. A gradient that meets another one is then where the task is that takes it.
          surely: whether it is left to others where something that is nowhere yet is larger than what is in one place;
            where weights come to activations, larger than the numbers that are.
        """
        wanted = [self.wanted[v] for v in n.outputs if v in self.wanted]
        if wanted:
            return wanted[0]
        later = self._where_fed_back(n)
        if later is not None:
            return later
        votes: dict[int, int] = defaultdict(int)
        nowhere = largest = 0
        for v in dict.fromkeys(n.inputs):
            at = self._place_of(v)
            if at is None:
                at = home.get(v)
            if at is None and n.backward and v not in self.producer:
                # A weight that the forward pass reads somewhere is there for the backward pass too.
                there = {self.at[c] for c in self.consumers.get(v, ()) if c in self.at and not c.backward}
                for k in there:
                    votes[k] += nbytes(v.aval) + 1
                nowhere = nowhere if there else max(nowhere, nbytes(v.aval))
            elif at is None:
                nowhere = max(nowhere, nbytes(v.aval))
            else:
                largest = max(largest, nbytes(v.aval))
                brought = {self.at[c] for c in self.consumers.get(v, ()) if c in self.at} if waits else set()
                for k in {at, *brought}:
                    votes[k] += nbytes(v.aval) + 1
        most = max(votes.values(), default=0)
        if surely and nowhere > most and (largest <= NUMBER or not self._repeats(n)):
            return None
        if surely and largest <= NUMBER and not is_number(n):  # a number that is spread out, for whoever needs it
            return None
        ties = _most(votes)
        if self.updates.get(n) in ties:
            return self.updates[n]
        if len(ties) < 2 or any(v in self.index.comes_from for v in n.inputs):
            return _winner(votes)
        if waits:
            return None
        if n.backward:
            return min(ties)
        # What a frozen model makes goes to the trained one, else a gradient would come back from there.
        ties = ties & self.trained or ties
        # A skip connection meets a task's result: the forward pass goes on from the later of the two.
        made = [((self.after[p], self.position[p]), v) for v in n.inputs if (p := self.producer.get(v)) is not None]
        late = [at for _, v in sorted(made, key=lambda p: p[0], reverse=True) if (at := self._place_of(v)) in ties]
        return late[0] if late else min(ties)

    def _where_fed_back(self, n: Node) -> int | None:
        """Where a state is made that a node reads on the way there: the state need not come back, and no more crosses."""
        found = {self.fed_back[v] for v in n.inputs if v in self.fed_back}
        if len(found) != 1:
            return None
        (at,) = found
        if (readers := self._all_readers(n, at)) is None:
            return None
        coming = sum(nbytes(v.aval) for v in n.inputs if self._place_of(v) not in (None, at))
        if not readers:  # as of a norm of it that is logged
            return at if coming < sum(nbytes(v.aval) for v in n.inputs if v in self.fed_back) else None
        return at if coming <= sum(nbytes(v.aval) for v in n.outputs) else None

    def _all_readers(self, n: Node, at: int) -> set[int] | None:
        """Where the tasks are that read what a node makes, also by way of nodes that are placed nowhere yet.

        None as soon as one of them is elsewhere than ``at``.
        """
        found: set[int] = set()
        seen, todo = {n}, [n]
        while todo:
            for v in todo.pop().outputs:
                for k in self._readers(v):
                    if k != at:
                        return None
                    found.add(k)
                more = [c for c in self.consumers.get(v, ()) if c not in self.at and c not in seen]
                seen.update(more)
                todo += more
        return found

    @staticmethod
    def _repeats(n: Node) -> bool:
        return n.backward or n.loop is not None

    def _vote_outputs(self, n: Node) -> int | None:
        votes: dict[int, int] = defaultdict(int)
        for v in n.outputs:
            for at in self._readers(v):
                votes[at] += nbytes(v.aval) + 1
        return _winner(votes)

    def _readers(self, v: Var, depth: int = 0) -> Iterator[int]:
        """The submeshes where a value is read or wanted, one after the other: of a step counter there are thousands."""
        consumers = self.consumers.get(v, ())
        for c in consumers:
            if c in self.at:
                yield self.at[c]
        if v in self.wanted:
            yield self.wanted[v]
        if depth < 8:
            for c in consumers:
                if c.layout_follows_loop or c.unstacks or c in self.small:
                    for out in c.outputs:
                        yield from self._readers(out, depth + 1)
            for linked in (*self.index.continues_as.get(v, ()), *self.next_read_as.get(v, ())):
                yield from self._readers(linked, depth + 1)

    def _input_homes(self, besides: Mapping[Var, int] = MappingProxyType({})) -> dict[Var, int]:
        """Homes of inputs: given, else where what reads them runs; of equals where its gradient is, or the first.

        Of weights that tasks of several submeshes read on equal terms, as the two directions of a pipeline do, each gets as many.

        Args:
          besides: those of inputs that have one.
        """
        home = {}
        shared: dict[tuple[frozenset[int], frozenset[Node]], list[Var]] = defaultdict(list)
        following = {v: self.flat.outvars[o] for v, o in self.flat.pins.states}
        for v in self.flat.invars:
            if v in besides:
                continue
            if v in self.pinned:
                home[v] = self.pinned[v]
                continue
            votes: dict[int, int] = defaultdict(int)
            for at in self._readers(v):
                votes[at] += 1
            ties = _most(votes)
            if len(ties) > 1:
                ties = ties & self._gradient_of(v, following.get(v)) or ties
            tasks = frozenset(c for c in self.consumers.get(v, ()) if c.task is not None and not c.backward)
            if len(ties) > 1 and v in following and ties <= {self.at.get(c) for c in tasks}:
                shared[frozenset(ties), tasks].append(v)
            elif ties:
                home[v] = min(ties)
        held: dict[int, int] = defaultdict(int)
        for (equals, _), values in shared.items():  # those of one layer stay together
            at = min(equals, key=lambda k: (held[k], k))
            held[at] += sum(nbytes(v.aval) for v in values)
            home.update(dict.fromkeys(values, at))
        return home

    def _gradient_of(self, v: Var, out: Atom | None) -> set[int]:
        """Where the backward passes are that make the gradient by which a state becomes its next value."""
        return {self.at[n] for n in self._update_of(v, out) if n.backward and n in self.at}

    def _update_of(self, v: Var, out: Atom | None) -> Iterator[Node]:
        """The nodes that make a state's next value of values of its shape, up to those that have a place."""
        todo: list[Atom | None] = [out]
        seen: set[Var] = set()
        while todo:
            x = todo.pop()
            if not _compat.is_var(x) or x in seen or _compat.shape(x) != _compat.shape(v):
                continue
            seen.add(x)
            node = self.producer.get(x)
            if node is None:
                todo.append(self.index.comes_from.get(x))
                continue
            yield node
            if node not in self.at:
                todo += self.branches.operands(node.eqn, x) if node.primitive == "cond" else node.inputs

    def _finish(self, home: dict[Var, int]) -> Placement:
        places, needed = self._copies(None)
        if idle := [n for n, at in places.items() if not at]:
            places, needed = self._copies(self._beside_operands(idle[::-1], needed, home))
        reason = {**self.reason, **dict.fromkeys((n for n in places if n not in self.at), "cloned")}
        result = {v: home[v] if v in home else min(self._needs(v, needed), default=0) for v in self.flat.invars}
        for n in self.flat.nodes:
            for v in n.outputs:  # of its clones, the one that somebody asked for is the value of record
                result[v] = self.wanted[v] if self.wanted.get(v) in places[n] else places[n][0]
        for i, loop in enumerate(self.flat.loops):
            leaves = {c.inner: c.out for c in loop.carries}
            runs = {s for n, at in places.items() if n.loop == i for s in at}
            for c in loop.carries:
                result[c.inner] = result[c.final] = self._home_of_carry(c.out, leaves, result, needed, runs)
            for p in loop.ys:
                result.update({v: result.get(p.inner, 0) for v in p.outer if _compat.is_var(v)})
        return Placement(tuple(self.submeshes), places, result, reason)

    def _copies(self, idle: Mapping[Node, int] | None) -> tuple[dict[Node, tuple[int, ...]], dict[Var, set[int]]]:
        """Where each node runs, those that are nowhere yet wherever they are read; and where each value is needed.

        Args:
          idle: where those are that are read nowhere, the first submesh where it does not say; without it, in no place.
        """
        places: dict[Node, tuple[int, ...]] = {}
        needed: dict[Var, set[int]] = defaultdict(set)
        for v, at in self.wanted.items():
            needed[v].add(at)
        for n in reversed(self.flat.nodes):
            if n in self.at:
                places[n] = (self.at[n],)
            else:
                found = set().union(*(self._needs(v, needed) for v in n.outputs))
                places[n] = tuple(sorted(found)) or (() if idle is None else (idle.get(n, 0),))
            for v in n.inputs:
                needed[v].update(places[n])
        return places, needed

    def _beside_operands(
        self, idle: Sequence[Node], needed: Mapping[Var, set[int]], home: Mapping[Var, int]
    ) -> dict[Node, int]:
        """Small nodes that no submesh needs, in order -> where most of what they read is, as far as that is anywhere.

        The next value of a small state that no gradient comes to, say: it should not bring a parameter elsewhere. What reads
        nothing that is somewhere, as a moment that is scaled, says nothing, and goes with what is made of it.
        """
        found: dict[Node, int] = {}
        for n in idle:
            votes: dict[int, int] = defaultdict(int)
            for v in n.inputs:
                made = self.producer.get(v)
                at = found.get(made) if made in found else home.get(v, min(needed.get(v, ()), default=None))
                if at is not None and (made is None or made in found or len(needed[v]) == 1):
                    votes[at] += nbytes(v.aval)
            if votes:
                found[n] = min(_most(votes))
        return found

    @staticmethod
    def _home_of_carry(
        v: Var, leaves: dict[Var, Var], home: dict[Var, int], needed: dict[Var, set[int]], runs: set[int]
    ) -> int:
        """Where a carry is: where it is made, or was made before another carry had it; else where it is read.

        What another carry was before leaves the loop with the last run on its submesh, so that it is on one of ``runs``,
        those that the loop runs on.
        """
        handed = [v]
        while handed[-1] in leaves and leaves[handed[-1]] not in handed:
            handed.append(leaves[handed[-1]])
        if handed == [v] and v not in leaves:
            return home.get(v, 0)
        # Where nobody makes it they are swapped.
        swapped = handed[-1] in leaves
        found = set().union(*(needed[inner] for inner in handed)) if swapped else {home.get(handed[-1], 0)}
        return min(found & runs or runs, default=0)

    def _needs(self, v: Var, needed: dict[Var, set[int]]) -> set[int]:
        found = set(needed.get(v, ()))
        for linked in self.index.continues_as.get(v, ()):
            if linked in needed:
                found |= needed[linked]
            else:
                at = self._place_of(linked)
                found |= {at} if at is not None else set()
        return found


def _most(votes: dict[int, int]) -> set[int]:
    """Those with the most votes."""
    most = max(votes.values(), default=0)
    return {k for k in votes if votes[k] == most}


def _winner(votes: dict[int, int]) -> int | None:
    """The first of those with the most votes."""
    return min(_most(votes), default=None)


def _check_submeshes(meshes: Sequence[Mesh]) -> None:
    backends = {m.devices.flat[0].platform: [d.id for d in m.devices.flat] for m in reversed(meshes)}
    if len(backends) > 1:
        (one, ids), (two, others), *_ = sorted(backends.items())
        raise MeshError(
            f"tasks run on devices of several backends, {one} (ids {ids}) and {two} (ids {others}); put every task on "
            "devices of one backend, such as jax.devices()"
        )
