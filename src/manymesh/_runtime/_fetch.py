"""`fetch`: values of arrays, wherever they are."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from .. import _compat
from .._distributed._agree import agree
from .._distributed._words import in_a_line
from .._distributed._world import Waiting, World, world
from .._errors import ProcessError
from .._plan._digest import describe
from .._types import PyTree
from ._carrier import Piece
from ._carriers import carrier
from ._exchange import everywhere
from ._ownership import not_joined
from ._processes import committed_sharding


@_compat.boundary
def fetch(tree: PyTree, process: int | None = None) -> PyTree:
    """The values of a tree of arrays, in every process.

    In a run of several processes an array is in the memory of those that own its devices. Every process has to call
    this, with a tree of the same arrays; it waits until the values are there.

    Args:
      tree: a pytree of arrays on any devices, and of host values, which are those of this process.
      process: the only process that gets the values; by default each does.

    Returns:
      The tree with `numpy.ndarray` in place of arrays; typed random keys as their words. With ``process``, the leaves are
      None in the others.

    Raises:
      ProcessError: `process` is no process; the processes gave different arrays, or did not join each other.

    Example:
      >>> import jax.numpy as jnp, manymesh as mm
      >>> mm.fetch({"w": jnp.arange(3)})
      {'w': array([0, 1, 2], dtype=int32)}
    """
    processes = world()
    count = 1 if processes is None else processes.count
    if process is not None and not (isinstance(process, (int, np.integer)) and 0 <= process < count):
        raise ProcessError(f"fetch: process={process!r}, but there are processes 0 to {count - 1}")
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    if processes is None:
        if any(not (x.is_fully_addressable or x.is_fully_replicated) for x in leaves if isinstance(x, jax.Array)):
            raise ProcessError(f"fetch: an array is on devices of other processes; {not_joined()}")
        return structure.unflatten([np.asarray(_compat.key_words(x)) for x in leaves])
    with processes.in_turn("fetch"):
        return structure.unflatten(_fetched(processes, leaves, process))


def _fetched(processes: World, leaves: list[Any], process: int | None) -> list[Any]:
    """The values of leaves, in all processes or in one of them; None in the others."""
    takers = range(processes.count) if process is None else (process,)
    shardings = [committed_sharding(x) for x in leaves]
    label = f"manymesh.fetch (tree {_agree(processes, leaves, shardings, process)})"
    number = processes.begin(label)
    carrier().begin(number)
    finished: list[bool] = []
    processes.waiting = Waiting(
        number, label, processes.others, lambda: bool(finished), lambda: "a value is waited for"
    )
    values: list[Any] = []
    try:
        for k, (x, sharding) in enumerate(zip(leaves, shardings, strict=True)):
            values.append(_value(k, _compat.key_words(x), sharding, takers))
            if processes.process not in takers:
                values[-1] = None
    except BaseException as error:
        processes.fails(number, in_a_line(error))  # the script may catch it, and the others wait for what was to come
        raise
    finally:
        finished.append(True)
    return values


def _agree(processes: World, leaves: list[Any], shardings: list[Sharding | None], taker: int | None) -> int:
    """The first time that such leaves are fetched, all processes have to mean the same. Gives which of these it was."""
    said = (
        f"for {'all processes' if taker is None else f'process {taker}'}",
        *(
            f"leaf {k}: {(np.shape(x), str(jax.typeof(x).dtype)) if s is not None else None} {describe(s)}"
            for k, (x, s) in enumerate(zip(leaves, shardings, strict=True))
        ),
    )
    if said not in processes.agreed:
        number = processes.begin("manymesh.fetch of a new tree")
        agree(processes, "manymesh.fetch", number, {"arrays": "\n".join(said)}, lambda _: said)
        processes.agreed[said] = len(processes.agreed) + 1
    return processes.agreed[said]


def _value(number: int, x: Any, sharding: Sharding | None, takers: Any) -> Any:
    """One leaf: its pieces go from their owners to each taker that lacks them."""
    if sharding is None or x.size == 0:
        return np.asarray(x) if sharding is None else np.zeros(x.shape, x.dtype)
    if sharding == everywhere():
        return np.asarray(x.addressable_shards[0].data)
    sharding, me = x.sharding, jax.process_index()
    owners: dict[Any, list[Any]] = {}
    for d, place in sharding.devices_indices_map(x.shape).items():
        key = tuple((s.indices(n)[0], s.indices(n)[1]) for s, n in zip(place, x.shape, strict=True))
        owners.setdefault(key, []).append(d)
    local = {shard.device: shard.data for shard in x.addressable_shards}
    first = {d.process_index: d for d in reversed(jax.devices())}
    pieces, places = [], []
    for taker in takers:
        for key, (giver, *others) in owners.items():
            if all(d.process_index != taker for d in (giver, *others)):
                shape = tuple(b - a for a, b in key)
                ends = SingleDeviceSharding(giver), SingleDeviceSharding(first[taker])
                pieces.append(Piece(0, giver, first[taker], giver.process_index, taker, shape, x.dtype, *ends))
                places.append(key)
    arrived = carrier().bind(number, pieces)(lambda p: jax.device_put(local[p.giver], p.giver, may_alias=False))
    if me not in takers:
        return None
    out = np.empty(x.shape, x.dtype)
    for key, givers in owners.items():
        mine = next((d for d in givers if d.process_index == me), None)
        if mine is not None:
            out[_cut(key)] = np.asarray(local[mine])
    here = [key for p, key in zip(pieces, places, strict=True) if p.target == me]
    for key, piece in zip(here, arrived, strict=True):
        out[_cut(key)] = np.asarray(piece)
    return out


def _cut(key: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in key)
