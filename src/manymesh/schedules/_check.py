"""Prove that an order can run, and say how many activations it keeps where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from .._errors import ScheduleError
from ._live import live_activations
from ._types import Action, Order
from ._validate import require_order, rows_of_actions
from ._walk import producers, walk


def check(order: Order, *, labels: Callable[[Action], str] = str, accumulates: bool = True) -> tuple[int, ...]:
    """Prove that an order runs each action once, after its producers, with no deadlock.

    Args:
      order: the order to check.
      labels: how messages name an action, ``F2@5`` by default.
      accumulates: whether a forward-only program adds up over microbatches, so that each stage has to take them in
        order; one with a backward pass does.

    Returns:
      ``int[submesh]``, the activations that each submesh keeps at most (`live_activations`).

    Raises:
      ScheduleError: it is no order; an action is unknown, on the wrong submesh, missing, repeated, or, where
        something accumulates, out of microbatch order on its stage; or the rows wait for each other in a circle,
        which is named.

    Example:
      >>> from manymesh.schedules import GPipe
      >>> check(GPipe().order((0, 1), 3))
      (3, 3)
    """
    require_order("check", order)
    rows_of_actions(order.rows)
    _check_rows(order)
    for submesh, row in enumerate(order.rows):
        for action in row:
            _check_action(order, submesh, action, labels)
    if order.backward or accumulates:
        _check_microbatches(order, labels)
    else:
        _check_once(order, labels)
    check_progress(order, labels=labels)
    return live_activations(order)


def check_progress(order: Order, *, labels: Callable[[Action], str] = str) -> tuple[Action, ...]:
    """Prove that the rows never wait for each other in a circle.

    Args:
      order: an order with each action once, on its stage's submesh.
      labels: how messages name an action.

    Returns:
      One order of all actions in which every action follows its producers.

    Raises:
      ScheduleError: the rows deadlock; the message names the circle.
    """
    walked = walk(order)
    if len(walked.actions) == sum(map(len, order.rows)):
        return walked.actions
    raise ScheduleError(_describe(_circle(order, walked.positions), order, labels))


def _check_rows(order: Order) -> None:
    expected = max(order.placement, default=-1) + 1
    if order.num_submeshes != expected:
        raise ScheduleError(
            f"the schedule has {order.num_submeshes} rows, but placement {order.placement} has {expected} submeshes; "
            "give one row per submesh."
        )


def _check_action(order: Order, submesh: int, action: Action, labels: Callable[[Action], str]) -> None:
    kinds = ("F", "B", "W") if order.splits_backward else ("F", "B") if order.backward else ("F",)
    where = f"submesh {submesh} lists {labels(action)}"
    if action.kind not in kinds:
        raise ScheduleError(f"{where}, but this program has only {', '.join(kinds)} actions; remove it.")
    if action.stage >= order.num_stages:
        raise ScheduleError(f"{where}, but stages are numbered 0 to {order.num_stages - 1}.")
    if action.microbatch >= order.num_microbatches:
        raise ScheduleError(f"{where}, but microbatches are numbered 0 to {order.num_microbatches - 1}.")
    if order.placement[action.stage] != submesh:
        home = order.placement[action.stage]
        raise ScheduleError(f"{where}, but stage {action.stage} is on submesh {home}; move it to row {home}.")


def _check_microbatches(order: Order, labels: Callable[[Action], str]) -> None:
    """Each stage runs each kind of action for microbatch 0, 1, ... to the last."""
    found: dict[str, list[int]] = {kind: [0] * order.num_stages for kind in ("F", "B", "W")}
    for submesh, row in enumerate(order.rows):
        for action in row:
            expected = found[action.kind][action.stage]
            if action.microbatch < expected:
                raise ScheduleError(f"submesh {submesh} lists {labels(action)} twice; remove one of them.")
            if action.microbatch > expected:
                earlier = Action(action.kind, action.stage, expected)
                if earlier not in row:
                    raise _missing(submesh, earlier, labels)
                raise ScheduleError(
                    f"submesh {submesh} lists {labels(action)} before {labels(earlier)}; keep the microbatches of a "
                    f"stage in order, because {'gradients' if order.backward else 'results'} accumulate in that order."
                )
            found[action.kind][action.stage] += 1
    for kind in ("F", "B", "W") if order.splits_backward else ("F", "B") if order.backward else ("F",):
        for stage, count in enumerate(found[kind]):
            if count < order.num_microbatches:
                raise _missing(order.placement[stage], Action(kind, stage, count), labels)


def _check_once(order: Order, labels: Callable[[Action], str]) -> None:
    """Each stage of a forward-only program runs each microbatch once, in any order."""
    for submesh, row in enumerate(order.rows):
        for action, times in Counter(row).items():
            if times > 1:
                raise ScheduleError(f"submesh {submesh} lists {labels(action)} twice; remove one of them.")
    for stage, submesh in enumerate(order.placement):
        for microbatch in range(order.num_microbatches):
            if (action := Action("F", stage, microbatch)) not in order.rows[submesh]:
                raise _missing(submesh, action, labels)


def _missing(submesh: int, action: Action, labels: Callable[[Action], str]) -> ScheduleError:
    return ScheduleError(
        f"submesh {submesh} never lists {labels(action)}; list each action of its stages for each microbatch once."
    )


def _circle(order: Order, positions: tuple[int, ...]) -> list[tuple[Action, Action]]:
    """One deadlock: heads of unfinished rows, each with a result that it reads and that has not been made.

    That result comes from an unfinished row, behind its head or as its head; so heads lead to heads until one
    comes twice. The result that an entry awaits is on the submesh of the next entry.
    """
    ran = {action for row, position in zip(order.rows, positions, strict=True) for action in row[:position]}
    submesh = next(s for s, row in enumerate(order.rows) if positions[s] < len(row))
    heads: dict[int, tuple[Action, Action]] = {}
    while submesh not in heads:
        head = order.rows[submesh][positions[submesh]]
        awaited = next(p for p in producers(order, head) if p not in ran)
        heads[submesh] = (head, awaited)
        submesh = order.placement[awaited.stage]
    seen = list(heads)
    return [heads[s] for s in seen[seen.index(submesh) :]]


def _describe(circle: list[tuple[Action, Action]], order: Order, labels: Callable[[Action], str]) -> str:
    """The circle from result to result, the earliest stage first, and why each waits for the next."""
    start = min(range(len(circle)), key=lambda k: (circle[k][1].stage, "FBW".index(circle[k][1].kind)))
    circle = circle[start:] + circle[:start]
    reasons = []
    for (_, result), (head, awaited) in zip(circle, [*circle[1:], circle[0]], strict=True):
        reads = f"{labels(head)}, which reads {labels(awaited)}, before {labels(result)}"
        submesh = order.placement[head.stage]
        reasons.append(
            f"{labels(head)} reads {labels(awaited)}" if head == result else f"submesh {submesh} lists {reads}"
        )
    named = [awaited for _, awaited in circle] if len(circle) > 1 else [*circle[0]]
    text = " waits for ".join(labels(action) for action in [*named, named[0]])
    return f"the schedule deadlocks: {text}. In it {', and '.join(reasons)}; move one of them so that the circle opens."
