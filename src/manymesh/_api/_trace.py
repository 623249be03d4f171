"""The first stage: a function traced to one jaxpr, with the meaning of its marks."""

from __future__ import annotations

from typing import Any

import jax

from .. import _compat
from .._collector import collector_paused
from .._errors import ArgumentError, AxisError
from .._implicit import Matcher, registered
from .._mark import Recording, recording
from .._notes import on_axis_names, on_stacked_stages, wants_mesh
from .._stands_for import stands_for
from .._types import PyTree
from ._arguments import REFERENCE, Arguments, abstract
from ._boxes import carried, is_foreign_box, with_parameter
from ._closed_over import check_closed_over
from ._lost import lost_changes
from ._moves import read_moves
from ._results import check_results
from ._step import Step
from ._traced import Traced

NO_MESH = (
    "mm.jit({}): outside of tasks there is no mesh in context, `jax.set_mesh` included, for the step runs on several; write "
    "`mm.with_sharding_constraint(x, spec)`, which means the submesh where x ends up, or name a submesh: a `NamedSharding` on it "
    "for `jax.device_put`, `mesh=` for `jax.shard_map`; or do it in a function that is wrapped as a task (a scope that is "
    "registered is one only when all has been traced)"
)


def trace(step: Step, given: Arguments) -> Traced:
    """Traces a step for one call's arguments."""
    with _compat.without_mesh():
        return _trace(step, given)


def _trace(step: Step, given: Arguments) -> Traced:
    statics = dict(given.static)
    record = Recording(implicit=Matcher(registered()))
    paths = _compat.leaves_with_paths((given.dyn_args, given.dyn_kwargs))
    avals = [abstract(step.name, path, x, given) for path, x in paths]
    out_tree: list[Any] = []

    def flat_fun(*leaves: PyTree) -> list[Any]:
        args, kwargs = jax.tree.unflatten(given.treedef, leaves)
        if record.implicit:
            args, kwargs = jax.tree.map(carried, (args, kwargs), is_leaf=is_foreign_box)
        full = tuple(statics.get(k, a) for k, a in enumerate(args))
        kwargs = {**kwargs, **{k: v for k, v in statics.items() if isinstance(k, str)}}
        before = jax.tree.leaves((args, kwargs))
        out = step.fun(*full, **kwargs)
        out_leaves, tree = jax.tree.flatten(out)
        check_results(step.name, tree, out_leaves)
        if (finding := lost_changes(before, (full, kwargs), out_leaves)) is not None:
            record.findings[finding] = ArgumentError
        out_tree.append(tree)
        return out_leaves

    flat_fun.__name__ = flat_fun.__qualname__ = step.name
    stands_for(flat_fun, step.fun, [path for path, _ in paths])
    try:
        with recording(record), jax.disable_jit(False), collector_paused():
            closed, shapes = jax.make_jaxpr(flat_fun, return_shape=True)(*avals)
    except AxisError as error:
        raise with_parameter(error, given) from None
    except (RuntimeError, ValueError) as error:
        if not any(note.startswith("in task ") for note in getattr(error, "__notes__", ())):
            if wants_mesh(error):
                error.add_note(NO_MESH.format(step.name))
            elif note := on_stacked_stages(error, record.tasks.values()):
                error.add_note(note)
        raise
    except NameError as error:
        if (note := on_axis_names(error)) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise
    if (leak := _compat.escaped(closed.consts)) is not None:
        leak.add_note(f"mm.jit({step.name}): return the value from the task that makes it, and use it from there")
        raise leak
    if any(map(_compat.is_ref, closed.consts)):
        raise ArgumentError(f"mm.jit({step.name}): the step closes over {REFERENCE}")
    check_closed_over(step.name, closed)
    closed, moved, memories = read_moves(_compat.without_refs(_compat.without_high(closed)), record)
    step.report(record, None)
    return Traced(step, given, record, closed, shapes, out_tree[-1], flat_fun, moved, _memories=memories)
