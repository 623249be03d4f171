"""What is added to errors that the function of a task raises: which task, and what to write where JAX cannot know it."""

from __future__ import annotations

from collections.abc import Iterable

from . import _compat
from ._task import Task


def note_task(error: Exception, described: Task, *, in_step: bool) -> None:
    """Says in which task an error was raised, and what to write where JAX cannot know it.

    Args:
      error: what the function of a task raised.
      described: the task.
      in_step: whether it is part of a step that is traced; else it is a plain function.
    """
    words = f"in task {described.name!r}"
    if isinstance(error, ValueError) and "of type Auto or Manual" in str(error):
        words += (
            ", in which all axes are Auto, also where those of its mesh are Explicit: make it "
            "jax.sharding.explicit_axes(fun, in_sharding=...), whose specs say how its arguments lie; or write "
            "mm.with_sharding_constraint(x, spec) in place of out_sharding= and jax.reshard, and XLA finds what is between"
        )
    if isinstance(error, ValueError) and "Context mesh cannot be empty" in str(error):
        words += (
            ", which outside of mm.jit is a plain function, and has Explicit axes: these want a mesh, as from "
            "jax.set_mesh(mesh) around the call"
        )
    if isinstance(error, ValueError) and "should match the aval mesh" in str(error):
        words += (
            ", which closes over an array that lies on a mesh with Explicit axes: pass it as an argument of the task, which "
            "takes arrays from anywhere"
        )
    if isinstance(error, ValueError) and "is not found in mesh" in str(error) and described.mesh is not None:
        axes = tuple(described.mesh.axis_names)
        if given := [axis for vmapped in _compat.vmapped() for axis in vmapped]:
            words += (
                f" under jax.vmap with spmd_axis_name {', '.join(map(repr, given))}, which has to name device axes of every task "
                f"that constrains a batched value; those of this one are {axes}"
            )
        else:
            words += (
                f", whose device axes are {axes}: logical names are what mm.with_sharding_constraint(x, names) takes in place of "
                "jax.lax.with_sharding_constraint, and flax.linen.with_logical_partitioning in place of with_partitioning"
            )
    for each in (words, _on_meshes(error, described, in_step), on_axis_names(error)):
        if each and each not in getattr(error, "__notes__", ()):
            error.add_note(each)


def on_axis_names(error: Exception) -> str:
    """What to write where a function is over an axis that jax.pmap would name, and JAX says to write shard_map around it."""
    if not isinstance(error, NameError) or "unbound axis name" not in str(error):
        return ""
    return (
        "in a step and its tasks values are whole, whichever devices share them, and a mean over the batch is one over all of "
        "it: leave out `jax.lax.pmean` and `psum` over the axis of a `jax.pmap`, and `axis_name=` of layers such as BatchNorm; "
        "a collective by hand is in `jax.shard_map` in a task, without `mesh=` (see docs: howto/migrate)"
    )


def on_stacked_stages(error: Exception, tasks: Iterable[Task]) -> str:
    """What to write where stages are stacked under vmap, around a scan, and its axis is no axis of the tasks in there."""
    if "is not found in mesh" not in str(error) or not _compat.is_of_vmap(error):
        return ""
    meshes = [mesh for task in tasks for mesh in (task.meshes or (task.mesh,)) if mesh is not None]
    axes = ", ".join(sorted({repr(axis) for mesh in meshes for axis in mesh.axis_names}))
    return (
        f"spmd_axis_name of a jax.vmap (flax.linen.vmap) around tasks has to be an axis of their submeshes, one of {axes}; the "
        "axis of the stages is none: leave out the vmap over stacked stages, and scan over all their layers, which tasks with a "
        "list of submeshes (mesh=[...]) divide (see docs: howto/migrate)"
    )


def wants_mesh(error: Exception) -> bool:
    """Whether an error of JAX says to set a mesh in context, which in a step helps nothing."""
    words = ("requires a non-empty mesh", "Please set a mesh via", "The context mesh cannot be empty")
    return any(each in str(error) for each in words)


def _on_meshes(error: Exception, described: Task, in_step: bool) -> str:
    """What to write in a task where JAX says to set a mesh."""
    if not wants_mesh(error) or (described.mesh is None and not in_step):
        return ""
    if described.mesh is None:
        return f"task {described.name!r} says no mesh, and `jax.set_mesh` says nothing in a step: give the task `mesh=`"
    if in_step:
        return (
            "write `mm.with_sharding_constraint(x, spec)` in place of `jax.device_put(x, spec)` and of shardings of "
            "`jax.jit`: in a task it means the submesh, and `jax.set_mesh` says nothing in a step"
        )
    return (
        "outside of mm.jit, and in the reference mode, a task is a plain function and has no mesh: write "
        "`mm.with_sharding_constraint(x, spec)`, which is x then, in place of `jax.lax.with_sharding_constraint`; what cannot do "
        "without a mesh, as `jax.shard_map`, finds that of `jax.set_mesh(mesh)` around the call"
    )
