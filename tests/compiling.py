"""Compiling in tests: what one test has compiled another one uses, and small programs are lowered faster.

Nothing else changes, but that `mm.jit` of a function again is made anew: what is compiled is what would be, and JAX reports each
compilation as if it had happened, so that tests count the same.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import threading
from collections import OrderedDict
from importlib.metadata import version
from pathlib import Path
from typing import Any

KEPT = 2048  # executables; tests that compile the same are mostly in one file
# The variable that names a folder: later runs use its executables again, and other processes of this one.
FOLDER = "MANYMESH_TESTS_EXECUTABLES"


def _remember_executables(store: _Store | None) -> None:
    """An executable for the same text, options and devices is used again."""
    from jax._src import compiler

    compile_and_load, lock = compiler.backend_compile_and_load, threading.Lock()
    known: OrderedDict[Any, Any] = OrderedDict()

    def backend_compile_and_load(
        backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Any
    ) -> Any:
        def make() -> Any:
            return compile_and_load(backend, module, executable_devices, options, host_callbacks)

        if host_callbacks:  # they belong to one test
            return make()
        text = module.operation.get_asm(enable_debug_info=False)
        devices = tuple(d.id for d in executable_devices)
        key = hashlib.sha256(text.encode()).digest(), options.SerializeAsString(), backend.platform, devices
        with lock:
            if key in known:
                known.move_to_end(key)
                return known[key]
        alone = all(d.process_index == backend.process_index() for d in executable_devices)
        if store and alone and backend.platform == "cpu":
            made = store.load(key, backend, executable_devices, options) or store.save(key, make())
        else:
            made = make()
        with lock:
            known[key] = made
            if len(known) > KEPT:
                _, dropped = known.popitem(last=False)
                if store:
                    store.drop(dropped)
        return made

    compiler.backend_compile_and_load = backend_compile_and_load


class _Store:
    """Executables on disk."""

    def __init__(self, folder: Path) -> None:
        """Uses what this JAX has compiled on such a machine under these flags, and nothing else."""
        surroundings = version("jaxlib"), platform.machine(), _features(), os.environ.get("XLA_FLAGS")
        self.folder = folder / hashlib.sha256(repr(surroundings).encode()).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.loaded: dict[int, tuple[Any, Path]] = {}
        self._write_what_was_read()

    def _path(self, key: Any) -> Path:
        return self.folder / hashlib.sha256(repr(key).encode()).hexdigest()

    def load(self, key: Any, backend: Any, devices: Any, options: Any) -> Any:
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        os.utime(path)
        try:
            executable = backend.deserialize_executable(data, devices, options)
        except Exception:  # whatever is wrong with the file, there is another way
            return None
        self.loaded[id(executable)] = executable, path
        return executable

    def save(self, key: Any, executable: Any) -> Any:
        path = self._path(key)
        part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        part.write_bytes(executable.serialize())
        part.replace(path)
        return executable

    def drop(self, executable: Any) -> None:
        self.loaded.pop(id(executable), None)

    def _write_what_was_read(self) -> None:
        """XLA on the CPU leaves functions out of an executable that it has read before."""
        from jax.experimental import serialize_executable

        pickler = serialize_executable._JaxPjrtPickler
        persistent_id = pickler.persistent_id

        def same(self_: Any, obj: Any) -> Any:
            if id(obj) in self.loaded:
                return "exec", self.loaded[id(obj)][1].read_bytes()
            return persistent_id(self_, obj)

        pickler.persistent_id = same


def _features() -> str:
    """What this machine's processor can do, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _trust_lowering() -> None:
    """What JAX has lowered is not verified before XLA gets it, which does so again."""
    from jax._src.lib.mlir import ir

    ir.Operation.verify = lambda operation: True


def _share_contexts() -> None:
    """The programs of a thread share an MLIR context, fifty at a time, as newer JAX does itself by ten.

    JAX 0.10 makes one for each program, which takes longer than the rest of lowering a small one.
    """
    from jax._src.interpreters import mlir

    make, shared = mlir.make_ir_context, threading.local()

    def make_ir_context() -> Any:
        if getattr(shared, "left", 0) == 0:
            shared.context, shared.left = make(), 50
        shared.left -= 1
        return shared.context

    mlir.make_ir_context = make_ir_context


@functools.cache
def set_up() -> None:
    """Changes JAX in this process, once; imports it.

    Each `mm.jit` compiles for itself, too: a test may have changed the compiler since it was called on the same function.
    """
    from manymesh._api import _kept

    _kept.KEEPING = ()
    folder = os.environ.get(FOLDER)
    _remember_executables(_Store(Path(folder)) if folder else None)
    _trust_lowering()
    if version("jax").startswith("0.10."):
        _share_contexts()
