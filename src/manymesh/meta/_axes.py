"""The metadata of a box: one name a dimension, and what it takes to resolve them.

A box is a value and an `Axes`. `Axes` are shared: every box with the same names, mesh and rules
holds the same object, so that ten thousand boxes carry a handful of them, and comparing the
structure of two boxed trees compares objects by identity first.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._errors import ArgumentError, MetadataError

PARTITION_NAME = "partition_name"
"""Key in the parameters of a transformation under which the name of the new axis is given."""

Names: TypeAlias = tuple[Any, ...]
"""One entry a dimension: a name, a tuple of names, None, or ``PartitionSpec.UNCONSTRAINED``."""

AnyMesh: TypeAlias = Mesh | AbstractMesh


class Axes:
    """Names, mesh and rules of a box; immutable, and one object for equal contents.

    Attributes:
      names: one entry for each leading dimension.
      mesh: the mesh to constrain on; None for the surrounding one.
      rules: the box's own logical rules; None for the surrounding ones.
      logical: whether the names are logical (rules lead to device axes) or device axes themselves.
      lenient: whether a logical name for which there is no rule is a device axis. Flax NNX means it so.
      padded: lengths that `names` had before `with_axis` filled a gap with None, innermost last.
        `without_axis` needs them to be an exact inverse; they are no part of equality.
      spec: the names as a `PartitionSpec`, unresolved.
      last: scratch space of a walk that renames: its token and what it made of these metadata.
    """

    __slots__ = ("__weakref__", "_hash", "last", "lenient", "logical", "mesh", "names", "padded", "rules", "spec")

    names: Names
    mesh: AnyMesh | None
    rules: tuple[Any, ...] | None
    logical: bool
    lenient: bool
    padded: tuple[int, ...]
    spec: PartitionSpec
    last: tuple[object, Any]
    _hash: int

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Axes):
            return NotImplemented
        return (
            self.names == other.names
            and self.mesh == other.mesh
            and self.rules == other.rules
            and self.logical == other.logical
            and self.lenient == other.lenient
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        parts = [repr(self.names)]
        if self.mesh is not None:
            parts.append(f"mesh={dict(self.mesh.shape)}")
        if self.rules is not None:
            parts.append(f"rules={self.rules}")
        return ", ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return make_axes, (self.names, self.mesh, self.rules, self.logical, self.padded, self.lenient)


_shared: weakref.WeakValueDictionary[Any, Axes] = weakref.WeakValueDictionary()


def make_axes(
    names: Names,
    mesh: AnyMesh | None = None,
    rules: tuple[Any, ...] | None = None,
    logical: bool = False,
    padded: tuple[int, ...] = (),
    lenient: bool = False,
) -> Axes:
    """The one `Axes` with these contents, which must be checked and hashable already."""
    key = (names, mesh, rules, logical, lenient, padded)
    axes = _shared.get(key)
    if axes is None:
        axes = Axes()
        axes.names, axes.mesh, axes.rules, axes.logical, axes.lenient, axes.padded = key
        axes.spec = PartitionSpec(*names)
        axes.last = (None, None)
        axes._hash = hash(key[:-1])
        axes = _shared.setdefault(key, axes)
    return axes


def check_mesh(where: str, mesh: object) -> None:
    """Refuses what is no mesh, such as the name of an axis."""
    if not isinstance(mesh, AnyMesh):
        raise ArgumentError(f"{where}: mesh has to be a jax.sharding.Mesh, found {type(mesh).__name__} {mesh!r:.80}")


def check_names(names: Any, where: object) -> Names:
    """Names as a tuple with one entry a dimension.

    Args:
      names: an iterable of names, tuples of names, None and ``PartitionSpec.UNCONSTRAINED``.
      where: what the names are for, which begins every message.

    Raises:
      MetadataError: ``names`` is None, a string, or has an entry of another kind.
    """
    if type(names) is not tuple:
        if isinstance(names, str):
            raise MetadataError(
                f"{where}: names must have one entry a dimension, found the string {names!r}; write ({names!r},)"
            )
        if not isinstance(names, Iterable):
            raise MetadataError(
                f"{where}: names must be a tuple with one entry a dimension, found {names!r}; "
                "write () for a value that is replicated"
            )
        names = tuple(names)
    if any(type(n) is not str and n is not None for n in names):
        names = tuple(_check_name(n, where) for n in names)
    return names  # type: ignore[no-any-return]


def _check_name(name: Any, where: object) -> Any:
    if name is None or isinstance(name, str) or name is PartitionSpec.UNCONSTRAINED:
        return name
    if isinstance(name, (tuple, list)) and all(isinstance(part, str) for part in name):
        return tuple(name)
    raise MetadataError(
        f"{where}: an entry of names must be a string, a tuple of strings, None or PartitionSpec.UNCONSTRAINED, "
        f"found {name!r}"
    )


def axis_name(params: Mapping[Any, Any] | None, where: object) -> Any:
    """The name that a transformation gives to its axis; None where it says that it has none.

    Raises:
      MetadataError: it says nothing. Where Flax is loaded, the error is also Flax's `PartitioningUnspecifiedError`.
    """
    if params is None or PARTITION_NAME not in params:
        raise _unspecified()(
            f"{where}: a transformation adds or removes an axis and does not say what the axis is called; pass "
            f"metadata_params={{PARTITION_NAME: name}} to nn.scan or nn.vmap (PARTITION_NAME is {PARTITION_NAME!r}), or "
            "None in place of the name for an axis that is not sharded; nn.remat_scan takes no name: nn.scan of nn.remat does"
        )
    return params[PARTITION_NAME]


_unspecified_error: list[type[MetadataError]] = []


def _unspecified() -> type[MetadataError]:
    """The error for an axis without a name; Flax's own too, if Flax is loaded by whoever uses us."""
    flax: Any = sys.modules.get("flax.errors")
    if flax is None:
        return MetadataError
    if not _unspecified_error:

        class PartitioningUnspecifiedError(MetadataError, flax.PartitioningUnspecifiedError):  # type: ignore[misc]
            """The axis that a transformation adds or removes has no name."""

            def __init__(self, message: str) -> None:
                Exception.__init__(self, message)

        _unspecified_error.append(PartitioningUnspecifiedError)
    return _unspecified_error[0]


