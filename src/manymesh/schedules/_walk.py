"""Follow the rows of an order as far as the data dependencies allow.

This is the one place that knows which action waits for which. The checker asks whether
the walk reaches the end, the dispatcher takes the walk as its order, and the simulator
adds a clock to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ._types import Action, Order


def producers(order: Order, action: Action) -> list[Action]:
    """The actions whose results an action reads.

    Args:
      order: the order that the action is part of.
      action: any of its actions.

    Returns:
      At most two actions, the one of the same stage first.
    """
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind == "W":
        return [Action("B", stage, microbatch)]
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage else []
    own = [Action("F", stage, microbatch)]
    return own if stage + 1 == order.num_stages else [*own, Action("B", stage + 1, microbatch)]


@dataclass(frozen=True)
class Walk:
    """How far an order can run.

    Attributes:
      actions: a topological order of everything that can run, round-robin over submeshes.
      positions: ``int[submesh]``, how many actions of each row can run.
    """

    actions: tuple[Action, ...]
    positions: tuple[int, ...]


def walk(order: Order) -> Walk:
    """Run the rows, each in its order, one action a turn, until none can go on.

    Submeshes take turns, and one that has just been fed is served before the one that fed
    it, so all submeshes have work as early as possible. Linear in the number of actions.

    Args:
      order: an order whose actions are each on their stage's submesh.

    Returns:
      What ran; all of the order exactly if it is free of deadlock.
    """
    stages, rows = order.num_stages, order.rows
    done = {kind: [bytearray(order.num_microbatches) for _ in range(stages)] for kind in ("F", "B", "W")}
    forward_done, backward_done = done["F"], done["B"]

    def can_run(action: Action) -> bool:
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            return stage == 0 or bool(forward_done[stage - 1][microbatch])
        if action.kind == "W":
            return bool(backward_done[stage][microbatch])
        fed = stage + 1 == stages or backward_done[stage + 1][microbatch]
        return bool(fed and forward_done[stage][microbatch])

    positions = [0] * len(rows)
    waiting = [bool(row) for row in rows]  # rows with work that are not in `turns`
    turns: deque[int] = deque()

    def wake(submesh: int) -> None:
        if waiting[submesh] and can_run(rows[submesh][positions[submesh]]):
            waiting[submesh] = False
            turns.append(submesh)

    for submesh in range(len(rows)):
        wake(submesh)
    actions = []
    while turns:
        submesh = turns.popleft()
        action = rows[submesh][positions[submesh]]
        actions.append(action)
        positions[submesh] += 1
        waiting[submesh] = positions[submesh] < len(rows[submesh])
        done[action.kind][action.stage][action.microbatch] = 1
        fed = action.stage + 1 if action.kind == "F" else action.stage - 1
        if action.kind != "W" and 0 <= fed < stages:
            wake(order.placement[fed])
        wake(submesh)
    return Walk(tuple(actions), tuple(positions))
