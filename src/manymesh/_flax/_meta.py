"""Boxes of ManyMesh as those of Flax and the other way round."""

from __future__ import annotations

from typing import Any

import flax.core.meta
import flax.linen

from .. import meta
from .._types import PyTree
from ..meta._axes import Axes
from ..meta._box import content_of
from ..meta._named import axes_of_box


def to_flax(tree: PyTree) -> Any:
    """Replaces the boxes of ManyMesh in a tree by Flax's.

    Args:
      tree: any pytree; other boxes, Flax's too, stay.

    Returns:
      The tree with ``flax.core.meta.Partitioned`` and ``flax.linen.LogicallyPartitioned`` boxes, boxes in boxes too.
      Attributes that a subclass adds are left behind.

    Example:
      >>> from manymesh import meta
      >>> from manymesh._flax._meta import to_flax
      >>> type(to_flax(meta.Partitioned(0.0, ("model",)))).__module__
      'flax.core.meta'
    """

    def convert(box: PyTree) -> PyTree:
        inner = to_flax(content_of(box))
        if not isinstance(box, meta.Partitioned):
            return box.replace_boxed(inner)
        if isinstance(box, meta.LogicallyPartitioned):
            return flax.linen.LogicallyPartitioned(inner, box.names, box.mesh, box.rules)
        return flax.core.meta.Partitioned(inner, box.names, box.mesh)

    return meta.map_axis_meta(convert, tree)


def from_flax(tree: PyTree) -> Any:
    """Replaces Flax's boxes in a tree by those of ManyMesh.

    Args:
      tree: any pytree; other boxes stay.

    Example:
      >>> import flax.linen as nn
      >>> from manymesh._flax._meta import from_flax
      >>> from_flax({"w": nn.Partitioned(0.0, ("model",))})
      {'w': Partitioned(0.0, names=('model',))}
    """

    def convert(box: PyTree) -> PyTree:
        inner = from_flax(content_of(box))
        # Ours are virtual subclasses of Flax's: only exact types tell them apart.
        if type(box) not in (flax.core.meta.Partitioned, flax.linen.LogicallyPartitioned):
            return box.replace_boxed(inner)
        axes: Axes = axes_of_box(box)
        if axes.logical:
            return meta.LogicallyPartitioned(inner, axes.names, axes.mesh, axes.rules)
        return meta.Partitioned(inner, axes.names, axes.mesh)

    return meta.map_axis_meta(convert, tree)
