"""`save` and `restore`: one checkpoint, by its path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from .. import _compat
from .._errors import ArgumentError, CheckpointError
from .._types import PyTree
from ._format import read_metadata, translated
from ._read import read
from ._write import prepare

T = TypeVar("T")


@_compat.boundary
def save(path: str | os.PathLike[str], tree: PyTree, *, metadata: Any = None) -> None:
    """Saves a pytree, and returns when it is on disk.

    It is written under another name and renamed when it is complete: a directory with this name is a whole checkpoint, or
    not there. Orbax reads it, with ``StandardCheckpointer`` or ``PyTreeCheckpointer``. In several processes each calls it
    with the same tree and writes the shards it has, to a file system that all of them see.

    Args:
      path: directory that is made.
      tree: any pytree: arrays on any submeshes, of NumPy, numbers, typed random keys. Functions, and text in fields of
        classes, as in modules of Equinox, belong to the program and are left out; other leaves are refused, or warned of
        where they are fields of classes.
      metadata: anything that JSON can say, as the position in the data. In several processes the same in each; what each
        has one of is given as `ByProcess`.

    Raises:
      CheckpointError: there is a checkpoint of this name, a leaf cannot be saved, a process could not write, or processes save
        different trees, values of the host or metadata; nothing is saved then.

    Example:
      >>> import tempfile, jax.numpy as jnp, manymesh as mm
      >>> path = tempfile.mkdtemp() + "/first"
      >>> mm.checkpoint.save(path, {"w": jnp.ones((4, 2)), "step": 3}, metadata={"batch": 12})
      >>> state = mm.checkpoint.restore(path, {"w": jnp.zeros((4, 2)), "step": 0})
      >>> state["w"].shape, state["step"], mm.checkpoint.metadata(path)
      ((4, 2), 3, {'batch': 12})
    """
    writing = prepare(as_path(path), None, tree, metadata, keep=False)
    with translated(f"{writing.path}: nothing was saved"):
        writing.run()


@overload
def restore(path: str | os.PathLike[str]) -> PyTree: ...
@overload
def restore(
    path: str | os.PathLike[str], like: T, *, stacked: Mapping[str, str] | None = None, cast: bool = False
) -> T: ...
@_compat.boundary
def restore(
    path: str | os.PathLike[str], like: PyTree = None, *, stacked: Mapping[str, str] | None = None, cast: bool = False
) -> PyTree:
    """Restores a pytree, each array where `like` says, whatever it was sharded over when it was saved.

    This process reads the parts of arrays that its devices get, and nothing else. Checkpoints of Orbax are read too. What
    `like` puts on devices of several processes, all of these restore, or none.

    Args:
      path: directory of a checkpoint, by `save`, `Manager` or Orbax.
      like: pytree of what is wanted. An array, or a ``jax.ShapeDtypeStruct`` with a sharding, comes back with that sharding
        (`argument_of` gives those of a step's argument); a ``ShapeDtypeStruct`` without one and an array of NumPy, as an
        array of NumPy; a number as a number; other leaves as they are. Arrays of the checkpoint that it does not name
        are not read; boxes (`manymesh.meta.Partitioned`) may be on one side only. None: everything that was saved, as
        arrays of NumPy in dictionaries and lists.
      stacked: what stacked layers are called, and what single ones, as ``{"layers": "layer_{}"}`` or
        ``{"blocks": "blocks/{}"}``. Wherever a name has the one and the checkpoint the other, layers are taken out of
        their stack, or stacked along a new first dimension.
      cast: whether arrays of another dtype are converted, as by ``astype`` of JAX.

    Raises:
      CheckpointNotFoundError: there is no checkpoint, or it was not finished.
      CheckpointError: leaves are missing, have other shapes or dtypes, or are not divided by their shardings, of which the first
        are listed before anything is read. Or it cannot be read, or other processes restore another one.
    """
    return read(lambda: as_path(path), like, stacked, cast)


@_compat.boundary
def metadata(path: str | os.PathLike[str]) -> Any:
    """What was saved as ``metadata=`` beside a checkpoint; None if nothing was.

    Args:
      path: directory of the checkpoint.

    Raises:
      CheckpointNotFoundError: there is no checkpoint, or it was not finished.
      CheckpointError: it cannot be read.
    """
    return read_metadata(as_path(path))


def as_path(path: str | os.PathLike[str]) -> Path:
    """The directory that a user means.

    Raises:
      ArgumentError: it is no path.
      CheckpointError: it is on something that is no file system.
    """
    try:
        given = os.fsdecode(path)
    except TypeError:
        raise ArgumentError(f"expected is the path of a directory, found {type(path).__name__} {path!r}") from None
    if "://" in given:
        raise CheckpointError(
            f"{given}: a checkpoint becomes current by a rename, which object stores do not have; mount it as a file system"
        )
    return Path(given).expanduser().absolute()
