"""`Partitioned`: a box whose names are device axes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey

from .._types import PyTree
from ._axes import AnyMesh, Axes, axis_name, check_names, make_axes, with_axis, without_axis
from ._box import COMPACT, AxisMetadata
from ._constrain import check_axes, constrain, is_active
from ._paths import describe, rank_of

A = TypeVar("A")
P = ParamSpec("P")
Self = TypeVar("Self", bound="Partitioned[Any]")

_KEY = GetAttrKey("value")


class Partitioned(AxisMetadata[A]):
    """A value with the device axis that shards each of its dimensions.

    A pytree node with the value as its only child, under the key path ``.value``; names and mesh are part of the
    tree's structure. Boxes cannot be changed; `replace` makes new ones. Two boxes are equal if type, names, mesh and
    values are; the hash sees all but the value.

    Args:
      value: an array, or anything else: a description of an array, a pytree of arrays with the same axes, another box.
      names: one entry for each leading dimension: a device axis, a tuple of them, None for a dimension that is
        not sharded, or ``PartitionSpec.UNCONSTRAINED``.
      mesh: the mesh to constrain the value on; by default the surrounding one.

    Raises:
      MetadataError: ``names`` is no sequence of such entries.

    A subclass may keep further attributes of its own, hashable ones; it is a pytree node by itself.

    Example:
      >>> import jax.numpy as jnp
      >>> from manymesh import meta
      >>> box = meta.Partitioned(jnp.ones((4, 8)), ("data", None))
      >>> box
      Partitioned(float32[4,8], names=('data', None))
      >>> box.get_partition_spec()
      P('data', None)
    """

    __slots__ = ("_axes", "_value")

    _value: Any
    _axes: Axes

    def __init__(self, value: A, names: Iterable[Any], mesh: AnyMesh | None = None) -> None:
        self._value = value
        self._axes = make_axes(check_names(names, type(self).__name__), mesh)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _register(cls)
        for hook in _subclass_hooks:
            hook(cls)

    # Getters written in C: boxes are read more often than anything else about them.
    value = property(operator.attrgetter("_value"), doc="What is in the box.")
    names = property(operator.attrgetter("_axes.names"), doc="One entry for each leading dimension.")
    mesh = property(operator.attrgetter("_axes.mesh"), doc="The mesh of the box itself, or None.")
    # Flax's bridge to NNX calls vars() on every box before it asks for anything else.
    __dict__ = property(lambda self: self._fields())

    def unbox(self, apply_constraint: bool = True) -> A:
        """The value, constrained to its sharding where a mesh is known.

        In a task, the task says what the names mean on its submesh. Elsewhere the mesh is the box's own, else the
        one of `jax.set_mesh`; without either the value comes out as it is. Auto axes take a constraint, Explicit axes a
        reshard, and Manual axes (inside `jax.shard_map`) nothing.

        Args:
          apply_constraint: False gives the value as it is.

        Raises:
          MetadataError: there are more names than dimensions.
          AxisError: the mesh has no such axis.
        """
        if apply_constraint and is_active(self._axes.mesh):
            return cast(A, self._constrained())
        return cast(A, self._value)

    def _constrained(self) -> Any:
        return constrain(self._value, self._axes.names, self._axes.mesh, self)

    def _fields(self) -> dict[str, Any]:
        return {"value": self._value, "names": self._axes.names, "mesh": self._axes.mesh}

    def replace_boxed(self, val: PyTree) -> PyTree:
        """These names around another value."""
        return self._with(val, self._axes)

    def replace(self: Self, **updates: Any) -> Self:
        """A box with some of ``value``, ``names`` and ``mesh`` replaced.

        Raises:
          TypeError: there is no such field.
        """
        value, axes = updates.pop("value", self._value), self._axes
        names = check_names(updates.pop("names", axes.names), type(self).__name__)
        mesh, rules = updates.pop("mesh", axes.mesh), self._rules_of(updates)
        if updates:
            raise TypeError(f"{type(self).__name__}.replace: no field is called {', '.join(map(repr, updates))}")
        return self._with(value, make_axes(names, mesh, rules, axes.logical))

    def _rules_of(self, updates: dict[str, Any]) -> Any:
        return self._axes.rules

    def add_axis(self: Self, index: int, params: Mapping[Any, Any] | None = None) -> Self:
        """The same value with a name for one more axis.

        Args:
          index: position of the new axis among the dimensions after the insertion; negative counts from their end.
            Past the last name, the dimensions between are unnamed.
          params: the name of the new axis under `PARTITION_NAME`, None for an axis that has none.

        Raises:
          MetadataError: ``params`` has no name; a negative index before the first dimension.
        """
        axes = with_axis(self._axes, index, axis_name(params, self), rank_of(self._value), self)
        return self._with(self._value, axes)

    def remove_axis(self: Self, index: int, params: Mapping[Any, Any] | None = None) -> Self:
        """The same value without the name of one axis; the inverse of `add_axis`.

        Args:
          index: position of the axis; negative counts from the end.
          params: the name that the axis must have, under `PARTITION_NAME`, None for none.

        Raises:
          MetadataError: ``params`` has no name; the axis has another one or does not exist.
        """
        axes = without_axis(self._axes, index, axis_name(params, self), rank_of(self._value), self)
        return self._with(self._value, axes)

    def get_partition_spec(self) -> PartitionSpec:
        """The names as a `PartitionSpec`."""
        return self._axes.spec

    def get_sharding(self, mesh: AnyMesh) -> NamedSharding:
        """The names as a `NamedSharding` on a mesh.

        Raises:
          AxisError: the mesh has no such axis.
        """
        check_axes(self._axes.names, mesh, repr(self))
        return NamedSharding(mesh, self._axes.spec)

    def to_nnx_metadata(self) -> dict[str, Any]:
        """The fields of this box under the names that a Flax NNX ``Variable`` gives them."""
        return {"value": self._value, "out_sharding": self._axes.names, "mesh": self._axes.mesh}

    @classmethod
    def from_nnx_metadata(cls, metadata: Mapping[str, Any]) -> Any:
        """A box from the value and the metadata of a Flax NNX ``Variable``; what a box does not have is left out."""
        names = metadata.get("out_sharding", metadata.get("sharding"))
        return cls(metadata["value"], () if names is None else names, metadata.get("mesh"))

    def _with(self: Self, value: PyTree, axes: Axes) -> Self:
        new = object.__new__(type(self))
        for name, state in own_state(self):
            object.__setattr__(new, name, state)
        new._value, new._axes = value, axes
        return new

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Partitioned) or type(self) is not type(other):
            return NotImplemented
        return self._axes == other._axes and own_state(self) == own_state(other) and _same(self._value, other._value)

    def __hash__(self) -> int:
        return hash((type(self), self._axes, own_state(self)))

    def __repr__(self) -> str:
        value = self._value
        text = describe(value) if hasattr(value, "dtype") else repr(value)
        parts = [text, f"names={self._axes.names}"]
        if self._axes.mesh is not None:
            parts.append(f"mesh={dict(self._axes.mesh.shape)}")
        if self._axes.rules is not None:
            parts.append(f"rules={self._axes.rules}")
        parts += [f"{name}={state!r}" for name, state in own_state(self)]
        return f"{type(self).__name__}({', '.join(parts)})"


# --- subclasses -----------------------------------------------------------------------------------

_subclass_hooks: list[Callable[[type], None]] = []


def on_subclass(hook: Callable[[type], None]) -> None:
    """Calls a function with `Partitioned`, with all its subclasses and with every later one."""
    pending: list[type] = [Partitioned]
    while pending:
        cls = pending.pop()
        hook(cls)
        pending.extend(cls.__subclasses__())
    _subclass_hooks.append(hook)


def own_state(box: PyTree) -> tuple[tuple[str, Any], ...]:
    """The attributes that a subclass keeps besides value and metadata, by name."""
    if type(box) in COMPACT:
        return ()
    state = dict(vars(box)) if type(box).__dictoffset__ else {}
    for cls in type(box).__mro__:
        if issubclass(cls, Partitioned) and cls not in COMPACT:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(box, name) and name not in ("__dict__", "__weakref__"):
                    state[name] = getattr(box, name)
    return tuple(sorted(state.items()))


def register_compact(cls: type) -> None:
    """Registers a class whose instances have a value and metadata and nothing else."""

    def flatten(box: PyTree) -> tuple[tuple[Any], Axes]:
        return (box._value,), box._axes

    def flatten_with_keys(box: PyTree) -> tuple[tuple[tuple[Any, Any]], Axes]:
        return ((_KEY, box._value),), box._axes

    def unflatten(axes: Axes, children: Any) -> Any:
        box: Any = object.__new__(cls)
        (box._value,) = children
        box._axes = axes
        return box

    COMPACT.add(cls)
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


def _register(cls: type) -> None:
    if "_compact" in cls.__dict__:
        register_compact(cls)
        return

    def flatten(box: PyTree) -> tuple[tuple[Any], Any]:
        return (box._value,), (box._axes, own_state(box))

    def flatten_with_keys(box: PyTree) -> tuple[tuple[tuple[Any, Any]], Any]:
        return ((_KEY, box._value),), (box._axes, own_state(box))

    def unflatten(aux: Any, children: Any) -> Any:
        box: Any = object.__new__(cls)
        for name, state in aux[1]:
            object.__setattr__(box, name, state)
        (box._value,) = children
        box._axes = aux[0]
        return box

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


register_compact(Partitioned)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    structure: Any = jax.tree_util.tree_structure(a)
    if structure != jax.tree_util.tree_structure(b):
        return False
    return all(map(_same_leaf, jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b)))


def _same_leaf(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return False
    if hasattr(a, "__array__") or hasattr(b, "__array__"):
        same_kind = getattr(a, "shape", None) == getattr(b, "shape", None) and (
            getattr(a, "dtype", None) == getattr(b, "dtype", None)
        )
        return same_kind and bool(np.all(a == b))
    return bool(a == b)


def with_partitioning(
    fn: Callable[P, A], names: Iterable[Any], mesh: AnyMesh | None = None
) -> Callable[P, Partitioned[A]]:
    """Wraps a function, usually an initializer, so that its result comes in a `Partitioned` box.

    Args:
      fn: any function.
      names: one entry for each leading dimension of its result, as in `Partitioned`.
      mesh: the mesh of the box; by default the surrounding one is used.

    Raises:
      MetadataError: ``names`` is no sequence of names.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from manymesh import meta
      >>> init = meta.with_partitioning(jax.nn.initializers.ones, (None, "model"))
      >>> init(jax.random.key(0), (2, 4), jnp.float32).names
      (None, 'model')
    """
    names = check_names(names, "with_partitioning")

    @functools.wraps(fn)
    def boxed(*args: P.args, **kwargs: P.kwargs) -> Partitioned[A]:
        return Partitioned(fn(*args, **kwargs), names, mesh)

    return boxed
