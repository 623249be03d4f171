"""Numbering the fragments of a loop's body as pipeline stages."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from .._implicit import Iteration, iterations_of, path_of
from ._cluster import Cluster
from ._scopes import is_rematerialised


def number_stages(
    order: list[Cluster],
    preds: dict[Cluster, set[Cluster]],
    *,
    each_task: bool = False,
    joined: bool = False,
    turned: bool = False,
) -> tuple[dict[Cluster, int], tuple[int, ...], tuple[Cluster, Cluster] | None]:
    """Stage of each cluster of a loop's body.

    A stage is what one submesh does between two crossings of the forward pass: a chain that visits
    submeshes 0, 1, 0, 1 has four stages. A backward cluster belongs to the stage of its task's forward.

    Args:
      order: clusters of the body, topological.
      preds: what each depends on.
      each_task: whether every task is a stage of its own, also where the next one runs on the same submesh.
      joined: whether a stage that can wait is put off to be one with a later stage of its submesh.
      turned: whether the stage in the middle becomes two, with half of its tasks each, as where a V turns.

    Returns:
      The stage of each cluster, the submesh of each stage, and the first (maker, reader) that does not go up the stages
      in the forward pass, or down in the backward pass; None if all do, so that a pipeline schedule applies.
    """
    forward = [c for c in order if not c.backward]
    main = forward or order  # a body that is all backward is scheduled like a forward one
    hops: dict[Cluster, int] = {}
    readers: defaultdict[Cluster, list[Cluster]] = defaultdict(list)
    for c in main:
        before = preds[c] & hops.keys()
        for p in before:
            readers[p].append(c)
        hops[c] = max(
            (hops[p] + (p.submesh != c.submesh or (each_task and c.task is not None)) for p in before), default=0
        )
    for c in reversed(main):  # what only prepares arguments, as a state's layers, is of the stage that takes them
        if c.task is None and readers[c]:
            hops[c] = max(hops[c], min(hops[r] - (r.submesh != c.submesh) for r in readers[c]))
    if joined:
        _join(main, readers, hops)
    if turned:
        _turn(main, preds, hops)
    keys = sorted({(hops[c], c.submesh or 0) for c in main})
    number = {k: i for i, k in enumerate(keys)}
    stage = {c: number[hops[c], c.submesh or 0] for c in main}
    placement = tuple(s for _, s in keys)
    of_forward = _stages_of_forward(order, preds, stage)
    on_submesh: dict[int, list[int]] = defaultdict(list)
    for i, s in enumerate(placement):
        on_submesh[s].append(i)
    extra = list(placement)
    for c in order:
        if c in stage:
            continue
        assert c.submesh is not None, "a body holds no loops"
        # A task that says no submesh may be elsewhere in the backward pass.
        if c in of_forward and placement[of_forward[c]] == c.submesh:
            stage[c] = of_forward[c]
            continue
        bound = min((stage[p] for p in preds[c] if p.backward), default=len(extra) - 1)
        here = on_submesh[c.submesh]
        fitting = [i for i in here if i <= bound] or here
        if not fitting:  # a submesh that only the backward pass visits
            extra.append(c.submesh)
            on_submesh[c.submesh].append(len(extra) - 1)
            fitting = [len(extra) - 1]
        stage[c] = max(fitting)
    _compute_again_for_the_first_reader(order, preds, stage)
    placement = tuple(extra)
    position = {c: i for i, c in enumerate(order)}
    against = next(
        (
            (p, c)
            for c in order
            for p in sorted(preds[c], key=position.__getitem__)
            if p.phase == c.phase
            and ((stage[p] > stage[c]) if not c.backward or not forward else (stage[p] < stage[c]))
        ),
        None,
    )
    return stage, placement, against


def _compute_again_for_the_first_reader(
    order: list[Cluster], preds: Mapping[Cluster, set[Cluster]], stage: dict[Cluster, int]
) -> None:
    """What is computed again belongs to the first of the backward passes that read it, if a later stage's is one of them."""
    for c in reversed(order):
        for p in preds[c]:
            if p.phase == 1 and c.phase and p.submesh == c.submesh and all(is_rematerialised(n.stack) for n in p.nodes):
                stage[p] = max(stage[p], stage[c])


