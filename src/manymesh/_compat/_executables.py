"""Executables that are written out, and loaded again for other devices."""

from __future__ import annotations

import io
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax.experimental import serialize_executable
from jax.sharding import Mesh


class _Loader(serialize_executable._JaxPjrtUnpickler):
    """Reads what `save_executable` wrote with the devices of another mesh in place of those it was written for."""

    def __init__(self, file: io.BytesIO, source: Mesh, target: Mesh) -> None:
        targets = list(target.devices.flat)
        super().__init__(file, targets[0].client, targets)  # type: ignore[no-untyped-call]
        self.devices_by_id = {old.id: new for old, new in zip(source.devices.flat, targets, strict=True)}
        self.options = compiler.get_compile_options(
            1, len(targets), np.array([[d.id for d in targets]]), backend=targets[0].client
        )

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "exec":
            # Without options the executable would still be assigned to the devices that it was compiled for.
            return self.backend.deserialize_executable(pid[1], self.execution_devices, self.options)
        return super().persistent_load(pid)  # type: ignore[no-untyped-call]


def caches_on_disk() -> bool:
    """Whether JAX keeps executables on disk."""
    return all(getattr(jax.config, name) for name in ("jax_enable_compilation_cache", "jax_compilation_cache_dir"))


def save_executable(compiled: Any) -> Any:
    """An executable in a form that `load_executable` reads, or None if there is none.

    There is none where host callbacks or constants of this process are part of it.
    """
    unloaded = compiled._executable._unloaded_executable
    if unloaded.host_callbacks or unloaded.keepalive or unloaded.ordered_effects or unloaded.unordered_effects:
        return None
    try:
        return serialize_executable.serialize(compiled)
    except Exception:  # backends say in their own ways that they cannot
        return None


def load_executable(saved: Any, source: Mesh, target: Mesh) -> Any:
    """An executable saved for the devices of one mesh, loaded for those of another; None where that does not work."""
    if saved is None:
        return None
    data, in_tree, out_tree = saved
    try:
        unloaded, args_info, no_kwargs = _Loader(io.BytesIO(data), source, target).load()
        loaded = unloaded.load()
    except Exception:  # as above
        return None
    return jax.stages.Compiled(loaded, [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)
