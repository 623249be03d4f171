"""Compiling in tests: what one test has compiled another one uses, and small programs are lowered faster.

Nothing else changes: what is compiled is what would be, and JAX reports each compilation as if it had happened, so that
tests count the same.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from importlib.metadata import version
from typing import Any

KEPT = 2048  # executables; tests that compile the same are mostly in one file


def _remember_executables() -> None:
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
        made = make()
        with lock:
            known[key] = made
            if len(known) > KEPT:
                known.popitem(last=False)
        return made

    compiler.backend_compile_and_load = backend_compile_and_load


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
    """Changes JAX in this process, once; imports it."""
    _remember_executables()
    _trust_lowering()
    if version("jax").startswith("0.10."):
        _share_contexts()