def _join(main: list[Cluster], readers: Mapping[Cluster, list[Cluster]], hops: dict[Cluster, int]) -> None:
    """Puts off what nobody reads before its submesh has a later stage: the two are one.

    A model that another one has to be compared with, or a task that looks up what a later stage reads, too, would be a
    stage at the start of the pipeline, and its submesh would have two.
    """
    stages: dict[tuple[int, int | None], list[Cluster]] = defaultdict(list)
    for c in main:
        stages[hops[c], c.submesh].append(c)
    for h, s in sorted(stages, key=lambda key: -key[0]):
        members = stages[h, s]
        others = {r for c in members for r in readers.get(c, ())}.difference(members)
        latest = min((hops[r] - (r.submesh != s) for r in others), default=math.inf)
        later = [k for k, at in stages if at == s and h < k <= latest and stages[k, at]]
        if later:
            stages[min(later), s] += members
            hops.update(dict.fromkeys(members, min(later)))
            stages[h, s] = []


def _turn(main: list[Cluster], preds: Mapping[Cluster, set[Cluster]], hops: dict[Cluster, int]) -> None:
    """Cuts the stage in the middle in two."""
    middle = max(hops.values()) // 2
    inside = [c for c in main if hops[c] == middle]
    tasks = [c for c in inside if c.task is not None]
    second = set(tasks[len(tasks) // 2 :])
    for c in inside:
        if not second.isdisjoint(preds[c]):
            second.add(c)
    hops.update({c: h + 1 for c, h in hops.items() if h > middle or c in second})


def _stages_of_forward(
    order: list[Cluster], preds: Mapping[Cluster, set[Cluster]], stage: dict[Cluster, int]
) -> dict[Cluster, int]:
    """The stage of the forward pass that each backward cluster of a task belongs to.

    The calls of a task in a scan have one mark: the iteration tells them apart. So has what an inner gradient transposes: of
    these the last one is the first that the backward pass comes to. Where some have no backward pass, it is the last one
    that kept something for it.
    """
    forward: defaultdict[str, list[int]] = defaultdict(list)
    in_iteration: defaultdict[tuple[str | None, tuple[Iteration, ...]], list[int]] = defaultdict(list)
    for c in order:
        if c.task is not None and c in stage:
            forward[c.task].append(stage[c])
            in_iteration[c.task, _iterations(c)].append(stage[c])
    passes = [c for c in order if c.task in forward and c not in stage]
    found: dict[Cluster, int] = {}
    for c in passes:
        calls = in_iteration.get((c.task, _iterations(c)), [])
        if c.phase == 1 and len(calls) == 1:
            found[c] = calls[0]
    count = Counter(c.task for c in passes if c.phase == 1 and c not in found)
    seen: Counter[str | None] = Counter()
    for c in passes:
        assert c.task is not None, "it has the mark of a forward pass"
        if c.phase == 1 and c not in found:
            calls = forward[c.task]
            each = math.ceil(count[c.task] / len(calls))  # several where jax.checkpoint computes the forward pass again
            keeps = [stage[p] for p in preds[c] if p.task == c.task and p in stage]
            some = keeps and count[c.task] < len(calls)
            found[c] = max(keeps) if some else calls[-1 - seen[c.task] // each]
            seen[c.task] += 1
    # Weight gradients are split off the latest backward pass of their task.
    last: dict[str | None, int] = {}
    for c in sorted(passes, key=lambda c: c.position):
        if c.phase == 1:
            last[c.task] = found[c]
        else:
            found[c] = last.get(c.task, forward[str(c.task)][-1])
    return found


def _iterations(c: Cluster) -> tuple[Iteration, ...]:
    """The iterations of unrolled scans that a cluster's task is in."""
    node = next(n for n in c.nodes if n.task == c.task)
    return iterations_of(path_of(node.stack))
