"""Initializers that name the axes of the parameters they make."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

from .. import meta
from .._errors import MetadataError
from .._types import PyTree


def shard_axes(*names: Any, init: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """An initializer that names the axes of the parameter it makes.

    Args:
      *names: one entry for each dimension: a logical name of the task, or a device axis; a tuple of them; or None
        for a dimension that is not sharded.
      init: the initializer of the value. By default zeros for a vector (a bias), else
        ``nn.initializers.lecun_normal()``, as in Flax's own layers.

    Returns:
      An initializer whose result is a `manymesh.meta.Partitioned` box. It serves layers that make a flat kernel
      and shape it afterwards (``nn.DenseGeneral``, attention) as well: the names are those of the final shape.

    Raises:
      MetadataError: an entry is no name; when the parameter is made, it has another number of dimensions.

    Example:
      >>> import jax, flax.linen as nn
      >>> from manymesh.flax import shard_axes
      >>> dense = nn.Dense(16, kernel_init=shard_axes("x", None), bias_init=shard_axes(None))
      >>> params = dense.init(jax.random.key(0), jax.numpy.ones((4, 9)))["params"]
      >>> params["kernel"].names
      ('x', None)
    """
    if init is not None and not callable(init):
        raise MetadataError(f"shard_axes: init has to be an initializer, a function, found {type(init).__name__}")
    if any(map(callable, names)):
        raise MetadataError(f"shard_axes: found a function among the names {names}; write init= for the initializer")
    boxed = meta.with_partitioning(init or _default_init, names)

    @functools.wraps(boxed)
    def make(key: Any, shape: Any, *args: Any, **kwargs: Any) -> Any:
        if len(names) < len(shape):
            raise _wrong_number(names, shape)
        box = boxed(key, shape, *args, **kwargs)
        return box if len(names) == len(shape) else Flat(box)

    return make


def _default_init(key: Any, shape: Any, *args: Any, **kwargs: Any) -> Any:
    init = nn.initializers.lecun_normal() if len(shape) > 1 else nn.initializers.zeros
    return init(key, shape, *args, **kwargs)


def _wrong_number(names: tuple[Any, ...], shape: Any) -> MetadataError:
    return MetadataError(
        f"shard_axes{names} names {len(names)} dimensions, but the parameter has shape {tuple(shape)}; "
        "give one name for each dimension, None for one that is not sharded"
    )


class Flat(meta.AxisMetadata[Any]):
    """A value that has yet to get the dimensions that its names speak of.

    Lives inside an initializer only: the layer takes the value out, shapes it, and puts it into the box of the names.
    One that stays in a tree of parameters has too many names, which is said as soon as somebody walks over that tree.
    """

    __slots__ = ("_box",)

    def __init__(self, box: meta.Partitioned[Any]) -> None:
        self._box = box

    def unbox(self) -> Any:
        """The flat value, unconstrained: the names do not fit it."""
        return self._box.value

    def replace_boxed(self, val: PyTree) -> PyTree:
        """The names around the value in its final shape."""
        if len(self._box.names) > len(getattr(val, "shape", self._box.names)):
            raise _wrong_number(self._box.names, val.shape)
        return self._box.replace_boxed(val)

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> Any:
        """Refused: nothing is known about the axes yet."""
        raise self._misfit()

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> Any:
        """Refused: nothing is known about the axes yet."""
        raise self._misfit()

    def _misfit(self) -> MetadataError:
        return _wrong_number(self._box.names, self._box.value.shape)

    def _flatten(self) -> Any:
        raise self._misfit()

    def __repr__(self) -> str:
        return f"<shard_axes{self._box.names} of a parameter of shape {self._box.value.shape}: too many names>"


jax.tree_util.register_pytree_node(Flat, Flat._flatten, lambda _, children: children)
