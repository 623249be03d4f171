"""Executables that are written out, and loaded again for other devices."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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


def call_of(compiled: Any, avals: Sequence[Any]) -> Callable[..., Any]:
    """What is called to run an executable on arrays.

    Args:
      compiled: a ``jax.stages.Compiled`` whose arguments are arrays, none of which it leaves out.
      avals: what they are. JAX 0.10 checks the layouts of those that have elements smaller than a byte against other
        layouts than it gives them, so that only the call behind the check takes them.
    """
    if any(_is_small(a.dtype) for a in avals) and _checks_small_elements():
        unchecked = compiled._executable.unsafe_call
        return lambda *args: compiled.out_tree.unflatten(unchecked(*args))
    if compiled._call is None:  # as `Compiled.__call__` does when it is called first
        compiled._call = compiled._executable.create_cpp_call(compiled._params)
    # Without that method in between, which takes longer than all that the executor adds to a call.
    called: Callable[..., Any] = compiled._call or compiled
    return called


def _is_small(dtype: Any) -> bool:
    """Whether an element takes less than a byte on a device; JAX keeps a bool in one."""
    if jnp.issubdtype(dtype, jnp.integer):
        return bool(jnp.iinfo(dtype).bits < 8)  # type: ignore[no-untyped-call]
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8)  # type: ignore[no-untyped-call]


@functools.cache
def _checks_small_elements() -> bool:
    """Whether this JAX refuses to run an executable ahead of time on an array of int4 that was put where it runs."""
    x = jax.device_put(np.zeros(2, jnp.int4), jax.local_devices()[0])
    try:
        jax.jit(lambda x: x.astype(jnp.int8)).lower(x).compile()(x)
    except ValueError:
        return True
    return False
