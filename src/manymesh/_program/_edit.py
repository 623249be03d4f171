"""Several changes to one flat program, collected, and made at once.

A pass that rebuilt the program after each change would take time quadratic in its length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ._flat import FlatProgram
from ._nodes import Carry, Loop, Node


class Editor:
    """Collects changes to a flat program, which stays what it is; `result` is the program with all of them.

    Args:
      flat: the program.
    """

    def __init__(self, flat: FlatProgram) -> None:
        self._flat = flat
        self._replaced: dict[Node, list[Node]] = {}
        self._before: dict[Node, list[Node]] = defaultdict(list)
        self._loop_start: dict[int, list[Node]] = defaultdict(list)
        self._loop_end: dict[int, list[Node]] = defaultdict(list)
        self._carries: dict[int, dict[Carry, list[Carry]]] = defaultdict(dict)

    def replace_node(self, node: Node, by: Sequence[Node]) -> None:
        """Puts other nodes in the place of one; none to drop it."""
        self._replaced[node] = list(by)

    def before_loop(self, loop: int, new: Sequence[Node]) -> None:
        """Puts nodes before the first node of a loop's body."""
        self._loop_start[loop] += new

    def after_loop(self, loop: int, new: Sequence[Node]) -> None:
        """Puts nodes after the last node of a loop's body."""
        self._loop_end[loop] += new

    def replace_carry(self, loop: int, carry: Carry, by: Sequence[Carry]) -> None:
        """Puts other carries in the place of one; none to drop it."""
        self._carries[loop][carry] = list(by)

    def result(self) -> FlatProgram:
        """The program with all changes; the program itself if there are none."""
        changed = self._replaced or self._before or self._loop_start or self._loop_end or self._carries
        if not changed:
            return self._flat
        bodies = self._flat.index.bodies
        first = {bodies[i][0]: new for i, new in self._loop_start.items() if bodies[i]}
        last = {bodies[i][-1]: new for i, new in self._loop_end.items() if bodies[i]}
        nodes: list[Node] = []
        for i, new in self._loop_start.items():
            if not bodies[i]:
                nodes += new
        for n in self._flat.nodes:
            nodes += first.get(n, ())
            nodes += self._before.get(n, ())
            nodes += self._replaced.get(n, (n,))
            nodes += last.get(n, ())
        for i, new in self._loop_end.items():
            assert bodies[i] or not new, "nothing comes after a loop that has no body"
        loops = tuple(self._loop(i, loop) for i, loop in enumerate(self._flat.loops))
        return replace(self._flat, nodes=tuple(nodes), loops=loops, placement=None)

    def _loop(self, index: int, loop: Loop) -> Loop:
        changes = self._carries.get(index)
        if not changes:
            return loop
        kept = [c for c in loop.carries if c not in changes]
        new = [c for by in changes.values() for c in by]
        return replace(loop, carries=(*kept, *new))
