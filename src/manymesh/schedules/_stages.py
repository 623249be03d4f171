"""The order of one stage's actions: warm-up, one forward one backward, cool-down.

Most published schedules give each stage the same shape and differ in two numbers. The
*warm-up* is how many forwards run before forwards and backwards alternate; it bounds the
activations that wait for their backward. The *hold* is how many weight gradients are kept
back, to fill the time at the end in which the stage would only wait.

A set of such sequences, one per stage, cannot deadlock so long as the warm-up does not
grow from a stage to the next. ``B(s, m)`` waits, in its own stage's order, for forwards up
to ``m + warmup[s]``; the backward ``B(s+1, m)`` that feeds it waits for forwards up to
``m + warmup[s+1]``, which stage ``s`` has run already when ``warmup[s+1] <= warmup[s]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ._types import Action


def hops_after(placement: Sequence[int]) -> list[int]:
    """How often the dataflow changes submesh after each stage.

    Args:
      placement: ``int[stage]``, the submesh of each stage.

    Returns:
      ``int[stage]``; for a chain of one stage a submesh, ``num_stages - 1 - stage``. Stages
      side by side on one submesh count as one, so they keep no activations in vain.

    Example:
      >>> hops_after((0, 1, 2)), hops_after((0, 0, 1))
      ([2, 1, 0], [1, 1, 0])
    """
    hops = [0] * len(placement)
    for stage in range(len(placement) - 2, -1, -1):
        hops[stage] = hops[stage + 1] + (placement[stage] != placement[stage + 1])
    return hops


def hops_before(placement: Sequence[int]) -> list[int]:
    """How often the dataflow changes submesh up to each stage.

    Args:
      placement: ``int[stage]``, the submesh of each stage.

    Returns:
      ``int[stage]``; for a chain of one stage a submesh, the stage's number.
    """
    return hops_after(placement[::-1])[::-1]


def one_forward_one_backward(stage: int, num_microbatches: int, warmup: int, hold: int | None = None) -> list[Action]:
    """Forwards, then one forward and one backward in turn, then backwards.

    Args:
      stage: the stage's number.
      num_microbatches: the number of microbatches.
      warmup: forwards before the first pair of a forward and a backward; a warm-up of
        `num_microbatches` or more runs all forwards first.
      hold: weight gradients to keep back behind their backwards; None leaves the backward whole.

    Returns:
      The stage's actions in order.
    """
    return list(_actions(stage, num_microbatches, min(warmup, num_microbatches), hold))


def _actions(stage: int, num_microbatches: int, warmup: int, hold: int | None) -> Iterator[Action]:
    for microbatch in range(warmup):
        yield Action("F", stage, microbatch)
    for microbatch in range(num_microbatches):
        if microbatch + warmup < num_microbatches:
            yield Action("F", stage, microbatch + warmup)
        yield Action("B", stage, microbatch)
        if hold is not None and microbatch >= hold:
            yield Action("W", stage, microbatch - hold)
    if hold is not None:
        for microbatch in range(max(0, num_microbatches - hold), num_microbatches):
            yield Action("W", stage, microbatch)


def forwards(stage: int, num_microbatches: int) -> list[Action]:
    """All forwards of a stage, which is all of a forward-only program."""
    return [Action("F", stage, microbatch) for microbatch in range(num_microbatches)]