def with_axis(axes: Axes, index: int, name: Any, rank: int | None, where: object) -> Axes:
    """Inserts an axis.

    Args:
      axes: the metadata before.
      index: position of the new axis among the dimensions after the insertion; negative counts from their end.
      name: name of the new axis; None leaves it unnamed.
      rank: how many dimensions the value has, None if unknown. A transformation stacks values before it
        adds the axis, so a value with more dimensions than names counts as having the new one already.
      where: the box, for messages.

    Raises:
      MetadataError: a negative index before the first dimension, or a name of the wrong kind.
    """
    name = _check_name(name, where)
    names, padded = axes.names, axes.padded
    total = max(len(names) + 1, rank or 0)
    position = index + total if index < 0 else index
    if position < 0:
        raise MetadataError(
            f"{where}: add_axis at index {index}, but the result has {total} dimensions; "
            f"use an index from {-total} on, the position of the new axis among the dimensions of the result"
        )
    if position > len(names):
        padded = (*padded, len(names))
        names = names + (None,) * (position - len(names))
    elif padded:
        padded = tuple(length + 1 if position <= length else length for length in padded)
    names = (*names[:position], name, *names[position:])
    return make_axes(names, axes.mesh, axes.rules, axes.logical, padded)


def without_axis(axes: Axes, index: int, name: Any, rank: int | None, where: object) -> Axes:
    """Removes an axis; the inverse of `with_axis` with the same arguments.

    Args:
      axes: the metadata before.
      index: position of the axis to remove; negative counts from the end.
      name: name that the axis is expected to have.
      rank: how many dimensions the value has, None if unknown.
      where: the box, for messages.

    Raises:
      MetadataError: there is no such axis, or it has another name.
    """
    names, padded = axes.names, axes.padded
    total = max(len(names), rank or 0)
    position = index + total if index < 0 else index
    if position < 0:
        raise MetadataError(f"{where}: remove_axis at index {index}, but there are only {total} dimensions")
    if position >= len(names):
        if name is None:
            return axes  # dimensions past the last name are unnamed
        raise MetadataError(
            f"{where}: remove_axis expected axis {name!r} at index {index}, but names {names} end before it; "
            f"pass the {PARTITION_NAME} and the index that add_axis got"
        )
    if names[position] != _check_name(name, where):
        expected = f"axis {name!r}" if name is not None else f"an unnamed axis ({PARTITION_NAME} is None)"
        raise MetadataError(
            f"{where}: remove_axis expected {expected} at index {index}, found {names[position]!r} in names {names}; "
            f"pass the {PARTITION_NAME} and the index that add_axis got"
        )
    names = names[:position] + names[position + 1 :]
    if padded:
        if position == len(names) and all(n is None for n in names[padded[-1] :]):
            names, padded = names[: padded[-1]], padded[:-1]
        else:
            padded = tuple(length - 1 if position < length else length for length in padded)
    return make_axes(names, axes.mesh, axes.rules, axes.logical, padded)
