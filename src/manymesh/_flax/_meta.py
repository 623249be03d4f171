"""Making ManyMesh's boxes at home in Flax: Linen, its serialization, its tables, and the bridge to NNX.

Imported only by the Flax adapters. Flax looks for boxes with ``isinstance`` on its own classes and serializes by exact
type, so it has to be told about ours once; after `register_with_flax`, ``param``, ``scan``, ``vmap``, ``tabulate``,
``TrainState`` and ``flax.serialization`` treat them like Flax's own. Bytes written from Flax's boxes can be read into
ours and the other way round.
"""

from __future__ import annotations

import threading
from typing import Any

import flax.core.meta
import flax.linen
import flax.serialization

from .. import meta
from .._errors import MetadataError
from ..meta._axes import Axes
from ..meta._box import content_of
from ..meta._named import axes_of_box
from ..meta._partitioned import on_subclass

_lock = threading.Lock()
_done = False


def register_with_flax() -> None:
    """Tells Flax about the boxes of ManyMesh, also about subclasses that are defined later. Again is no harm.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from manymesh import meta
      >>> from manymesh._flax._meta import register_with_flax
      >>> register_with_flax()
      >>> model = nn.Dense(4, kernel_init=meta.with_partitioning(nn.initializers.ones, (None, "model")))
      >>> variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 2)))
      >>> nn.get_partition_spec(variables)["params"]["kernel"]
      P(None, 'model')
    """
    global _done
    with _lock:
        if _done:
            return
        flax.core.meta.AxisMetadata.register(meta.AxisMetadata)  # type: ignore[type-abstract]
        flax.core.meta.Partitioned.register(meta.Partitioned)  # for nn.tabulate, which prints names of these only
        on_subclass(register_serialization)
        _done = True


def register_serialization(cls: type) -> None:
    """Teaches ``flax.serialization`` a class of boxes: the state is the value alone, as for Flax's own boxes.

    Boxes of ManyMesh and their subclasses are registered by `register_with_flax`; this is for other boxes, which
    must have ``unbox`` and ``replace_boxed``. Metadata are code, not state: they come from the target.

    Args:
      cls: the exact class.
    """

    def to_state(box: Any) -> dict[str, Any]:
        return {"value": flax.serialization.to_state_dict(content_of(box))}

    def from_state(box: Any, state: dict[str, Any]) -> Any:
        if not isinstance(state, dict) or set(state) != {"value"}:
            found = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise MetadataError(
                f"{box!r} expects a state with the single key 'value', found {found}; load a state without boxes "
                "into meta.unbox(target), then use meta.replace_boxed"
            )
        return box.replace_boxed(flax.serialization.from_state_dict(content_of(box), state["value"], name="value"))

    flax.serialization.register_serialization_state(cls, to_state, from_state, override=True)


def to_flax(tree: Any) -> Any:
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

    def convert(box: Any) -> Any:
        inner = to_flax(content_of(box))
        if not isinstance(box, meta.Partitioned):
            return box.replace_boxed(inner)
        if isinstance(box, meta.LogicallyPartitioned):
            return flax.linen.LogicallyPartitioned(inner, box.names, box.mesh, box.rules)
        return flax.core.meta.Partitioned(inner, box.names, box.mesh)

    return meta.map_axis_meta(convert, tree)


def from_flax(tree: Any) -> Any:
    """Replaces Flax's boxes in a tree by those of ManyMesh.

    Args:
      tree: any pytree; other boxes stay.

    Example:
      >>> import flax.linen as nn
      >>> from manymesh._flax._meta import from_flax
      >>> from_flax({"w": nn.Partitioned(0.0, ("model",))})
      {'w': Partitioned(0.0, names=('model',))}
    """

    def convert(box: Any) -> Any:
        inner = from_flax(content_of(box))
        # Ours are virtual subclasses of Flax's: only exact types tell them apart.
        if type(box) not in (flax.core.meta.Partitioned, flax.linen.LogicallyPartitioned):
            return box.replace_boxed(inner)
        axes: Axes = axes_of_box(box)
        if axes.logical:
            return meta.LogicallyPartitioned(inner, axes.names, axes.mesh, axes.rules)
        return meta.Partitioned(inner, axes.names, axes.mesh)

    return meta.map_axis_meta(convert, tree)
