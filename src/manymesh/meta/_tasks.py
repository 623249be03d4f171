"""Names read by the rules of the task that a parameter is in.

In a task, `Partitioned` and `LogicallyPartitioned` boxes mean what the task's ``logical_axes`` say of their names, then
what the rules of the box say, cut to the submesh, then the device axes of these names. Functions that look at a tree from
outside get the tasks by the paths of their parameters, and come to the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from jax.sharding import Mesh
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from .._errors import ArgumentError
from ._axes import AnyMesh, Axes, check_mesh, make_axes
from ._paths import format_path
from ._rules import Rules, rules_in_task


class TaskLike(Protocol):
    """What is read of a `manymesh.Task`."""

    @property
    def mesh(self) -> Mesh | None: ...
    @property
    def logical_axes(self) -> tuple[Any, ...] | None: ...
    @property
    def has_named_axes(self) -> bool: ...


TasksLike: TypeAlias = "TaskLike | Mapping[str, TaskLike] | Sequence[tuple[str, TaskLike]]"


@dataclass(frozen=True)
class Place:
    """Where a leaf is and how its names are read there.

    Attributes:
      mesh: the mesh.
      axes: its metadata, as the rules know them.
      rules: the rules of the task; None for a leaf in no task, which is read as without tasks.
    """

    mesh: AnyMesh
    axes: Axes
    rules: Rules | None


class Tasks:
    """Tasks by patterns of paths.

    Args:
      tasks: a task for all leaves, or pairs of a regular expression and a task: the expression matches whole
        consecutive components of a path, joined by slashes. The first that matches counts.
      mesh: the mesh of leaves in no task; None if there has to be none.
      where: the function that was called, for messages.
    """

    def __init__(self, tasks: TasksLike | None, mesh: AnyMesh | None, where: str) -> None:
        pairs: Iterable[Any] = ()
        if isinstance(tasks, Mapping):
            pairs = tasks.items()
        elif tasks is not None:
            several = isinstance(tasks, Iterable) and not hasattr(tasks, "has_named_axes")
            pairs = list(tasks) if several else [(".*", tasks)]  # type: ignore[arg-type]  # it is an iterable
        self._tasks: list[tuple[re.Pattern[str], TaskLike]] = []
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2 or not hasattr(pair[1], "has_named_axes"):
                raise ArgumentError(
                    f"{where}: tasks has to be a manymesh.Task, or a mapping from patterns of paths to tasks; found {pair!r:.120}"
                )
            self._tasks.append((re.compile(pair[0]), pair[1]))
        self._mesh = mesh
        self._where = where
        if mesh is not None:
            check_mesh(where, mesh)
        if mesh is None and not self._tasks:
            raise ArgumentError(f"{where}: give the mesh, or tasks= that say where what is")

    @property
    def meshes(self) -> tuple[AnyMesh, ...]:
        """The mesh that was given, or those of the tasks."""
        own = (task.mesh for _, task in self._tasks if task.mesh is not None)
        return (self._mesh,) if self._mesh is not None else tuple(dict.fromkeys(own))

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def place(self, path: tuple[Any, ...], axes: Axes, others: Rules) -> Place:
        """Where a leaf is.

        Args:
          path: its keys.
          axes: its metadata.
          others: rules for logical names that its task does not know.

        Raises:
          ArgumentError: it is in no task, and there is no mesh for it.
        """
        words = [_word(key) for key in path]
        windows = {"/".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)} or {""}
        for pattern, task in self._tasks:
            if task.mesh is not None and any(map(pattern.fullmatch, windows)):
                return Place(task.mesh, *_in_task(task, task.mesh, axes, others))
        if self._mesh is None:
            raise ArgumentError(
                f"{self._where}: {format_path(path)} is in none of the tasks {[p.pattern for p, _ in self._tasks]}; add a "
                "pattern that matches a part of its path, or give the mesh for what is in no task"
            )
        return Place(self._mesh, axes, None)


def _in_task(task: TaskLike, mesh: Mesh, axes: Axes, others: Rules) -> tuple[Axes, Rules]:
    names = make_axes(axes.names, None, None, logical=True)
    if not task.has_named_axes:
        return names, tuple((name, None) for name in axes.names if isinstance(name, str))
    device_axes = tuple(mesh.axis_names)
    rules = rules_in_task(tuple(task.logical_axes or ()), others if axes.logical else (), device_axes)
    return names, (*rules, *((axis, axis) for axis in device_axes))


def _word(key: Any) -> str:
    match key:
        case DictKey(key=word) | FlattenedIndexKey(key=word) | GetAttrKey(name=word) | SequenceKey(idx=word):
            return str(word)
    return str(key)
